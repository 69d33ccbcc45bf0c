//! Enlarging images on a GPU.

use super::UpsampleFactors;
use crate::Tensor;
use crate::cuda::{CudaBackend, CudaSource, CudaVariant, LaunchConfig, arguments};

const KERNELS: CudaSource = CudaSource { name: "upsample", text: include_str!("kernel.cu") };

pub fn forward(cuda: &CudaBackend, x: &Tensor, factors: UpsampleFactors, y: &mut Tensor) {
    let (&[_, _, frames, ..], &[_, _, all_frames, tall, wide]) =
        (x.shape().sizes(), y.shape().sizes())
    else {
        unreachable!("checked by the op")
    };
    let (n, UpsampleFactors { frames: times, side }) = (y.shape().elements(), factors);
    let arguments = arguments![x, y, n, frames, all_frames, tall, wide, times, side];
    let variant = CudaVariant::of(&[x.dtype()]);
    cuda.launch(&KERNELS, "upsample", variant, LaunchConfig::per_element(n), &arguments);
}
