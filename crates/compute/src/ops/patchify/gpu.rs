//! Images as tokens and back on a GPU.

use super::Layout;
use crate::Tensor;
use crate::gpu::{Argument, Gpu, Source, Variant, arguments, pairs};

const KERNELS: Source = Source { name: "patchify", text: include_str!("kernel.wgsl") };

pub fn patchify(gpu: &Gpu, layout: Layout, image: &Tensor, tokens: &mut Tensor) {
    let (n, variant) = (image.shape().elements(), Variant::of(&[image.dtype()]));
    let arguments = [&arguments![image, tokens, n][..], &sizes(layout)].concat();
    gpu.launch(&KERNELS, "patchify", &variant, pairs(n), &arguments);
}

pub fn unpatchify(gpu: &Gpu, layout: Layout, tokens: &Tensor, image: &mut Tensor) {
    let (n, variant) = (image.shape().elements(), Variant::of(&[image.dtype()]));
    let arguments = [&arguments![tokens, image, n][..], &sizes(layout)].concat();
    gpu.launch(&KERNELS, "unpatchify", &variant, pairs(n), &arguments);
}

fn sizes(layout: Layout) -> [Argument<'static>; 5] {
    let Layout { channels, height, width, patch, steps, .. } = layout;
    // Channels are the innermost where a step from one to the next is one, but for a single pixel's.
    let is_last = steps[0] == 1 && patch * patch > 1;
    arguments![channels, height, width, patch, is_last]
}
