//! FLUX.1 (Black Forest Labs, 2024): double-stream blocks, in which image patches and prompt tokens have separate
//! weights, then single-stream blocks, in which they share them. Rotary positions. As diffusers' `FluxTransformer2DModel`
//! computes it.

mod forward;
mod names;
mod published;

use std::path::Path;

use serde::Deserialize;
use weights::Catalog;

pub use forward::Flux;
pub(crate) use published::flux1_dev;

use super::condition::ConditionLayout;
use super::denoiser::{Architecture, LatentSpec};
use super::editing::{Editing, KONTEXT_SIZES, ReferenceSizing};
use super::family::{ComfyuiLora, DiffusionFamily, ExportMetadata, SamplingDefaults};
use super::guidance::Guidance;
use super::joint::{ATTENTION_LAYERS, check_axes};
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

/// What is known of FLUX.1.
pub const FAMILY: DiffusionFamily = DiffusionFamily {
    name: "flux",
    title: "a FLUX.1",
    pipelines: &["FluxPipeline", KONTEXT_PIPELINE],
    pipeline_output: "images",
    takes_negative_text: true,
    transformer: "FluxTransformer2DModel",
    tensor_marker: "double_blocks.0.img_attn.",
    // Taken: the file of huggingface.co/black-forest-labs/FLUX.1-dev, and its name of 2024.
    vae_files: &["ae.safetensors", "ae.sft"],
    encoders: &[CLIP, T5],
    trainable_encoders: &["clip-l"],
    empty_prompt: "",
    cleans_prompts: false,
    max_sequence_length: 512,
    spacing: SigmaSpacing::Reciprocal,
    ignores_vae_shift: false,
    ignores_scheduler_config: false,
    guidance: Guidance::Embedded,
    editing: None,
    video: None,
    distilled: None,
    // Taken: the defaults of diffusers' `FluxPipeline`.
    sampling: SamplingDefaults { steps: 28, guidance: 3.5, resolution: 1024, negative_prompt: "" },
    // Taken: the default of diffusers' `train_dreambooth_lora_flux.py`, as are the layers.
    scheme: WeightingScheme::Uniform,
    targets: &[
        "attn.to_k",
        "attn.to_q",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_k_proj",
        "attn.add_q_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
        "ff.net.0.proj",
        "ff.net.2",
        "ff_context.net.0.proj",
        "ff_context.net.2",
    ],
    target_presets: &[
        TargetPreset { name: "attention", patterns: &[ATTENTION_LAYERS] },
        TargetPreset { name: "all", patterns: &[ATTENTION_LAYERS, FEED_FORWARD] },
        // Both train every linear layer of both lists of blocks, kohya by the names of the original checkpoints.
        TargetPreset { name: "kohya", patterns: &[ATTENTION_LAYERS, FEED_FORWARD, MODULATION] },
        TargetPreset {
            name: "ai-toolkit",
            patterns: &[ATTENTION_LAYERS, FEED_FORWARD, MODULATION],
        },
    ],
    export: ExportMetadata {
        network: "networks.lora_flux",
        architecture: "flux-1-dev/lora",
        tag: "flux",
        comfyui: ComfyuiLora::Alpha,
    },
    published: published::ALL,
};

/// The other layers of blocks but for modulations. The last layer of the model is called `proj_out`, too.
const FEED_FORWARD: &[&str] = &[
    "ff.net.0.proj",
    "ff.net.2",
    "ff_context.net.0.proj",
    "ff_context.net.2",
    "proj_mlp",
    "single_transformer_blocks.*.proj_out",
];
const MODULATION: &[&str] = &["norm1.linear", "norm1_context.linear", "norm.linear"];

/// FLUX.1 schnell: distilled to four steps without guidance, and to shorter prompts.
const SCHNELL: DiffusionFamily = DiffusionFamily {
    title: "a FLUX.1 schnell",
    encoders: &[CLIP, TextEncoderSpec { prompt_length: PromptLength::Index(256), ..T5 }],
    guidance: Guidance::None,
    sampling: SamplingDefaults { steps: 4, guidance: 1.0, resolution: 1024, negative_prompt: "" },
    export: ExportMetadata { architecture: "flux-1-schnell/lora", ..FAMILY.export },
    ..FAMILY
};

/// FLUX.1 Kontext: edits an image. It differs from dev in its weights alone.
const KONTEXT: DiffusionFamily = DiffusionFamily {
    title: "a FLUX.1 Kontext",
    pipelines: &[KONTEXT_PIPELINE],
    editing: Some(Editing {
        max_references: 1,
        needs_reference: true,
        sizing: ReferenceSizing::Nearest(&KONTEXT_SIZES),
        encoder: None,
    }),
    export: ExportMetadata { architecture: "flux-1-kontext-dev/lora", ..FAMILY.export },
    ..FAMILY
};

