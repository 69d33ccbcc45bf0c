//! The thread that feels: takes a reading every second, and at once when memory becomes scarce.
//!
//! ```text
//! time, or the kernel's trigger ─▶ Sense::read ─▶ channel ─▶ drain(), between two steps
//! ```
//!
//! Readings wait in a channel, so that neither side ever waits for the other: a sensor that hangs does not
//! hold up a step, and a long step loses no reading. Judges nothing; that is the governor's part.

use std::io::{self, PipeReader, PipeWriter};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

use crate::feel::Feel;
use crate::pressure::{PressureTrigger, Woken, wait};
use crate::sense::Sense;
use crate::source::Source;

/// Chosen: NVML and the kernel renew most of their figures once a second.
const EVERY: Duration = Duration::from_secs(1);

/// How long the thread is waited for. Chosen: far longer than a reading takes.
const PATIENCE: Duration = Duration::from_secs(2);

/// Feels a machine until it is dropped.
pub struct Sampler {
    readings: Receiver<(Instant, Feel)>,
    /// Closed to end the thread.
    end: Option<PipeWriter>,
}

impl Sampler {
    /// Begins to read.
    pub fn start(source: Source, sense: Sense) -> io::Result<Self> {
        Self::start_every(EVERY, source, sense)
    }

    fn start_every(every: Duration, source: Source, sense: Sense) -> io::Result<Self> {
        let (end, ours) = io::pipe()?;
        let (sender, readings) = mpsc::channel();
        let feel = move || feel(every, source, sense, &sender, &end);
        thread::Builder::new().name("sampler".into()).spawn(feel)?;
        Ok(Self { readings, end: Some(ours) })
    }

    /// All readings since the last call, oldest first. Does not wait.
    pub fn drain(&self) -> Vec<(Instant, Feel)> {
        self.readings.try_iter().collect()
    }

    /// The next reading, when it comes; none if there will be no more.
    pub fn next(&self) -> Option<(Instant, Feel)> {
        self.readings.recv().ok()
    }
}

impl Drop for Sampler {
    /// Waits until the thread has closed the drivers' libraries: a process that ends meanwhile stumbles over
    /// them. Not for ever, though: a driver that hangs must not hang the end of a run.
    fn drop(&mut self) {
        drop(self.end.take());
        let begun = Instant::now();
        while self.readings.recv_timeout(PATIENCE.saturating_sub(begun.elapsed())).is_ok() {}
    }
}

/// Where there is no trigger, or it is lost, time has to do. Drops the source before its caller lets go of
/// the channel.
fn feel(
    every: Duration,
    mut source: Source,
    mut sense: Sense,
    readings: &Sender<(Instant, Feel)>,
    end: &PipeReader,
) {
    let mut trigger = PressureTrigger::arm().ok();
    loop {
        let now = Instant::now();
        if readings.send((now, sense.read(&mut source, now))).is_err() {
            return;
        }
        match wait(trigger.as_ref(), end, every) {
            Ok(Woken::Time | Woken::Pressure) => {}
            Err(_) if trigger.is_some() => trigger = None,
            Ok(Woken::End) | Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Machine;
    use crate::budget::Device;
    use crate::recording::testing::source;

    fn sampler(every: Duration, answers: &[(&str, &str)]) -> Sampler {
        let mut source = source(answers);
        let machine = Machine::probe(&mut source);
        Sampler::start_every(every, source, Sense::of(&machine, Device::Cpu, None)).unwrap()
    }

    #[test]
    fn readings_come_in_order_and_only_once() {
        let stalls = "some avg10=50.00 avg60=0.00\nfull avg10=0.00 avg60=0.00\n";
        let sampler = sampler(Duration::from_millis(1), &[("file /proc/pressure/memory", stalls)]);
        let first = sampler.next().unwrap();
        assert_eq!(first.1.stalled, Some(0.5));
        let mut times = vec![first.0];
        while times.len() < 5 {
            times.extend(sampler.drain().iter().map(|(at, _)| *at));
            thread::yield_now();
        }
        assert!(times.is_sorted_by(|before, after| before < after), "{times:?}");
    }

    /// With an hour between readings, only the end of the pipe can end the thread.
    #[test]
    fn the_thread_ends_when_the_sampler_is_dropped() {
        let mut sampler = sampler(Duration::from_secs(3600), &[]);
        assert_eq!(sampler.next().unwrap().1, Feel::default(), "a machine without any sensor");
        drop(sampler.end.take());
        assert!(sampler.next().is_none(), "the thread's end of the channel is gone");
    }

    #[test]
    fn draining_never_waits() {
        let sampler = sampler(Duration::from_secs(3600), &[]);
        sampler.next().unwrap();
        assert_eq!(sampler.drain(), []);
    }
}
