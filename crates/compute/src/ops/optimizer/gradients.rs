//! The global norm of gradients, and a count of values that are not finite. Results stay on the device.

use super::{cpu, cuda, expect_unshared, gpu};
use crate::device::{Backend, DeviceKind};
use crate::op::{Op, OpContext};
use crate::{ComputeError, Device, Dtype, Result, Tensor};

/// Gradient clipping by the global norm: gradients are multiplied by min(1, max / (norm + 1e-6)), as
/// PyTorch's `clip_grad_norm_` does, after the step's own scale. If the norm is not finite, the step
/// changes nothing.
#[derive(Debug)]
pub struct GradClip {
    /// The norm of all gradients, from [`global_norm`].
    pub norm: Tensor,
    /// The maximum norm.
    pub max_norm: f32,
}

pub(super) fn check_clip(op: &Op<'_>, clip: Option<&GradClip>) -> Result<()> {
    let Some(GradClip { norm, max_norm }) = clip else { return Ok(()) };
    op.expect("norm", norm, Dtype::F32, [].into())?;
    op.expect_range("max_norm", max_norm, *max_norm >= 0.0, "0 or more")
}

/// The root of the sum of the squares of all gradients: one number without dimensions, f32.
pub fn global_norm(gradients: &[Option<&Tensor>], device: &Device) -> Result<Tensor> {
    let mut norm = OpContext::new(device).alloc([], Dtype::F32)?;
    global_norm_into(gradients, &mut norm)?;
    Ok(norm)
}

/// The same, written to a tensor that is there.
pub fn global_norm_into(gradients: &[Option<&Tensor>], norm: &mut Tensor) -> Result<()> {
    let device = &norm.device().clone();
    let op = Op::standalone("global_norm", device);
    let gradients: Vec<&Tensor> = gradients.iter().copied().flatten().collect();
    let cx = OpContext::new(device);
    for gradient in &gradients {
        op.expect("gradient", gradient, Dtype::F32, gradient.shape())?;
    }
    op.expect("norm", norm, Dtype::F32, [].into())?;
    expect_unshared(0, norm)?;
    op.count(2 * elements(&gradients), &gradients);
    let floats = match device.kind() {
        DeviceKind::Cpu { .. } => 0,
        DeviceKind::Cuda { .. } => cuda::norm_floats(&gradients),
        DeviceKind::Gpu { .. } => gpu::norm_floats(&gradients),
    };
    let mut workspace = cx.workspace([floats], Dtype::F32)?;
    match cx.backend() {
        Backend::Meta => {}
        Backend::Cpu(backend) => cpu::global_norm(backend, &gradients, norm),
        Backend::Cuda(backend) => cuda::global_norm(backend, &gradients, &mut workspace, norm),
        Backend::Gpu(backend) => gpu::global_norm(backend, &gradients, &mut workspace, norm),
    }
    Ok(())
}

/// How many values are infinite or NaN: u32 `[1]`, on the tensors' device. Stops counting at
/// the largest u32.
pub fn count_not_finite(tensors: &[&Tensor]) -> Result<Tensor> {
    let Some(first) = tensors.first() else {
        let (op, what) = ("count_not_finite", "count of tensors");
        let (expected, got) = ("1 or more".into(), "0".into());
        return Err(ComputeError::Range { op, what, expected, got });
    };
    let op = Op::standalone("count_not_finite", first.device());
    let cx = OpContext::new(first.device());
    for tensor in tensors {
        op.expect_real("tensor", tensor)?;
    }
    op.count(elements(tensors), tensors);
    let mut count = cx.alloc([1], Dtype::U32)?;
    match cx.backend() {
        Backend::Meta => {}
        Backend::Cpu(backend) => cpu::count_not_finite(backend, tensors, &mut count),
        Backend::Cuda(backend) => cuda::count_not_finite(backend, tensors, &mut count),
        Backend::Gpu(backend) => gpu::count_not_finite(backend, tensors, &mut count),
    }
    Ok(count)
}

fn elements(tensors: &[&Tensor]) -> usize {
    tensors.iter().map(|tensor| tensor.shape().elements()).sum()
}
