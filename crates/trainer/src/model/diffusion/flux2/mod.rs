//! FLUX.2 klein (Black Forest Labs, 2026): double-stream blocks, in which image patches and prompt tokens have separate weights,
//! then single-stream blocks, in which they share them; all blocks of a list share their modulation. Rotary positions. The
//! same models make images from prompts and edit reference images. As diffusers' `Flux2Transformer2DModel` computes it.

mod blocks;
mod forward;
mod names;
mod published;

use std::path::Path;

use serde::Deserialize;
use weights::Catalog;

pub use forward::Flux2;
pub(crate) use published::{klein_4b, klein_9b};

use super::condition::ConditionLayout;
use super::denoiser::{Architecture, LatentSpec};
use super::editing::{Editing, ReferenceSizing};
use super::family::{ComfyuiLora, DiffusionFamily, ExportMetadata, SamplingDefaults};
use super::guidance::Guidance;
use super::joint::{ATTENTION_LAYERS, EPSILON, check_axes};
use super::scheduler::SigmaSpacing;
use super::text::templates::QWEN3_WITHOUT_THINKING;
use super::text::{
    EmbeddingWidths, EncoderKind, PromptLength, QWEN3_4B_FILES, QWEN3_8B_FILES, TextEncoderSpec,
};
use crate::error::Result;
use crate::model::adapter::TargetPreset;
use crate::model::adapter::names::EncoderNames;
use crate::model::build::ModelBuilder;
use crate::model::config::{self, Unsupported};
use crate::model::files::CheckpointLayout;
use crate::model::tensor_piece::TensorPiece;
use crate::objective::flow::WeightingScheme;

/// What is known of FLUX.2 klein: of the base of 4 billion parameters, and but for its size of all others.
pub const FAMILY: DiffusionFamily = DiffusionFamily {
    name: "flux2",
    title: "a FLUX.2 klein base 4B",
    pipelines: &["Flux2KleinPipeline"],
    pipeline_output: "images",
    takes_negative_text: false,
    transformer: "Flux2Transformer2DModel",
    tensor_marker: "double_stream_modulation_img.lin.",
    // Taken: the file of huggingface.co/Comfy-Org/flux2-dev, and that of huggingface.co/black-forest-labs/FLUX.2-dev.
    vae_files: &["flux2-vae.safetensors", "ae.safetensors"],
    encoders: &[ENCODER],
    trainable_encoders: &[],
    empty_prompt: "",
    cleans_prompts: false,
    max_sequence_length: 512,
    spacing: SigmaSpacing::Reciprocal,
    ignores_vae_shift: false,
    // Its sampler shifts sigmas by a fit of its own, whatever the file says.
    ignores_scheduler_config: true,
    guidance: Guidance::ClassifierFree,
    editing: Some(Editing {
        // Taken: docs.bfl.ml/guides/prompting_editing_overview.
        max_references: 4,
        needs_reference: false,
        sizing: ReferenceSizing::Cropped { multiple: 16 },
        encoder: None,
    }),
    video: None,
    distilled: None,
    // Taken: the defaults of diffusers' `Flux2KleinPipeline`.
    sampling: SamplingDefaults { steps: 50, guidance: 4.0, resolution: 1024, negative_prompt: "" },
    // Taken: the default of diffusers' `train_dreambooth_lora_flux2_klein.py`, as are the layers.
    scheme: WeightingScheme::Uniform,
    targets: &[
        "attn.to_k",
        "attn.to_q",
        "attn.to_v",
        "attn.to_out.0",
        "attn.to_qkv_mlp_proj",
        "single_transformer_blocks.*.attn.to_out",
    ],
    target_presets: &[
        TargetPreset { name: "attention", patterns: &[ATTENTION_LAYERS, SINGLE] },
        // Every linear layer of both lists of blocks, which is what musubi-tuner and ai-toolkit train too.
        TargetPreset { name: "all", patterns: &[ATTENTION_LAYERS, SINGLE, FEED_FORWARD] },
        TargetPreset { name: "kohya", patterns: &[ATTENTION_LAYERS, SINGLE, FEED_FORWARD] },
        TargetPreset { name: "ai-toolkit", patterns: &[ATTENTION_LAYERS, SINGLE, FEED_FORWARD] },
    ],
    // Taken: musubi-tuner's names.
    export: ExportMetadata {
        network: "networks.lora_flux_2",
        architecture: "Flux.2-klein-4b/lora",
        tag: "flux2",
        comfyui: ComfyuiLora::Scaled,
    },
    published: published::ALL,
};

/// The base of 9 billion parameters.
const BASE_9B: DiffusionFamily = DiffusionFamily {
    title: "a FLUX.2 klein base 9B",
    encoders: &[ENCODER_8B],
    export: ExportMetadata { architecture: "Flux.2-klein-9b/lora", ..FAMILY.export },
    ..FAMILY
};

