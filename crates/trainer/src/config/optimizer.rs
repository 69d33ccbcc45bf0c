//! `[optimizer]`: how gradients become steps.

use super::section::section;
use super::value::words;

section! {
    /// How gradients become steps.
    pub RawOptimizer => Optimizer {
        /// `adamw`, or `adamw_8bit`, whose state takes a quarter of the memory
        kind: OptimizerKind = Default(OptimizerKind::AdamW), Any;
        /// Length of a step
        learning_rate: f64 = Default(1e-4), Above(0.0);
        /// Shares that the means of gradients and of their squares keep in a step
        betas: [f64; 2] = Default([0.9, 0.999]), Under(0.0, 1.0);
        /// Added to what is divided by
        epsilon: f64 = Default(1e-8), Above(0.0);
        /// The share of a parameter that a step of length 1 takes away
        weight_decay: f64 = Default(1e-4), AtLeast(0.0);
        /// How the learning rate changes after the warm-up
        schedule: Schedule = Default(Schedule::Constant), Any;
        /// Steps in which the learning rate grows; the first of n goes an n-th of the way
        warmup: u64 = Default(0), AtLeast(0.0);
    }
}

/// Rules to make a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OptimizerKind {
    /// Loshchilov and Hutter, arXiv 1711.05101.
    AdamW,
    /// The same with its state in 8 bits (Dettmers et al., arXiv 2110.02861).
    AdamW8bit,
}

words!(OptimizerKind {
    "adamw" => Self::AdamW,
    "adamw_8bit" => Self::AdamW8bit,
});

/// How the learning rate changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schedule {
    /// Not at all.
    Constant,
    /// Evenly down to 0.
    Linear,
    /// Down to 0 along half a cosine.
    Cosine,
    /// Lower whenever the loss stops falling.
    Plateau,
}

words!(Schedule {
    "constant" => Self::Constant,
    "linear" => Self::Linear,
    "cosine" => Self::Cosine,
    "plateau" => Self::Plateau,
});
