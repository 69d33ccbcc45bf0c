//! A linear layer of inputs that lie apart: y = Σ xᵢ·Wᵢᵀ + bias, where Wᵢ are the columns of W that xᵢ would meet if
//! all were concatenated. They are not, and neither is their gradient. W and the bias are frozen.
//!
//! Saved for backward: W.

use std::ops::Range;

use super::backward::InputGradient;
use crate::backward::BackwardPass;
use crate::op::Op;
use crate::ops::matmul::{FusedMatmul, Matmul, Operand};
use crate::tape::Tape;
use crate::var::{SavedTensor, Var};
use crate::{Result, Shape, Tensor};

impl Tape<'_> {
    /// A frozen layer of some inputs, as of their concatenation; see the module's comment.
    pub fn linear_of_parts(&self, parts: &[&Var], weight: &Var, bias: Option<&Var>) -> Result<Var> {
        let op = self.begin_op("linear_of_parts");
        let shape = check(&op, parts, weight, bias)?;
        let columns = columns(parts);
        let mut y = op.alloc(shape, parts[0].dtype())?;
        let right = Operand::beside(weight.tensor(), y.dtype());
        let mut matmuls = Vec::with_capacity(parts.len());
        for (part, columns) in parts.iter().zip(&columns) {
            matmuls.push(Matmul::new(part.tensor(), right.columns_of(columns.clone()).t()));
        }
        let bias = bias.map(Var::tensor);
        FusedMatmul { bias, ..FusedMatmul::new(&matmuls, &mut y) }.run(op.cx)?;
        let result = op.result(y);
        if !self.requires_grad(parts) {
            return Ok(result);
        }
        let inputs = parts.iter().map(|part| InputGradient::of(part)).zip(columns).collect();
        let record = PartsBackward { inputs, weight: self.save_for_backward(weight) };
        Ok(self.record(result, move |back, gradient| record.backward(back, &gradient)))
    }
}

/// Which columns of the weight each part meets.
fn columns(parts: &[&Var]) -> Vec<Range<usize>> {
    let mut end = 0;
    let range = |part: &&Var| {
        let start = end;
        end += part.shape().width();
        start..end
    };
    parts.iter().map(range).collect()
}

/// Checks all shapes and dtypes; returns the shape of the result.
fn check(op: &Op<'_>, parts: &[&Var], weight: &Var, bias: Option<&Var>) -> Result<Shape> {
    op.expect_range("number of parts", &parts.len(), !parts.is_empty(), "1 or more")?;
    op.expect_real("weight", weight.tensor())?;
    let [outputs, _] = op.expect_rank("weight", weight.tensor())?;
    let shape = parts[0].shape();
    let dtype = op.expect_real("part", parts[0].tensor())?;
    for part in parts {
        op.expect_dtype("part", part.tensor(), dtype)?;
        op.expect_shape("part", part.tensor(), shape.with_width(part.shape().width()))?;
    }
    let inputs = parts.iter().map(|part| part.shape().width()).sum::<usize>();
    op.expect_shape("weight", weight.tensor(), [outputs, inputs])?;
    if let Some(bias) = bias {
        op.expect_vector("bias", bias.tensor(), outputs)?;
    }
    let is_frozen =
        [Some(weight), bias].into_iter().flatten().all(|var| var.grad_target().is_none());
    assert!(is_frozen, "a trained layer has one input");
    Ok(shape.with_width(outputs))
}

struct PartsBackward {
    inputs: Vec<(InputGradient, Range<usize>)>,
    weight: SavedTensor,
}

impl PartsBackward {
    fn backward(self, back: &mut BackwardPass<'_>, gradient: &Tensor) -> Result<()> {
        let weight = self.weight.get(back.cx)?;
        let weight = Operand::beside(&weight, gradient.dtype());
        self.inputs.into_iter().try_for_each(|(input, columns)| {
            input.pass(back, &[Matmul::new(gradient, weight.columns_of(columns))], gradient.dtype())
        })
    }
}
