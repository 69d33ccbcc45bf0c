//! The positions of the k largest keys of each row, from the largest down:
//!
//! `ids[s, i]` is the position of the i-th largest of `keys[s]`.
//!
//! for keys [samples, n], f32. Of equal keys the first comes first. Keys are compared as integers, in the order of
//! [`f32::total_cmp`]: every backend finds the same, and a key that is NaN has a place too.
//!
//! A position's rank is the number of keys before it, so that GPUs find all of them side by side. That is n² comparisons
//! of a row; for thousands of keys it takes less time than one launch.

mod cpu;
mod cuda;
mod gpu;
#[cfg(test)]
mod tests;

use crate::device::Backend;
use crate::op::Op;
use crate::{Dtype, Result, Tensor};

/// The positions of the `k` largest of `keys` [samples, n], f32, from the largest down: [samples, k], u32.
pub fn top_k(keys: &Tensor, k: usize) -> Result<Tensor> {
    let device = keys.device().clone();
    let op = Op::standalone("top_k", &device);
    op.expect_dtype("keys", keys, Dtype::F32)?;
    let [samples, n] = op.expect_rank("keys", keys)?;
    op.expect_range("k", &k, k <= n, &format!("at most the number of keys, {n}"))?;
    let mut ids = op.alloc([samples, k], Dtype::U32)?;
    op.count(samples * n * n, &[keys, &ids]);
    match op.backend() {
        Backend::Meta => {}
        Backend::Cpu(backend) => cpu::top_k(backend, keys, &mut ids),
        Backend::Cuda(backend) => cuda::top_k(backend, keys, &mut ids),
        Backend::Gpu(backend) => gpu::top_k(backend, keys, &mut ids),
    }
    Ok(ids)
}
