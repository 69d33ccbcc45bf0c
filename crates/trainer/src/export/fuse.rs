//! Fuses the adapters of several layers into one: the original checkpoints have one fused qkv matrix, and programs
//! that use those need one adapter for it.
//!
//! Down matrices are stacked; up matrices become blocks of a matrix that is zero elsewhere, so that the rank is the
//! sum of the ranks and nothing is lost.

use std::collections::BTreeMap;

use crate::error::{Result, TrainerError};
use crate::model::adapter::LayerWeights;
use crate::model::adapter::factors::{AdapterMatrix, Factors};
use crate::model::tensor_piece::{TensorPiece, stored_rows};

/// A layer's adapter, and where the layer lies in what is stored.
type FusedMember<'a> = (Vec<TensorPiece>, &'a LayerWeights);

/// The adapters by the original layers' names.
pub fn fuse(
    layers: &BTreeMap<String, LayerWeights>,
    original: impl Fn(&str) -> Vec<TensorPiece>,
) -> Result<BTreeMap<String, LayerWeights>> {
    let mut members: BTreeMap<String, Vec<FusedMember<'_>>> = BTreeMap::new();
    for (layer, given) in layers {
        let pieces = original(layer);
        members.entry(pieces[0].key.clone()).or_default().push((pieces, given));
    }
    let one = |(key, mut members): (String, Vec<FusedMember<'_>>)| {
        // In the order of rows, other programs see blocks on the diagonal, and take them apart again.
        members.sort_by_key(|(pieces, _)| pieces[0].from);
        let fused = fuse_members(&key, &members)?;
        Ok((key, fused))
    };
    members.into_iter().map(one).collect()
}

fn fuse_members(key: &str, members: &[FusedMember<'_>]) -> Result<LayerWeights> {
    let (pieces, first) = &members[0];
    if is_alone(pieces) {
        return Ok((*first).clone());
    }
    let [outputs, _] = first.sizes();
    let stored = stored_rows(pieces, outputs).unwrap_or(outputs);
    // There is one alpha, so that a different scale goes into the values.
    let factor = |given: &LayerWeights| given.scale() / first.scale();
    let unscaled = |_: &LayerWeights| 1.0;
    let factors = match &first.factors {
        Factors::Lora { .. } => {
            let [up, down] = fuse_pairs(members, stored, factor, |given| match &given.factors {
                Factors::Lora { down, up } => Some([up, down]),
                _ => None,
            });
            Factors::Lora { down, up }
        }
        Factors::Loha { .. } => {
            let w1 = fuse_pairs(members, stored, factor, |given| match &given.factors {
                Factors::Loha { w1: [a, b], .. } => Some([a, b]),
                _ => None,
            });
            let w2 = fuse_pairs(members, stored, unscaled, |given| match &given.factors {
                Factors::Loha { w2: [a, b], .. } => Some([a, b]),
                _ => None,
            });
            Factors::Loha { w1, w2 }
        }
        Factors::Lokr { .. } => return Err(fused_lokr(key)),
        Factors::Norm { .. } => return Ok((*first).clone()),
    };
    let rank = members.iter().map(|(_, given)| given.rank).sum();
    let alpha = first.scale() * rank as f32;
    Ok(LayerWeights { rank, alpha, factors, magnitude: magnitudes(key, members, stored)? })
}

/// Low-rank matrices of different rows as one: A stacked, B a matrix of blocks.
fn fuse_pairs<'a>(
    members: &[FusedMember<'a>],
    stored: usize,
    factor: impl Fn(&LayerWeights) -> f32,
    pair: impl Fn(&'a LayerWeights) -> Option<[&'a AdapterMatrix; 2]>,
) -> [AdapterMatrix; 2] {
    let pairs: Vec<_> = members
        .iter()
        .filter_map(|(pieces, given)| Some((pieces, pair(given)?, factor(given))))
        .collect();
    let rank: usize = pairs.iter().map(|(_, [_, down], _)| down.rows).sum();
    let inputs = pairs[0].1[1].columns;
    let mut up = vec![0.0; stored * rank];
    let mut down = Vec::new();
    for (pieces, [own_up, own_down], factor) in pairs {
        let first_rank = down.len() / inputs.max(1);
        let rows = pieces.iter().flat_map(|piece| piece.rows(stored));
        for (row, from) in rows.zip(own_up.values.chunks(own_up.columns)) {
            let to = &mut up[row * rank + first_rank..][..own_up.columns];
            to.iter_mut().zip(from).for_each(|(to, from)| *to = factor * from);
        }
        down.extend_from_slice(&own_down.values);
    }
    [AdapterMatrix::new([stored, rank], up), AdapterMatrix::new([rank, inputs], down)]
}

/// Whether a layer is stored as it is.
fn is_alone(pieces: &[TensorPiece]) -> bool {
    pieces.len() == 1 && pieces[0].total == 1
}

/// The `LoKr`s of layers that are stored as one, and all else. The sum of Kronecker products of different rows is no
/// Kronecker product, so that they stay apart under their own names. So do norms whose vector is no `weight` there.
pub fn apart(
    layers: &BTreeMap<String, LayerWeights>,
    original: impl Fn(&str) -> Vec<TensorPiece>,
    has_weight: impl Fn(&str) -> bool,
) -> (BTreeMap<String, LayerWeights>, BTreeMap<String, LayerWeights>) {
    let is_apart = |(layer, given): &(String, LayerWeights)| match given.factors {
        Factors::Lokr { .. } => !is_alone(&original(layer)),
        Factors::Norm { .. } => !has_weight(layer),
        Factors::Lora { .. } | Factors::Loha { .. } => false,
    };
    layers.iter().map(|(layer, given)| (layer.clone(), given.clone())).partition(is_apart)
}

/// Checks, before anything is trained, that a `LoKr` of these layers can be written for kohya.
pub fn check_lokr<'a>(
    mut layers: impl Iterator<Item = &'a str>,
    original: impl Fn(&str) -> Vec<TensorPiece>,
) -> Result<()> {
    let fused = layers.find_map(|layer| {
        let pieces = original(layer);
        (!is_alone(&pieces)).then(|| pieces.into_iter().next()).flatten()
    });
    fused.map_or(Ok(()), |piece| Err(fused_lokr(&piece.key)))
}

