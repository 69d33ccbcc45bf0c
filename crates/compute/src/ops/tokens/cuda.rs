//! Tokens copied on a card.

use super::Span;
use crate::Tensor;
use crate::cuda::{Cuda, Grid, Source, Variant, arguments, pack};

const KERNELS: Source = Source { name: "tokens", text: include_str!("kernel.cu") };

/// Copies, or adds to what is there; what is added to may be of another format.
pub fn copy(cuda: &Cuda, from: &Tensor, to: &mut Tensor, span: Span, add: bool) {
    let &[samples, n_from, width] = from.shape().sizes() else { unreachable!("checked by the op") };
    let n_to = to.shape().sizes()[1];
    let p = pack(width, &[from, to]);
    let packs = samples * span.count * width / p;
    let variant = Variant::of(&[from.dtype(), to.dtype()]).by(p);
    let arguments =
        arguments![from, to, packs, width, span.count, n_from, n_to, span.from, span.to, add];
    cuda.launch(&KERNELS, "copy_tokens", variant, Grid::numbers(packs), &arguments);
}
