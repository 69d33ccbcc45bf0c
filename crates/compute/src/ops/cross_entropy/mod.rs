//! The cross entropy of a vocabulary's logits, one number in f32:
//!
//! mean over the counted rows of log Σᵥ exp(xᵣ·wᵥ) - xᵣ·w(targetᵣ)
//!
//! for x [.., width], weight [vocabulary, width] and targets [..]; rows whose target is [`IGNORE_INDEX`]
//! do not count. The logits, rows × vocabulary, are far larger than all the rest, so they never
//! exist as a whole: those of some rows at a time are computed in pieces of some columns, each of
//! which is folded into a maximum and a sum per row (Milakov and Gimelshein, "Online normalizer
//! calculation for softmax", arXiv 1805.02867).
//!
//! Gradients are computed in the forward pass, while the logits are at hand: the loss is a scalar, so its own
//! gradient is only a factor. Recomputing the logits in backward was the alternative; it saves nothing, and
//! takes a third more matmuls. Kept for backward: the gradients of x and
//! of the weight, in f32, as far as they are wanted.
//!
//! Losses of whole texts, such as those of preferences, weigh the rows by what all rows came to:
//!
//! Σᵣ aᵣ·(log Σᵥ exp(xᵣ·wᵥ) - xᵣ·w(targetᵣ)) has the gradients, where the aᵣ are known only after the last row.
//!
//! The gradient of a row of x is then scaled afterwards. That of the weight sums over rows, so for a trained weight the
//! logits are computed a second time.

mod cpu;
mod cuda;
mod gpu;
#[cfg(test)]
mod tests;

use std::ops::Range;

use super::elementwise::convert;
use super::matmul::{FusedMatmul, Matmul, Operand};
use crate::backward::GradientSlot;
use crate::device::{Backend, DeviceKind};
use crate::op::{Op, OpContext};
use crate::tape::Tape;
use crate::var::Var;
use crate::{ComputeError, Dtype, Result, Shape, Tensor};

/// The target of a row that does not count.
pub const IGNORE_INDEX: u32 = u32::MAX;

/// Bytes of the logits that exist at a time, if that is rows enough. Chosen: small beside what a model
/// saves, and 512 rows of the usual vocabulary of 32000.
const LOGITS: usize = 64 << 20;
/// The same on a GPU. Chosen: its matmuls want thousands of rows.
const LOGITS_ON_GPU: usize = 256 << 20;
/// The fewest rows at a time, however large the vocabulary is. Each time the whole table is read, and its
/// gradient is added to.
const FEWEST_ROWS: usize = 256;
/// Columns of a piece of the logits. Chosen: as deep as matmuls are elsewhere, since the gradient of x
/// sums over them.
const COLUMNS: usize = 2048;
const COLUMNS_ON_GPU: usize = 32_768;
/// FLOPs per logit, for the work counter; an exponential counts as ten.
const FLOPS: usize = 13;

