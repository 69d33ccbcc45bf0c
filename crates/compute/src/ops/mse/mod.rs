//! The mean of what errors d = prediction - target cost, d² unless asked otherwise ([`ErrorLoss`]), an f32 scalar:
//!
//! plain:  Σ wₛ·fᵢ·cost(d) / number of elements, with a weight wₛ per sample or 1, and a factor fᵢ per element or 1
//! masked: Σ wₛ·mₜ·fᵢ·cost(d) / (width·Σ m), with a factor mₜ per token
//!
//! for prediction and target [samples, .., width], where a mask asks for [samples, tokens, width].
//! A mask that sums up to zero gives 0, and a gradient of zeros. A factor of zero does not hide
//! NaN: such a mean is NaN too.
//!
//! Rows are summed in f32, a piece at a time, and their sums in f64. Only the prediction has a
//! gradient. Kept for backward: prediction and target.

mod cpu;
mod cuda;
mod gpu;
#[cfg(test)]
mod tests;

use crate::device::{Backend, DeviceKind};
use crate::op::Op;
use crate::tape::Tape;
use crate::var::Var;
use crate::{ComputeError, Dtype, Result, Tensor};

/// FLOPs per element, for the work counter.
const FLOPS: usize = 3;

impl Tape<'_> {
    /// The mean squared error of `prediction` [samples, .., width] against `target` of the same
    /// shape and any real dtype, with f32 `weights` `[samples]` and an f32 `mask` [samples, tokens].
    pub fn mse(
        &self,
        prediction: &Var,
        target: &Tensor,
        weights: Option<&Tensor>,
        mask: Option<&Tensor>,
    ) -> Result<Var> {
        let weights = ErrorWeights { weights, mask, elements: None };
        self.error_loss(prediction, target, ErrorLoss::Squared, weights)
    }

    /// The same with another cost of errors, and with a factor for each element.
    pub fn error_loss(
        &self,
        prediction: &Var,
        target: &Tensor,
        loss: ErrorLoss<'_>,
        weights: ErrorWeights<'_>,
    ) -> Result<Var> {
        let op = self.begin_op("mse");
        let dtype = op.expect_real("prediction", prediction.tensor())?;
        op.expect_real("target", target)?;
        op.expect_shape("target", target, prediction.shape())?;
        let factors = LossFactors::new(&op, prediction.tensor(), loss, weights)?;
        op.expect_some("prediction", prediction.tensor())?;
        let mut mean = op.alloc([], Dtype::F32)?;
        op.count(FLOPS * target.shape().elements(), &[prediction.tensor(), target]);
        let floats = match op.device.kind() {
            DeviceKind::Cpu { .. } => 0,
            DeviceKind::Cuda { .. } => cuda::forward_floats(prediction.tensor()),
            DeviceKind::Gpu { .. } => gpu::forward_floats(prediction.tensor()),
        };
        let mut workspace = op.workspace([floats], Dtype::F32)?;
        match op.backend() {
            Backend::Meta => {}
            Backend::Cpu(backend) => {
                cpu::forward(backend, prediction.tensor(), target, &factors, &mut mean);
            }
            Backend::Cuda(backend) => {
                cuda::forward(
                    backend,
                    prediction.tensor(),
                    target,
                    &factors,
                    &mut workspace,
                    &mut mean,
                );
            }
            Backend::Gpu(backend) => {
                gpu::forward(
                    backend,
                    prediction.tensor(),
                    target,
                    &factors,
                    &mut workspace,
                    &mut mean,
                );
            }
        }
        drop(workspace);
        let result = op.result(mean);
        let Some(source) = prediction.grad_target().filter(|_| self.requires_grad(&[prediction]))
        else {
            return Ok(result);
        };
        let (kept, target) = (self.save_for_backward(prediction), target.clone());
        Ok(self.record(result, move |back, gradient| {
            let prediction = kept.get(back.cx)?;
            let mut slot = back.slot(source, target.shape(), dtype)?;
            let work = FLOPS * target.shape().elements();
            back.cx.count("mse backward", work, &[&prediction, &target, &slot.tensor]);
            let floats = match back.cx.device.kind() {
                DeviceKind::Cpu { .. } => 0,
                DeviceKind::Cuda { .. } => cuda::BACKWARD_FLOATS,
                DeviceKind::Gpu { .. } => gpu::BACKWARD_FLOATS,
            };
            let mut workspace = back.cx.workspace([floats], Dtype::F32)?;
            match back.cx.backend() {
                Backend::Meta => {}
                Backend::Cpu(backend) => {
                    cpu::backward(backend, &prediction, &target, &factors, &gradient, &mut slot);
                }
                Backend::Cuda(backend) => {
                    cuda::backward(
                        backend,
                        &prediction,
                        &target,
                        &factors,
                        &gradient,
                        &mut workspace,
                        &mut slot,
                    );
                }
                Backend::Gpu(backend) => {
                    gpu::backward(
                        backend,
                        &prediction,
                        &target,
                        &factors,
                        &gradient,
                        &mut workspace,
                        &mut slot,
                    );
                }
            }
            back.put(slot);
            Ok(())
        }))
    }
}

