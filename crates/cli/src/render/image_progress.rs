//! How far work on one image after the other has come, as a line on standard error: a model is loaded first.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use machine::Bytes;

use crate::failure::Failure;
use crate::interrupt;
use crate::render::line::ProgressLine;
use crate::render::progress::{clear, duration, redraw};

/// Images at work.
pub struct ImageProgress {
    /// What is done with them: `captioning`.
    doing: &'static str,
    model_bytes: u64,
    state: Mutex<ImageProgressState>,
    interrupted: Arc<AtomicBool>,
}

struct ImageProgressState {
    loaded: u64,
    images: usize,
    done: usize,
    begun: Instant,
    drawn: Option<Instant>,
}

impl ImageProgress {
    /// Begins; from now on Ctrl-C ends the work in order.
    pub fn begin(doing: &'static str, model_bytes: u64) -> Result<Self, Failure> {
        let (begun, drawn) = (Instant::now(), Some(Instant::now()));
        let state = ImageProgressState { loaded: 0, images: 0, done: 0, begun, drawn };
        let interrupted = interrupt::flag()?;
        Ok(Self { doing, model_bytes, state: Mutex::new(state), interrupted })
    }

    /// Counts bytes of the model; answers whether to go on.
    pub fn on_loaded(&self, bytes: u64) -> bool {
        self.state().loaded += bytes;
        self.go_on()
    }

    /// The model is there.
    pub fn begin_images(&self, images: usize) {
        let mut state = self.state();
        (state.images, state.begun) = (images, Instant::now());
    }

    /// An image is done.
    pub fn on_image(&self) {
        self.state().done += 1;
    }

    /// Whether to go on. Asked often, so this is when the line is drawn.
    pub fn go_on(&self) -> bool {
        let mut state = self.state();
        if state.images > 0 || state.loaded > 0 {
            let mut drawn = state.drawn;
            redraw(&mut drawn, || self.line(&state));
            state.drawn = drawn;
        }
        !self.interrupted.load(Ordering::Relaxed)
    }

    fn state(&self) -> MutexGuard<'_, ImageProgressState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn line(&self, state: &ImageProgressState) -> ProgressLine {
        let ImageProgressState { loaded, images, done, begun, .. } = *state;
        if images == 0 {
            let share = loaded as f64 / self.model_bytes.max(1) as f64;
            return ProgressLine::new("loading")
                .bar(share.min(1.0))
                .part(0, Bytes(loaded).to_string());
        }
        let line = ProgressLine::new(self.doing).bar(done as f64 / images as f64);
        let line = line.part(0, format!("{done} of {images}"));
        if done == 0 {
            return line;
        }
        let left = begun.elapsed().as_secs_f64() / done as f64 * (images - done) as f64;
        line.part(1, format!("{} left", duration(left)))
    }
}

impl Drop for ImageProgress {
    fn drop(&mut self) {
        clear();
    }
}