impl Tape<'_> {
    /// The mean over the rows of `x` [.., width] of the cross entropy between softmax(x·`weight`ᵀ)
    /// and `targets` [..], u32, for a weight [vocabulary, width]. Rows of target [`IGNORE_INDEX`] do not
    /// count.
    pub fn cross_entropy(&self, x: &Var, weight: &Var, targets: &Tensor) -> Result<Var> {
        self.cross_entropy_by(self.logits_chunk(x, weight), x, weight, targets)
    }

    /// The same, and the loss of each row. No gradient leads through those.
    pub fn cross_entropy_with_rows(
        &self,
        x: &Var,
        weight: &Var,
        targets: &Tensor,
    ) -> Result<(Var, RowLosses)> {
        self.cross_entropy_rows_by(self.logits_chunk(x, weight), x, weight, targets)
    }

    /// A loss of the rows' cross entropies, in nats: `weigh` gets them all and says what the loss is, and its derivative
    /// by each of them. Those of rows of target [`IGNORE_INDEX`] mean nothing. On a meta device all are zero.
    pub fn weighted_cross_entropy<E: From<ComputeError>>(
        &self,
        x: &Var,
        weight: &Var,
        targets: &Tensor,
        weigh: impl FnOnce(&[f64]) -> std::result::Result<RowWeights, E>,
    ) -> std::result::Result<Var, E> {
        self.weighted_by(self.logits_chunk(x, weight), x, weight, targets, weigh)
    }

    fn weighted_by<E: From<ComputeError>>(
        &self,
        cut: LogitsChunkSize,
        x: &Var,
        weight: &Var,
        targets: &Tensor,
        weigh: impl FnOnce(&[f64]) -> std::result::Result<RowWeights, E>,
    ) -> std::result::Result<Var, E> {
        let op = self.begin_op("weighted_cross_entropy");
        check(&op, x, weight, targets)?;
        let n_rows = x.shape().rows();
        let wanted = LossGradients::wanted(self, op.cx, x, weight)?;
        let mut of_x = LossGradients { x: wanted.x, weight: None };
        let mut of_weight = LossGradients { x: None, weight: wanted.weight };
        let mut folds = op.workspace([n_rows, FOLD], Dtype::F32)?;
        let all = LossRows {
            x: x.tensor().reshape([n_rows, x.shape().width()]),
            weight: table(&op, weight.tensor(), x.dtype())?,
            targets: targets.reshape([n_rows]),
        };
        for range in chunks(n_rows, cut.rows) {
            let rows = all.part(range.clone());
            folds.with_range_mut(range.clone(), |folds| {
                let pieces = rows.fold(&op, cut.columns, folds, of_x.is_any())?;
                rows.backward(op.cx, range, pieces, folds, &mut of_x)
            })?;
        }
        let losses = RowLosses { folds };
        let RowWeights { loss, weights } = weigh(&losses.read()?)?;
        let result = op.result(self.device().upload([], &[loss as f32])?);
        if !of_x.is_any() && !of_weight.is_any() {
            return Ok(result);
        }
        let weights = self.device().upload([n_rows], &weights)?;
        if let Some(sum) = &mut of_x.x {
            scale_rows(op.cx, &weights, sum);
        }
        if of_weight.is_any() {
            let mut x = op.workspace(all.x.shape(), x.dtype())?;
            convert(op.cx, &all.x, &mut x);
            scale_rows(op.cx, &weights, &mut x);
            for range in chunks(n_rows, cut.rows) {
                let (rows, folds) = (all.part(range.clone()), losses.folds.narrow(range.clone()));
                let pieces = rows.all_logits(&op, cut.columns)?;
                let rows = LossRows { x: x.narrow(range.clone()), ..rows };
                rows.backward(op.cx, range, pieces, &folds, &mut of_weight)?;
            }
        }
        self.save_extra(&op);
        let inputs = [x, weight].map(|var| (var.grad_target(), var.shape(), var.dtype()));
        Ok(self.record(result, move |back, gradient| {
            for (sum, (source, shape, dtype)) in [of_x.x, of_weight.weight].into_iter().zip(inputs)
            {
                let Some(sum) = sum else { continue };
                let Some(mut slot) = back.slot_of(source, shape, dtype)? else { continue };
                add_scaled(back.cx, &sum, &gradient, 1.0, &mut slot);
                back.put(slot);
            }
            Ok(())
        }))
    }

    fn logits_chunk(&self, x: &Var, weight: &Var) -> LogitsChunkSize {
        let (kind, is_trained) = (self.device().kind(), weight.grad_target().is_some());
        LogitsChunkSize::of(weight.shape(), is_trained, logits_dtype(x.dtype(), kind), kind)
    }

    /// The mean with so much of the logits at a time.
    fn cross_entropy_by(
        &self,
        cut: LogitsChunkSize,
        x: &Var,
        weight: &Var,
        targets: &Tensor,
    ) -> Result<Var> {
        Ok(self.cross_entropy_rows_by(cut, x, weight, targets)?.0)
    }

    /// The same, and the loss of each row.
    fn cross_entropy_rows_by(
        &self,
        cut: LogitsChunkSize,
        x: &Var,
        weight: &Var,
        targets: &Tensor,
    ) -> Result<(Var, RowLosses)> {
        let op = self.begin_op("cross_entropy");
        check(&op, x, weight, targets)?;
        let n_rows = x.shape().rows();
        let mut mean = op.alloc([], Dtype::F32)?;
        let mut sums = LossGradients::wanted(self, op.cx, x, weight)?;
        let mut folds = op.workspace([n_rows, FOLD], Dtype::F32)?;
        let all = LossRows {
            x: x.tensor().reshape([n_rows, x.shape().width()]),
            weight: table(&op, weight.tensor(), x.dtype())?,
            targets: targets.reshape([n_rows]),
        };
        for range in chunks(n_rows, cut.rows) {
            let rows = all.part(range.clone());
            folds.with_range_mut(range.clone(), |folds| {
                let pieces = rows.fold(&op, cut.columns, folds, sums.is_any())?;
                rows.backward(op.cx, range, pieces, folds, &mut sums)
            })?;
        }
        match op.backend() {
            Backend::Meta => {}
            Backend::Cpu(backend) => cpu::finish(backend, &folds, targets, &mut mean),
            Backend::Cuda(backend) => cuda::finish(backend, &folds, targets, &mut mean),
            Backend::Gpu(backend) => gpu::finish(backend, &folds, targets, &mut mean),
        }
        let (result, losses) = (op.result(mean), RowLosses { folds });
        if !sums.is_any() {
            return Ok((result, losses));
        }
        self.save_extra(&op);
        let share = 1.0 / count(targets) as f32;
        let inputs = [x, weight].map(|var| (var.grad_target(), var.shape(), var.dtype()));
        let result = self.record(result, move |back, gradient| {
            for (sum, (source, shape, dtype)) in [sums.x, sums.weight].into_iter().zip(inputs) {
                let Some(sum) = sum else { continue };
                let Some(mut slot) = back.slot_of(source, shape, dtype)? else { continue };
                add_scaled(back.cx, &sum, &gradient, share, &mut slot);
                back.put(slot);
            }
            Ok(())
        });
        Ok((result, losses))
    }
}

