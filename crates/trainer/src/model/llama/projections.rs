//! Linear layers that most families have apart and some as one: queries, keys and values; the gate of a feed-forward and
//! what it gates. An adapter belongs to the layer as the family has it.

use compute::{Result, Tape, Var};

use super::LlamaConfig;
use super::block::layer;
use crate::error;
use crate::model::build::ModelBuilder;
use crate::model::layer::LinearLayer;

/// Layers that read the same, or one layer with the outputs of all of them, one after the other.
pub struct Projections {
    layers: ProjectionLayers,
    /// How many outputs each has.
    widths: Vec<usize>,
}

enum ProjectionLayers {
    Apart(Vec<LinearLayer>),
    Fused(Box<LinearLayer>),
}

impl Projections {
    /// Queries, keys and values.
    pub fn qkv(config: &LlamaConfig, b: &mut ModelBuilder<'_>) -> error::Result<Self> {
        let [queries, keys] =
            [config.num_attention_heads, config.num_key_value_heads].map(|n| n * config.head_dim);
        let (widths, is_biased) = ([queries, keys, keys], config.has_qkv_bias());
        if config.has_fused_layers() {
            return Self::fused(config, b, "self_attn.qkv_proj", &widths, is_biased);
        }
        let names = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"];
        Self::apart(config, b, &names, &widths, is_biased)
    }

    /// The gate of a feed-forward, and what is gated.
    pub fn gate_up(config: &LlamaConfig, b: &mut ModelBuilder<'_>) -> error::Result<Self> {
        let widths = [config.intermediate_size; 2];
        if config.has_fused_layers() {
            return Self::fused(config, b, "mlp.gate_up_proj", &widths, config.mlp_bias);
        }
        Self::apart(config, b, &["mlp.gate_proj", "mlp.up_proj"], &widths, config.mlp_bias)
    }

    fn apart(
        config: &LlamaConfig,
        b: &mut ModelBuilder<'_>,
        names: &[&str],
        widths: &[usize],
        is_biased: bool,
    ) -> error::Result<Self> {
        let made = |(name, outputs): (&&str, &usize)| {
            layer(b, name, [config.hidden_size, *outputs], is_biased)
        };
        let layers = names.iter().zip(widths).map(made).collect::<error::Result<_>>()?;
        Ok(Self { layers: ProjectionLayers::Apart(layers), widths: widths.into() })
    }

    fn fused(
        config: &LlamaConfig,
        b: &mut ModelBuilder<'_>,
        name: &str,
        widths: &[usize],
        is_biased: bool,
    ) -> error::Result<Self> {
        let layer = layer(b, name, [config.hidden_size, widths.iter().sum()], is_biased)?;
        Ok(Self { layers: ProjectionLayers::Fused(Box::new(layer)), widths: widths.into() })
    }

    /// For x [S, N, D]. Layers that are apart compute when they are asked for their part.
    pub fn of<'a>(&'a self, tape: &Tape<'_>, x: &'a Var) -> Result<ProjectedParts<'a>> {
        Ok(match &self.layers {
            ProjectionLayers::Apart(layers) => ProjectedParts::Apart(layers, x),
            ProjectionLayers::Fused(layer) => {
                ProjectedParts::Fused(&self.widths, layer.forward(tape, x)?)
            }
        })
    }
}

/// The outputs of some layers for the same x.
pub enum ProjectedParts<'a> {
    /// Not yet computed.
    Apart(&'a [LinearLayer], &'a Var),
    /// Beside each other, [S, N, sum of widths].
    Fused(&'a [usize], Var),
}

impl ProjectedParts<'_> {
    /// One of them, [S, N, outputs]; recomputed in backward instead of kept, if `is_recomputed` and it is a layer's own.
    pub fn part(&self, tape: &Tape<'_>, index: usize, is_recomputed: bool) -> Result<Var> {
        match self {
            Self::Apart(layers, x) => layers[index].forward_recomputed(tape, x, is_recomputed),
            Self::Fused(widths, all) => columns(tape, all, widths, index),
        }
    }
}

/// The columns of a part: rows are cut into groups that all parts have a number of, and groups are split like tokens.
fn columns(tape: &Tape<'_>, fused: &Var, widths: &[usize], index: usize) -> Result<Var> {
    let group = widths.iter().copied().fold(0, greatest_common_divisor);
    let [samples, tokens] = [0, 1].map(|dim| fused.shape().sizes()[dim]);
    let groups = fused.shape().width() / group;
    let first = widths[..index].iter().sum::<usize>() / group;
    let own = widths[index];
    let rows = fused.reshape([samples * tokens, groups, group]);
    let part = tape.split_tokens(&rows, first..first + own / group)?;
    Ok(part.reshape([samples, tokens, own]))
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}
