//! Rotary position embedding (Su and others, "`RoFormer`", arXiv 2104.09864): what it is given, and
//! the table of angles.

use crate::Tensor;

/// A rotation of the pairs of each head by angles that depend on the token's position:
/// (a, b) becomes (a·cos - b·sin, a·sin + b·cos).
#[derive(Clone, Copy)]
pub struct Rope<'a> {
    /// The cos and sin of each pair's angle, one after the other: f32, [tokens, width], or
    /// [samples, tokens, width] where samples differ. Heads are turned in their first `width` numbers.
    /// [`rope_table`] makes one.
    pub table: &'a Tensor,
    /// Which numbers of a head make a pair.
    pub pairs: RopePairs,
}

/// Which of the first d numbers of a head, those that are turned, make a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopePairs {
    /// 2i and 2i + 1, as in FLUX and Qwen-Image.
    Interleaved,
    /// i and i + d/2, as in Llama.
    HalfSplit,
}

/// One axis of positions, which turns its own part of the pairs.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeAxis {
    /// The angle per step of each of its pairs.
    pub frequencies: Vec<f64>,
}

impl RopeAxis {
    /// θ^(-2i / width) for the pairs i of an even `width` of a head.
    pub fn new(width: usize, theta: f64) -> Self {
        let frequency = |pair: usize| theta.powf(-2.0 * pair as f64 / width as f64);
        Self { frequencies: (0..width / 2).map(frequency).collect() }
    }
}

/// The table of [`Rope`] for tokens at `positions` [tokens, axes], which may be negative: pairs in
/// the order of the axes. Angles are computed in f64, since f32 loses them far from the origin.
///
/// # Panics
/// If there is not a position for each axis of every token; callers derive one from the other.
pub fn rope_table(axes: &[RopeAxis], positions: &[f32]) -> Vec<f32> {
    let (n_axes, n_positions) = (axes.len(), positions.len());
    assert!(n_positions.is_multiple_of(n_axes), "{n_positions} positions on {n_axes} axes");
    let tokens = positions.chunks_exact(n_axes.max(1));
    tokens
        .flat_map(|token| axes.iter().zip(token))
        .flat_map(|(axis, at)| cos_sin(axis, *at))
        .collect()
}

/// The cos and sin of each of an axis's angles.
fn cos_sin(axis: &RopeAxis, position: f32) -> impl Iterator<Item = f32> {
    axis.frequencies.iter().flat_map(move |frequency| {
        let (sin, cos) = (f64::from(position) * frequency).sin_cos();
        [cos as f32, sin as f32]
    })
}
