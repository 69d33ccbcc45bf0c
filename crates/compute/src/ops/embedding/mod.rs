//! Rows of a table by index: y[.., :] = table[ids[..], :] for ids [..] and table
//! [vocabulary, width]. The gradient of a row is the sum over all places where it was used, in
//! their order.
//!
//! Saved for backward: the ids. Readers save how to recompute the result, not the result: the table is held
//! anyway. The kernels are those of [`gather`](super::gather), with the table as the one sample.

#[cfg(test)]
mod tests;

use super::gather::Lookup;
use crate::op::OpContext;
use crate::tape::Tape;
use crate::var::{Remat, Var};
use crate::{ComputeError, Result, Shape, Tensor};

/// More dimensions of ids leave no room for that of the width.
const MOST_DIMENSIONS: usize = 4;

impl Tape<'_> {
    /// The rows of `table` [vocabulary, width] that `ids` name, u32 of any shape.
    pub fn embedding(&self, ids: &Tensor, table: &Var) -> Result<Var> {
        let op = self.begin_op("embedding");
        let dtype = op.expect_real("table", table.tensor())?;
        let [vocabulary, width] = op.expect_rank("table", table.tensor())?;
        op.expect_indices("ids", ids, "rows in the table", vocabulary)?;
        if ids.shape().sizes().len() > MOST_DIMENSIONS {
            let (what, expected, got) = ("ids", MOST_DIMENSIONS, ids.shape());
            return Err(ComputeError::Rank { op: op.name, what, expected, got });
        }
        let shape = Shape::new(&[ids.shape().sizes(), &[width]].concat());
        let n = ids.shape().elements();
        let lookup = Lookup { ids: ids.clone(), n, n_tokens: vocabulary };
        let y = forward(op.cx, &lookup, table.tensor(), shape)?;
        let result = self.with_remat(op.result(y), || {
            let ((held, needs), lookup) = (table.to_saved(), lookup.clone());
            Remat::new(needs, move |cx| forward(cx, &lookup, &held.get(cx)?, shape))
        });
        let Some(source) = table.grad_target().filter(|_| self.requires_grad(&[table])) else {
            return Ok(result);
        };
        let shape = table.shape();
        Ok(self.record(result, move |back, gradient| {
            let mut slot = back.slot(source, shape, dtype)?;
            lookup.scatter(back.cx, &gradient, &mut slot.tensor, slot.add)?;
            back.put(slot);
            Ok(())
        }))
    }
}

fn forward(cx: OpContext<'_>, lookup: &Lookup, table: &Tensor, shape: Shape) -> Result<Tensor> {
    let mut y = cx.alloc(shape, table.dtype())?;
    lookup.gather(cx, table, &mut y, false);
    Ok(y)
}
