//! There and back: what squares of two by two pixels see, and what comes of their products.

use super::super::Window;
use super::super::winograd::PLACES;
use crate::Tensor;
use crate::cpu::Cpu;
use crate::cpu::simd::simd;
use crate::ops::Activation;

/// G: what a row or column of a kernel becomes at each of four places.
const KERNEL: [[f32; 3]; 4] = [[1.0, 0.0, 0.0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0.0, 0.0, 1.0]];
/// Bᵀ: at each of four places, one row or column of the image and another one times a factor.
const SEEN: [(usize, usize, f32); 4] = [(0, 2, -1.0), (1, 2, 1.0), (2, 1, -1.0), (1, 3, -1.0)];

/// A row of the kernels, for a place and an output, over all inputs.
pub fn kernels(cpu: &Cpu, weight: &Tensor, kernels: &mut Tensor) {
    let &[_, outputs, inputs] = kernels.shape().sizes() else { unreachable!("made by the op") };
    let weight = weight.data::<f32>();
    cpu.rows(kernels.data_mut::<f32>(), inputs, |first, rows| {
        for (row, out) in (first..).zip(rows.chunks_exact_mut(inputs)) {
            let (place, output) = (row / outputs, row % outputs);
            let (down, across) = (KERNEL[place / 4], KERNEL[place % 4]);
            let weight = weight[output * inputs * 9..][..inputs * 9].chunks_exact(9);
            for (out, g) in out.iter_mut().zip(weight) {
                let of_row = |i: usize| (0..3).map(|j| across[j] * g[3 * i + j]).sum::<f32>();
                *out = (0..3).map(|i| down[i] * of_row(i)).sum();
            }
        }
    });
}

/// What squares from the row of squares `first` on see, for each place and input.
pub fn see(cpu: &Cpu, window: Window, image: &Tensor, first: usize, seen: &mut Tensor) {
    let ([inputs, height, width], [_, across]) = (window.image, window.squares());
    let n = seen.shape().width();
    let image = image.data::<f32>();
    cpu.rows(seen.data_mut::<f32>(), n, |first_row, rows| {
        // Two rows of the image put together, with zeros on either side.
        let mut sum = vec![0.0; 2 * across + 2];
        for (row, out) in (first_row..).zip(rows.chunks_exact_mut(n)) {
            let (place, input) = (row / inputs, row % inputs);
            let channel = &image[input * height * width..][..height * width];
            let (down, right) = (SEEN[place / 4], SEEN[place % 4]);
            for (square, out) in (first..).zip(out.chunks_exact_mut(across)) {
                let pixels = |offset: usize| {
                    let at = (2 * square + offset).checked_sub(window.corner[0])?;
                    (at < height).then(|| &channel[at * width..][..width])
                };
                let rows = [pixels(down.0), pixels(down.1)];
                add_rows(rows, down.2, window.corner[1], &mut sum);
                add_columns(&sum, right, out);
            }
        }
    });
}

/// one + factor · other, shifted right by `left`; a row outside the image is zeros.
fn add_rows([one, other]: [Option<&[f32]>; 2], factor: f32, left: usize, sum: &mut [f32]) {
    let room = sum.len() - left;
    let n = one.or(other).map_or(0, |row| row.len().min(room));
    sum[..left].fill(0.0);
    sum[left + n..].fill(0.0);
    let inside = &mut sum[left..][..n];
    match (one, other) {
        (Some(one), Some(other)) => add_scaled(&one[..n], &other[..n], factor, inside),
        (Some(one), None) => inside.copy_from_slice(&one[..n]),
        (None, Some(other)) => inside.iter_mut().zip(other).for_each(|(to, x)| *to = factor * x),
        (None, None) => {}
    }
}

simd! {
    /// one + factor · other
    fn add_scaled(one: &[f32], other: &[f32], factor: f32, sum: &mut [f32]) {
        for ((sum, one), other) in sum.iter_mut().zip(one).zip(other) {
            *sum = one + factor * other;
        }
    }

    /// Of every second number and its neighbours: one + factor · other.
    fn add_columns(sum: &[f32], right: (usize, usize, f32), out: &mut [f32]) {
        let (one, other, factor) = right;
        let n = out.len();
        let (ones, others) = (&sum[one..][..2 * n - 1], &sum[other..][..2 * n - 1]);
        for (index, out) in out.iter_mut().enumerate() {
            *out = ones[2 * index] + factor * others[2 * index];
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
    let across = width.div_ceil(2);
    let rows = products[0].shape().width() / across;
    let bias = bias.map(Tensor::data::<f32>);
    let products: Vec<&[f32]> = products.iter().map(Tensor::data::<f32>).collect();
    let plane = height * width;
    let planes = &mut y.data_mut::<f32>()[sample * outputs * plane..][..outputs * plane];
    cpu.samples(planes, plane, |output, plane| {
        let bias = bias.map_or(0.0, |bias| bias[output]);
        let mut pair = vec![0.0; 4 * across];
        for row in 0..rows {
            let start = (output * rows + row) * across;
            let of: [&[f32]; PLACES] = std::array::from_fn(|k| &products[k][start..][..across]);
            put_together(&of, bias, &mut pair);
            for (pixels, row) in pair.chunks_exact_mut(2 * across).zip(2 * (first + row)..height) {
                activation.apply(&mut pixels[..width]);
                plane[row * width..][..width].copy_from_slice(&pixels[..width]);
            }
        }
    });
}

simd! {
    /// Two rows of pixels from a row of squares, one after the other.
    fn put_together(of: &[&[f32]; PLACES], bias: f32, pair: &mut [f32]) {
        let n = pair.len() / 4;
        let (upper, lower) = pair.split_at_mut(2 * n);
        let of: [&[f32]; PLACES] = std::array::from_fn(|k| &of[k][..n]);
        for t in 0..n {
            let left = |r: usize| of[4 * r][t] + of[4 * r + 1][t] + of[4 * r + 2][t];
            let right = |r: usize| of[4 * r + 1][t] - of[4 * r + 2][t] - of[4 * r + 3][t];
            upper[2 * t] = left(0) + left(1) + left(2) + bias;
            upper[2 * t + 1] = right(0) + right(1) + right(2) + bias;
            lower[2 * t] = left(1) - left(2) - left(3) + bias;
            lower[2 * t + 1] = right(1) - right(2) - right(3) + bias;
        }
    }
}
