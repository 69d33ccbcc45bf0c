//! Keeps to the governor's pace (`machine::governor`): passes it telemetry and batch times, and applies its
//! decisions between two batches. Another memory level takes effect with the next batch; freed memory then goes
//! back to the system. Pauses are slept in small pieces, so that a request to stop is heard.
//!
//! Encoding is not paced: it is short beside training.

use std::collections::HashMap;
use std::thread;
use std::time::{Duration, Instant};

use compute::WorkStats;
use machine::energy::EnergyMeter;
#[cfg(test)]
use machine::governor::GovernorMode;
use machine::governor::{self, Governor, GovernorPolicy, PaceDecision, StepTime};
use machine::sampler::TelemetrySampler;
use machine::telemetry::Telemetry;

use super::DeviceSetup;
use super::run::TrainingRun;
use crate::config::RunConfig;
use crate::config::batch::BatchSettings;
use crate::error::Result;
use crate::event::{self, Event, MachineSnapshot, PaceChange, Phase};
use crate::plan::{MemoryLevel, Plan, Rates};
use crate::task::traits::{DataLoader, Task};

/// How often telemetry is emitted. Chosen: an hour is 360 points of a curve.
const EMIT_EVERY: Duration = Duration::from_secs(10);
/// A piece of a pause.
const REST_PIECE: Duration = Duration::from_millis(100);

/// Batches that are expected to take the same time.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct BatchKind {
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
    sampler: Option<TelemetrySampler>,
    begun: Instant,
    rates: Rates,
    /// Expected seconds of batches, from their work and the machine's rates.
    expected: HashMap<BatchKind, f64>,
    energy: EnergyMeter,
    /// The last reading, and when one was emitted.
    reading: Option<Telemetry>,
    emitted: Option<Instant>,
    /// Rest since the last step event.
    rested: Duration,
}

/// A batch that is being computed.
pub struct BatchTimer {
    kind: BatchKind,
    at: Instant,
    /// Work counters before it, if its expected time is not known yet.
    work: Option<WorkStats>,
}

impl Pacing {
    /// At the plan's level. Every level has at least the memory of a validation, which has no smaller form.
    pub fn of(
        config: &RunConfig,
        device_setup: &DeviceSetup<'_>,
        plan: &Plan,
        levels: &[MemoryLevel],
    ) -> Self {
        let validation =
            plan.phases.iter().filter(|phase| matches!(phase.name, Phase::Validate(_)));
        let least = validation.map(|phase| phase.peak_bytes).max().unwrap_or(0);
        let raised =
            |level: &MemoryLevel| MemoryLevel { peak_bytes: level.peak_bytes.max(least), ..*level };
        let levels = levels.iter().map(raised).collect();
        let policy = GovernorPolicy {
            mode: config.machine.mode,
            max_celsius: config.machine.max_temp,
            is_calibrated: device_setup.rates.is_measured,
        };
        let (rates, sampler) = (device_setup.rates.clone(), (device_setup.start_sampler)());
        let pacing = Self::new(policy, levels, plan.host_bytes, rates, sampler);
        Self { training_bytes: plan.training_bytes(), ..pacing }
    }

    /// At the first level. `levels` have bytes of the arena; the program holds `host_bytes` outside it.
    fn new(
        policy: GovernorPolicy,
        levels: Vec<MemoryLevel>,
        host_bytes: usize,
        rates: Rates,
        sampler: Option<TelemetrySampler>,
    ) -> Self {
        let bytes = |level: &MemoryLevel| (level.peak_bytes + host_bytes) as u64;
        let governed =
            levels.iter().map(|level| governor::GovernorLevel { bytes: bytes(level) }).collect();
        Self {
            governor: Governor::new(policy, governed),
            levels,
            training_bytes: usize::MAX,
            sampler,
            begun: Instant::now(),
            rates,
            expected: HashMap::new(),
            energy: EnergyMeter::default(),
            reading: None,
            emitted: None,
            rested: Duration::ZERO,
        }
    }

    /// A new one with these memory levels.
    #[cfg(test)]
    pub fn with_levels(&self, levels: &[MemoryLevel]) -> Self {
        let policy =
            GovernorPolicy { mode: GovernorMode::Full, max_celsius: None, is_calibrated: false };
        Self::new(policy, levels.to_vec(), 0, self.rates.clone(), None)
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

impl<D: DataLoader> TrainingRun<'_, D> {
    /// Before a batch of so many samples.
    pub(super) fn begin_batch(
        &mut self,
        size: <D::Task as Task>::Size,
        n_samples: usize,
    ) -> Result<BatchTimer> {
        self.update_pace()?;
        while self.pacing.governor.pace().is_paused && self.events.should_continue() {
            self.rest(REST_PIECE);
            self.update_pace()?;
        }
        let (size, settings) = (size.to_string(), self.pacing.batch_settings());
        let kind = BatchKind { size, n_samples, settings };
        let is_new = !self.pacing.expected.contains_key(&kind);
        Ok(BatchTimer { kind, at: Instant::now(), work: is_new.then(|| self.device.work()) })
    }

    /// After it: rests as long as the pace asks for.
    pub(super) fn end_batch(&mut self, batch: BatchTimer) -> Result<()> {
        let secs = batch.at.elapsed().as_secs_f64();
        if let Some(before) = batch.work {
            let secs = self.pacing.rates.seconds(&self.device.work().since(&before));
            self.pacing.expected.insert(batch.kind.clone(), secs);
        }
        let took = StepTime { secs, expected_secs: self.pacing.expected[&batch.kind] };
        let now = self.pacing.begun.elapsed();
        let decisions = self.pacing.governor.record_step(now, took);
        self.apply_decisions(decisions)?;
        let duty = self.pacing.governor.pace().duty;
        let until = Instant::now() + Duration::from_secs_f64(secs * (1.0 / duty - 1.0));
        while self.events.should_continue() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            self.rest(left.min(REST_PIECE));
        }
        Ok(())
    }

    fn rest(&mut self, piece: Duration) {
        thread::sleep(piece);
        self.pacing.rested += piece;
    }

    fn update_pace(&mut self) -> Result<()> {
        let decisions = self.pacing.update_governor();
        self.apply_decisions(decisions)?;
        match self.pacing.snapshot_event(self.progress.step) {
            Some(event) => self.events.emit(event),
            None => Ok(()),
        }
    }

    /// Applies decisions, and emits them.
    pub(super) fn apply_decisions(&mut self, decisions: Vec<PaceDecision>) -> Result<()> {
        for decision in decisions {
            let (from, to) = (decision.from, decision.to);
            if from.level != to.level {
                self.device.set_limit(self.pacing.arena_bytes(to.level));
            }
            if to.level > from.level || (to.is_paused && !from.is_paused) {
                self.device.trim();
            }
            let (step, settings) = (self.progress.step, self.pacing.levels[to.level].settings);
            self.events.emit(Event::Pace(PaceChange { step, settings, decision }))?;
        }
        Ok(())
    }
}
