//! There and back: what squares of four by four pixels see, and what comes of their products. Kernels
//! and channels are taken one at a time and written to all places at once: the numbers that places
//! share are made once.
#![allow(unsafe_code)]

use super::super::Window;
use super::super::winograd::{PLACES, SEEN_SIDE, SIDE};
use crate::Tensor;
use crate::cpu::simd::simd;
use crate::cpu::{Cpu, Shared};
use crate::ops::Activation;

/// G: what a row or column of a kernel becomes at each of six places.
const KERNEL: [[f32; 3]; SEEN_SIDE] = [
    [1.0 / 4.0, 0.0, 0.0],
    [-1.0 / 6.0, -1.0 / 6.0, -1.0 / 6.0],
    [-1.0 / 6.0, 1.0 / 6.0, -1.0 / 6.0],
    [1.0 / 24.0, 1.0 / 12.0, 1.0 / 6.0],
    [1.0 / 24.0, -1.0 / 12.0, 1.0 / 6.0],
    [0.0, 0.0, 1.0],
];
/// Bᵀ: what six rows or columns of the image become at each of six places.
const SEEN: [[f32; SEEN_SIDE]; SEEN_SIDE] = [
    [4.0, 0.0, -5.0, 0.0, 1.0, 0.0],
    [0.0, -4.0, -4.0, 1.0, 1.0, 0.0],
    [0.0, 4.0, -4.0, -1.0, 1.0, 0.0],
    [0.0, -2.0, -1.0, 2.0, 1.0, 0.0],
    [0.0, 2.0, -1.0, -2.0, 1.0, 0.0],
    [0.0, 4.0, 0.0, -5.0, 0.0, 1.0],
];

/// The kernels of all outputs at all places.
pub fn kernels(cpu: &Cpu, weight: &Tensor, kernels: &mut Tensor) {
    let &[_, outputs, inputs] = kernels.shape().sizes() else { unreachable!("made by the op") };
    let weight = weight.data::<f32>();
    let out = Shared::new(kernels.data_mut::<f32>());
    cpu.each(outputs, &|output| {
        // By number of the kernel, then by input.
        let mut taps = vec![0.0; 9 * inputs];
        for (input, g) in weight[output * inputs * 9..][..inputs * 9].chunks_exact(9).enumerate() {
            for (tap, g) in g.iter().enumerate() {
                taps[tap * inputs + input] = *g;
            }
        }
        let tap = |row: usize, column: usize| &taps[(3 * row + column) * inputs..][..inputs];
        let mut rows = vec![0.0; 3 * inputs];
        for (down, factors) in KERNEL.iter().enumerate() {
            for (column, sum) in rows.chunks_exact_mut(inputs).enumerate() {
                add_three([0, 1, 2].map(|row| tap(row, column)), factors, sum);
            }
            for (across, factors) in KERNEL.iter().enumerate() {
                let row = (down * SEEN_SIDE + across) * outputs + output;
                // SAFETY: each output is one task's, and each place of it is another row.
                let sum = unsafe { out.slice(row * inputs, inputs) };
                add_three([0, 1, 2].map(|at| &rows[at * inputs..][..inputs]), factors, sum);
            }
        }
    });
}

/// What squares from the row of squares `first` on see, for each place and input.
pub fn see(cpu: &Cpu, window: Window, image: &Tensor, first: usize, seen: &mut Tensor) {
    let ([inputs, height, width], [_, across]) = (window.image, window.squares());
    let n = seen.shape().width();
    let image = image.data::<f32>();
    let out = Shared::new(seen.data_mut::<f32>());
    cpu.each(inputs, &|input| {
        let channel = &image[input * height * width..][..height * width];
        let outside = vec![0.0; width];
        let mut sum = vec![0.0; SIDE * across + 2];
        // Every fourth number of a sum, from each of the first four on.
        let mut fourths = vec![0.0; SIDE * (across + 1)];
        for square in 0..n / across {
            let pixels = |offset: usize| {
                let at = (SIDE * (first + square) + offset).checked_sub(window.corner[0]);
                at.filter(|at| *at < height)
                    .map_or(&outside[..], |at| &channel[at * width..][..width])
            };
            let rows: [&[f32]; SEEN_SIDE] = std::array::from_fn(pixels);
            for (down, factors) in SEEN.iter().enumerate() {
                let left = window.corner[1];
                let inside = width.min(sum.len() - left);
                add_six(rows.map(|row| &row[..inside]), factors, &mut sum[left..][..inside]);
                deal(&sum, &mut fourths);
                for (right, factors) in SEEN.iter().enumerate() {
                    let row = (down * SEEN_SIDE + right) * inputs + input;
                    // SAFETY: each input is one task's, and each place of it is another row.
                    let out = unsafe { out.slice(row * n + square * across, across) };
                    let part = |at: usize| &fourths[at * (across + 1)..][..=across];
                    let [a, b, c, d] = [0, 1, 2, 3].map(part);
                    let columns =
                        [&a[..across], &b[..across], &c[..across], &d[..across], &a[1..], &b[1..]];
                    add_six(columns, factors, out);
                }
            }
        }
    });
}

