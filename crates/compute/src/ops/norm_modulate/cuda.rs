//! Layer norm on a GPU.

use super::NormConfig;
use crate::backward::GradientSlot;
use crate::cuda::columns::{CudaColumnSum, statistics};
use crate::cuda::{
    CudaArg, CudaBackend, CudaSource, CudaVariant, LaunchConfig, WARP, arguments, pack,
};
use crate::{Dtype, Tensor};

const KERNELS: CudaSource = CudaSource { name: "norm", text: include_str!("kernel.cu") };
/// The same two kernels for wide rows, which a block holds.
const HELD: CudaSource = CudaSource { name: "held norm", text: include_str!("held.cu") };
/// Rows from this width on are held. Chosen: narrow ones leave most of a block's threads without work.
const LEAST_HELD: usize = 512;
/// Packs of a thread. Chosen: fewer threads wait for fewer others, more packs
/// leave fewer rows under way.
const PACKS: usize = 3;
/// The most threads of a block.
const MOST_THREADS: usize = 1024;

pub fn forward(
    cuda: &CudaBackend,
    x: &Tensor,
    [scale, shift]: [Option<&Tensor>; 2],
    form: NormConfig,
    y: &mut Tensor,
) {
    let (rows, width) = (x.shape().rows(), x.shape().width());
    let p = pack(width, &[x, scale.unwrap_or(x), shift.unwrap_or(x), y]);
    let variant = CudaVariant::of(&[x.dtype(), vector_dtype(scale.or(shift))]).with_pack(p);
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
    launch(cuda, "layer_norm", x, variant, &arguments);
}

pub fn backward(
    cuda: &CudaBackend,
    x: &Tensor,
    scale: Option<&Tensor>,
    gradient: &Tensor,
    form: NormConfig,
    slot: &mut GradientSlot,
) {
    let (rows, width, out) = (x.shape().rows(), x.shape().width(), &mut slot.tensor);
    let p = pack(width, &[x, scale.unwrap_or(x), gradient, out]);
    let variant = CudaVariant::of(&[x.dtype(), vector_dtype(scale)]).with_pack(p);
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
    launch(cuda, "layer_norm_backward", x, variant, &arguments);
}

/// Starts the one of two kernels of a name that suits rows.
fn launch(
    cuda: &CudaBackend,
    name: &'static str,
    x: &Tensor,
    variant: CudaVariant,
    arguments: &[CudaArg],
) {
    let (rows, width) = (x.shape().rows(), x.shape().width());
    let threads = width.div_ceil(variant.pack * PACKS).next_multiple_of(WARP);
    if variant.pack > 1 && width >= LEAST_HELD && threads <= MOST_THREADS {
        let grid = LaunchConfig { threads: threads as u32, ..LaunchConfig::blocks(rows) };
        let variant = CudaVariant { size: PACKS, ..variant };
        return cuda.launch(&HELD, name, variant, grid, arguments);
    }
    cuda.launch(&KERNELS, name, variant, LaunchConfig::per_row(rows), arguments);
}

/// Adds Σ gradient · x̂ over the rows of a vector.
pub fn scale_gradient(
    cuda: &CudaBackend,
    x: &Tensor,
    gradient: &Tensor,
    form: NormConfig,
    workspace: &mut Tensor,
    out: &mut Tensor,
) {
    statistics(cuda, x, form.epsilon, workspace);
    let rows_per_vector = form.rows_per_vector;
    let sum =
        CudaColumnSum { a: gradient, b: Some(x), statistics: Some(workspace), rows_per_vector };
    sum.run(cuda, out, form.indices.0, true);
}

/// Adds Σ gradient over the rows of a vector.
pub fn shift_gradient(cuda: &CudaBackend, gradient: &Tensor, form: NormConfig, out: &mut Tensor) {
    let rows_per_vector = form.rows_per_vector;
    let sum = CudaColumnSum { a: gradient, b: None, statistics: None, rows_per_vector };
    sum.run(cuda, out, form.indices.1, true);
}

fn vector_dtype(vector: Option<&Tensor>) -> Dtype {
    vector.map_or(Dtype::F32, Tensor::dtype)
}
