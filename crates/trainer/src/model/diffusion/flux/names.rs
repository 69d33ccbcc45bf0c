//! Layer names of FLUX.1 in the original checkpoints, kohya's and ComfyUI's adapters: a double-stream block fuses q, k
//! and v, and a single-stream block fuses them with the first layer of its feed-forward.

use weights::Catalog;

use super::{FluxConfig, published_axes};
use crate::model::files::{self, CheckpointLayout};
use crate::model::tensor_piece::TensorPiece;

/// Prefix of the transformer in a checkpoint that has other models in it.
const PREFIX: &str = "model.diffusion_model.";
/// A tensor that every checkpoint of this family has and no other.
const MARK: &str = "double_blocks.0.img_attn.qkv.weight";
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
        "time_text_embed.timestep_embedder.linear_1" => "time_in.in_layer",
        "time_text_embed.timestep_embedder.linear_2" => "time_in.out_layer",
        "time_text_embed.guidance_embedder.linear_1" => "guidance_in.in_layer",
        "time_text_embed.guidance_embedder.linear_2" => "guidance_in.out_layer",
        "time_text_embed.text_embedder.linear_1" => "vector_in.in_layer",
        "time_text_embed.text_embedder.linear_2" => "vector_in.out_layer",
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
        "norm1.linear" => "img_mod.lin",
        "norm1_context.linear" => "txt_mod.lin",
        "ff.net.0.proj" => "img_mlp.0",
        "ff.net.2" => "img_mlp.2",
        "ff_context.net.0.proj" => "txt_mlp.0",
        "ff_context.net.2" => "txt_mlp.2",
        same => same,
    })
}

/// Of `linear1` q, k and v are a seventh each, the feed-forward is the other four.
fn in_single(inner: &str) -> TensorPiece {
    let seventh = |part| TensorPiece::part("linear1", part, 7);
    TensorPiece::whole(match inner {
        "attn.to_q" => return seventh(0),
        "attn.to_k" => return seventh(1),
        "attn.to_v" => return seventh(2),
        "proj_mlp" => return TensorPiece { count: 4, ..seventh(3) },
        "attn.norm_q" => "norm.query_norm",
        "attn.norm_k" => "norm.key_norm",
        "proj_out" => "linear2",
        "norm.linear" => "modulation.lin",
        same => same,
    })
}

/// Where a layer lies in adapters of `XLabs`, which have one matrix for q, k and v in every block.
pub fn xlabs_module(module: &str) -> Option<TensorPiece> {
    let (blocks, theirs) = if module.starts_with("single_") {
        ("single_transformer_blocks.", "single_blocks")
    } else {
        ("transformer_blocks.", "double_blocks")
    };
    let (index, inner) = module.strip_prefix(blocks)?.split_once('.')?;
    let (layer, part, of) = match (theirs, inner) {
        ("single_blocks", "attn.to_q") => ("qkv_lora", 0, 3),
        ("single_blocks", "attn.to_k") => ("qkv_lora", 1, 3),
        ("single_blocks", "attn.to_v") => ("qkv_lora", 2, 3),
        ("single_blocks", "proj_out") => ("proj_lora", 0, 1),
        (_, "attn.to_q") => ("qkv_lora1", 0, 3),
        (_, "attn.to_k") => ("qkv_lora1", 1, 3),
        (_, "attn.to_v") => ("qkv_lora1", 2, 3),
        (_, "attn.add_q_proj") => ("qkv_lora2", 0, 3),
        (_, "attn.add_k_proj") => ("qkv_lora2", 1, 3),
        (_, "attn.add_v_proj") => ("qkv_lora2", 2, 3),
        (_, "attn.to_out.0") => ("proj_lora1", 0, 1),
        (_, "attn.to_add_out") => ("proj_lora2", 0, 1),
        _ => return None,
    };
    Some(TensorPiece::part(format!("{theirs}.{index}.processor.{layer}"), part, of))
}

/// Infers the config of a checkpoint in the original layout from its shapes. The head dim comes from the
/// norm of the queries.
pub fn infer(catalog: &Catalog, prefix: &str) -> Option<FluxConfig> {
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
    Some(FluxConfig {
        in_channels,
        out_channels: shape("final_layer.linear.weight")?.first().copied(),
        num_layers: count("double_blocks", "img_attn.qkv.weight"),
        num_single_layers: count("single_blocks", "linear1.weight"),
        num_attention_heads: width / attention_head_dim.max(1),
        attention_head_dim,
        joint_attention_dim: *shape("txt_in.weight")?.get(1)?,
        pooled_projection_dim: *shape("vector_in.in_layer.weight")?.get(1)?,
        guidance_embeds: has("guidance_in.in_layer.weight"),
        axes_dims_rope: published_axes(),
        is_kontext: false,
    })
}
