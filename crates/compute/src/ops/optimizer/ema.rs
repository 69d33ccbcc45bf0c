//! A moving average of a parameter over steps.

use super::{cpu, cuda, expect_unshared, gpu};
use crate::device::Engine;
use crate::op::{Op, Place};
use crate::{Dtype, Result, Tensor};

/// average ← decay·average + (1 - decay)·value, for an average in f32 and a value of any real
/// format.
pub fn ema(average: &mut Tensor, value: &Tensor, decay: f32) -> Result<()> {
    let device = average.device().clone();
    let op = Op::alone("ema", &device);
    op.expect("average", average, Dtype::F32, average.shape())?;
    expect_unshared(0, average)?;
    op.expect_real("value", value)?;
    op.expect_shape("value", value, average.shape())?;
    op.expect_range("decay", &decay, (0.0..=1.0).contains(&decay), "0 to 1")?;
    let work = 3 * value.shape().elements();
    Place::new(&device).count("ema", work, &[average, average, value]);
    match device.engine() {
        Engine::Meta => {}
        Engine::Cpu(engine) => cpu::ema(engine, average, value, decay),
        Engine::Cuda(engine) => cuda::ema(engine, average, value, decay),
        Engine::Gpu(engine) => gpu::ema(engine, average, value, decay),
    }
    Ok(())
}
