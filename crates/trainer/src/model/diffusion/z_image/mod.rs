//! Z-Image (Alibaba, 2025): single-stream blocks for image patches and prompt tokens together, after two of their own for each.
//! The prompt is encoded by a language model. Rotary positions. As diffusers' `ZImageTransformer2DModel` computes it.

mod blocks;
mod forward;
mod names;
mod published;

use std::path::Path;

use serde::Deserialize;
use weights::Catalog;

pub use forward::ZImage;
pub(crate) use published::z_image;

use super::condition::ConditionLayout;
use super::denoiser::{Architecture, LatentSpec};
use super::family::{ComfyuiLora, DiffusionFamily, ExportMetadata, SamplingDefaults};
use super::guidance::Guidance;
use super::joint::check_axes;
use super::scheduler::SigmaSpacing;
use super::text::templates::QWEN3_TEMPLATE;
use super::text::{EmbeddingWidths, EncoderKind, PromptLength, QWEN3_4B_FILES, TextEncoderSpec};
use crate::error::Result;
use crate::model::adapter::TargetPreset;
use crate::model::adapter::names::EncoderNames;
use crate::model::build::ModelBuilder;
use crate::model::config::{self, Unsupported};
use crate::model::files::CheckpointLayout;
use crate::model::tensor_piece::TensorPiece;
use crate::objective::flow::WeightingScheme;

/// What is known of Z-Image.
pub const FAMILY: DiffusionFamily = DiffusionFamily {
    name: "z-image",
    title: "a Z-Image",
    pipelines: &["ZImagePipeline"],
    pipeline_output: "images",
    takes_negative_text: true,
    transformer: "ZImageTransformer2DModel",
    tensor_marker: "cap_pad_token",
    // The VAE of FLUX.1.
    vae_files: &["ae.safetensors", "ae.sft"],
    encoders: &[ENCODER],
    trainable_encoders: &[],
    empty_prompt: "",
    cleans_prompts: false,
    max_sequence_length: 512,
    spacing: SigmaSpacing::Reciprocal,
    ignores_vae_shift: false,
    ignores_scheduler_config: false,
    guidance: Guidance::Added,
    editing: None,
    video: None,
    distilled: None,
    // Taken: the defaults of diffusers' `ZImagePipeline`.
    sampling: SamplingDefaults { steps: 50, guidance: 5.0, resolution: 1024, negative_prompt: "" },
    // Taken: the default of diffusers' `train_dreambooth_lora_z_image.py`, as are the layers.
    scheme: WeightingScheme::Uniform,
    targets: ATTENTION,
    target_presets: &[
        TargetPreset { name: "attention", patterns: &[ATTENTION] },
        TargetPreset { name: "all", patterns: &[ATTENTION, FEED_FORWARD] },
        // Taken: what musubi-tuner trains, the layers without modulations.
        TargetPreset { name: "kohya", patterns: &[LAYERS] },
        // Every linear layer of the layers.
        TargetPreset { name: "ai-toolkit", patterns: &[LAYERS, &["layers.*.adaLN_modulation.0"]] },
    ],
    // Taken: musubi-tuner's names.
    export: ExportMetadata {
        network: "networks.lora_zimage",
        architecture: "Z-Image/lora",
        tag: "z-image",
        comfyui: ComfyuiLora::Alpha,
    },
    published: published::ALL,
};

/// Z-Image Turbo: distilled to eight steps without guidance.
const TURBO: DiffusionFamily = DiffusionFamily {
    title: "a Z-Image Turbo",
    distilled: Some(
        "set base.training_adapter to an adapter that undoes the distillation while training, such as \
         hf:ostris/zimage_turbo_training_adapter/zimage_turbo_training_adapter_v2.safetensors, or train \
         Tongyi-MAI/Z-Image",
    ),
    sampling: SamplingDefaults { steps: 8, guidance: 0.0, resolution: 1024, negative_prompt: "" },
    ..FAMILY
};

const ATTENTION: &[&str] =
    &["attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0"];
