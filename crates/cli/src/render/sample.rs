//! How far images have come, as a line on standard error; and what was drawn, as a page.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use machine::Bytes;
use serde::Serialize;
use trainer::sample::SampleEvent;

use crate::failure::Failure;
use crate::interrupt;
use crate::render::line::ProgressLine;
use crate::render::plan::IN_BLOCKS;
use crate::render::progress::{clear, duration, redraw};
use crate::text::{BOLD, DIM, TextPage, bar};

/// What was done, or would be.
#[derive(Serialize)]
pub struct SampleSummary {
    pub peak_bytes: usize,
    pub limit_bytes: usize,
    pub phases: Vec<SamplePhase>,
    /// Whether both halves of guidance are computed at once.
    pub is_cfg_batched: bool,
    /// Whether a text encoder does not fit whole, and one block of it is in memory at a time.
    pub is_encoder_in_blocks: bool,
    /// Side of a decoder's tile in pixels, if the image is decoded in tiles.
    pub tile_pixels: Option<usize>,
    pub images: Vec<SampledImage>,
    pub secs: f64,
}

/// A part of the work.
#[derive(Serialize)]
pub struct SamplePhase {
    pub name: &'static str,
    pub peak_bytes: usize,
}

/// An image on disk.
#[derive(Serialize)]
pub struct SampledImage {
    pub path: PathBuf,
    /// The same in other formats.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub more: Vec<PathBuf>,
    pub prompt: String,
    pub seed: u64,
}

/// Images at work.
pub struct SamplingProgress {
    total_steps: usize,
    state: Mutex<SamplingState>,
    interrupted: Arc<AtomicBool>,
}

struct SamplingState {
    phase: &'static str,
    loaded: u64,
    steps: usize,
    first_step: Option<Instant>,
    drawn: Option<Instant>,
}

impl SamplingProgress {
    /// Begins; from now on Ctrl-C ends the work in order.
    pub fn begin(images: usize, steps: usize) -> Result<Self, Failure> {
        let state = SamplingState { phase: "", loaded: 0, steps: 0, first_step: None, drawn: None };
        let interrupted = interrupt::flag()?;
        Ok(Self { total_steps: images * steps, state: Mutex::new(state), interrupted })
    }

    /// Notes what happened; answers whether to go on.
    pub fn on_event(&self, event: SampleEvent) -> bool {
        let mut state = self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        match event {
            SampleEvent::Phase(name) => (state.phase, state.loaded) = (name, 0),
            SampleEvent::Loaded(bytes) => state.loaded += bytes,
            SampleEvent::Step => {
                state.steps += 1;
                state.first_step.get_or_insert_with(Instant::now);
            }
            SampleEvent::ImageDone => {}
        }
        // Work that is done within a moment shows nothing.
        state.drawn.get_or_insert_with(Instant::now);
        let mut drawn = state.drawn;
        redraw(&mut drawn, || self.line(&state));
        state.drawn = drawn;
        !self.interrupted.load(Ordering::Relaxed)
    }

    fn line(&self, state: &SamplingState) -> ProgressLine {
        if state.steps == 0 || state.steps == self.total_steps {
            let loaded = Bytes(state.loaded);
            return ProgressLine::new(format!("{}:", state.phase))
                .part(0, format!("{loaded} read"));
        }
        // The first step's own time is not known.
        let taken = state.first_step.map_or(Duration::ZERO, |first| first.elapsed());
        let left = match state.steps {
            1 => String::new(),
            steps => {
                let per_step = taken.as_secs_f64() / (steps - 1) as f64;
                format!("{} left", duration(per_step * (self.total_steps - steps) as f64))
            }
        };
        ProgressLine::new("")
            .bar(state.steps as f64 / self.total_steps as f64)
            .part(0, format!("step {} of {}", state.steps, self.total_steps))
            .part(1, left)
    }
}

impl Drop for SamplingProgress {
    fn drop(&mut self) {
        clear();
    }
}

/// Draws the plan, and what came of it.
pub fn page(drawn: &SampleSummary) -> String {
    let mut page = TextPage::new();
    let bytes = |bytes: usize| Bytes(bytes as u64).to_string();
    page.line(BOLD, &memory(drawn.peak_bytes, drawn.limit_bytes));
    let limit = drawn.limit_bytes.max(1) as f64;
    let rows: Vec<[String; 3]> = drawn
        .phases
        .iter()
        .map(|phase| {
            [phase.name.into(), bytes(phase.peak_bytes), bar(phase.peak_bytes as f64 / limit)]
        })
        .collect();
    page.table(&rows);
    if !drawn.is_cfg_batched {
        page.line(DIM, "with and without the prompt are computed one after the other");
    }
    if drawn.is_encoder_in_blocks {
        page.line(DIM, IN_BLOCKS);
    }
    if let Some(side) = drawn.tile_pixels {
        page.line(DIM, &format!("decoded in tiles of {side} x {side} pixels, to fit"));
    }
    for written in &drawn.images {
        page.line(BOLD, &format!("{}", written.path.display()));
        for path in &written.more {
            page.line(DIM, &format!("also as {}", path.display()));
        }
        page.line(DIM, &format!("seed {}: {}", written.seed, written.prompt));
    }
    if !drawn.images.is_empty() {
        page.line(DIM, &format!("{:.1} s", drawn.secs));
    }
    page.finish()
}

/// What is taken at the peak, and the most that may be.
pub fn memory(peak_bytes: usize, limit_bytes: usize) -> String {
    format!("memory: {} of {}", Bytes(peak_bytes as u64), Bytes(limit_bytes as u64))
}
