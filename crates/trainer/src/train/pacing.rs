//! Keeps to the governor's pace (`machine::governor`): passes it telemetry and the times of micro-batches, and applies
//! its decisions between two micro-batches. Another memory level takes effect with the next one; freed memory then
//! goes back to the system. Pauses are slept in small pieces, so that a request to stop is heard.
//!
//! Validation, samples and encoding rest and pause too. Their times are not recorded: the governor compares steps with
//! steps.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use compute::{Device, WorkStats};
use machine::energy::EnergyMeter;
use machine::governor::{self, Governor, GovernorMode, GovernorPolicy, PaceDecision, StepTime};
use machine::held::HeldMemory;
use machine::sampler::TelemetrySampler;
use machine::telemetry::Telemetry;

use super::device::RunSetup;
use super::run::TrainingRun;
use crate::config::RunConfig;
use crate::config::batch::BatchSettings;
use crate::error::Result;
use crate::event::{self, Event, EventSink, MachineSnapshot, PaceChange, Warning, WarningKind};
use crate::plan::{MemoryLevel, Rates};
use crate::task::traits::{DataLoader, Task};

/// How often telemetry is emitted. Chosen: an hour is 360 points of a curve.
const EMIT_EVERY: Duration = Duration::from_secs(10);
/// A piece of a pause.
const REST_PIECE: Duration = Duration::from_millis(100);

/// Work after which a rest is worth the while. Chosen: longer than a sleep may last too long.
const MIN_WORK: Duration = Duration::from_millis(20);

/// Micro-batches that are expected to take the same time.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct MicroBatchKind {
    size: String,
    n_samples: usize,
    settings: BatchSettings,
}

/// The governor, with its inputs and the memory levels it chooses from.
pub struct Pacing {
    governor: Governor,
    /// From the plan's level down, each with less memory than the one before.
    pub(super) levels: Vec<MemoryLevel>,
    /// What the arena may take at the plan's level: samples may take more than a step.
    training_bytes: usize,
    held: HeldMemory,
    sampler: Option<TelemetrySampler>,
    begun: Instant,
    rates: Rates,
    /// Expected seconds of micro-batches, from their work and the machine's rates.
    expected: HashMap<MicroBatchKind, f64>,
    energy: EnergyMeter,
    /// The last reading, and when one was emitted.
    reading: Option<Telemetry>,
    emitted: Option<Instant>,
    /// Rest since the last step event.
    rested: Duration,
    /// A temperature limit that was asked for, until it is known whether it can be held.
    unproven_limit: Option<WarningKind>,
}

/// A micro-batch that is being computed.
pub struct MicroBatchTimer {
    kind: MicroBatchKind,
    at: Instant,
    /// Work counters before it, if its expected time is not known yet.
    work: Option<WorkStats>,
}

impl Pacing {
    /// At the plan's level.
    pub(super) fn of(
        config: &RunConfig,
        device: &Device,
        RunSetup { device_setup, plan, levels }: RunSetup<'_>,
    ) -> Self {
        let policy = GovernorPolicy {
            mode: config.machine.mode,
            max_celsius: config.machine.max_temp,
            is_calibrated: device_setup.rates.is_measured,
        };
        let held = HeldMemory::new(device_setup.memory_place, device.bytes_beside_process());
        let sampler = (device_setup.start_sampler)(held.clone());
        let rates = device_setup.rates.clone();
        let pacing = Self::new(policy, levels.to_vec(), plan.host_bytes, rates);
        Self { training_bytes: plan.training_bytes(), held, sampler, ..pacing }
    }

    /// Before training, where there is one memory level: it rests and pauses.
    pub(super) fn of_encoding(config: &RunConfig, device: &Device, setup: RunSetup<'_>) -> Self {
        let whole = MemoryLevel { peak_bytes: setup.plan.peak_bytes(), ..setup.levels[0] };
        // Training says what is wrong with its limits.
        let unproven_limit = None;
        Self { unproven_limit, ..Self::of(config, device, RunSetup { levels: &[whole], ..setup }) }
    }

