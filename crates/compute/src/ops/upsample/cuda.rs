//! Enlarging images on a card.

use crate::Tensor;
use crate::cuda::{Cuda, Grid, Source, Variant, arguments};

const KERNELS: Source = Source { name: "upsample", text: include_str!("kernel.cu") };

pub fn forward(cuda: &Cuda, x: &Tensor, factor: usize, y: &mut Tensor) {
    let (n, wide) = (y.shape().elements(), y.shape().width());
    let arguments = arguments![x, y, n, wide, factor];
    let variant = Variant::of(&[x.dtype()]);
    cuda.launch(&KERNELS, "upsample", variant, Grid::numbers(n), &arguments);
}
