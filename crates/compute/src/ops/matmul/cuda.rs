//! Matrix products on a card, by cuBLASLt. Its factors have one format: where they differ, or where
//! one is quantised, a copy is made in the workspace first.
//!
//! A result of 16 bits is multiplied from factors of its own format, so adapters, biases and what lies
//! between two adapters are rounded to it; sums are f32. All products but the first are small, and
//! come first: the large one then adds to them, with bias and activation in the same pass.

use super::{Data, MatMul, Matrix, Product};
use crate::cuda::{ALIGNMENT, Argument, Cuda, Epilogue, Factors, Gemm, Variant, WORKSPACE};
use crate::cuda::{Grid, Source, arguments, pack};
use crate::ops::{Activation, activation, elementwise};
use crate::{Dtype, Tensor, quantised};

const KERNELS: Source = Source { name: "matmul", text: include_str!("kernel.cu") };

/// Columns that the library's activations can be used with are a multiple of this.
const EPILOGUE_COLUMNS: usize = 8;

/// Bytes of workspace: the library's, then copies of what has another format.
pub fn bytes(work: &MatMul<'_>) -> usize {
    let copies = work.products.iter().map(|product| {
        let dtype = format(product, work.out.dtype());
        [product.left, product.right].iter().map(|factor| copy_bytes(*factor, dtype)).sum()
    });
    // Copies of one product are done with when the next begins.
    let bias = work.bias.map_or(0, |bias| bias_bytes(bias, work.out.dtype()));
    WORKSPACE + bias + copies.max().unwrap_or(0usize)
}

/// Of a copy of the bias in the format of the result; one in f32 may have to be copied to be aligned.
fn bias_bytes(bias: &Tensor, out: Dtype) -> usize {
    let is_ready = bias.dtype() == out && out != Dtype::F32;
    let bytes = if is_ready { 0 } else { bias.shape().elements() * out.bytes() };
    bytes.next_multiple_of(ALIGNMENT)
}

/// The format that both factors of a product are multiplied in.
fn format(product: &Product<'_>, out: Dtype) -> Dtype {
    if out != Dtype::F32 {
        return out;
    }
    // Both are f32, and neither need be as exact as that.
    if product.left.parts == 1 && product.right.parts == 1 {
        return Dtype::Bf16;
    }
    match [product.left, product.right].map(|factor| dense_dtype(&factor)) {
        [Some(left), Some(right)] if left == right => left,
        [Some(Dtype::Bf16), _] | [_, Some(Dtype::Bf16)] => Dtype::Bf16,
        [Some(one), None] | [None, Some(one)] => one,
        _ => Dtype::F32,
    }
}

fn dense_dtype(matrix: &Matrix<'_>) -> Option<Dtype> {
    match matrix.data {
        Data::Dense(tensor) => Some(tensor.dtype()),
        Data::Quantised(_) => None,
    }
}

fn copy_bytes(factor: Matrix<'_>, dtype: Dtype) -> usize {
    if dense_dtype(&factor) == Some(dtype) {
        return 0;
    }
    (factor.rows() * factor.columns() * dtype.bytes()).next_multiple_of(ALIGNMENT)
}

/// Computes the products.
pub fn multiply(cuda: &Cuda, work: MatMul<'_>, workspace: &mut Tensor) {
    if work.rows() * work.columns() == 0 {
        return;
    }
    let room = Room::new(&work, workspace.address_mut());
    let (last, first) = work.products.split_first().expect("there is something to multiply");
    let out = work.out.dtype();
    let epilogue = epilogue(&work);
    let is_added = work.add || work.onto.is_some();
    let gemm = Gemm { add: is_added || !first.is_empty(), epilogue, ..plain(last, out) };
    let is_by_library = epilogue != Epilogue::Nothing;
    let bias = work.bias.filter(|_| is_by_library).map_or(0, |bias| room.bias(cuda, bias, out));
    let before = work.before_activation.filter(|_| work.activation != Activation::None);
    let kept = match work.slope {
        Some(slope) => slope.before.address(),
        None => before.map_or(0, Tensor::address_mut),
    };
    if !work.add && cuda.wants_trial(&gemm) {
        let trial = Room { is_trial: true, ..room };
        trial.run(cuda, last, (work.onto, work.out), gemm, [bias, kept]);
    }
    let mut onto = work.onto;
    for (index, product) in first.iter().enumerate() {
        let gemm = Gemm { add: is_added || index > 0, ..plain(product, out) };
        room.run(cuda, product, (onto.take(), work.out), gemm, [0, 0]);
    }
    room.run(cuda, last, (onto, work.out), gemm, [bias, kept]);
    if let Some(slope) = work.slope.filter(|_| !is_by_library) {
        return activation::cuda::backward(cuda, slope.activation, &slope.before, work.out);
    }
    if !is_by_library && (work.bias.is_some() || work.activation != Activation::None) {
        finish(
            cuda,
            work.out,
            (work.bias, work.activation),
            (kept, work.products[0].right.columns()),
        );
    }
}

