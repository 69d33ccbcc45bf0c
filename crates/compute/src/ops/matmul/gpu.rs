//! Matrix products on a GPU. Factors are read in whatever format they have and multiplied in f32; a second
//! product, which adapters are, is summed up with the first before anything is rounded.

use super::{Data, MatMul, Matrix, Product};
use crate::gpu::{Argument, Gpu, Source, Variant, arguments, is_wide};
use crate::quantised::gpu::{dequantise, parts};
use crate::{Dtype, Quantisation, Quantised, Tensor};

const KERNELS: Source = Source {
    name: "matmul",
    text: concat!(
        include_str!("lines.wgsli"),
        include_str!("plain.wgsli"),
        include_str!("kernels.wgsl")
    ),
};

/// Rows and columns of a thread, as in the text.
const SIDE: usize = 8;
/// Threads of a group. Chosen: those of two rows of 32, with sixty-four by sixty-four numbers of the result.
const THREADS: usize = 64;
/// Threads that work on a small result, if the depth can be cut into enough slices. Chosen: as many as Apple's
/// chips of ten cores keep busy.
const ENOUGH: usize = 8192;
/// The same for a program on a processor of some cores, where threads that wait for each other are dear.
const ENOUGH_SOFTWARE: usize = 128;
/// Depth of a slice at least, and slices at most.
const DEPTH: usize = 64;
const MOST_SLICES: usize = 16;

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
        Some((last, before)) if is_second(last) && first.scale == 1.0 => (Some(last), before),
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

/// Whether a product can be summed up with another that has no scale.
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
    let second_width = second.map_or(0, |second| second.right.tensor().shape().width());
    let layout = Layout::new(gpu, rows, columns, inner);
    let out = work.out;
    let is_wide_factor = |matrix: &Matrix<'_>, tensor| is_wide(matrix.width(), &[Some(tensor)]);
    let before = work.before_activation.as_deref();
    let variant = Variant::of(&[left_tensor.dtype(), right_format, out.dtype()])
        .with("THREADS", THREADS)
        .with("LEFT_T", left.transposed.into())
        .with("RIGHT_T", right.transposed.into())
        .with("LEFT_WIDE", is_wide_factor(left, left_tensor).into())
        .with("RIGHT_WIDE", is_wide_factor(right, right.tensor()).into())
        .with("EVEN", (inner % SIDE == 0).into())
        .with("SECOND", second_code)
        .with(
            "SECOND_WIDE",
            is_wide(second_width | second_inner, &[second_left, second_right]).into(),
        )
        .with("WIDE", is_wide(columns, &[Some(out), before, work.bias]).into())
        .with("SLICES", layout.slices)
        .with("SHARED", if layout.slices == 1 { 1 } else { THREADS })
        .with("KIND", work.activation.code() as usize)
        .with("FP8", is_fp8.into());
    let tensors = arguments![second_left, second_right, work.bias, work.before_activation, out];
    let numbers = arguments![rows, columns, inner, *scale, second_inner, second_scale];
    let rest = arguments![layout.beside, work.add];
    let arguments = [&arguments![left_tensor][..], &right_arguments, &tensors, &numbers, &rest];
    gpu.launch(&KERNELS, kernel, &variant, layout.groups, &arguments.concat());
}

/// How a result is shared among threads.
struct Layout {
    /// Blocks of a group that lie beside each other.
    beside: usize,
    /// Threads that share a block, each with a part of the depth.
    slices: usize,
    groups: usize,
}

impl Layout {
    fn new(gpu: &Gpu, rows: usize, columns: usize, inner: usize) -> Self {
        let (down, across) = (rows.div_ceil(SIDE), columns.div_ceil(SIDE));
        let enough = if gpu.is_software() { ENOUGH_SOFTWARE } else { ENOUGH };
        let mut slices = 1;
        while 2 * slices * down * across <= enough
            && 2 * slices * DEPTH <= inner
            && slices < MOST_SLICES
        {
            slices *= 2;
        }
        let places = THREADS / slices;
        let groups = |beside: &usize| across.div_ceil(*beside) * down.div_ceil(places / beside);
        let fits = [8, 4, 2, 1].into_iter().filter(|beside| *beside <= places);
        let beside = fits.min_by_key(groups).expect("one block fits beside nothing");
        Self { beside, slices, groups: groups(&beside) }
    }
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
