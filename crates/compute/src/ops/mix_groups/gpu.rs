//! Groups mixed on a GPU.

use super::{MixSizes, MixWeight};
use crate::Tensor;
use crate::backward::GradientSlot;
use crate::gpu::{GpuBackend, GpuVariant, WgslSource, arguments, pairs};

const KERNELS: WgslSource = WgslSource { name: "mix_groups", text: include_str!("kernel.wgsl") };

pub fn mix(
    gpu: &GpuBackend,
    x: &Tensor,
    w: MixWeight<'_>,
    sizes: MixSizes,
    y: &mut Tensor,
    add: bool,
) {
    let MixSizes { from, to, width, scale, .. } = sizes;
    let (n, [step, row_step]) = (y.shape().elements(), w.steps);
    let variant = GpuVariant::of(&[x.dtype(), y.dtype()]);
    let arguments = arguments![x, w.values, y, n, from, to, width, step, row_step, scale, add];
    gpu.launch(&KERNELS, "mix_groups", &variant, pairs(n), &arguments);
}

pub fn weight_gradient(
    gpu: &GpuBackend,
    x: &Tensor,
    gradient: &Tensor,
    sizes: MixSizes,
    slot: &mut GradientSlot,
) {
    let MixSizes { rows, from, to, width, scale } = sizes;
    let variant = GpuVariant::of(&[x.dtype()]);
    let out = &mut slot.tensor;
    let arguments = arguments![x, gradient, out, rows, from, to, width, scale, slot.add];
    gpu.launch(&KERNELS, "mix_groups_weight", &variant, to * from, &arguments);
}
