//! `[train]`: how long, in what portions, and by which rule.

use super::error::ConfigError;
use super::section::{Rows, section};
use super::source::Origin;
use super::value::{Switch, words};
use crate::model::diffusion::family::Family;
use crate::model::recompute::Recompute;
use crate::objective::flow::Scheme;

/// How long is trained, in what portions, and by which rule.
#[derive(Clone, Debug, PartialEq)]
pub struct Train {
    /// When it ends.
    pub length: Length,
    /// Pictures computed at once.
    pub batch: usize,
    /// Batches that make a step.
    pub accumulation: usize,
    /// The most pictures of a batch that go through the model at once; nothing if all of them may.
    pub micro_batch: Option<usize>,
    /// What all random numbers follow from.
    pub seed: u64,
    /// What is computed twice to save memory.
    pub recompute: Recompute,
    /// How levels of noise are drawn.
    pub scheme: Scheme,
    /// The largest norm of a step's gradient.
    pub clip: Switch<f64>,
    /// The share that the running mean of the adapter keeps in a step.
    pub ema: Switch<f64>,
    /// Steps between two measurements on held-out pictures.
    pub validate_every: u64,
    /// Measurements without progress after which training ends.
    pub stop_after_plateau: Switch<u64>,
}

impl Train {
    /// Steps that a run takes, if an epoch has so many batches.
    pub fn n_steps(&self, batches_per_epoch: u64) -> u64 {
        match self.length {
            Length::Steps(steps) => steps,
            Length::Epochs(epochs) => {
                (epochs * batches_per_epoch).div_ceil(self.accumulation as u64).max(1)
            }
        }
    }
}

/// When training ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Length {
    /// After so many steps of the optimizer.
    Steps(u64),
    /// When every picture was seen so often, times its repeats.
    Epochs(u64),
}

section! {
    /// How long is trained, in what portions, and by which rule.
    pub(super) RawTrain => TrainKeys {
        /// Steps of the optimizer
        steps: u64 = Default(1000), AtLeast(1.0);
        /// How often every picture is seen, instead of `steps`
        epochs: Option<u64> = Default(None), AtLeast(1.0);
        /// Pictures computed at once
        batch: usize = Default(1), Within(1.0, 1024.0);
        /// Batches that make a step
        accumulation: usize = Default(1), Within(1.0, 65536.0);
        /// Pictures of a batch that go through the model at once. Not set: the plan chooses
        micro_batch: Option<usize> = Default(None), Within(1.0, 1024.0);
        /// What all random numbers of the run follow from
        seed: u64 = Default(42), AtLeast(0.0);
        /// What is computed twice to save memory: nothing, the queries of attention, every second block or all. Not set: the plan chooses
        recompute: Recompute = Default(Recompute::None), Any;
        /// How levels of noise are drawn and weighted; this is SD3's default, other families have their own
        scheme: SchemeKind = Default(SchemeKind::LogitNormal), Any;
        /// Mean of the normal number, with `scheme = "logit_normal"`
        logit_mean: f64 = Default(0.0), Within(-10.0, 10.0);
        /// Deviation of the normal number, with `scheme = "logit_normal"`
        logit_deviation: f64 = Default(1.0), Above(0.0);
        /// How much more often levels in the middle are drawn, with `scheme = "mode"`
        mode_scale: f64 = Default(1.29), Within(-1.0, MODE_SCALE_MAX);
        /// Gradients of a larger norm are scaled down to it
        clip: Switch<f64> = Default(Switch::On(1.0)), Above(0.0);
        /// The share that a running mean of the adapter keeps in a step, near 1
        ema: Switch<f64> = Default(Switch::Off), Under(0.0, 1.0);
        /// Steps between two measurements of the loss on held-out pictures
        validate_every: u64 = Default(50), AtLeast(1.0);
        /// Measurements of the held-out loss without progress after which training ends
        stop_after_plateau: Switch<u64> = Default(Switch::Off), AtLeast(1.0);
    }
}

/// Taken: 2 / (π - 2), beyond which levels would not rise with the number they are drawn by (Esser et
/// al., arXiv 2403.03206, section 3.1), cut to two digits.
const MODE_SCALE_MAX: f64 = 1.75;