fn plain(product: &Product<'_>, out: Dtype) -> Gemm {
    let Product { left, right, .. } = product;
    Gemm {
        rows: left.rows(),
        columns: right.columns(),
        inner: left.columns(),
        is_transposed: [left.transposed, right.transposed],
        factors: format(product, out),
        out,
        add: false,
        epilogue: Epilogue::Nothing,
    }
}

/// What the library does besides multiplying.
fn epilogue(work: &MatMul<'_>) -> Epilogue {
    let (has_bias, is_kept) = (work.bias.is_some(), work.before_activation.is_some());
    let is_fit =
        work.columns().is_multiple_of(EPILOGUE_COLUMNS) && work.products[0].left.columns() > 0;
    // In f32 its tanh is coarser than the numbers.
    let has_gelu = is_fit && work.out.dtype() != Dtype::F32;
    match (work.activation, work.slope.map(|slope| slope.activation)) {
        (Activation::None, Some(Activation::GeluTanh)) if has_gelu => Epilogue::GeluSlope,
        (Activation::None, None) if has_bias && is_fit => Epilogue::Bias,
        (Activation::GeluTanh, None) if has_gelu => Epilogue::Gelu { has_bias, is_kept },
        _ => Epilogue::Nothing,
    }
}

fn finish(
    cuda: &Cuda,
    out: &mut Tensor,
    (bias, activation): (Option<&Tensor>, Activation),
    (kept, columns): (u64, usize),
) {
    let n = out.shape().elements();
    let is_fit = kept.is_multiple_of(16);
    let p = if is_fit { pack(columns, &[out, bias.unwrap_or(out)]) } else { 1 };
    let variant = Variant::of(&[out.dtype(), bias.map_or(Dtype::F32, Tensor::dtype)]).by(p);
    let arguments = arguments![out, bias, kept, n / p, columns, activation.code()];
    cuda.launch(&KERNELS, "finish", variant, Grid::numbers(n / p), &arguments);
}

/// The workspace: the library's part, the bias, copies of factors.
struct Room {
    library: u64,
    bias: u64,
    copies: u64,
    /// Whether products are tried rather than done.
    is_trial: bool,
}

impl Room {
    fn new(work: &MatMul<'_>, library: u64) -> Self {
        let bias = library + WORKSPACE as u64;
        let bytes = work.bias.map_or(0, |bias| bias_bytes(bias, work.out.dtype()));
        Self { library, bias, copies: bias + bytes as u64, is_trial: false }
    }

    /// A bias in the format of the result.
    fn bias(&self, cuda: &Cuda, bias: &Tensor, out: Dtype) -> u64 {
        if bias.dtype() == out && bias.address().is_multiple_of(16) {
            return bias.address();
        }
        let (to, n) = (self.bias, bias.shape().elements());
        let variant = Variant::of(&[bias.dtype(), out]);
        elementwise::cuda::convert(cuda, (bias.into(), Argument(to)), variant, n);
        to
    }

    fn run(
        &self,
        cuda: &Cuda,
        product: &Product<'_>,
        (onto, out): (Option<&Tensor>, &mut Tensor),
        gemm: Gemm,
        [bias, before]: [u64; 2],
    ) {
        // An empty sum.
        if gemm.inner == 0 {
            match onto {
                Some(onto) => cuda.copy(onto.address(), out.address_mut(), onto.bytes()),
                None if !gemm.add => out.clear(),
                None => {}
            }
            return;
        }
        let mut to = self.copies;
        let left = Self::factor(cuda, product.left, gemm.factors, &mut to);
        let right = Self::factor(cuda, product.right, gemm.factors, &mut to);
        let (workspace, scale, is_trial) = (self.library, product.scale, self.is_trial);
        let out = out.address_mut();
        let onto = onto.map_or(out, Tensor::address);
        let at = Factors { left, right, onto, out, scale, bias, before, workspace, is_trial };
        cuda.gemm(&gemm, at);
    }

    /// Where a factor lies in a format; a copy is put at `to`.
    fn factor(cuda: &Cuda, factor: Matrix<'_>, dtype: Dtype, to: &mut u64) -> u64 {
        let place = *to;
        *to += copy_bytes(factor, dtype) as u64;
        match factor.data {
            Data::Dense(tensor) if tensor.dtype() == dtype => return tensor.address(),
            Data::Dense(tensor) => {
                let (n, variant) = (tensor.shape().elements(), [tensor.dtype(), dtype]);
                let p = if n % 8 == 0 { pack(n, &[tensor]) } else { 1 };
                let places = (tensor.into(), Argument(place));
                elementwise::cuda::convert(cuda, places, Variant::of(&variant).by(p), n / p);
            }
            Data::Quantised(quantised) => {
                quantised::cuda::dequantise(cuda, quantised, dtype, Argument(place));
            }
        }
        place
    }
}
