//! Stochastic rounding from f32 to bf16: up or down with the probability that makes the mean exact. Rounding to the
//! nearest loses every update below half of a step of bf16, which is 1/256 of a weight; this keeps them on average
//! (Gupta et al., "Deep Learning with Limited Numerical Precision", arXiv 1502.02551, section 3.1).

use super::{cpu, cuda, expect_unshared, gpu};
use crate::device::Backend;
use crate::op::Op;
use crate::random::RandomSequence;
use crate::{Dtype, Result, Tensor};

/// FLOPs per element, for the work counter: a random word.
const FLOPS: usize = 50;

/// Writes values in f32 to a tensor in bf16. The element at an index is rounded by the random word at that index: what
/// is cut off is added to a random number of as many bits, and the carry rounds up. What bf16 can hold stays the same.
pub fn stochastic_round(
    values: &Tensor,
    rounded: &mut Tensor,
    sequence: RandomSequence,
) -> Result<()> {
    let device = rounded.device().clone();
    let op = Op::standalone("stochastic_round", &device);
    op.expect("values", values, Dtype::F32, values.shape())?;
    op.expect("rounded", rounded, Dtype::Bf16, values.shape())?;
    expect_unshared(0, rounded)?;
    op.count(FLOPS * values.shape().elements(), &[values, rounded]);
    match device.backend() {
        Backend::Meta => {}
        Backend::Cpu(backend) => cpu::stochastic_round(backend, values, rounded, sequence),
        Backend::Cuda(backend) => cuda::stochastic_round(backend, values, rounded, sequence),
        Backend::Gpu(backend) => gpu::stochastic_round(backend, values, rounded, sequence),
    }
    Ok(())
}
