//! Values into the "K" blocks of 256, whose sub-blocks have scales that are small integers too; `blocks` draws them.
//!
//! Each sub-block's scale is searched: some near the plain one are tried, and the one of the least weighted squared
//! error wins. Steps and weights are llama.cpp's (`make_qkx2_quants` and `make_qx_quants` of `ggml-quants.c`, without an
//! importance matrix), and so is the order of sums within a sub-block: results are equal bit for bit. What differs is
//! that eight sub-blocks go through it side by side, one in each lane of a vector register.
//!
//! Left out on purpose: `Q2_K` and `Q3_K`, which are poor without an importance matrix.

use std::array::from_fn;

use half::f16;

/// A number of each of eight sub-blocks.
type Lanes = [f32; 8];

/// How the scales of sub-blocks with an offset are searched.
struct ScaleSearch {
    /// Largest integer.
    most: f32,
    /// What is added to it in the first step; each further step adds a tenth.
    first: f32,
    n_steps: u8,
}

/// Taken: `quantize_row_q4_K_ref` and `quantize_row_q5_K_ref`.
const FOUR_BITS: ScaleSearch = ScaleSearch { most: 15.0, first: -1.0, n_steps: 21 };
const FIVE_BITS: ScaleSearch = ScaleSearch { most: 31.0, first: -0.5, n_steps: 16 };

/// Six bits of a scale or an offset.
const SUB_SCALE_MOST: f32 = 63.0;
/// Integers of `Q6_K` are from −32 to 31.
const Q6_K_LOWEST: f32 = -32.0;
/// Below it a sub-block of `Q6_K` is zero. Taken: `GROUP_MAX_EPS`.
const Q6_K_ZERO: f32 = 1e-15;

pub(super) fn q4_k(numbers: &[f32; 256]) -> [u8; 144] {
    let (header, integers) = with_offsets(numbers, &FOUR_BITS);
    let mut block = [0; 144];
    block[..16].copy_from_slice(&header);
    put_nibbles(&integers, &mut block[16..]);
    block
}

pub(super) fn q5_k(numbers: &[f32; 256]) -> [u8; 176] {
    let (header, integers) = with_offsets(numbers, &FIVE_BITS);
    let mut block = [0; 176];
    block[..16].copy_from_slice(&header);
    for (at, integer) in integers.iter().enumerate() {
        block[16 + at % 32] |= (integer >> 4) << (at / 32);
    }
    put_nibbles(&integers.map(|integer| integer & 15), &mut block[48..]);
    block
}

/// The 16 bytes that begin both kinds of block, and all integers.
fn with_offsets(numbers: &[f32; 256], search: &ScaleSearch) -> ([u8; 16], [u8; 256]) {
    let (scales, offsets) = search.run(&side_by_side(numbers));
    let mut header = [0; 16];
    let (scale, sub_scales) = six_bits(&scales);
    let (offset, sub_offsets) = six_bits(&offsets);
    header[..2].copy_from_slice(&scale.to_le_bytes());
    header[2..4].copy_from_slice(&offset.to_le_bytes());
    put_sub_scales(sub_scales, sub_offsets, &mut header[4..]);

    let mut integers = [0; 256];
    let (rows, _) = integers.as_chunks_mut::<32>();
    for (at, (out, numbers)) in rows.iter_mut().zip(numbers.as_chunks::<32>().0).enumerate() {
        let scale = scale.to_f32() * f32::from(sub_scales[at]);
        let offset = offset.to_f32() * f32::from(sub_offsets[at]);
        // Without a scale all are the offset, whatever the integers.
        if scale != 0.0 {
            *out = numbers.map(|number| nearest((number + offset) / scale, 0.0, search.most) as u8);
        }
    }
    (header, integers)
}

