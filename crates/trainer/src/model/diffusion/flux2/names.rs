//! Layer names of FLUX.2 in the original checkpoints, kohya's and ComfyUI's adapters: a double-stream block fuses q, k and v.
//! A single-stream block has one layer before attention and feed-forward and one after them, in diffusers too.

use weights::Catalog;

use super::{Flux2Config, published_axes};
use crate::model::files::{self, CheckpointLayout};
use crate::model::tensor_piece::TensorPiece;

/// Prefix of the transformer in a checkpoint that has other models in it.
const PREFIX: &str = "model.diffusion_model.";
/// A tensor that every checkpoint of this family has and no other.
const MARK: &str = "double_stream_modulation_img.lin.weight";
/// Width of heads in all published models.
const HEAD_DIM: usize = 128;

/// The prefix of the transformer's names in a file of the original layout; `None` if it is none.
pub fn prefix(catalog: &Catalog) -> Option<&'static str> {
    files::prefix(catalog, PREFIX, MARK)
}

/// The original layout. Other tensors in the file are ignored.
pub fn original(prefix: &'static str) -> CheckpointLayout<'static> {
    let place = move |name: &str| {
        let (module, end) = name.rsplit_once('.').unwrap_or((name, ""));
        let full = |piece: TensorPiece| {
            // Norms have a scale there.
            let end = if piece.key.ends_with("_norm") { "scale" } else { end };
            let key = format!("{prefix}{}.{end}", piece.key);
            piece.with_key(key)
        };
        original_module(module).into_iter().map(full).collect()
    };
    let ignores = move |name: &str| !prefix.is_empty() && !name.starts_with(prefix);
    CheckpointLayout { pieces: Box::new(place), ignores: Box::new(ignores) }
}

/// Where a layer of ours lies in the original layout.
pub fn original_module(module: &str) -> Vec<TensorPiece> {
    for (ours, theirs, inside) in [
        ("transformer_blocks.", "double_blocks", in_double as fn(&str) -> TensorPiece),
        ("single_transformer_blocks.", "single_blocks", in_single),
    ] {
        if let Some(rest) = module.strip_prefix(ours) {
            let (index, inner) = rest.split_once('.').unwrap_or((rest, ""));
            let piece = inside(inner);
            let key = format!("{theirs}.{index}.{}", piece.key);
            return vec![piece.with_key(key)];
        }
    }
    if module == "norm_out.linear" {
        // Shift and scale are swapped.
        let key = "final_layer.adaLN_modulation.1";
        return vec![TensorPiece::part(key, 1, 2), TensorPiece::part(key, 0, 2)];
    }
    vec![TensorPiece::whole(match module {
        "x_embedder" => "img_in",
        "context_embedder" => "txt_in",
        "time_guidance_embed.timestep_embedder.linear_1" => "time_in.in_layer",
        "time_guidance_embed.timestep_embedder.linear_2" => "time_in.out_layer",
        "double_stream_modulation_img.linear" => "double_stream_modulation_img.lin",
        "double_stream_modulation_txt.linear" => "double_stream_modulation_txt.lin",
        "single_stream_modulation.linear" => "single_stream_modulation.lin",
        "proj_out" => "final_layer.linear",
        same => same,
    })]
}

fn in_double(inner: &str) -> TensorPiece {
    let third = |key: &str, part| TensorPiece::part(key, part, 3);
    let (image, text) = ("img_attn.qkv", "txt_attn.qkv");
    TensorPiece::whole(match inner {
        "attn.to_q" => return third(image, 0),
        "attn.to_k" => return third(image, 1),
        "attn.to_v" => return third(image, 2),
        "attn.add_q_proj" => return third(text, 0),
        "attn.add_k_proj" => return third(text, 1),
        "attn.add_v_proj" => return third(text, 2),
        "attn.norm_q" => "img_attn.norm.query_norm",
        "attn.norm_k" => "img_attn.norm.key_norm",
        "attn.norm_added_q" => "txt_attn.norm.query_norm",
        "attn.norm_added_k" => "txt_attn.norm.key_norm",
        "attn.to_out.0" => "img_attn.proj",
        "attn.to_add_out" => "txt_attn.proj",
        "ff.linear_in" => "img_mlp.0",
        "ff.linear_out" => "img_mlp.2",
        "ff_context.linear_in" => "txt_mlp.0",
        "ff_context.linear_out" => "txt_mlp.2",
        same => same,
    })
}

fn in_single(inner: &str) -> TensorPiece {
    TensorPiece::whole(match inner {
        "attn.to_qkv_mlp_proj" => "linear1",
        "attn.to_out" => "linear2",
        "attn.norm_q" => "norm.query_norm",
        "attn.norm_k" => "norm.key_norm",
        same => same,
    })
}

/// Infers the config of a checkpoint in the original layout from its shapes. The head dim comes from the norm of the
/// queries.
pub fn infer(catalog: &Catalog, prefix: &str) -> Option<Flux2Config> {
    let shape = |name: &str| {
        let tensor = catalog.find(&format!("{prefix}{name}")).ok()?;
        Some(tensor.shape.iter().map(|size| *size as usize).collect::<Vec<_>>())
    };
    let has = |name: &str| catalog.find(&format!("{prefix}{name}")).is_ok();
    let count = |blocks: &str, end: &str| {
        let is_there = |index: &usize| has(&format!("{blocks}.{index}.{end}"));
        (0..catalog.tensors.len()).take_while(is_there).count()
    };
    let &[width, in_channels] = &shape("img_in.weight")?[..] else { return None };
    let normed = shape("double_blocks.0.img_attn.norm.query_norm.scale");
    let attention_head_dim = normed.and_then(|sizes| sizes.first().copied()).unwrap_or(HEAD_DIM);
    let inner = *shape("double_blocks.0.img_mlp.2.weight")?.get(1)?;
    Some(Flux2Config {
        patch_size: 1,
        in_channels,
        out_channels: shape("final_layer.linear.weight")?.first().copied(),
        num_layers: count("double_blocks", "img_attn.qkv.weight"),
        num_single_layers: count("single_blocks", "linear1.weight"),
        num_attention_heads: width / attention_head_dim.max(1),
        attention_head_dim,
        joint_attention_dim: *shape("txt_in.weight")?.get(1)?,
        timestep_guidance_channels: *shape("time_in.in_layer.weight")?.get(1)?,
        mlp_ratio: inner as f64 / width.max(1) as f64,
        axes_dims_rope: published_axes(attention_head_dim),
        rope_theta: super::published_theta(),
        eps: super::published_epsilon(),
        guidance_embeds: has("guidance_in.in_layer.weight"),
        is_distilled: None,
    })
}
