//! Layer norm on a GPU, and root-mean-square norm, which is one that is not centered.

use super::{NormBackwardInputs, NormConfig};
use crate::backward::GradientSlot;
use crate::gpu::columns::{GpuColumnSum, SHARE_ROWS, row_shares};
use crate::gpu::{GpuBackend, GpuVariant, THREADS, WgslSource, arguments, is_wide};
use crate::{Dtype, Tensor};

const KERNELS: WgslSource = WgslSource { name: "norm", text: include_str!("kernel.wgsl") };

pub fn forward(
    gpu: &GpuBackend,
    x: &Tensor,
    [scale, shift]: [Option<&Tensor>; 2],
    form: NormConfig,
    is_centered: bool,
    y: &mut Tensor,
) {
    let (rows, width) = (x.shape().rows(), x.shape().width());
    let variant = GpuVariant::of(&[x.dtype(), vector_dtype(scale.or(shift))])
        .with("WIDE", is_wide(width, &[Some(x), scale, shift, Some(y)]).into())
        .with("CENTERED", is_centered.into());
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

/// The gradient of x, and sums for those of scale and shift, in one pass over the rows; each if there is room for it.
pub fn backward(
    gpu: &GpuBackend,
    rows: NormBackwardInputs<'_>,
    is_centered: bool,
    of_x: Option<&mut GradientSlot>,
    sums: [Option<&mut Tensor>; 2],
) {
    let NormBackwardInputs { x, scale, gradient, form } = rows;
    let [scale_sums, shift_sums] = sums.map(|sums| sums.filter(|sums| sums.bytes() > 0));
    let width = x.shape().width();
    let has_sums = scale_sums.is_some() || shift_sums.is_some();
    let each = form.rows_per_vector;
    let share = if has_sums { row_shares(each).0 } else { gpu.rows_at_once(threads(gpu)) };
    let groups = n_vectors(x, each) * each.div_ceil(share);
    let add = of_x.as_ref().is_some_and(|slot| slot.add);
    let out = of_x.map(|slot| &mut slot.tensor);
    let tensors = [
        Some(x),
        scale,
        Some(gradient),
        out.as_deref(),
        scale_sums.as_deref(),
        shift_sums.as_deref(),
    ];
    let formats =
        [x.dtype(), vector_dtype(scale), out.as_ref().map_or(x.dtype(), |out| out.dtype())];
    let held = if has_sums { width.div_ceil(8 * threads(gpu)).max(1) } else { 1 };
    let variant = GpuVariant::of(&formats)
        .with("THREADS", threads(gpu))
        .with("WIDE", is_wide(width, &tensors).into())
        .with("CENTERED", is_centered.into())
        .with("HELD", held);
    let (whole, first) = (scale.map_or(0, |scale| scale.shape().width()), form.indices.0 * width);
    let arguments = arguments![
        x,
        scale,
        gradient,
        out,
        scale_sums,
        shift_sums,
        width,
        each,
        share,
        whole,
        first,
        form.epsilon,
        form.plus_one,
        add,
    ];
    gpu.launch(&KERNELS, "layer_norm_backward", &variant, groups, &arguments);
}

/// Threads of a workgroup of backward, which goes through as many rows at once as it has rows of threads: one for each
/// thread on a CPU.
fn threads(gpu: &GpuBackend) -> usize {
    if gpu.is_software() { SHARE_ROWS } else { THREADS }
}

fn n_vectors(x: &Tensor, rows_per_vector: usize) -> usize {
    x.shape().rows() / rows_per_vector.max(1)
}

/// Floats of the sums of which the gradient of vectors is made.
pub fn sums_floats(x: &Tensor, rows_per_vector: usize) -> usize {
    n_vectors(x, rows_per_vector) * row_shares(rows_per_vector).1 * x.shape().width()
}

/// Writes or adds the gradients of vectors, from the sums that [`backward`] found, to the `index`-th part of each row
/// of `out`.
pub fn add_up(
    gpu: &GpuBackend,
    sums: &Tensor,
    rows: NormBackwardInputs<'_>,
    index: usize,
    add: bool,
    out: &mut Tensor,
) {
    let NormBackwardInputs { x, form, .. } = rows;
    let (_, shares) = row_shares(form.rows_per_vector);
    let sums = sums.reshape([n_vectors(x, form.rows_per_vector) * shares, x.shape().width()]);
    GpuColumnSum { a: &sums, b: None, rows_per_vector: shares }.run(gpu, out, index, add);
}

fn vector_dtype(vector: Option<&Tensor>) -> Dtype {
    vector.map_or(Dtype::F32, Tensor::dtype)
}
