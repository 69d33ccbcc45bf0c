//! A language model that chooses which tokens its largest part sees. Tokens, usually bytes, pass narrow layers that
//! attend to a short window; a policy keeps one position in N; the trunk, a [Llama](super::llama) of full width, sees
//! only those; narrow layers then predict the next token everywhere. docs/compression.md explains it.
//!
//! ```text
//! tokens ─▶ embedding ─▶ encoder ─┬─▶ policy ─▶ kept positions ─▶ trunk ─▶ back to all positions ─┐
//!            (narrow, windowed)   └──────────────────────────────────────────────────────── + ──▶ decoder ─▶ next token
//! ```

pub mod base;
mod cached;
mod draw;
mod forward;
mod gate;
#[cfg(test)]
mod gradient_tests;
pub mod policy_gradient;
mod policy_loss;
pub mod policy_stats;
mod reconstruct;
pub mod selection;

use serde::{Deserialize, Serialize};

pub use base::CompressedModel;
pub use cached::CompressedCache;
pub use forward::{CompressedLoss, Compressor, CompressorInputs};
pub use selection::Selector;

use super::config::Unsupported;
use super::llama::LlamaConfig;

/// What `config.json` says: the shape of the model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CompressorConfig {
    /// Tells it from other models.
    pub model_type: CompressorType,
    /// The part that sees kept positions. Its vocabulary is the model's.
    pub trunk: LlamaConfig,
    /// Width of the narrow layers.
    pub width: usize,
    /// Narrow layers on either side.
    pub layers: usize,
    /// Positions that a narrow layer attends to.
    pub window: usize,
    /// One position in so many is kept.
    pub keep_one_in: usize,
    /// Who chooses it.
    pub select: Selector,
    /// What it is for.
    #[serde(default)]
    pub mode: CompressorMode,
    /// Whether what the trunk made of kept positions is smoothed, as [`Estimator::Ratio`] needs.
    #[serde(default)]
    pub is_smoothed: bool,
}

/// What `config.json` calls the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CompressorType {
    /// The only one.
    #[serde(rename = "hearth_compressor")]
    Compressor,
}

/// What a model is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CompressorMode {
    /// Predicts the next token.
    #[default]
    Next,
    /// Predicts all tokens from the kept ones.
    Reconstruct,
}

/// The fewest positions of a window. Chosen: a policy that sees less than a short word cannot know where one ends.
pub const MIN_WINDOW: usize = 8;

impl CompressorConfig {
    /// A narrow layer: a Llama block of the trunk's head width.
    pub fn narrow(&self) -> LlamaConfig {
        let heads = self.width / self.trunk.head_dim;
        LlamaConfig {
            hidden_size: self.width,
            intermediate_size: (8 * self.width / 3).next_multiple_of(INNER_STEP),
            num_hidden_layers: 2 * self.layers,
            num_attention_heads: heads,
            num_key_value_heads: heads,
            ..self.trunk.clone()
        }
    }

    /// Tokens of the longest text that it is made for: the trunk sees one in N of them.
    pub fn context_length(&self) -> usize {
        self.trunk.max_position_embeddings * self.keep_one_in
    }

    /// Kept positions of a sequence.
    pub fn n_kept(&self, length: usize) -> usize {
        (length / self.keep_one_in).max(1)
    }

    /// Checks that all of it fits together.
    pub fn check(&self) -> Result<(), Unsupported> {
        Unsupported::unless(
            !(self.is_smoothed && self.mode == CompressorMode::Reconstruct),
            "smoothing of a model that reconstructs".into(),
        )?;
        let (width, head) = (self.width, self.trunk.head_dim);
        Unsupported::unless(
            width > 0 && width.is_multiple_of(head),
            format!(
                "width {width} of the narrow layers is no multiple of the trunk's head_dim {head}"
            ),
        )?;
        Unsupported::unless(self.layers > 0, "0 narrow layers".into())?;
        let window = self.window;
        Unsupported::unless(
            window >= MIN_WINDOW,
            format!("a window of {window}, the least is {MIN_WINDOW}"),
        )?;
        Unsupported::unless(self.keep_one_in > 0, "keep_one_in is 0".into())?;
        let trunk = &self.trunk;
        Unsupported::unless(
            trunk.window.is_none() && trunk.experts.is_none() && trunk.local_rope_theta.is_none(),
            "a trunk whose layers have windows or experts".into(),
        )?;
        trunk.check()
    }
}

/// Inner widths of narrow layers are multiples of this. Chosen: whole tiles of a matmul.
const INNER_STEP: usize = 64;

/// How the policy is trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Estimator {
    /// REINFORCE: a draw is rewarded by how much the trunk lowers the loss (Dauncey and Wattenhofer, arXiv 2602.13940).
    Reinforce,
    /// Two draws for each sequence with opposite noise, each rewarded by how much better it is than their mean.
    Grpo,
    /// Straight-through Gumbel-softmax.
    Gumbel,
    /// H-Net's: the most likely positions, smoothed by their probabilities, and a loss that holds their rate (Hwang, Wang
    /// and Gu, "Dynamic Chunking for End-to-End Hierarchical Sequence Modeling", arXiv 2507.07955).
    Ratio,
}

/// How the model is trained, beside its shape.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CompressorTraining {
    /// How the policy is trained.
    pub estimator: Estimator,
    /// Discount of later rewards.
    pub discount: f64,
    /// Weight of the policy's loss.
    pub policy_weight: f64,
    /// How much logits are drawn to zero, so that a policy goes on trying.
    pub exploration: f64,
    /// Weight of the loss of the next token as the narrow layers alone predict it.
    pub early_weight: f64,
    /// Temperature of Gumbel-softmax.
    pub temperature: f64,
}

impl Default for CompressorTraining {
    fn default() -> Self {
        Self {
            estimator: Estimator::Reinforce,
            discount: 0.9,
            policy_weight: 0.01,
            exploration: 0.001,
            early_weight: 0.1,
            temperature: 1.0,
        }
    }
}