/// Every fourth number of `sum`, from each of the first four on; what is missing at the end is zero.
fn deal(sum: &[f32], fourths: &mut [f32]) {
    let each = fourths.len() / SIDE;
    let whole = sum.chunks_exact(SIDE);
    let rest = whole.remainder();
    for (index, four) in whole.enumerate() {
        for (at, number) in four.iter().enumerate() {
            fourths[at * each + index] = *number;
        }
    }
    for (at, number) in rest.iter().enumerate() {
        fourths[at * each + each - 1] = *number;
    }
}

simd! {
    /// The sum of three rows, each times its factor.
    fn add_three(rows: [&[f32]; 3], factors: &[f32; 3], sum: &mut [f32]) {
        let n = sum.len();
        let [a, b, c] = rows.map(|row| &row[..n]);
        let [fa, fb, fc] = *factors;
        for t in 0..n {
            sum[t] = fa * a[t] + fb * b[t] + fc * c[t];
        }
    }

    /// The sum of six rows, each times its factor.
    fn add_six(rows: [&[f32]; SEEN_SIDE], factors: &[f32; SEEN_SIDE], sum: &mut [f32]) {
        let n = sum.len();
        let [a, b, c, d, e, f] = rows.map(|row| &row[..n]);
        let [fa, fb, fc, fd, fe, ff] = *factors;
        for t in 0..n {
            sum[t] = (fa * a[t] + fb * b[t]) + (fc * c[t] + fd * d[t]) + (fe * e[t] + ff * f[t]);
        }
    }
}

/// Aᵀ·m·A of the products, with bias and activation, into the result's rows of pixels from the row
/// of squares `first` on.
pub fn finish(
    cpu: &Cpu,
    (sample, first): (usize, usize),
    products: &[Tensor],
    (bias, activation): (Option<&Tensor>, Activation),
    y: &mut Tensor,
) {
    let &[_, outputs, height, width] = y.shape().sizes() else { unreachable!("made by the op") };
    let across = width.div_ceil(SIDE);
    let rows = products[0].shape().width() / across;
    let bias = bias.map(Tensor::data::<f32>);
    let products: Vec<&[f32]> = products.iter().map(Tensor::data::<f32>).collect();
    let plane = height * width;
    let planes = &mut y.data_mut::<f32>()[sample * outputs * plane..][..outputs * plane];
    cpu.samples(planes, plane, |output, plane| {
        let bias = bias.map_or(0.0, |bias| bias[output]);
        let mut four = vec![0.0; SIDE * SIDE * across];
        for row in 0..rows {
            let start = (output * rows + row) * across;
            let of: [&[f32]; PLACES] = std::array::from_fn(|k| &products[k][start..][..across]);
            put_together(&of, bias, &mut four);
            let below = SIDE * (first + row)..height;
            for (pixels, row) in four.chunks_exact_mut(SIDE * across).zip(below) {
                activation.apply(&mut pixels[..width]);
                plane[row * width..][..width].copy_from_slice(&pixels[..width]);
            }
        }
    });
}

/// Aᵀ: four numbers of the result from those at six places.
#[inline(always)]
fn four_of([a, b, c, d, e, f]: [f32; SEEN_SIDE]) -> [f32; SIDE] {
    let (inner, outer) = ((b + c, b - c), (d + e, d - e));
    [
        a + inner.0 + outer.0,
        inner.1 + 2.0 * outer.1,
        inner.0 + 4.0 * outer.0,
        inner.1 + 8.0 * outer.1 + f,
    ]
}

simd! {
    /// Four rows of pixels from a row of squares, one after the other.
    fn put_together(of: &[&[f32]; PLACES], bias: f32, four: &mut [f32]) {
        let n = four.len() / (SIDE * SIDE);
        let of: [&[f32]; PLACES] = std::array::from_fn(|k| &of[k][..n]);
        let (upper, lower) = four.split_at_mut(2 * SIDE * n);
        let ((first, second), (third, fourth)) =
            (upper.split_at_mut(SIDE * n), lower.split_at_mut(SIDE * n));
        for t in 0..n {
            let rows: [[f32; SIDE]; SEEN_SIDE] = std::array::from_fn(|r| {
                four_of(std::array::from_fn(|c| of[SEEN_SIDE * r + c][t]))
            });
            for c in 0..SIDE {
                let [one, two, three, four] = four_of(std::array::from_fn(|r| rows[r][c]));
                first[SIDE * t + c] = one + bias;
                second[SIDE * t + c] = two + bias;
                third[SIDE * t + c] = three + bias;
                fourth[SIDE * t + c] = four + bias;
            }
        }
    }
}
