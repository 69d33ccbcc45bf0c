//! Packs operands for AMX: panels of 32 rows of the left operand, or of 32 columns of the right one. A panel
//! is cut along the depth into steps of 32; a step holds two tiles for each bf16 that a value is split into.
//!
//! A tile is sixteen lines of sixteen pairs of bf16; a pair is the values at depths d and d + 16 of the
//! step. On the left a line is a row and a position in it a depth; on the right it is the other way round.
//! So a line of the matrix that runs along the depth becomes a line on the left, two that run across it
//! become a line on the right, and transposing the pairs turns either into the other.
#![allow(unsafe_code)]

#[allow(clippy::wildcard_imports)] // Thirty names that all say what they are.
use std::arch::x86_64::*;

use super::load16::{Lanes16, Load16, pair, round};
use super::{Floats, MatrixView, PANEL, STEP, packed_floats};

/// Lines to prefetch ahead. The CPU's own prefetcher works only within a line, and lines of a block are
/// short.
const AHEAD: usize = 4;
/// Floats in a tile, a line of which takes sixteen.
const TILE: usize = 256;
/// Floats of a panel's step, for each split.
pub(super) const STEP_FLOATS: usize = 2 * TILE;
const LINE: usize = 16;

/// A packed operand, or some of its panels and depth.
#[derive(Clone, Copy)]
pub(super) struct Packed<'a> {
    /// Pairs of bf16, stored as f32.
    data: &'a [f32],
    /// bf16 values that each value is the sum of: 1 or 3.
    pub n_splits: usize,
    /// Steps of a panel.
    steps: usize,
    /// The steps of interest.
    from: usize,
    pub count: usize,
}

impl<'a> Packed<'a> {
    /// What [`pack`] left in `data`.
    pub fn new(data: &'a [f32], depth: usize, n_splits: usize) -> Self {
        let steps = depth.div_ceil(STEP);
        Self { data, n_splits, steps, from: 0, count: steps }
    }

    /// Only so much of the depth.
    pub fn slab(self, from: usize, depth: usize) -> Self {
        Self { from: from / STEP, count: depth.div_ceil(STEP), ..self }
    }

    /// The steps of one panel.
    pub fn panel(self, index: usize) -> &'a [f32] {
        let step_floats = STEP_FLOATS * self.n_splits;
        &self.data[(index * self.steps + self.from) * step_floats..][..self.count * step_floats]
    }
}

/// Whether the CPU has the AVX-512 instructions that are used here; all with AMX do.
pub(super) fn has_vectors() -> bool {
    is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
}

/// Which operand; it decides the layout of tiles.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum OperandSide {
    Left,
    Right,
}

/// `scale` times the first rows of `grid`, which has the depth along its rows.
pub(super) fn pack<'r>(
    side: OperandSide,
    grid: MatrixView<'_>,
    rows: usize,
    depth: usize,
    scale: f32,
    scratch: &'r mut [f32],
) -> Packed<'r> {
    let n_splits = if scale == 1.0 { grid.n_splits } else { 3 };
    let out = &mut scratch[..packed_floats(rows, depth, n_splits)];
    let is_along = grid.column_stride == 1;
    let lines = PackLines {
        start: grid.start,
        step: if is_along { grid.row_stride } else { grid.column_stride },
        size: if is_along { (rows, depth) } else { (depth, rows) },
        scale,
        are_along: is_along,
        swaps: is_along == (side == OperandSide::Right),
    };
    if depth > 0 {
        // SAFETY: `has_vectors` was asked before any tile was used.
        unsafe {
            match grid.data {
                Floats::F32(source) => fill(source, lines, n_splits, out),
                Floats::Bf16(source) => fill(source, lines, n_splits, out),
                Floats::F16(source) => fill(source, lines, n_splits, out),
                Floats::Int8(source) => fill(source, lines, n_splits, out),
                Floats::Nf4(source) => fill(source, lines, n_splits, out),
                Floats::Fp8(source) => fill(source, lines, n_splits, out),
            }
        }
    }
    Packed::new(out, depth, n_splits)
}

