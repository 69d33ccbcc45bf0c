//! How long a run still takes: what each kind of work took so far, times how often it is still to come.
//! Knows no clock; whoever listens to a run's events says when each one came.

use std::collections::VecDeque;

use super::{Event, TimeEstimate};
use crate::config::{RunConfig, Switch};

/// Steps that the time of a step is the mean of: a machine's speed may change. Chosen: enough to even out
/// images of several sizes.
const RECENT_STEPS: usize = 20;

/// The time left, as events come in.
pub struct Eta {
    step: u64,
    total_steps: u64,
    /// When the last work ended.
    since: f64,
    recent_steps: VecDeque<f64>,
    validations: RecurringWork,
    samples: RecurringWork,
    saves: RecurringWork,
}

/// Work that is done after some steps and after the last one.
struct RecurringWork {
    every: Switch<u64>,
    /// Seconds each time, by the plan: what counts until one was seen.
    planned_secs: f64,
    n: u64,
    secs: f64,
    /// The step after which it was done last.
    last: Option<u64>,
}

impl Eta {
    /// Of a job.
    pub fn new(config: &RunConfig) -> Self {
        Self {
            step: 0,
            total_steps: 0,
            since: 0.0,
            recent_steps: VecDeque::new(),
            validations: RecurringWork::new(Switch::On(config.train.validate_every)),
            samples: RecurringWork::new(config.data.sample_every()),
            saves: RecurringWork::new(config.output.save_every),
        }
    }

    /// Of a run whose job is not known: as if it had nothing to do but steps.
    pub fn unknown() -> Self {
        Self {
            step: 0,
            total_steps: 0,
            since: 0.0,
            recent_steps: VecDeque::new(),
            validations: RecurringWork::new(Switch::Off),
            samples: RecurringWork::new(Switch::Off),
            saves: RecurringWork::new(Switch::Off),
        }
    }

    /// Takes an event in that came at `secs` of a clock. The time since the last work is this one's, with
    /// the rest that was taken.
    pub fn observe(&mut self, event: &Event, secs: f64) {
        let taken = secs - self.since;
        match event {
            Event::Begin(begin) => {
                (self.step, self.total_steps) = (begin.from_step, begin.steps);
                let TimeEstimate { validation, samples, saving, .. } = begin.times;
                self.validations.planned_secs = validation.secs;
                self.samples.planned_secs = samples.secs;
                self.saves.planned_secs = saving.secs;
            }
            Event::Step(step) => {
                self.step = step.step;
                self.recent_steps.push_back(taken);
                if self.recent_steps.len() > RECENT_STEPS {
                    self.recent_steps.pop_front();
                }
            }
            Event::Validation { .. } => self.validations.add(self.step, taken),
            Event::ImageSample { .. } | Event::TextSample { .. } => {
                self.samples.add(self.step, taken);
            }
            Event::Checkpoint { .. } => self.saves.add(self.step, taken),
            _ => return,
        }
        self.since = secs;
    }

    /// Seconds from the last event to the end; none before the first step.
    pub fn left_secs(&self) -> Option<f64> {
        let n = (!self.recent_steps.is_empty()).then_some(self.recent_steps.len())?;
        let per_step = self.recent_steps.iter().sum::<f64>() / n as f64;
        let steps = per_step * self.total_steps.saturating_sub(self.step) as f64;
        let others = [&self.validations, &self.samples, &self.saves];
        let others = others.map(|work| work.left_secs(self.step, self.total_steps));
        Some(steps + others.iter().sum::<f64>())
    }
}

impl RecurringWork {
    fn new(every: Switch<u64>) -> Self {
        Self { every, planned_secs: 0.0, n: 0, secs: 0.0, last: None }
    }

    /// Several events of one occasion are one: a sample of each prompt.
    fn add(&mut self, step: u64, secs: f64) {
        self.n += u64::from(self.last != Some(step));
        self.secs += secs;
        self.last = Some(step);
    }

