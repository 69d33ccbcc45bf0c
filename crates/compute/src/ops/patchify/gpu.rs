//! Images as tokens and back on a GPU.

use super::PatchLayout;
use crate::Tensor;
use crate::gpu::{GpuArg, GpuBackend, GpuVariant, WgslSource, arguments, pairs};

const KERNELS: WgslSource = WgslSource { name: "patchify", text: include_str!("kernel.wgsl") };

pub fn patchify(gpu: &GpuBackend, layout: PatchLayout, image: &Tensor, tokens: &mut Tensor) {
    let (n, variant) = (image.shape().elements(), GpuVariant::of(&[image.dtype()]));
    let arguments = [&arguments![image, tokens, n][..], &sizes(layout)].concat();
    gpu.launch(&KERNELS, "patchify", &variant, pairs(n), &arguments);
}

pub fn unpatchify(gpu: &GpuBackend, layout: PatchLayout, tokens: &Tensor, image: &mut Tensor) {
    let (n, variant) = (image.shape().elements(), GpuVariant::of(&[image.dtype()]));
    let arguments = [&arguments![tokens, image, n][..], &sizes(layout)].concat();
    gpu.launch(&KERNELS, "unpatchify", &variant, pairs(n), &arguments);
}

fn sizes(layout: PatchLayout) -> [GpuArg<'static>; 5] {
    let PatchLayout { channels, height, width, patch, strides: steps, .. } = layout;
    // Channels are the innermost where a step from one to the next is one, but for a single pixel's.
    let is_last = steps[0] == 1 && patch * patch > 1;
    arguments![channels, height, width, patch, is_last]
}
