//! `[optimizer]`: how gradients become steps.

use super::error::ConfigError;
use super::preference;
use super::section::{ResolvedKeys, section};
use super::source::ValueOrigin;
use super::train::{TrainConfig, exclude};
use super::value::{Switch, quoted, words};

section! {
    /// How gradients become steps.
    pub RawOptimizer => OptimizerConfig {
        /// `adamw`; `adamw_8bit`: a quarter of the optimizer state; `adamw_schedule_free`: no schedule needed; `adafactor`: next to no state; `lion`: half of it; `muon`: Muon for weight matrices in blocks, AdamW for the rest; `prodigy`: finds the learning rate
        kind: OptimizerKind = Default(OptimizerKind::AdamW), Any;
        /// Learning rate. `prodigy`: multiplies the one that it finds, 1 if not set
        learning_rate: f64 = Default(1e-4), UpTo(0.0, 10.0);
        /// Betas: decay rates of the two moments. `lion`: [0.9, 0.99] if not set
        betas: [f64; 2] = Default([0.9, 0.999]), Under(0.0, 1.0);
        /// Muon momentum, with `kind = "muon"`
        momentum: f64 = Default(0.95), Under(0.0, 1.0);
        /// Epsilon: keeps AdamW's denominator away from 0
        epsilon: f64 = Default(1e-8), UpTo(0.0, 1.0);
        /// Weight decay, decoupled as in AdamW
        weight_decay: f64 = Default(1e-4), Within(0.0, 10.0);
        /// Adafactor: multiplies the learning rate by the size (RMS) of the parameter
        scale_parameter: bool = Default(false), Any;
        /// Prodigy: the first estimate of d, which multiplies the learning rate
        d0: f64 = Default(1e-6), UpTo(0.0, 1.0);
        /// Prodigy: factor of every estimate of d; 0.5 or 2 for smaller or larger steps
        d_coef: f64 = Default(1.0), UpTo(0.0, 100.0);
        /// Prodigy: Adam's bias correction
        use_bias_correction: bool = Default(false), Any;
        /// Prodigy: leaves the learning rate out of the estimate's denominator, for runs with a warmup
        safeguard_warmup: bool = Default(false), Any;
        /// Learning rate schedule after the warmup; `plateau` halves it when validation stalls, `wsd` is constant with a decay at the end
        lr_scheduler: LrSchedule = Default(LrSchedule::Constant), Any;
        /// Steps of linear learning rate warmup (kohya: `lr_warmup_steps`)
        warmup_steps: u64 = Default(0), AtLeast(0.0);
        /// Cosines in the run, with `lr_scheduler = "cosine_with_restarts"` (kohya: `lr_scheduler_num_cycles`)
        cycles: u64 = Default(1), AtLeast(1.0);
        /// Power of the decay, with `lr_scheduler = "polynomial"`; 1 is linear (kohya: `lr_scheduler_power`)
        power: f64 = Default(1.0), UpTo(0.0, 100.0);
        /// Learning rate that the decay ends at, with `lr_scheduler = "polynomial"`
        lr_end: f64 = Default(1e-7), Within(0.0, 10.0);
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
    /// The same on an average of steps (Defazio et al., arXiv 2405.15682).
    AdamWScheduleFree,
    /// Shazeer and Stern, arXiv 1804.04235.
    Adafactor,
    /// Chen et al., arXiv 2302.06675.
    Lion,
    /// Jordan et al., 2024, for matrices within blocks; [`Self::AdamW`] for all else.
    Muon,
    /// Mishchenko and Defazio, arXiv 2306.06101.
    Prodigy,
}

words!(OptimizerKind {
    "adamw" => Self::AdamW,
    "adamw_8bit" => Self::AdamW8bit,
    "adamw_schedule_free" => Self::AdamWScheduleFree,
    "adafactor" => Self::Adafactor,
    "lion" => Self::Lion,
    "muon" => Self::Muon,
    "prodigy" => Self::Prodigy,
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
    /// The same several times, each from the start (Loshchilov and Hutter, arXiv 1608.03983).
    CosineWithRestarts,
    /// Down to a least one along a power of what is left of the run.
    Polynomial,
    /// Not at all for most of the run, then down to 0 (Hägele et al., arXiv 2405.18392).
    Wsd,
}

words!(LrSchedule {
    "constant" => Self::Constant,
    "linear" => Self::Linear,
    "cosine" => Self::Cosine,
    "cosine_with_restarts" => Self::CosineWithRestarts,
    "polynomial" => Self::Polynomial,
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

impl OptimizerKind {
    /// Whether a key of this section has an effect.
    fn uses(self, key: &str) -> bool {
        match key {
            "optimizer.momentum" => self == Self::Muon,
            "optimizer.scale_parameter" => self == Self::Adafactor,
            "optimizer.betas" => self != Self::Adafactor,
            "optimizer.epsilon" => !matches!(self, Self::Adafactor | Self::Lion),
            _ => self == Self::Prodigy,
        }
    }

    /// Whether a parameter can be updated by itself, before the gradients of others are known and without memory halfway
    /// through the step.
    pub fn updates_one_by_one(self) -> bool {
        !matches!(self, Self::Muon | Self::Prodigy)
    }

    /// Whether every step needs the gradients of all parameters.
    pub fn needs_all_gradients(self) -> bool {
        self == Self::Prodigy
    }
}

/// Keys that not every optimizer has.
const OWN_KEYS: [&str; 8] = [
    "optimizer.betas",
    "optimizer.momentum",
    "optimizer.epsilon",
    "optimizer.scale_parameter",
    "optimizer.d0",
    "optimizer.d_coef",
    "optimizer.use_bias_correction",
    "optimizer.safeguard_warmup",
];

/// Defaults that depend on the kind. Taken: those of the authors' code.
pub(super) fn apply_defaults(
    optimizer: &mut OptimizerConfig,
    is_preference: bool,
    rows: &mut ResolvedKeys,
) {
    let is_free = |rows: &ResolvedKeys, key| rows.origin(key).is_some_and(ValueOrigin::is_default);
    let usual = match optimizer.kind {
        OptimizerKind::Prodigy => Some(1.0),
        _ if is_preference => Some(preference::LEARNING_RATE),
        _ => None,
    };
    if let Some(usual) = usual.filter(|_| is_free(rows, "optimizer.learning_rate")) {
        optimizer.learning_rate = usual;
        rows.replace("optimizer.learning_rate", &optimizer.learning_rate);
    }
    if optimizer.kind == OptimizerKind::Lion && is_free(rows, "optimizer.betas") {
        optimizer.betas = [0.9, 0.99];
        rows.replace("optimizer.betas", &optimizer.betas);
    }
}

/// A number that belongs to another rule would be ignored, so it is refused.
pub(super) fn refuse_idle(
    optimizer: &OptimizerConfig,
    rows: &mut ResolvedKeys,
) -> Result<(), ConfigError> {
    let with = format!("optimizer.kind = {}", rows.value("optimizer.kind"));
    for key in OWN_KEYS.into_iter().filter(|key| !optimizer.kind.uses(key)) {
        rows.leave_out(key, &with)?;
    }
    let with = format!("optimizer.lr_scheduler = {}", rows.value("optimizer.lr_scheduler"));
    for (key, _) in SCHEDULE_KEYS.into_iter().filter(|(_, of)| *of != optimizer.lr_scheduler) {
        rows.leave_out(key, &with)?;
    }
    if optimizer.lr_scheduler == LrSchedule::Polynomial
        && optimizer.lr_end >= optimizer.learning_rate
    {
        let needed = format!("above {}", optimizer.lr_end);
        return exclude("optimizer.lr_end", "optimizer.learning_rate", needed, rows);
    }
    Ok(())
}

/// Keys of one schedule.
const SCHEDULE_KEYS: [(&str, LrSchedule); 5] = [
    ("optimizer.cycles", LrSchedule::CosineWithRestarts),
    ("optimizer.power", LrSchedule::Polynomial),
    ("optimizer.lr_end", LrSchedule::Polynomial),
    ("optimizer.decay", LrSchedule::Wsd),
    ("optimizer.decay_curve", LrSchedule::Wsd),
];

/// What schedule-free `AdamW` excludes: it is an average already, which is found from the first beta and needs a learning
/// rate that does not fall.
pub(super) fn refuse_schedule_free(
    optimizer: &OptimizerConfig,
    train: &TrainConfig,
    rows: &ResolvedKeys,
) -> Result<(), ConfigError> {
    let (other, needed) = if optimizer.kind != OptimizerKind::AdamWScheduleFree {
        return Ok(());
    } else if optimizer.lr_scheduler != LrSchedule::Constant {
        ("optimizer.lr_scheduler", quoted("constant"))
    } else if optimizer.betas[0] == 0.0 {
        ("optimizer.betas", "[0.9, 0.999]".into())
    } else if train.ema != Switch::Off {
        ("train.ema", quoted("off"))
    } else {
        return Ok(());
    };
    exclude("optimizer.kind", other, needed, rows)
}