    /// For all that is due from `step` on.
    fn left_secs(&self, step: u64, total_steps: u64) -> f64 {
        let below = |step: u64| match self.every {
            Switch::On(every) => step.div_ceil(every),
            Switch::Off => 0,
        };
        let after_last = 1;
        let due = below(total_steps).saturating_sub(below(step)) + after_last;
        let is_regular = matches!(self.every, Switch::On(every) if step.is_multiple_of(every));
        let is_done = self.last == Some(step) && (is_regular || step == total_steps);
        let each_secs = if self.n == 0 { self.planned_secs } else { self.secs / self.n as f64 };
        (due - u64::from(is_done)) as f64 * each_secs
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::RawConfig;

    const JOB: &str = "
[base]
path = 'base'
[data]
images = 'images'
validation = 1
[train]
steps = 10
validate_every = 4
[sample]
prompts = ['a', 'b']
every = 5
[output]
save_every = 3
";

    fn event(json: &str) -> Event {
        serde_json::from_str(json).unwrap()
    }

    fn begin(from_step: u64) -> Event {
        event(&format!(
            r#"{{"event":"begin","version":"","base":"","engine":"","from_step":{from_step},"steps":10,
            "samples":1,"held_out":1,"layers":1,"parameters":1,"samples_per_step":1,"phases":[],
            "times":{{"saving":{{"secs":0.5,"times":4}}}},"limit_bytes":1}}"#
        ))
    }

    fn step(step: u64) -> Event {
        event(&format!(
            r#"{{"event":"step","step":{step},"loss":1.0,"grad_norm":1.0,"learning_rate":1.0,
            "secs":0.5,"wait_secs":0.0,"peak_bytes":1}}"#
        ))
    }

    fn validation(step: u64) -> Event {
        Event::Validation { step, loss: 1.0 }
    }

    fn sample(step: u64) -> Event {
        Event::ImageSample {
            step,
            path: "a.png".into(),
            prompt: "a".into(),
            seed: 1,
            references: Vec::new(),
            clip: None,
        }
    }

    fn save(step: u64) -> Event {
        Event::Checkpoint { step, path: "a".into() }
    }

    /// The time left after each of the events, which come so many seconds after each other.
    fn left(events: &[(f64, Event)]) -> Vec<Option<f64>> {
        let config = RawConfig::from_text(JOB, Path::new("job.toml")).unwrap().resolve().unwrap();
        let (mut eta, mut now) = (Eta::new(&config), 100.0);
        let mut observed = |(secs, event): &(f64, Event)| {
            now += secs;
            eta.observe(event, now);
            eta.left_secs()
        };
        events.iter().map(&mut observed).collect()
    }

    #[test]
    fn validations_samples_and_saves_that_are_still_to_come_count() {
        let memory = Event::Memory { phase: "validate".into(), planned_bytes: 1, peak_bytes: 1 };
        let events = [
            (0.0, begin(0)),
            (6.0, memory),
            (1.0, validation(0)),
            (30.0, sample(0)),
            (10.0, sample(0)),
            // Two seconds with the rest that was taken, whatever the event says.
            (2.0, step(1)),
            (2.0, step(2)),
            (2.0, step(3)),
            (5.0, save(3)),
            (2.0, step(4)),
            (7.0, validation(4)),
        ];
        let left = left(&events);
        assert_eq!(left[..5], [None; 5]);
        // Validations after 4, 8 and 10; samples after 5 and 10; saves after 3, 6, 9 and 10, as planned.
        assert_eq!(left[5], Some(9.0 * 2.0 + 3.0 * 7.0 + 2.0 * 40.0 + 4.0 * 0.5));
        // Saves after 6, 9 and 10.
        assert_eq!(left[8], Some(7.0 * 2.0 + 3.0 * 7.0 + 2.0 * 40.0 + 3.0 * 5.0));
        // That of step 4 is still to be done, and then it is not.
        assert_eq!(left[9], Some(6.0 * 2.0 + 3.0 * 7.0 + 2.0 * 40.0 + 3.0 * 5.0));
        assert_eq!(left[10], Some(6.0 * 2.0 + 2.0 * 7.0 + 2.0 * 40.0 + 3.0 * 5.0));
    }

    #[test]
    fn nothing_is_left_at_the_end_and_a_slower_machine_is_noticed() {
        let events = [(0.0, begin(9)), (3.0, step(10)), (1.0, validation(10)), (1.0, save(10))];
        assert_eq!(left(&events), [None, Some(0.5), Some(0.5), Some(0.0)]);
        let slower = (1..=21).map(|n| (if n == 1 { 90.0 } else { 3.0 }, step(5)));
        let events: Vec<_> = std::iter::once((0.0, begin(4))).chain(slower).collect();
        // Saves after 6, 9 and 10.
        assert_eq!(left(&events).last(), Some(&Some(5.0 * 3.0 + 3.0 * 0.5)));
    }
}
