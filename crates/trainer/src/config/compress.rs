//! `[compress]`: a language model whose largest part, the trunk, sees one token in N. A job with this section trains one
//! from scratch on `[text]`; docs/compression.md explains it.

use super::error::ConfigError;
use super::section::{ResolvedKeys, Section, section};
use super::value::words;
use crate::model::compress::{CompressorMode, CompressorTraining, Estimator, Selector};

section! {
    /// Which tokens the largest part of a language model sees.
    pub RawCompress => CompressConfig {
        /// The trunk sees one token in so many
        keep_one_in: usize = Default(4), Within(1.0, 64.0);
        /// `next` predicts the next token; `reconstruct` codes a text as its kept tokens and the rest
        mode: CompressorMode = Default(CompressorMode::Next), Any;
        /// Who chooses them: a trained policy, or a rule to compare it with (`all`, `stride`, `random`, `spaces`, `rarest`)
        select: Selector = Default(Selector::Policy), Any;
        /// How the policy is trained: `reinforce`, `grpo` (two draws of each sequence, compared), `gumbel` (straight-through) or `ratio` (H-Net)
        estimator: Estimator = Default(Estimator::Reinforce), Any;
        /// Discount of rewards of later tokens; 1 gives every choice the reward of the whole sequence
        discount: f64 = Default(0.9), Within(0.0, 1.0);
        /// Weight of the policy's loss
        policy_weight: f64 = Default(0.01), AtLeast(0.0);
        /// How much the policy's logits are drawn to zero, so that it goes on trying: larger chooses later, and less surely
        exploration: f64 = Default(0.001), AtLeast(0.0);
        /// Weight of the loss of the narrow layers' own prediction (early exit), which rewards are measured against
        early_weight: f64 = Default(0.1), AtLeast(0.0);
        /// Temperature of Gumbel-softmax, for the estimator `gumbel`
        temperature: f64 = Default(1.0), Above(0.0);
        /// Tokens that a narrow layer attends to (sliding window)
        window: usize = Default(64), Within(8.0, 65536.0);
        /// Narrow layers before the trunk, and as many after it
        layers: usize = Default(2), Within(1.0, 64.0);
        /// Width of the narrow layers, a multiple of the trunk's head width. Not set: half of the trunk's
        width: Option<usize> = Default(None), AtLeast(1.0);
    }
}

words!(Selector {
    "policy" => Self::Policy,
    "all" => Self::All,
    "stride" => Self::Stride,
    "random" => Self::Random,
    "spaces" => Self::Spaces,
    "rarest" => Self::Rarest,
});

words!(CompressorMode {
    "next" => Self::Next,
    "reconstruct" => Self::Reconstruct,
});

words!(Estimator {
    "reinforce" => Self::Reinforce,
    "grpo" => Self::Grpo,
    "gumbel" => Self::Gumbel,
    "ratio" => Self::Ratio,
});

/// Keys that mean something only where a policy is trained.
const POLICY_KEYS: [&str; 5] = [
    "compress.estimator",
    "compress.discount",
    "compress.policy_weight",
    "compress.exploration",
    "compress.temperature",
];

/// Of these, keys of estimators that have advantages.
const ADVANTAGE_KEYS: [&str; 3] =
    ["compress.discount", "compress.policy_weight", "compress.exploration"];

impl CompressConfig {
    /// A number that belongs to another choice would be ignored, so it is refused.
    pub(super) fn new(raw: RawCompress, rows: &mut ResolvedKeys) -> Result<Self, ConfigError> {
        let config = raw.decide("compress", rows)?;
        if config.select == Selector::All {
            rows.leave_out("compress.keep_one_in", "compress.select = \"all\"")?;
        }
        if config.select != Selector::Policy {
            for key in POLICY_KEYS {
                rows.leave_out(
                    key,
                    &format!("compress.select = {}", rows.value("compress.select")),
                )?;
            }
        } else if config.estimator == Estimator::Gumbel {
            for key in ADVANTAGE_KEYS {
                rows.leave_out(key, "compress.estimator = \"gumbel\"")?;
            }
        } else {
            if config.estimator == Estimator::Ratio {
                for key in ADVANTAGE_KEYS {
                    rows.leave_out(key, "compress.estimator = \"ratio\"")?;
                }
            }
            let estimator = format!("compress.estimator = {}", rows.value("compress.estimator"));
            rows.leave_out("compress.temperature", &estimator)?;
        }
        Ok(config)
    }

    /// How the model is trained.
    pub fn training(&self) -> CompressorTraining {
        let Self {
            estimator, discount, policy_weight, exploration, early_weight, temperature, ..
        } = *self;
        CompressorTraining {
            estimator,
            discount,
            policy_weight,
            exploration,
            early_weight,
            temperature,
        }
    }
}
