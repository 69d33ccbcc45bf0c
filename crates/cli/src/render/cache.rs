//! How far encoding has come, as a line on standard error; and what the cache holds, as a page.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anstyle::Style;
use machine::Bytes;
use serde::Serialize;
use trainer::cache::IMAGES_PHASE;
use trainer::data::LeftOut;
use trainer::progress::ProgressEvent;

use crate::failure::Failure;
use crate::interrupt;
use crate::render::line::ProgressLine;
use crate::render::plan::IN_BLOCKS;
use crate::render::progress::{clear, duration, redraw};
use crate::text::{BAD, BOLD, DIM, PLAIN, TextPage, WARN, bar};

/// What is in the cache for a job, and what was done for it.
#[derive(Serialize)]
pub struct CacheSummary {
    /// What is not trained on, counted by reason; `problems` has each file.
    pub left_out: Vec<LeftOut>,
    pub problems: Vec<FileProblem>,
    pub folder: PathBuf,
    /// Images that are trained on.
    pub images: usize,
    pub clips: usize,
    pub held_out: usize,
    pub texts: usize,
    /// What was encoded now, or would be.
    pub missing_images: usize,
    pub missing_texts: usize,
    /// What was taken from the cache of another trainer.
    pub imported_images: usize,
    pub imported_texts: usize,
    pub is_done: bool,
    pub buckets: Vec<BucketRow>,
    pub phases: Vec<PhaseMemory>,
    pub peak_bytes: usize,
    pub limit_bytes: usize,
    /// Main memory for images that are being decoded, beside that of the phases.
    pub decoding_bytes: usize,
    /// Whether a text encoder does not fit whole, and one block of it is in memory at a time.
    pub is_encoder_in_blocks: bool,
    /// Bytes of the whole cache, of other jobs too.
    pub bytes: u64,
    pub secs: f64,
    pub images_per_sec: Option<f64>,
}

/// Images of one size.
#[derive(Serialize)]
pub struct BucketRow {
    pub width: usize,
    pub height: usize,
    pub frames: usize,
    pub images: usize,
}

/// Something wrong with a file.
#[derive(Serialize)]
pub struct FileProblem {
    pub path: PathBuf,
    pub what: String,
    /// What it has in common with others.
    pub reason: String,
    pub is_skipped: bool,
    /// Whether nothing is lost by it.
    pub is_note: bool,
}

/// What is in the cache for a job on texts.
#[derive(Serialize)]
pub struct TextSummary {
    pub left_out: Vec<LeftOut>,
    pub problems: Vec<FileProblem>,
    pub folder: PathBuf,
    /// Files with something to read in them.
    pub files: usize,
    pub documents: usize,
    /// Tokens of an epoch.
    pub tokens: u64,
    /// Tokens in a sequence.
    pub length: usize,
    pub sequences: usize,
    pub held_out: usize,
    pub secs: f64,
}

/// What there is of preferences.
#[derive(Serialize)]
pub struct PreferenceSummary {
    pub left_out: Vec<LeftOut>,
    pub problems: Vec<FileProblem>,
    pub folder: PathBuf,
    /// Files with something to read in them.
    pub files: usize,
    /// What records are.
    pub unit: &'static str,
    pub train: usize,
    pub held_out: usize,
    /// Tokens of an epoch.
    pub tokens: u64,
    /// Records that end at `length`.
    pub cut: usize,
    /// The most tokens of a prompt with its answer.
    pub length: usize,
    pub secs: f64,
}

/// A part of the work and its memory.
#[derive(Serialize)]
pub struct PhaseMemory {
    pub name: &'static str,
    pub peak_bytes: usize,
}

/// Encoding at work.
pub struct EncodingProgress {
    is_quiet: bool,
    state: Mutex<EncodingState>,
    interrupted: Arc<AtomicBool>,
}

#[derive(Default)]
struct EncodingState {
    phase: &'static str,
    total: usize,
    done: usize,
    loaded: u64,
    /// When the first of the phase began.
    begun: Option<Instant>,
    /// Images done and how long they took.
    images: Option<(usize, Duration)>,
    drawn: Option<Instant>,
}

impl EncodingProgress {
    /// Begins; from now on Ctrl-C ends the work in order.
    pub fn begin(is_quiet: bool) -> Result<Self, Failure> {
        Ok(Self { is_quiet, state: Mutex::default(), interrupted: interrupt::flag()? })
    }