/// A loss of all rows together.
#[derive(Clone, Debug, PartialEq)]
pub struct RowWeights {
    /// What it is.
    pub loss: f64,
    /// Its derivative by the cross entropy of each row.
    pub weights: Vec<f32>,
}

/// The loss of each row, still on the device.
pub struct RowLosses {
    /// [rows, FOLD]
    folds: Tensor,
}

impl RowLosses {
    /// Copies them to the host, in nats. Zeros on a meta device. That of a row that does not count means nothing.
    pub fn read(&self) -> Result<Vec<f64>> {
        if self.folds.device().is_meta() {
            return Ok(vec![0.0; self.folds.shape().rows()]);
        }
        let folds = self.folds.read::<f32>()?;
        let loss = |[largest, sum, target]: &[f32; FOLD]| {
            f64::from(*largest) - f64::from(*target) + f64::from(*sum).ln()
        };
        Ok(folds.as_chunks().0.iter().map(loss).collect())
    }
}

/// How much of the logits exists at a time.
#[derive(Clone, Copy)]
struct LogitsChunkSize {
    rows: usize,
    /// Of a piece.
    columns: usize,
}

impl LogitsChunkSize {
    /// For a table of this shape that is trained, or not, and logits of a dtype.
    fn of(table: Shape, is_trained: bool, logits: Dtype, kind: DeviceKind) -> Self {
        let (bytes, columns) = match kind {
            DeviceKind::Cpu { .. } | DeviceKind::Gpu { .. } => (LOGITS, COLUMNS),
            // As many as the table's gradient has, so that adding to that is little beside them.
            DeviceKind::Cuda { .. } if is_trained => {
                (LOGITS_ON_GPU.max(table.elements() * Dtype::F32.bytes()), COLUMNS_ON_GPU)
            }
            DeviceKind::Cuda { .. } => (LOGITS_ON_GPU, COLUMNS_ON_GPU),
        };
        let most = bytes / logits.bytes() / table.rows().max(1);
        Self { rows: (most / FEWEST_ROWS * FEWEST_ROWS).max(FEWEST_ROWS), columns }
    }
}

/// The dtype of the logits and of their gradients. CUDA gets them in bf16 where x is bf16: to write and read
/// them in f32 takes as long as half a matmul, and they are rounded anyway to be multiplied.
fn logits_dtype(x: Dtype, kind: DeviceKind) -> Dtype {
    match kind {
        DeviceKind::Cuda { .. } if x == Dtype::Bf16 => Dtype::Bf16,
        _ => Dtype::F32,
    }
}

/// The table as it is multiplied: every matmul would round all of it again.
fn table(op: &Op<'_>, weight: &Tensor, x: Dtype) -> Result<Tensor> {
    let is_rounded =
        logits_dtype(x, op.device.kind()) == Dtype::Bf16 && weight.dtype() == Dtype::F32;
    if !is_rounded {
        return Ok(weight.clone());
    }
    let mut table = op.workspace(weight.shape(), Dtype::Bf16)?;
    convert(op.cx, weight, &mut table);
    Ok(table)
}

