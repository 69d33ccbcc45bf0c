//! Keys of `[train]` that say what an error costs and which timesteps are drawn: from how they are typed to what they
//! mean. Numbers that belong to another choice would be ignored, so they are refused.

use super::error::ConfigError;
use super::section::ResolvedKeys;
use super::train::{TrainKeys, exclude};
use super::value::{ConfigValue, words};
use crate::objective::bias::TimestepBias;
use crate::objective::velocity_loss::{HuberSchedule, HuberThreshold, LossKind, VelocityLoss};
use crate::objective::weighting::LossWeighting;

words!(LossKind {
    "mse" => Self::Mse,
    "l1" => Self::L1,
    "huber" => Self::Huber,
    "smooth_l1" => Self::SmoothL1,
    "pseudo_huber" => Self::PseudoHuber,
    "pseudo_smooth_l1" => Self::PseudoSmoothL1,
});

words!(HuberSchedule {
    "constant" => Self::Constant,
    "exponential" => Self::Exponential,
    "snr" => Self::Snr,
});

/// A [`LossWeighting`] without its number, as it is typed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossWeightingKind {
    /// [`LossWeighting::None`]
    None,
    /// [`LossWeighting::Sigma`]
    Sigma,
    /// [`LossWeighting::SigmaSquared`]
    SigmaSquared,
    /// [`LossWeighting::MinSnr`]
    MinSnr,
    /// [`LossWeighting::Bell`]
    Bell,
    /// [`LossWeighting::HalfBell`]
    HalfBell,
}

words!(LossWeightingKind {
    "none" => Self::None,
    "sigma" => Self::Sigma,
    "sigma_squared" => Self::SigmaSquared,
    "min_snr" => Self::MinSnr,
    "bell" => Self::Bell,
    "half_bell" => Self::HalfBell,
});

/// A [`TimestepBias`] without its numbers, as it is typed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimestepBiasKind {
    /// [`TimestepBias::None`]
    None,
    /// [`TimestepBias::Content`]
    Content,
    /// [`TimestepBias::Style`]
    Style,
    /// A range from the first timestep.
    Earlier,
    /// A range up to the last timestep.
    Later,
    /// [`TimestepBias::Range`]
    Range,
}

words!(TimestepBiasKind {
    "none" => Self::None,
    "content" => Self::Content,
    "style" => Self::Style,
    "earlier" => Self::Earlier,
    "later" => Self::Later,
    "range" => Self::Range,
});

/// What an error costs.
pub(super) fn loss(keys: &TrainKeys, rows: &mut ResolvedKeys) -> Result<VelocityLoss, ConfigError> {
    let kind = keys.loss;
    for key in ["train.huber_c", "train.huber_schedule"] {
        leave_out_unless(kind.has_threshold(), key, "train.loss", rows)?;
    }
    let threshold = HuberThreshold { c: keys.huber_c, schedule: keys.huber_schedule };
    Ok(VelocityLoss { kind, threshold })
}

/// The weight of each timestep.
pub(super) fn weighting(
    keys: &TrainKeys,
    rows: &mut ResolvedKeys,
) -> Result<LossWeighting, ConfigError> {
    let is_min_snr = keys.loss_weighting == LossWeightingKind::MinSnr;
    leave_out_unless(is_min_snr, "train.min_snr_gamma", "train.loss_weighting", rows)?;
    Ok(match keys.loss_weighting {
        LossWeightingKind::None => LossWeighting::None,
        LossWeightingKind::Sigma => LossWeighting::Sigma,
        LossWeightingKind::SigmaSquared => LossWeighting::SigmaSquared,
        LossWeightingKind::MinSnr => LossWeighting::MinSnr { gamma: keys.min_snr_gamma },
        LossWeightingKind::Bell => LossWeighting::Bell,
        LossWeightingKind::HalfBell => LossWeighting::HalfBell,
    })
}

/// Which timesteps are drawn more often.
pub(super) fn bias(keys: &TrainKeys, rows: &mut ResolvedKeys) -> Result<TimestepBias, ConfigError> {
    use TimestepBiasKind::{Content, Earlier, Later, None, Range, Style};
    let kind = keys.timestep_bias;
    let by = "train.timestep_bias";
    let is_part = matches!(kind, Earlier | Later);
    leave_out_unless(is_part || kind == Range, "train.timestep_bias_multiplier", by, rows)?;
    leave_out_unless(is_part, "train.timestep_bias_share", by, rows)?;
    for key in ["train.timestep_bias_begin", "train.timestep_bias_end"] {
        leave_out_unless(kind == Range, key, by, rows)?;
    }
    let width = keys.timestep_bias_share * 1000.0;
    let [begin, end] = [keys.timestep_bias_begin, keys.timestep_bias_end];
    let timesteps = match kind {
        None => return Ok(TimestepBias::None),
        Content => return Ok(TimestepBias::Content),
        Style => return Ok(TimestepBias::Style),
        Earlier => [0.0, width],
        Later => [1000.0 - width, 1000.0],
        Range if begin < end => [begin, end],
        Range => {
            let [begin, end] = ["train.timestep_bias_begin", "train.timestep_bias_end"];
            let needed = 1000.0.write().unwrap_or_default();
            exclude(begin, end, needed, rows)?;
            [0.0, 1000.0]
        }
    };
    Ok(TimestepBias::Range { timesteps, multiplier: keys.timestep_bias_multiplier })
}

/// A key that means nothing with the value of another.
fn leave_out_unless(
    is_used: bool,
    key: &str,
    by: &str,
    rows: &mut ResolvedKeys,
) -> Result<(), ConfigError> {
    if is_used { Ok(()) } else { rows.leave_out(key, &format!("{by} = {}", rows.value(by))) }
}
