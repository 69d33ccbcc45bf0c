//! Random choices on a card.

use super::Draw;
use crate::Tensor;
use crate::cuda::{Argument, Cuda, Grid, Source, Variant, arguments};

const KERNELS: Source = Source { name: "gumbel", text: include_str!("kernel.cu") };

/// Writes soft or hard choices; `logits` is none where they lie in `out` themselves.
pub fn one(cuda: &Cuda, draw: Draw, logits: Option<&Tensor>, out: &mut Tensor, hard: bool) {
    let of = Of::new(out);
    let place = Argument::from(out);
    let logits = logits.map_or(place, Argument::from);
    let [soft, hard] = if hard { [Argument::NONE, place] } else { [place, Argument::NONE] };
    of.launch(cuda, draw, [logits, soft, hard]);
}

/// Writes soft choices and the hard ones that belong to them.
pub fn both(
    cuda: &Cuda,
    draw: Draw,
    logits: Option<&Tensor>,
    soft: &mut Tensor,
    hard: &mut Tensor,
) {
    let of = Of::new(soft);
    let place = Argument::from(soft);
    of.launch(cuda, draw, [logits.map_or(place, Argument::from), place, hard.into()]);
}

/// dlogits = soft · (gradient - Σ gradient · soft) / τ, in place
pub fn backward(cuda: &Cuda, soft: &Tensor, temperature: f32, gradient: &mut Tensor) {
    let Of { rows, width, variant } = Of::new(soft);
    let arguments = arguments![soft, gradient, width, temperature];
    cuda.launch(&KERNELS, "gumbel_backward", variant, Grid::blocks(rows), &arguments);
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

    fn launch(&self, cuda: &Cuda, draw: Draw, tensors: [Argument; 3]) {
        let [seed, stream, first] = draw.random.parts();
        let rest = arguments![self.width, draw.temperature, seed, stream, first];
        let arguments = [&tensors[..], &rest].concat();
        cuda.launch(&KERNELS, "gumbel", self.variant, Grid::blocks(self.rows), &arguments);
    }
}
