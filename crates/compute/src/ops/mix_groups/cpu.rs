//! Groups mixed on the CPU, a row at a time; their weight's gradient for some rows at a time, in tiles that stay in
//! registers. Groups are filled up with zeros to whole vectors: many are narrower than two.

use super::{MixSizes, MixWeight};
use crate::Tensor;
use crate::backward::GradientSlot;
use crate::cpu::CpuBackend;
use crate::cpu::rows::{LANES, load, store};
use crate::cpu::simd::simd;
use crate::dtype::{Real, with_real};

/// Groups of the result that share what is read. Chosen: their sums fit into registers beside it.
const TILE: usize = 8;
/// The same of the weight's gradient: groups of the gradient and of x.
const DOTS: [usize; 2] = [2, 4];
/// Rows whose part of the weight's gradient is found at a time. Chosen: they fit into the second level of the cache.
const ROWS: usize = 8;

pub fn mix(
    cpu: &CpuBackend,
    x: &Tensor,
    w: MixWeight<'_>,
    sizes: MixSizes,
    y: &mut Tensor,
    add: bool,
) {
    let MixSizes { from, to, width, .. } = sizes;
    let (weight, wide) = (packed(w, sizes), width.next_multiple_of(LANES));
    with_real!(x.dtype(), T => with_real!(y.dtype(), Y => {
        let x = x.data::<T>();
        cpu.par_rows(y.data_mut::<Y>(), to * width, |first, rows| {
            let mut row = vec![0.0; from * wide];
            let mut mixed = vec![0.0; to.next_multiple_of(TILE) * wide];
            for (index, y) in (first..).zip(rows.chunks_exact_mut(to * width)) {
                load_groups(&x[index * from * width..][..from * width], &mut row, width);
                mix_row(&weight, &row, &mut mixed, from, wide);
                for (mixed, y) in mixed.chunks_exact(wide).zip(y.chunks_exact_mut(width)) {
                    store(&mixed[..width], y, add);
                }
            }
        });
    }));
}

/// scale·w as it is read, `TILE` of its rows at a time: [to / TILE, from, TILE], with zeros for rows beyond the last.
fn packed(w: MixWeight<'_>, MixSizes { from, to, scale, .. }: MixSizes) -> Vec<f32> {
    let (weight, [step, row_step]) = (w.values.data::<f32>(), w.steps);
    let number = |i: usize, p: usize| {
        if i < to { scale * weight[i * row_step + p * step] } else { 0.0 }
    };
    let tile =
        |first: usize| (0..from).flat_map(move |p| (first..first + TILE).map(move |i| (i, p)));
    (0..to).step_by(TILE).flat_map(tile).map(|(i, p)| number(i, p)).collect()
}

/// Groups of `width` numbers, each to the beginning of a group of whole vectors.
fn load_groups<T: Real>(x: &[T], into: &mut [f32], width: usize) {
    let wide = width.next_multiple_of(LANES);
    for (x, into) in x.chunks_exact(width).zip(into.chunks_exact_mut(wide)) {
        load(x, &mut into[..width]);
    }
}

simd! {
    /// Every group of `y`: the sum of those of `x`, `from` of them, by a row of the weight.
    fn mix_row(weight: &[f32], x: &[f32], y: &mut [f32], from: usize, wide: usize) {
        for (weight, y) in weight.chunks_exact(from * TILE).zip(y.chunks_exact_mut(TILE * wide)) {
            for at in (0..wide).step_by(LANES) {
                let mut sums = [[0.0f32; LANES]; TILE];
                for (factors, x) in weight.chunks_exact(TILE).zip(x.chunks_exact(wide)) {
                    let x = &x[at..at + LANES];
                    for (sums, factor) in sums.iter_mut().zip(factors) {
                        for (sum, x) in sums.iter_mut().zip(x) {
                            *sum += factor * x;
                        }
                    }
                }
                for (y, sums) in y.chunks_exact_mut(wide).zip(&sums) {
                    y[at..at + LANES].copy_from_slice(sums);
                }
            }
        }
    }

    /// Adds Σ g(t, i, :)·x(t, p, :) over some rows t to each number of `sums`, [to, from].
    fn add_dots(g: &[f32], x: &[f32], sums: &mut [f32], to: usize, from: usize, wide: usize) {
        for first_i in (0..to).step_by(DOTS[0]) {
            for first_p in (0..from).step_by(DOTS[1]) {
                let mut lanes = [[[0.0f32; LANES]; DOTS[1]]; DOTS[0]];
                // Sums beyond the last are computed and not used.
                let of_g = |i: usize| (first_i + i).min(to - 1) * wide;
                let of_x = |p: usize| (first_p + p).min(from - 1) * wide;
                for (g, x) in g.chunks_exact(to * wide).zip(x.chunks_exact(from * wide)) {
                    for at in (0..wide).step_by(LANES) {
                        for (i, lanes) in lanes.iter_mut().enumerate() {
                            let g = &g[of_g(i) + at..][..LANES];
                            for (p, lanes) in lanes.iter_mut().enumerate() {
                                let x = &x[of_x(p) + at..][..LANES];
                                for ((sum, g), x) in lanes.iter_mut().zip(g).zip(x) {
                                    *sum += g * x;
                                }
                            }
                        }
                    }
                }
                for (i, lanes) in (first_i..to).zip(&lanes) {
                    for (p, lanes) in (first_p..from).zip(lanes) {
                        sums[i * from + p] += lanes.iter().sum::<f32>();
                    }
                }
            }
        }
    }
}

pub fn weight_gradient(
    cpu: &CpuBackend,
    x: &Tensor,
    gradient: &Tensor,
    sizes: MixSizes,
    partial: &mut Tensor,
    slot: &mut GradientSlot,
) {
    let MixSizes { rows, from, to, width, scale } = sizes;
    let wide = width.next_multiple_of(LANES);
    with_real!(x.dtype(), T => {
        let (x, gradient) = (x.data::<T>(), gradient.data::<T>());
        cpu.sum_rows(rows, partial, &mut slot.tensor, slot.add, |block, sums| {
            let (mut some_x, mut some_g) = (Vec::new(), Vec::new());
            let end = block.end;
            for first in block.step_by(ROWS) {
                let rows = ROWS.min(end - first);
                some_x.resize(rows * from * wide, 0.0);
                some_g.resize(rows * to * wide, 0.0);
                let (of_x, of_g) = (from * width, to * width);
                load_groups(&x[first * of_x..][..rows * of_x], &mut some_x, width);
                load_groups(&gradient[first * of_g..][..rows * of_g], &mut some_g, width);
                add_dots(&some_g, &some_x, sums, to, from, wide);
            }
            for sum in sums {
                *sum *= scale;
            }
        });
    });
}
