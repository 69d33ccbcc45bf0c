//! Whether a run that took all its steps came to something that can be used. Judged when it is over, by
//! the figures of its steps and by what was trained, so that a run that goes on after it has finished is
//! judged the same. What diverged is not written for other programs unless that is asked for.

use std::fmt;

use super::health::Health;
use super::session::Trained;

/// Why what came of a run is of no use.
#[derive(Clone, Debug, PartialEq)]
pub enum Divergence {
    /// The last loss is not finite.
    Loss,
    /// The last steps changed nothing.
    Skipped {
        /// How many, in a row.
        steps: u32,
    },
    /// The loss is many times what it was.
    Grown {
        /// At the end.
        now: f64,
        /// Of the first step.
        first: f64,
    },
    /// A weight that is not finite, or is not in the formats that adapters are used in.
    Weight {
        /// Of which tensor.
        tensor: String,
        /// The weight.
        value: f32,
    },
}

/// The largest weight that can be used. Taken: the largest number of f16, in which many programs hold
/// adapters; what is beyond becomes infinite there. Weights of models that work are below a hundred.
const LARGEST: f32 = 65504.0;

/// What can be done about it.
pub const HINT: &str = "begin a new run with a lower optimizer.learning_rate or a longer \
                        optimizer.warmup; --resume --force writes the result all the same";

impl Divergence {
    /// Of a run that is over, if it has diverged.
    pub fn of(health: &Health, trained: &Trained) -> Option<Self> {
        health.divergence().or_else(|| spoilt(trained))
    }
}

/// The first weight that cannot be used.
fn spoilt(trained: &Trained) -> Option<Divergence> {
    let is_spoilt = |value: &&f32| !value.is_finite() || value.abs() > LARGEST;
    trained.tensors().find_map(|(tensor, values)| {
        let value = *values.iter().find(is_spoilt)?;
        Some(Divergence::Weight { tensor, value })
    })
}

impl fmt::Display for Divergence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the run diverged: ")?;
        match self {
            Self::Loss => f.write_str("the loss of the last step is not finite"),
            Self::Skipped { steps } => {
                write!(f, "the last {steps} steps changed nothing, since a gradient was not finite")
            }
            Self::Grown { now, first } => {
                write!(f, "the loss was {first:.4} in the first step and is {now:.4} at the end")
            }
            Self::Weight { tensor, value } => {
                write!(f, "a weight of {tensor} is {value:.1e}, the largest usable is {LARGEST}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::model::adapter::Given;

    #[test]
    fn a_weight_that_no_program_can_hold_is_named() {
        let with = |up: f32| {
            let given =
                Given { rank: 1, alpha: 1.0, down: vec![1.0], up: vec![0.5, up], magnitude: None };
            spoilt(&Trained::Adapter(BTreeMap::from([("to_q".into(), given)])))
        };
        assert_eq!(with(-60000.0), None);
        for value in [-8e14, f32::INFINITY] {
            let tensor = "to_q.lora_B".into();
            assert_eq!(with(value), Some(Divergence::Weight { tensor, value }));
        }
        assert!(with(f32::NAN).is_some());
        let own = Trained::Own(BTreeMap::from([("norm".into(), vec![1.0, f32::NAN])]));
        let said = spoilt(&own).unwrap().to_string();
        assert_eq!(said, "the run diverged: a weight of norm is NaN, the largest usable is 65504");
    }
}
