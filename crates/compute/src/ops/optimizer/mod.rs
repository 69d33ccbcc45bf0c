//! What happens between backward and the next forward: the norm of all gradients, the step of the
//! optimizer, a moving average of the result. Plain functions on lists of tensors: a gradient of a
//! step is never wanted, so nothing of this is on a tape.
//!
//! No value comes back to the host: the norm that a step clips by is read where the step runs.

mod adamw;
mod codebook;
mod cpu;
mod eight_bit;
mod ema;
mod gradients;
#[cfg(test)]
mod tests;

pub use adamw::{AdamW, Moments, adamw};
pub use eight_bit::{Codes, Moments8, adamw_8bit};
pub use ema::ema;
pub use gradients::{Clip, count_not_finite, global_norm};

use crate::{ComputeError, Device, Dtype, Result, Shape, Tensor};

/// Checks on what a function is given; each names the function and the tensor.
#[derive(Clone, Copy)]
struct Checks<'a> {
    op: &'static str,
    device: &'a Device,
}

impl Checks<'_> {
    /// Of one format and shape, and here.
    fn expect(self, what: &'static str, tensor: &Tensor, dtype: Dtype, shape: Shape) -> Result<()> {
        let got = tensor.dtype();
        if got != dtype {
            let expected = if dtype == Dtype::U8 { "u8" } else { "f32" };
            return Err(ComputeError::Dtype { op: self.op, what, expected, got });
        }
        self.expect_shape(what, tensor, shape)
    }

    fn expect_shape(self, what: &'static str, tensor: &Tensor, expected: Shape) -> Result<()> {
        let got = tensor.shape();
        if got != expected {
            return Err(ComputeError::Shape { op: self.op, what, expected, got });
        }
        if tensor.device().is_same(self.device) {
            return Ok(());
        }
        Err(ComputeError::Device { op: self.op, what })
    }

    /// Of a format with fractions.
    fn expect_real(self, what: &'static str, tensor: &Tensor) -> Result<()> {
        let got = tensor.dtype();
        if got.is_real() {
            return self.expect_shape(what, tensor, tensor.shape());
        }
        Err(ComputeError::Dtype { op: self.op, what, expected: "f32, bf16 or f16", got })
    }

    /// A number that makes sense.
    fn expect_range(
        self,
        what: &'static str,
        got: &impl ToString,
        is_fit: bool,
        expected: &'static str,
    ) -> Result<()> {
        if is_fit {
            return Ok(());
        }
        let (expected, got) = (expected.into(), got.to_string());
        Err(ComputeError::Range { op: self.op, what, expected, got })
    }
}

/// Read by nobody else while it is changed: a parameter, or what is remembered of it.
fn expect_unshared(index: usize, tensor: &Tensor) -> Result<()> {
    match tensor.sharers() - 1 {
        0 => Ok(()),
        readers => Err(ComputeError::InUse { index, readers }),
    }
}