const KONTEXT_PIPELINE: &str = "FluxKontextPipeline";

const CLIP: TextEncoderSpec = TextEncoderSpec {
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

const T5: TextEncoderSpec = TextEncoderSpec {
    name: T5_NAME,
    position: 2,
    tokenizer: "tokenizer_2",
    kind: EncoderKind::T5,
    prompt_length: PromptLength::Index(512),
    template: PromptTemplate::NONE,
    is_optional: false,
    // kohya counts T5 as the third, as in SD3; `OneTrainer` as the second.
    adapter_names: EncoderNames { kohya: &["lora_te3", "lora_te2"], comfyui: "t5xxl" },
    files: T5_FILES,
};

/// What `transformer/config.json` says.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct FluxConfig {
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
    /// Width of the pooled prompt embedding.
    pub pooled_projection_dim: usize,
    /// Whether the model takes the guidance scale as an input.
    #[serde(default)]
    pub guidance_embeds: bool,
    /// Rotary dimensions of a head per axis: image index, row, column.
    #[serde(default = "published_axes")]
    pub axes_dims_rope: [usize; 3],
    /// Whether it edits images: Kontext. Not in the file, but in the pipeline's class.
    #[serde(skip)]
    pub is_kontext: bool,
}

/// Taken: older files lack it, and this is the class's default.
fn published_axes() -> [usize; 3] {
    [16, 56, 56]
}

/// Patch size; files count a token's values as channels.
const PATCH: usize = 2;

impl FluxConfig {
    /// Width of tokens inside.
    pub fn width(&self) -> usize {
        self.num_attention_heads * self.attention_head_dim
    }
}

impl Architecture for FluxConfig {
    type Model = Flux;

    /// Only schnell takes no guidance scale.
    fn family(&self) -> &'static DiffusionFamily {
        match (self.is_kontext, self.guidance_embeds) {
            (true, _) => &KONTEXT,
            (false, true) => &FAMILY,
            (false, false) => &SCHNELL,
        }
    }

    fn with_pipeline(self, class: &str) -> Self {
        Self { is_kontext: class == KONTEXT_PIPELINE, ..self }
    }

    fn pipeline_of_file(stem: &str) -> Option<&'static str> {
        stem.contains("kontext").then_some(KONTEXT_PIPELINE)
    }

    fn check(&self) -> std::result::Result<(), Unsupported> {
        check_axes(&self.axes_dims_rope, self.attention_head_dim)?;
        let (input, output) = (self.in_channels, self.out_channels.unwrap_or(self.in_channels));
        Unsupported::unless(
            input == output,
            format!(
                "in_channels {input} is not out_channels {output}: an inpainting or control model"
            ),
        )?;
        let is_whole = input > 0 && input.is_multiple_of(PATCH * PATCH);
        Unsupported::unless(is_whole, format!("in_channels {input} is not a multiple of 4"))?;
        let sizes = [self.num_layers, self.num_single_layers, self.width()];
        Unsupported::unless(!sizes.contains(&0), "a size is 0".into())
    }

    fn of_checkpoint(catalog: &Catalog, beside: &Path) -> Result<Option<(Self, &'static str)>> {
        let Some(prefix) = names::prefix(catalog) else { return Ok(None) };
        let Some(mut config) = names::infer(catalog, prefix) else { return Ok(None) };
        // Shapes do not tell the axes of the rotary embedding: they are those of a model of the same family.
        let beside = beside.join("config.json");
        if beside.exists() {
            config.axes_dims_rope = config::read::<Self>(&beside)?.axes_dims_rope;
        }
        Ok(Some((config, prefix)))
    }

    fn build(&self, build: &mut ModelBuilder<'_>) -> Result<Flux> {
        Flux::new(self, build)
    }

    fn original(&self, prefix: &'static str) -> CheckpointLayout<'static> {
        names::original(prefix)
    }

    fn original_module(&self, module: &str) -> Vec<TensorPiece> {
        names::original_module(module)
    }

    fn other_module(&self, module: &str) -> Option<TensorPiece> {
        names::xlabs_module(module)
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
        let [Some(clip), Some(t5)] = widths else { unreachable!("both are always there") };
        let (pooled, joint) = (self.pooled_projection_dim, self.joint_attention_dim);
        Unsupported::unless(
            clip.pooled == pooled,
            format!(
                "CLIP's pooled embedding has {} values, pooled_projection_dim of the transformer is {pooled}",
                clip.pooled
            ),
        )?;
        Unsupported::unless(
            t5.tokens == joint,
            format!(
                "d_model of T5 is {}, joint_attention_dim of the transformer {joint}",
                t5.tokens
            ),
        )
    }

    /// T5's tokens, and CLIP's pooled embedding.
    fn condition_layout(&self) -> ConditionLayout {
        ConditionLayout { width: self.joint_attention_dim, bands: &[&[1]], pooled: &[0] }
    }
}