    /// At the first level. `levels` have bytes of the arena; the program holds `host_bytes` outside it.
    fn new(
        policy: GovernorPolicy,
        levels: Vec<MemoryLevel>,
        host_bytes: usize,
        rates: Rates,
    ) -> Self {
        let bytes = |level: &MemoryLevel| (level.peak_bytes + host_bytes) as u64;
        let governed =
            levels.iter().map(|level| governor::GovernorLevel { bytes: bytes(level) }).collect();
        Self {
            governor: Governor::new(policy, governed),
            levels,
            training_bytes: usize::MAX,
            held: HeldMemory::of_process(),
            sampler: None,
            begun: Instant::now(),
            rates,
            expected: HashMap::new(),
            energy: EnergyMeter::default(),
            reading: None,
            emitted: None,
            rested: Duration::ZERO,
            unproven_limit: policy.max_celsius.map(|limit_celsius| {
                let uses_step_times = policy.mode != GovernorMode::Full;
                WarningKind::TemperatureUnknown { limit_celsius, uses_step_times }
            }),
        }
    }

    /// A new one with these memory levels.
    #[cfg(test)]
    pub fn with_levels(&self, levels: &[MemoryLevel]) -> Self {
        let policy =
            GovernorPolicy { mode: GovernorMode::Full, max_celsius: None, is_calibrated: false };
        let pacing = Self::new(policy, levels.to_vec(), 0, self.rates.clone());
        Self { held: self.held.clone(), ..pacing }
    }

    /// Micro-batch size and gradient checkpointing of the current level.
    pub fn batch_settings(&self) -> BatchSettings {
        self.levels[self.governor.pace().level].settings
    }

    /// What the arena may take at a level.
    fn arena_bytes(&self, level: usize) -> usize {
        if level == 0 { self.training_bytes } else { self.levels[level].peak_bytes }
    }

    /// Falls back to the next memory level, if there is one.
    pub fn fall_back(&mut self) -> Option<BatchSettings> {
        let is_last = self.governor.pace().level + 1 == self.levels.len();
        if is_last {
            return None;
        }
        self.governor.out_of_memory(self.begun.elapsed());
        Some(self.batch_settings())
    }

    /// Energy so far. Power since the last reading is taken to be constant.
    pub fn energy(&mut self) -> Option<event::EnergyUsed> {
        self.readings();
        self.energy.add(Instant::now(), self.reading.as_ref()?.watts);
        Some(event::EnergyUsed { joules: self.energy.joules()?, covered: self.energy.covered() })
    }

    /// Seconds of rest since the last call.
    pub fn rest_secs(&mut self) -> f64 {
        std::mem::take(&mut self.rested).as_secs_f64()
    }

    /// Telemetry since the last call.
    fn readings(&mut self) -> Vec<(Instant, Telemetry)> {
        let readings = self.sampler.as_ref().map_or_else(Vec::new, TelemetrySampler::drain);
        for (at, telemetry) in &readings {
            self.energy.add(*at, telemetry.watts);
            self.reading = Some(telemetry.clone());
        }
        readings
    }

    /// The governor's decisions on it.
    fn update_governor(&mut self) -> Vec<PaceDecision> {
        let mut decisions = Vec::new();
        for (at, telemetry) in self.readings() {
            let since = at.saturating_duration_since(self.begun);
            decisions.extend(self.governor.observe(since, &telemetry));
        }
        decisions
    }

    /// What the machine feels like, where it says so.
    pub fn celsius(&self) -> Option<f64> {
        Some(self.reading.as_ref()?.temperature.as_ref()?.celsius)
    }

    /// The warning that a temperature limit cannot be held, once, as soon as a reading shows it.
    fn unheld_limit(&mut self) -> Option<WarningKind> {
        if self.sampler.is_some() && self.reading.is_none() {
            return None;
        }
        let has_sensor = self.reading.as_ref().is_some_and(|it| it.temperature.is_some());
        self.unproven_limit.take().filter(|_| !has_sensor)
    }

    /// The telemetry event, if one is due.
    fn snapshot_event(&mut self, step: u64) -> Option<Event> {
        let telemetry = self.reading.clone()?;
        if self.emitted.is_some_and(|at| at.elapsed() < EMIT_EVERY) {
            return None;
        }
        self.emitted = Some(Instant::now());
        let (secs, pace) = (self.begun.elapsed().as_secs_f64(), self.governor.pace());
        Some(Event::Telemetry(MachineSnapshot { step, secs, telemetry, duty: pace.duty }))
    }
}