fn fused_lokr(key: &str) -> TrainerError {
    TrainerError::Request {
        problem: format!(
            "{key} is several layers in kohya's files, and their LoKr matrices have no common Kronecker product"
        ),
        hint: "set output.formats to comfyui or peft, which keep layers apart, or adapter.kind to lora or loha",
    }
}

/// Checks, before anything is trained, that a `DoRA` of these layers can be written for programs with fused layers.
pub fn check_dora<'a>(
    layers: impl Iterator<Item = &'a str>,
    original: impl Fn(&str) -> Vec<TensorPiece>,
) -> Result<()> {
    let mut parts: BTreeMap<String, (usize, usize)> = BTreeMap::new();
    for piece in layers.flat_map(original) {
        let (n_groups, of) = parts.entry(piece.key).or_default();
        (*n_groups, *of) = (*n_groups + piece.count, piece.total);
    }
    match parts.into_iter().find(|(_, (n_groups, of))| n_groups != of) {
        Some((key, (n_groups, of))) => Err(partial_magnitudes(&key, n_groups, of)),
        None => Ok(()),
    }
}

fn partial_magnitudes(key: &str, n_groups: usize, of: usize) -> TrainerError {
    TrainerError::Request {
        problem: format!(
            "{key} has magnitudes for {n_groups} of its {of} parts, kohya and ComfyUI want all or none"
        ),
        hint: "set output.formats to diffusers or peft, which keep layers apart, or give adapter.targets the other \
               layers that are fused with it: FLUX.1 needs proj_mlp beside q, k and v",
    }
}

/// The magnitudes of all rows; the format has them for all or for none.
fn magnitudes(key: &str, members: &[FusedMember<'_>], stored: usize) -> Result<Option<Vec<f32>>> {
    if members.iter().all(|(_, given)| given.magnitude.is_none()) {
        return Ok(None);
    }
    let pieces = || members.iter().flat_map(|(pieces, _)| pieces);
    let (n_groups, of) = (pieces().map(|piece| piece.count).sum::<usize>(), members[0].0[0].total);
    let mut all = vec![0.0; stored];
    for (pieces, given) in members {
        let Some(magnitude) = given.magnitude.as_ref().filter(|_| n_groups == of) else {
            return Err(partial_magnitudes(key, n_groups, of));
        };
        let rows = pieces.iter().flat_map(|piece| piece.rows(stored));
        rows.zip(magnitude).for_each(|(row, magnitude)| all[row] = *magnitude);
    }
    Ok(Some(all))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// q is the first third of the rows and has the first part of the rank, although k comes first by name.
    #[test]
    fn blocks_are_on_the_diagonal() {
        let layer = |name: &str, value: f32| {
            let (down, up) = (vec![value], vec![value; 2]);
            (name.to_owned(), LayerWeights::lora(1, 1.0, down, up))
        };
        let layers = BTreeMap::from([layer("k", 2.0), layer("q", 1.0), layer("v", 3.0)]);
        let part = |name: &str| "qkv".find(name).expect("one of the three");
        let fused = fuse(&layers, |name| vec![TensorPiece::part("qkv", part(name), 3)]).unwrap();
        let Factors::Lora { down, up } = &fused["qkv"].factors else { panic!("a LoRA") };
        assert_eq!(down.values, [1.0, 2.0, 3.0]);
        let rows: Vec<&[f32]> = up.values.chunks(3).collect();
        assert_eq!(rows[..3], [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 2.0, 0.0]]);
    }
}
