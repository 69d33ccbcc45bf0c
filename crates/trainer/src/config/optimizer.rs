//! `[optimizer]`: how gradients become steps.

use super::error::ConfigError;
use super::section::{ResolvedKeys, section};
use super::value::words;

section! {
    /// How gradients become steps.
    pub RawOptimizer => OptimizerConfig {
        /// `adamw`; `adamw_8bit`: a quarter of the optimizer state; `muon`: Muon for weight matrices in blocks, AdamW for the rest
        kind: OptimizerKind = Default(OptimizerKind::AdamW), Any;
        /// Learning rate
        learning_rate: f64 = Default(1e-4), UpTo(0.0, 10.0);
        /// AdamW betas: decay rates of the two moments
        betas: [f64; 2] = Default([0.9, 0.999]), Under(0.0, 1.0);
        /// Muon momentum, with `kind = "muon"`
        momentum: f64 = Default(0.95), Under(0.0, 1.0);
        /// AdamW epsilon
        epsilon: f64 = Default(1e-8), UpTo(0.0, 1.0);
        /// Weight decay, decoupled as in AdamW
        weight_decay: f64 = Default(1e-4), Within(0.0, 10.0);
        /// Learning rate schedule after the warmup; `plateau` halves it when validation stalls, `wsd` is constant with a decay at the end
        lr_scheduler: LrSchedule = Default(LrSchedule::Constant), Any;
        /// Steps of linear learning rate warmup (kohya: `lr_warmup_steps`)
        warmup_steps: u64 = Default(0), AtLeast(0.0);
        /// Share of all steps in the final decay, with `lr_scheduler = "wsd"`
        decay: f64 = Default(0.2), Within(0.0, 1.0);
        /// Curve of the final decay: linear, or 1 - sqrt, with `lr_scheduler = "wsd"`
        decay_curve: DecayCurve = Default(DecayCurve::Sqrt), Any;
    }
}

/// Rules to make a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OptimizerKind {
    /// Loshchilov and Hutter, arXiv 1711.05101.
    AdamW,
    /// The same with its state in 8 bits (Dettmers et al., arXiv 2110.02861).
    AdamW8bit,
    /// Jordan et al., 2024, for matrices within blocks; [`Self::AdamW`] for all else.
    Muon,
}

words!(OptimizerKind {
    "adamw" => Self::AdamW,
    "adamw_8bit" => Self::AdamW8bit,
    "muon" => Self::Muon,
});

/// How the learning rate changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LrSchedule {
    /// Not at all.
    Constant,
    /// Evenly down to 0.
    Linear,
    /// Down to 0 along half a cosine.
    Cosine,
    /// Lower whenever the loss stops falling.
    Plateau,
    /// Not at all for most of the run, then down to 0 (Hägele et al., arXiv 2405.18392).
    Wsd,
}

words!(LrSchedule {
    "constant" => Self::Constant,
    "linear" => Self::Linear,
    "cosine" => Self::Cosine,
    "plateau" => Self::Plateau,
    "wsd" => Self::Wsd,
});

/// How the learning rate falls at the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecayCurve {
    /// Evenly.
    Linear,
    /// As one minus a square root.
    Sqrt,
}

words!(DecayCurve {
    "linear" => Self::Linear,
    "sqrt" => Self::Sqrt,
});

/// A number that belongs to another rule would be ignored, so it is refused.
pub(super) fn refuse_idle(
    optimizer: &OptimizerConfig,
    rows: &mut ResolvedKeys,
) -> Result<(), ConfigError> {
    if optimizer.kind != OptimizerKind::Muon {
        let with = format!("optimizer.kind = {}", rows.value("optimizer.kind"));
        rows.leave_out("optimizer.momentum", &with)?;
    }
    if optimizer.lr_scheduler != LrSchedule::Wsd {
        let with = format!("optimizer.lr_scheduler = {}", rows.value("optimizer.lr_scheduler"));
        rows.leave_out("optimizer.decay", &with)?;
        rows.leave_out("optimizer.decay_curve", &with)?;
    }
    Ok(())
}
