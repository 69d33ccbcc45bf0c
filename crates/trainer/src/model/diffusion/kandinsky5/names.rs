//! Layer names of Kandinsky 5 in single files: diffusers' own, which the authors' program has too, some with a prefix.

use weights::Catalog;

use super::{Distillation, Kandinsky5Config, REGULAR, published_patch};
use crate::model::diffusion::implementation::Implementation;
use crate::model::files::{self, CheckpointLayout};
use crate::model::tensor_piece::TensorPiece;

/// Prefix of the transformer in a checkpoint that has other models in it.
const PREFIX: &str = "model.diffusion_model.";
/// A tensor that every checkpoint of this family has and no other.
const MARK: &str = "visual_transformer_blocks.0.cross_attention.key_norm.weight";
/// Along a side: it is not in the shapes.
const PATCH: usize = 2;

/// The prefix of the transformer's names in a file; `None` if it holds none.
pub fn prefix(catalog: &Catalog) -> Option<&'static str> {
    files::prefix(catalog, PREFIX, MARK)
}

/// The layout of a file. Other tensors in it are ignored.
pub fn original(prefix: &'static str) -> CheckpointLayout<'static> {
    let place = move |name: &str| vec![TensorPiece::whole(format!("{prefix}{name}"))];
    let ignores = move |name: &str| !prefix.is_empty() && !name.starts_with(prefix);
    CheckpointLayout { pieces: Box::new(place), ignores: Box::new(ignores) }
}

/// Infers the config of a checkpoint from its shapes.
pub fn infer(catalog: &Catalog, prefix: &str) -> Option<Kandinsky5Config> {
    let shape = |name: &str| {
        let tensor = catalog.find(&format!("{prefix}{name}.weight")).ok()?;
        Some(tensor.shape.iter().map(|size| *size as usize).collect::<Vec<_>>())
    };
    let inputs = |name: &str| shape(name)?.get(1).copied();
    let outputs = |name: &str| shape(name)?.first().copied();
    let count = |list: &str| {
        let is_there = |index: &usize| {
            shape(&format!("{list}_transformer_blocks.{index}.feed_forward.in_layer")).is_some()
        };
        (0..catalog.tensors.len()).take_while(is_there).count()
    };
    let channels = outputs("out_layer.out_layer")? / (PATCH * PATCH);
    let head = outputs("visual_transformer_blocks.0.self_attention.query_norm")?;
    Some(Kandinsky5Config {
        in_visual_dim: channels,
        out_visual_dim: channels,
        in_text_dim: inputs("text_embeddings.in_layer")?,
        in_text_dim2: inputs("pooled_text_embeddings.in_layer")?,
        time_dim: outputs("time_embeddings.in_layer")?,
        patch_size: published_patch(),
        model_dim: outputs("visual_embeddings.in_layer")?,
        ff_dim: outputs("visual_transformer_blocks.0.feed_forward.in_layer")?,
        num_text_blocks: count("text"),
        num_visual_blocks: count("visual"),
        axes_dims: axes(head),
        visual_cond: inputs("visual_embeddings.in_layer")? == PATCH * PATCH * (2 * channels + 1),
        // Where it is another, the name says so.
        attention_type: REGULAR.into(),
        task: None,
        distillation: Distillation::None,
        implementation: Implementation::Original,
    })
}

/// The axes of a head: a quarter for frames, the rest for rows and columns, as in all published models.
fn axes(head: usize) -> [usize; 3] {
    let side = head * 3 / 16 * 2;
    [head - 2 * side, side, side]
}
