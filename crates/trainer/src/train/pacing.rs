//! Keeps to the governor's pace (`machine::governor`): tells it what the machine feels like and what
//! batches took, and does what it says, between two batches. A tighter way of computing takes effect with
//! the next batch; memory that is free then goes back to the system. Rest is taken in small pieces, so
//! that whoever asks the run to stop is heard.
//!
//! Encoding is not paced: it is short beside training.

use std::collections::HashMap;
use std::thread;
use std::time::{Duration, Instant};

use compute::Work;
use machine::energy::Energy;
use machine::feel::Feel;
#[cfg(test)]
use machine::governor::Mode;
use machine::governor::{self, Decision, Governor, Policy, Took};
use machine::sampler::Sampler;

use super::On;
use super::run::Run;
use crate::config::RunConfig;
use crate::config::how::How;
use crate::error::Result;
use crate::event::{self, Event, Felt, Paced, Phase};
use crate::plan::{Plan, Rates, Rung};
use crate::task::lesson::{Feed, Lesson};

/// How often the machine's state is written down. Chosen: an hour is 360 points of a curve.
const WRITTEN_EVERY: Duration = Duration::from_secs(10);
/// A piece of rest.
const PIECE: Duration = Duration::from_millis(100);

/// Whose batches are expected to take the same time: of one size, in words, and as many.
type Kind = (String, usize, How);

/// The governor with all that it goes by.
pub struct Pacing {
    governor: Governor,
    /// From the plan's way of computing on, each tighter than the one before.
    pub(super) ladder: Vec<Rung>,
    sampler: Option<Sampler>,
    begun: Instant,
    rates: Rates,
    /// Seconds of batches, as their work and the machine's rates say.
    expected: HashMap<Kind, f64>,
    energy: Energy,
    /// The last reading, and when one was written down.
    feel: Option<Feel>,
    written: Option<Instant>,
    /// Rest since a step was last told of.
    rested: Duration,
}

/// A batch that is being computed.
pub struct Begun {
    kind: Kind,
    at: Instant,
    /// Before it, if nobody knows yet how long it is to take.
    work: Option<Work>,
}

impl Pacing {
    /// From the plan's pace on. In every way there is room to measure, which cannot be done tighter.
    pub fn of(config: &RunConfig, on: &On<'_>, plan: &Plan, ladder: &[Rung]) -> Self {
        let measured = plan.phases.iter().filter(|phase| matches!(phase.name, Phase::Validate(_)));
        let least = measured.map(|phase| phase.peak_bytes).max().unwrap_or(0);
        let roomy = |rung: &Rung| Rung { peak_bytes: rung.peak_bytes.max(least), ..*rung };
        let ladder = (ladder.iter().map(roomy).collect(), plan.host_bytes);
        let policy = Policy {
            mode: config.machine.mode,
            max_celsius: config.machine.max_temp,
            is_calibrated: on.rates.is_measured,
        };
        Self::new(policy, ladder, on.rates.clone(), (on.feel)())
    }

    /// At the plan's pace. `ladder` has bytes of the arena; the program holds `host_bytes` beside it.
    fn new(
        policy: Policy,
        (ladder, host_bytes): (Vec<Rung>, usize),
        rates: Rates,
        sampler: Option<Sampler>,
    ) -> Self {
        let bytes = |rung: &Rung| (rung.peak_bytes + host_bytes) as u64;
        let rungs = ladder.iter().map(|rung| governor::Rung { bytes: bytes(rung) }).collect();
        Self {
            governor: Governor::new(policy, rungs),
            ladder,
            sampler,
            begun: Instant::now(),
            rates,
            expected: HashMap::new(),
            energy: Energy::default(),
            feel: None,
            written: None,
            rested: Duration::ZERO,
        }
    }

    /// The same from the start, on this ladder.
    #[cfg(test)]
    pub fn on(&self, ladder: &[Rung]) -> Self {
        let policy = Policy { mode: Mode::Full, max_celsius: None, is_calibrated: false };
        Self::new(policy, (ladder.to_vec(), 0), self.rates.clone(), None)
    }

    /// The way of computing now.
    pub fn how(&self) -> How {
        self.ladder[self.governor.pace().rung].how
    }

    /// Goes over to the next tighter way, if there is one.
    pub fn tighten(&mut self) -> Option<How> {
        let is_tightest = self.governor.pace().rung + 1 == self.ladder.len();
        if is_tightest {
            return None;
        }
        self.governor.refused(self.begun.elapsed());
        Some(self.how())
    }

