//! Keeps to the governor's pace (`machine::governor`): tells it what the machine feels like and what
//! batches took, and does what it says, between two batches. A tighter way of computing takes effect with
//! the next batch; memory that is free then goes back to the system. Rest is taken in small pieces, so
//! that whoever asks the run to stop is heard.
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

/// How often the machine's state is written down. Chosen: an hour is 360 points of a curve.
const EMIT_EVERY: Duration = Duration::from_secs(10);
/// A piece of rest.
const REST_PIECE: Duration = Duration::from_millis(100);

/// Whose batches are expected to take the same time: of one size, in words, and as many.
type BatchKind = (String, usize, BatchSettings);

/// The governor with all that it goes by.
pub struct Pacing {
    governor: Governor,
    /// From the plan's way of computing on, each tighter than the one before.
    pub(super) levels: Vec<MemoryLevel>,
    sampler: Option<TelemetrySampler>,
    begun: Instant,
    rates: Rates,
    /// Seconds of batches, as their work and the machine's rates say.
    expected: HashMap<BatchKind, f64>,
    energy: EnergyMeter,
    /// The last reading, and when one was written down.
    reading: Option<Telemetry>,
    emitted: Option<Instant>,
    /// Rest since a step was last told of.
    rested: Duration,
}

/// A batch that is being computed.
pub struct BatchTimer {
    kind: BatchKind,
    at: Instant,
    /// Before it, if nobody knows yet how long it is to take.
    work: Option<WorkStats>,
}

impl Pacing {
    /// From the plan's pace on. In every way there is room to measure, which cannot be done tighter.
    pub fn of(
        config: &RunConfig,
        on: &DeviceSetup<'_>,
        plan: &Plan,
        levels: &[MemoryLevel],
    ) -> Self {
        let measured = plan.phases.iter().filter(|phase| matches!(phase.name, Phase::Validate(_)));
        let least = measured.map(|phase| phase.peak_bytes).max().unwrap_or(0);
        let roomy =
            |level: &MemoryLevel| MemoryLevel { peak_bytes: level.peak_bytes.max(least), ..*level };
        let levels = (levels.iter().map(roomy).collect(), plan.host_bytes);
        let policy = GovernorPolicy {
            mode: config.machine.mode,
            max_celsius: config.machine.max_temp,
            is_calibrated: on.rates.is_measured,
        };
        Self::new(policy, levels, on.rates.clone(), (on.start_sampler)())
    }

    /// At the plan's pace. `memory levels` has bytes of the arena; the program holds `host_bytes` beside it.
    fn new(
        policy: GovernorPolicy,
        (levels, host_bytes): (Vec<MemoryLevel>, usize),
        rates: Rates,
        sampler: Option<TelemetrySampler>,
    ) -> Self {
        let bytes = |level: &MemoryLevel| (level.peak_bytes + host_bytes) as u64;
        let governed =
            levels.iter().map(|level| governor::GovernorLevel { bytes: bytes(level) }).collect();
        Self {
            governor: Governor::new(policy, governed),
            levels,
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

    /// The same from the start, on this memory levels.
    #[cfg(test)]
    pub fn with_levels(&self, levels: &[MemoryLevel]) -> Self {
        let policy =
            GovernorPolicy { mode: GovernorMode::Full, max_celsius: None, is_calibrated: false };
        Self::new(policy, (levels.to_vec(), 0), self.rates.clone(), None)
    }

    /// The way of computing now.
    pub fn how(&self) -> BatchSettings {
        self.levels[self.governor.pace().level].how
    }

    /// Goes over to the next tighter way, if there is one.
    pub fn fall_back(&mut self) -> Option<BatchSettings> {
        let is_tightest = self.governor.pace().level + 1 == self.levels.len();
        if is_tightest {
            return None;
        }
        self.governor.out_of_memory(self.begun.elapsed());
        Some(self.how())
    }

    /// Energy so far. Power is taken to be since the last reading what it was then.
    pub fn energy(&mut self) -> Option<event::EnergyUsed> {
        self.readings();
        self.energy.add(Instant::now(), self.reading.as_ref()?.watts);
        Some(event::EnergyUsed { joules: self.energy.joules()?, covered: self.energy.covered() })
    }

    /// Seconds that were rested since this was last asked.
    pub fn rest_secs(&mut self) -> f64 {
        std::mem::take(&mut self.rested).as_secs_f64()
    }

    /// What the machine felt like since the last time.
    fn readings(&mut self) -> Vec<(Instant, Telemetry)> {
        let readings = self.sampler.as_ref().map_or_else(Vec::new, TelemetrySampler::drain);
        for (at, feel) in &readings {
            self.energy.add(*at, feel.watts);
            self.reading = Some(feel.clone());
        }
        readings
    }

    /// What is decided on it.
    fn update_governor(&mut self) -> Vec<PaceDecision> {
        let mut decisions = Vec::new();
        for (at, feel) in self.readings() {
            let since = at.saturating_duration_since(self.begun);
            decisions.extend(self.governor.observe(since, &feel));
        }
        decisions
    }

    /// What there is to write down of the machine, if it is time to.
    fn snapshot_event(&mut self, step: u64) -> Option<Event> {
        let feel = self.reading.clone()?;
        if self.emitted.is_some_and(|at| at.elapsed() < EMIT_EVERY) {
            return None;
        }
        self.emitted = Some(Instant::now());
        let (secs, pace) = (self.begun.elapsed().as_secs_f64(), self.governor.pace());
        Some(Event::Felt(MachineSnapshot { step, secs, feel, duty: pace.duty }))
    }
}

impl<F: DataLoader> TrainingRun<'_, F> {
    /// Before a batch of so many samples.
    pub(super) fn begin_batch(
        &mut self,
        size: <F::Task as Task>::Size,
        n_samples: usize,
    ) -> Result<BatchTimer> {
        self.update_pace()?;
        while self.pacing.governor.pace().is_paused && self.events.should_continue() {
            self.rest(REST_PIECE);
            self.update_pace()?;
        }
        let kind = (size.to_string(), n_samples, self.pacing.how());
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

    /// Does what was decided, and says so.
    pub(super) fn apply_decisions(&mut self, decisions: Vec<PaceDecision>) -> Result<()> {
        for decision in decisions {
            let (from, to) = (decision.from, decision.to);
            if from.level != to.level {
                // The plan's own way has all of the arena: images may take more than a step does.
                let tighter = (to.level > 0).then(|| self.pacing.levels[to.level].peak_bytes);
                self.device.set_limit(tighter.unwrap_or(usize::MAX));
            }
            if to.level > from.level || (to.is_paused && !from.is_paused) {
                self.device.trim();
            }
            let (step, how) = (self.progress.step, self.pacing.levels[to.level].how);
            self.events.emit(Event::Paced(PaceChange { step, how, decision }))?;
        }
        Ok(())
    }
}
