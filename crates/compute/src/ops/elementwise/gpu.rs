//! Sums on a GPU.

use crate::Tensor;
use crate::gpu::columns::GpuColumnSum;
use crate::gpu::{GpuBackend, GpuVariant, WgslSource, arguments, eights, is_wide, singles};

const KERNELS: WgslSource = WgslSource { name: "elementwise", text: include_str!("kernel.wgsl") };

pub fn add(gpu: &GpuBackend, x: &Tensor, y: &Tensor, sum: &mut Tensor) {
    let n = x.shape().elements();
    let variant = variant(n, &[x, y, sum]);
    gpu.launch(&KERNELS, "add", &variant, eights(n), &arguments![x, y, sum, n]);
}

pub fn scale(gpu: &GpuBackend, x: &Tensor, factor: f32, y: &mut Tensor) {
    let n = x.shape().elements();
    let variant = variant(n, &[x, y]);
    gpu.launch(&KERNELS, "scale", &variant, eights(n), &arguments![x, y, n, factor]);
}

/// Also between dtypes.
pub fn accumulate(gpu: &GpuBackend, gradient: &Tensor, sum: &mut Tensor, add: bool) {
    let n = gradient.shape().elements();
    let variant = variant(n, &[gradient, sum]);
    gpu.launch(&KERNELS, "accumulate", &variant, eights(n), &arguments![gradient, sum, n, add]);
}

pub fn gated_add(
    gpu: &GpuBackend,
    x: &Tensor,
    gates: &Tensor,
    index: usize,
    y: &Tensor,
    sum: &mut Tensor,
) {
    let (rows, [tokens, width]) = (x.shape().rows(), token_sizes(x));
    let (all, first) = (gates.shape().width(), index * width);
    let variant = variant(width, &[x, gates, y, sum]);
    let arguments = arguments![x, gates, y, sum, rows, tokens, width, all, first];
    gpu.launch(&KERNELS, "gated_add", &variant, singles(rows * width.div_ceil(8)), &arguments);
}

/// `out` = gate · gradient
pub fn gated(
    gpu: &GpuBackend,
    gates: &Tensor,
    index: usize,
    gradient: &Tensor,
    out: &mut Tensor,
    add: bool,
) {
    let (rows, [tokens, width]) = (gradient.shape().rows(), token_sizes(gradient));
    let (all, first) = (gates.shape().width(), index * width);
    let variant = variant(width, &[gates, gradient, out]);
    let arguments = arguments![gates, gradient, out, rows, tokens, width, all, first, add];
    gpu.launch(&KERNELS, "gated", &variant, singles(rows * width.div_ceil(8)), &arguments);
}

/// For the dtype of the first and of the last tensor, read by eights of rows of this width.
fn variant(width: usize, tensors: &[&Tensor]) -> GpuVariant {
    let formats = [tensors[0].dtype(), tensors[tensors.len() - 1].dtype()];
    let tensors: Vec<_> = tensors.iter().map(|tensor| Some(*tensor)).collect();
    GpuVariant::of(&formats).with("WIDE", is_wide(width, &tensors).into())
}

/// Adds Σ over a sample's tokens of gradient · y to its gate's gradient.
pub fn gate_gradient(
    gpu: &GpuBackend,
    gradient: &Tensor,
    y: &Tensor,
    index: usize,
    out: &mut Tensor,
) {
    let [tokens, _] = token_sizes(y);
    let sum = GpuColumnSum { a: gradient, b: Some(y), rows_per_vector: tokens };
    sum.run(gpu, out, index, true);
}

fn token_sizes(x: &Tensor) -> [usize; 2] {
    let &[_, tokens, width] = x.shape().sizes() else { unreachable!("checked by the op") };
    [tokens, width]
}
