//! CLIP's vision model (transformers' `CLIPVisionModelWithProjection`): patches of an image and a class token, whose last
//! state is the image's embedding.
//!
//! Shapes: S samples, P patches, D width.

use compute::ops::Linear;
use compute::{Dtype, Tape, Var};
use serde::Deserialize;

use super::ClipActivation;
use super::block::{BlockSizes, ClipBlock, norm};
use crate::error::Result;
use crate::model::build::ModelBuilder;
use crate::model::config::Unsupported;
use crate::model::layer::LinearLayer;

/// `vision_config` of `config.json`. Defaults are those of transformers.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default)]
pub struct ClipVisionConfig {
    /// D
    pub hidden_size: usize,
    /// Inner width of a feed-forward.
    pub intermediate_size: usize,
    /// Blocks.
    pub num_hidden_layers: usize,
    /// Heads of attention.
    pub num_attention_heads: usize,
    /// Channels of an image.
    pub num_channels: usize,
    /// Pixels along the side of an image.
    pub image_size: usize,
    /// Pixels along the side of a patch.
    pub patch_size: usize,
    /// The activation inside a feed-forward.
    pub hidden_act: ClipActivation,
    /// Epsilon of norms.
    pub layer_norm_eps: f32,
}

impl Default for ClipVisionConfig {
    fn default() -> Self {
        Self {
            hidden_size: 768,
            intermediate_size: 3072,
            num_hidden_layers: 12,
            num_attention_heads: 12,
            num_channels: 3,
            image_size: 224,
            patch_size: 32,
            hidden_act: ClipActivation::QuickGelu,
            layer_norm_eps: 1e-5,
        }
    }
}

/// Chosen: more than any vision model has, and few enough that no count of elements overflows.
const MOST_WIDTH: usize = 1 << 14;
const MOST_IMAGE: usize = 1 << 12;

impl ClipVisionConfig {
    /// Checks that all of it is supported.
    pub fn check(&self) -> std::result::Result<(), Unsupported> {
        for (key, size, most) in [
            ("hidden_size", self.hidden_size, MOST_WIDTH),
            ("intermediate_size", self.intermediate_size, MOST_WIDTH),
            ("num_hidden_layers", self.num_hidden_layers, MOST_WIDTH),
            ("num_attention_heads", self.num_attention_heads, MOST_WIDTH),
            ("image_size", self.image_size, MOST_IMAGE),
            ("patch_size", self.patch_size, self.image_size),
        ] {
            let problem = format!("{key} of the vision model is {size}, expected 1 to {most}");
            Unsupported::unless((1..=most).contains(&size), problem)?;
        }
        let (d, n_heads) = (self.hidden_size, self.num_attention_heads);
        let problem = format!("hidden_size {d} of the vision model is not {n_heads} heads");
        Unsupported::unless(d.is_multiple_of(n_heads), problem)?;
        let channels = self.num_channels;
        let problem = format!("num_channels of the vision model is {channels}, expected 3");
        Unsupported::unless(channels == 3, problem)
    }

    /// Patches along the side of an image. Pixels that do not fill one are not seen.
    pub fn patches_per_side(&self) -> usize {
        self.image_size / self.patch_size
    }

    /// P
    pub fn n_patches(&self) -> usize {
        self.patches_per_side() * self.patches_per_side()
    }

    /// Values of a patch.
    pub fn values_per_patch(&self) -> usize {
        self.num_channels * self.patch_size * self.patch_size
    }

    fn block(&self) -> BlockSizes {
        BlockSizes {
            width: self.hidden_size,
            inner: self.intermediate_size,
            n_heads: self.num_attention_heads,
            activation: self.hidden_act,
            epsilon: self.layer_norm_eps,
            is_causal: false,
        }
    }
}

/// The vision model.
pub struct ClipVisionModel {
    config: ClipVisionConfig,
    /// [1, 1, D]
    class_token: Var,
    /// [D, values of a patch]
    patches: Var,
    /// [1, P + 1, D]
    positions: Var,
    /// Before the blocks, and after them.
    norms: [[Var; 2]; 2],
    blocks: Vec<ClipBlock>,
    projection: LinearLayer,
    /// Dtype of hidden states.
    dtype: Dtype,
}

impl ClipVisionModel {
    /// Builds the model, with a projection to this width.
    pub fn new(
        config: &ClipVisionConfig,
        projection_dim: usize,
        build: &mut ModelBuilder<'_>,
    ) -> Result<Self> {
        let (d, patch, n) = (config.hidden_size, config.patch_size, config.n_patches() + 1);
        let dtype = build.dtype();
        let mut b = build.at("vision_model");
        let class_token = b.array("embeddings.class_embedding", [d])?.reshape([1, 1, d]);
        let kernel = [d, config.num_channels, patch, patch];
        let patches = b.array("embeddings.patch_embedding.weight", kernel)?;
        let positions = b.array("embeddings.position_embedding.weight", [n, d])?;
        // Its name has a typing error in every file there is.
        let norms = [norm(&mut b, "pre_layrnorm", d)?, norm(&mut b, "post_layernorm", d)?];
        let blocks = (0..config.num_hidden_layers)
            .map(|index| ClipBlock::new(config.block(), b.at(format!("encoder.layers.{index}"))))
            .collect::<Result<_>>()?;
        Ok(Self {
            config: config.clone(),
            class_token,
            patches: patches.reshape([d, config.values_per_patch()]),
            positions: positions.reshape([1, n, d]),
            norms,
            blocks,
            projection: build.linear_no_bias("visual_projection", d, projection_dim)?,
            dtype,
        })
    }

    /// The embedding of one image by the values of its patches, [1, projection].
    pub fn forward(&self, tape: &Tape<'_>, values: &[f32]) -> Result<Var> {
        let (config, d) = (&self.config, self.config.hidden_size);
        let sizes = [1, config.n_patches(), config.values_per_patch()];
        let patches = tape.device().upload_as(sizes, values, self.dtype)?;
        let patches = tape.linear(&patches.into(), Linear::new(&self.patches))?;
        let x = tape.concat_tokens(&[&self.class_token, &patches])?;
        let mut x = self.normed(tape, &tape.add(&x, &self.positions)?, 0)?;
        for block in &self.blocks {
            x = block.forward(tape, &x)?;
        }
        let class = self.normed(tape, &tape.split_tokens(&x, 0..1)?, 1)?;
        Ok(self.projection.forward(tape, &class.reshape([1, d]))?)
    }

    fn normed(&self, tape: &Tape<'_>, x: &Var, which: usize) -> Result<Var> {
        let [weight, bias] = &self.norms[which];
        Ok(tape.layer_norm(x, Some(weight), Some(bias), self.config.layer_norm_eps)?)
    }
}