/// Distilled to four steps without guidance.
const DISTILLED_4B: DiffusionFamily = DiffusionFamily {
    title: "a FLUX.2 klein 4B",
    guidance: Guidance::None,
    distilled: Some(
        "train black-forest-labs/FLUX.2-klein-base-4B, and use what is trained with this model",
    ),
    sampling: DISTILLED_SAMPLING,
    ..FAMILY
};

/// The same of 9 billion parameters.
const DISTILLED_9B: DiffusionFamily = DiffusionFamily {
    title: "a FLUX.2 klein 9B",
    guidance: Guidance::None,
    distilled: Some(
        "train black-forest-labs/FLUX.2-klein-base-9B, and use what is trained with this model",
    ),
    sampling: DISTILLED_SAMPLING,
    ..BASE_9B
};

const DISTILLED_SAMPLING: SamplingDefaults =
    SamplingDefaults { steps: 4, guidance: 1.0, ..FAMILY.sampling };

/// The layers of single-stream blocks.
const SINGLE: &[&str] = &["attn.to_qkv_mlp_proj", "single_transformer_blocks.*.attn.to_out"];
/// The other layers of double-stream blocks.
const FEED_FORWARD: &[&str] =
    &["ff.linear_in", "ff.linear_out", "ff_context.linear_in", "ff_context.linear_out"];

const ENCODER: TextEncoderSpec = TextEncoderSpec {
    name: "qwen3",
    position: 1,
    tokenizer: "tokenizer",
    kind: EncoderKind::Qwen3Layers,
    prompt_length: PromptLength::Index(512),
    template: QWEN3_WITHOUT_THINKING,
    is_optional: false,
    adapter_names: EncoderNames { kohya: &["lora_te1", "lora_te"], comfyui: "qwen3_4b" },
    files: QWEN3_4B_FILES,
};

const ENCODER_8B: TextEncoderSpec = TextEncoderSpec {
    adapter_names: EncoderNames { comfyui: "qwen3_8b", ..ENCODER.adapter_names },
    files: QWEN3_8B_FILES,
    ..ENCODER
};

/// Pixels of a latent along a token's side; files count a token's values as channels.
const PATCH: usize = 2;
/// Width of a prompt token of the smaller models, which have Qwen3-4B. Taken: the published models.
const SMALL_PROMPT: usize = 3 * 2560;

/// What `transformer/config.json` says.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Flux2Config {
    /// Pixels of a latent along a token's side, after those that are counted as channels.
    #[serde(default = "one")]
    pub patch_size: usize,
    /// Values of a token: the channels of a latent, four pixels together.
    pub in_channels: usize,
    /// Values that are predicted for a token.
    #[serde(default)]
    pub out_channels: Option<usize>,
    /// Double-stream blocks.
    pub num_layers: usize,
    /// Single-stream blocks.
    pub num_single_layers: usize,
    /// Heads of every attention.
    pub num_attention_heads: usize,
    /// Width of a head.
    pub attention_head_dim: usize,
    /// Width of a prompt token.
    pub joint_attention_dim: usize,
    /// Width of the sinusoidal embedding of timesteps.
    #[serde(default = "published_channels")]
    pub timestep_guidance_channels: usize,
    /// Inner width of a feed-forward, in widths.
    #[serde(default = "published_ratio")]
    pub mlp_ratio: f64,
    /// Rotary dimensions of a head per axis: image index, row, column, place in the prompt.
    #[serde(default = "published_dims")]
    pub axes_dims_rope: [usize; 4],
    /// θ of the rotary embedding.
    #[serde(default = "published_theta")]
    pub rope_theta: f64,
    /// Epsilon of all norms.
    #[serde(default = "published_epsilon")]
    pub eps: f32,
    /// Whether the model takes the guidance scale as an input: FLUX.2 dev, where that is the default.
    #[serde(default = "yes")]
    pub guidance_embeds: bool,
    /// Whether it is distilled to few steps. Not in the file, but in that of the pipeline, or in the model's name.
    #[serde(skip)]
    pub is_distilled: Option<bool>,
}

fn one() -> usize {
    1
}

fn yes() -> bool {
    true
}

/// Taken, as the next: the defaults of the class.
fn published_channels() -> usize {
    256
}

fn published_ratio() -> f64 {
    3.0
}

fn published_theta() -> f64 {
    2000.0
}

fn published_epsilon() -> f32 {
    EPSILON
}

fn published_dims() -> [usize; 4] {
    published_axes(128)
}

/// All axes have the same share of a head.
fn published_axes(head_dim: usize) -> [usize; 4] {
    [head_dim / 4; 4]
}

impl Flux2Config {
    /// Width of tokens inside.
    pub fn width(&self) -> usize {
        self.num_attention_heads * self.attention_head_dim
    }

