//! CLIP's text model (transformers' `CLIPTextModelWithProjection`, or `CLIPTextModel`): causal attention, and a pooled
//! embedding taken at the end-of-text token. Its vision model, which image models have no use for, is in `vision`.
//!
//! Shapes: S samples, N tokens, D width.

mod block;
pub mod processor;
pub mod vision;

use compute::{Tape, Var};
use serde::Deserialize;
use weights::Catalog;

use crate::error::Result;
use crate::model::build::ModelBuilder;
use crate::model::config::Unsupported;
use crate::model::files::CheckpointLayout;
use crate::model::layer::LinearLayer;
use crate::model::recompute::Recompute;
use crate::model::tensor_piece::TensorPiece;
use block::{BlockSizes, ClipBlock, norm};

/// What `text_encoder/config.json` says.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct ClipConfig {
    /// Vocabulary size.
    pub vocab_size: usize,
    /// D
    pub hidden_size: usize,
    /// Inner width of a feed-forward.
    pub intermediate_size: usize,
    /// Blocks.
    pub num_hidden_layers: usize,
    /// Heads of attention.
    pub num_attention_heads: usize,
    /// The most tokens a prompt may have.
    pub max_position_embeddings: usize,
    /// Width of the pooled embedding, if it is projected.
    pub projection_dim: usize,
    /// The class of the model, which tells whether it is projected.
    #[serde(default)]
    architectures: Vec<String>,
    /// The activation inside a feed-forward.
    pub hidden_act: ClipActivation,
    /// Epsilon of layer norms.
    #[serde(default = "default_epsilon")]
    pub layer_norm_eps: f32,
    /// The token that ends a prompt.
    pub eos_token_id: u32,
}

fn default_epsilon() -> f32 {
    1e-5
}

/// The activations there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ClipActivation {
    /// CLIP-L's.
    QuickGelu,
    /// CLIP-G's.
    Gelu,
}

/// The class without a projection.
const WITHOUT_PROJECTION: &str = "CLIPTextModel";

/// Published configs have this `eos_token_id` although their tokenizer ends prompts with another token, the
/// one of the largest id; transformers then looks for that.
const LEGACY_EOS: u32 = 2;

impl ClipConfig {
    /// CLIP-L and CLIP-G, as image models come with them.
    pub fn published() -> [Self; 2] {
        let l = Self {
            vocab_size: 49408,
            hidden_size: 768,
            intermediate_size: 3072,
            num_hidden_layers: 12,
            num_attention_heads: 12,
            max_position_embeddings: 77,
            projection_dim: 768,
            architectures: Vec::new(),
            hidden_act: ClipActivation::QuickGelu,
            layer_norm_eps: default_epsilon(),
            eos_token_id: LEGACY_EOS,
        };
        let g = Self {
            hidden_size: 1280,
            intermediate_size: 5120,
            num_hidden_layers: 32,
            num_attention_heads: 20,
            projection_dim: 1280,
            hidden_act: ClipActivation::Gelu,
            ..l.clone()
        };
        [l, g]
    }

    /// Checks that all of it is supported.
    pub fn check(&self) -> std::result::Result<(), Unsupported> {
        Unsupported::unless(
            self.num_attention_heads > 0
                && self.hidden_size.is_multiple_of(self.num_attention_heads),
            format!("hidden_size {} is not {} heads", self.hidden_size, self.num_attention_heads),
        )?;
        Unsupported::unless(self.num_hidden_layers > 0, "num_hidden_layers is 0".into())
    }

    /// The same without the projection of the pooled embedding, as FLUX has it.
    #[must_use]
    pub fn without_projection(self) -> Self {
        Self { architectures: vec![WITHOUT_PROJECTION.into()], ..self }
    }

    fn block(&self) -> BlockSizes {
        BlockSizes {
            width: self.hidden_size,
            inner: self.intermediate_size,
            n_heads: self.num_attention_heads,
            activation: self.hidden_act,
            epsilon: self.layer_norm_eps,
            is_causal: true,
        }
    }

    /// Width of the pooled embedding.
    pub fn pooled_width(&self) -> usize {
        if self.is_projected() { self.projection_dim } else { self.hidden_size }
    }

    fn is_projected(&self) -> bool {
        !self.architectures.iter().any(|class| class == WITHOUT_PROJECTION)
    }

    /// Where a prompt ends.
    pub fn eos_position(&self, ids: &[u32]) -> usize {
        let end = if self.eos_token_id == LEGACY_EOS {
            ids.iter().copied().max().unwrap_or(0)
        } else {
            self.eos_token_id
        };
        ids.iter().position(|id| *id == end).unwrap_or(0)
    }
}

/// Whether a file holds CLIP's text model.
pub fn is_clip(catalog: &Catalog) -> bool {
    shape_of(catalog, "text_model.encoder.layers.0.self_attn.q_proj.weight").is_some()
}

