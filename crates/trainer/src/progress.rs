//! What happens while images or texts are prepared.

/// What happens meanwhile.
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

/// Told what happens; answers whether to go on. Called from several threads.
pub type ProgressFn<'a> = &'a (dyn Fn(ProgressEvent) -> bool + Sync);