    /// Settings of models that hearth does not know.
    fn check_kind(&self) -> std::result::Result<(), Unsupported> {
        let problem = "guidance_embeds is on: FLUX.2 dev, which hearth does not support";
        Unsupported::unless(!self.guidance_embeds, problem.into())?;
        let patch = self.patch_size;
        Unsupported::unless(patch == 1, format!("patch_size {patch} is not 1"))?;
        let (input, output) = (self.in_channels, self.out_channels.unwrap_or(self.in_channels));
        let problem = format!("in_channels {input} is not out_channels {output}");
        Unsupported::unless(input == output, problem)?;
        let problem = format!("eps {} is not {EPSILON}", self.eps);
        Unsupported::unless(self.eps == EPSILON, problem)
    }
}

impl Architecture for Flux2Config {
    type Model = Flux2;

    fn family(&self) -> &'static DiffusionFamily {
        let is_distilled = self.is_distilled.unwrap_or(false);
        match (self.joint_attention_dim > SMALL_PROMPT, is_distilled) {
            (false, false) => &FAMILY,
            (true, false) => &BASE_9B,
            (false, true) => &DISTILLED_4B,
            (true, true) => &DISTILLED_9B,
        }
    }

    fn with_distillation(self, is_distilled: bool) -> Self {
        Self { is_distilled: Some(is_distilled), ..self }
    }

    /// Single files are known by their names alone: those of the base models say so.
    fn with_name(self, name: &str) -> Self {
        let name = name.replace('_', "-");
        let is_distilled = ["klein-4b", "klein-9b"].iter().any(|mark| name.contains(mark));
        Self { is_distilled: self.is_distilled.or(is_distilled.then_some(true)), ..self }
    }

    fn check(&self) -> std::result::Result<(), Unsupported> {
        self.check_kind()?;
        check_axes(&self.axes_dims_rope, self.attention_head_dim)?;
        let input = self.in_channels;
        let is_whole = input > 0 && input.is_multiple_of(PATCH * PATCH);
        Unsupported::unless(is_whole, format!("in_channels {input} is not a multiple of 4"))?;
        let ratio = self.mlp_ratio;
        let is_whole = ratio.fract() == 0.0 && (1.0..=64.0).contains(&ratio);
        Unsupported::unless(is_whole, format!("mlp_ratio {ratio} is not a whole number"))?;
        let is_fine = self.rope_theta > 0.0 && self.rope_theta.is_finite();
        Unsupported::unless(is_fine, format!("rope_theta is {}", self.rope_theta))?;
        let sizes = [self.num_layers, self.num_single_layers, self.width()];
        let sizes = [&sizes[..], &[self.joint_attention_dim, self.timestep_guidance_channels]];
        Unsupported::unless(!sizes.concat().contains(&0), "a size is 0".into())
    }

    fn of_checkpoint(catalog: &Catalog, beside: &Path) -> Result<Option<(Self, &'static str)>> {
        let Some(prefix) = names::prefix(catalog) else { return Ok(None) };
        let Some(mut config) = names::infer(catalog, prefix) else { return Ok(None) };
        // Shapes do not tell the axes of the rotary embedding: they are those of a model of the same family.
        let beside = beside.join("config.json");
        if beside.exists() {
            let told = config::read::<Self>(&beside)?;
            if told.attention_head_dim == config.attention_head_dim {
                config.axes_dims_rope = told.axes_dims_rope;
            }
            (config.rope_theta, config.eps) = (told.rope_theta, told.eps);
        }
        Ok(Some((config, prefix)))
    }

    fn build(&self, build: &mut ModelBuilder<'_>) -> Result<Flux2> {
        Flux2::new(self, build)
    }

    fn original(&self, prefix: &'static str) -> CheckpointLayout<'static> {
        names::original(prefix)
    }

    fn original_module(&self, module: &str) -> Vec<TensorPiece> {
        names::original_module(module)
    }

    fn latent_spec(&self) -> LatentSpec {
        LatentSpec {
            channels: self.in_channels / (PATCH * PATCH),
            patch_size: PATCH,
            max_tokens_per_side: None,
        }
    }

    fn check_text(
        &self,
        widths: &[Option<EmbeddingWidths>],
    ) -> std::result::Result<(), Unsupported> {
        let [Some(text)] = widths else { unreachable!("it is always there") };
        let (states, wanted) = (text.tokens, self.joint_attention_dim);
        let problem = format!(
            "three hidden states of the text encoder have {states} values, joint_attention_dim of the transformer is \
             {wanted}"
        );
        Unsupported::unless(states == wanted, problem)
    }

    /// The text encoder's tokens, with those that fill up a prompt.
    fn condition_layout(&self) -> ConditionLayout {
        ConditionLayout { width: self.joint_attention_dim, bands: &[&[0]], pooled: &[] }
    }
}
