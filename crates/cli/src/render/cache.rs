//! How far encoding has come, as a line on standard error; and what the cache holds, as a page.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anstyle::Style;
use machine::Bytes;
use serde::Serialize;
use trainer::cache::PICTURES;
use trainer::data::LeftOut;
use trainer::progress::Event;

use crate::failure::Failure;
use crate::interrupt;
use crate::render::line::Line;
use crate::render::plan::IN_BLOCKS;
use crate::render::progress::{clear, duration, redraw};
use crate::text::{BAD, BOLD, DIM, PLAIN, Page, WARN, bar};

/// What is in the cache for a job, and what was done for it.
#[derive(Serialize)]
pub struct CacheSummary {
    /// What is not trained on, counted by reason; `problems` has each file.
    pub left_out: Vec<LeftOut>,
    pub problems: Vec<Wrong>,
    pub folder: PathBuf,
    /// Pictures that are trained on.
    pub pictures: usize,
    pub held_out: usize,
    pub texts: usize,
    /// What was encoded now, or would be.
    pub missing_pictures: usize,
    pub missing_texts: usize,
    pub is_done: bool,
    pub buckets: Vec<BucketRow>,
    pub phases: Vec<PhaseMemory>,
    pub peak_bytes: usize,
    pub limit_bytes: usize,
    /// Whether T5 does not fit whole, and one block of it is in memory at a time.
    pub is_t5_in_blocks: bool,
    /// Bytes of the whole cache, of other jobs too.
    pub bytes: u64,
    pub secs: f64,
    pub pictures_per_sec: Option<f64>,
}

/// Pictures of one size.
#[derive(Serialize)]
pub struct BucketRow {
    pub width: usize,
    pub height: usize,
    pub pictures: usize,
}

/// Something wrong with a file.
#[derive(Serialize)]
pub struct Wrong {
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
    pub problems: Vec<Wrong>,
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

/// A part of the work and its memory.
#[derive(Serialize)]
pub struct PhaseMemory {
    pub name: &'static str,
    pub peak_bytes: usize,
}

/// Encoding at work.
pub struct Encoding {
    is_quiet: bool,
    state: Mutex<State>,
    interrupted: Arc<AtomicBool>,
}

#[derive(Default)]
struct State {
    phase: &'static str,
    total: usize,
    done: usize,
    loaded: u64,
    /// When the first of the phase began.
    begun: Option<Instant>,
    /// Pictures done and how long they took.
    pictures: Option<(usize, Duration)>,
    drawn: Option<Instant>,
}

impl Encoding {
    /// Begins; from now on Ctrl-C ends the work in order.
    pub fn begin(is_quiet: bool) -> Result<Self, Failure> {
        Ok(Self { is_quiet, state: Mutex::default(), interrupted: interrupt::flag()? })
    }

