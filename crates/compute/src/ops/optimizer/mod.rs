//! Optimizer steps: the global gradient norm, `AdamW`, 8-bit `AdamW`, schedule-free `AdamW`, Adafactor, Lion, Muon,
//! Prodigy, stochastic rounding, and the EMA of parameters. Plain functions on lists of tensors, since nothing of this has a gradient.
//!
//! No value comes back to the host: the norm that a step clips by is read where the step runs.

mod adafactor;
mod adamw;
mod cpu;
mod cuda;
mod eight_bit;
mod ema;
#[cfg(test)]
mod fifty_steps;
mod gpu;
mod gradients;
mod lion;
mod muon;
mod prodigy;
mod rounding;
mod schedule_free;
#[cfg(test)]
mod tests;

pub use adafactor::{Adafactor, FactoredMoments, adafactor};
pub use adamw::{AdamW, Moments, adamw};
pub use eight_bit::{BlockCodes, Moments8bit, adamw_8bit};
pub use ema::{ema, lerp};
pub use gradients::{GradClip, count_not_finite, global_norm, global_norm_into};
pub use lion::lion;
pub use muon::{Muon, momentum, muon};
pub use prodigy::{Prodigy, ProdigyState, prodigy, prodigy_distance};
pub use rounding::stochastic_round;
pub use schedule_free::{ScheduleFreeState, schedule_free};

use crate::op::Op;
use crate::{ComputeError, Dtype, Result, Shape, Tensor};

impl Op<'_> {
    /// Of one dtype and shape.
    fn expect(
        &self,
        what: &'static str,
        tensor: &Tensor,
        dtype: Dtype,
        shape: Shape,
    ) -> Result<()> {
        self.expect_dtype(what, tensor, dtype)?;
        self.expect_shape(what, tensor, shape)
    }
}

/// Read by nobody else while it is changed: a parameter, or what is remembered of it.
fn expect_unshared(index: usize, tensor: &Tensor) -> Result<()> {
    match tensor.ref_count() - 1 {
        0 => Ok(()),
        readers => Err(ComputeError::InUse { index, readers }),
    }
}
