//! Each caption, and what was done, as a page.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::render::progress::duration;
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