/// A run's pace, and what it acts on.
pub struct Pacer<'a> {
    /// The pace.
    pub pacing: &'a mut Pacing,
    /// Whose memory is released.
    pub device: &'a Device,
    /// Where decisions are emitted to.
    pub events: &'a EventSink<'a>,
    /// The last step.
    pub step: u64,
}

impl Pacer<'_> {
    /// Applies decisions since the last call; returns when the run is not paused, neither by the governor nor by
    /// request, or asked to stop.
    pub fn wait_while_paused(&mut self) -> Result<()> {
        self.update()?;
        while self.is_paused() && self.events.should_continue() {
            // Answers who asked for it.
            self.events.requests()?;
            self.rest(REST_PIECE);
            self.update()?;
        }
        Ok(())
    }

    fn is_paused(&self) -> bool {
        self.pacing.governor.pace().is_paused || self.events.is_paused()
    }

    /// Rests after so much work, as long as the pace asks for, or until somebody asks to stop.
    pub fn rest_after(&mut self, worked: Duration) {
        let duty = self.pacing.governor.pace().duty;
        let until = Instant::now() + worked.mul_f64(1.0 / duty - 1.0);
        while self.events.should_continue() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            self.rest(left.min(REST_PIECE));
        }
    }

    fn rest(&mut self, piece: Duration) {
        thread::sleep(piece);
        self.pacing.rested += piece;
    }

    fn update(&mut self) -> Result<()> {
        let decisions = self.pacing.update_governor();
        self.apply_decisions(decisions)?;
        let step = self.step;
        let warning = self.pacing.unheld_limit().map(|kind| Event::Warning(Warning { step, kind }));
        self.events.emit_all(warning.into_iter().chain(self.pacing.snapshot_event(step)))
    }

    /// Gives back what no tensor is in. Returns how much less is held, where the system tells.
    fn trim(&self) -> Option<u64> {
        let before = self.pacing.held.now();
        self.device.trim();
        Some(before?.saturating_sub(self.pacing.held.now()?))
    }

    /// Applies decisions, and emits them.
    pub fn apply_decisions(&mut self, decisions: Vec<PaceDecision>) -> Result<()> {
        for decision in decisions {
            let (from, to) = (decision.from, decision.to);
            if from.level != to.level {
                self.device.set_limit(self.pacing.arena_bytes(to.level));
            }
            let gives_back = to.level > from.level || (to.is_paused && !from.is_paused);
            let freed_bytes = if gives_back { self.trim() } else { None };
            let (step, settings) = (self.step, self.pacing.levels[to.level].settings);
            self.events.emit(Event::Pace(PaceChange { step, settings, freed_bytes, decision }))?;
        }
        Ok(())
    }
}

/// Paces work that asks between its parts whether to continue, as encoding and sampling do. Asked from several threads,
/// which rest together.
pub struct PacedProgress<'a>(Mutex<(Pacer<'a>, Instant)>);

impl<'a> PacedProgress<'a> {
    /// Of work that begins now.
    pub fn new(pacer: Pacer<'a>) -> Self {
        Self(Mutex::new((pacer, Instant::now())))
    }

    /// Rests and waits; then says whether nobody asked to stop.
    pub fn should_continue(&self) -> bool {
        let (pacer, since) = &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let worked = since.elapsed();
        if worked >= MIN_WORK {
            pacer.rest_after(worked);
            // What cannot be written now cannot be at the next event, which says so.
            _ = pacer.wait_while_paused();
            *since = Instant::now();
        }
        pacer.events.should_continue()
    }
}

