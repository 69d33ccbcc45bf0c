//! The mean squared error, an f32 scalar:
//!
//! plain:  Σ wₛ·fᵢ·(prediction - target)² / number of elements, with a weight wₛ per sample or 1, and a factor fᵢ per
//!         element or 1
//! masked: Σ wₛ·mₜ·fᵢ·(prediction - target)² / (width·Σ m), with a factor mₜ per token
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
        self.weighted_mse(prediction, target, MseWeights { weights, mask, elements: None })
    }

    /// The same with a factor for each element.
    pub fn weighted_mse(
        &self,
        prediction: &Var,
        target: &Tensor,
        weights: MseWeights<'_>,
    ) -> Result<Var> {
        let op = self.begin_op("mse");
        let dtype = op.expect_real("prediction", prediction.tensor())?;
        op.expect_real("target", target)?;
        op.expect_shape("target", target, prediction.shape())?;
        let factors = LossWeights::new(&op, prediction.tensor(), weights)?;
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

/// What squared errors are multiplied by, all in f32.
#[derive(Clone, Copy, Default)]
pub struct MseWeights<'a> {
    /// Of each sample: `[samples]`.
    pub weights: Option<&'a Tensor>,
    /// Of each token: [samples, tokens]. The mean is that of the tokens that count.
    pub mask: Option<&'a Tensor>,
    /// Of each element, in the shape of the prediction. The mean is that of all elements.
    pub elements: Option<&'a Tensor>,
}

/// The same, checked.
struct LossWeights {
    weights: Option<Tensor>,
    mask: Option<Tensor>,
    elements: Option<Tensor>,
    /// How many rows share a weight.
    rows_per_sample: usize,
}

impl LossWeights {
    fn new(
        op: &Op<'_>,
        prediction: &Tensor,
        MseWeights { weights, mask, elements }: MseWeights<'_>,
    ) -> Result<Self> {
        let got = prediction.shape();
        let mut rows_per_sample = 1;
        if let Some(weights) = weights {
            let &[samples, _, ..] = got.sizes() else {
                let (what, expected) = ("prediction", 2);
                return Err(ComputeError::Rank { op: op.name, what, expected, got });
            };
            op.expect_vector("weights", weights, samples)?;
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
        let [weights, mask, elements] = [weights, mask, elements].map(Option::<&Tensor>::cloned);
        Ok(Self { weights, mask, elements, rows_per_sample })
    }
}
