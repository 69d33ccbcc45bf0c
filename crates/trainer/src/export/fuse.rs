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
    let one = |(key, members): (String, Vec<(Vec<TensorPiece>, &LoraWeights)>)| {
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
            let problem = format!(
                "{key} has magnitudes for {n_groups} of its {of} parts, this format wants all or none"
            );
            let hint = "export for diffusers or PEFT, which keep q, k and v apart";
            return Err(TrainerError::Request { problem, hint });
        };
        let rows = pieces.iter().flat_map(|piece| piece.rows(stored));
        rows.zip(magnitude).for_each(|(row, magnitude)| all[row] = *magnitude);
    }
    Ok(Some(all))
}
