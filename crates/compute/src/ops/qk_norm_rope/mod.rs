//! What happens to queries and keys between their linear layer and attention, in one pass: for
//! every head x `[d]` of x [samples, tokens, heads·d],
//!
//! y = R(x̂·weight) with x̂ = x / √(mean(x²) + ε),
//!
//! where R turns pairs of numbers by the angles of the token's position: of the whole head, or of its
//! first numbers only, as many as the table is wide. The norm with its weight `[d]` and the rotation
//! can each be left out.
//!
//! Saved for backward: x, and without a norm nothing. The norm is computed again.

mod cpu;
mod cuda;
mod gpu;
mod rope;
#[cfg(test)]
mod tests;

pub use rope::{Rope, RopeAxis, RopePairs, rope_table};

use super::inputs;
use super::tokens::check_parts;
use crate::backward::{BackwardPass, GradientSlot};
use crate::cpu::sums::n_row_blocks;
use crate::device::{Backend, DeviceKind};
use crate::gpu::columns::row_shares;
use crate::op::{Op, OpContext};
use crate::tape::Tape;
use crate::var::{GradTarget, Remat, SavedTensor, Var};
use crate::{Dtype, Result, Shape, Tensor};

/// What is done to each head.
#[derive(Clone, Copy)]
pub struct QkNormRope<'a> {
    /// How many heads a row consists of.
    pub n_heads: usize,
    /// A norm's weight, f32 and as wide as a head, and its ε.
    pub norm: Option<(&'a Var, f32)>,
    /// A rotation after it.
    pub rope: Option<Rope<'a>>,
}

/// FLOPs per element, for the work counter.
const FLOPS: usize = 9;

impl Tape<'_> {
    /// Normalises and turns the heads of queries or keys; see the module's comment.
    pub fn qk_norm_rope(&self, x: &Var, heads: QkNormRope<'_>) -> Result<Var> {
        let op = self.begin_op("qk_norm_rope");
        let form = check(&op, x, heads)?;
        let weight = heads.norm.map(|(weight, _)| weight);
        if weight.is_none() && form.rope.is_none() {
            return Ok(x.clone());
        }
        let y = forward(op.cx, x.tensor(), weight.map(Var::tensor), &form)?;
        let result = op.result(y);
        // Without a norm nobody needs x any more, and the result takes no more memory than x would.
        let is_kept = weight.is_none() && x.remat.is_none();
        let result = if is_kept {
            result
        } else {
            self.with_remat(result, || remat(x, weight, form.clone()))
        };
        if !self.requires_grad(&inputs([Some(x), weight])) {
            return Ok(result);
        }
        let norm = weight.map(|weight| SavedNorm {
            x: self.save_for_backward(x),
            weight: self.save_for_backward(weight),
            source: weight.grad_target(),
        });
        let record = QkNormRopeBackward { norm, source: x.grad_target(), form };
        Ok(self.record(result, move |back, gradient| record.backward(back, gradient)))
    }
}

