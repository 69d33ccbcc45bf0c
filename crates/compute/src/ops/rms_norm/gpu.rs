//! Root-mean-square norm on a GPU: a layer norm that is not centered, by the same kernels.

use super::{RmsNormInputs, RmsNormSlots};
use crate::Tensor;
use crate::gpu::GpuBackend;
use crate::ops::norm_modulate::{self, NormConfig, gpu as layer_norm};

pub fn forward(
    gpu: &GpuBackend,
    x: &Tensor,
    weight: Option<&Tensor>,
    epsilon: f32,
    y: &mut Tensor,
) {
    layer_norm::forward(gpu, x, [weight, None], form(x, epsilon), false, y);
}

/// Both gradients, each if it is wanted, in one pass over the rows.
pub fn backward(
    gpu: &GpuBackend,
    rows: RmsNormInputs<'_>,
    wanted: RmsNormSlots<'_>,
    sums: &mut Tensor,
) {
    let RmsNormInputs { x, weight, gradient, epsilon } = rows;
    let rows =
        norm_modulate::NormBackwardInputs { x, scale: weight, gradient, form: form(x, epsilon) };
    layer_norm::backward(gpu, rows, false, wanted.x, [Some(&mut *sums), None]);
    if let Some(slot) = wanted.weight {
        layer_norm::add_up(gpu, sums, rows, 0, slot.add, &mut slot.tensor);
    }
}

/// Floats of scratch memory that the weight's gradient takes.
pub fn sums_floats(x: &Tensor) -> usize {
    layer_norm::sums_floats(x, x.shape().rows())
}

/// All rows have the one weight.
fn form(x: &Tensor, epsilon: f32) -> NormConfig {
    NormConfig { epsilon, rows_per_vector: x.shape().rows(), plus_one: false, indices: (0, 0) }
}
