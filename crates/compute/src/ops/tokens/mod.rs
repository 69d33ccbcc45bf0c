//! Concatenation and splitting of tokens: of tensors [samples, tokens, width], each sample's tokens
//! one tensor after the other, or a range of them.
//!
//! Saved for backward: nothing. Readers of a part save the tensor that it is taken from, usually an
//! attention's result, which is saved anyway.

mod cpu;
mod cuda;
mod gpu;
#[cfg(test)]
mod tests;

use std::ops::Range;

use crate::backward::{BackwardPass, GradientSlot};
use crate::device::Backend;
use crate::op::{Op, OpContext};
use crate::tape::Tape;
use crate::var::{GradTarget, Remat, SavedTensor, Var};
use crate::{ComputeError, Result, Shape, Tensor};

impl Tape<'_> {
    /// The tokens of all `parts`, sample by sample.
    pub fn concat_tokens(&self, parts: &[&Var]) -> Result<Var> {
        let op = self.begin_op("concat_tokens");
        let shape = check_parts(&op, parts)?;
        let tensors: Vec<&Tensor> = parts.iter().map(|part| part.tensor()).collect();
        let all = concat(op.cx, &tensors, shape)?;
        let mut result = op.result(all);
        let held: Vec<(SavedTensor, Vec<usize>)> =
            parts.iter().map(|part| part.to_saved()).collect();
        // Of parts that are held themselves, making the whole again would only hold both.
        if held.iter().any(|(part, _)| matches!(part, SavedTensor::Remat(_))) {
            result = self.with_remat(result, || remat(held, shape));
        }
        if !self.requires_grad(parts) {
            return Ok(result);
        }
        let sources: Vec<_> = parts.iter().map(|part| (part.grad_target(), part.shape())).collect();
        Ok(self.record(result, move |back, gradient| {
            if shape.sizes()[0] == 1 {
                return pass_parts(back, &sources, &gradient);
            }
            let mut from = 0;
            for (source, shape) in sources {
                let span = TokenSpan { from, to: 0, count: shape.sizes()[1] };
                from += span.count;
                if let Some(mut slot) = back.slot_of(source, shape, gradient.dtype())? {
                    accumulate(back.cx, &gradient, &mut slot, span);
                    back.put(slot);
                }
            }
            Ok(())
        }))
    }

    /// The tokens in `range` of every sample.
    pub fn split_tokens(&self, x: &Var, range: Range<usize>) -> Result<Var> {
        let op = self.begin_op("split_tokens");
        op.expect_real("x", x.tensor())?;
        let [samples, tokens, width] = op.expect_rank("x", x.tensor())?;
        if range.start > range.end || range.end > tokens {
            let (expected, got) = (format!("a part of 0..{tokens}"), format!("{range:?}"));
            return Err(ComputeError::Range { op: op.name, what: "range", expected, got });
        }
        let shape = Shape::from([samples, range.len(), width]);
        let part = split(op.cx, x.tensor(), range.start, shape)?;
        let result = self.with_remat(op.result(part), || {
            let ((held, needs), first) = (x.to_saved(), range.start);
            Remat::new(needs, move |cx| split(cx, &held.get(cx)?, first, shape))
        });
        let Some(source) = x.grad_target().filter(|_| self.requires_grad(&[x])) else {
            return Ok(result);
        };
        let shape = x.shape();
        Ok(self.record(result, move |back, gradient| {
            let mut slot = back.slot(source, shape, gradient.dtype())?;
            if shape.sizes()[0] > 1 {
                slot.clear_unless_adding();
            } else if !slot.add {
                slot.tensor = cleared_around(slot.tensor, &range);
            }
            let span = TokenSpan { from: 0, to: range.start, count: range.len() };
            accumulate(back.cx, &gradient, &mut slot, span);
            back.put(slot);
            Ok(())
        }))
    }
}

/// Of one sample each part's gradient shares the memory of the whole.
fn pass_parts(
    back: &mut BackwardPass<'_>,
    parts: &[(Option<GradTarget>, Shape)],
    gradient: &Tensor,
) -> Result<()> {
    let mut first = 0;
    for (source, shape) in parts {
        let part = rows_as(gradient, first, *shape);
        first += shape.rows();
        back.pass(*source, part)?;
    }
    Ok(())
}

