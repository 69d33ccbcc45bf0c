//! Random choices on a GPU.

use super::Draw;
use crate::Tensor;
use crate::gpu::{Argument, Gpu, Source, Variant, arguments, stream_arguments};

const KERNELS: Source = Source { name: "gumbel", text: include_str!("kernel.wgsl") };

/// Writes soft or hard choices; `logits` is none where they lie in `out` themselves.
pub fn one(gpu: &Gpu, draw: Draw, logits: Option<&Tensor>, out: &mut Tensor, hard: bool) {
    let of = Of::new(out);
    let place = Argument::from(out);
    let [soft, hard] = if hard { [Argument::None, place] } else { [place, Argument::None] };
    of.launch(gpu, draw, [logits.into(), soft, hard]);
}

/// Writes soft choices and the hard ones that belong to them.
pub fn both(gpu: &Gpu, draw: Draw, logits: Option<&Tensor>, soft: &mut Tensor, hard: &mut Tensor) {
    Of::new(soft).launch(gpu, draw, [logits.into(), soft.into(), hard.into()]);
}

/// dlogits = soft · (gradient - Σ gradient · soft) / τ, in place
pub fn backward(gpu: &Gpu, soft: &Tensor, temperature: f32, gradient: &mut Tensor) {
    let Of { rows, width, variant } = Of::new(soft);
    let arguments = arguments![soft, gradient, width, temperature];
    gpu.launch(&KERNELS, "gumbel_backward", &variant, rows, &arguments);
}

struct Of {
    rows: usize,
    width: usize,
    variant: Variant,
}

impl Of {
    fn new(x: &Tensor) -> Self {
        let (rows, width) = (x.shape().rows(), x.shape().width());
        let rows = if width == 0 { 0 } else { rows };
        Self { rows, width, variant: Variant::of(&[x.dtype()]) }
    }

    fn launch(&self, gpu: &Gpu, draw: Draw, tensors: [Argument<'_>; 3]) {
        let numbers = arguments![self.width, draw.temperature];
        let arguments = [&tensors[..], &numbers, &stream_arguments(draw.random)].concat();
        gpu.launch(&KERNELS, "gumbel", &self.variant, self.rows, &arguments);
    }
}
