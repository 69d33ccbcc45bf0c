//! Tokens taken out by index, and put back:
//!
//! gather:  y[s, i] = x[s, ids[s, i]]
//! scatter: y[s, t] = Σ x[s, i] over all i with ids[s, i] = t, and zeros where there is none
//!
//! for tokens of some width and ids [samples, n]. Each is the other's gradient, which is why an
//! [`embedding`](crate::Tape::embedding), a gather from one table, is made of both too.
//!
//! Saved for backward: the ids. The result of gather is not recomputed for its readers, because that would
//! hold all tokens for the sake of a few; that of scatter is where that holds fewer.

mod cpu;
mod cuda;
mod gpu;
#[cfg(test)]
pub(crate) mod tests;

use crate::device::Backend;
use crate::op::OpContext;
use crate::tape::Tape;
use crate::var::{Remat, Var};
use crate::{Dtype, Result, Tensor};

impl Tape<'_> {
    /// The tokens of `x` [samples, tokens, width] that `ids` [samples, n] name, u32:
    /// [samples, n, width].
    pub fn gather_tokens(&self, x: &Var, ids: &Tensor) -> Result<Var> {
        let op = self.begin_op("gather_tokens");
        let dtype = op.expect_real("x", x.tensor())?;
        let [samples, n_tokens, width] = op.expect_rank("x", x.tensor())?;
        let [_, n] = op.expect_rank("ids", ids)?;
        op.expect_shape("ids", ids, [samples, n])?;
        op.expect_indices("ids", ids, "tokens", n_tokens)?;
        let lookup = Lookup { ids: ids.clone(), n, n_tokens };
        let mut y = op.alloc([samples, n, width], dtype)?;
        lookup.gather(op.cx, x.tensor(), &mut y, false);
        let result = op.result(y);
        let Some(source) = x.grad_target().filter(|_| self.requires_grad(&[x])) else {
            return Ok(result);
        };
        let shape = x.shape();
        Ok(self.record(result, move |back, gradient| {
            let mut slot = back.slot(source, shape, dtype)?;
            lookup.scatter(back.cx, &gradient, &mut slot.tensor, slot.add)?;
            back.put(slot);
            Ok(())
        }))
    }

    /// The tokens of `x` [samples, n, width] at the places that `ids` [samples, n] name, u32:
    /// [samples, `n_tokens`, width]. Where several land they are summed up, where none does there
    /// are zeros.
    pub fn scatter_tokens(&self, x: &Var, ids: &Tensor, n_tokens: usize) -> Result<Var> {
        let op = self.begin_op("scatter_tokens");
        let dtype = op.expect_real("x", x.tensor())?;
        let [samples, n, width] = op.expect_rank("x", x.tensor())?;
        op.expect_shape("ids", ids, [samples, n])?;
        op.expect_indices("ids", ids, "tokens", n_tokens)?;
        let lookup = Lookup { ids: ids.clone(), n, n_tokens };
        let mut y = op.alloc([samples, n_tokens, width], dtype)?;
        lookup.scatter(op.cx, x.tensor(), &mut y, false)?;
        let mut result = op.result(y);
        if n < n_tokens {
            let shape = result.shape();
            result = self.with_remat(result, || {
                let ((held, needs), lookup) = (x.to_saved(), lookup.clone());
                Remat::new(needs, move |cx| {
                    let mut y = cx.alloc(shape, dtype)?;
                    lookup.scatter(cx, &held.get(cx)?, &mut y, false)?;
                    Ok(y)
                })
            });
        }
        let Some(source) = x.grad_target().filter(|_| self.requires_grad(&[x])) else {
            return Ok(result);
        };
        let shape = x.shape();
        Ok(self.record(result, move |back, gradient| {
            let mut slot = back.slot(source, shape, dtype)?;
            lookup.gather(back.cx, &gradient, &mut slot.tensor, slot.add);
            back.put(slot);
            Ok(())
        }))
    }
}

/// Which tokens: for each sample `n` indices below `n_tokens`, checked by the op.
#[derive(Clone)]
pub(crate) struct Lookup {
    pub ids: Tensor,
    pub n: usize,
    pub n_tokens: usize,
}

impl Lookup {
    /// Writes or adds the tokens that are named. `y` may be of another dtype, as a parameter's
    /// gradient is.
    pub fn gather(&self, cx: OpContext<'_>, x: &Tensor, y: &mut Tensor, add: bool) {
        let work = if add { y.shape().elements() } else { 0 };
        cx.count("gather", work, &[&self.ids, y, y]);
        match cx.backend() {
            Backend::Meta => {}
            Backend::Cpu(backend) => cpu::gather(backend, self, x, y, add),
            Backend::Cuda(backend) => cuda::gather(backend, self, x, y, add),
            Backend::Gpu(backend) => gpu::gather(backend, self, x, y, add),
        }
    }

    /// Writes or adds, for each place, the sum of what lands there.
    pub fn scatter(&self, cx: OpContext<'_>, x: &Tensor, y: &mut Tensor, add: bool) -> Result<()> {
        let mut order = cx.workspace([self.ids.shape().elements()], Dtype::U32)?;
        cx.count("scatter", x.shape().elements(), &[&self.ids, x, y]);
        match cx.backend() {
            Backend::Meta => {}
            Backend::Cpu(backend) => {
                cpu::sort(backend, self, &mut order);
                cpu::scatter(backend, self, &order, x, y, add);
            }
            Backend::Cuda(backend) => {
                cuda::sort(self, &mut order);
                cuda::scatter(backend, self, &order, x, y, add);
            }
            Backend::Gpu(backend) => {
                cuda::sort(self, &mut order);
                gpu::scatter(backend, self, &order, x, y, add);
            }
        }
        Ok(())
    }
}