impl ScaleSearch {
    /// The best scale and offset of each sub-block: value = scale × integer − offset.
    fn run(&self, numbers: &[Lanes; 32]) -> (Lanes, Lanes) {
        let all = SubBlocks::of(numbers, self.most);
        let range: Lanes = from_fn(|lane| all.most[lane] - all.least[lane]);
        let inverse = range.map(|range| self.most / range);
        let mut best = all.plain(&inverse);
        for step in 0..self.n_steps {
            let stretched = self.first + 0.1 * f32::from(step) + self.most;
            // As in llama.cpp, a better least value is where the next steps begin.
            let inverse = from_fn(|lane| stretched / (all.most[lane] - best.least[lane]));
            let fit = all.fit(&inverse, &best.least);
            for lane in 0..8 {
                if fit.error[lane] < best.error[lane] {
                    best.error[lane] = fit.error[lane];
                    best.scale[lane] = fit.scale[lane];
                    best.least[lane] = fit.least[lane];
                }
            }
        }
        // All numbers the same: the offset is that number.
        let scale = from_fn(|lane| if range[lane] == 0.0 { 0.0 } else { best.scale[lane] });
        let least =
            from_fn(|lane| if range[lane] == 0.0 { -all.least[lane] } else { -best.least[lane] });
        (scale, least)
    }
}

/// Eight sub-blocks and their sums.
struct SubBlocks<'a> {
    numbers: &'a [Lanes; 32],
    /// Numbers far from zero matter more.
    weights: [Lanes; 32],
    sum_w: Lanes,
    sum_x: Lanes,
    /// At most zero.
    least: Lanes,
    most: Lanes,
    /// The largest integer.
    most_integer: f32,
}

/// A scale of each sub-block, its least value, and their error.
struct ScaleFit {
    scale: Lanes,
    least: Lanes,
    error: Lanes,
}

impl<'a> SubBlocks<'a> {
    fn of(numbers: &'a [Lanes; 32], most_integer: f32) -> Self {
        let weights = weights(numbers);
        let [mut least, mut sum_w, mut sum_x] = [[0.0; 8]; 3];
        let mut most = numbers[0];
        for (number, weight) in numbers.iter().zip(&weights) {
            for lane in 0..8 {
                let (x, w) = (number[lane], weight[lane]);
                least[lane] = if x < least[lane] { x } else { least[lane] };
                most[lane] = if x > most[lane] { x } else { most[lane] };
                sum_w[lane] += w;
                sum_x[lane] += w * x;
            }
        }
        Self { numbers, weights, sum_w, sum_x, least, most, most_integer }
    }

    /// Integers that are spread evenly from the least to the most.
    fn plain(&self, inverse: &Lanes) -> ScaleFit {
        let (scale, least) = (inverse.map(|inverse| 1.0 / inverse), self.least);
        let mut error = [0.0; 8];
        for (number, weight) in self.numbers.iter().zip(&self.weights) {
            for lane in 0..8 {
                let (x, least) = (number[lane], least[lane]);
                let integer = nearest(inverse[lane] * (x - least), 0.0, self.most_integer);
                let apart = scale[lane] * integer + least - x;
                error[lane] += weight[lane] * (apart * apart);
            }
        }
        ScaleFit { scale, least, error }
    }

    /// Rounds by a scale, then finds the scale and the least value that suit these integers best, by least squares. There
    /// is none where all integers are the same: its error is infinite.
    fn fit(&self, inverse: &Lanes, least: &Lanes) -> ScaleFit {
        let mut integers = [[0.0; 8]; 32];
        let [mut sum_l, mut sum_l2, mut sum_xl] = [[0.0; 8]; 3];
        for ((number, weight), integers) in
            self.numbers.iter().zip(&self.weights).zip(&mut integers)
        {
            for lane in 0..8 {
                let (x, w) = (number[lane], weight[lane]);
                let l = nearest(inverse[lane] * (x - least[lane]), 0.0, self.most_integer);
                integers[lane] = l;
                sum_l[lane] += w * l;
                sum_l2[lane] += w * l * l;
                sum_xl[lane] += w * l * x;
            }
        }
        let [mut scale, mut least, mut determinant] = [[0.0; 8]; 3];
        for lane in 0..8 {
            let (w, x, l) = (self.sum_w[lane], self.sum_x[lane], sum_l[lane]);
            let (l2, xl) = (sum_l2[lane], sum_xl[lane]);
            determinant[lane] = w * l2 - l * l;
            scale[lane] = (w * xl - x * l) / determinant[lane];
            least[lane] = (l2 * x - l * xl) / determinant[lane];
            if least[lane] > 0.0 {
                (scale[lane], least[lane]) = (xl / l2, 0.0);
            }
        }
        let error = self.error(&integers, &scale, &least);
        let is_one = |lane: usize| determinant[lane] > 0.0;
        let error = from_fn(|lane| if is_one(lane) { error[lane] } else { f32::INFINITY });
        ScaleFit { scale, least, error }
    }

