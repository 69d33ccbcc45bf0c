//! How far a long piece of work has come: a line on standard error, redrawn on a terminal, repeated
//! now and then elsewhere. Work that is done within a second shows nothing.

use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use machine::Bytes;

use crate::failure::Failure;
use crate::interrupt;
use crate::render::line::ProgressLine;
use crate::terminal;
use crate::text::columns;

/// Chosen: shorter work needs no patience.
const SILENT: Duration = Duration::from_secs(1);
const REDRAW: Duration = Duration::from_millis(100);
const REPEAT: Duration = Duration::from_secs(10);

/// Work of a known number of bytes.
pub struct ByteProgress {
    verb: &'static str,
    total: u64,
    done: AtomicU64,
    begun: Instant,
    drawn: Mutex<Option<Instant>>,
    interrupted: Arc<AtomicBool>,
}

impl ByteProgress {
    /// Begins; from now on Ctrl-C ends the work in order.
    pub fn begin(verb: &'static str, total: u64) -> Result<Self, Failure> {
        let interrupted = interrupt::flag()?;
        let (done, drawn) = (AtomicU64::new(0), Mutex::new(None));
        Ok(Self { verb, total, done, begun: Instant::now(), drawn, interrupted })
    }

    /// Counts bytes; answers whether to go on.
    pub fn tick(&self, bytes: u64) -> bool {
        let done = self.done.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let elapsed = self.begun.elapsed();
        if elapsed > SILENT
            && let Ok(mut drawn) = self.drawn.try_lock()
        {
            redraw(&mut drawn, || line(self.verb, done, self.total, elapsed));
        }
        !self.interrupted.load(Ordering::Relaxed)
    }
}

impl Drop for ByteProgress {
    fn drop(&mut self) {
        let drawn = self.drawn.get_mut().is_ok_and(|drawn| drawn.is_some());
        if drawn {
            clear();
        }
    }
}

/// Columns of the live line that stands on the terminal; 0 where there is none. There is one terminal, so
/// there is one line.
static SHOWN_COLUMNS: AtomicUsize = AtomicUsize::new(0);
/// Where a terminal does not say how wide it is.
const USUAL_WIDTH: usize = 80;

/// Draws a line unless that was done a moment ago.
pub fn redraw(last: &mut Option<Instant>, line: impl FnOnce() -> ProgressLine) {
    let is_terminal = std::io::stderr().is_terminal();
    let pause = if is_terminal { REDRAW } else { REPEAT };
    if last.is_some_and(|last| last.elapsed() <= pause) {
        return;
    }
    // The last column stays empty: some terminals begin a new line when it is written.
    let text = line().fit(if is_terminal { width() - 1 } else { usize::MAX });
    if text.is_empty() {
        return;
    }
    *last = Some(Instant::now());
    let mut stderr = terminal::stderr();
    if is_terminal {
        clear();
        SHOWN_COLUMNS.store(columns(&text), Ordering::Relaxed);
        _ = write!(stderr, "{text}");
    } else {
        _ = writeln!(stderr, "{text}");
    }
}

/// Takes the line away again.
pub fn clear() {
    let shown = SHOWN_COLUMNS.swap(0, Ordering::Relaxed);
    if shown > 0 {
        // Past what adapts styles, which would take this out where no styles are wanted.
        _ = write!(std::io::stderr(), "{}", erased(shown, width()));
    }
}

/// Columns of the terminal now: people change it while a run goes on.
fn width() -> usize {
    let size = terminal_size::terminal_size_of(std::io::stderr());
    size.map(|(width, _)| usize::from(width.0)).filter(|width| *width > 1).unwrap_or(USUAL_WIDTH)
}

/// What erases a line of so many columns. A terminal that became narrower since has broken the line into
/// several, of which the cursor is in the last.
fn erased(columns: usize, width: usize) -> String {
    match columns.div_ceil(width) {
        0 | 1 => "\r\x1b[K".into(),
        rows => format!("\r\x1b[{}A\x1b[J", rows - 1),
    }
}

fn line(verb: &str, done: u64, total: u64, elapsed: Duration) -> ProgressLine {
    let rate = done as f64 / elapsed.as_secs_f64();
    let left_secs = total.saturating_sub(done) as f64 / rate.max(1.0);
    let (done_bytes, total_bytes) = (Bytes(done), Bytes(total));
    ProgressLine::new(verb)
        .bar(done_bytes.share_of(total_bytes))
        .part(0, format!("{done_bytes} of {total_bytes}"))
        .part(2, format!("{}/s", Bytes(rate as u64)))
        .part(1, format!("{} left", duration(left_secs)))
}

/// In the two largest units.
pub fn duration(secs: f64) -> String {
    let secs = secs.max(0.0).round() as u64;
    let (hours, minutes) = (secs / 3600, secs / 60 % 60);
    match (hours, minutes) {
        (0, 0) => format!("{secs} s"),
        (0, _) => format!("{minutes} min {:02} s", secs % 60),
        _ => format!("{hours} h {minutes:02} min"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_tells_rate_and_time_left() {
        let line = line("loading", 1 << 30, 4 << 30, Duration::from_secs(2));
        assert_eq!(
            line.fit(usize::MAX),
            "loading ██████░░░░░░░░░░░░░░░░░░ 1.0 GiB of 4.0 GiB  512 MiB/s  6 s left"
        );
        assert_eq!(line.fit(40), "loading 1.0 GiB of 4.0 GiB  6 s left");
    }

    /// As tmux, VTE, kitty and Windows Terminal break lines anew when they get narrower.
    #[test]
    fn a_line_that_was_broken_by_a_narrower_terminal_is_erased_whole() {
        assert_eq!(erased(79, 80), "\r\x1b[K");
        assert_eq!(erased(79, 79), "\r\x1b[K");
        assert_eq!(erased(79, 60), "\r\x1b[1A\x1b[J");
        assert_eq!(erased(79, 20), "\r\x1b[3A\x1b[J");
    }

    #[test]
    fn durations_have_two_units() {
        assert_eq!(
            [0.4, 59.0, 61.0, 7320.0].map(duration),
            ["0 s", "59 s", "1 min 01 s", "2 h 02 min"]
        );
    }
}
