//! Layer names of SD3 in the original checkpoints, kohya's and ComfyUI's adapters: a block is split by
//! stream, and q, k and v are fused.

use weights::Catalog;

use super::{QkNorm, Sd3Config};
use crate::model::files::{self, CheckpointLayout};
use crate::model::tensor_piece::TensorPiece;

/// Prefix of the transformer in a checkpoint that has other models in it.
const PREFIX: &str = "model.diffusion_model.";
/// A tensor that every checkpoint of this family has and no other.
const MARK: &str = "joint_blocks.0.x_block.attn.qkv.weight";

/// The prefix of the transformer's names in a file of the original layout; `None` if it is none.
pub fn prefix(catalog: &Catalog) -> Option<&'static str> {
    files::prefix(catalog, PREFIX, MARK)
}

/// The original layout. Other tensors in the file are ignored.
pub fn original(config: &Sd3Config, prefix: &'static str) -> CheckpointLayout<'static> {
    let n_blocks = config.num_layers;
    let place = move |name: &str| {
        let (module, end) = name.rsplit_once('.').unwrap_or((name, ""));
        let full = |piece: TensorPiece| {
            let key = format!("{prefix}{}.{end}", piece.key);
            piece.with_key(key)
        };
        match name {
            "pos_embed.pos_embed" => vec![TensorPiece::whole(format!("{prefix}pos_embed"))],
            _ => original_module(module, n_blocks).into_iter().map(full).collect(),
        }
    };
    let ignores = move |name: &str| !prefix.is_empty() && !name.starts_with(prefix);
    CheckpointLayout { pieces: Box::new(place), ignores: Box::new(ignores) }
}

/// Where a layer of ours lies in the original layout.
pub fn original_module(module: &str, n_blocks: usize) -> Vec<TensorPiece> {
    let halves_swapped =
        |key: &str| vec![TensorPiece::part(key, 1, 2), TensorPiece::part(key, 0, 2)];
    if let Some(rest) = module.strip_prefix("transformer_blocks.") {
        let (index, inner) = rest.split_once('.').unwrap_or((rest, ""));
        let block = format!("joint_blocks.{index}");
        // The last block's context has no gate: a norm with scale and shift, which diffusers swaps.
        let is_last = index.parse() == Ok(n_blocks.wrapping_sub(1));
        if is_last && inner == "norm1_context.linear" {
            return halves_swapped(&format!("{block}.context_block.adaLN_modulation.1"));
        }
        let piece = in_block(inner);
        let key = format!("{block}.{}", piece.key);
        return vec![piece.with_key(key)];
    }
    vec![TensorPiece::whole(match module {
        "pos_embed.proj" => "x_embedder.proj",
        "time_text_embed.timestep_embedder.linear_1" => "t_embedder.mlp.0",
        "time_text_embed.timestep_embedder.linear_2" => "t_embedder.mlp.2",
        "time_text_embed.text_embedder.linear_1" => "y_embedder.mlp.0",
        "time_text_embed.text_embedder.linear_2" => "y_embedder.mlp.2",
        "norm_out.linear" => return halves_swapped("final_layer.adaLN_modulation.1"),
        "proj_out" => "final_layer.linear",
        same => same,
    })]
}

fn in_block(inner: &str) -> TensorPiece {
    let third = |key: &str, part| TensorPiece::part(key, part, 3);
    let (image, context) = ("x_block.attn.qkv", "context_block.attn.qkv");
    TensorPiece::whole(match inner {
        "attn.to_q" => return third(image, 0),
        "attn.to_k" => return third(image, 1),
        "attn.to_v" => return third(image, 2),
        "attn.add_q_proj" => return third(context, 0),
        "attn.add_k_proj" => return third(context, 1),
        "attn.add_v_proj" => return third(context, 2),
        "attn2.to_q" => return third("x_block.attn2.qkv", 0),
        "attn2.to_k" => return third("x_block.attn2.qkv", 1),
        "attn2.to_v" => return third("x_block.attn2.qkv", 2),
        "attn.norm_q" => "x_block.attn.ln_q",
        "attn.norm_k" => "x_block.attn.ln_k",
        "attn.norm_added_q" => "context_block.attn.ln_q",
        "attn.norm_added_k" => "context_block.attn.ln_k",
        "attn2.norm_q" => "x_block.attn2.ln_q",
        "attn2.norm_k" => "x_block.attn2.ln_k",
        "attn.to_out.0" => "x_block.attn.proj",
        "attn.to_add_out" => "context_block.attn.proj",
        "attn2.to_out.0" => "x_block.attn2.proj",
        "norm1.linear" => "x_block.adaLN_modulation.1",
        "norm1_context.linear" => "context_block.adaLN_modulation.1",
        "ff.net.0.proj" => "x_block.mlp.fc1",
        "ff.net.2" => "x_block.mlp.fc2",
        "ff_context.net.0.proj" => "context_block.mlp.fc1",
        "ff_context.net.2" => "context_block.mlp.fc2",
        same => same,
    })
}

/// Infers the config of a checkpoint in the original layout from its shapes, which do not tell the head
/// dim.
pub fn infer(catalog: &Catalog, prefix: &str, attention_head_dim: usize) -> Option<Sd3Config> {
    let shape = |name: &str| {
        let tensor = catalog.find(&format!("{prefix}{name}")).ok()?;
        Some(tensor.shape.iter().map(|size| *size as usize).collect::<Vec<_>>())
    };
    let has = |name: &str| catalog.find(&format!("{prefix}{name}")).is_ok();
    let patches = shape("x_embedder.proj.weight")?;
    let &[width, in_channels, patch_size, _] = &patches[..] else { return None };
    let block = |index: usize| format!("joint_blocks.{index}.x_block");
    let num_layers = (0..catalog.tensors.len())
        .take_while(|index| has(&format!("{}.attn.qkv.weight", block(*index))))
        .count();
    let normed = shape(&format!("{}.attn.ln_q.weight", block(0)));
    let out = shape("final_layer.linear.weight")?[0];
    let is_dual = |index: &usize| has(&format!("{}.attn2.qkv.weight", block(*index)));
    Some(Sd3Config {
        in_channels,
        out_channels: Some(out / (patch_size * patch_size).max(1)),
        patch_size,
        num_layers,
        num_attention_heads: width / attention_head_dim.max(1),
        attention_head_dim,
        joint_attention_dim: *shape("context_embedder.weight")?.get(1)?,
        caption_projection_dim: width,
        pooled_projection_dim: *shape("y_embedder.mlp.0.weight")?.get(1)?,
        sample_size: 128,
        pos_embed_max_size: (*shape("pos_embed")?.get(1)?).isqrt(),
        qk_norm: normed.map(|_| QkNorm::RmsNorm),
        dual_attention_layers: (0..num_layers).filter(is_dual).collect(),
    })
}
