//! Kandinsky 5 (Kandinsky Lab, 2025): images, and clips. Blocks for the prompt, then blocks for what is made, which attend
//! to themselves and to the prompt (cross-attention). Rotary positions by frame, row and column. As diffusers'
//! `Kandinsky5Transformer3DModel` computes it with `attention_type` regular.
//!
//! diffusers 0.42.1 differs from the authors' program in two facts: it corrects a misspelt word of the prompt templates, with
//! which the models were trained, and it shifts sigmas twice. [`Implementation`] chooses.

mod blocks;
mod forward;
mod names;
mod positions;
mod published;
mod variants;

use std::path::Path;

use serde::Deserialize;
use weights::Catalog;

pub use forward::Kandinsky5;
pub(crate) use published::{image_lite, video_lite};
pub use variants::FAMILY;

use super::condition::ConditionLayout;
use super::denoiser::{Architecture, LatentSpec};
use super::family::DiffusionFamily;
use super::implementation::Implementation;
use super::text::EmbeddingWidths;
use crate::error::Result;
use crate::model::build::ModelBuilder;
use crate::model::config::{self, Unsupported};
use crate::model::files::CheckpointLayout;
use crate::model::tensor_piece::TensorPiece;

/// What `transformer/config.json` says.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Kandinsky5Config {
    /// Channels of a latent.
    pub in_visual_dim: usize,
    /// Channels of the latent that is predicted.
    pub out_visual_dim: usize,
    /// Width of a prompt token.
    pub in_text_dim: usize,
    /// Width of the pooled prompt embedding.
    pub in_text_dim2: usize,
    /// Width of what modulations are made from.
    pub time_dim: usize,
    /// Frames, rows and columns of a latent in a token.
    #[serde(default = "published_patch")]
    pub patch_size: [usize; 3],
    /// Width of tokens inside.
    pub model_dim: usize,
    /// Inner width of feed-forwards.
    pub ff_dim: usize,
    /// Blocks for the prompt.
    pub num_text_blocks: usize,
    /// Blocks for what is made.
    pub num_visual_blocks: usize,
    /// Rotary dimensions of a head per axis: frame, row, column. Together they are a head.
    #[serde(default = "published_axes")]
    pub axes_dims: [usize; 3],
    /// Whether the input has channels for a given frame and its mask: zeros where none is given.
    #[serde(default)]
    pub visual_cond: bool,
    /// `regular`, or `nabla`: sparse attention.
    #[serde(default = "regular")]
    pub attention_type: String,
    /// What it makes. Not in the file, but in the pipeline's class.
    #[serde(skip)]
    pub task: Option<Kandinsky5Task>,
    /// How it is sampled. Not in the file, but in the model's name.
    #[serde(skip)]
    pub distillation: Distillation,
    /// Whose sampler and prompt templates are used.
    #[serde(skip)]
    pub implementation: Implementation,
}

/// What a model of this family makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kandinsky5Task {
    /// Images from prompts.
    Image,
    /// Clips from prompts.
    Video,
    /// Images from images, or clips from images, which hearth does not do with this family.
    FromImages,
}

/// What a model was distilled to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Distillation {
    /// Nothing.
    #[default]
    None,
    /// To do without guidance.
    NoGuidance,
    /// To 16 steps without guidance.
    Steps,
}

/// Taken: the defaults of the class.
fn published_patch() -> [usize; 3] {
    [1, 2, 2]
}

fn published_axes() -> [usize; 3] {
    [16, 24, 24]
}

fn regular() -> String {
    REGULAR.into()
}

const REGULAR: &str = "regular";
const SPARSE: &str = "nabla";

/// Rows, columns and frames of tokens for which diffusers and the authors' program have positions.
const MAX_TOKENS_PER_SIDE: usize = 128;

impl Kandinsky5Config {
    /// Width of a head.
    pub fn head_dim(&self) -> usize {
        self.axes_dims.iter().sum()
    }

    /// Whether it makes clips. Where its pipeline is not known: those models have channels for a given frame.
    pub fn is_video(&self) -> bool {
        self.task.map_or(self.visual_cond, |task| task == Kandinsky5Task::Video)
    }

    /// Channels of the input.
    fn input_channels(&self) -> usize {
        if self.visual_cond { 2 * self.in_visual_dim + 1 } else { self.in_visual_dim }
    }

    /// Latent pixels along a token's side.
    fn patch(&self) -> usize {
        self.patch_size[1]
    }

    /// Settings of models that hearth does not know.
    fn check_kind(&self) -> std::result::Result<(), Unsupported> {
        Unsupported::unless(
            self.attention_type == REGULAR,
            format!(
                "attention_type is {}, not regular: the sparse attention of models for 10 s or for HD, which hearth does \
                 not support. Models for 5 s in SD have full attention",
                self.attention_type
            ),
        )?;
        Unsupported::unless(
            self.task != Some(Kandinsky5Task::FromImages),
            "it makes images or clips from images (I2I, I2V), which hearth does not support for this family. T2I and T2V \
             models work"
                .into(),
        )?;
        let [frames, rows, columns] = self.patch_size;
        Unsupported::unless(
            frames == 1 && rows == columns,
            format!("patch_size {:?} is not [1, n, n]", self.patch_size),
        )
    }
}

