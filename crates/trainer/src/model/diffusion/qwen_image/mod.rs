//! Qwen-Image (Alibaba, 2025): double-stream blocks, in which image patches and prompt tokens have separate weights. The
//! prompt is as long as it is, and is encoded by a language model. Rotary positions, the image's origin in its
//! middle. As diffusers' `QwenImageTransformer2DModel` computes it.

mod forward;
mod names;
mod published;

use std::path::Path;

use serde::Deserialize;
use weights::Catalog;

pub use forward::QwenImage;
pub(crate) use published::qwen_image;

use super::condition::ConditionLayout;
use super::denoiser::{Architecture, LatentSpec};
use super::editing::{Editing, EncoderImages, ReferenceSizing};
use super::family::{ComfyuiLora, DiffusionFamily, ExportMetadata, SamplingDefaults};
use super::guidance::Guidance;
use super::joint::{ATTENTION_LAYERS, check_axes};
use super::scheduler::SigmaSpacing;
use super::text::templates::{
    QWEN_IMAGE_EDIT_PLUS_TEMPLATE, QWEN_IMAGE_EDIT_TEMPLATE, QWEN_IMAGE_TEMPLATE,
};
use super::text::{EmbeddingWidths, EncoderKind, PromptLength, QWEN25VL_FILES, TextEncoderSpec};
use crate::error::Result;
use crate::model::adapter::TargetPreset;
use crate::model::adapter::names::EncoderNames;
use crate::model::build::ModelBuilder;
use crate::model::config::{self, Unsupported};
use crate::model::files::CheckpointLayout;
use crate::model::tensor_piece::TensorPiece;
use crate::objective::flow::WeightingScheme;

/// What is known of Qwen-Image.
pub const FAMILY: DiffusionFamily = DiffusionFamily {
    name: "qwen-image",
    title: "a Qwen-Image",
    pipelines: &["QwenImagePipeline", EDIT_PIPELINE, EDIT_PLUS_PIPELINE],
    pipeline_output: "images",
    takes_negative_text: true,
    transformer: "QwenImageTransformer2DModel",
    tensor_marker: "transformer_blocks.0.img_mod.1.",
    // Taken: the files of huggingface.co/Comfy-Org/Qwen-Image_ComfyUI, as are those of the text encoder.
    vae_files: &["qwen_image_vae.safetensors"],
    encoders: &[ENCODER],
    // Taken: diffusers' documentation and the trainers that drop captions.
    trainable_encoders: &[],
    empty_prompt: " ",
    cleans_prompts: false,
    max_sequence_length: 512,
    spacing: SigmaSpacing::Reciprocal,
    ignores_vae_shift: false,
    ignores_scheduler_config: false,
    guidance: Guidance::Rescaled,
    editing: None,
    video: None,
    distilled: None,
    // Taken: the defaults of diffusers' `QwenImagePipeline`.
    sampling: SamplingDefaults { steps: 50, guidance: 4.0, resolution: 1024, negative_prompt: "" },
    // Taken: the default of diffusers' `train_dreambooth_lora_qwen_image.py`.
    scheme: WeightingScheme::Uniform,
    targets: ATTENTION_LAYERS,
    target_presets: &[
        TargetPreset { name: "attention", patterns: &[ATTENTION_LAYERS] },
        TargetPreset { name: "all", patterns: &[ATTENTION_LAYERS, FEED_FORWARD] },
        // Taken: `QWEN_IMAGE_TARGET_REPLACE_MODULES` of musubi-tuner, without modulations.
        TargetPreset { name: "kohya", patterns: &[ATTENTION_LAYERS, FEED_FORWARD] },
        // Every linear layer of the blocks.
        TargetPreset {
            name: "ai-toolkit",
            patterns: &[ATTENTION_LAYERS, FEED_FORWARD, MODULATION],
        },
    ],
    export: ExportMetadata {
        network: "networks.lora_qwen_image",
        architecture: "Qwen-Image/lora",
        tag: "qwen-image",
        comfyui: ComfyuiLora::Alpha,
    },
    published: published::ALL,
};

