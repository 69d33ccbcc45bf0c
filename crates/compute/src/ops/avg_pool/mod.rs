//! Shrinking images by means over squares that do not overlap:
//!
//! y[c, i, j] = mean of x[c, i·size .. (i+1)·size, j·size .. (j+1)·size]
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
    /// Means over squares of `size` pixels a side, which must divide the image.
    pub fn avg_pool(&self, x: &Var, size: usize) -> Result<Var> {
        let op = self.begin_op("avg_pool");
        op.expect_no_grad(x)?;
        let dtype = op.expect_real("x", x.tensor())?;
        let [samples, channels, height, width] = op.expect_rank("x", x.tensor())?;
        let height = op.expect_multiple("height", height, size)?;
        let width = op.expect_multiple("width", width, size)?;
        let mut y = op.alloc([samples, channels, height, width], dtype)?;
        op.count(x.shape().elements(), &[x.tensor(), &y]);
        match op.backend() {
            Backend::Meta => {}
            Backend::Cpu(backend) => cpu::forward(backend, x.tensor(), size, &mut y),
            Backend::Cuda(backend) => cuda::forward(backend, x.tensor(), size, &mut y),
            Backend::Gpu(backend) => gpu::forward(backend, x.tensor(), size, &mut y),
        }
        Ok(op.result(y))
    }
}
