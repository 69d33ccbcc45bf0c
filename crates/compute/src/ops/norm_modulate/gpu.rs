//! Layer norm on a GPU.

use super::Form;
use crate::backward::Slot;
use crate::gpu::columns::{Sum, statistics};
use crate::gpu::{Gpu, Source, THREADS, Variant, arguments, is_wide};
use crate::{Dtype, Tensor};

const KERNELS: Source = Source { name: "norm", text: include_str!("kernel.wgsl") };

pub fn forward(
    gpu: &Gpu,
    x: &Tensor,
    [scale, shift]: [Option<&Tensor>; 2],
    form: Form,
    y: &mut Tensor,
) {
    let (rows, width) = (x.shape().rows(), x.shape().width());
    let variant = Variant::of(&[x.dtype(), vector_dtype(scale.or(shift))])
        .with("WIDE", is_wide(width, &[Some(x), scale, shift, Some(y)]).into());
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
    gpu.launch(&KERNELS, "layer_norm", &variant, gpu.row_groups(rows, THREADS), &arguments);
}

pub fn backward(
    gpu: &Gpu,
    x: &Tensor,
    scale: Option<&Tensor>,
    gradient: &Tensor,
    form: Form,
    slot: &mut Slot,
) {
    let (rows, width) = (x.shape().rows(), x.shape().width());
    let tensors = [Some(x), scale, Some(gradient), Some(&slot.tensor)];
    let variant = Variant::of(&[x.dtype(), vector_dtype(scale)])
        .with("WIDE", is_wide(width, &tensors).into());
    let (whole, first) = (scale.map_or(0, |scale| scale.shape().width()), form.indices.0 * width);
    let arguments = arguments![
        x,
        scale,
        gradient,
        &mut slot.tensor,
        rows,
        width,
        form.rows_per_vector,
        whole,
        first,
        form.epsilon,
        form.plus_one,
        slot.add,
    ];
    gpu.launch(
        &KERNELS,
        "layer_norm_backward",
        &variant,
        gpu.row_groups(rows, THREADS),
        &arguments,
    );
}

/// Adds Σ gradient · x̂ over the rows of a vector.
pub fn scale_gradient(
    gpu: &Gpu,
    x: &Tensor,
    gradient: &Tensor,
    form: Form,
    room: &mut Tensor,
    out: &mut Tensor,
) {
    statistics(gpu, x, form.epsilon, true, room);
    let rows_per_vector = form.rows_per_vector;
    let sum = Sum { a: gradient, b: Some(x), statistics: Some(room), rows_per_vector };
    sum.run(gpu, out, form.indices.0, true);
}

/// Adds Σ gradient over the rows of a vector.
pub fn shift_gradient(gpu: &Gpu, gradient: &Tensor, form: Form, out: &mut Tensor) {
    let rows_per_vector = form.rows_per_vector;
    let sum = Sum { a: gradient, b: None, statistics: None, rows_per_vector };
    sum.run(gpu, out, form.indices.1, true);
}

fn vector_dtype(vector: Option<&Tensor>) -> Dtype {
    vector.map_or(Dtype::F32, Tensor::dtype)
}
