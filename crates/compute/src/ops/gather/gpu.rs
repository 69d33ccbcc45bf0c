//! Tokens by index on a GPU. The indices are sorted on the host, which has them anyway.

use super::Lookup;
use crate::Tensor;
use crate::gpu::{GpuBackend, GpuVariant, WgslSource, arguments, pairs};

const KERNELS: WgslSource = WgslSource { name: "gather", text: include_str!("kernel.wgsl") };

pub fn gather(gpu: &GpuBackend, lookup: &Lookup, x: &Tensor, y: &mut Tensor, add: bool) {
    let (width, n) = (x.shape().width(), y.shape().elements());
    let variant = GpuVariant::of(&[x.dtype(), y.dtype()]);
    let arguments = arguments![x, &lookup.ids, y, n, width, lookup.n, lookup.n_tokens, add];
    gpu.launch(&KERNELS, "gather", &variant, pairs(n), &arguments);
}

pub fn scatter(
    gpu: &GpuBackend,
    lookup: &Lookup,
    order: &Tensor,
    x: &Tensor,
    y: &mut Tensor,
    add: bool,
) {
    let (width, elements) = (x.shape().width(), y.shape().elements());
    let variant = GpuVariant::of(&[x.dtype(), y.dtype()]);
    let Lookup { ids, n, n_tokens } = lookup;
    let arguments = arguments![x, ids, order, y, elements, width, *n, *n_tokens, add];
    gpu.launch(&KERNELS, "scatter", &variant, pairs(elements), &arguments);
}
