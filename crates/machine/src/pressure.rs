//! Memory pressure as the kernel tells it: the share of time that work stood still for want of
//! memory (PSI), and a trigger that wakes us when it rises, long before the machine swaps.

use std::io::PipeReader;
#[cfg(target_os = "linux")]
use std::os::fd::AsFd;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use serde::Serialize;

use crate::reading::{Percent, Unknown};

/// Stall shares from `/proc/pressure/memory`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct StallPressure {
    /// Share of the last ten seconds in which at least one task waited for memory.
    pub some_10s: Percent,
    /// Share of the last ten seconds in which all tasks did.
    pub full_10s: Percent,
    /// Share of the last minute in which at least one task waited for memory.
    pub some_60s: Percent,
}

impl StallPressure {
    /// Reads the kernel's text.
    pub fn parse(text: &str) -> Result<Self, Unknown> {
        Ok(Self {
            some_10s: average(text, "some", "avg10")?,
            full_10s: average(text, "full", "avg10")?,
            some_60s: average(text, "some", "avg60")?,
        })
    }
}

fn average(text: &str, line: &str, window: &str) -> Result<Percent, Unknown> {
    let value = text
        .lines()
        .find_map(|l| {
            l.strip_prefix(line)?
                .split_whitespace()
                .find_map(|w| w.strip_prefix(window)?.strip_prefix('='))
        })
        .ok_or_else(|| Unknown(format!("no {window} in line {line:?}")))?;
    match value.parse() {
        Ok(share) if (0.0..=100.0).contains(&share) => Ok(Percent(share)),
        _ => Err(Unknown(format!("{line} {window} is not a share: {value:?}"))),
    }
}

/// Chosen: 0.3 s of stall within 2 s means the run has begun to suffer. Windows that are a
/// multiple of 2 s are the only ones the kernel allows a user without privileges.
#[cfg(target_os = "linux")]
const TRIGGER: &[u8] = b"some 300000 2000000\0";

/// Wakes whoever [waits](wait) when memory becomes scarce.
#[cfg(target_os = "linux")]
pub struct PressureTrigger(std::fs::File);

#[cfg(target_os = "linux")]
impl PressureTrigger {
    /// Asks the kernel to watch.
    pub fn arm() -> Result<Self, Unknown> {
        use std::io::Write;
        let path = "/proc/pressure/memory";
        let mut file = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .map_err(|error| Unknown(format!("cannot open {path}: {error}")))?;
        file.write_all(TRIGGER)
            .map_err(|error| Unknown(format!("kernel refused the trigger: {error}")))?;
        Ok(Self(file))
    }

    fn watched(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// There is no such trigger here; [`arm`](PressureTrigger::arm) says so.
#[cfg(not(target_os = "linux"))]
pub enum PressureTrigger {}

#[cfg(not(target_os = "linux"))]
impl PressureTrigger {
    /// Always refuses.
    pub fn arm() -> Result<Self, Unknown> {
        Err(Unknown::because("only Linux has pressure triggers"))
    }

    fn watched(&self) -> BorrowedFd<'_> {
        match *self {}
    }
}

/// What ended a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WakeReason {
    /// The time was over.
    Time,
    /// Memory became scarce.
    Pressure,
    /// The other end of the pipe was closed.
    End,
}

/// Waits for pressure, for the other end of a pipe to be closed, or for the time to be over. A trigger that
/// cannot be waited for any more is an error.
pub fn wait(
    trigger: Option<&PressureTrigger>,
    end: &PipeReader,
    timeout: Duration,
) -> Result<WakeReason, Unknown> {
    let timeout = Timespec::try_from(timeout).ok();
    let mut watched = vec![PollFd::new(end, PollFlags::IN)];
    watched.extend(trigger.map(|it| PollFd::from_borrowed_fd(it.watched(), PollFlags::PRI)));
    match poll(&mut watched, timeout.as_ref()) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(error) => return Err(Unknown(format!("cannot wait for pressure: {error}"))),
    }
    let lost = PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL;
    match watched.iter().map(PollFd::revents).collect::<Vec<_>>()[..] {
        [end, ..] if !end.is_empty() => Ok(WakeReason::End),
        [_, trigger] if trigger.intersects(lost) => Err(Unknown::because("the trigger is gone")),
        [_, trigger] if !trigger.is_empty() => Ok(WakeReason::Pressure),
        _ => Ok(WakeReason::Time),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CALM: &str = "some avg10=0.00 avg60=1.25 avg300=0.31 total=1234\n\
                        full avg10=0.00 avg60=0.00 avg300=0.00 total=99\n";

    #[test]
    fn reads_the_kernels_lines() {
        let pressure = StallPressure::parse(CALM).unwrap();
        assert_eq!(pressure.some_60s, Percent(1.25));
        assert_eq!(pressure.full_10s, Percent(0.0));
    }

    #[test]
    fn nonsense_is_unknown() {
        let check = |text: &str, reason: &str| {
            assert_eq!(StallPressure::parse(text).unwrap_err().0, reason);
        };
        check("", "no avg10 in line \"some\"");
        check(&CALM.replacen("0.00", "1e9", 1), "some avg10 is not a share: \"1e9\"");
        check(&CALM.replacen("0.00", "nan", 1), "some avg10 is not a share: \"nan\"");
    }
    /// An hour's wait ends when the pipe does; one without time ends at once.
    #[test]
    fn a_wait_ends_with_its_pipe() {
        let (reader, writer) = std::io::pipe().unwrap();
        let trigger = PressureTrigger::arm().ok();
        let an_hour = Duration::from_secs(3600);
        assert_eq!(wait(None, &reader, Duration::ZERO), Ok(WakeReason::Time));
        drop(writer);
        assert_eq!(wait(None, &reader, an_hour), Ok(WakeReason::End));
        assert_eq!(wait(trigger.as_ref(), &reader, an_hour), Ok(WakeReason::End));
    }
}
