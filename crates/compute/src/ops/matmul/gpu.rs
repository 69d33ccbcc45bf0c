//! Matrix products on a GPU. Factors are read in whatever format they have and multiplied in f32; a second
//! product, which adapters are, is summed up with the first before anything is rounded.

use super::{Data, MatMul, Matrix, Product};
use crate::gpu::{Argument, Gpu, Source, Variant, arguments};
use crate::quantised::gpu::{dequantise, parts};
use crate::{Dtype, Quantisation, Quantised, Tensor};

const KERNELS: Source = Source { name: "matmul", text: include_str!("kernel.wgsl") };

/// Rows and columns of a group, as in the text.
const SIDE: usize = 64;

/// Floats of workspace: a quantised left factor, which only a change of adapters asks for, is copied.
pub fn floats(work: &MatMul<'_>) -> usize {
    let copies = work.products.iter().map(|product| match product.left.data {
        Data::Dense(_) => 0,
        Data::Quantised(quantised) => quantised.shape().elements(),
    });
    copies.max().unwrap_or(0)
}

/// Computes the products.
pub fn multiply(gpu: &Gpu, work: MatMul<'_>, workspace: &mut Tensor) {
    let (first, others) = work.products.split_first().expect("there is something to multiply");
    // One more is summed up in the same pass, all others before it.
    let (second, before) = match others.split_last() {
        Some((last, before)) if is_second(last) => (Some(last), before),
        _ => (None, others),
    };
    let mut add = work.add;
    for product in before {
        let plain = MatMul { add, ..MatMul::new(&[], &mut *work.out) };
        run(gpu, plain, product, None, workspace);
        add = true;
    }
    run(gpu, MatMul { add, ..work }, first, second, workspace);
}

/// Whether a product can be summed up with another.
fn is_second(product: &Product<'_>) -> bool {
    let is_f32 = |matrix: Matrix<'_>| matches!(matrix.data, Data::Dense(tensor) if tensor.dtype() == Dtype::F32);
    is_f32(product.left) && is_f32(product.right) && !product.left.transposed
}

fn run(
    gpu: &Gpu,
    work: MatMul<'_>,
    product: &Product<'_>,
    second: Option<&Product<'_>>,
    workspace: &mut Tensor,
) {
    let Product { left, right, scale } = product;
    let (rows, columns, inner) = (left.rows(), right.columns(), left.columns());
    let left_tensor = match left.data {
        Data::Dense(tensor) => tensor,
        Data::Quantised(quantised) => copied(gpu, quantised, workspace),
    };
    let (kernel, right_arguments, right_format, is_fp8) = right_factor(gpu, right);
    let (second_left, second_right) =
        second.map(|second| (second.left.tensor(), second.right.tensor())).unzip();
    let (second_inner, second_scale) =
        second.map_or((0, 0.0), |second| (second.left.columns(), second.scale));
    let second_code = second.map_or(0, |second| 1 + usize::from(second.right.transposed));
    let out = work.out;
    let variant = Variant::of(&[left_tensor.dtype(), right_format, out.dtype()])
        .with("LEFT_T", left.transposed.into())
        .with("RIGHT_T", right.transposed.into())
        .with("SECOND", second_code)
        .with("FP8", is_fp8.into());
    let tensors = arguments![second_left, second_right, work.bias, work.before_activation, out];
    let numbers = arguments![rows, columns, inner, *scale, second_inner, second_scale];
    let rest = arguments![work.activation.code(), work.add];
    let arguments = [&arguments![left_tensor][..], &right_arguments, &tensors, &numbers, &rest];
    let groups = rows.div_ceil(SIDE) * columns.div_ceil(SIDE);
    gpu.launch(&KERNELS, kernel, &variant, groups, &arguments.concat());
}

/// The kernel for a right factor, what it is given for it, its format, and whether that is fp8.
fn right_factor<'a>(
    gpu: &Gpu,
    right: &Matrix<'a>,
) -> (&'static str, Vec<Argument<'a>>, Dtype, bool) {
    match right.data {
        Data::Dense(tensor) => ("product", arguments![tensor].to_vec(), tensor.dtype(), false),
        Data::Quantised(quantised) => {
            let is_fp8 = quantised.how() == Quantisation::Fp8;
            let kernel = match quantised.how() {
                Quantisation::Nf4 => "product_by_blocks",
                Quantisation::Int8 | Quantisation::Fp8 => "product_by_rows",
            };
            (kernel, parts(gpu, quantised), Dtype::F32, is_fp8)
        }
    }
}

fn copied<'a>(gpu: &Gpu, quantised: &Quantised, workspace: &'a mut Tensor) -> &'a Tensor {
    dequantise(gpu, quantised, workspace);
    workspace
}
