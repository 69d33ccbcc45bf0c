//! How far captions have come, as a line on standard error; each caption, and what was done, as a page.

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use machine::Bytes;
use serde::Serialize;

use crate::failure::Failure;
use crate::interrupt;
use crate::render::line::ProgressLine;
use crate::render::progress::{clear, duration, redraw};
use crate::render::sample::memory;
use crate::text::{BOLD, DIM, PLAIN, TextPage, WARN, plural};

/// A caption that was written.
#[derive(Serialize)]
pub struct CaptionRow {
    pub image: PathBuf,
    pub caption_file: PathBuf,
    pub caption: String,
    pub n_tokens: usize,
    /// Whether the model ended it; otherwise it was cut off.
    pub is_whole: bool,
    pub secs: f64,
}

/// An image or another file with a problem.
#[derive(Serialize)]
pub struct UncaptionedImage {
    pub image: PathBuf,
    pub problem: String,
    /// Whether it gets no caption for it.
    pub is_skipped: bool,
}

impl UncaptionedImage {
    pub fn new(image: &Path, problem: &dyn Display, is_skipped: bool) -> Self {
        Self { image: image.into(), problem: problem.to_string(), is_skipped }
    }
}

/// What was done in a folder, or would be.
#[derive(Default, Serialize)]
pub struct CaptionSummary {
    pub n_written: usize,
    /// Of those, how many reached the most tokens.
    pub n_cut_off: usize,
    /// Images that had a caption, and how many of them in metadata.
    pub n_captioned: usize,
    pub n_in_metadata: usize,
    /// Files that cannot be used, and images that turned out so at work.
    pub n_left_out: usize,
    pub n_failed: usize,
    /// Images that an interrupted run did not come to.
    pub n_left: usize,
    pub is_interrupted: bool,
    pub peak_bytes: usize,
    pub limit_bytes: usize,
    pub secs: f64,
}

/// What would be done.
#[derive(Serialize)]
pub struct CaptionPlan<'a> {
    pub images: Vec<PlannedCaption>,
    #[serde(flatten)]
    pub summary: &'a CaptionSummary,
}

/// An image without a caption.
#[derive(Serialize)]
pub struct PlannedCaption {
    pub image: PathBuf,
    pub caption_file: PathBuf,
}

/// Captions at work.
pub struct CaptioningProgress {
    model_bytes: u64,
    state: Mutex<CaptioningState>,
    interrupted: Arc<AtomicBool>,
}

struct CaptioningState {
    loaded: u64,
    images: usize,
    done: usize,
    begun: Instant,
    drawn: Option<Instant>,
}

impl CaptioningProgress {
    /// Begins; from now on Ctrl-C ends the work in order.
    pub fn begin(model_bytes: u64) -> Result<Self, Failure> {
        let (begun, drawn) = (Instant::now(), Some(Instant::now()));
        let state = CaptioningState { loaded: 0, images: 0, done: 0, begun, drawn };
        Ok(Self { model_bytes, state: Mutex::new(state), interrupted: interrupt::flag()? })
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

    fn state(&self) -> MutexGuard<'_, CaptioningState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn line(&self, state: &CaptioningState) -> ProgressLine {
        let CaptioningState { loaded, images, done, begun, .. } = *state;
        if images == 0 {
            let share = loaded as f64 / self.model_bytes.max(1) as f64;
            return ProgressLine::new("loading")
                .bar(share.min(1.0))
                .part(0, Bytes(loaded).to_string());
        }
        let line = ProgressLine::new("captioning").bar(done as f64 / images as f64);
        let line = line.part(0, format!("{done} of {images}"));
        if done == 0 {
            return line;
        }
        let left = begun.elapsed().as_secs_f64() / done as f64 * (images - done) as f64;
        line.part(1, format!("{} left", duration(left)))
    }
}

impl Drop for CaptioningProgress {
    fn drop(&mut self) {
        clear();
    }
}

/// An image with its caption.
pub fn line(row: &CaptionRow) -> String {
    let mut page = TextPage::new();
    page.line(BOLD, &row.image.display().to_string());
    page.line(PLAIN, &row.caption);
    page.finish()
}

/// Draws what was done.
pub fn page(done: &CaptionSummary) -> String {
    let mut page = TextPage::new();
    let written = plural(done.n_written, "caption");
    page.line(BOLD, &format!("{written} written{}", others(done)));
    if done.n_cut_off > 0 {
        let cut = plural(done.n_cut_off, "caption");
        page.line(WARN, &format!("{cut} cut off: give a larger --max-tokens"));
    }
    if done.is_interrupted {
        let left = plural(done.n_left, "image");
        page.line(WARN, &format!("interrupted: the same command goes on with {left}"));
    }
    if done.peak_bytes > 0 {
        page.line(DIM, &memory(done.peak_bytes, done.limit_bytes));
    }
    if done.n_written > 0 {
        let each = done.secs / done.n_written as f64;
        page.line(DIM, &format!("{}, {each:.1} s per image", duration(done.secs)));
    }
    page.finish()
}

/// Draws what would be done.
pub fn plan_page(plan: &CaptionPlan<'_>) -> String {
    let mut page = TextPage::new();
    let images = plural(plan.images.len(), "image");
    page.line(BOLD, &format!("{images} to caption{}", others(plan.summary)));
    for PlannedCaption { image, caption_file } in &plan.images {
        page.long_item("·", DIM, &format!("{} → {}", image.display(), caption_file.display()));
    }
    page.line(DIM, &memory(plan.summary.peak_bytes, plan.summary.limit_bytes));
    page.finish()
}

/// Images beside those at work.
fn others(summary: &CaptionSummary) -> String {
    let CaptionSummary { n_captioned, n_in_metadata, .. } = *summary;
    let text = match (n_captioned, n_in_metadata) {
        (0, _) => String::new(),
        (n, 0) => format!(", {} captioned already", plural(n, "image")),
        (n, of) => format!(", {} captioned already ({of} in metadata)", plural(n, "image")),
    };
    match summary.n_left_out + summary.n_failed {
        0 => text,
        n => text + &format!(", {n} left out"),
    }
}