impl Architecture for Kandinsky5Config {
    type Model = Kandinsky5;

    const CHANNELS_LAST: bool = true;

    fn family(&self) -> &'static DiffusionFamily {
        variants::family(self)
    }

    fn with_pipeline(self, class: &str) -> Self {
        Self { task: variants::task(class).or(self.task), ..self }
    }

    fn with_name(self, name: &str) -> Self {
        let distillation = match name {
            name if name.contains("distil") => Distillation::Steps,
            name if name.contains("nocfg") => Distillation::NoGuidance,
            _ => self.distillation,
        };
        let is_sparse = name.starts_with("kandinsky") && name.contains("10s");
        let attention_type = if is_sparse { SPARSE.into() } else { self.attention_type };
        Self { attention_type, distillation, ..self }
    }

    fn with_implementation(self, implementation: Implementation) -> Option<Self> {
        Some(Self { implementation, ..self })
    }

    fn pipeline_of_file(stem: &str) -> Option<&'static str> {
        variants::pipeline_of_file(stem)
    }

    fn check(&self) -> std::result::Result<(), Unsupported> {
        self.check_kind()?;
        let (head, width) = (self.head_dim(), self.model_dim);
        Unsupported::unless(
            head > 0 && width.is_multiple_of(head),
            format!("model_dim {width} is not a multiple of {head}, the sum of axes_dims"),
        )?;
        let is_even = self.axes_dims.iter().chain([&width]).all(|size| size.is_multiple_of(2));
        Unsupported::unless(
            is_even,
            format!("axes_dims {:?} or model_dim {width} is odd", self.axes_dims),
        )?;
        let sizes = [self.patch(), self.in_visual_dim, self.num_visual_blocks, width, self.ff_dim];
        Unsupported::unless(!sizes.contains(&0), "a size is 0".into())?;
        let (input, output) = (self.in_visual_dim, self.out_visual_dim);
        Unsupported::unless(
            input == output,
            format!("in_visual_dim {input} is not out_visual_dim {output}"),
        )
    }

    fn of_checkpoint(catalog: &Catalog, beside: &Path) -> Result<Option<(Self, &'static str)>> {
        let Some(prefix) = names::prefix(catalog) else { return Ok(None) };
        let Some(mut config) = names::infer(catalog, prefix) else { return Ok(None) };
        // Shapes do not tell the axes of the rotary embedding: they are those of a model of the same family.
        let beside = beside.join("config.json");
        if beside.exists() {
            let Self { axes_dims, attention_type, .. } = config::read::<Self>(&beside)?;
            let is_like = axes_dims.iter().sum::<usize>() == config.head_dim();
            config.axes_dims = if is_like { axes_dims } else { config.axes_dims };
            config.attention_type = attention_type;
        }
        Ok(Some((config, prefix)))
    }

    fn build(&self, build: &mut ModelBuilder<'_>) -> Result<Kandinsky5> {
        Kandinsky5::new(self, build)
    }

    fn original(&self, prefix: &'static str) -> CheckpointLayout<'static> {
        names::original(prefix)
    }

    fn original_module(&self, module: &str) -> Vec<TensorPiece> {
        vec![TensorPiece::whole(module)]
    }

    fn latent_spec(&self) -> LatentSpec {
        LatentSpec {
            channels: self.in_visual_dim,
            patch_size: self.patch(),
            max_tokens_per_side: Some(MAX_TOKENS_PER_SIDE),
        }
    }

    fn check_text(
        &self,
        widths: &[Option<EmbeddingWidths>],
    ) -> std::result::Result<(), Unsupported> {
        let [Some(clip), Some(qwen)] = widths else { unreachable!("both are always there") };
        let (pooled, tokens) = (self.in_text_dim2, self.in_text_dim);
        Unsupported::unless(
            clip.pooled == pooled,
            format!(
                "CLIP's pooled embedding has {} values, in_text_dim2 of the transformer is {pooled}",
                clip.pooled
            ),
        )?;
        Unsupported::unless(
            qwen.tokens == tokens,
            format!(
                "hidden_size of Qwen2.5-VL is {}, in_text_dim of the transformer {tokens}",
                qwen.tokens
            ),
        )
    }

    /// Qwen2.5-VL's tokens, as many as there are, and CLIP's pooled embedding.
    fn condition_layout(&self) -> ConditionLayout {
        ConditionLayout { width: self.in_text_dim, bands: &[&[1]], pooled: &[0] }
    }
}
