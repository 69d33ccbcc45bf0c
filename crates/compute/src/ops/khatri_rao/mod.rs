//! Khatri-Rao products: each column of one matrix times that of another, number by number in all pairs,
//!
//! columns: a [r, n], b [s, n] to [r·s, n], y(i·s + j, c) = a(i, c)·b(j, c)
//! rows:    a [n, r], b [n, s] to [n, r·s], y(c, i·s + j) = a(c, i)·b(c, j)
//!
//! all f32. With them the elementwise product of two low-rank matrices is one low-rank matrix, which never exists
//! as a whole: (B·A) ⊙ (D·C) is B and D by rows, times A and C by columns. So `LoHa`
//! (Hyeon-Woo et al., "`FedPara`", arXiv 2108.06098) of rank r is a `LoRA` of rank r².
//!
//! Saved for backward: a and b.

mod cpu;
mod cuda;
mod gpu;
#[cfg(test)]
mod tests;

use crate::backward::BackwardPass;
use crate::device::Backend;
use crate::op::Op;
use crate::tape::Tape;
use crate::var::{GradTarget, SavedTensor, Var};
use crate::{Dtype, Result, Shape, Tensor};

/// What two matrices of a Khatri-Rao product have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SharedAxis {
    /// The number of rows.
    Rows,
    /// The number of columns.
    Columns,
}

impl SharedAxis {
    /// What is shared, and what is not.
    fn sizes(self, shape: Shape) -> [usize; 2] {
        match self {
            Self::Rows => [shape.rows(), shape.width()],
            Self::Columns => [shape.width(), shape.rows()],
        }
    }

    fn shape(self, shared: usize, own: usize) -> Shape {
        match self {
            Self::Rows => [shared, own].into(),
            Self::Columns => [own, shared].into(),
        }
    }
}

/// Sizes of a Khatri-Rao product.
#[derive(Clone, Copy)]
struct KhatriRaoSizes {
    axis: SharedAxis,
    shared: usize,
    /// Of a and of b.
    own: [usize; 2],
}

/// One factor's gradient: which of the result's numbers belong to a number of the factor.
#[derive(Clone, Copy)]
struct FactorSizes {
    axis: SharedAxis,
    shared: usize,
    /// Of the factor and of the other one.
    own: [usize; 2],
    /// The step in the result from one of them to the next.
    steps: [usize; 2],
}

impl KhatriRaoSizes {
    fn of(axis: SharedAxis, a: Shape, b: Shape) -> Self {
        let [shared, r] = axis.sizes(a);
        Self { axis, shared, own: [r, axis.sizes(b)[1]] }
    }

    fn result(self) -> Shape {
        self.axis.shape(self.shared, self.own[0] * self.own[1])
    }

    /// Of the first factor's gradient, or the second's.
    fn factor(self, is_second: bool) -> FactorSizes {
        let Self { axis, shared, own: [r, s] } = self;
        let (own, steps) = if is_second { ([s, r], [1, s]) } else { ([r, s], [s, 1]) };
        FactorSizes { axis, shared, own, steps }
    }
}

impl Tape<'_> {
    /// The Khatri-Rao product of two f32 matrices; see the module's comment.
    pub fn khatri_rao(&self, a: &Var, b: &Var, axis: SharedAxis) -> Result<Var> {
        let op = self.begin_op("khatri_rao");
        check(&op, a.tensor(), b.tensor(), axis)?;
        let sizes = KhatriRaoSizes::of(axis, a.shape(), b.shape());
        let mut y = op.alloc(sizes.result(), Dtype::F32)?;
        op.count(y.shape().elements(), &[a.tensor(), b.tensor(), &y]);
        match op.backend() {
            Backend::Meta => {}
            Backend::Cpu(cpu) => cpu::forward(cpu, sizes, a.tensor(), b.tensor(), &mut y),
            Backend::Cuda(cuda) => cuda::forward(cuda, sizes, a.tensor(), b.tensor(), &mut y),
            Backend::Gpu(gpu) => gpu::forward(gpu, sizes, a.tensor(), b.tensor(), &mut y),
        }
        let result = op.result(y);
        if !self.requires_grad(&[a, b]) {
            return Ok(result);
        }
        let factors = [
            (a.grad_target(), self.save_for_backward(b), sizes.factor(false)),
            (b.grad_target(), self.save_for_backward(a), sizes.factor(true)),
        ];
        Ok(self.record(result, move |back, gradient| {
            factors.into_iter().try_for_each(|(target, other, sizes)| {
                let Some(target) = target else { return Ok(()) };
                factor_gradient(back, target, &gradient, &other, sizes)
            })
        }))
    }
}

fn check(op: &Op<'_>, a: &Tensor, b: &Tensor, axis: SharedAxis) -> Result<()> {
    let [_, _] = op.expect_rank("a", a)?;
    let [_, _] = op.expect_rank("b", b)?;
    op.expect_dtype("a", a, Dtype::F32)?;
    op.expect_dtype("b", b, Dtype::F32)?;
    let ([shared, _], [_, own]) = (axis.sizes(a.shape()), axis.sizes(b.shape()));
    op.expect_shape("b", b, axis.shape(shared, own))
}

fn factor_gradient(
    back: &mut BackwardPass<'_>,
    target: GradTarget,
    gradient: &Tensor,
    other: &SavedTensor,
    sizes: FactorSizes,
) -> Result<()> {
    let cx = back.cx;
    let other = other.get(cx)?;
    let mut slot = back.slot(target, sizes.axis.shape(sizes.shared, sizes.own[0]), Dtype::F32)?;
    let work = 2 * gradient.shape().elements();
    cx.count("khatri_rao backward", work, &[gradient, &other, &slot.tensor]);
    match cx.backend() {
        Backend::Meta => {}
        Backend::Cpu(cpu) => cpu::backward(cpu, sizes, gradient, &other, &mut slot),
        Backend::Cuda(cuda) => cuda::backward(cuda, sizes, gradient, &other, &mut slot),
        Backend::Gpu(gpu) => gpu::backward(gpu, sizes, gradient, &other, &mut slot),
    }
    back.put(slot);
    Ok(())
}
