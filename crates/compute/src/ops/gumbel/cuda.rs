//! Random choices on a GPU.

use super::GumbelDraw;
use crate::Tensor;
use crate::cuda::{CudaArg, CudaBackend, CudaSource, CudaVariant, LaunchConfig, arguments};

const KERNELS: CudaSource = CudaSource { name: "gumbel", text: include_str!("kernel.cu") };

/// Writes soft or hard choices; `logits` is none where they lie in `out` themselves.
pub fn one(
    cuda: &CudaBackend,
    draw: GumbelDraw,
    logits: Option<&Tensor>,
    out: &mut Tensor,
    hard: bool,
) {
    let of = CudaGumbel::new(out);
    let out_arg = CudaArg::from(out);
    let logits = logits.map_or(out_arg, CudaArg::from);
    let [soft, hard] = if hard { [CudaArg::NONE, out_arg] } else { [out_arg, CudaArg::NONE] };
    of.launch(cuda, draw, [logits, soft, hard]);
}

/// Writes soft choices and the hard ones that belong to them.
pub fn both(
    cuda: &CudaBackend,
    draw: GumbelDraw,
    logits: Option<&Tensor>,
    soft: &mut Tensor,
    hard: &mut Tensor,
) {
    let of = CudaGumbel::new(soft);
    let out_arg = CudaArg::from(soft);
    of.launch(cuda, draw, [logits.map_or(out_arg, CudaArg::from), out_arg, hard.into()]);
}

/// dlogits = soft · (gradient - Σ gradient · soft) / τ, in place
pub fn backward(cuda: &CudaBackend, soft: &Tensor, temperature: f32, gradient: &mut Tensor) {
    let CudaGumbel { rows, width, variant } = CudaGumbel::new(soft);
    let arguments = arguments![soft, gradient, width, temperature];
    cuda.launch(&KERNELS, "gumbel_backward", variant, LaunchConfig::blocks(rows), &arguments);
}

struct CudaGumbel {
    rows: usize,
    width: usize,
    variant: CudaVariant,
}

impl CudaGumbel {
    fn new(x: &Tensor) -> Self {
        let (rows, width) = (x.shape().rows(), x.shape().width());
        let rows = if width == 0 { 0 } else { rows };
        Self { rows, width, variant: CudaVariant::of(&[x.dtype()]) }
    }

    fn launch(&self, cuda: &CudaBackend, draw: GumbelDraw, tensors: [CudaArg; 3]) {
        let [seed, stream, first] = draw.sequence.parts();
        let rest = arguments![self.width, draw.temperature, draw.is_mirrored, seed, stream, first];
        let arguments = [&tensors[..], &rest].concat();
        cuda.launch(&KERNELS, "gumbel", self.variant, LaunchConfig::blocks(self.rows), &arguments);
    }
}
