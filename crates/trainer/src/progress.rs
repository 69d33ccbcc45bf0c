//! Progress of the preparation of images or texts.

/// A step of that progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgressEvent {
    /// A phase begins.
    Phase {
        /// What it is called.
        name: &'static str,
        /// Images or texts that it will finish; 0 where bytes are counted alone.
        total: usize,
    },
    /// Bytes were read.
    Loaded(u64),
    /// An image or a text is finished.
    Done,
}

/// Called with each event, from several threads; returns whether to continue.
pub type ProgressFn<'a> = &'a (dyn Fn(ProgressEvent) -> bool + Sync);
