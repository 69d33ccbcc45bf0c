//! Means over squares on a card.

use crate::Tensor;
use crate::cuda::{Cuda, Grid, Source, Variant, arguments};

const KERNELS: Source = Source { name: "avg_pool", text: include_str!("kernel.cu") };

pub fn forward(cuda: &Cuda, x: &Tensor, size: usize, y: &mut Tensor) {
    let (n, narrow) = (y.shape().elements(), y.shape().width());
    let arguments = arguments![x, y, n, narrow, size];
    let variant = Variant::of(&[x.dtype()]);
    cuda.launch(&KERNELS, "avg_pool", variant, Grid::numbers(n), &arguments);
}
