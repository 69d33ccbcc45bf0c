//! Sums over more than a row: cut into blocks by the amount of work alone, which the threads share,
//! and added up in the blocks' order.

use std::ops::Range;

use rayon::prelude::*;

use super::CpuBackend;
use super::rows::{LANES, store};
use super::simd::simd;
use crate::Tensor;
use crate::dtype::Real;

/// A sum is made of this many partial sums at most. Chosen: tasks enough for any number of threads,
/// and few enough to hold.
const MOST_BLOCKS: usize = 64;

/// Rows of a partial sum at least, so that adding the partial sums up costs little beside them.
const LEAST_BLOCK_ROWS: usize = 16;

/// Elements of a partial sum at least, for the same reason.
const LEAST_BLOCK_ELEMENTS: usize = 1 << 14;

/// How many partial sums [`CpuBackend::sum_rows`] makes for this many rows.
pub(crate) fn n_row_blocks(rows: usize) -> usize {
    rows.div_ceil(block_rows(rows))
}

fn block_rows(rows: usize) -> usize {
    rows.div_ceil(MOST_BLOCKS).max(LEAST_BLOCK_ROWS)
}

impl CpuBackend {
    /// A vector of sums over all rows. `work` adds a block of rows to the vector it is given, which
    /// is one of the [`n_row_blocks`] of `partial`; these are then added up in their order.
    pub fn sum_rows(
        &self,
        rows: usize,
        partial: &mut Tensor,
        sums: &mut Tensor,
        add: bool,
        work: impl Fn(Range<usize>, &mut [f32]) + Sync,
    ) {
        const STRIP: usize = 64;
        let (width, block_rows) = (sums.shape().elements(), block_rows(rows));
        let partial = partial.data_mut::<f32>();
        self.par_chunks(partial, width, |block, sums| {
            let first = block * block_rows;
            sums.fill(0.0);
            work(first..rows.min(first + block_rows), sums);
        });
        self.par_chunks(sums.data_mut::<f32>(), STRIP, |strip, sums| {
            let from = strip * STRIP;
            let mut totals = [0.0; STRIP];
            for block in partial.chunks_exact(width) {
                for (total, number) in totals.iter_mut().zip(&block[from..from + sums.len()]) {
                    *total += number;
                }
            }
            store(&totals, sums, add);
        });
    }

    /// The sum of what `work` gives for blocks of rows, which are cut by the number of rows alone
    /// and added up in their order.
    pub fn total(&self, rows: usize, work: impl Fn(Range<usize>) -> f64 + Sync) -> f64 {
        let block = rows.div_ceil(MOST_BLOCKS);
        let mut sums = [0.0; MOST_BLOCKS];
        self.par_chunks(&mut sums, 1, |index, sum| {
            let first = (index * block).min(rows);
            sum[0] = work(first..(first + block).min(rows));
        });
        sums.iter().sum()
    }
}

/// Σ (aᵢ - center) and Σ (aᵢ - center)², in f64, in blocks that depend on the length alone. To be
/// called on the pool, whose threads share the blocks.
pub(crate) fn moments<T: Real>(a: &[T], center: f64) -> [f64; 2] {
    let block = a.len().div_ceil(MOST_BLOCKS).max(LEAST_BLOCK_ELEMENTS);
    let mut sums = [[0.0; 2]; MOST_BLOCKS];
    a.par_chunks(block)
        .zip(&mut sums[..])
        .for_each(|(block, sums)| *sums = block_moments(block, center));
    sums.iter().fold([0.0; 2], |total, sums| [total[0] + sums[0], total[1] + sums[1]])
}

simd! {
    /// Σ aᵢ², in f64. Not a part of [`moments`]: of its loop the compiler makes no vectors.
    pub(crate) fn squares(a: &[f32]) -> f64 {
        let (blocks, rest) = a.as_chunks::<LANES>();
        let mut lanes = [0.0; LANES];
        for block in blocks {
            for (lane, number) in lanes.iter_mut().zip(block) {
                *lane += f64::from(*number) * f64::from(*number);
            }
        }
        let square = |number: &f32| f64::from(*number) * f64::from(*number);
        lanes.iter().sum::<f64>() + rest.iter().map(square).sum::<f64>()
    }

    fn block_moments<T: Real>(a: &[T], center: f64) -> [f64; 2] {
        let (blocks, rest) = a.as_chunks::<LANES>();
        let mut lanes = [[0.0; LANES]; 2];
        for block in blocks {
            for lane in 0..LANES {
                let distance = f64::from(block[lane].to_f32()) - center;
                lanes[0][lane] += distance;
                lanes[1][lane] += distance * distance;
            }
        }
        let mut sums = lanes.map(|lanes| lanes.iter().sum::<f64>());
        for number in rest {
            let distance = f64::from(number.to_f32()) - center;
            sums[0] += distance;
            sums[1] += distance * distance;
        }
        sums
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Dtype;
    use crate::device::Backend;
    use crate::random::TestRng;

    #[test]
    fn sums_over_rows_take_each_row_once() {
        let device = crate::Device::cpu(2, 1 << 24).unwrap();
        let Backend::Cpu(cpu) = device.backend() else { unreachable!("a device with data") };
        for (rows, width) in [(0, 3), (1, 1), (16, 3), (17, 65), (1025, 130), (5000, 2), (4, 0)] {
            assert!(n_row_blocks(rows) <= MOST_BLOCKS, "{rows}");
            let mut partial = device.alloc([n_row_blocks(rows), width], Dtype::F32).unwrap();
            let mut sums = device.upload([width], &vec![0.5f32; width]).unwrap();
            for add in [true, false] {
                cpu.sum_rows(rows, &mut partial, &mut sums, add, |block, sums| {
                    for row in block {
                        sums.iter_mut().zip(row..).for_each(|(sum, number)| *sum += number as f32);
                    }
                });
                let before = if add { 0.5 } else { 0.0 };
                let all: usize = (0..rows).sum();
                let exact = |column: usize| (all + rows * column) as f32 + before;
                assert_eq!(sums.to_vec::<f32>(), (0..width).map(exact).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn a_total_has_every_row_once() {
        let cpu = CpuBackend::new(2, 1 << 12, false).unwrap();
        for rows in [0, 1, 63, 64, 65, 1000] {
            let total = cpu.total(rows, |rows| rows.map(|row| (row + 1) as f64).sum());
            assert_eq!(total, (rows * (rows + 1) / 2) as f64, "{rows}");
        }
    }

    #[test]
    fn moments_of_every_length_are_right() {
        let mut random = TestRng::new(2);
        for length in
            (0..40).chain([LEAST_BLOCK_ELEMENTS + 3, MOST_BLOCKS * LEAST_BLOCK_ELEMENTS + 5])
        {
            // Far from zero, where squares alone would leave no digits for the variance.
            let a: Vec<f32> = (0..length).map(|_| 1e6 + random.normal()).collect();
            let moments = moments(&a, 1e6);
            let exact = a.iter().fold([0.0; 2], |sums, x| {
                let distance = f64::from(*x) - 1e6;
                [sums[0] + distance, sums[1] + distance * distance]
            });
            for (ours, exact) in moments.into_iter().zip(exact) {
                assert!((ours - exact).abs() <= 1e-12 * length as f64, "{length}: {ours} {exact}");
            }
            let (ours, exact) = (squares(&a), a.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>());
            // The plain sum in order is the less exact of the two.
            assert!((ours - exact).abs() <= 1e-11 * exact, "{length}: {ours} {exact}");
        }
    }
}
