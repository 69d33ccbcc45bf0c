//! Random choices on a GPU.

use super::GumbelDraw;
use crate::Tensor;
use crate::gpu::{GpuArg, GpuBackend, GpuVariant, WgslSource, arguments, sequence_args};

const KERNELS: WgslSource = WgslSource { name: "gumbel", text: include_str!("kernel.wgsl") };

/// Writes soft or hard choices; `logits` is none where they lie in `out` themselves.
pub fn one(
    gpu: &GpuBackend,
    draw: GumbelDraw,
    logits: Option<&Tensor>,
    out: &mut Tensor,
    hard: bool,
) {
    let of = GpuGumbel::new(out);
    let out_arg = GpuArg::from(out);
    let [soft, hard] = if hard { [GpuArg::None, out_arg] } else { [out_arg, GpuArg::None] };
    of.launch(gpu, draw, [logits.into(), soft, hard]);
}

/// Writes soft choices and the hard ones that belong to them.
pub fn both(
    gpu: &GpuBackend,
    draw: GumbelDraw,
    logits: Option<&Tensor>,
    soft: &mut Tensor,
    hard: &mut Tensor,
) {
    GpuGumbel::new(soft).launch(gpu, draw, [logits.into(), soft.into(), hard.into()]);
}

/// dlogits = soft · (gradient - Σ gradient · soft) / τ, in `out_arg`
pub fn backward(gpu: &GpuBackend, soft: &Tensor, temperature: f32, gradient: &mut Tensor) {
    let GpuGumbel { rows, width, variant } = GpuGumbel::new(soft);
    let arguments = arguments![soft, gradient, width, temperature];
    gpu.launch(&KERNELS, "gumbel_backward", &variant, rows, &arguments);
}

struct GpuGumbel {
    rows: usize,
    width: usize,
    variant: GpuVariant,
}

impl GpuGumbel {
    fn new(x: &Tensor) -> Self {
        let (rows, width) = (x.shape().rows(), x.shape().width());
        let rows = if width == 0 { 0 } else { rows };
        Self { rows, width, variant: GpuVariant::of(&[x.dtype()]) }
    }

    fn launch(&self, gpu: &GpuBackend, draw: GumbelDraw, tensors: [GpuArg<'_>; 3]) {
        let numbers = arguments![self.width, draw.temperature, draw.is_mirrored];
        let arguments = [&tensors[..], &numbers, &sequence_args(draw.sequence)].concat();
        gpu.launch(&KERNELS, "gumbel", &self.variant, self.rows, &arguments);
    }
}
