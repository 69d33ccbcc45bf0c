//! The cross entropy of a vocabulary's logits, one number in f32:
//!
//! mean over the counted rows of log Σᵥ exp(xᵣ·wᵥ) - xᵣ·w(targetᵣ)
//!
//! for x [.., width], weight [vocabulary, width] and targets [..]; rows whose target is [`IGNORED`]
//! do not count. The logits, rows × vocabulary, are far larger than all the rest, so they never
//! exist as a whole: some columns of them at a time are computed, and folded into a running
//! maximum and sum per row (Milakov and Gimelshein, "Online normalizer calculation for softmax",
//! arXiv 1805.02867).
//!
//! Kept for backward: x, the weight, and the logarithm of each row's sum. The logits are computed
//! again and turned into their gradients in place.

mod cpu;
mod cuda;
mod gpu;
#[cfg(test)]
mod tests;

use std::ops::Range;

use super::accumulate;
use super::matmul::{MatMul, Matrix, Product};
use crate::backward::Backward;
use crate::device::{Engine, Kind};
use crate::op::{Op, Place};
use crate::tape::Tape;
use crate::var::{Kept, Source, Var};
use crate::{ComputeError, Dtype, Result, Shape, Tensor};

/// The target of a row that does not count.
pub const IGNORED: u32 = u32::MAX;

/// Floats of the logits that exist at a time, at most: 16 MiB. Chosen: small beside what a model
/// keeps, and wide enough for products of full speed up to tens of thousands of rows.
const LOGITS: usize = 4 << 20;
/// The same on a card: 256 MiB. Chosen: its products want thousands of columns, where the above leaves 256
/// to sixteen thousand rows.
const LOGITS_ON_CARD: usize = 64 << 20;
/// The fewest columns at a time, below which products are slow, however many rows there are.
const FEWEST_COLUMNS: usize = 64;
/// Operations per logit, for the tally; an exponential counts as ten.
const FLOPS: usize = 13;

impl Tape<'_> {
    /// The mean over the rows of `x` [.., width] of the cross entropy between softmax(x·`weight`ᵀ)
    /// and `targets` [..], u32, for a weight [vocabulary, width]. Rows of target [`IGNORED`] do not
    /// count.
    pub fn cross_entropy(&self, x: &Var, weight: &Var, targets: &Tensor) -> Result<Var> {
        let columns = columns(x.shape().rows(), self.device().kind());
        self.cross_entropy_by(columns, x, weight, targets)
    }

    /// The same with so many columns of the logits at a time.
    fn cross_entropy_by(
        &self,
        columns: usize,
        x: &Var,
        weight: &Var,
        targets: &Tensor,
    ) -> Result<Var> {
        let op = self.begin("cross_entropy");
        let vocabulary = check(&op, x, weight, targets)?;
        let is_tracked = self.tracks(&[x, weight]);
        let rows = x.shape().rows();
        let mut mean = op.alloc([], Dtype::F32)?;
        let mut log_sums = is_tracked.then(|| op.alloc([rows], Dtype::F32)).transpose()?;
        let mut folds = op.workspace([rows, FOLD], Dtype::F32)?;
        for range in chunks(vocabulary, columns) {
            let logits = logits(op.place, x.tensor(), weight.tensor(), range.clone())?;
            op.count(FLOPS * logits.shape().elements(), &[&logits]);
            match op.engine() {
                Engine::Meta => {}
                Engine::Cpu(engine) => cpu::fold(engine, &logits, targets, range, &mut folds),
                Engine::Cuda(engine) => cuda::fold(engine, &logits, targets, &range, &mut folds),
                Engine::Gpu(engine) => gpu::fold(engine, &logits, targets, &range, &mut folds),
            }
        }
        match op.engine() {
            Engine::Meta => {}
            Engine::Cpu(engine) => {
                cpu::finish(engine, &folds, targets, log_sums.as_mut(), &mut mean);
            }
            Engine::Cuda(engine) => {
                cuda::finish(engine, &folds, targets, log_sums.as_mut(), &mut mean);
            }
            Engine::Gpu(engine) => {
                gpu::finish(engine, &folds, targets, log_sums.as_mut(), &mut mean);
            }
        }
        let result = op.result(mean);
        let Some(log_sums) = log_sums else { return Ok(result) };
        self.keep_own(&op);
        let record = Record {
            x: (self.keep(x), x.source()),
            weight: (self.keep(weight), weight.source()),
            targets: targets.clone(),
            log_sums,
            columns,
        };
        Ok(self.record(result, move |back, gradient| record.backward(back, &gradient)))
    }
}

/// Numbers per row that the logits are folded into: the largest so far, the sum of their
/// exponentials relative to it, and the logit of the target.
const FOLD: usize = 3;