    /// Notes what happened; answers whether to go on.
    pub fn on_event(&self, event: ProgressEvent) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match event {
            ProgressEvent::Phase { name, total } => state.enter(name, total),
            ProgressEvent::Loaded(bytes) => state.load(bytes),
            ProgressEvent::Done => state.done += 1,
        }
        // Work that is done within a moment shows nothing.
        state.drawn.get_or_insert_with(Instant::now);
        if !self.is_quiet {
            let mut drawn = state.drawn;
            redraw(&mut drawn, || state.line(state.elapsed()));
            state.drawn = drawn;
        }
        !self.interrupted.load(Ordering::Relaxed)
    }

    /// How fast images were encoded, if any were.
    pub fn images_per_sec(&self) -> Option<f64> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.enter("", 0);
        let (n, taken) = state.images?;
        Some(n as f64 / taken.as_secs_f64())
    }
}

impl EncodingState {
    /// Images come first; any other phase is the end of them.
    fn enter(&mut self, name: &'static str, total: usize) {
        if self.phase == IMAGES_PHASE && self.done > 0 {
            self.images = Some((self.done, self.elapsed()));
        }
        (self.phase, self.total, self.done, self.loaded) = (name, total, 0, 0);
        self.begun = None;
    }

    /// What takes its time begins when the weights are there.
    fn load(&mut self, bytes: u64) {
        self.loaded += bytes;
        self.begun = Some(Instant::now());
    }

    fn elapsed(&self) -> Duration {
        self.begun.map_or(Duration::ZERO, |begun| begun.elapsed())
    }

    fn line(&self, elapsed: Duration) -> ProgressLine {
        let Self { phase, total, done, loaded, .. } = *self;
        if done == 0 {
            return ProgressLine::new(format!("{phase}:"))
                .part(0, format!("{} read", Bytes(loaded)));
        }
        let per_sec = done as f64 / elapsed.as_secs_f64().max(1e-3);
        let left_secs = total.saturating_sub(done) as f64 / per_sec;
        ProgressLine::new(phase)
            .bar(done as f64 / total.max(1) as f64)
            .part(0, format!("{done} of {total}"))
            .part(2, format!("{per_sec:.1}/s"))
            .part(1, format!("{} left", duration(left_secs)))
    }
}

impl Drop for EncodingProgress {
    fn drop(&mut self) {
        if !self.is_quiet {
            clear();
        }
    }
}

/// Draws what is wrong, what there is, and what was done.
pub fn page(summary: &CacheSummary) -> String {
    let mut page = TextPage::new();
    problems(&mut page, &summary.left_out, &summary.problems);
    let CacheSummary { images, clips, held_out, texts, .. } = summary;
    let clips = if *clips > 0 { format!(", {clips} clips") } else { String::new() };
    page.line(BOLD, &format!("{images} images{clips}, {held_out} held out, {texts} texts"));
    let most = summary.buckets.iter().map(|row| row.images).max().unwrap_or(1) as f64;
    let rows: Vec<[String; 3]> = summary
        .buckets
        .iter()
        .map(|row| {
            let frames =
                if row.frames > 1 { format!(" x {} frames", row.frames) } else { String::new() };
            let size = format!("{} x {}{frames}", row.width, row.height);
            [size, row.images.to_string(), bar(row.images as f64 / most)]
        })
        .collect();
    page.table(&rows);
    memory(&mut page, summary);
    page.line(BOLD, &done(summary));
    let (folder, bytes) = (summary.folder.display(), Bytes(summary.bytes));
    page.line(DIM, &format!("{folder}: {bytes}"));
    page.finish()
}

/// What is wrong, alone.
pub fn problems_page(left_out: &[LeftOut], problems: &[FileProblem]) -> String {
    let mut page = TextPage::new();
    self::problems(&mut page, left_out, problems);
    page.finish()
}

/// The same of texts.
pub fn text_page(summary: &TextSummary) -> String {
    let mut page = TextPage::new();
    problems(&mut page, &summary.left_out, &summary.problems);
    let TextSummary { files, documents, tokens, length, sequences, held_out, .. } = summary;
    page.line(BOLD, &format!("{files} files, {documents} documents, {tokens} tokens"));
    page.line(PLAIN, &format!("{sequences} sequences of {length} tokens, {held_out} held out"));
    page.line(DIM, &summary.folder.display().to_string());
    page.finish()
}

/// What `hearth cache` says of preferences.
pub fn preference_page(summary: &PreferenceSummary) -> String {
    let mut page = TextPage::new();
    problems(&mut page, &summary.left_out, &summary.problems);
    let PreferenceSummary { files, unit, train, held_out, tokens, cut, length, .. } = summary;
    page.line(BOLD, &format!("{files} files, {train} {unit}s, {tokens} tokens"));
    let cut = format!("{cut} longer than {length} tokens end there, {held_out} held out");
    page.line(PLAIN, &cut);
    page.line(DIM, &summary.folder.display().to_string());
    page.finish()
}

