//! The merged rows of a matrix: W + s·B·A, or what else an adapter's matrices make; for `DoRA` each row is then normalised
//! and multiplied by its magnitude. Vectors of norms are matrices of one column.

use std::collections::HashMap;
use std::ops::Range;

use super::MatrixPatches;
use crate::model::adapter::{AdaptedComponent, LayerWeights};
use crate::model::tensor_piece::stored_rows;

/// An adapter's matrices and the rows of a stored matrix they are for. Where q, k and v are stored
/// as one, each of them has a patch of its own.
pub struct MatrixPatch<'a> {
    given: &'a LayerWeights,
    /// In the stored matrix.
    rows: Range<usize>,
    /// The adapter's own row that belongs to the first of them.
    first: usize,
    /// Whether what is stored is the bias of a norm.
    is_bias: bool,
}

/// All patches of a part.
pub fn patches<'a>(part: &AdaptedComponent<'a>) -> MatrixPatches<'a> {
    let mut patches: MatrixPatches<'a> = HashMap::new();
    let of_weight = part.layers.iter().map(|(layer, given)| (layer, given, false));
    let of_bias = of_weight.clone().filter(|(_, given, _)| given.factors.has_bias());
    for (layer, given, is_bias) in of_weight.chain(of_bias.map(|(layer, it, _)| (layer, it, true)))
    {
        let end = if is_bias { "bias" } else { "weight" };
        let pieces = (part.layout.pieces)(&format!("{layer}.{end}"));
        let [outputs, _] = given.sizes();
        let (stored, mut first) = (stored_rows(&pieces, outputs).unwrap_or(outputs), 0);
        for piece in pieces {
            let rows = piece.rows(stored);
            let n_rows = rows.len();
            let patch = MatrixPatch { given, rows, first, is_bias };
            patches.entry(piece.key).or_default().push(patch);
            first += n_rows;
        }
    }
    patches
}

/// Some rows, from `first` on, with their patches.
pub fn apply_patches(
    patches: &[MatrixPatch<'_>],
    first: usize,
    width: usize,
    values: &[f32],
) -> Vec<f64> {
    let mut sums: Vec<f64> = values.iter().map(|value| f64::from(*value)).collect();
    for (at, row) in (first..).zip(sums.chunks_mut(width)) {
        for patch in patches.iter().filter(|patch| patch.rows.contains(&at)) {
            patch.add(patch.first + at - patch.rows.start, row);
        }
    }
    sums
}

impl<'a> MatrixPatch<'a> {
    /// For a matrix that is stored as it is.
    pub fn for_whole(given: &'a LayerWeights) -> Self {
        let [outputs, _] = given.sizes();
        Self { given, rows: 0..outputs, first: 0, is_bias: false }
    }

    fn add(&self, own: usize, row: &mut [f64]) {
        let LayerWeights { rank, alpha, factors, magnitude } = self.given;
        if self.is_bias {
            row[0] += factors.of_bias(own);
            return;
        }
        let scale = f64::from(*alpha) / *rank as f64;
        for (sum, added) in row.iter_mut().zip(factors.row(own)) {
            *sum += scale * added;
        }
        if let Some(magnitude) = magnitude {
            let norm = row.iter().map(|value| value * value).sum::<f64>().sqrt();
            let factor = f64::from(magnitude[own]) / norm;
            for value in row {
                *value *= factor;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(magnitude: Option<Vec<f32>>) -> LayerWeights {
        // s·B·A = 2 · [1; -1] · [3 4] = [6 8; -6 -8].
        LayerWeights::lora(1, 2.0, vec![3.0, 4.0], vec![1.0, -1.0]).with_magnitude(magnitude)
    }

    #[test]
    fn rows_get_what_belongs_to_them_and_others_nothing() {
        let given = given(None);
        // Two patches that are stored the other way round.
        let patches = [
            MatrixPatch { given: &given, rows: 1..2, first: 0, is_bias: false },
            MatrixPatch { given: &given, rows: 0..1, first: 1, is_bias: false },
        ];
        let base = [0.5, 0.5, 1.0, 1.0, 7.0, 7.0];
        assert_eq!(apply_patches(&patches, 0, 2, &base), [-5.5, -7.5, 7.0, 9.0, 7.0, 7.0]);
        assert_eq!(apply_patches(&patches, 1, 2, &base[2..]), [7.0, 9.0, 7.0, 7.0]);
    }

    #[test]
    fn with_magnitudes_rows_have_their_norms() {
        let given = given(Some(vec![10.0, 5.0]));
        let patch = [MatrixPatch::for_whole(&given)];
        assert_eq!(apply_patches(&patch, 0, 2, &[-3.0, -4.0, 12.0, 16.0]), [6.0, 8.0, 3.0, 4.0]);
    }
}
