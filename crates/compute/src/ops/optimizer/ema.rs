//! The exponential moving average (EMA) of a parameter over steps.

use super::{cpu, cuda, expect_unshared, gpu};
use crate::device::Backend;
use crate::op::Op;
use crate::{Dtype, Result, Tensor};

/// ema ← decay·ema + (1 - decay)·value, for an EMA in f32 and a value of any real dtype.
pub fn ema(ema: &mut Tensor, value: &Tensor, decay: f32) -> Result<()> {
    let device = ema.device().clone();
    let op = Op::standalone("ema", &device);
    op.expect_range("decay", &decay, (0.0..=1.0).contains(&decay), "0 to 1")?;
    mix(&op, "ema", ema, value, decay)
}

/// start ← start + weight·(end - start), of which the weight may be below 0: then it goes away from `end`.
pub fn lerp(start: &mut Tensor, end: &Tensor, weight: f32) -> Result<()> {
    let device = start.device().clone();
    let op = Op::standalone("lerp", &device);
    op.expect_range("weight", &weight, weight.is_finite(), "finite")?;
    mix(&op, "start", start, end, 1.0 - weight)
}

fn mix(
    op: &Op<'_>,
    what: &'static str,
    mixed: &mut Tensor,
    value: &Tensor,
    share: f32,
) -> Result<()> {
    op.expect(what, mixed, Dtype::F32, mixed.shape())?;
    expect_unshared(0, mixed)?;
    op.expect_real("value", value)?;
    op.expect_shape("value", value, mixed.shape())?;
    // All of them are one kernel.
    op.cx.count("ema", 3 * value.shape().elements(), &[mixed, mixed, value]);
    match op.backend() {
        Backend::Meta => {}
        Backend::Cpu(backend) => cpu::ema(backend, mixed, value, share),
        Backend::Cuda(backend) => cuda::ema(backend, mixed, value, share),
        Backend::Gpu(backend) => gpu::ema(backend, mixed, value, share),
    }
    Ok(())
}
