//! Where the layers lie in files: by diffusers' names, or by those of `AutoencoderKL` in original checkpoints, where the
//! convolution after the encoder is a part of it, and that before the decoder a part of that.

use weights::Catalog;

use super::Flux2VaeConfig;
use crate::model::files::{self, CheckpointLayout};
use crate::model::tensor_piece::TensorPiece;
use crate::model::vae::{PREFIXES, kl};

/// Means and variances of latents, which other autoencoders do not have.
pub const STATISTICS: [&str; 2] = ["bn.running_mean", "bn.running_var"];
/// A layer by its name in diffusers.
const MARK: &str = "decoder.mid_block.resnets.0.conv1.weight";

/// The prefix of the VAE's names in a file that holds it alone, or beside other models; `None` if it has none.
pub fn prefix(catalog: &Catalog) -> Option<&'static str> {
    PREFIXES.iter().find_map(|prefix| files::prefix(catalog, prefix, STATISTICS[0]))
}

/// Infers the config of a file from its shapes, and from `like` what they do not tell: groups of norms and epsilon.
pub fn infer(catalog: &Catalog, prefix: &str, like: &Flux2VaeConfig) -> Option<Flux2VaeConfig> {
    let is_renamed = is_renamed(catalog, prefix);
    let size = |name: &str, dim: usize| {
        let tensor = catalog.find(&stored_name(prefix, name, is_renamed, 0)).ok()?;
        tensor.shape.get(dim).map(|size| *size as usize)
    };
    let block = |level: usize, block: usize| {
        size(&format!("encoder.down_blocks.{level}.resnets.{block}.conv1.weight"), 0)
    };
    let n_blocks = catalog.tensors.len();
    Some(Flux2VaeConfig {
        in_channels: size("encoder.conv_in.weight", 1)?,
        out_channels: size("decoder.conv_out.weight", 0)?,
        block_out_channels: (0..).map_while(|level| block(level, 0)).collect(),
        layers_per_block: (0..n_blocks).take_while(|at| block(0, *at).is_some()).count(),
        latent_channels: size("decoder.conv_in.weight", 1)?,
        use_quant_conv: size("quant_conv.weight", 0).is_some(),
        use_post_quant_conv: size("post_quant_conv.weight", 0).is_some(),
        mid_block_add_attention: size("decoder.mid_block.attentions.0.to_q.weight", 0).is_some(),
        ..like.clone()
    })
}

/// The layout of a file whose names have this prefix; the encoder or the decoder is loaded at a time.
pub fn original(
    config: &Flux2VaeConfig,
    catalog: &Catalog,
    prefix: &'static str,
) -> CheckpointLayout<'static> {
    let (n_levels, is_renamed) = (config.block_out_channels.len(), is_renamed(catalog, prefix));
    let place =
        move |name: &str| vec![TensorPiece::whole(stored_name(prefix, name, is_renamed, n_levels))];
    CheckpointLayout { pieces: Box::new(place), ignores: Box::new(|_| true) }
}

/// The layout of diffusers; the encoder or the decoder is loaded at a time.
pub fn diffusers(catalog: &Catalog) -> CheckpointLayout<'_> {
    let CheckpointLayout { pieces, ignores } = kl::names::diffusers(catalog);
    let ignores = move |name: &str| name.starts_with("bn.") || ignores(name);
    CheckpointLayout { pieces, ignores: Box::new(ignores) }
}

/// Whether a file has other names than diffusers.
fn is_renamed(catalog: &Catalog, prefix: &str) -> bool {
    catalog.find(&format!("{prefix}{MARK}")).is_err()
}

fn stored_name(prefix: &str, name: &str, is_renamed: bool, n_levels: usize) -> String {
    if !is_renamed || STATISTICS.contains(&name) {
        return format!("{prefix}{name}");
    }
    let half = match name.split_once('.') {
        Some(("quant_conv", _)) => "encoder.",
        Some(("post_quant_conv", _)) => "decoder.",
        _ => "",
    };
    format!("{prefix}{half}{}", kl::names::original_name(name, n_levels))
}
