//! Tokens copied on a GPU.

use super::TokenSpan;
use crate::Tensor;
use crate::cuda::{CudaBackend, CudaSource, CudaVariant, LaunchConfig, arguments, pack};

const KERNELS: CudaSource = CudaSource { name: "tokens", text: include_str!("kernel.cu") };

/// Copies, or adds to what is there; what is added to may be of another dtype.
pub fn copy(cuda: &CudaBackend, from: &Tensor, to: &mut Tensor, span: TokenSpan, add: bool) {
    let &[samples, n_from, width] = from.shape().sizes() else { unreachable!("checked by the op") };
    let n_to = to.shape().sizes()[1];
    let p = pack(width, &[from, to]);
    let packs = samples * span.count * width / p;
    let variant = CudaVariant::of(&[from.dtype(), to.dtype()]).with_pack(p);
    let arguments =
        arguments![from, to, packs, width, span.count, n_from, n_to, span.from, span.to, add];
    cuda.launch(&KERNELS, "copy_tokens", variant, LaunchConfig::per_element(packs), &arguments);
}