/// Every one, whatever their number: first what is left out, then what should be looked at, then what
/// is good to know.
fn problems(page: &mut TextPage, left_out: &[LeftOut], problems: &[FileProblem]) {
    let is_counted = |problem: &FileProblem| {
        let mut reasons = left_out.iter().flat_map(|left| &left.reasons);
        problem.is_skipped && reasons.any(|reason| reason.reason == problem.reason)
    };
    let (counted, others): (Vec<_>, Vec<_>) = problems.iter().partition(|p| is_counted(p));
    for LeftOut { unit, left_out, of, .. } in left_out {
        let plural = if *of == 1 { "" } else { "s" };
        page.line(BOLD, &format!("left out: {left_out} of {of} {unit}{plural}"));
    }
    list(page, "✗", BAD, &counted);
    let (notes, warnings): (Vec<_>, Vec<_>) = others.into_iter().partition(|p| p.is_note);
    for (title, mark, style, group) in
        [("to look at", "!", WARN, warnings), ("good to know", "·", DIM, notes)]
    {
        if !group.is_empty() {
            page.line(BOLD, title);
        }
        list(page, mark, style, &group);
    }
}

/// Many of one kind have a line above them.
fn list(page: &mut TextPage, mark: &str, style: Style, problems: &[&FileProblem]) {
    for group in by_reason(problems) {
        if let [first, _, ..] = group[..] {
            page.line(PLAIN, &format!("{} {}:", group.len(), first.reason));
        }
        for problem in group {
            page.long_item(mark, style, &format!("{} {}", problem.path.display(), problem.what));
        }
    }
}

/// The largest group first.
fn by_reason<'a>(problems: &[&'a FileProblem]) -> Vec<Vec<&'a FileProblem>> {
    let mut groups = BTreeMap::<&str, Vec<&FileProblem>>::new();
    for problem in problems {
        groups.entry(&problem.reason).or_default().push(problem);
    }
    let mut groups: Vec<_> = groups.into_values().collect();
    groups.sort_by_key(|group| std::cmp::Reverse(group.len()));
    groups
}

fn memory(page: &mut TextPage, summary: &CacheSummary) {
    if summary.phases.is_empty() {
        return;
    }
    let bytes = |bytes: usize| Bytes(bytes as u64).to_string();
    let (peak, limit) = (bytes(summary.peak_bytes), bytes(summary.limit_bytes));
    page.line(BOLD, &format!("memory: {peak} of {limit}"));
    let share = |peak: usize| bar(peak as f64 / summary.limit_bytes.max(1) as f64);
    let row = |name: &str, peak| [name.to_owned(), bytes(peak), share(peak)];
    let phases = summary.phases.iter().map(|phase| row(phase.name, phase.peak_bytes));
    let decoding = Some(summary.decoding_bytes).filter(|peak| *peak > 0);
    let decoding = decoding.map(|peak| row("decoding images", peak));
    page.table(&phases.chain(decoding).collect::<Vec<_>>());
    if summary.is_encoder_in_blocks {
        page.line(DIM, IN_BLOCKS);
    }
}

fn done(summary: &CacheSummary) -> String {
    let CacheSummary { missing_images, missing_texts, secs, .. } = summary;
    let CacheSummary { imported_images, imported_texts, .. } = summary;
    let imported = match imported_images + imported_texts {
        0 => String::new(),
        _ => format!("{imported_images} images and {imported_texts} texts imported; "),
    };
    if missing_images + missing_texts == 0 {
        return format!("{imported}everything is cached");
    }
    let images = if summary.clips > 0 { "images and clips" } else { "images" };
    let what = format!("{imported}{missing_images} {images} and {missing_texts} texts");
    if !summary.is_done {
        return format!("{what} are to be encoded");
    }
    let rate = summary.images_per_sec.map(|rate| format!(", {rate:.2} images/s"));
    format!("{what} encoded in {secs:.1} s{}", rate.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_tells_rate_and_time_left() {
        let mut state = EncodingState::default();
        state.enter(IMAGES_PHASE, 40);
        state.load(3 << 20);
        let line =
            |state: &EncodingState, secs| state.line(Duration::from_secs(secs)).fit(usize::MAX);
        assert_eq!(line(&state, 1), "images: 3 MiB read");
        state.done = 10;
        assert_eq!(line(&state, 5), "images ██████░░░░░░░░░░░░░░░░░░ 10 of 40  2.0/s  15 s left");
    }
}
