//! Sums on a card.

use crate::Tensor;
use crate::cuda::columns::Sum;
use crate::cuda::{Argument, Cuda, Grid, Source, Variant, arguments, pack};

const KERNELS: Source = Source { name: "elementwise", text: include_str!("kernel.cu") };

pub fn add(cuda: &Cuda, x: &Tensor, y: &Tensor, sum: &mut Tensor) {
    let n = x.shape().elements();
    let p = pack(n, &[x, y, sum]);
    let variant = Variant::of(&[x.dtype()]).by(p);
    let arguments = arguments![x, y, sum, n / p];
    cuda.launch(&KERNELS, "add", variant, Grid::numbers(n / p), &arguments);
}

pub fn scale(cuda: &Cuda, x: &Tensor, factor: f32, y: &mut Tensor) {
    let n = x.shape().elements();
    let p = pack(n, &[x, y]);
    let variant = Variant::of(&[x.dtype()]).by(p);
    let arguments = arguments![x, factor, y, n / p];
    cuda.launch(&KERNELS, "scale", variant, Grid::numbers(n / p), &arguments);
}

/// Also between formats.
pub fn accumulate(cuda: &Cuda, gradient: &Tensor, sum: &mut Tensor, add: bool) {
    let n = gradient.shape().elements();
    let p = pack(n, &[gradient, sum]);
    let variant = Variant::of(&[gradient.dtype(), sum.dtype()]).by(p);
    let arguments = arguments![gradient, sum, n / p, add];
    cuda.launch(&KERNELS, "accumulate", variant, Grid::numbers(n / p), &arguments);
}

/// The same between places that are no tensors: parts of a workspace.
pub fn convert(cuda: &Cuda, (from, to): (Argument, Argument), variant: Variant, n: usize) {
    let arguments = [from, to, Argument::from(n), Argument::from(false)];
    cuda.launch(&KERNELS, "accumulate", variant, Grid::numbers(n), &arguments);
}

pub fn gated_add(
    cuda: &Cuda,
    x: &Tensor,
    gates: &Tensor,
    index: usize,
    y: &Tensor,
    sum: &mut Tensor,
) {
    let (n, [tokens, width]) = (x.shape().elements(), token_sizes(x));
    let p = pack(width, &[x, gates, y, sum]);
    let variant = Variant::of(&[x.dtype()]).by(p);
    let (all, first) = (gates.shape().width(), index * width);
    let arguments = arguments![x, gates, y, sum, n / p, tokens, width, all, first];
    cuda.launch(&KERNELS, "gated_add", variant, Grid::numbers(n / p), &arguments);
}

/// `out` = gate · gradient
pub fn gated(
    cuda: &Cuda,
    gates: &Tensor,
    index: usize,
    gradient: &Tensor,
    out: &mut Tensor,
    add: bool,
) {
    let (n, [tokens, width]) = (gradient.shape().elements(), token_sizes(gradient));
    let p = pack(width, &[gates, gradient, out]);
    let variant = Variant::of(&[gradient.dtype()]).by(p);
    let (all, first) = (gates.shape().width(), index * width);
    let arguments = arguments![gates, gradient, out, n / p, tokens, width, all, first, add];
    cuda.launch(&KERNELS, "gated", variant, Grid::numbers(n / p), &arguments);
}

/// Adds Σ over a sample's tokens of gradient · y to its gate's gradient.
pub fn gate_gradient(cuda: &Cuda, gradient: &Tensor, y: &Tensor, index: usize, out: &mut Tensor) {
    let [tokens, _] = token_sizes(y);
    let sum = Sum { a: gradient, b: Some(y), statistics: None, rows_per_vector: tokens };
    sum.run(cuda, out, index, true);
}

fn token_sizes(x: &Tensor) -> [usize; 2] {
    let &[_, tokens, width] = x.shape().sizes() else { unreachable!("checked by the op") };
    [tokens, width]
}
