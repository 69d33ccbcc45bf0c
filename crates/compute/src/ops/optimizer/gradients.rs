//! Questions about all gradients at once. The answers stay on the device.

use super::{cpu, cuda, gpu};
use crate::device::{Engine, Kind};
use crate::op::{Op, Place};
use crate::{ComputeError, Device, Dtype, Result, Tensor};

/// How far gradients may go in one step: they are multiplied by min(1, max / (norm + 1e-6)), as
/// PyTorch's `clip_grad_norm_` does, after the step's own scale. If the norm is not finite, the step
/// changes nothing.
#[derive(Debug)]
pub struct Clip {
    /// The norm of all gradients, from [`global_norm`].
    pub norm: Tensor,
    /// The longest norm that is left as it is.
    pub max: f32,
}

pub(super) fn check_clip(op: &Op<'_>, clip: Option<&Clip>) -> Result<()> {
    let Some(Clip { norm, max }) = clip else { return Ok(()) };
    op.expect("norm", norm, Dtype::F32, [].into())?;
    op.expect_range("norm to clip to", max, *max >= 0.0, "0 or more")
}

/// The root of the sum of the squares of all gradients: one number without dimensions, f32.
pub fn global_norm(gradients: &[Option<&Tensor>], device: &Device) -> Result<Tensor> {
    let op = Op::alone("global_norm", device);
    let gradients: Vec<&Tensor> = gradients.iter().copied().flatten().collect();
    let place = Place::new(device);
    for gradient in &gradients {
        op.expect("gradient", gradient, Dtype::F32, gradient.shape())?;
    }
    op.count(2 * elements(&gradients), &gradients);
    let mut norm = place.alloc([], Dtype::F32)?;
    let floats = match device.kind() {
        Kind::Cpu { .. } => 0,
        Kind::Cuda { .. } => cuda::norm_floats(&gradients),
        Kind::Gpu { .. } => gpu::norm_floats(&gradients),
    };
    let mut room = place.workspace([floats], Dtype::F32)?;
    match place.engine() {
        Engine::Meta => {}
        Engine::Cpu(engine) => cpu::global_norm(engine, &gradients, &mut norm),
        Engine::Cuda(engine) => cuda::global_norm(engine, &gradients, &mut room, &mut norm),
        Engine::Gpu(engine) => gpu::global_norm(engine, &gradients, &mut room, &mut norm),
    }
    Ok(norm)
}

/// How many numbers are infinite or not numbers: u32 `[1]`, on the tensors' device. Stops counting at
/// the largest u32.
pub fn count_not_finite(tensors: &[&Tensor]) -> Result<Tensor> {
    let Some(first) = tensors.first() else {
        let (op, what) = ("count_not_finite", "count of tensors");
        let (expected, got) = ("1 or more".into(), "0".into());
        return Err(ComputeError::Range { op, what, expected, got });
    };
    let op = Op::alone("count_not_finite", first.device());
    let place = Place::new(first.device());
    for tensor in tensors {
        op.expect_real("tensor", tensor)?;
    }
    op.count(elements(tensors), tensors);
    let mut count = place.alloc([1], Dtype::U32)?;
    match place.engine() {
        Engine::Meta => {}
        Engine::Cpu(engine) => cpu::count_not_finite(engine, tensors, &mut count),
        Engine::Cuda(engine) => cuda::count_not_finite(engine, tensors, &mut count),
        Engine::Gpu(engine) => gpu::count_not_finite(engine, tensors, &mut count),
    }
    Ok(count)
}

fn elements(tensors: &[&Tensor]) -> usize {
    tensors.iter().map(|tensor| tensor.shape().elements()).sum()
}
