//! Norm and rotation on a card.

use super::{Form, Pairs};
use crate::backward::Slot;
use crate::cuda::columns::Sum;
use crate::cuda::{Argument, Cuda, Grid, Source, Variant, arguments, pack};
use crate::{Dtype, Tensor};

const KERNELS: Source = Source { name: "qk_norm_rope", text: include_str!("kernel.cu") };
/// The same two kernels for heads that several threads share.
const PACKED: Source = Source { name: "qk_norm_rope packed", text: include_str!("packed.cu") };

pub fn forward(cuda: &Cuda, x: &Tensor, weight: Option<&Tensor>, form: &Form, y: &mut Tensor) {
    let Heads { n, rest } = Heads::new(x, form);
    let table = form.rope.as_ref().map(|(table, _)| table);
    let way = Way::new(form, [Some(x), weight, table, Some(y)], n);
    let arguments = [&arguments![x, weight, table, y][..], &rest].concat();
    way.launch(cuda, "qk_norm_rope", x.dtype(), &arguments);
}

/// Turns the gradient of the result into that of x, in place; the norm needs x and its weight.
pub fn backward(cuda: &Cuda, norm: Option<&(Tensor, Tensor)>, form: &Form, gradient: &mut Tensor) {
    let Heads { n, rest } = Heads::new(gradient, form);
    let dtype = gradient.dtype();
    let (x, weight) = norm.map(|(x, weight)| (x, weight)).unzip();
    let table = form.rope.as_ref().map(|(table, _)| table);
    let way = Way::new(form, [x, weight, table, Some(gradient)], n);
    let arguments = [&arguments![x, weight, table, gradient][..], &rest].concat();
    way.launch(cuda, "qk_norm_rope_backward", dtype, &arguments);
}

/// Which kernels, and how many threads.
struct Way {
    source: &'static Source,
    pack: usize,
    size: usize,
    grid: Grid,
}

impl Way {
    fn new(form: &Form, tensors: [Option<&Tensor>; 4], n: usize) -> Self {
        let d = form.head_width;
        let tensors: Vec<&Tensor> = tensors.into_iter().flatten().collect();
        let (pack, is_fit) = (pack(d, &tensors), d.is_power_of_two() && (16..=256).contains(&d));
        if pack > 1 && is_fit && n > 0 {
            return Self { source: &PACKED, pack, size: d, grid: Grid::numbers(n * d / pack) };
        }
        Self { source: &KERNELS, pack: 1, size: 0, grid: Grid::rows(n) }
    }

    fn launch(&self, cuda: &Cuda, name: &'static str, dtype: Dtype, arguments: &[Argument]) {
        let variant = Variant { size: self.size, ..Variant::of(&[dtype]).by(self.pack) };
        cuda.launch(self.source, name, variant, self.grid, arguments);
    }
}

/// Σ gradient · x̂ over the heads of all rows, the gradient turned back.
pub fn weight_gradient(
    cuda: &Cuda,
    x: &Tensor,
    gradient: &Tensor,
    form: &Form,
    partial: &mut Tensor,
    slot: &mut Slot,
) {
    let rest = Heads::new(x, form).rest;
    let blocks = partial.shape().rows();
    let table = form.rope.as_ref().map(|(table, _)| table);
    let arguments = [&arguments![x, gradient, table, &mut *partial][..], &rest].concat();
    let variant = Variant::of(&[x.dtype()]);
    let grid = Grid { threads: 32, ..Grid::blocks(blocks) };
    cuda.launch(&KERNELS, "qk_weight_backward", variant, grid, &arguments);
    let sum = Sum { a: partial, b: None, statistics: None, rows_per_vector: blocks };
    sum.run(cuda, &mut slot.tensor, 0, slot.add);
}

/// How many heads there are, and what all kernels are told last.
struct Heads {
    n: usize,
    rest: [Argument; 6],
}

impl Heads {
    fn new(x: &Tensor, form: &Form) -> Self {
        let d = form.head_width;
        let (n, per_row) = (x.shape().elements() / d.max(1), x.shape().width() / d.max(1));
        let (table_rows, pairs) = match &form.rope {
            Some((table, pairs)) => (table.shape().rows(), *pairs),
            None => (1, Pairs::Interleaved),
        };
        let half_split = pairs == Pairs::HalfSplit;
        Self { n, rest: arguments![n, d, per_row, table_rows, half_split, form.epsilon] }
    }
}
