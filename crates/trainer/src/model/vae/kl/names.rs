//! Layer names of `AutoencoderKL` in the original checkpoints.

use weights::Catalog;

use super::KlVaeConfig;
use crate::model::files::{self, CheckpointLayout};
use crate::model::tensor_piece::TensorPiece;
use crate::model::vae::PREFIXES;

const MARK: &str = "decoder.mid.attn_1.q.weight";

/// The prefix of the VAE's names in a file of the original layout; `None` if it is none.
pub fn prefix(catalog: &Catalog) -> Option<&'static str> {
    PREFIXES.iter().find_map(|prefix| files::prefix(catalog, prefix, MARK))
}

/// Infers the config of a file in the original layout from its shapes, and from `like` what they do not tell: groups of
/// norms, scale and shift.
pub fn infer(catalog: &Catalog, prefix: &str, like: &KlVaeConfig) -> Option<KlVaeConfig> {
    let shape = |name: &str| {
        let tensor = catalog.find(&format!("{prefix}{name}")).ok()?;
        Some(tensor.shape.iter().map(|size| *size as usize).collect::<Vec<_>>())
    };
    let rows = |name: &str| shape(name)?.first().copied();
    let columns = |name: &str| shape(name)?.get(1).copied();
    let level = |level: usize| rows(&format!("encoder.down.{level}.block.0.conv1.weight"));
    let block =
        |block: &usize| shape(&format!("encoder.down.0.block.{block}.conv1.weight")).is_some();
    Some(KlVaeConfig {
        in_channels: columns("encoder.conv_in.weight")?,
        out_channels: rows("decoder.conv_out.weight")?,
        block_out_channels: (0..).map_while(level).collect(),
        layers_per_block: (0..catalog.tensors.len()).take_while(block).count(),
        latent_channels: columns("decoder.conv_in.weight")?,
        use_quant_conv: shape("quant_conv.weight").is_some(),
        use_post_quant_conv: shape("post_quant_conv.weight").is_some(),
        mid_block_add_attention: shape(MARK).is_some(),
        ..like.clone()
    })
}

/// The original layout; the encoder or the decoder is loaded at a time.
pub fn original(config: &KlVaeConfig, prefix: &'static str) -> CheckpointLayout<'static> {
    let n_levels = config.block_out_channels.len();
    let place = move |name: &str| {
        vec![TensorPiece::whole(format!("{prefix}{}", original_name(name, n_levels)))]
    };
    CheckpointLayout { pieces: Box::new(place), ignores: Box::new(|_| true) }
}

/// The layout of diffusers; the encoder or the decoder is loaded at a time. Files from before 2023 have
/// older names for the attention layers.
pub fn diffusers(catalog: &Catalog) -> CheckpointLayout<'_> {
    let place = |name: &str| {
        let older = name
            .replace(".to_q.", ".query.")
            .replace(".to_k.", ".key.")
            .replace(".to_v.", ".value.")
            .replace(".to_out.0.", ".proj_attn.");
        let is_older = catalog.find(name).is_err() && catalog.find(&older).is_ok();
        vec![TensorPiece::whole(if is_older { &older } else { name })]
    };
    let halves = ["encoder.", "decoder.", "quant_conv.", "post_quant_conv."];
    let ignores = move |name: &str| halves.iter().any(|half| name.starts_with(half));
    CheckpointLayout { pieces: Box::new(place), ignores: Box::new(ignores) }
}

/// The name in the original checkpoints of what diffusers calls `name`.
pub fn original_name(name: &str, n_levels: usize) -> String {
    let level = |text: &str, name: &str| -> Option<(String, String)> {
        let rest = name.split_once(text)?.1;
        let (index, rest) = rest.split_once('.')?;
        Some((index.to_owned(), rest.to_owned()))
    };
    let block = |rest: &str| {
        rest.replace("resnets.", "block.")
            .replace("conv_shortcut", "nin_shortcut")
            .replace("downsamplers.0.", "downsample.")
            .replace("upsamplers.0.", "upsample.")
    };
    if let Some((index, rest)) = level("down_blocks.", name) {
        return format!("encoder.down.{index}.{}", block(&rest));
    }
    if let Some((index, rest)) = level("up_blocks.", name) {
        // Counted from the image's size, not from the latent's.
        let index = index.parse().map_or(0, |index: usize| n_levels.saturating_sub(index + 1));
        return format!("decoder.up.{index}.{}", block(&rest));
    }
    name.replace("mid_block.resnets.0", "mid.block_1")
        .replace("mid_block.resnets.1", "mid.block_2")
        .replace("mid_block.attentions.0.group_norm", "mid.attn_1.norm")
        .replace("mid_block.attentions.0.to_q", "mid.attn_1.q")
        .replace("mid_block.attentions.0.to_k", "mid.attn_1.k")
        .replace("mid_block.attentions.0.to_v", "mid.attn_1.v")
        .replace("mid_block.attentions.0.to_out.0", "mid.attn_1.proj_out")
        .replace("conv_norm_out", "norm_out")
}
