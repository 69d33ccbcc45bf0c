//! The exponential moving average (EMA) of a parameter over steps.

use super::{cpu, cuda, expect_unshared, gpu};
use crate::device::Backend;
use crate::op::{Op, OpContext};
use crate::{Dtype, Result, Tensor};

/// ema ← decay·ema + (1 - decay)·value, for an EMA in f32 and a value of any real dtype.
pub fn ema(ema: &mut Tensor, value: &Tensor, decay: f32) -> Result<()> {
    let device = ema.device().clone();
    let op = Op::standalone("ema", &device);
    op.expect("ema", ema, Dtype::F32, ema.shape())?;
    expect_unshared(0, ema)?;
    op.expect_real("value", value)?;
    op.expect_shape("value", value, ema.shape())?;
    op.expect_range("decay", &decay, (0.0..=1.0).contains(&decay), "0 to 1")?;
    let work = 3 * value.shape().elements();
    OpContext::new(&device).count("ema", work, &[ema, ema, value]);
    match device.backend() {
        Backend::Meta => {}
        Backend::Cpu(backend) => cpu::ema(backend, ema, value, decay),
        Backend::Cuda(backend) => cuda::ema(backend, ema, value, decay),
        Backend::Gpu(backend) => gpu::ema(backend, ema, value, decay),
    }
    Ok(())
}