/// Infers the config of a file from its shapes, and from `like` what they do not tell: the width of heads, the
/// activation, and whether the pooled embedding is projected.
pub fn infer(catalog: &Catalog, like: &ClipConfig) -> Option<ClipConfig> {
    let shape = |name: &str| shape_of(catalog, &format!("text_model.{name}"));
    let &[vocab_size, hidden_size] = &shape("embeddings.token_embedding.weight")?[..] else {
        return None;
    };
    let layer = |index: &usize| shape(&format!("encoder.layers.{index}.mlp.fc1.weight")).is_some();
    let projected = shape_of(catalog, "text_projection.weight");
    let head_dim = like.hidden_size / like.num_attention_heads.max(1);
    Some(ClipConfig {
        vocab_size,
        hidden_size,
        intermediate_size: *shape("encoder.layers.0.mlp.fc1.weight")?.first()?,
        num_hidden_layers: (0..catalog.tensors.len()).take_while(layer).count(),
        num_attention_heads: hidden_size / head_dim.max(1),
        max_position_embeddings: *shape("embeddings.position_embedding.weight")?.first()?,
        projection_dim: projected.and_then(|sizes| sizes.first().copied()).unwrap_or(hidden_size),
        ..like.clone()
    })
}

/// The shape of a tensor by our name for it.
fn shape_of(catalog: &Catalog, name: &str) -> Option<Vec<usize>> {
    let pieces = (layout(catalog).pieces)(name);
    let tensor = catalog.find(&pieces.first()?.key).ok()?;
    Some(tensor.shape.iter().map(|size| *size as usize).collect())
}

/// Files may also hold a `position_ids` buffer, the image encoder, and a projection that the model does not use. Those
/// of newer transformers without a projection leave out the prefix.
pub fn layout(catalog: &Catalog) -> CheckpointLayout<'static> {
    const PREFIX: &str = "text_model.";
    let is_short = !catalog.tensors.iter().any(|tensor| tensor.name.starts_with(PREFIX));
    let stored = move |name: &str| match name.strip_prefix(PREFIX) {
        Some(short) if is_short => vec![TensorPiece::whole(short)],
        _ => vec![TensorPiece::whole(name)],
    };
    let is_spare = |name: &str| {
        name.ends_with("embeddings.position_ids")
            || ["vision_model.", "visual_projection.", "logit_scale", "text_projection."]
                .iter()
                .any(|start| name.starts_with(start))
    };
    CheckpointLayout { pieces: Box::new(stored), ignores: Box::new(is_spare) }
}

/// The text model.
pub struct ClipTextModel {
    config: ClipConfig,
    tokens: Var,
    positions: Var,
    blocks: Vec<ClipBlock>,
    norm: [Var; 2],
    projection: Option<LinearLayer>,
}

/// What comes out.
pub struct ClipOutput {
    /// [S, N, D] after the last block and a norm.
    pub last: Var,
    /// [S, N, D] before the last block: what image models use.
    pub penultimate: Var,
    /// [S, projection], or [S, D] without one
    pub pooled: Var,
}

impl ClipTextModel {
    /// Builds the model.
    pub fn new(config: &ClipConfig, build: &mut ModelBuilder<'_>) -> Result<Self> {
        let d = config.hidden_size;
        let mut b = build.at("text_model");
        let tokens = b.array("embeddings.token_embedding.weight", [config.vocab_size, d])?;
        let positions =
            b.array("embeddings.position_embedding.weight", [config.max_position_embeddings, d])?;
        let blocks = (0..config.num_hidden_layers)
            .map(|index| ClipBlock::new(config.block(), b.at(format!("encoder.layers.{index}"))))
            .collect::<Result<_>>()?;
        let norm = norm(&mut b, "final_layer_norm", d)?;
        let projection = if config.is_projected() {
            Some(build.linear_no_bias("text_projection", d, config.projection_dim)?)
        } else {
            None
        };
        Ok(Self { config: config.clone(), tokens, positions, blocks, norm, projection })
    }

    /// Encodes prompts of equal length, N token ids after N token ids.
    pub fn forward<'m>(
        &'m self,
        tape: &Tape<'m>,
        ids: &[u32],
        samples: usize,
        recompute: Recompute,
    ) -> Result<ClipOutput> {
        let n = ids.len() / samples.max(1);
        let mut x = self.embed(tape, ids, samples)?;
        let mut before_last = x.clone();
        for (index, block) in self.blocks.iter().enumerate() {
            before_last = x;
            x = if recompute.recomputes(index) {
                let run =
                    move |tape: &Tape<'m>, inputs: &[Var]| Ok([block.forward(tape, &inputs[0])?]);
                let [recomputed] = tape.recompute(&[&before_last], run)?;
                recomputed
            } else {
                block.forward(tape, &before_last)?
            };
        }
        let [weight, bias] = &self.norm;
        let last = tape.layer_norm(&x, Some(weight), Some(bias), self.config.layer_norm_eps)?;
        let ends: Vec<u32> =
            ids.chunks(n.max(1)).map(|ids| self.config.eos_position(ids) as u32).collect();
        let ends = tape.device().upload([samples, 1], &ends)?;
        let end = tape.gather_tokens(&last, &ends)?.reshape([samples, self.config.hidden_size]);
        let pooled = match &self.projection {
            Some(projection) => projection.forward(tape, &end)?,
            None => end,
        };
        Ok(ClipOutput { last, penultimate: before_last, pooled })
    }

    fn embed(&self, tape: &Tape<'_>, ids: &[u32], samples: usize) -> Result<Var> {
        let (device, n) = (tape.device(), ids.len() / samples.max(1));
        let places: Vec<u32> = (0..samples).flat_map(|_| 0..n as u32).collect();
        let tokens = tape.embedding(&device.upload([samples, n], ids)?, &self.tokens)?;
        let positions = tape.embedding(&device.upload([samples, n], &places)?, &self.positions)?;
        Ok(tape.add(&tokens, &positions)?)
    }
}