    fn error(&self, integers: &[Lanes; 32], scale: &Lanes, least: &Lanes) -> Lanes {
        let mut error = [0.0; 8];
        for ((number, weight), integer) in self.numbers.iter().zip(&self.weights).zip(integers) {
            for lane in 0..8 {
                let apart = scale[lane] * integer[lane] + least[lane] - number[lane];
                error[lane] += weight[lane] * (apart * apart);
            }
        }
        error
    }
}

fn weights(numbers: &[Lanes; 32]) -> [Lanes; 32] {
    let mut squares = [0.0; 8];
    for number in numbers {
        for lane in 0..8 {
            squares[lane] += number[lane] * number[lane];
        }
    }
    let average = squares.map(|sum: f32| (sum / 32.0).sqrt());
    numbers.map(|number| from_fn(|lane| average[lane] + number[lane].abs()))
}

pub(super) fn q6_k(numbers: &[f32; 256]) -> [u8; 210] {
    let (halves, _) = numbers.as_chunks::<128>();
    let scales = [&halves[0], &halves[1]].map(|half| signed_scales(&side_by_side(half)));
    let scales = scales.as_flattened();
    let larger = |most: f32, scale: &f32| if scale.abs() > most.abs() { *scale } else { most };
    let most = scales.iter().fold(0.0, larger);
    let mut block = [0; 210];
    if most.abs() < Q6_K_ZERO {
        return block;
    }
    // The scale of largest magnitude becomes −128, so that the side it is on has one integer more.
    let inverse = -128.0 / most;
    let scale = f16::from_f32(1.0 / inverse);
    block[208..].copy_from_slice(&scale.to_le_bytes());
    let mut integers = [0; 256];
    let (rows, _) = integers.as_chunks_mut::<16>();
    for (at, (out, numbers)) in rows.iter_mut().zip(numbers.as_chunks::<16>().0).enumerate() {
        let sub_scale = nearest(inverse * scales[at], -128.0, 127.0) as i8;
        block[192 + at] = sub_scale.cast_unsigned();
        let scale = scale.to_f32() * f32::from(sub_scale);
        // Without a scale all are zero, whatever the integers; 32 stands for 0.
        *out = if scale == 0.0 { [32; 16] } else { numbers.map(|number| six_bit(number / scale)) };
    }
    put_six_bits(&integers, &mut block[..192]);
    block
}

fn six_bit(number: f32) -> u8 {
    (nearest(number, Q6_K_LOWEST, -Q6_K_LOWEST - 1.0) - Q6_K_LOWEST) as u8
}

/// The best scale of each sub-block without an offset: value = scale × integer. Errors are weighted by the squares of
/// the numbers.
fn signed_scales(numbers: &[Lanes; 16]) -> Lanes {
    let mut most: Lanes = [0.0; 8];
    for number in numbers {
        for lane in 0..8 {
            let is_larger = number[lane].abs() > most[lane].abs();
            most[lane] = if is_larger { number[lane] } else { most[lane] };
        }
    }
    let inverse = most.map(|most| Q6_K_LOWEST / most);
    let (sum_lx, sum_l2) = signed_sums(numbers, &inverse);
    let mut scale: Lanes =
        from_fn(|lane| if sum_l2[lane] == 0.0 { 0.0 } else { sum_lx[lane] / sum_l2[lane] });
    let mut best: Lanes = from_fn(|lane| scale[lane] * sum_lx[lane]);
    for step in (-9_i8..=9).filter(|step| *step != 0) {
        let stretched = -(-Q6_K_LOWEST + 0.1 * f32::from(step));
        let inverse = most.map(|most| stretched / most);
        let (sum_lx, sum_l2) = signed_sums(numbers, &inverse);
        for lane in 0..8 {
            let (lx, l2) = (sum_lx[lane], sum_l2[lane]);
            if l2 > 0.0 && lx * lx > best[lane] * l2 {
                scale[lane] = lx / l2;
                best[lane] = scale[lane] * lx;
            }
        }
    }
    from_fn(|lane| if most[lane].abs() < Q6_K_ZERO { 0.0 } else { scale[lane] })
}

