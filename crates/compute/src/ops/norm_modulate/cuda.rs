//! Layer norm on a card.

use super::Form;
use crate::backward::Slot;
use crate::cuda::columns::{Sum, statistics};
use crate::cuda::{Cuda, Grid, Source, Variant, arguments, pack};
use crate::{Dtype, Tensor};

const KERNELS: Source = Source { name: "norm", text: include_str!("kernel.cu") };
/// The same two kernels for rows that a block has each.
const WIDE: Source = Source { name: "wide norm", text: include_str!("wide.cu") };
/// Rows from this width on have a block each. Chosen: two warps of packs.
const LEAST_WIDE: usize = 512;
/// The most threads of a block.
const MOST_THREADS: usize = 1024;

pub fn forward(
    cuda: &Cuda,
    x: &Tensor,
    [scale, shift]: [Option<&Tensor>; 2],
    form: Form,
    y: &mut Tensor,
) {
    let (rows, width) = (x.shape().rows(), x.shape().width());
    let p = pack(width, &[x, scale.unwrap_or(x), shift.unwrap_or(x), y]);
    let variant = Variant::of(&[x.dtype(), vector_dtype(scale.or(shift))]).by(p);
    let whole = |vector: Option<&Tensor>| vector.map_or(0, |vector| vector.shape().width());
    let (scale_first, shift_first) = (form.indices.0 * width, form.indices.1 * width);
    let arguments = arguments![
        x,
        scale,
        shift,
        y,
        rows,
        width,
        form.rows_per_vector,
        whole(scale),
        scale_first,
        whole(shift),
        shift_first,
        form.epsilon,
        form.plus_one,
    ];
    let (source, grid) = way(rows, width, p);
    cuda.launch(source, "layer_norm", variant, grid, &arguments);
}

pub fn backward(
    cuda: &Cuda,
    x: &Tensor,
    scale: Option<&Tensor>,
    gradient: &Tensor,
    form: Form,
    slot: &mut Slot,
) {
    let (rows, width, out) = (x.shape().rows(), x.shape().width(), &mut slot.tensor);
    let p = pack(width, &[x, scale.unwrap_or(x), gradient, out]);
    let variant = Variant::of(&[x.dtype(), vector_dtype(scale)]).by(p);
    let (whole, first) = (scale.map_or(0, |scale| scale.shape().width()), form.indices.0 * width);
    let arguments = arguments![
        x,
        scale,
        gradient,
        out,
        rows,
        width,
        form.rows_per_vector,
        whole,
        first,
        form.epsilon,
        form.plus_one,
        slot.add,
    ];
    let (source, grid) = way(rows, width, p);
    cuda.launch(source, "layer_norm_backward", variant, grid, &arguments);
}

/// Which kernels, and how many threads.
fn way(rows: usize, width: usize, pack: usize) -> (&'static Source, Grid) {
    let threads = (width / pack).next_multiple_of(32);
    if pack > 1 && width >= LEAST_WIDE && threads <= MOST_THREADS {
        return (&WIDE, Grid { threads: threads as u32, ..Grid::blocks(rows) });
    }
    (&KERNELS, Grid::rows(rows))
}

/// Adds Σ gradient · x̂ over the rows of a vector.
pub fn scale_gradient(
    cuda: &Cuda,
    x: &Tensor,
    gradient: &Tensor,
    form: Form,
    room: &mut Tensor,
    out: &mut Tensor,
) {
    statistics(cuda, x, form.epsilon, true, room);
    let rows_per_vector = form.rows_per_vector;
    let sum = Sum { a: gradient, b: Some(x), statistics: Some(room), rows_per_vector };
    sum.run(cuda, out, form.indices.0, true);
}

/// Adds Σ gradient over the rows of a vector.
pub fn shift_gradient(cuda: &Cuda, gradient: &Tensor, form: Form, out: &mut Tensor) {
    let rows_per_vector = form.rows_per_vector;
    let sum = Sum { a: gradient, b: None, statistics: None, rows_per_vector };
    sum.run(cuda, out, form.indices.1, true);
}

fn vector_dtype(vector: Option<&Tensor>) -> Dtype {
    vector.map_or(Dtype::F32, Tensor::dtype)
}