    /// Energy so far. Power is taken to be since the last reading what it was then.
    pub fn energy(&mut self) -> Option<event::Energy> {
        self.readings();
        self.energy.add(Instant::now(), self.feel.as_ref()?.watts);
        Some(event::Energy { joules: self.energy.joules()?, covered: self.energy.covered() })
    }

    /// Seconds that were rested since this was last asked.
    pub fn rest_secs(&mut self) -> f64 {
        std::mem::take(&mut self.rested).as_secs_f64()
    }

    /// What the machine felt like since the last time.
    fn readings(&mut self) -> Vec<(Instant, Feel)> {
        let readings = self.sampler.as_ref().map_or_else(Vec::new, Sampler::drain);
        for (at, feel) in &readings {
            self.energy.add(*at, feel.watts);
            self.feel = Some(feel.clone());
        }
        readings
    }

    /// What is decided on it.
    fn feel(&mut self) -> Vec<Decision> {
        let mut decisions = Vec::new();
        for (at, feel) in self.readings() {
            let since = at.saturating_duration_since(self.begun);
            decisions.extend(self.governor.feel(since, &feel));
        }
        decisions
    }

    /// What there is to write down of the machine, if it is time to.
    fn felt(&mut self, step: u64) -> Option<Event> {
        let feel = self.feel.clone()?;
        if self.written.is_some_and(|at| at.elapsed() < WRITTEN_EVERY) {
            return None;
        }
        self.written = Some(Instant::now());
        let (secs, pace) = (self.begun.elapsed().as_secs_f64(), self.governor.pace());
        Some(Event::Felt(Felt { step, secs, feel, duty: pace.duty }))
    }
}

impl<F: Feed> Run<'_, F> {
    /// Before a batch of so many samples.
    pub(super) fn begin_batch(
        &mut self,
        size: <F::Lesson as Lesson>::Size,
        n_samples: usize,
    ) -> Result<Begun> {
        self.feel()?;
        while self.pacing.governor.pace().is_paused && self.events.goes_on() {
            self.rest(PIECE);
            self.feel()?;
        }
        let kind = (size.to_string(), n_samples, self.pacing.how());
        let is_new = !self.pacing.expected.contains_key(&kind);
        Ok(Begun { kind, at: Instant::now(), work: is_new.then(|| self.device.work()) })
    }

    /// After it: rests as long as the pace asks for.
    pub(super) fn end_batch(&mut self, batch: Begun) -> Result<()> {
        let secs = batch.at.elapsed().as_secs_f64();
        if let Some(before) = batch.work {
            let secs = self.pacing.rates.seconds(&self.device.work().since(&before));
            self.pacing.expected.insert(batch.kind.clone(), secs);
        }
        let took = Took { secs, expected_secs: self.pacing.expected[&batch.kind] };
        let now = self.pacing.begun.elapsed();
        let decisions = self.pacing.governor.took(now, took);
        self.keep_to(decisions)?;
        let duty = self.pacing.governor.pace().duty;
        let until = Instant::now() + Duration::from_secs_f64(secs * (1.0 / duty - 1.0));
        while self.events.goes_on() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            self.rest(left.min(PIECE));
        }
        Ok(())
    }

    fn rest(&mut self, piece: Duration) {
        thread::sleep(piece);
        self.pacing.rested += piece;
    }

    fn feel(&mut self) -> Result<()> {
        let decisions = self.pacing.feel();
        self.keep_to(decisions)?;
        match self.pacing.felt(self.progress.step) {
            Some(event) => self.events.emit(event),
            None => Ok(()),
        }
    }

    /// Does what was decided, and says so.
    pub(super) fn keep_to(&mut self, decisions: Vec<Decision>) -> Result<()> {
        for decision in decisions {
            let (from, to) = (decision.from, decision.to);
            if from.rung != to.rung {
                // The plan's own way has all of the arena: pictures may take more than a step does.
                let tighter = (to.rung > 0).then(|| self.pacing.ladder[to.rung].peak_bytes);
                self.device.set_limit(tighter.unwrap_or(usize::MAX));
            }
            if to.rung > from.rung || (to.is_paused && !from.is_paused) {
                self.device.trim();
            }
            let (step, how) = (self.progress.step, self.pacing.ladder[to.rung].how);
            self.events.emit(Event::Paced(Paced { step, how, decision }))?;
        }
        Ok(())
    }
}
