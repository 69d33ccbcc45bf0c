//! Where the layers lie in files. Those that are shared alone have diffusers' names, which Tencent's own has, or those of
//! `AutoencoderKL` in original checkpoints, to which ComfyUI converts them.

use weights::Catalog;

use super::HunyuanVideoVaeConfig;
use crate::model::files::{self, CheckpointLayout};
use crate::model::tensor_piece::TensorPiece;
use crate::model::vae::{PREFIXES, kl};

/// A layer by its name in diffusers, that VAEs of images do not have.
const MARK: &str = "decoder.mid_block.resnets.0.conv1.conv.weight";

/// The prefix of the VAE's names in a file that holds it alone, or beside other models; `None` if it has none.
pub fn prefix(catalog: &Catalog) -> Option<&'static str> {
    let marks = [MARK.to_owned(), kl::names::original_name(MARK, 0)];
    let names = PREFIXES.iter().flat_map(|prefix| marks.iter().map(move |mark| (prefix, mark)));
    names.into_iter().find_map(|(prefix, mark)| files::prefix(catalog, prefix, mark))
}

/// Infers the config of a file from its shapes, and from `like` what they do not tell: groups of norms and scale.
pub fn infer(
    catalog: &Catalog,
    prefix: &str,
    like: &HunyuanVideoVaeConfig,
) -> Option<HunyuanVideoVaeConfig> {
    let is_renamed = is_renamed(catalog, prefix);
    let size = |name: &str, dim: usize| {
        let tensor = catalog.find(&stored_name(prefix, name, is_renamed, 0)).ok()?;
        tensor.shape.get(dim).map(|size| *size as usize)
    };
    let block = |level: usize, block: usize| {
        size(&format!("encoder.down_blocks.{level}.resnets.{block}.conv1.conv.weight"), 0)
    };
    let block_out_channels: Vec<usize> = (0..).map_while(|level| block(level, 0)).collect();
    let halves = |level: &usize| {
        size(&format!("encoder.down_blocks.{level}.downsamplers.0.conv.conv.weight"), 0).is_some()
    };
    let n_levels = block_out_channels.len();
    let [down_block_types, up_block_types] = [&like.down_block_types, &like.up_block_types]
        .map(|types| types.iter().cycle().take(n_levels).cloned().collect());
    Some(HunyuanVideoVaeConfig {
        in_channels: size("encoder.conv_in.conv.weight", 1)?,
        out_channels: size("decoder.conv_out.conv.weight", 0)?,
        latent_channels: size("decoder.conv_in.conv.weight", 1)?,
        layers_per_block: (0..catalog.tensors.len())
            .take_while(|index| block(0, *index).is_some())
            .count(),
        spatial_compression_ratio: 1 << (0..n_levels).filter(halves).count(),
        mid_block_add_attention: size("decoder.mid_block.attentions.0.to_q.weight", 0).is_some(),
        block_out_channels,
        down_block_types,
        up_block_types,
        ..like.clone()
    })
}

/// The layout of a file whose names have this prefix; the encoder or the decoder is loaded at a time.
pub fn original(
    config: &HunyuanVideoVaeConfig,
    catalog: &Catalog,
    prefix: &'static str,
) -> CheckpointLayout<'static> {
    let (n_levels, is_renamed) = (config.block_out_channels.len(), is_renamed(catalog, prefix));
    let place =
        move |name: &str| vec![TensorPiece::whole(stored_name(prefix, name, is_renamed, n_levels))];
    CheckpointLayout { pieces: Box::new(place), ignores: Box::new(|_| true) }
}

/// Whether a file has other names than diffusers.
fn is_renamed(catalog: &Catalog, prefix: &str) -> bool {
    catalog.find(&format!("{prefix}{MARK}")).is_err()
}

fn stored_name(prefix: &str, name: &str, is_renamed: bool, n_levels: usize) -> String {
    if is_renamed {
        return format!("{prefix}{}", kl::names::original_name(name, n_levels));
    }
    format!("{prefix}{name}")
}