/// The contiguous lines of a matrix.
#[derive(Clone, Copy)]
struct PackLines {
    /// Where the first one starts.
    start: usize,
    /// From the start of one to that of the next.
    step: usize,
    /// How many, and how long.
    size: (usize, usize),
    scale: f32,
    /// Whether they run along the depth.
    are_along: bool,
    /// Whether tiles of 4-byte pairs are transposed in the end.
    swaps: bool,
}

impl PackLines {
    /// The next sixteen elements of a line from `from` on, as far as there are any.
    #[inline(always)]
    fn at(&self, line: usize, from: usize) -> Lanes16 {
        let (lines, length) = self.size;
        let there = if line < lines { length.saturating_sub(from).min(16) } else { 0 };
        let mask = ((1u32 << there) - 1) as u16;
        Lanes16 { at: self.start + line * self.step + from, mask }
    }
}

/// Packs all of it. Lines are read from start to end, since the CPU prefetches only what follows what was
/// read.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn fill<S: Load16>(source: S, lines: PackLines, n_splits: usize, out: &mut [f32]) {
    match (lines.are_along, n_splits) {
        (true, 1) => along::<S, 1>(source, lines, out),
        (true, _) => along::<S, 3>(source, lines, out),
        (false, 1) => across::<S, 1>(source, lines, out),
        (false, _) => across::<S, 3>(source, lines, out),
    }
    if lines.swaps {
        for tile in out.as_chunks_mut::<TILE>().0 {
            transpose_tile(tile);
        }
    }
}

/// Lines along the depth.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn along<S: Load16, const PARTS: usize>(source: S, lines: PackLines, out: &mut [f32]) {
    let step_floats = STEP_FLOATS * PARTS;
    let panel_floats = lines.size.1.div_ceil(STEP) * step_floats;
    for (panel, out) in out.chunks_exact_mut(panel_floats).enumerate() {
        for line in 0..PANEL {
            for (step, out) in out.chunks_exact_mut(step_floats).enumerate() {
                let low = lines.at(panel * PANEL + line, step * STEP);
                let high = lines.at(panel * PANEL + line, step * STEP + 16);
                source.prefetch(low.at + AHEAD * lines.step);
                source.prefetch(high.at + AHEAD * lines.step);
                let parts = split::<S, PARTS>(source, low, high, lines.scale);
                for (part, pairs) in parts.into_iter().enumerate() {
                    store(pairs, &mut out[part * STEP_FLOATS + line * LINE..][..LINE]);
                }
            }
        }
    }
}

/// Lines across the depth.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn across<S: Load16, const PARTS: usize>(source: S, lines: PackLines, out: &mut [f32]) {
    let step_floats = STEP_FLOATS * PARTS;
    let panel_floats = lines.size.0.div_ceil(STEP) * step_floats;
    for pair in 0..lines.size.0.div_ceil(STEP) * STEP / 2 {
        let (step, depth) = (pair / 16, pair % 16);
        for (panel, out) in out.chunks_exact_mut(panel_floats).enumerate() {
            for tile in 0..2 {
                let column = panel * PANEL + 16 * tile;
                let low = lines.at(step * STEP + depth, column);
                let high = lines.at(step * STEP + depth + 16, column);
                source.prefetch(low.at + AHEAD * lines.step);
                source.prefetch(high.at + AHEAD * lines.step);
                let parts = split::<S, PARTS>(source, low, high, lines.scale);
                for (part, pairs) in parts.into_iter().enumerate() {
                    let at = step * step_floats + (part * 2 + tile) * TILE + depth * LINE;
                    store(pairs, &mut out[at..][..LINE]);
                }
            }
        }
    }
}

#[inline(always)]
fn store(pairs: __m512i, to: &mut [f32]) {
    assert!(to.len() == LINE);
    // SAFETY: `to` has sixteen floats.
    unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), pairs) };
}

