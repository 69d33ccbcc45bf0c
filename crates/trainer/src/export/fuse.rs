//! Fuses the adapters of several layers into one: the original checkpoints have one fused qkv matrix, and programs
//! that use those need one adapter for it.
//!
//! Down matrices are stacked; up matrices become blocks of a matrix that is zero elsewhere, so that the rank is the
//! sum of the ranks and nothing is lost.

use std::collections::BTreeMap;

use crate::error::{Result, TrainerError};
use crate::model::adapter::LoraWeights;
use crate::model::tensor_piece::{TensorPiece, stored_rows};

/// The adapters by the original layers' names.
pub fn fuse(
    layers: &BTreeMap<String, LoraWeights>,
    original: impl Fn(&str) -> Vec<TensorPiece>,
) -> Result<BTreeMap<String, LoraWeights>> {
    let mut members: BTreeMap<String, Vec<(Vec<TensorPiece>, &LoraWeights)>> = BTreeMap::new();
    for (layer, given) in layers {
        let pieces = original(layer);
        members.entry(pieces[0].key.clone()).or_default().push((pieces, given));
    }
    let one = |(key, mut members): (String, Vec<(Vec<TensorPiece>, &LoraWeights)>)| {
        // In the order of rows, other programs see blocks on the diagonal, and take them apart again.
        members.sort_by_key(|(pieces, _)| pieces[0].from);
        let fused = fuse_members(&key, &members)?;
        Ok((key, fused))
    };
    members.into_iter().map(one).collect()
}

fn fuse_members(key: &str, members: &[(Vec<TensorPiece>, &LoraWeights)]) -> Result<LoraWeights> {
    let (pieces, first) = &members[0];
    if members.len() == 1 && pieces.len() == 1 && pieces[0].total == 1 {
        return Ok((*first).clone());
    }
    let [outputs, _] = first.sizes();
    let stored = stored_rows(pieces, outputs).unwrap_or(outputs);
    let rank: usize = members.iter().map(|(_, given)| given.rank).sum();
    let mut up = vec![0.0; stored * rank];
    let mut first_rank = 0;
    for (pieces, given) in members {
        // There is one alpha, so that a different scale goes into the values.
        let factor = given.scale() / first.scale();
        let rows = pieces.iter().flat_map(|piece| piece.rows(stored));
        for (row, from) in rows.zip(given.up.chunks(given.rank)) {
            let to = &mut up[row * rank + first_rank..][..given.rank];
            to.iter_mut().zip(from).for_each(|(to, from)| *to = factor * from);
        }
        first_rank += given.rank;
    }
    Ok(LoraWeights {
        rank,
        alpha: first.scale() * rank as f32,
        down: members.iter().flat_map(|(_, given)| given.down.iter().copied()).collect(),
        up,
        magnitude: magnitudes(key, members, stored)?,
    })
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
fn magnitudes(
    key: &str,
    members: &[(Vec<TensorPiece>, &LoraWeights)],
    stored: usize,
) -> Result<Option<Vec<f32>>> {
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
            (name.to_owned(), LoraWeights { rank: 1, alpha: 1.0, down, up, magnitude: None })
        };
        let layers = BTreeMap::from([layer("k", 2.0), layer("q", 1.0), layer("v", 3.0)]);
        let part = |name: &str| "qkv".find(name).expect("one of the three");
        let fused = fuse(&layers, |name| vec![TensorPiece::part("qkv", part(name), 3)]).unwrap();
        assert_eq!(fused["qkv"].down, [1.0, 2.0, 3.0]);
        let rows: Vec<&[f32]> = fused["qkv"].up.chunks(3).collect();
        assert_eq!(rows[..3], [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 2.0, 0.0]]);
    }
}
