//! Loops over rows: how they are shared among threads, and the few sums and copies that every op
//! over rows is made of. Sums run in sixteen lanes, so their order depends on the length alone.
#![allow(unsafe_code)]

use super::math::exp;
use super::simd::simd;
use super::{CpuBackend, SharedSlice};
use crate::Tensor;
use crate::dtype::Real;

/// Elements per task: enough work to outweigh handing it out, few enough to stay in the cache.
/// Chosen; a task of this size takes a few microseconds. In tests small shapes must reach a second
/// task too.
pub(crate) const GRAIN: usize = if cfg!(test) { 1 << 5 } else { 1 << 14 };

impl CpuBackend {
    /// Calls `work` for pieces of `out` that hold whole rows, with the index of their first row.
    pub fn par_rows<T: Send>(
        &self,
        out: &mut [T],
        width: usize,
        work: impl Fn(usize, &mut [T]) + Sync,
    ) {
        let rows = (GRAIN / width.max(1)).max(1);
        self.par_chunks(out, rows * width, |index, piece| work(index * rows, piece));
    }

    /// Calls `work` for every `width` numbers of `out` as a task of their own, with its index. As
    /// rayon's `par_chunks_mut`, which would compile the whole of its machinery anew for every
    /// kernel; this compiles only the kernel.
    pub fn par_chunks<T: Send>(
        &self,
        out: &mut [T],
        width: usize,
        work: impl Fn(usize, &mut [T]) + Sync,
    ) {
        let (all, length) = (out.len(), width.max(1));
        let out = SharedSlice::new(out);
        self.par_for(all.div_ceil(length), &|index| {
            let from = index * length;
            // SAFETY: pieces of different tasks do not overlap, and each index is a task once.
            let piece = unsafe { out.slice(from, length.min(all - from)) };
            work(index, piece);
        });
    }
}

/// One part of the rows of a matrix.
#[derive(Clone, Copy)]
pub(crate) struct RowChunk<'a, T> {
    data: &'a [T],
    all: usize,
    from: usize,
    width: usize,
}

impl<'a, T> RowChunk<'a, T> {
    /// The `index`-th part of `width` numbers of each row of `tensor`, whose data this is.
    pub fn of(data: &'a [T], tensor: &Tensor, index: usize, width: usize) -> Self {
        Self { data, all: tensor.shape().width(), from: index * width, width }
    }

    #[inline(always)]
    pub fn row(&self, row: usize) -> &'a [T] {
        &self.data[row * self.all + self.from..][..self.width]
    }
}

/// Sums that run side by side within one.
pub(crate) const LANES: usize = 16;

/// Σ f(aᵢ)
#[inline(always)]
pub(crate) fn sum_by(a: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    let (blocks, rest) = a.as_chunks::<LANES>();
    let mut lanes = [0.0; LANES];
    for block in blocks {
        for lane in 0..LANES {
            lanes[lane] += f(block[lane]);
        }
    }
    let mut sum = lanes.iter().sum();
    for number in rest {
        sum += f(*number);
    }
    sum
}

simd! {
    /// Σ aᵢ
    pub(crate) fn sum(a: &[f32]) -> f32 {
        sum_by(a, |x| x)
    }

    /// Σ (aᵢ - center)²
    pub(crate) fn sum_squares(a: &[f32], center: f32) -> f32 {
        sum_by(a, |x| (x - center) * (x - center))
    }

    /// Σ aᵢ·bᵢ
    pub(crate) fn dot<T: Real>(a: &[T], b: &[T]) -> f32 {
        let (a_blocks, a_rest) = a.as_chunks::<LANES>();
        let (b_blocks, b_rest) = b.as_chunks::<LANES>();
        let mut lanes = [0.0; LANES];
        for (a, b) in a_blocks.iter().zip(b_blocks) {
            for lane in 0..LANES {
                lanes[lane] += a[lane].to_f32() * b[lane].to_f32();
            }
        }
        let mut sum: f32 = lanes.iter().sum();
        for (a, b) in a_rest.iter().zip(b_rest) {
            sum += a.to_f32() * b.to_f32();
        }
        sum
    }

    /// The largest, or NaN if there is one; minus infinity of nothing.
    pub(crate) fn max(a: &[f32]) -> f32 {
        let larger = |x: f32, y: f32| if x > y || x.is_nan() { x } else { y };
        let (blocks, rest) = a.as_chunks::<LANES>();
        let mut lanes = [f32::NEG_INFINITY; LANES];
        for block in blocks {
            for lane in 0..LANES {
                lanes[lane] = larger(lanes[lane], block[lane]);
            }
        }
        lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |most, x| larger(most, *x))
    }

    /// Replaces every number x by e^(scale·x - shift); returns their sum.
    pub(crate) fn exp_sum(a: &mut [f32], scale: f32, shift: f32) -> f32 {
        for number in a.iter_mut() {
            *number = exp(scale * *number - shift);
        }
        sum_by(a, |x| x)
    }

    /// Σ e^(aᵢ - shift)
    pub(crate) fn sum_exp(a: &[f32], shift: f32) -> f32 {
        sum_by(a, |x| exp(x - shift))
    }

    /// aᵢ ← aᵢ·factor
    pub(crate) fn multiply(a: &mut [f32], factor: f32) {
        for number in a {
            *number *= factor;
        }
    }

    /// Numbers of any real dtype as f32.
    pub(crate) fn load<T: Real>(from: &[T], to: &mut [f32]) {
        T::widen(&from[..to.len().min(from.len())], to);
    }

    /// Rounds f32 to any real dtype; adds to what is there if asked.
    pub(crate) fn store<T: Real>(from: &[f32], to: &mut [T], add: bool) {
        if add {
            for (to, from) in to.iter_mut().zip(from) {
                *to = T::from_f32(to.to_f32() + from);
            }
        } else {
            T::narrow(&from[..to.len().min(from.len())], to);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::TestRng;

    #[test]
    fn sums_of_every_length_are_right() {
        let mut random = TestRng::new(1);
        for length in (0..70).chain([1000, 4099]) {
            let a: Vec<f32> = (0..length).map(|_| random.normal()).collect();
            let b: Vec<f32> = (0..length).map(|_| random.normal()).collect();
            let exact = |f: &dyn Fn(f64, f64) -> f64| -> f64 {
                a.iter().zip(&b).map(|(a, b)| f(f64::from(*a), f64::from(*b))).sum()
            };
            let close = |ours: f32, exact: f64| {
                assert!(
                    (f64::from(ours) - exact).abs() < 1e-6 * f64::from(length.max(10)),
                    "{length}: {ours} {exact}"
                );
            };
            close(sum(&a), exact(&|a, _| a));
            close(sum_squares(&a, 0.5), exact(&|a, _| (a - 0.5) * (a - 0.5)));
            close(dot(&a, &b), exact(&|a, b| a * b));
            assert_eq!(max(&a), a.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        }
    }

    #[test]
    fn max_does_not_hide_nan() {
        for at in [0, 15, 16, 20] {
            let mut a = vec![1.0; 21];
            a[at] = f32::NAN;
            assert!(max(&a).is_nan(), "{at}");
        }
    }
}