/// Two vectors as pairs of bf16. With three splits, the first is rounded, the second cut off, and the third
/// is the rest, which has no more than eight digits left.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn split<S: Load16, const PARTS: usize>(
    source: S,
    low: Lanes16,
    high: Lanes16,
    scale: f32,
) -> [__m512i; PARTS] {
    let mut parts = [_mm512_setzero_si512(); PARTS];
    if PARTS == 1 {
        // SAFETY: this function is compiled for these instructions.
        parts[0] = unsafe { source.load16_as_bf16(low, high) };
        return parts;
    }
    // SAFETY: as above.
    let (low, high) = unsafe { (source.load16(low), source.load16(high)) };
    let (low, high) = if scale == 1.0 {
        (low, high)
    } else {
        let scale = _mm512_set1_ps(scale);
        (_mm512_mul_ps(low, scale), _mm512_mul_ps(high, scale))
    };
    let (first_low, first_high) = (round(low), round(high));
    parts[0] = pair(first_low, first_high);
    let (low, high) = (less(low, first_low), less(high, first_high));
    let (low_bits, high_bits) = (_mm512_castps_si512(low), _mm512_castps_si512(high));
    parts[1] = pair(low_bits, high_bits);
    let (low, high) = (less(low, low_bits), less(high, high_bits));
    parts[2] = pair(_mm512_castps_si512(low), _mm512_castps_si512(high));
    parts
}

/// What is left of values without the bf16 in the upper half of `bits`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn less(numbers: __m512, bits: __m512i) -> __m512 {
    let upper = _mm512_and_si512(bits, _mm512_set1_epi32(0xffff_0000u32.cast_signed()));
    _mm512_sub_ps(numbers, _mm512_castsi512_ps(upper))
}

/// Transposes a tile of 16 x 16 pairs: first within blocks of 4 x 4, then the blocks.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn transpose_tile(tile: &mut [f32; TILE]) {
    let mut lines = [_mm512_setzero_ps(); 16];
    for (line, numbers) in lines.iter_mut().zip(tile.as_chunks::<LINE>().0) {
        // SAFETY: sixteen values are read.
        *line = unsafe { _mm512_loadu_ps(numbers.as_ptr()) };
    }
    for four in lines.as_chunks_mut::<4>().0 {
        let [a, b, c, d] = *four;
        let pairs = [
            _mm512_unpacklo_ps(a, b),
            _mm512_unpackhi_ps(a, b),
            _mm512_unpacklo_ps(c, d),
            _mm512_unpackhi_ps(c, d),
        ];
        let [ab, ab_high, cd, cd_high] = pairs.map(|pair| _mm512_castps_pd(pair));
        *four = [
            _mm512_unpacklo_pd(ab, cd),
            _mm512_unpackhi_pd(ab, cd),
            _mm512_unpacklo_pd(ab_high, cd_high),
            _mm512_unpackhi_pd(ab_high, cd_high),
        ]
        .map(|line| _mm512_castpd_ps(line));
    }
    for column in 0..4 {
        let [a, b, c, d] = [0, 4, 8, 12].map(|row| lines[row + column]);
        let ab_even = _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b);
        let ab_odd = _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b);
        let cd_even = _mm512_shuffle_f32x4::<0b10_00_10_00>(c, d);
        let cd_odd = _mm512_shuffle_f32x4::<0b11_01_11_01>(c, d);
        lines[column] = _mm512_shuffle_f32x4::<0b10_00_10_00>(ab_even, cd_even);
        lines[4 + column] = _mm512_shuffle_f32x4::<0b10_00_10_00>(ab_odd, cd_odd);
        lines[8 + column] = _mm512_shuffle_f32x4::<0b11_01_11_01>(ab_even, cd_even);
        lines[12 + column] = _mm512_shuffle_f32x4::<0b11_01_11_01>(ab_odd, cd_odd);
    }
    for (line, numbers) in lines.iter().zip(tile.as_chunks_mut::<LINE>().0) {
        // SAFETY: sixteen values are written.
        unsafe { _mm512_storeu_ps(numbers.as_mut_ptr(), *line) };
    }
}
