//! The transforms of Winograd convolution: of kernels, of input tiles, and back to the output. Kernels and
//! channels are taken one at a time and written to all 36 places of a tile at once: terms that places share
//! are computed once.
#![allow(unsafe_code)]

use super::super::ConvWindow;
use super::super::winograd::{SEEN_SIDE, SIDE};
use crate::Tensor;
use crate::cpu::simd::simd;
use crate::cpu::{CpuBackend, SharedSlice};
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
/// The kernels of all outputs at all places.
pub fn kernels(cpu: &CpuBackend, weight: &Tensor, kernels: &mut Tensor) {
    let &[_, outputs, inputs] = kernels.shape().sizes() else { unreachable!("made by the op") };
    let weight = weight.data::<f32>();
    let out = SharedSlice::new(kernels.data_mut::<f32>());
    cpu.par_for(outputs, &|output| {
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

/// Input tiles, for each place and input channel, of which a frame of the kernel has its own: those from the row of
/// squares `first` on, where the rows of one frame follow those of the one before.
pub fn see(cpu: &CpuBackend, window: ConvWindow, clips: &Tensor, first: usize, seen: &mut Tensor) {
    let [frames, height, width] = window.clip;
    let [all_down, across] = window.squares();
    let (n, n_inputs) = (seen.shape().width(), seen.shape().sizes()[1]);
    let clips = clips.data::<f32>();
    let out = SharedSlice::new(seen.data_mut::<f32>());
    cpu.par_for(n_inputs, &|input| {
        let (channel, tap_frame) = (input / window.kernel[0], input % window.kernel[0]);
        let outside = vec![0.0; width];
        let left = window.corner[2];
        let inside = width.min(SIDE * across + 2 - left);
        let mut sums: [Vec<f32>; SEEN_SIDE] = std::array::from_fn(|_| vec![0.0; SIDE * across + 2]);
        // Every fourth number of a sum, from each of the first four on.
        let mut fourths: [Vec<f32>; SIDE] = std::array::from_fn(|_| vec![0.0; across + 1]);
        for square in 0..n / across {
            let (frame, above) = ((first + square) / all_down, (first + square) % all_down);
            let (sample, frame) = (frame / window.result[0], frame % window.result[0]);
            let frame = window.source(0, frame * window.stride[0] + tap_frame);
            let plane = (sample * window.inputs + channel) * frames;
            let pixels = |offset: usize| {
                let row = frame.zip(window.source(1, SIDE * above + offset));
                row.map_or(&outside[..inside], |(frame, row)| {
                    &clips[((plane + frame) * height + row) * width..][..inside]
                })
            };
            let rows: [&[f32]; SEEN_SIDE] = std::array::from_fn(pixels);
            six_of(rows, sums.each_mut().map(|sum| &mut sum[left..][..inside]));
            for (down, sum) in sums.iter_mut().enumerate() {
                if window.replicates {
                    let (end, edges) = (left + inside, [sum[left], sum[left + inside - 1]]);
                    sum[..left].fill(edges[0]);
                    sum[end..].fill(edges[1]);
                }
                deal(sum, &mut fourths);
                let [a, b, c, d] = fourths.each_ref().map(|part| &part[..across]);
                let columns = [a, b, c, d, &fourths[0][1..], &fourths[1][1..]];
                let places = std::array::from_fn(|right| {
                    let row = (down * SEEN_SIDE + right) * n_inputs + input;
                    // SAFETY: each input is one task's, and each place of it is another row.
                    unsafe { out.slice(row * n + square * across, across) }
                });
                six_of(columns, places);
            }
        }
    });
}

simd! {
    /// Every fourth number of `sum`, from each of the first four on: two more than fours of them.
    fn deal(sum: &[f32], fourths: &mut [Vec<f32>; SIDE]) {
        let n = sum.len() / SIDE;
        let [a, b, c, d] = fourths.each_mut().map(|part| &mut part[..=n]);
        let whole = &sum[..SIDE * n];
        for t in 0..n {
            a[t] = whole[SIDE * t];
            b[t] = whole[SIDE * t + 1];
            c[t] = whole[SIDE * t + 2];
            d[t] = whole[SIDE * t + 3];
        }
        (a[n], b[n]) = (sum[SIDE * n], sum[SIDE * n + 1]);
    }

    /// Bᵀ: what six rows or columns of an image become at each of six places.
    fn six_of(rows: [&[f32]; SEEN_SIDE], places: [&mut [f32]; SEEN_SIDE]) {
        let n = rows[0].len();
        let [a, b, c, d, e, f] = rows.map(|row| &row[..n]);
        let [first, second, third, fourth, fifth, sixth] = places.map(|place| &mut place[..n]);
        for t in 0..n {
            let (near, far) = (e[t] - 4.0 * c[t], d[t] - 4.0 * b[t]);
            let (inner, outer) = (e[t] - c[t], 2.0 * (d[t] - b[t]));
            first[t] = 4.0 * a[t] - 5.0 * c[t] + e[t];
            second[t] = near + far;
            third[t] = near - far;
            fourth[t] = inner + outer;
            fifth[t] = inner - outer;
            sixth[t] = 4.0 * b[t] - 5.0 * d[t] + f[t];
        }
    }

    /// The sum of three rows, each times its factor.
    fn add_three(rows: [&[f32]; 3], factors: &[f32; 3], sum: &mut [f32]) {
        let n = sum.len();
        let [a, b, c] = rows.map(|row| &row[..n]);
        let [fa, fb, fc] = *factors;
        for t in 0..n {
            sum[t] = fa * a[t] + fb * b[t] + fc * c[t];
        }
    }
}

/// Aᵀ·m·A of the multiplied tiles m, with bias and activation, into the result's rows of pixels from the row
/// of squares `first` on.
pub fn finish(
    cpu: &CpuBackend,
    first: usize,
    transformed: &[Tensor],
    bias: Option<&Tensor>,
    activation: Activation,
    y: &mut Tensor,
) {
    let &[_, outputs, frames, height, width] = y.shape().sizes() else {
        unreachable!("made by the op")
    };
    let [all_down, across] = [height, width].map(|side| side.div_ceil(SIDE));
    let rows = transformed[0].shape().width() / across;
    let bias = bias.map(Tensor::data::<f32>);
    let transformed: Vec<&[f32]> = transformed.iter().map(Tensor::data::<f32>).collect();
    let y = SharedSlice::new(y.data_mut::<f32>());
    cpu.par_for(outputs, &|output| {
        let bias = bias.map_or(0.0, |bias| bias[output]);
        let mut four: [Vec<f32>; SIDE] = std::array::from_fn(|_| vec![0.0; SEEN_SIDE * across]);
        let mut pixels = vec![0.0; SIDE * across];
        for row in 0..rows {
            let at = |place: usize| &transformed[place][(output * rows + row) * across..][..across];
            for right in 0..SEEN_SIDE {
                let column = std::array::from_fn(|down| at(down * SEEN_SIDE + right));
                four_rows(column, four.each_mut().map(|row| &mut row[right * across..][..across]));
            }
            let (frame, above) = ((first + row) / all_down, (first + row) % all_down);
            let (sample, frame) = (frame / frames, frame % frames);
            for (columns, row) in four.iter().zip(SIDE * above..height) {
                let columns = std::array::from_fn(|right| &columns[right * across..][..across]);
                four_columns(columns, bias, &mut pixels);
                activation.apply(&mut pixels[..width]);
                let plane = (sample * outputs + output) * frames + frame;
                let start = (plane * height + row) * width;
                // SAFETY: each output is one task's, and each row of its images another piece.
                unsafe { y.slice(start, width) }.copy_from_slice(&pixels[..width]);
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
    /// Four rows from six, number by number.
    fn four_rows(rows: [&[f32]; SEEN_SIDE], four: [&mut [f32]; SIDE]) {
        let n = rows[0].len();
        let [a, b, c, d, e, f] = rows.map(|row| &row[..n]);
        let [first, second, third, fourth] = four.map(|row| &mut row[..n]);
        for t in 0..n {
            [first[t], second[t], third[t], fourth[t]] =
                four_of([a[t], b[t], c[t], d[t], e[t], f[t]]);
        }
    }

    /// A row of pixels from six columns of each square.
    fn four_columns(columns: [&[f32]; SEEN_SIDE], bias: f32, pixels: &mut [f32]) {
        let n = columns[0].len();
        let [a, b, c, d, e, f] = columns.map(|column| &column[..n]);
        let pixels = &mut pixels[..SIDE * n];
        for t in 0..n {
            let [one, two, three, four] = four_of([a[t], b[t], c[t], d[t], e[t], f[t]]);
            pixels[SIDE * t] = one + bias;
            pixels[SIDE * t + 1] = two + bias;
            pixels[SIDE * t + 2] = three + bias;
            pixels[SIDE * t + 3] = four + bias;
        }
    }
}
