//! Tokens copied on a GPU.

use super::TokenSpan;
use crate::Tensor;
use crate::gpu::{GpuBackend, GpuVariant, WgslSource, arguments, is_wide, singles};

const KERNELS: WgslSource = WgslSource { name: "tokens", text: include_str!("kernel.wgsl") };

/// Copies, or adds to what is there; what is added to may be of another dtype.
pub fn copy(gpu: &GpuBackend, from: &Tensor, to: &mut Tensor, span: TokenSpan, add: bool) {
    let &[samples, n_from, width] = from.shape().sizes() else { unreachable!("checked by the op") };
    let (n_to, rows) = (to.shape().sizes()[1], samples * span.count);
    let variant = GpuVariant::of(&[from.dtype(), to.dtype()])
        .with("WIDE", is_wide(width, &[Some(from), Some(to)]).into());
    let arguments =
        arguments![from, to, rows, width, span.count, n_from, n_to, span.from, span.to, add];
    gpu.launch(&KERNELS, "copy_tokens", &variant, singles(rows * width.div_ceil(8)), &arguments);
}
