//! Linear layers of a mixture of experts: rows of x [rows, in] in groups, each of which is multiplied by a weight of its own,
//! frozen or trained, dense or quantised:
//!
//! `y[r] = x[r]·Wᵀ` for all rows r of a group with the weight W.
//!
//! Which rows a group has is data. Memory does not depend on it: x, y and gradients have as many rows however they are
//! shared out, and the workspace is what one group with all rows takes. A matmul for each group that has rows; work is
//! counted as if all had the same number.
//!
//! Saved for backward: x where a weight is trained.

#[cfg(test)]
mod tests;

use super::RowGroups;
use super::linear::{SavedWeight, Weight};
use super::matmul::{FusedMatmul, Matmul, Operand};
use crate::backward::BackwardPass;
use crate::op::{Op, OpContext};
use crate::tape::Tape;
use crate::var::{GradTarget, SavedTensor, Var};
use crate::{Result, Shape, Tensor};

impl Tape<'_> {
    /// Each group of the rows of x [rows, in] times the transpose of its weight [out, in]: [rows, out].
    pub fn grouped_linear(
        &self,
        x: &Var,
        groups: &RowGroups,
        weights: &[Weight<'_>],
    ) -> Result<Var> {
        let op = self.begin_op("grouped_linear");
        let outputs = check(&op, x, groups, weights)?;
        let dtype = x.dtype();
        let mut y = op.alloc([x.shape().rows(), outputs], dtype)?;
        let matrices: Vec<_> = weights.iter().map(|weight| weight.matrix(dtype).t()).collect();
        multiply(op.cx, x.tensor(), groups, &matrices, &mut y, false)?;
        let result = op.result(y);
        let mut all: Vec<&Var> = weights.iter().filter_map(|weight| weight.var()).collect();
        all.push(x);
        if !self.requires_grad(&all) {
            return Ok(result);
        }
        let weights: Vec<_> = weights.iter().map(|weight| weight.saved(self)).collect();
        let is_trained = weights.iter().any(SavedWeight::is_trained);
        let record = GroupedLinearBackward {
            x: (x.grad_target(), x.shape()),
            saved_x: is_trained.then(|| self.save_for_backward(x)),
            weights,
            groups: groups.clone(),
        };
        Ok(self.record(result, move |back, gradient| record.backward(back, &gradient)))
    }
}

/// Checks all shapes and dtypes; returns how many outputs there are.
fn check(op: &Op<'_>, x: &Var, groups: &RowGroups, weights: &[Weight<'_>]) -> Result<usize> {
    op.expect_real("x", x.tensor())?;
    let [rows, inputs] = op.expect_rank("x", x.tensor())?;
    op.expect_sizes("groups", [groups.n_groups()].into(), [weights.len()])?;
    op.expect_sizes("rows of groups", [groups.n_rows()].into(), [rows])?;
    let mut outputs = 0;
    for weight in weights {
        let n = weight.check(op, inputs)?;
        outputs = if outputs == 0 { n } else { outputs };
        op.expect_sizes("weight", weight.shape(), [outputs, inputs])?;
    }
    Ok(outputs)
}

/// Each group of rows of `left` times its matrix, into the same rows of `out`.
fn multiply(
    cx: OpContext<'_>,
    left: &Tensor,
    groups: &RowGroups,
    matrices: &[Operand<'_>],
    out: &mut Tensor,
    add: bool,
) -> Result<()> {
    if let (Some(matrix), true) = (matrices.first(), groups.n_rows() > 0) {
        let all = [Matmul::new(left, *matrix)];
        FusedMatmul { add, ..FusedMatmul::new(&all, out) }.reserve(cx)?;
    }
    for (rows, matrix) in groups.ranges().zip(matrices).filter(|(rows, _)| !rows.is_empty()) {
        let part = left.narrow(rows.clone());
        let matmul = [Matmul::new(&part, *matrix)];
        out.with_range_mut(rows, |out| {
            FusedMatmul { add, has_data_sizes: true, ..FusedMatmul::new(&matmul, out) }.run(cx)
        })?;
    }
    Ok(())
}

struct GroupedLinearBackward {
    x: (Option<GradTarget>, Shape),
    saved_x: Option<SavedTensor>,
    weights: Vec<SavedWeight<SavedTensor>>,
    groups: RowGroups,
}

impl GroupedLinearBackward {
    fn backward(self, back: &mut BackwardPass<'_>, gradient: &Tensor) -> Result<()> {
        let cx = back.cx;
        let x = self.saved_x.map(|saved| saved.get(cx)).transpose()?;
        let weights = self.weights.into_iter().map(|weight| weight.get(cx));
        let weights = weights.collect::<Result<Vec<_>>>()?;
        if let Some(x) = x {
            for (rows, weight) in self.groups.ranges().zip(&weights) {
                weight_gradient(back, &x.narrow(rows.clone()), &gradient.narrow(rows), weight)?;
            }
        }
        let (target, shape) = self.x;
        let Some(mut slot) = back.slot_of(target, shape, gradient.dtype())? else { return Ok(()) };
        let matrices: Vec<_> = weights.iter().map(|it| it.matrix(gradient.dtype())).collect();
        multiply(cx, gradient, &self.groups, &matrices, &mut slot.tensor, slot.add)?;
        back.put(slot);
        Ok(())
    }
}

/// The gradient of a group's weight: zeros, if it has no rows.
fn weight_gradient(
    back: &mut BackwardPass<'_>,
    x: &Tensor,
    gradient: &Tensor,
    weight: &SavedWeight<Tensor>,
) -> Result<()> {
    let SavedWeight::Dense(weight, target) = weight else { return Ok(()) };
    let Some(mut slot) = back.slot_of(*target, weight.shape(), weight.dtype())? else {
        return Ok(());
    };
    if x.shape().rows() == 0 {
        slot.clear_unless_adding();
    } else {
        let matmul = [Matmul::new(Operand::from(gradient).t(), x.into())];
        let plain = FusedMatmul::new(&matmul, &mut slot.tensor);
        FusedMatmul { add: slot.add, has_data_sizes: true, ..plain }.run(back.cx)?;
    }
    back.put(slot);
    Ok(())
}
