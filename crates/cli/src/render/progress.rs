//! How far a long piece of work has come: a line on standard error, redrawn on a terminal, repeated
//! now and then elsewhere. Work that is done within a second shows nothing.

use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use machine::Bytes;

use crate::failure::Failure;
use crate::interrupt;
use crate::text::bar;

/// Chosen: shorter work needs no patience.
const SILENT: Duration = Duration::from_secs(1);
const REDRAW: Duration = Duration::from_millis(100);
const REPEAT: Duration = Duration::from_secs(10);

/// Work of a known number of bytes.
pub struct Progress {
    verb: &'static str,
    total: u64,
    done: AtomicU64,
    begun: Instant,
    drawn: Mutex<Option<Instant>>,
    interrupted: Arc<AtomicBool>,
}

impl Progress {
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

impl Drop for Progress {
    fn drop(&mut self) {
        let drawn = self.drawn.get_mut().is_ok_and(|drawn| drawn.is_some());
        if drawn {
            clear();
        }
    }
}

/// Draws a line unless that was done a moment ago.
pub fn redraw(last: &mut Option<Instant>, line: impl FnOnce() -> String) {
    let is_terminal = std::io::stderr().is_terminal();
    let pause = if is_terminal { REDRAW } else { REPEAT };
    if last.is_none_or(|last| last.elapsed() > pause) {
        let (start, end) = if is_terminal { ("\r\x1b[K", "") } else { ("", "\n") };
        _ = write!(std::io::stderr(), "{start}{}{end}", line());
        *last = Some(Instant::now());
    }
}

/// Takes the line away again.
pub fn clear() {
    if std::io::stderr().is_terminal() {
        _ = write!(std::io::stderr(), "\r\x1b[K");
    }
}

fn line(verb: &str, done: u64, total: u64, elapsed: Duration) -> String {
    let rate = done as f64 / elapsed.as_secs_f64();
    let left_secs = (total.saturating_sub(done) as f64 / rate.max(1.0)).ceil();
    let (done_bytes, total_bytes) = (Bytes(done), Bytes(total));
    let bar = bar(done_bytes.share_of(total_bytes));
    format!(
        "{verb} {bar} {done_bytes} of {total_bytes}, {}/s, {left_secs:.0} s left",
        Bytes(rate as u64)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_tells_rate_and_time_left() {
        let text = line("loading", 1 << 30, 4 << 30, Duration::from_secs(2));
        assert_eq!(
            text,
            "loading ██████░░░░░░░░░░░░░░░░░░ 1.0 GiB of 4.0 GiB, 512 MiB/s, 6 s left"
        );
    }
}
