//! Tokens copied on a GPU.

use super::Span;
use crate::Tensor;
use crate::gpu::{Gpu, Source, Variant, arguments, pairs};

const KERNELS: Source = Source { name: "tokens", text: include_str!("kernel.wgsl") };

/// Copies, or adds to what is there; what is added to may be of another format.
pub fn copy(gpu: &Gpu, from: &Tensor, to: &mut Tensor, span: Span, add: bool) {
    let &[samples, n_from, width] = from.shape().sizes() else { unreachable!("checked by the op") };
    let (n_to, n) = (to.shape().sizes()[1], samples * span.count * width);
    let variant = Variant::of(&[from.dtype(), to.dtype()]);
    let arguments =
        arguments![from, to, n, width, span.count, n_from, n_to, span.from, span.to, add];
    gpu.launch(&KERNELS, "copy_tokens", &variant, pairs(n), &arguments);
}
