//! Layer names of Z-Image in the authors' checkpoints and ComfyUI's, which fuse q, k and v. Adapters of ComfyUI, musubi-tuner and
//! ai-toolkit keep them apart under diffusers' names, which ComfyUI knows too; fused ones are read.

use weights::Catalog;

use super::{ZImageConfig, published_axes, published_lengths};
use crate::model::files::{self, CheckpointLayout};
use crate::model::tensor_piece::TensorPiece;

/// Prefix of the transformer in a checkpoint that has other models in it.
const PREFIX: &str = "model.diffusion_model.";
/// A tensor that every checkpoint of the original layout has. Lumina 2 has it too, but no tokens that fill up a prompt.
const MARK: &str = "noise_refiner.0.attention.qkv.weight";
/// A tensor of every Z-Image.
const FILLER: &str = "cap_pad_token";
/// A tensor of the authors' program, which has no use.
const UNUSED: &str = "norm_final.weight";

/// The prefix of the transformer's names in a file of the original layout; `None` if it is none.
pub fn prefix(catalog: &Catalog) -> Option<&'static str> {
    let prefix = files::prefix(catalog, PREFIX, MARK)?;
    catalog.find(&format!("{prefix}{FILLER}")).is_ok().then_some(prefix)
}

/// The original layout. Other tensors in the file are ignored.
pub fn original(prefix: &'static str) -> CheckpointLayout<'static> {
    let place = move |name: &str| {
        let (module, end) = name.rsplit_once('.').unwrap_or((name, ""));
        let piece = original_module(module);
        let dot = if end.is_empty() { "" } else { "." };
        let key = format!("{prefix}{}{dot}{end}", piece.key);
        vec![piece.with_key(key)]
    };
    let is_other = move |name: &str| !prefix.is_empty() && !name.starts_with(prefix);
    let ignores = move |name: &str| is_other(name) || name.ends_with(UNUSED);
    CheckpointLayout { pieces: Box::new(place), ignores: Box::new(ignores) }
}

/// Where a layer of ours lies in the original layout.
pub fn original_module(module: &str) -> TensorPiece {
    for (ours, theirs) in
        [("all_x_embedder.2-1", "x_embedder"), ("all_final_layer.2-1", "final_layer")]
    {
        if let Some(rest) = module.strip_prefix(ours) {
            return TensorPiece::whole(format!("{theirs}{rest}"));
        }
    }
    let Some((block, inner)) = module.split_once(".attention.") else {
        return TensorPiece::whole(module);
    };
    let third = |part| TensorPiece::part(format!("{block}.attention.qkv"), part, 3);
    let inner = match inner {
        "to_q" => return third(0),
        "to_k" => return third(1),
        "to_v" => return third(2),
        "to_out.0" => "out",
        "norm_q" => "q_norm",
        "norm_k" => "k_norm",
        same => same,
    };
    TensorPiece::whole(format!("{block}.attention.{inner}"))
}

/// Infers the config of a checkpoint in the original layout from its shapes. The width of a head comes from the norm of the
/// queries; how it is shared among axes is that of the published models, in these proportions.
pub fn infer(catalog: &Catalog, prefix: &str) -> Option<ZImageConfig> {
    let shape = |name: &str| {
        let tensor = catalog.find(&format!("{prefix}{name}.weight")).ok()?;
        Some(tensor.shape.iter().map(|size| *size as usize).collect::<Vec<_>>())
    };
    let count = |blocks: &str| {
        let is_there = |index: &usize| shape(&format!("{blocks}.{index}.attention.qkv")).is_some();
        (0..catalog.tensors.len()).take_while(is_there).count()
    };
    let &[dim, token] = &shape("x_embedder")?[..] else { return None };
    let head = *shape("layers.0.attention.q_norm")?.first()?;
    let [_, rows, columns] = published_axes().map(|axis| axis * head / 256 * 2);
    Some(ZImageConfig {
        all_patch_size: vec![super::PATCH],
        all_f_patch_size: vec![1],
        in_channels: token / (super::PATCH * super::PATCH),
        dim,
        n_layers: count("layers"),
        n_refiner_layers: count("noise_refiner"),
        n_heads: dim / head.max(1),
        n_kv_heads: dim / head.max(1),
        norm_eps: super::published_epsilon(),
        qk_norm: true,
        cap_feat_dim: *shape("cap_embedder.1")?.get(1)?,
        siglip_feat_dim: shape("siglip_embedder.1").and_then(|sizes| sizes.get(1).copied()),
        rope_theta: super::published_theta(),
        t_scale: super::published_scale(),
        axes_dims: [head - rows - columns, rows, columns],
        axes_lens: published_lengths(),
        is_turbo: false,
    })
}