impl<D: DataLoader> TrainingRun<'_, D> {
    pub(super) fn pacer(&mut self) -> Pacer<'_> {
        let Self { pacing, device, events, progress, .. } = self;
        Pacer { pacing, device, events, step: progress.step }
    }

    /// Before a micro-batch, which may have another size afterwards.
    pub(super) fn wait_while_paused(&mut self) -> Result<()> {
        self.pacer().wait_while_paused()
    }

    /// A micro-batch of so many samples begins.
    pub(super) fn begin_micro_batch(
        &mut self,
        size: <D::Task as Task>::Size,
        n_samples: usize,
    ) -> MicroBatchTimer {
        let settings = self.pacing.batch_settings();
        let kind = MicroBatchKind { size: size.to_string(), n_samples, settings };
        let is_new = !self.pacing.expected.contains_key(&kind);
        MicroBatchTimer { kind, at: Instant::now(), work: is_new.then(|| self.device.work()) }
    }

    /// It has ended: records its time, and rests as long as the pace asks for.
    pub(super) fn end_micro_batch(&mut self, timer: MicroBatchTimer) -> Result<()> {
        let worked = timer.at.elapsed();
        if let Some(before) = timer.work {
            let secs = self.pacing.rates.seconds(&self.device.work().since(&before));
            self.pacing.expected.insert(timer.kind.clone(), secs);
        }
        let expected_secs = self.pacing.expected[&timer.kind];
        let took = StepTime { secs: worked.as_secs_f64(), expected_secs };
        let now = self.pacing.begun.elapsed();
        let decisions = self.pacing.governor.record_step(now, took);
        let mut pacer = self.pacer();
        pacer.apply_decisions(decisions)?;
        pacer.rest_after(worked);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use compute::{CancelToken, DeviceKind};
    use machine::telemetry::Temperature;
    use machine::{Machine, ProbeSource};

    use super::*;
    use crate::model::recompute::Recompute;

    fn pacing(mode: GovernorMode, max_celsius: Option<f64>) -> Pacing {
        let policy = GovernorPolicy { mode, max_celsius, is_calibrated: false };
        let settings = BatchSettings { micro_batch: 1, recompute: Recompute::None };
        let rates =
            Rates::documented(&Machine::probe(&mut ProbeSource::live()), DeviceKind::cpu(1));
        Pacing::new(policy, vec![MemoryLevel { settings, peak_bytes: 1 }], 0, rates)
    }

    #[test]
    fn a_limit_that_cannot_be_held_is_reported_once() {
        for mode in [GovernorMode::Balanced, GovernorMode::Full] {
            let mut unheld = pacing(mode, Some(80.0));
            let uses_step_times = mode == GovernorMode::Balanced;
            let expected = WarningKind::TemperatureUnknown { limit_celsius: 80.0, uses_step_times };
            assert_eq!([0; 2].map(|_| unheld.unheld_limit()), [Some(expected), None]);
        }
        assert_eq!(pacing(GovernorMode::Balanced, None).unheld_limit(), None);
        let mut held = pacing(GovernorMode::Balanced, Some(80.0));
        let temperature = Temperature { sensor: "cpu".into(), celsius: 50.0, limit: None };
        held.reading = Some(Telemetry { temperature: Some(temperature), ..Telemetry::default() });
        assert_eq!(held.unheld_limit(), None);
    }

    /// Half the time, as in quiet mode, until somebody asks to stop.
    #[test]
    fn work_that_asks_whether_to_continue_rests_in_between() {
        let folder = tempfile::tempdir().unwrap();
        let (stop, device) = (CancelToken::default(), Device::meta(DeviceKind::cpu(1), 1 << 20));
        let events = EventSink::open(folder.path(), false, &[], &stop).unwrap();
        let mut pacing = pacing(GovernorMode::Quiet, None);
        let worked = Duration::from_millis(60);
        let work = |pacing: &mut Pacing| {
            let pacer = Pacer { pacing, device: &device, events: &events, step: 0 };
            let pace = PacedProgress::new(pacer);
            thread::sleep(worked);
            // Asked the second time too soon for a rest.
            [pace.should_continue(), pace.should_continue()]
        };
        let begun = Instant::now();
        assert_eq!(work(&mut pacing), [true, true]);
        assert!(begun.elapsed() >= 2 * worked, "{:?}", begun.elapsed());
        // A thread that was not scheduled has rested too.
        assert!(pacing.rest_secs() > 0.0);
        stop.cancel();
        assert_eq!(work(&mut pacing), [false, false]);
        assert!(pacing.rest_secs() == 0.0);
    }
}
