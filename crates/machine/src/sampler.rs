//! The telemetry thread: takes a reading every second, and at once when memory becomes scarce.
//!
//! ```text
//! time, or the kernel's trigger ─▶ Monitor::read ─▶ channel ─▶ drain(), between two steps
//! ```
//!
//! Readings wait in a channel, so that neither side ever waits for the other: a sensor that hangs does not
//! hold up a step, and a long step loses no reading. Judges nothing; that is the governor's part.

use std::io::{self, PipeReader, PipeWriter};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

use crate::monitor::Monitor;
use crate::pressure::{PressureTrigger, WakeReason, wait};
use crate::source::ProbeSource;
use crate::telemetry::Telemetry;

/// Chosen: NVML and the kernel renew most of their figures once a second.
const INTERVAL: Duration = Duration::from_secs(1);

/// How long the thread is waited for. Chosen: far longer than a reading takes.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Samples a machine's telemetry until it is dropped.
pub struct TelemetrySampler {
    readings: Receiver<(Instant, Telemetry)>,
    /// Closed to end the thread.
    end: Option<PipeWriter>,
}

impl TelemetrySampler {
    /// Begins to read.
    pub fn start(source: ProbeSource, monitor: Monitor) -> io::Result<Self> {
        Self::start_with_interval(INTERVAL, source, monitor)
    }

    fn start_with_interval(
        every: Duration,
        source: ProbeSource,
        monitor: Monitor,
    ) -> io::Result<Self> {
        let (end, ours) = io::pipe()?;
        let (sender, readings) = mpsc::channel();
        let sample = move || sample_loop(every, source, monitor, &sender, &end);
        thread::Builder::new().name("sampler".into()).spawn(sample)?;
        Ok(Self { readings, end: Some(ours) })
    }

    /// All readings since the last call, oldest first. Does not wait.
    pub fn drain(&self) -> Vec<(Instant, Telemetry)> {
        self.readings.try_iter().collect()
    }

    /// The next reading, when it comes; none if there will be no more.
    pub fn next(&self) -> Option<(Instant, Telemetry)> {
        self.readings.recv().ok()
    }
}

impl Drop for TelemetrySampler {
    /// Waits until the thread has closed the drivers' libraries: a process that ends meanwhile stumbles over
    /// them. Not for ever, though: a driver that hangs must not hang the end of a run.
    fn drop(&mut self) {
        drop(self.end.take());
        let begun = Instant::now();
        while self.readings.recv_timeout(TIMEOUT.saturating_sub(begun.elapsed())).is_ok() {}
    }
}

/// Where there is no trigger, or it is lost, time has to do. Drops the source before its caller lets go of
/// the channel.
fn sample_loop(
    every: Duration,
    mut source: ProbeSource,
    mut monitor: Monitor,
    readings: &Sender<(Instant, Telemetry)>,
    end: &PipeReader,
) {
    let mut trigger = PressureTrigger::arm().ok();
    loop {
        let now = Instant::now();
        if readings.send((now, monitor.read(&mut source, now))).is_err() {
            return;
        }
        match wait(trigger.as_ref(), end, every) {
            Ok(WakeReason::Time | WakeReason::Pressure) => {}
            Err(_) if trigger.is_some() => trigger = None,
            Ok(WakeReason::End) | Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Machine;
    use crate::budget::DeviceId;
    use crate::recording::testing::source;

    fn sampler(every: Duration, answers: &[(&str, &str)]) -> TelemetrySampler {
        let mut source = source(answers);
        let machine = Machine::probe(&mut source);
        TelemetrySampler::start_with_interval(
            every,
            source,
            Monitor::new(&machine, DeviceId::Cpu, None),
        )
        .unwrap()
    }

    #[test]
    fn readings_come_in_order_and_only_once() {
        let stalls = "some avg10=50.00 avg60=0.00\nfull avg10=0.00 avg60=0.00\n";
        let sampler = sampler(Duration::from_millis(1), &[("file /proc/pressure/memory", stalls)]);
        let first = sampler.next().unwrap();
        assert_eq!(first.1.memory_stall, Some(0.5));
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
        assert_eq!(sampler.next().unwrap().1, Telemetry::default(), "a machine without any sensor");
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