/// Numbers per row that the logits are folded into: the largest so far, the sum of their
/// exponentials relative to it, and the logit of the target.
const FOLD: usize = 3;

/// Checks all shapes, dtypes and targets.
fn check(op: &Op<'_>, x: &Var, weight: &Var, targets: &Tensor) -> Result<()> {
    op.expect_real("x", x.tensor())?;
    op.expect_real("weight", weight.tensor())?;
    let [vocabulary, _] = op.expect_rank("weight", weight.tensor())?;
    op.expect_shape("weight", weight.tensor(), [vocabulary, x.shape().width()])?;
    op.expect_dtype("targets", targets, Dtype::U32)?;
    let shape = x.shape();
    let outer = &shape.sizes()[..shape.sizes().len().saturating_sub(1)];
    op.expect_shape("targets", targets, Shape::new(outer))?;
    op.expect_some("x", x.tensor())?;
    if op.has_data() {
        if let Some(index) = outside(targets, vocabulary) {
            let (what, count) = ("words in the vocabulary", vocabulary);
            return Err(ComputeError::Index { op: op.name, what, index, count });
        }
        if count(targets) == 0 {
            let (what, shape) = ("the set of targets that count", targets.shape());
            return Err(ComputeError::Empty { op: op.name, what, shape });
        }
    }
    Ok(())
}

/// The first target that no column belongs to.
fn outside(targets: &Tensor, vocabulary: usize) -> Option<usize> {
    let is_outside = |target: u32| target != IGNORE_INDEX && target as usize >= vocabulary;
    let targets = targets.indices();
    targets.iter().find(|target| is_outside(**target)).map(|target| *target as usize)
}

/// How many rows count.
fn count(targets: &Tensor) -> usize {
    targets.indices().iter().filter(|target| **target != IGNORE_INDEX).count()
}

fn chunks(all: usize, each: usize) -> impl Iterator<Item = Range<usize>> {
    (0..all).step_by(each).map(move |start| start..(start + each).min(all))
}

/// The gradients of the sum of all rows' losses, as far as they are wanted.
struct LossGradients {
    x: Option<Tensor>,
    weight: Option<Tensor>,
}

impl LossGradients {
    fn wanted(tape: &Tape<'_>, cx: OpContext<'_>, x: &Var, weight: &Var) -> Result<Self> {
        let sum = |var: &Var| {
            let sizes = [var.shape().rows(), var.shape().width()];
            tape.requires_grad(&[var]).then(|| cx.alloc(sizes, Dtype::F32)).transpose()
        };
        Ok(Self { x: sum(x)?, weight: sum(weight)? })
    }

    fn is_any(&self) -> bool {
        self.x.is_some() || self.weight.is_some()
    }
}

/// Some rows of x with their targets, and the whole table.
struct LossRows {
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
}

/// Logits of some columns.
struct LogitsChunk {
    columns: Range<usize>,
    logits: Tensor,
}

impl LossRows {
    fn part(&self, range: Range<usize>) -> Self {
        let (x, weight) = (self.x.narrow(range.clone()), self.weight.clone());
        Self { x, weight, targets: self.targets.narrow(range) }
    }

    /// Folds all logits, piece by piece; returns them if asked.
    fn fold(
        &self,
        op: &Op<'_>,
        columns: usize,
        folds: &mut Tensor,
        keeps: bool,
    ) -> Result<Vec<LogitsChunk>> {
        let mut pieces = Vec::new();
        for columns in chunks(self.weight.shape().rows(), columns) {
            let (logits, targets) = (self.logits(op.cx, columns.clone())?, &self.targets);
            op.count(FLOPS * logits.shape().elements(), &[&logits]);
            match op.backend() {
                Backend::Meta => {}
                Backend::Cpu(backend) => cpu::fold(backend, &logits, targets, &columns, folds),
                Backend::Cuda(backend) => cuda::fold(backend, &logits, targets, &columns, folds),
                Backend::Gpu(backend) => gpu::fold(backend, &logits, targets, &columns, folds),
            }
            pieces.extend(keeps.then_some(LogitsChunk { columns, logits }));
        }
        Ok(pieces)
    }