impl Tape<'_> {
    /// The heads of several streams, each as by [`Tape::qk_norm_rope`], as the tokens of one tensor. Of one sample with
    /// frozen norms nothing is copied, in forward and in backward.
    pub fn qk_norm_rope_concat(&self, streams: &[(&Var, QkNormRope<'_>)]) -> Result<Var> {
        let is_in_place = |(x, heads): &(&Var, QkNormRope<'_>)| {
            let is_frozen = heads.norm.is_none_or(|(weight, _)| weight.grad_target().is_none());
            let is_one = x.shape().sizes().first() == Some(&1);
            let is_any = heads.norm.is_some() || heads.rope.is_some();
            is_one && is_frozen && x.remat.is_none() && is_any
        };
        if !streams.iter().all(is_in_place) {
            let each = streams.iter().map(|(x, heads)| self.qk_norm_rope(x, *heads));
            let each = each.collect::<Result<Vec<Var>>>()?;
            return self.concat_tokens(&each.iter().collect::<Vec<_>>());
        }
        let op = self.begin_op("qk_norm_rope_concat");
        let inputs: Vec<&Var> = streams.iter().map(|(x, _)| *x).collect();
        let shape = check_parts(&op, &inputs)?;
        let forms = streams.iter().map(|(x, heads)| check(&op, x, *heads));
        let forms = forms.collect::<Result<Vec<_>>>()?;
        let weights =
            streams.iter().map(|(_, heads)| heads.norm.map(|(weight, _)| weight.tensor()));
        let tensors = inputs.iter().map(|x| x.tensor()).zip(weights);
        let y = concat(op.cx, shape, tensors.zip(&forms))?;
        let result = self.with_remat(op.result(y), || remat_of_all(streams, &forms, shape));
        if !self.requires_grad(&inputs) {
            return Ok(result);
        }
        let stream = |((x, heads), form): (&(&Var, QkNormRope<'_>), QkNormRopeConfig)| {
            let saved = |(weight, _): (&Var, f32)| SavedNorm {
                x: self.save_for_backward(x),
                weight: self.save_for_backward(weight),
                source: None,
            };
            let (norm, source) = (heads.norm.map(saved), x.grad_target());
            (x.shape(), QkNormRopeBackward { norm, source, form })
        };
        let saved: Vec<_> = streams.iter().zip(forms).map(stream).collect();
        Ok(self.record(result, move |back, gradient| backward_of_all(back, saved, gradient)))
    }
}

/// Each stream in its place.
fn concat<'a>(
    cx: OpContext<'_>,
    shape: Shape,
    streams: impl Iterator<Item = ((&'a Tensor, Option<&'a Tensor>), &'a QkNormRopeConfig)>,
) -> Result<Tensor> {
    let mut streams = streams.peekable();
    let dtype = streams.peek().map_or(Dtype::F32, |((x, _), _)| x.dtype());
    let mut y = cx.alloc([shape.rows(), shape.width()], dtype)?;
    let mut first = 0;
    for ((x, weight), form) in streams {
        let rows = first..first + x.shape().rows();
        first = rows.end;
        y.with_range_mut(rows, |y| forward_into(cx, x, weight, form, y));
    }
    Ok(y.into_shape(shape))
}

fn remat_of_all(
    streams: &[(&Var, QkNormRope<'_>)],
    forms: &[QkNormRopeConfig],
    shape: Shape,
) -> Remat {
    let (mut needs, mut saved) = (Vec::new(), Vec::new());
    for ((x, heads), form) in streams.iter().zip(forms) {
        let (x, more) = x.to_saved();
        needs.extend(more);
        let weight = heads.norm.map(|(weight, _)| {
            let (weight, more) = weight.to_saved();
            needs.extend(more);
            weight
        });
        saved.push((x, weight, form.clone()));
    }
    Remat::new(needs, move |cx| {
        let tensors = saved.iter().map(|(x, weight, _)| {
            Ok((x.get(cx)?, weight.as_ref().map(|weight| weight.get(cx)).transpose()?))
        });
        let tensors = tensors.collect::<Result<Vec<_>>>()?;
        let each = tensors.iter().map(|(x, weight)| (x, weight.as_ref()));
        concat(cx, shape, each.zip(saved.iter().map(|(.., form)| form)))
    })
}

/// Each stream's gradient is a part of the whole, in place.
fn backward_of_all(
    back: &mut BackwardPass<'_>,
    streams: Vec<(Shape, QkNormRopeBackward)>,
    gradient: Tensor,
) -> Result<()> {
    let (cx, shape) = (back.cx, gradient.shape());
    let mut gradient = gradient.into_unique()?.into_shape([shape.rows(), shape.width()].into());
    let (mut first, mut parts) = (0, Vec::new());
    for (shape, QkNormRopeBackward { norm, source, form }) in streams {
        let rows = first..first + shape.rows();
        first = rows.end;
        let norm = norm.map(|norm| Ok((norm.x.get(cx)?, norm.weight.get(cx)?))).transpose()?;
        gradient.with_range_mut(rows.clone(), |part| {
            backward_into(cx, norm.as_ref(), &form, part, None);
        });
        parts.push((source, rows, shape));
    }
    parts.into_iter().try_for_each(|(source, rows, shape)| {
        back.pass(source, gradient.narrow(rows).into_shape(shape))
    })
}

/// Checks all shapes and dtypes.
fn check(op: &Op<'_>, x: &Var, heads: QkNormRope<'_>) -> Result<QkNormRopeConfig> {
    op.expect_real("x", x.tensor())?;
    let [samples, tokens, width] = op.expect_rank("x", x.tensor())?;
    let head_width = op.expect_multiple("width of x", width, heads.n_heads)?;
    if let Some((weight, _)) = heads.norm {
        op.expect_vector("weight", weight.tensor(), head_width)?;
    }
    if let Some(Rope { table, .. }) = heads.rope {
        let rotary = table.shape().width();
        op.expect_multiple("width of table", rotary, 2)?;
        let is_fit = rotary <= head_width && (rotary > 0 || head_width == 0);
        let expected = format!("2 to the width of a head, {head_width}");
        op.expect_range("width of table", &rotary, is_fit, &expected)?;
        op.expect_dtype("table", table, Dtype::F32)?;
        if table.shape().sizes().len() == 3 {
            op.expect_shape("table", table, [samples, tokens, rotary])?;
        } else {
            op.expect_shape("table", table, [tokens, rotary])?;
        }
    }
    Ok(QkNormRopeConfig {
        head_width,
        epsilon: heads.norm.map_or(0.0, |(_, epsilon)| epsilon),
        rope: heads.rope.map(|rope| (rope.table.clone(), rope.pairs)),
    })
}

/// All about the op but what is trained.
#[derive(Clone)]
struct QkNormRopeConfig {
    head_width: usize,
    epsilon: f32,
    rope: Option<(Tensor, RopePairs)>,
}

impl QkNormRopeConfig {
    /// How many numbers of a head are turned.
    fn rotary_width(&self) -> usize {
        self.rope.as_ref().map_or(0, |(table, _)| table.shape().width())
    }
}

fn remat(x: &Var, weight: Option<&Var>, form: QkNormRopeConfig) -> Remat {
    let (x, mut needs) = x.to_saved();
    let weight = weight.map(|weight| {
        let (weight, more) = weight.to_saved();
        needs.extend(more);
        weight
    });
    Remat::new(needs, move |cx| {
        let weight = weight.as_ref().map(|weight| weight.get(cx)).transpose()?;
        forward(cx, &x.get(cx)?, weight.as_ref(), &form)
    })
}

fn forward(
    cx: OpContext<'_>,
    x: &Tensor,
    weight: Option<&Tensor>,
    form: &QkNormRopeConfig,
) -> Result<Tensor> {
    let mut y = cx.alloc(x.shape(), x.dtype())?;
    forward_into(cx, x, weight, form, &mut y);
    Ok(y)
}

fn forward_into(
    cx: OpContext<'_>,
    x: &Tensor,
    weight: Option<&Tensor>,
    form: &QkNormRopeConfig,
    y: &mut Tensor,
) {
    cx.count("qk_norm_rope", FLOPS * x.shape().elements(), &[x, y]);
    match cx.backend() {
        Backend::Meta => {}
        Backend::Cpu(backend) => cpu::forward(backend, x, weight, form, y),
        Backend::Cuda(backend) => cuda::forward(backend, x, weight, form, y),
        Backend::Gpu(backend) => gpu::forward(backend, x, weight, form, y),
    }
}

struct QkNormRopeBackward {
    norm: Option<SavedNorm>,
    source: Option<GradTarget>,
    form: QkNormRopeConfig,
}

struct SavedNorm {
    x: SavedTensor,
    weight: SavedTensor,
    source: Option<GradTarget>,
}

impl QkNormRopeBackward {
    /// On a GPU one pass finds both gradients; elsewhere the weight's has a pass of its own.
    fn backward(self, back: &mut BackwardPass<'_>, gradient: Tensor) -> Result<()> {
        let (cx, form) = (back.cx, &self.form);
        let (norm, source) = match self.norm {
            None => (None, None),
            Some(SavedNorm { x, weight, source }) => (Some((x.get(cx)?, weight.get(cx)?)), source),
        };
        let mut slot = back.slot_of(source, [form.head_width].into(), Dtype::F32)?;
        let n_partial = slot.as_ref().map_or(0, |_| n_partial(cx, gradient.shape().rows()));
        let mut partial = cx.workspace([n_partial, form.head_width], Dtype::F32)?;
        // In place: queries and keys have no other use that a gradient would be added up with.
        let mut gradient = gradient.into_unique()?;
        let mut of_weight = slot.as_mut().map(|slot| (&mut partial, slot));
        let norm = norm.as_ref();
        if let (Some((x, _)), Some(of_weight)) = (norm, &mut of_weight) {
            weight_gradient(cx, x, &gradient, form, of_weight);
        }
        backward_into(cx, norm, form, &mut gradient, of_weight);
        if let Some(slot) = slot {
            back.put(slot);
        }
        back.pass(self.source, gradient)
    }
}

/// Turns the gradient of the result into that of x, in place.
fn backward_into(
    cx: OpContext<'_>,
    norm: Option<&(Tensor, Tensor)>,
    form: &QkNormRopeConfig,
    gradient: &mut Tensor,
    of_weight: Option<(&mut Tensor, &mut GradientSlot)>,
) {
    let mut tensors = vec![&*gradient, &*gradient];
    tensors.extend(norm.map(|(x, _)| x));
    cx.count("qk_norm_rope backward", FLOPS * gradient.shape().elements(), &tensors);
    match cx.backend() {
        Backend::Meta => {}
        Backend::Cpu(backend) => cpu::backward(backend, norm, form, gradient),
        Backend::Cuda(backend) => cuda::backward(backend, norm, form, gradient),
        Backend::Gpu(backend) => gpu::backward(backend, norm, form, gradient, of_weight),
    }
}

/// How many sums the weight's gradient is made of.
fn n_partial(cx: OpContext<'_>, rows: usize) -> usize {
    match cx.device.kind() {
        DeviceKind::Cpu { .. } | DeviceKind::Cuda { .. } => n_row_blocks(rows),
        DeviceKind::Gpu { .. } => row_shares(rows).1,
    }
}

/// The weight's gradient where it has a pass of its own.
fn weight_gradient(
    cx: OpContext<'_>,
    x: &Tensor,
    gradient: &Tensor,
    form: &QkNormRopeConfig,
    (partial, slot): &mut (&mut Tensor, &mut GradientSlot),
) {
    if !matches!(cx.device.kind(), DeviceKind::Gpu { .. }) {
        let work = FLOPS * x.shape().elements();
        cx.count("qk_norm_rope weight backward", work, &[x, gradient]);
    }
    match cx.backend() {
        Backend::Meta | Backend::Gpu(_) => {}
        Backend::Cpu(backend) => cpu::weight_gradient(backend, x, gradient, form, partial, slot),
        Backend::Cuda(backend) => cuda::weight_gradient(backend, x, gradient, form, partial, slot),
    }
}
