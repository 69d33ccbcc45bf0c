//! Activations on a card.

use super::Activation;
use crate::Tensor;
use crate::cuda::{Cuda, Grid, Source, Variant, arguments, pack};

const KERNELS: Source = Source { name: "activation", text: include_str!("kernel.cu") };

pub fn forward(cuda: &Cuda, activation: Activation, x: &Tensor, y: &mut Tensor) {
    let n = x.shape().elements();
    let p = pack(n, &[x, y]);
    let variant = Variant::of(&[x.dtype()]).by(p);
    let arguments = arguments![x, y, n / p, activation.code()];
    cuda.launch(&KERNELS, "activate", variant, Grid::numbers(n / p), &arguments);
}

pub fn backward(cuda: &Cuda, activation: Activation, x: &Tensor, gradient: &mut Tensor) {
    let n = x.shape().elements();
    let p = pack(n, &[x, gradient]);
    let variant = Variant::of(&[x.dtype()]).by(p);
    let arguments = arguments![x, gradient, n / p, activation.code()];
    cuda.launch(&KERNELS, "activate_backward", variant, Grid::numbers(n / p), &arguments);
}

impl Activation {
    /// What kernels call it.
    pub(crate) fn code(self) -> u32 {
        self as u32
    }
}
