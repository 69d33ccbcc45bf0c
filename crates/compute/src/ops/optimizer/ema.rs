//! A moving average of a parameter over steps.

use super::{Checks, cpu, expect_unshared};
use crate::device::Engine;
use crate::op::Place;
use crate::{Dtype, Result, Tensor};

/// average ← decay·average + (1 - decay)·value, for an average in f32 and a value of any real
/// format.
pub fn ema(average: &mut Tensor, value: &Tensor, decay: f32) -> Result<()> {
    let device = average.device().clone();
    let checks = Checks { op: "ema", device: &device };
    checks.expect("average", average, Dtype::F32, average.shape())?;
    expect_unshared(0, average)?;
    checks.expect_real("value", value)?;
    checks.expect_shape("value", value, average.shape())?;
    checks.expect_range("decay", &decay, (0.0..=1.0).contains(&decay), "0 to 1")?;
    Place::new(&device).count(3 * value.shape().elements(), &[average, average, value]);
    match device.engine() {
        Engine::Meta => {}
        Engine::Cpu(engine) => cpu::ema(engine, average, value, decay),
    }
    Ok(())
}
