//! Enlarging images by a whole factor, each pixel becoming a square of itself:
//!
//! y[c, i, j] = x[c, i / factor, j / factor]
//!
//! for x [samples, channels, height, width]. Forward only, like all that images are encoded and
//! decoded by.

mod cpu;
mod cuda;
mod gpu;
#[cfg(test)]
mod tests;

use crate::Result;
use crate::device::Backend;
use crate::tape::Tape;
use crate::var::Var;

impl Tape<'_> {
    /// Images `factor` times as high and wide.
    pub fn upsample(&self, x: &Var, factor: usize) -> Result<Var> {
        let op = self.begin_op("upsample");
        op.expect_no_grad(x)?;
        let dtype = op.expect_real("x", x.tensor())?;
        let [samples, channels, height, width] = op.expect_rank("x", x.tensor())?;
        op.expect_range("factor", &factor, factor > 0, "1 or more")?;
        let mut y = op.alloc([samples, channels, height * factor, width * factor], dtype)?;
        op.count(0, &[x.tensor(), &y]);
        match op.backend() {
            Backend::Meta => {}
            Backend::Cpu(backend) => cpu::forward(backend, x.tensor(), factor, &mut y),
            Backend::Cuda(backend) => cuda::forward(backend, x.tensor(), factor, &mut y),
            Backend::Gpu(backend) => gpu::forward(backend, x.tensor(), factor, &mut y),
        }
        Ok(op.result(y))
    }
}
