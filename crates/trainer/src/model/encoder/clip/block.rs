//! The block that CLIP's text model and its vision model have in common.

use compute::ops::{Activation, Attention};
use compute::{Result as Computed, Tape, Var};

use super::ClipActivation;
use crate::error::Result;
use crate::model::build::ModelBuilder;
use crate::model::layer::LinearLayer;

/// What a block is like.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct BlockSizes {
    /// D
    pub width: usize,
    /// Inner width of the feed-forward.
    pub inner: usize,
    /// Heads of attention.
    pub n_heads: usize,
    /// The activation inside the feed-forward.
    pub activation: ClipActivation,
    /// Epsilon of norms.
    pub epsilon: f32,
    /// Whether tokens see those before them only, as those of a text do.
    pub is_causal: bool,
}

/// Weight and bias of a norm.
pub(super) fn norm(build: &mut ModelBuilder<'_>, name: &str, width: usize) -> Result<[Var; 2]> {
    let mut vector = |end| build.vector(format!("{name}.{end}"), width);
    Ok([vector("weight")?, vector("bias")?])
}

pub(super) struct ClipBlock {
    sizes: BlockSizes,
    norms: [[Var; 2]; 2],
    q: LinearLayer,
    k: LinearLayer,
    v: LinearLayer,
    out: LinearLayer,
    up: LinearLayer,
    down: LinearLayer,
}

impl ClipBlock {
    pub fn new(sizes: BlockSizes, mut b: ModelBuilder<'_>) -> Result<Self> {
        let BlockSizes { width: d, inner, .. } = sizes;
        Ok(Self {
            sizes,
            norms: [norm(&mut b, "layer_norm1", d)?, norm(&mut b, "layer_norm2", d)?],
            q: b.linear("self_attn.q_proj", d, d)?,
            k: b.linear("self_attn.k_proj", d, d)?,
            v: b.linear("self_attn.v_proj", d, d)?,
            out: b.linear("self_attn.out_proj", d, d)?,
            up: b.linear("mlp.fc1", d, inner)?,
            down: b.linear("mlp.fc2", inner, d)?,
        })
    }

    pub fn forward(&self, tape: &Tape<'_>, x: &Var) -> Computed<Var> {
        let BlockSizes { width, n_heads, activation, epsilon, is_causal, .. } = self.sizes;
        let activation = match activation {
            ClipActivation::QuickGelu => Activation::QuickGelu,
            ClipActivation::Gelu => Activation::GeluErf,
        };
        let normed = |x: &Var, [weight, bias]: &[Var; 2]| {
            tape.layer_norm(x, Some(weight), Some(bias), epsilon)
        };
        let h = normed(x, &self.norms[0])?;
        let (q, k) = (self.q.forward(tape, &h)?, self.k.forward(tape, &h)?);
        let v = self.v.forward(tape, &h)?;
        let attention = Attention { is_causal, ..Attention::full(n_heads, width / n_heads) };
        let x = self.out.forward_add(tape, &tape.attention(&q, &k, &v, attention)?, x)?;
        let h = self.up.forward_activated(tape, &normed(&x, &self.norms[1])?, activation)?;
        self.down.forward_add(tape, &h, &x)
    }
}
