//! Enlarging images on a GPU.

use super::UpsampleFactors;
use crate::Tensor;
use crate::gpu::{GpuBackend, GpuVariant, WgslSource, arguments, pairs};

const KERNELS: WgslSource = WgslSource { name: "upsample", text: include_str!("kernel.wgsl") };

pub fn forward(gpu: &GpuBackend, x: &Tensor, factors: UpsampleFactors, y: &mut Tensor) {
    let (&[_, _, frames, ..], &[_, _, all_frames, tall, wide]) =
        (x.shape().sizes(), y.shape().sizes())
    else {
        unreachable!("checked by the op")
    };
    let (n, UpsampleFactors { frames: times, side }) = (y.shape().elements(), factors);
    let arguments = arguments![x, y, n, frames, all_frames, tall, wide, times, side];
    gpu.launch(&KERNELS, "upsample", &GpuVariant::of(&[x.dtype()]), pairs(n), &arguments);
}