    /// Notes what happened; answers whether to go on.
    pub fn tell(&self, event: Event) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match event {
            Event::Phase { name, total } => state.enter(name, total),
            Event::Loaded(bytes) => state.load(bytes),
            Event::Done => state.done += 1,
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

    /// How fast pictures were encoded, if any were.
    pub fn pictures_per_sec(&self) -> Option<f64> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.enter("", 0);
        let (n, taken) = state.pictures?;
        Some(n as f64 / taken.as_secs_f64())
    }
}

impl State {
    /// Pictures come first; any other phase is the end of them.
    fn enter(&mut self, name: &'static str, total: usize) {
        if self.phase == PICTURES && self.done > 0 {
            self.pictures = Some((self.done, self.elapsed()));
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

    fn line(&self, elapsed: Duration) -> Line {
        let Self { phase, total, done, loaded, .. } = *self;
        if done == 0 {
            return Line::new(format!("{phase}:")).part(0, format!("{} read", Bytes(loaded)));
        }
        let per_sec = done as f64 / elapsed.as_secs_f64().max(1e-3);
        let left_secs = total.saturating_sub(done) as f64 / per_sec;
        Line::new(phase)
            .bar(done as f64 / total.max(1) as f64)
            .part(0, format!("{done} of {total}"))
            .part(2, format!("{per_sec:.1}/s"))
            .part(1, format!("{} left", duration(left_secs)))
    }
}

impl Drop for Encoding {
    fn drop(&mut self) {
        if !self.is_quiet {
            clear();
        }
    }
}

/// Draws what is wrong, what there is, and what was done.
pub fn page(summary: &CacheSummary) -> String {
    let mut page = Page::new();
    problems(&mut page, &summary.left_out, &summary.problems);
    let CacheSummary { pictures, held_out, texts, .. } = summary;
    page.line(BOLD, &format!("{pictures} pictures, {held_out} held out, {texts} texts"));
    let most = summary.buckets.iter().map(|row| row.pictures).max().unwrap_or(1) as f64;
    let rows: Vec<[String; 3]> = summary
        .buckets
        .iter()
        .map(|row| {
            let size = format!("{} x {}", row.width, row.height);
            [size, row.pictures.to_string(), bar(row.pictures as f64 / most)]
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
pub fn problems_page(left_out: &[LeftOut], problems: &[Wrong]) -> String {
    let mut page = Page::new();
    self::problems(&mut page, left_out, problems);
    page.finish()
}

/// The same of texts.
pub fn text_page(summary: &TextSummary) -> String {
    let mut page = Page::new();
    problems(&mut page, &summary.left_out, &summary.problems);
    let TextSummary { files, documents, tokens, length, sequences, held_out, .. } = summary;
    page.line(BOLD, &format!("{files} files, {documents} documents, {tokens} tokens"));
    page.line(PLAIN, &format!("{sequences} sequences of {length} tokens, {held_out} held out"));
    page.line(DIM, &summary.folder.display().to_string());
    page.finish()
}

/// Every one, whatever their number: first what is left out, then what should be looked at, then what
/// is good to know.
fn problems(page: &mut Page, left_out: &[LeftOut], problems: &[Wrong]) {
    let is_counted = |problem: &Wrong| {
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
fn list(page: &mut Page, mark: &str, style: Style, problems: &[&Wrong]) {
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
fn by_reason<'a>(problems: &[&'a Wrong]) -> Vec<Vec<&'a Wrong>> {
    let mut groups = BTreeMap::<&str, Vec<&Wrong>>::new();
    for problem in problems {
        groups.entry(&problem.reason).or_default().push(problem);
    }
    let mut groups: Vec<_> = groups.into_values().collect();
    groups.sort_by_key(|group| std::cmp::Reverse(group.len()));
    groups
}

fn memory(page: &mut Page, summary: &CacheSummary) {
    if summary.phases.is_empty() {
        return;
    }
    let bytes = |bytes: usize| Bytes(bytes as u64).to_string();
    let (peak, limit) = (bytes(summary.peak_bytes), bytes(summary.limit_bytes));
    page.line(BOLD, &format!("memory: {peak} of {limit}"));
    let share = |peak: usize| bar(peak as f64 / summary.limit_bytes.max(1) as f64);
    let phases = summary.phases.iter();
    let rows: Vec<[String; 3]> = phases
        .map(|phase| [phase.name.into(), bytes(phase.peak_bytes), share(phase.peak_bytes)])
        .collect();
    page.table(&rows);
    if summary.is_t5_in_blocks {
        page.line(DIM, IN_BLOCKS);
    }
}

fn done(summary: &CacheSummary) -> String {
    let CacheSummary { missing_pictures, missing_texts, secs, .. } = summary;
    if missing_pictures + missing_texts == 0 {
        return "all of it is in the cache".into();
    }
    let what = format!("{missing_pictures} pictures and {missing_texts} texts");
    if !summary.is_done {
        return format!("{what} are to be encoded");
    }
    let rate = summary.pictures_per_sec.map(|rate| format!(", {rate:.2} pictures/s"));
    format!("{what} encoded in {secs:.1} s{}", rate.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_tells_rate_and_time_left() {
        let mut state = State::default();
        state.enter(PICTURES, 40);
        state.load(3 << 20);
        let line = |state: &State, secs| state.line(Duration::from_secs(secs)).fit(usize::MAX);
        assert_eq!(line(&state, 1), "pictures: 3 MiB read");
        state.done = 10;
        assert_eq!(line(&state, 5), "pictures ██████░░░░░░░░░░░░░░░░░░ 10 of 40  2.0/s  15 s left");
    }
}