/// A [`Scheme`] without its numbers, as it is typed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SchemeKind {
    /// [`Scheme::Uniform`]
    Uniform,
    /// [`Scheme::LogitNormal`]
    LogitNormal,
    /// [`Scheme::Mode`]
    Mode,
    /// [`Scheme::SigmaSqrt`]
    SigmaSqrt,
    /// [`Scheme::Cosmap`]
    Cosmap,
}

words!(SchemeKind {
    "uniform" => Self::Uniform,
    "logit_normal" => Self::LogitNormal,
    "mode" => Self::Mode,
    "sigma_sqrt" => Self::SigmaSqrt,
    "cosmap" => Self::Cosmap,
});

words!(Recompute {
    "none" => Self::None,
    "queries" => Self::Queries,
    "alternate" => Self::Alternate,
    "block" => Self::Block,
});

impl Train {
    /// As meant.
    pub(super) fn new(
        mut keys: TrainKeys,
        family: Option<&Family>,
        rows: &mut Rows,
    ) -> Result<Self, ConfigError> {
        if let Some(family) = family {
            keys.settle_family(family, rows);
        }
        let TrainKeys {
            steps,
            epochs,
            batch,
            accumulation,
            micro_batch,
            seed,
            recompute,
            scheme,
            logit_mean: mean,
            logit_deviation: deviation,
            mode_scale: scale,
            clip,
            ema,
            validate_every,
            stop_after_plateau,
        } = keys;
        let length = length(steps, epochs, rows)?;
        refuse_idle_numbers(scheme, rows)?;
        let scheme = match scheme {
            SchemeKind::Uniform => Scheme::Uniform,
            SchemeKind::LogitNormal => Scheme::LogitNormal { mean, deviation },
            SchemeKind::Mode => Scheme::Mode { scale },
            SchemeKind::SigmaSqrt => Scheme::SigmaSqrt,
            SchemeKind::Cosmap => Scheme::Cosmap,
        };
        Ok(Self {
            length,
            batch,
            accumulation,
            micro_batch,
            seed,
            recompute,
            scheme,
            clip,
            ema,
            validate_every,
            stop_after_plateau,
        })
    }
}

impl TrainKeys {
    /// How models of a family draw levels of noise unless told otherwise.
    fn settle_family(&mut self, family: &Family, rows: &mut Rows) {
        let kind = match family.scheme {
            Scheme::Uniform => SchemeKind::Uniform,
            Scheme::LogitNormal { mean, deviation } => {
                rows.of_family(family, "train.logit_mean", &mut self.logit_mean, mean);
                let own = &mut self.logit_deviation;
                rows.of_family(family, "train.logit_deviation", own, deviation);
                SchemeKind::LogitNormal
            }
            Scheme::Mode { scale } => {
                rows.of_family(family, "train.mode_scale", &mut self.mode_scale, scale);
                SchemeKind::Mode
            }
            Scheme::SigmaSqrt => SchemeKind::SigmaSqrt,
            Scheme::Cosmap => SchemeKind::Cosmap,
        };
        rows.of_family(family, "train.scheme", &mut self.scheme, kind);
    }
}

/// One of the two. The command line may choose the other than the file did.
fn length(steps: u64, epochs: Option<u64>, rows: &mut Rows) -> Result<Length, ConfigError> {
    const KEYS: [&str; 2] = ["train.steps", "train.epochs"];
    let origin = |key| rows.origin(key).cloned().unwrap_or(Origin::Default);
    let origins = KEYS.map(origin);
    let Some(epochs) = epochs else { return Ok(Length::Steps(steps)) };
    if origins[1].beats(&origins[0]) {
        rows.remove(KEYS[0]);
        Ok(Length::Epochs(epochs))
    } else if origins[0].beats(&origins[1]) {
        rows.remove(KEYS[1]);
        Ok(Length::Steps(steps))
    } else {
        Err(ConfigError::Conflict { keys: KEYS, origins: Box::new(origins) })
    }
}

/// A number that belongs to another scheme would be ignored, so it is refused.
fn refuse_idle_numbers(scheme: SchemeKind, rows: &mut Rows) -> Result<(), ConfigError> {
    let with = format!("train.scheme = {}", rows.value("train.scheme"));
    for (key, owner) in [
        ("train.logit_mean", SchemeKind::LogitNormal),
        ("train.logit_deviation", SchemeKind::LogitNormal),
        ("train.mode_scale", SchemeKind::Mode),
    ] {
        if scheme != owner {
            rows.leave_out(key, &with)?;
        }
    }
    Ok(())
}
