//! `AdamW` whose moments take a byte each: a code per number and a scale per block of numbers, the
//! largest size in it. Moments are decoded, moved on and encoded again while a block is in the
//! cache; parameters and arithmetic are as in [`adamw`](super::adamw()). See `codebook.rs` for what
//! codes mean.

use super::adamw::{AdamW, FLOPS, check};
use super::{GradClip, cpu, cuda, expect_unshared, gpu};
use crate::device::Backend;
use crate::op::Op;
use crate::{Dtype, Result, Shape, Tag, Tensor};

/// Numbers that share a scale. Chosen: the paper's 2048 would save another hundredth of the memory,
/// and let one large number spoil eight times as many small ones.
pub(super) const BLOCK: usize = 256;

/// Numbers as codes.
#[derive(Debug)]
pub struct BlockCodes {
    /// One code per number, u8, in the shape of the numbers.
    pub codes: Tensor,
    /// One scale per block of 256 numbers, f32.
    pub scales: Tensor,
}

impl BlockCodes {
    fn zeros(numbers: &Tensor) -> Result<Self> {
        let device = numbers.device();
        let codes = device.zeros(numbers.shape(), Dtype::U8)?;
        Ok(Self { codes, scales: device.zeros(n_scales(numbers), Dtype::F32)? })
    }
}

fn n_scales(numbers: &Tensor) -> Shape {
    [numbers.shape().elements().div_ceil(BLOCK)].into()
}

/// What `AdamW` remembers of a parameter's gradients, in a quarter of the memory.
#[derive(Debug)]
pub struct Moments8bit {
    /// The mean of gradients.
    pub first: BlockCodes,
    /// The mean of their squares.
    pub second: BlockCodes,
}

impl Moments8bit {
    /// Those before the first step.
    pub fn new(param: &Tensor) -> Result<Self> {
        param.device().with_tag(Tag::Optimizer, || {
            Ok(Self { first: BlockCodes::zeros(param)?, second: BlockCodes::zeros(param)? })
        })
    }
}

/// As [`adamw`](super::adamw()), with moments of 8 bits.
pub fn adamw_8bit(
    params: &mut [Tensor],
    gradients: &[Option<&Tensor>],
    state: &mut [Moments8bit],
    step: AdamW,
    clip: Option<&GradClip>,
) -> Result<()> {
    let Some(device) = params.first().map(|param| param.device().clone()) else { return Ok(()) };
    let op = Op::standalone("adamw_8bit", &device);
    check(&op, params, gradients, state.len(), step, clip)?;
    let (mut numbers, mut touched) = (0, Vec::new());
    for (index, (param, moments)) in params.iter().zip(&*state).enumerate() {
        for (what, moment) in [("first moment", &moments.first), ("second moment", &moments.second)]
        {
            op.expect(what, &moment.codes, Dtype::U8, param.shape())?;
            op.expect(what, &moment.scales, Dtype::F32, n_scales(param))?;
            expect_unshared(index, &moment.codes)?;
            expect_unshared(index, &moment.scales)?;
        }
        if let Some(gradient) = gradients[index] {
            let (first, second) = (&moments.first.codes, &moments.second.codes);
            numbers += param.shape().elements();
            touched.extend([gradient, param, param, first, first, second, second]);
        }
    }
    op.count(FLOPS * numbers, &touched);
    match device.backend() {
        Backend::Meta => {}
        Backend::Cpu(backend) => cpu::adamw_8bit(backend, params, gradients, state, step, clip),
        Backend::Cuda(backend) => cuda::adamw_8bit(backend, params, gradients, state, step, clip),
        Backend::Gpu(backend) => gpu::adamw_8bit(backend, params, gradients, state, step, clip),
    }
    Ok(())
}
