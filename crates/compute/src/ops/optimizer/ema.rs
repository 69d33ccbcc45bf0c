//! A moving average of a parameter over steps.

use super::{cpu, cuda, expect_unshared, gpu};
use crate::device::Backend;
use crate::op::{Op, OpContext};
use crate::{Dtype, Result, Tensor};

/// average ← decay·average + (1 - decay)·value, for an average in f32 and a value of any real
/// format.
pub fn ema(ema: &mut Tensor, value: &Tensor, decay: f32) -> Result<()> {
    let device = ema.device().clone();
    let op = Op::standalone("ema", &device);
    op.expect("average", ema, Dtype::F32, ema.shape())?;
    expect_unshared(0, ema)?;
    op.expect_real("value", value)?;
    op.expect_shape("value", value, ema.shape())?;
    op.expect_range("decay", &decay, (0.0..=1.0).contains(&decay), "0 to 1")?;
    let work = 3 * value.shape().elements();
    OpContext::new(&device).count("ema", work, &[ema, ema, value]);
    match device.backend() {
        Backend::Meta => {}
        Backend::Cpu(engine) => cpu::ema(engine, ema, value, decay),
        Backend::Cuda(engine) => cuda::ema(engine, ema, value, decay),
        Backend::Gpu(engine) => gpu::ema(engine, ema, value, decay),
    }
    Ok(())
}