const FEED_FORWARD: &[&str] = &["feed_forward.w1", "feed_forward.w2", "feed_forward.w3"];
/// Those of the layers alone.
const LAYERS: &[&str] = &[
    "layers.*.attention.to_q",
    "layers.*.attention.to_k",
    "layers.*.attention.to_v",
    "layers.*.attention.to_out.0",
    "layers.*.feed_forward.w1",
    "layers.*.feed_forward.w2",
    "layers.*.feed_forward.w3",
];

const ENCODER: TextEncoderSpec = TextEncoderSpec {
    name: "qwen3",
    position: 1,
    tokenizer: "tokenizer",
    kind: EncoderKind::Qwen3,
    prompt_length: PromptLength::Index(512),
    template: QWEN3_TEMPLATE,
    is_optional: false,
    adapter_names: EncoderNames { kohya: &["lora_te1", "lora_te"], comfyui: "qwen3_4b" },
    files: QWEN3_4B_FILES,
};

/// Pixels of a latent along a token's side.
const PATCH: usize = 2;
/// The most values of an embedded timestep.
const MAX_CONDITION_DIM: usize = 256;

/// What `transformer/config.json` says.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct ZImageConfig {
    /// Latent pixels along a token's side, of which the model could have several.
    #[serde(default = "published_patch")]
    pub all_patch_size: Vec<usize>,
    /// The same in frames.
    #[serde(default = "published_frames")]
    pub all_f_patch_size: Vec<usize>,
    /// Channels of latents.
    pub in_channels: usize,
    /// Width of tokens inside.
    pub dim: usize,
    /// Blocks of image and prompt together.
    pub n_layers: usize,
    /// Blocks of each alone.
    pub n_refiner_layers: usize,
    /// Heads of every attention.
    pub n_heads: usize,
    /// Heads of keys and values: as many.
    pub n_kv_heads: usize,
    /// Epsilon of the norms.
    #[serde(default = "published_epsilon")]
    pub norm_eps: f32,
    /// Whether queries and keys are normed.
    pub qk_norm: bool,
    /// Width of a prompt token.
    pub cap_feat_dim: usize,
    /// Width of the features of reference images: Z-Image Omni.
    #[serde(default)]
    pub siglip_feat_dim: Option<usize>,
    /// θ of the rotary embedding.
    #[serde(default = "published_theta")]
    pub rope_theta: f64,
    /// What times from 0 to 1 are multiplied by.
    #[serde(default = "published_scale")]
    pub t_scale: f32,
    /// Rotary dimensions of a head per axis: prompt, row, column.
    #[serde(default = "published_axes")]
    pub axes_dims: [usize; 3],
    /// Positions that there are on each axis.
    #[serde(default = "published_lengths")]
    pub axes_lens: [usize; 3],
    /// Whether it is distilled to few steps: Turbo. Not in the file, but in the model's name.
    #[serde(skip)]
    pub is_turbo: bool,
}

/// Taken, as the next: the defaults of the class.
fn published_patch() -> Vec<usize> {
    vec![PATCH]
}

fn published_frames() -> Vec<usize> {
    vec![1]
}

fn published_epsilon() -> f32 {
    1e-5
}

fn published_theta() -> f64 {
    256.0
}

fn published_scale() -> f32 {
    1000.0
}

fn published_axes() -> [usize; 3] {
    [32, 48, 48]
}

fn published_lengths() -> [usize; 3] {
    [1024, 512, 512]
}

impl ZImageConfig {
    /// Width of a head.
    pub fn head_dim(&self) -> usize {
        self.axes_dims.iter().sum()
    }

    /// Inner width of a feed-forward.
    fn feed_forward_dim(&self) -> usize {
        self.dim * 8 / 3
    }

    /// Values of an embedded timestep.
    fn condition_dim(&self) -> usize {
        self.dim.min(MAX_CONDITION_DIM)
    }

    /// Values of a token of the image.
    fn token_dim(&self) -> usize {
        PATCH * PATCH * self.in_channels
    }