/// Checks all shapes, formats and targets; returns the size of the vocabulary.
fn check(op: &Op<'_>, x: &Var, weight: &Var, targets: &Tensor) -> Result<usize> {
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
    Ok(vocabulary)
}

/// The first target that no column belongs to.
fn outside(targets: &Tensor, vocabulary: usize) -> Option<usize> {
    let is_outside = |target: u32| target != IGNORED && target as usize >= vocabulary;
    let targets = targets.indices();
    targets.iter().find(|target| is_outside(**target)).map(|target| *target as usize)
}

/// How many rows count.
fn count(targets: &Tensor) -> usize {
    targets.indices().iter().filter(|target| **target != IGNORED).count()
}

/// How many columns of the logits exist at a time.
fn columns(rows: usize, kind: Kind) -> usize {
    let logits = match kind {
        Kind::Cpu { .. } | Kind::Gpu { .. } => LOGITS,
        Kind::Cuda { .. } => LOGITS_ON_CARD,
    };
    let most = logits / rows.max(1);
    (most / FEWEST_COLUMNS * FEWEST_COLUMNS).max(FEWEST_COLUMNS)
}

fn chunks(vocabulary: usize, columns: usize) -> impl Iterator<Item = Range<usize>> {
    let starts = (0..vocabulary).step_by(columns);
    starts.map(move |start| start..(start + columns).min(vocabulary))
}

/// Some columns of x·weightᵀ, in f32.
fn logits(place: Place<'_>, x: &Tensor, weight: &Tensor, range: Range<usize>) -> Result<Tensor> {
    let mut logits = place.workspace([x.shape().rows(), range.len()], Dtype::F32)?;
    let weight = weight.part(range);
    let product = Product::new(x, Matrix::beside(&weight, x.dtype()).t());
    MatMul::new(&[product], &mut logits).run(place)?;
    Ok(logits)
}

struct Record {
    x: (Kept, Option<Source>),
    weight: (Kept, Option<Source>),
    targets: Tensor,
    log_sums: Tensor,
    columns: usize,
}

impl Record {
    fn backward(self, back: &mut Backward<'_>, gradient: &Tensor) -> Result<()> {
        let place = back.place;
        let (x, weight) = (self.x.0.get(place)?, self.weight.0.get(place)?);
        // A sum over all chunks, so in f32 whatever the format of x.
        let mut x_gradient = self.x.1.map(|_| place.alloc(x.shape(), Dtype::F32)).transpose()?;
        let mut slot = back.slot_of(self.weight.1, weight.shape(), weight.dtype())?;
        for range in chunks(weight.shape().rows(), self.columns) {
            let slopes = self.slopes(place, (&x, &weight), gradient, range.clone())?;
            if let Some(sum) = &mut x_gradient {
                let weight = weight.part(range.clone());
                let slopes = Matrix::beside(&slopes, x.dtype());
                let product = Product::new(slopes, Matrix::beside(&weight, x.dtype()));
                let add = range.start > 0;
                MatMul { add, ..MatMul::new(&[product], sum) }.run(place)?;
            }
            if let Some(slot) = &mut slot {
                let slopes = Matrix::beside(&slopes, x.dtype());
                let product = Product::new(slopes.t(), Matrix::from(&x));
                let add = slot.add;
                slot.tensor.within(range, |rows| {
                    MatMul { add, ..MatMul::new(&[product], rows) }.run(place)
                })?;
            }
        }
        if let Some(slot) = slot {
            back.put(slot);
        }
        let (Some(source), Some(sum)) = (self.x.1, x_gradient) else { return Ok(()) };
        if x.dtype() == Dtype::F32 {
            return back.pass(Some(source), sum);
        }
        let mut slot = back.slot(source, x.shape(), x.dtype())?;
        accumulate(place, &mut slot, &sum);
        back.put(slot);
        Ok(())
    }

    /// The gradients of some columns of the logits.
    fn slopes(
        &self,
        place: Place<'_>,
        (x, weight): (&Tensor, &Tensor),
        gradient: &Tensor,
        range: Range<usize>,
    ) -> Result<Tensor> {
        let mut logits = logits(place, x, weight, range.clone())?;
        place.count(
            "cross_entropy backward",
            FLOPS * logits.shape().elements(),
            &[&logits, &logits],
        );
        match place.engine() {
            Engine::Meta => {}
            Engine::Cpu(engine) => {
                cpu::slopes(engine, &self.targets, &self.log_sums, gradient, range, &mut logits);
            }
            Engine::Cuda(engine) => {
                cuda::slopes(engine, &self.targets, &self.log_sums, gradient, &range, &mut logits);
            }
            Engine::Gpu(engine) => {
                gpu::slopes(engine, &self.targets, &self.log_sums, gradient, &range, &mut logits);
            }
        }
        Ok(logits)
    }
}