/// Qwen-Image-Edit of August 2025: edits one image, which its text encoder sees too.
const EDIT: DiffusionFamily = DiffusionFamily {
    title: "a Qwen-Image-Edit",
    pipelines: &[EDIT_PIPELINE],
    encoders: &[TextEncoderSpec { template: QWEN_IMAGE_EDIT_TEMPLATE, ..ENCODER }],
    editing: Some(Editing {
        max_references: 1,
        needs_reference: true,
        sizing: ReferenceSizing::Area { multiple: 32 },
        encoder: Some(EncoderImages::Same),
    }),
    export: ExportMetadata { architecture: "Qwen-Image-Edit/lora", ..FAMILY.export },
    ..FAMILY
};

/// Qwen-Image-Edit-2509 and -2511: from up to three images, of which the text encoder sees small ones.
const EDIT_PLUS: DiffusionFamily = DiffusionFamily {
    title: "a Qwen-Image-Edit-Plus",
    pipelines: &[EDIT_PLUS_PIPELINE],
    encoders: &[TextEncoderSpec { template: QWEN_IMAGE_EDIT_PLUS_TEMPLATE, ..ENCODER }],
    editing: Some(Editing {
        max_references: 3,
        needs_reference: true,
        sizing: ReferenceSizing::Area { multiple: 32 },
        encoder: Some(EncoderImages::Side(384)),
    }),
    export: ExportMetadata { architecture: "Qwen-Image-Edit-Plus/lora", ..FAMILY.export },
    ..FAMILY
};

const EDIT_PIPELINE: &str = "QwenImageEditPipeline";
const EDIT_PLUS_PIPELINE: &str = "QwenImageEditPlusPipeline";

/// The editing models.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QwenImageEdit {
    /// Of August 2025.
    First,
    /// 2509 and 2511.
    Plus,
}

/// The other layers of blocks but for modulations.
const FEED_FORWARD: &[&str] =
    &["img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2"];
const MODULATION: &[&str] = &["img_mod.1", "txt_mod.1"];

const ENCODER: TextEncoderSpec = TextEncoderSpec {
    name: "qwen2.5-vl",
    position: 1,
    tokenizer: "tokenizer",
    kind: EncoderKind::Qwen25Vl,
    prompt_length: PromptLength::Index(512),
    template: QWEN_IMAGE_TEMPLATE,
    is_optional: false,
    adapter_names: EncoderNames { kohya: &["lora_te1", "lora_te"], comfyui: "qwen25_7b" },
    files: QWEN25VL_FILES,
};

/// What `transformer/config.json` says.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct QwenImageConfig {
    /// Pixels of a latent along a token's side.
    #[serde(default = "published_patch")]
    pub patch_size: usize,
    /// Values of a token: the channels of a latent, all pixels of a token together.
    pub in_channels: usize,
    /// Channels of the latent that is predicted.
    #[serde(default)]
    pub out_channels: Option<usize>,
    /// Blocks.
    pub num_layers: usize,
    /// Heads of every attention.
    pub num_attention_heads: usize,
    /// Width of a head.
    pub attention_head_dim: usize,
    /// Width of a prompt token.
    pub joint_attention_dim: usize,
    /// Rotary dimensions of a head per axis: image index, row, column.
    #[serde(default = "published_axes")]
    pub axes_dims_rope: [usize; 3],
    /// Whether the model takes the guidance scale as an input; no published model does.
    #[serde(default)]
    pub guidance_embeds: bool,
    /// Whether tokens of reference images are modulated as if without noise: Qwen-Image-Edit-2511.
    #[serde(default)]
    pub zero_cond_t: bool,
    /// Whether a second embedding is added to that of the timestep: Qwen-Image-Layered.
    #[serde(default)]
    pub use_additional_t_cond: bool,
    /// Whether the image index counts layers: Qwen-Image-Layered.
    #[serde(default)]
    pub use_layer3d_rope: bool,
    /// Which editing model it is, if any. Not in the file, but in the pipeline's class.
    #[serde(skip)]
    pub edit: Option<QwenImageEdit>,
}

/// Taken: the defaults of the class.
fn published_axes() -> [usize; 3] {
    [16, 56, 56]
}

fn published_patch() -> usize {
    2
}

impl QwenImageConfig {
    /// Width of tokens inside.
    pub fn width(&self) -> usize {
        self.num_attention_heads * self.attention_head_dim
    }

    /// Latent pixels of a token.
    fn pixels(&self) -> usize {
        self.patch_size * self.patch_size
    }