    /// Settings of models that hearth does not know.
    fn check_kind(&self) -> std::result::Result<(), Unsupported> {
        let (patch, frames) = (&self.all_patch_size, &self.all_f_patch_size);
        let problem =
            format!("all_patch_size {patch:?} and all_f_patch_size {frames:?} are not [2] and [1]");
        Unsupported::unless(*patch == published_patch() && *frames == published_frames(), problem)?;
        let problem = "siglip_feat_dim is set: Z-Image Omni, which hearth does not support";
        Unsupported::unless(self.siglip_feat_dim.is_none(), problem.into())?;
        Unsupported::unless(self.qk_norm, "qk_norm is off, expected on".into())?;
        let (heads, kv_heads) = (self.n_heads, self.n_kv_heads);
        let problem = format!("n_kv_heads {kv_heads} is not n_heads {heads}");
        Unsupported::unless(heads == kv_heads, problem)
    }
}

impl Architecture for ZImageConfig {
    type Model = ZImage;

    fn family(&self) -> &'static DiffusionFamily {
        if self.is_turbo { &TURBO } else { &FAMILY }
    }

    /// People also share Turbo with its distillation trained away, as "De-Turbo": that is sampled like the base.
    fn with_name(self, name: &str) -> Self {
        let has = |word| name.contains(word);
        let is_turbo = has("turbo") && !has("deturbo") && !has("de-turbo") && !has("de_turbo");
        Self { is_turbo: self.is_turbo || is_turbo, ..self }
    }

    fn check(&self) -> std::result::Result<(), Unsupported> {
        self.check_kind()?;
        let sizes = [self.in_channels, self.n_layers, self.n_heads, self.dim, self.cap_feat_dim];
        Unsupported::unless(!sizes.contains(&0), "a size is 0".into())?;
        let (dim, heads) = (self.dim, self.n_heads);
        let problem = format!("dim {dim} is not a multiple of n_heads {heads}");
        Unsupported::unless(dim.is_multiple_of(heads), problem)?;
        let is_fine = self.rope_theta > 0.0 && self.rope_theta.is_finite();
        Unsupported::unless(is_fine, format!("rope_theta is {}", self.rope_theta))?;
        check_axes(&self.axes_dims, dim / heads)
    }

    fn of_checkpoint(catalog: &Catalog, beside: &Path) -> Result<Option<(Self, &'static str)>> {
        let Some(prefix) = names::prefix(catalog) else { return Ok(None) };
        let Some(mut config) = names::infer(catalog, prefix) else { return Ok(None) };
        // Shapes do not tell the axes of the rotary embedding: they are those of a model of the same family.
        let beside = beside.join("config.json");
        if beside.exists() {
            let told = config::read::<Self>(&beside)?;
            if told.head_dim() == config.head_dim() {
                (config.axes_dims, config.axes_lens) = (told.axes_dims, told.axes_lens);
            }
            (config.norm_eps, config.rope_theta) = (told.norm_eps, told.rope_theta);
            config.t_scale = told.t_scale;
        }
        Ok(Some((config, prefix)))
    }

    fn build(&self, build: &mut ModelBuilder<'_>) -> Result<ZImage> {
        ZImage::new(self, build)
    }

    fn original(&self, prefix: &'static str) -> CheckpointLayout<'static> {
        names::original(prefix)
    }

    /// Adapters have diffusers' names, which ComfyUI, musubi-tuner and ai-toolkit read.
    fn original_module(&self, module: &str) -> Vec<TensorPiece> {
        vec![TensorPiece::whole(module)]
    }

    fn other_module(&self, module: &str) -> Option<TensorPiece> {
        Some(names::original_module(module))
    }

    fn latent_spec(&self) -> LatentSpec {
        let [_, rows, columns] = self.axes_lens;
        LatentSpec {
            channels: self.in_channels,
            patch_size: PATCH,
            max_tokens_per_side: Some(rows.min(columns)),
        }
    }

    fn check_text(
        &self,
        widths: &[Option<EmbeddingWidths>],
    ) -> std::result::Result<(), Unsupported> {
        let [Some(text)] = widths else { unreachable!("it is always there") };
        let (hidden, wanted) = (text.tokens, self.cap_feat_dim);
        let problem = format!(
            "hidden_size of the text encoder is {hidden}, cap_feat_dim of the transformer {wanted}"
        );
        Unsupported::unless(hidden == wanted, problem)
    }

    /// The text encoder's tokens, as many as there are.
    fn condition_layout(&self) -> ConditionLayout {
        ConditionLayout { width: self.cap_feat_dim, bands: &[&[0]], pooled: &[] }
    }
}