/// Zeros where the tokens in `range` of one sample write nothing.
fn cleared_around(sum: Tensor, range: &Range<usize>) -> Tensor {
    let shape = sum.shape();
    let mut rows = sum.into_shape([shape.rows(), shape.width()].into());
    for rest in [0..range.start, range.end..shape.rows()] {
        if !rest.is_empty() {
            rows.with_range_mut(rest, Tensor::fill_zeros);
        }
    }
    rows.into_shape(shape)
}

/// Checks that the parts differ in their tokens only; returns the shape of the whole.
pub(super) fn check_parts(op: &Op<'_>, parts: &[&Var]) -> Result<Shape> {
    let Some(first) = parts.first() else {
        let (expected, got) = ("1 or more".into(), "0".into());
        return Err(ComputeError::Range { op: op.name, what: "number of parts", expected, got });
    };
    let dtype = op.expect_real("part", first.tensor())?;
    let [samples, _, width] = op.expect_rank("part", first.tensor())?;
    let mut all = 0;
    for part in parts {
        op.expect_dtype("part", part.tensor(), dtype)?;
        let [_, tokens, _] = op.expect_rank("part", part.tensor())?;
        op.expect_shape("part", part.tensor(), [samples, tokens, width])?;
        all += tokens;
    }
    Ok([samples, all, width].into())
}

fn remat(held: Vec<(SavedTensor, Vec<usize>)>, shape: Shape) -> Remat {
    let (parts, needs): (Vec<_>, Vec<_>) = held.into_iter().unzip();
    Remat::new(needs.concat(), move |cx| {
        let parts: Vec<_> = parts.iter().map(|part| part.get(cx)).collect::<Result<_>>()?;
        concat(cx, &parts.iter().collect::<Vec<_>>(), shape)
    })
}

/// Of one sample a part shares the memory of the whole.
fn split(cx: OpContext<'_>, x: &Tensor, first: usize, shape: Shape) -> Result<Tensor> {
    if shape.sizes()[0] == 1 {
        return Ok(rows_as(x, first, shape));
    }
    let mut part = cx.alloc(shape, x.dtype())?;
    copy(cx, x, &mut part, TokenSpan { from: first, to: 0, count: shape.sizes()[1] });
    Ok(part)
}

/// Some of its rows, as a tensor of this shape that shares its memory.
fn rows_as(x: &Tensor, first: usize, shape: Shape) -> Tensor {
    let rows = x.reshape([x.shape().rows(), x.shape().width()]);
    rows.narrow(first..first + shape.rows()).into_shape(shape)
}

fn concat(cx: OpContext<'_>, parts: &[&Tensor], shape: Shape) -> Result<Tensor> {
    let mut all = cx.alloc(shape, parts[0].dtype())?;
    let mut to = 0;
    for part in parts {
        let count = part.shape().sizes()[1];
        copy(cx, part, &mut all, TokenSpan { from: 0, to, count });
        to += count;
    }
    Ok(all)
}

/// Tokens of every sample: where they lie in one tensor and in another.
#[derive(Clone, Copy)]
struct TokenSpan {
    from: usize,
    to: usize,
    count: usize,
}

fn copy(cx: OpContext<'_>, from: &Tensor, to: &mut Tensor, span: TokenSpan) {
    let smaller = if from.bytes() < to.bytes() { from } else { &*to };
    cx.count("copy_tokens", 0, &[smaller, smaller]);
    match cx.backend() {
        Backend::Meta => {}
        Backend::Cpu(backend) => cpu::copy(backend, from, to, span),
        Backend::Cuda(backend) => cuda::copy(backend, from, to, span, false),
        Backend::Gpu(backend) => gpu::copy(backend, from, to, span, false),
    }
}

/// Adds a gradient's tokens to those of a slot, or copies them where there is nothing yet.
fn accumulate(cx: OpContext<'_>, gradient: &Tensor, slot: &mut GradientSlot, span: TokenSpan) {
    let smaller = if gradient.bytes() < slot.tensor.bytes() { gradient } else { &slot.tensor };
    let work = smaller.shape().elements();
    cx.count("copy_tokens backward", work, &[smaller, smaller, smaller]);
    match cx.backend() {
        Backend::Meta => {}
        Backend::Cpu(backend) => {
            cpu::accumulate(backend, gradient, &mut slot.tensor, span, slot.add);
        }
        Backend::Cuda(backend) => cuda::copy(backend, gradient, &mut slot.tensor, span, slot.add),
        Backend::Gpu(backend) => gpu::copy(backend, gradient, &mut slot.tensor, span, slot.add),
    }
}
