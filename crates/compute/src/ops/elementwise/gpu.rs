//! Sums on a GPU.

use crate::Tensor;
use crate::gpu::columns::Sum;
use crate::gpu::{Gpu, Source, Variant, arguments, pairs};

const KERNELS: Source = Source { name: "elementwise", text: include_str!("kernel.wgsl") };

pub fn add(gpu: &Gpu, x: &Tensor, y: &Tensor, sum: &mut Tensor) {
    let (n, variant) = (x.shape().elements(), Variant::of(&[x.dtype()]));
    gpu.launch(&KERNELS, "add", &variant, pairs(n), &arguments![x, y, sum, n]);
}

pub fn scale(gpu: &Gpu, x: &Tensor, factor: f32, y: &mut Tensor) {
    let (n, variant) = (x.shape().elements(), Variant::of(&[x.dtype()]));
    gpu.launch(&KERNELS, "scale", &variant, pairs(n), &arguments![x, y, n, factor]);
}

/// Also between formats.
pub fn accumulate(gpu: &Gpu, gradient: &Tensor, sum: &mut Tensor, add: bool) {
    let n = gradient.shape().elements();
    let variant = Variant::of(&[gradient.dtype(), sum.dtype()]);
    gpu.launch(&KERNELS, "accumulate", &variant, pairs(n), &arguments![gradient, sum, n, add]);
}

pub fn gated_add(
    gpu: &Gpu,
    x: &Tensor,
    gates: &Tensor,
    index: usize,
    y: &Tensor,
    sum: &mut Tensor,
) {
    let (n, [tokens, width]) = (x.shape().elements(), token_sizes(x));
    let (all, first) = (gates.shape().width(), index * width);
    let arguments = arguments![x, gates, y, sum, n, tokens, width, all, first];
    gpu.launch(&KERNELS, "gated_add", &Variant::of(&[x.dtype()]), pairs(n), &arguments);
}

/// `out` = gate · gradient
pub fn gated(
    gpu: &Gpu,
    gates: &Tensor,
    index: usize,
    gradient: &Tensor,
    out: &mut Tensor,
    add: bool,
) {
    let (n, [tokens, width]) = (gradient.shape().elements(), token_sizes(gradient));
    let (all, first) = (gates.shape().width(), index * width);
    let arguments = arguments![gates, gradient, out, n, tokens, width, all, first, add];
    gpu.launch(&KERNELS, "gated", &Variant::of(&[gradient.dtype()]), pairs(n), &arguments);
}

/// Adds Σ over a sample's tokens of gradient · y to its gate's gradient.
pub fn gate_gradient(gpu: &Gpu, gradient: &Tensor, y: &Tensor, index: usize, out: &mut Tensor) {
    let [tokens, _] = token_sizes(y);
    let sum = Sum { a: gradient, b: Some(y), statistics: None, rows_per_vector: tokens };
    sum.run(gpu, out, index, true);
}

fn token_sizes(x: &Tensor) -> [usize; 2] {
    let &[_, tokens, width] = x.shape().sizes() else { unreachable!("checked by the op") };
    [tokens, width]
}