    /// Settings of models that hearth does not know.
    fn check_kind(&self) -> std::result::Result<(), Unsupported> {
        let switches = [
            ("guidance_embeds", self.guidance_embeds, "a distilled model"),
            ("use_additional_t_cond", self.use_additional_t_cond, "Qwen-Image-Layered"),
            ("use_layer3d_rope", self.use_layer3d_rope, "Qwen-Image-Layered"),
        ];
        switches.iter().try_for_each(|(name, is_on, what)| {
            let problem = format!("{name} is on: {what}, which hearth does not support");
            Unsupported::unless(!is_on, problem)
        })
    }
}

impl Architecture for QwenImageConfig {
    type Model = QwenImage;

    fn family(&self) -> &'static DiffusionFamily {
        match self.edit {
            None => &FAMILY,
            Some(QwenImageEdit::First) => &EDIT,
            Some(QwenImageEdit::Plus) => &EDIT_PLUS,
        }
    }

    fn with_pipeline(self, class: &str) -> Self {
        let edit = match class {
            EDIT_PIPELINE => Some(QwenImageEdit::First),
            EDIT_PLUS_PIPELINE => Some(QwenImageEdit::Plus),
            _ => None,
        };
        Self { edit, ..self }
    }

    fn pipeline_of_file(stem: &str) -> Option<&'static str> {
        let has = |word: &str| stem.contains(word);
        let is_plus = ["2509", "2511", "plus"].into_iter().any(has);
        has("edit").then_some(if is_plus { EDIT_PLUS_PIPELINE } else { EDIT_PIPELINE })
    }

    fn check(&self) -> std::result::Result<(), Unsupported> {
        self.check_kind()?;
        check_axes(&self.axes_dims_rope, self.attention_head_dim)?;
        let sizes = [self.patch_size, self.in_channels, self.num_layers, self.width()];
        Unsupported::unless(!sizes.contains(&0), "a size is 0".into())?;
        // Without it, diffusers takes as many channels as a token has values.
        let output = self.out_channels.unwrap_or(self.in_channels) * self.pixels();
        Unsupported::unless(
            self.in_channels == output,
            format!(
                "in_channels {} is not out_channels times the patch, {output}",
                self.in_channels
            ),
        )
    }

    fn of_checkpoint(catalog: &Catalog, beside: &Path) -> Result<Option<(Self, &'static str)>> {
        let Some(prefix) = names::prefix(catalog) else { return Ok(None) };
        let Some(mut config) = names::infer(catalog, prefix) else { return Ok(None) };
        // Shapes do not tell the axes of the rotary embedding: they are those of a model of the same family.
        let beside = beside.join("config.json");
        if beside.exists() {
            let Self { axes_dims_rope, zero_cond_t, .. } = config::read::<Self>(&beside)?;
            config.axes_dims_rope = axes_dims_rope;
            config.zero_cond_t |= zero_cond_t;
        }
        Ok(Some((config, prefix)))
    }

    fn build(&self, build: &mut ModelBuilder<'_>) -> Result<QwenImage> {
        QwenImage::new(self, build)
    }

    fn original(&self, prefix: &'static str) -> CheckpointLayout<'static> {
        names::original(prefix)
    }

    fn original_module(&self, module: &str) -> Vec<TensorPiece> {
        vec![TensorPiece::whole(module)]
    }

    fn latent_spec(&self) -> LatentSpec {
        LatentSpec {
            channels: self.in_channels / self.pixels().max(1),
            patch_size: self.patch_size,
            max_tokens_per_side: None,
        }
    }

    fn check_text(
        &self,
        widths: &[Option<EmbeddingWidths>],
    ) -> std::result::Result<(), Unsupported> {
        let [Some(text)] = widths else { unreachable!("it is always there") };
        let (hidden, joint) = (text.tokens, self.joint_attention_dim);
        Unsupported::unless(
            hidden == joint,
            format!(
                "hidden_size of the text encoder is {hidden}, joint_attention_dim of the transformer {joint}"
            ),
        )
    }

    /// The text encoder's tokens, as many as there are.
    fn condition_layout(&self) -> ConditionLayout {
        ConditionLayout { width: self.joint_attention_dim, bands: &[&[0]], pooled: &[] }
    }
}
