//! Rows as groups of equal width, mixed by a matrix:
//!
//! y(t, i, :) = scale·Σₚ w(i, p)·x(t, p, :)
//!
//! for x of rows with m groups of `width` numbers, w [l, m], f32, and y [rows·l, width]: a group is a row of the
//! result, so that a [`linear`](crate::Tape::linear) layer may follow which treats all groups alike. The two
//! together are a linear layer whose weight is the Kronecker product w ⊗ v, which never exists as a whole:
//!
//! x·(w ⊗ v)ᵀ = mix(x, w)·vᵀ
//!
//! as `LoKr` has it (Yeh et al., "Navigating Text-To-Image Customization", arXiv 2309.14859).
//!
//! Saved for backward: x if w is trained, and w. Readers of y recompute it.

mod cpu;
mod cuda;
mod gpu;
#[cfg(test)]
mod tests;

use crate::backward::BackwardPass;
use crate::cpu::sums::n_row_blocks;
use crate::device::{Backend, DeviceKind};
use crate::op::{Op, OpContext};
use crate::tape::Tape;
use crate::var::{GradTarget, Remat, SavedTensor, Var};
use crate::{Dtype, Result, Shape, Tensor};

/// What is mixed: `rows` of `from` groups to as many of `to` groups.
#[derive(Clone, Copy)]
struct MixSizes {
    rows: usize,
    from: usize,
    to: usize,
    width: usize,
    scale: f32,
}

impl MixSizes {
    /// The other way round, as gradients go.
    fn backward(self) -> Self {
        Self { from: self.to, to: self.from, ..self }
    }

    fn flops(self) -> usize {
        2 * self.rows * self.from * self.to * self.width
    }
}

/// A matrix [to, from], read by rows or, as backward has it, by columns.
#[derive(Clone, Copy)]
struct MixWeight<'a> {
    values: &'a Tensor,
    /// From one number of a row to the next, and from one row to the next.
    steps: [usize; 2],
}

impl Tape<'_> {
    /// The groups of `width` numbers in x mixed by a matrix w; see the module's comment.
    pub fn mix_groups(&self, x: &Var, w: &Var, width: usize, scale: f32) -> Result<Var> {
        let op = self.begin_op("mix_groups");
        let sizes = check(&op, x.tensor(), w.tensor(), width, scale)?;
        let y = forward(op.cx, x.tensor(), w.tensor(), sizes)?;
        let result = self.with_remat(op.result(y), || remat(x, w, sizes));
        if !self.requires_grad(&[x, w]) {
            return Ok(result);
        }
        let record = MixBackward {
            x: (w.grad_target().map(|_| self.save_for_backward(x)), x.grad_target(), x.shape()),
            w: (self.save_for_backward(w), w.grad_target()),
            sizes,
        };
        Ok(self.record(result, move |back, gradient| record.backward(back, &gradient)))
    }
}

fn check(op: &Op<'_>, x: &Tensor, w: &Tensor, width: usize, scale: f32) -> Result<MixSizes> {
    op.expect_real("x", x)?;
    op.expect_dtype("w", w, Dtype::F32)?;
    let [to, from] = op.expect_rank("w", w)?;
    let rows = match from * width {
        0 => 0,
        row => op.expect_multiple("x", x.shape().elements(), row)?,
    };
    Ok(MixSizes { rows, from, to, width, scale })
}

fn remat(x: &Var, w: &Var, sizes: MixSizes) -> Remat {
    let ((x, mut needs), (w, more)) = (x.to_saved(), w.to_saved());
    needs.extend(more);
    Remat::new(needs, move |cx| forward(cx, &x.get(cx)?, &w.get(cx)?, sizes))
}

fn forward(cx: OpContext<'_>, x: &Tensor, w: &Tensor, sizes: MixSizes) -> Result<Tensor> {
    let mut y = cx.alloc([sizes.rows * sizes.to, sizes.width], x.dtype())?;
    mix(cx, x, MixWeight { values: w, steps: [1, sizes.from] }, sizes, &mut y, false);
    Ok(y)
}

fn mix(
    cx: OpContext<'_>,
    x: &Tensor,
    w: MixWeight<'_>,
    sizes: MixSizes,
    y: &mut Tensor,
    add: bool,
) {
    cx.count("mix_groups", sizes.flops(), &[x, w.values, y]);
    match cx.backend() {
        Backend::Meta => {}
        Backend::Cpu(cpu) => cpu::mix(cpu, x, w, sizes, y, add),
        Backend::Cuda(cuda) => cuda::mix(cuda, x, w, sizes, y, add),
        Backend::Gpu(gpu) => gpu::mix(gpu, x, w, sizes, y, add),
    }
}

struct MixBackward {
    x: (Option<SavedTensor>, Option<GradTarget>, Shape),
    w: (SavedTensor, Option<GradTarget>),
    sizes: MixSizes,
}

impl MixBackward {
    fn backward(self, back: &mut BackwardPass<'_>, gradient: &Tensor) -> Result<()> {
        let (cx, sizes) = (back.cx, self.sizes);
        let (saved_x, x_target, x_shape) = self.x;
        if let (Some(target), Some(x)) = (self.w.1, saved_x) {
            weight_gradient(back, target, &x.get(cx)?, gradient, sizes)?;
        }
        let Some(target) = x_target else { return Ok(()) };
        let w = self.w.0.get(cx)?;
        let mut slot = back.slot(target, x_shape, gradient.dtype())?;
        let w = MixWeight { values: &w, steps: [sizes.from, 1] };
        mix(cx, gradient, w, sizes.backward(), &mut slot.tensor, slot.add);
        back.put(slot);
        Ok(())
    }
}

/// Rows of a partial sum on a GPU. Chosen: work enough for a group of threads, and few sums to add up.
const SHARE_ROWS: usize = 64;

/// scale·Σ gradient(t, i, :)·x(t, p, :) over all rows t.
fn weight_gradient(
    back: &mut BackwardPass<'_>,
    target: GradTarget,
    x: &Tensor,
    gradient: &Tensor,
    sizes: MixSizes,
) -> Result<()> {
    let cx = back.cx;
    let MixSizes { rows, from, to, .. } = sizes;
    let mut slot = back.slot(target, [to, from].into(), Dtype::F32)?;
    let n_partial = match cx.device.kind() {
        DeviceKind::Cpu { .. } => n_row_blocks(rows),
        DeviceKind::Cuda { .. } => rows.div_ceil(SHARE_ROWS),
        DeviceKind::Gpu { .. } => 0,
    };
    let mut partial = cx.workspace([n_partial, to * from], Dtype::F32)?;
    cx.count("mix_groups weight backward", sizes.flops(), &[x, gradient, &slot.tensor]);
    match cx.backend() {
        Backend::Meta => {}
        Backend::Cpu(cpu) => cpu::weight_gradient(cpu, x, gradient, sizes, &mut partial, &mut slot),
        Backend::Cuda(cuda) => {
            cuda::weight_gradient(cuda, x, gradient, sizes, &mut partial, &mut slot);
        }
        Backend::Gpu(gpu) => gpu::weight_gradient(gpu, x, gradient, sizes, &mut slot),
    }
    back.put(slot);
    Ok(())
}