/// Weighted sums of integer times number, and of the integers' squares.
fn signed_sums(numbers: &[Lanes; 16], inverse: &Lanes) -> (Lanes, Lanes) {
    let [mut sum_lx, mut sum_l2] = [[0.0; 8]; 2];
    for number in numbers {
        for lane in 0..8 {
            let x = number[lane];
            let (w, l) = (x * x, nearest(inverse[lane] * x, Q6_K_LOWEST, -Q6_K_LOWEST - 1.0));
            sum_lx[lane] += w * x * l;
            sum_l2[lane] += w * l * l;
        }
    }
    (sum_lx, sum_l2)
}

/// Number *i* of each of eight sub-blocks.
fn side_by_side<const N: usize>(numbers: &[f32]) -> [Lanes; N] {
    from_fn(|at| from_fn(|lane| numbers[lane * N + at]))
}

/// The nearest integer, ties to even, within bounds. Without a function call or a branch, so that it becomes vector
/// code: adding 1.5 × 2^23 leaves no bits for a fraction.
fn nearest(number: f32, low: f32, high: f32) -> f32 {
    const NO_FRACTION: f32 = 12_582_912.0;
    let rounded = (number + NO_FRACTION) - NO_FRACTION;
    let rounded = if rounded < low { low } else { rounded };
    if rounded > high { high } else { rounded }
}

/// The common scale of eight numbers, and each as a 6-bit multiple of it.
fn six_bits(numbers: &Lanes) -> (f16, [u8; 8]) {
    let most = numbers.iter().fold(0.0, |most: f32, number| most.max(*number));
    let inverse = if most > 0.0 { SUB_SCALE_MOST / most } else { 0.0 };
    let integers = numbers.map(|number| nearest(inverse * number, 0.0, SUB_SCALE_MOST) as u8);
    (f16::from_f32(most / SUB_SCALE_MOST), integers)
}

/// Eight scales and eight offsets in twelve bytes, as `blocks::sub_block` draws them.
fn put_sub_scales(scales: [u8; 8], offsets: [u8; 8], out: &mut [u8]) {
    for at in 0..4 {
        let (scale, offset) = (scales[at + 4], offsets[at + 4]);
        out[at] = scales[at] | scale >> 4 << 6;
        out[at + 4] = offsets[at] | offset >> 4 << 6;
        out[at + 8] = scale & 15 | (offset & 15) << 4;
    }
}

/// Two neighbouring runs of 32 share bytes: the low halves belong to the first.
fn put_nibbles(integers: &[u8; 256], out: &mut [u8]) {
    for (pair, out) in integers.as_chunks::<64>().0.iter().zip(out.as_chunks_mut::<32>().0) {
        *out = from_fn(|at| pair[at] | pair[at + 32] << 4);
    }
}

/// `128 bytes of two lower 4 bits | 64 bytes of four upper 2 bits`; each half of the block has its own half of both, in
/// four runs of 32.
fn put_six_bits(integers: &[u8; 256], out: &mut [u8]) {
    let (lower, upper) = out.split_at_mut(128);
    for (half, integers) in integers.as_chunks::<128>().0.iter().enumerate() {
        for at in 0..32 {
            let runs: [u8; 4] = from_fn(|run| integers[run * 32 + at]);
            lower[half * 64 + at] = runs[0] & 15 | runs[2] << 4;
            lower[half * 64 + 32 + at] = runs[1] & 15 | runs[3] << 4;
            upper[half * 32 + at] =
                runs[0] >> 4 | runs[1] >> 4 << 2 | runs[2] >> 4 << 4 | runs[3] >> 4 << 6;
        }
    }
}
