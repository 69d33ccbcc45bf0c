//! Sums on a GPU.

use crate::Tensor;
use crate::cuda::columns::CudaColumnSum;
use crate::cuda::{CudaArg, CudaBackend, CudaSource, CudaVariant, LaunchConfig, arguments, pack};

const KERNELS: CudaSource = CudaSource { name: "elementwise", text: include_str!("kernel.cu") };

pub fn add(cuda: &CudaBackend, x: &Tensor, y: &Tensor, sum: &mut Tensor) {
    let n = x.shape().elements();
    let p = pack(n, &[x, y, sum]);
    let variant = CudaVariant::of(&[x.dtype()]).with_pack(p);
    let arguments = arguments![x, y, sum, n / p];
    cuda.launch(&KERNELS, "add", variant, LaunchConfig::per_element(n / p), &arguments);
}

pub fn scale(cuda: &CudaBackend, x: &Tensor, factor: f32, y: &mut Tensor) {
    let n = x.shape().elements();
    let p = pack(n, &[x, y]);
    let variant = CudaVariant::of(&[x.dtype()]).with_pack(p);
    let arguments = arguments![x, factor, y, n / p];
    cuda.launch(&KERNELS, "scale", variant, LaunchConfig::per_element(n / p), &arguments);
}

/// Also between dtypes.
pub fn accumulate(cuda: &CudaBackend, gradient: &Tensor, sum: &mut Tensor, add: bool) {
    let n = gradient.shape().elements();
    let p = pack(n, &[gradient, sum]);
    let variant = CudaVariant::of(&[gradient.dtype(), sum.dtype()]).with_pack(p);
    let arguments = arguments![gradient, sum, n / p, add];
    cuda.launch(&KERNELS, "accumulate", variant, LaunchConfig::per_element(n / p), &arguments);
}

/// The same between places that are no tensors: parts of a workspace.
pub fn convert(cuda: &CudaBackend, from: CudaArg, to: CudaArg, variant: CudaVariant, n: usize) {
    let arguments = [from, to, CudaArg::from(n), CudaArg::from(false)];
    cuda.launch(&KERNELS, "accumulate", variant, LaunchConfig::per_element(n), &arguments);
}

pub fn gated_add(
    cuda: &CudaBackend,
    x: &Tensor,
    gates: &Tensor,
    index: usize,
    y: &Tensor,
    sum: &mut Tensor,
) {
    let (n, [tokens, width]) = (x.shape().elements(), token_sizes(x));
    let p = pack(width, &[x, gates, y, sum]);
    let variant = CudaVariant::of(&[x.dtype()]).with_pack(p);
    let (all, first) = (gates.shape().width(), index * width);
    let arguments = arguments![x, gates, y, sum, n / p, tokens, width, all, first];
    cuda.launch(&KERNELS, "gated_add", variant, LaunchConfig::per_element(n / p), &arguments);
}

/// `out` = gate · gradient
pub fn gated(
    cuda: &CudaBackend,
    gates: &Tensor,
    index: usize,
    gradient: &Tensor,
    out: &mut Tensor,
    add: bool,
) {
    let (n, [tokens, width]) = (gradient.shape().elements(), token_sizes(gradient));
    let p = pack(width, &[gates, gradient, out]);
    let variant = CudaVariant::of(&[gradient.dtype()]).with_pack(p);
    let (all, first) = (gates.shape().width(), index * width);
    let arguments = arguments![gates, gradient, out, n / p, tokens, width, all, first, add];
    cuda.launch(&KERNELS, "gated", variant, LaunchConfig::per_element(n / p), &arguments);
}

/// Adds Σ over a sample's tokens of gradient · y to its gate's gradient.
pub fn gate_gradient(
    cuda: &CudaBackend,
    gradient: &Tensor,
    y: &Tensor,
    index: usize,
    out: &mut Tensor,
) {
    let [tokens, _] = token_sizes(y);
    let sum = CudaColumnSum { a: gradient, b: Some(y), statistics: None, rows_per_vector: tokens };
    sum.run(cuda, out, index, true);
}

fn token_sizes(x: &Tensor) -> [usize; 2] {
    let &[_, tokens, width] = x.shape().sizes() else { unreachable!("checked by the op") };
    [tokens, width]
}
