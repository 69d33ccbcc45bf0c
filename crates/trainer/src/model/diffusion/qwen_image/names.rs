//! Layer names of Qwen-Image in checkpoints as ComfyUI and GGUF files have them: diffusers' own, some with a prefix.

use weights::Catalog;

use super::{QwenImageConfig, published_axes};
use crate::model::files::{self, CheckpointLayout};
use crate::model::tensor_piece::TensorPiece;

/// Prefix of the transformer in a checkpoint that has other models in it.
const PREFIX: &str = "model.diffusion_model.";
/// A tensor that every checkpoint of this family has and no other.
const MARK: &str = "transformer_blocks.0.img_mod.1.weight";
/// An empty tensor that ComfyUI's files have where `zero_cond_t` is on: Qwen-Image-Edit-2511.
const CLEAN_REFERENCES: &str = "__index_timestep_zero__";
/// Along a side: it is not in the shapes.
const PATCH: usize = 2;

/// The prefix of the transformer's names in a file; `None` if it holds none.
pub fn prefix(catalog: &Catalog) -> Option<&'static str> {
    files::prefix(catalog, PREFIX, MARK)
}

/// The layout of a file. Other tensors in it are ignored.
pub fn original(prefix: &'static str) -> CheckpointLayout<'static> {
    let place = move |name: &str| vec![TensorPiece::whole(format!("{prefix}{name}"))];
    let is_other = move |name: &str| !prefix.is_empty() && !name.starts_with(prefix);
    let ignores = move |name: &str| is_other(name) || name.ends_with(CLEAN_REFERENCES);
    CheckpointLayout { pieces: Box::new(place), ignores: Box::new(ignores) }
}

/// Infers the config of a checkpoint from its shapes.
pub fn infer(catalog: &Catalog, prefix: &str) -> Option<QwenImageConfig> {
    let shape = |name: &str| {
        let tensor = catalog.find(&format!("{prefix}{name}")).ok()?;
        Some(tensor.shape.iter().map(|size| *size as usize).collect::<Vec<_>>())
    };
    let &[width, in_channels] = &shape("img_in.weight")?[..] else { return None };
    let attention_head_dim = *shape("transformer_blocks.0.attn.norm_q.weight")?.first()?;
    let is_there =
        |index: &usize| shape(&format!("transformer_blocks.{index}.img_mod.1.weight")).is_some();
    Some(QwenImageConfig {
        patch_size: PATCH,
        in_channels,
        out_channels: Some(shape("proj_out.weight")?.first()? / (PATCH * PATCH)),
        num_layers: (0..catalog.tensors.len()).take_while(is_there).count(),
        attention_head_dim,
        num_attention_heads: width / attention_head_dim.max(1),
        joint_attention_dim: *shape("txt_in.weight")?.get(1)?,
        axes_dims_rope: published_axes(),
        guidance_embeds: false,
        zero_cond_t: catalog.find(&format!("{prefix}{CLEAN_REFERENCES}")).is_ok()
            || catalog.path.file_stem().is_some_and(|stem| stem.to_string_lossy().contains("2511")),
        use_additional_t_cond: shape("time_text_embed.addition_t_embedding.weight").is_some(),
        use_layer3d_rope: false,
        edit: None,
    })
}