    /// All logits, piece by piece.
    fn all_logits(&self, op: &Op<'_>, columns: usize) -> Result<Vec<LogitsChunk>> {
        let pieces = chunks(self.weight.shape().rows(), columns);
        pieces
            .map(|columns| {
                Ok(LogitsChunk { logits: self.logits(op.cx, columns.clone())?, columns })
            })
            .collect()
    }

    /// x·weightᵀ for some of the vocabulary.
    fn logits(&self, cx: OpContext<'_>, columns: Range<usize>) -> Result<Tensor> {
        let (x, weight) = (&self.x, self.weight.narrow(columns));
        let dtype = logits_dtype(x.dtype(), cx.device.kind());
        let mut logits = cx.workspace([x.shape().rows(), weight.shape().rows()], dtype)?;
        let matmul = Matmul::new(x, Operand::beside(&weight, x.dtype()).t());
        FusedMatmul::new(&[matmul], &mut logits).run(cx)?;
        Ok(logits)
    }

    /// Turns the logits into the gradients of their rows' losses, and multiplies those on. `range` says
    /// which rows of all these are.
    fn backward(
        &self,
        cx: OpContext<'_>,
        range: Range<usize>,
        pieces: Vec<LogitsChunk>,
        folds: &Tensor,
        sums: &mut LossGradients,
    ) -> Result<()> {
        for LogitsChunk { columns, mut logits } in pieces {
            self.logit_gradients(cx, &columns, folds, &mut logits);
            let gradients = Operand::beside(&logits, self.x.dtype());
            if let Some(sum) = &mut sums.x {
                let weight = self.weight.narrow(columns.clone());
                let matmul = Matmul::new(gradients, Operand::beside(&weight, self.x.dtype()));
                let add = columns.start > 0;
                sum.with_range_mut(range.clone(), |sum| {
                    FusedMatmul { add, ..FusedMatmul::new(&[matmul], sum) }.run(cx)
                })?;
            }
            if let Some(sum) = &mut sums.weight {
                let matmul = Matmul::new(gradients.t(), Operand::from(&self.x));
                let add = range.start > 0;
                sum.with_range_mut(columns, |sum| {
                    FusedMatmul { add, ..FusedMatmul::new(&[matmul], sum) }.run(cx)
                })?;
            }
        }
        Ok(())
    }

    /// softmax - 1 at the target, in place of some columns of the logits.
    fn logit_gradients(
        &self,
        cx: OpContext<'_>,
        columns: &Range<usize>,
        folds: &Tensor,
        logits: &mut Tensor,
    ) {
        let (targets, work) = (&self.targets, FLOPS * logits.shape().elements());
        cx.count("cross_entropy backward", work, &[logits, logits]);
        match cx.backend() {
            Backend::Meta => {}
            Backend::Cpu(backend) => cpu::logit_gradients(backend, targets, folds, columns, logits),
            Backend::Cuda(backend) => {
                cuda::logit_gradients(backend, targets, folds, columns, logits);
            }
            Backend::Gpu(backend) => gpu::logit_gradients(backend, targets, folds, columns, logits),
        }
    }
}

/// Multiplies each row of x by its weight.
fn scale_rows(cx: OpContext<'_>, weights: &Tensor, x: &mut Tensor) {
    cx.count("scale rows", x.shape().elements(), &[weights, x, x]);
    match cx.backend() {
        Backend::Meta => {}
        Backend::Cpu(backend) => cpu::scale_rows(backend, weights, x),
        Backend::Cuda(backend) => cuda::scale_rows(backend, weights, x),
        Backend::Gpu(backend) => gpu::scale_rows(backend, weights, x),
    }
}

/// Adds share · gradient · `sum` to what a slot holds, or writes it where there is nothing yet.
fn add_scaled(
    cx: OpContext<'_>,
    sum: &Tensor,
    gradient: &Tensor,
    share: f32,
    slot: &mut GradientSlot,
) {
    cx.count("accumulate", sum.shape().elements(), &[sum, &slot.tensor, &slot.tensor]);
    let (to, add) = (&mut slot.tensor, slot.add);
    match cx.backend() {
        Backend::Meta => {}
        Backend::Cpu(backend) => cpu::add_scaled(backend, sum, gradient, share, to, add),
        Backend::Cuda(backend) => cuda::add_scaled(backend, sum, gradient, share, to, add),
        Backend::Gpu(backend) => gpu::add_scaled(backend, sum, gradient, share, to, add),
    }
}
