//! Stable Diffusion 3 and 3.5: one transformer (MM-DiT) over image patches and prompt tokens, each stream
//! with separate weights, with joint attention (Esser et al., "Scaling Rectified Flow
//! Transformers for High-Resolution Image Synthesis", arXiv 2403.03206). As diffusers'
//! `SD3Transformer2DModel` computes it.

mod forward;
mod names;
pub(super) mod positions;
mod published;

use std::path::Path;

use serde::Deserialize;
use weights::Catalog;

pub use forward::Sd3;
pub(crate) use published::{sd3_medium, sd35_large};

use super::condition::ConditionLayout;
use super::denoiser::{Architecture, LatentSpec};
use super::family::{ComfyuiLora, DiffusionFamily, ExportMetadata, SamplingDefaults};
use super::guidance::Guidance;
use super::joint::ATTENTION_LAYERS;
use super::scheduler::SigmaSpacing;
use super::text::{
    CLIP_L_FILES, EmbeddingWidths, EncoderKind, PromptLength, PromptTemplate, T5_FILES, T5_NAME,
    TextEncoderSpec,
};
use crate::error::Result;
use crate::model::adapter::TargetPreset;
use crate::model::adapter::names::EncoderNames;
use crate::model::build::ModelBuilder;
use crate::model::config::{self, Unsupported};
use crate::model::files::CheckpointLayout;
use crate::model::tensor_piece::TensorPiece;
use crate::objective::flow::WeightingScheme;

/// What is known of SD3 and SD3.5.
pub const FAMILY: DiffusionFamily = DiffusionFamily {
    name: "sd3",
    title: "an SD3",
    pipelines: &[
        "StableDiffusion3Pipeline",
        "StableDiffusion3Img2ImgPipeline",
        "StableDiffusion3InpaintPipeline",
        "StableDiffusion3ControlNetPipeline",
        "StableDiffusion3PAGPipeline",
    ],
    pipeline_output: "images",
    takes_negative_text: true,
    transformer: "SD3Transformer2DModel",
    tensor_marker: "joint_blocks.0.x_block.",
    vae_files: &["sd3_vae.safetensors"],
    encoders: &[
        CLIP_L,
        TextEncoderSpec {
            name: "clip-g",
            position: 2,
            tokenizer: "tokenizer_2",
            adapter_names: EncoderNames { kohya: &["lora_te2"], comfyui: "clip_g" },
            files: &["clip_g.safetensors"],
            ..CLIP_L
        },
        TextEncoderSpec {
            name: T5_NAME,
            position: 3,
            tokenizer: "tokenizer_3",
            kind: EncoderKind::T5,
            prompt_length: PromptLength::Index(256),
            template: PromptTemplate::NONE,
            is_optional: true,
            adapter_names: EncoderNames { kohya: &["lora_te3"], comfyui: "t5xxl" },
            files: T5_FILES,
        },
    ],
    trainable_encoders: &["clip-l", "clip-g"],
    empty_prompt: "",
    cleans_prompts: false,
    max_sequence_length: 256,
    spacing: SigmaSpacing::Trained,
    ignores_vae_shift: false,
    ignores_scheduler_config: false,
    guidance: Guidance::ClassifierFree,
    editing: None,
    video: None,
    distilled: None,
    // Taken: the defaults of diffusers' `StableDiffusion3Pipeline`.
    sampling: SamplingDefaults { steps: 28, guidance: 7.0, resolution: 1024, negative_prompt: "" },
    // Taken: the default of diffusers' `train_dreambooth_lora_sd3.py`, as are the layers.
    scheme: WeightingScheme::LogitNormal { mean: 0.0, deviation: 1.0 },
    targets: ATTENTION_LAYERS,
    target_presets: &[
        TargetPreset { name: "attention", patterns: &[ATTENTION] },
        TargetPreset { name: "all", patterns: &[ATTENTION, FEED_FORWARD] },
        // Taken: `SD3_TARGET_REPLACE_MODULE` of sd-scripts, every linear layer of the blocks.
        TargetPreset { name: "kohya", patterns: &[ATTENTION, FEED_FORWARD, MODULATION] },
    ],
    export: ExportMetadata {
        network: "networks.lora_sd3",
        architecture: "stable-diffusion-3/lora",
        tag: "stable-diffusion-3",
        comfyui: ComfyuiLora::Alpha,
    },
    published: published::ALL,
};

/// Projections of attention of both streams, and of the second attention where there is one.
const ATTENTION: &[&str] = &[
    "transformer_blocks.*.attn*.to_q",
    "transformer_blocks.*.attn*.to_k",
    "transformer_blocks.*.attn*.to_v",
    "transformer_blocks.*.attn*.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
];
const FEED_FORWARD: &[&str] =
    &["ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"];
const MODULATION: &[&str] = &["norm1.linear", "norm1_context.linear"];

/// Taken: every published CLIP sees 77 tokens where its tokenizer states none.
const CLIP_L: TextEncoderSpec = TextEncoderSpec {
    name: "clip-l",
    position: 1,
    tokenizer: "tokenizer",
    kind: EncoderKind::Clip,
    prompt_length: PromptLength::Positions(77),
    template: PromptTemplate::NONE,
    is_optional: false,
    adapter_names: EncoderNames { kohya: &["lora_te1", "lora_te"], comfyui: "clip_l" },
    files: CLIP_L_FILES,
};

