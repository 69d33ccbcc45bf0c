//! Groups mixed on the CPU, a row at a time; their weight's gradient for some rows at a time, in tiles that stay in
//! registers.

use super::{MixSizes, MixWeight};
use crate::Tensor;
use crate::backward::GradientSlot;
use crate::cpu::CpuBackend;
use crate::cpu::rows::{LANES, load, store};
use crate::cpu::simd::simd;
use crate::dtype::with_real;

/// Groups of the result that share what is read. Chosen: their sums fit into registers beside it.
const TILE: usize = 4;
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
    let MixSizes { from, to, width, scale, .. } = sizes;
    let (weight, [step, row_step]) = (w.values.data::<f32>(), w.steps);
    let number = |i: usize| move |p: usize| scale * weight[i * row_step + p * step];
    let weight: Vec<f32> = (0..to).flat_map(|i| (0..from).map(number(i))).collect();
    with_real!(x.dtype(), T => with_real!(y.dtype(), Y => {
        let x = x.data::<T>();
        cpu.par_rows(y.data_mut::<Y>(), to * width, |first, rows| {
            let (mut row, mut mixed) = (vec![0.0; from * width], vec![0.0; to * width]);
            for (index, y) in (first..).zip(rows.chunks_exact_mut(to * width)) {
                load(&x[index * from * width..][..from * width], &mut row);
                mix_row(&weight, &row, &mut mixed, from, width);
                store(&mixed, y, add);
            }
        });
    }));
}

simd! {
    /// Every group of `y`: the sum of those of `x`, `from` of them, by a row of the weight.
    fn mix_row(weight: &[f32], x: &[f32], y: &mut [f32], from: usize, width: usize) {
        let whole = width / LANES * LANES;
        let tiles = y.chunks_mut(TILE * width).zip(weight.chunks(TILE * from));
        for (y, weight) in tiles {
            let n = y.len() / width;
            for at in (0..whole).step_by(LANES) {
                let mut sums = [[0.0f32; LANES]; TILE];
                for p in 0..from {
                    let x = &x[p * width + at..][..LANES];
                    for (i, sums) in sums.iter_mut().enumerate() {
                        // Sums beyond the last are computed and not used.
                        let factor = weight[i.min(n - 1) * from + p];
                        for (sum, x) in sums.iter_mut().zip(x) {
                            *sum += factor * x;
                        }
                    }
                }
                for (y, sums) in y.chunks_exact_mut(width).zip(&sums) {
                    y[at..at + LANES].copy_from_slice(sums);
                }
            }
            for (y, weight) in y.chunks_exact_mut(width).zip(weight.chunks_exact(from)) {
                for (at, y) in y.iter_mut().enumerate().skip(whole) {
                    *y = weight.iter().enumerate().map(|(p, w)| w * x[p * width + at]).sum();
                }
            }
        }
    }

    /// Adds Σ g(t, i, :)·x(t, p, :) over some rows t to each number of `sums`, [to, from].
    fn add_dots(g: &[f32], x: &[f32], sums: &mut [f32], to: usize, from: usize, width: usize) {
        let whole = width / LANES * LANES;
        for i in 0..to {
            for first in (0..from).step_by(TILE) {
                let n = TILE.min(from - first);
                let mut lanes = [[0.0f32; LANES]; TILE];
                let mut rest = [0.0f32; TILE];
                for (g, x) in g.chunks_exact(to * width).zip(x.chunks_exact(from * width)) {
                    let g = &g[i * width..][..width];
                    let x = &x[first * width..];
                    for at in (0..whole).step_by(LANES) {
                        let g = &g[at..at + LANES];
                        for (p, lanes) in lanes.iter_mut().enumerate() {
                            let x = &x[p.min(n - 1) * width + at..][..LANES];
                            for ((sum, g), x) in lanes.iter_mut().zip(g).zip(x) {
                                *sum += g * x;
                            }
                        }
                    }
                    for (p, rest) in rest[..n].iter_mut().enumerate() {
                        for at in whole..width {
                            *rest += g[at] * x[p * width + at];
                        }
                    }
                }
                for p in 0..n {
                    sums[i * from + first + p] += lanes[p].iter().sum::<f32>() + rest[p];
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
    with_real!(x.dtype(), T => {
        let (x, gradient) = (x.data::<T>(), gradient.data::<T>());
        cpu.sum_rows(rows, partial, &mut slot.tensor, slot.add, |block, sums| {
            let (mut some_x, mut some_g) = (Vec::new(), Vec::new());
            let end = block.end;
            for first in block.step_by(ROWS) {
                let rows = ROWS.min(end - first);
                some_x.resize(rows * from * width, 0.0);
                some_g.resize(rows * to * width, 0.0);
                load(&x[first * from * width..][..some_x.len()], &mut some_x);
                load(&gradient[first * to * width..][..some_g.len()], &mut some_g);
                add_dots(&some_g, &some_x, sums, to, from, width);
            }
            for sum in sums {
                *sum *= scale;
            }
        });
    });
}