/// What an error d costs. A threshold c has a value above 0 for each sample: `[samples]`, in f32.
#[derive(Clone, Copy, Default)]
pub enum ErrorLoss<'a> {
    /// d²
    #[default]
    Squared,
    /// |d|, with the derivative 0 at 0.
    Absolute,
    /// d² / 2 up to c, beyond it c·(|d| - c / 2): PyTorch's `huber_loss`, and its `smooth_l1_loss` times c.
    Huber(&'a Tensor),
    /// 2c·(√(d² + c²) - c), which is near d² far below c and near 2c·|d| far above (arXiv 2403.16728): kohya's `huber`,
    /// and its `smooth_l1` times c.
    PseudoHuber(&'a Tensor),
}

/// The same without its threshold, numbered as kernels know it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CostKind {
    Squared = 0,
    Absolute = 1,
    Huber = 2,
    PseudoHuber = 3,
}

/// What the costs of errors are multiplied by, all in f32.
#[derive(Clone, Copy, Default)]
pub struct ErrorWeights<'a> {
    /// Of each sample: `[samples]`.
    pub weights: Option<&'a Tensor>,
    /// Of each token: [samples, tokens]. The mean is that of the tokens that count.
    pub mask: Option<&'a Tensor>,
    /// Of each element, in the shape of the prediction. The mean is that of all elements.
    pub elements: Option<&'a Tensor>,
}

/// Both, checked.
struct LossFactors {
    kind: CostKind,
    thresholds: Option<Tensor>,
    weights: Option<Tensor>,
    mask: Option<Tensor>,
    elements: Option<Tensor>,
    /// How many rows share a weight and a threshold.
    rows_per_sample: usize,
}

impl LossFactors {
    fn new(
        op: &Op<'_>,
        prediction: &Tensor,
        loss: ErrorLoss<'_>,
        ErrorWeights { weights, mask, elements }: ErrorWeights<'_>,
    ) -> Result<Self> {
        let got = prediction.shape();
        let (kind, thresholds) = match loss {
            ErrorLoss::Squared => (CostKind::Squared, None),
            ErrorLoss::Absolute => (CostKind::Absolute, None),
            ErrorLoss::Huber(thresholds) => (CostKind::Huber, Some(thresholds)),
            ErrorLoss::PseudoHuber(thresholds) => (CostKind::PseudoHuber, Some(thresholds)),
        };
        let mut rows_per_sample = 1;
        for (name, of_samples) in [("weights", weights), ("thresholds", thresholds)] {
            let Some(of_samples) = of_samples else { continue };
            let &[samples, _, ..] = got.sizes() else {
                let (what, expected) = ("prediction", 2);
                return Err(ComputeError::Rank { op: op.name, what, expected, got });
            };
            op.expect_vector(name, of_samples, samples)?;
            rows_per_sample = got.rows() / samples.max(1);
        }
        if let Some(mask) = mask {
            let [samples, tokens, _] = op.expect_rank("prediction", prediction)?;
            op.expect_dtype("mask", mask, Dtype::F32)?;
            op.expect_shape("mask", mask, [samples, tokens])?;
        }
        if let Some(elements) = elements {
            op.expect_dtype("elements", elements, Dtype::F32)?;
            op.expect_shape("elements", elements, got)?;
        }
        let [thresholds, weights, mask, elements] =
            [thresholds, weights, mask, elements].map(Option::<&Tensor>::cloned);
        Ok(Self { kind, thresholds, weights, mask, elements, rows_per_sample })
    }
}