/// Width of heads in all published models.
const HEAD_DIM: usize = 64;

/// What `transformer/config.json` says.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Sd3Config {
    /// Channels of a latent.
    pub in_channels: usize,
    /// Channels that are predicted.
    pub out_channels: Option<usize>,
    /// Patch size.
    pub patch_size: usize,
    /// Blocks.
    pub num_layers: usize,
    /// Heads of every attention.
    pub num_attention_heads: usize,
    /// Width of a head.
    pub attention_head_dim: usize,
    /// Width of a prompt token.
    pub joint_attention_dim: usize,
    /// Width of prompt tokens inside; the same as that of patches.
    pub caption_projection_dim: usize,
    /// Width of the pooled prompt embedding.
    pub pooled_projection_dim: usize,
    /// Tokens along a side of the position embedding.
    pub pos_embed_max_size: usize,
    /// Side of the latents that the position embedding is scaled for.
    #[serde(default = "published_sample_size")]
    pub sample_size: usize,
    /// Whether queries and keys are normed.
    #[serde(default)]
    pub qk_norm: Option<QkNorm>,
    /// Blocks with a second attention among image tokens (MMDiT-X).
    #[serde(default)]
    pub dual_attention_layers: Vec<usize>,
}

/// Taken: the default of diffusers' `SD3Transformer2DModel`.
fn published_sample_size() -> usize {
    128
}

/// How queries and keys are normed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QkNorm {
    /// RMS norm.
    RmsNorm,
}

impl Sd3Config {
    /// Width of tokens inside.
    pub fn width(&self) -> usize {
        self.num_attention_heads * self.attention_head_dim
    }

    /// Channels that are predicted.
    pub fn out_channels(&self) -> usize {
        self.out_channels.unwrap_or(self.in_channels)
    }
}

impl Architecture for Sd3Config {
    type Model = Sd3;

    fn family(&self) -> &'static DiffusionFamily {
        &FAMILY
    }

    fn check(&self) -> std::result::Result<(), Unsupported> {
        Unsupported::unless(
            self.caption_projection_dim == self.width(),
            format!(
                "caption_projection_dim {} is not {} heads of {}",
                self.caption_projection_dim, self.num_attention_heads, self.attention_head_dim
            ),
        )?;
        let sizes = [self.patch_size, self.num_layers, self.width(), self.pos_embed_max_size];
        Unsupported::unless(!sizes.contains(&0), "a size is 0".into())?;
        let beyond = self.dual_attention_layers.iter().find(|index| **index >= self.num_layers);
        match beyond {
            Some(index) => Err(Unsupported(format!(
                "dual_attention_layers names block {index}, there are {}",
                self.num_layers
            ))),
            None => Ok(()),
        }
    }

    fn of_checkpoint(catalog: &Catalog, beside: &Path) -> Result<Option<(Self, &'static str)>> {
        let Some(prefix) = names::prefix(catalog) else { return Ok(None) };
        // The head dim, which shapes do not tell, is that of a model of the same family.
        let beside = beside.join("config.json");
        let d_head = if beside.exists() {
            config::read::<Self>(&beside)?.attention_head_dim
        } else {
            HEAD_DIM
        };
        Ok(names::infer(catalog, prefix, d_head).map(|config| (config, prefix)))
    }

    fn build(&self, build: &mut ModelBuilder<'_>) -> Result<Sd3> {
        Sd3::new(self, build)
    }

    fn original(&self, prefix: &'static str) -> CheckpointLayout<'static> {
        names::original(self, prefix)
    }

    fn original_module(&self, module: &str) -> Vec<TensorPiece> {
        names::original_module(module, self.num_layers)
    }

    fn latent_spec(&self) -> LatentSpec {
        let (channels, patch) = (self.in_channels, self.patch_size);
        LatentSpec {
            channels,
            patch_size: patch,
            max_tokens_per_side: Some(self.pos_embed_max_size),
        }
    }

    fn check_text(
        &self,
        widths: &[Option<EmbeddingWidths>],
    ) -> std::result::Result<(), Unsupported> {
        let [Some(l), Some(g), t5] = widths else { unreachable!("both CLIPs are always there") };
        let joint = self.joint_attention_dim;
        let (pooled, of_t5) = (l.pooled + g.pooled, t5.map_or(joint, |t5| t5.tokens));
        let wanted = self.pooled_projection_dim;
        Unsupported::unless(
            pooled == wanted,
            format!(
                "projection_dim of both CLIPs is {pooled}, pooled_projection_dim of the transformer {wanted}"
            ),
        )?;
        Unsupported::unless(
            of_t5 == joint,
            format!("d_model of T5 is {of_t5}, joint_attention_dim of the transformer {joint}"),
        )?;
        Unsupported::unless(
            l.tokens + g.tokens <= joint,
            format!(
                "hidden_size of the CLIPs is {:?}, joint_attention_dim of the transformer only {joint}",
                [l.tokens, g.tokens]
            ),
        )
    }

    /// Both CLIPs concatenated by feature and padded with zeros, then T5's tokens; zeros for a T5 that is left out.
    fn condition_layout(&self) -> ConditionLayout {
        ConditionLayout {
            width: self.joint_attention_dim,
            bands: &[&[0, 1], &[2]],
            pooled: &[0, 1],
        }
    }
}
