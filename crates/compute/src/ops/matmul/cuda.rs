//! Matmuls by cuBLASLt. Both operands have one dtype: where they differ, or where one is quantised, a copy is
//! made in the workspace first. Matrices of fp8 may be multiplied as they are (`cuda/fp8.rs`).
//!
//! A result of 16 bits is computed from operands of its own dtype, so LoRA weights, biases and what lies
//! between LoRA's two matrices are rounded to it; sums are f32. All matmuls but the first are small, and
//! come first: the large one then adds to them, with bias and activation in the same pass.

mod fp8;

use self::fp8::Fp8Matmul;
use super::{FusedMatmul, Matmul, Operand, OperandData};
use crate::cuda::{
    ALIGNMENT, CudaArg, CudaBackend, CudaVariant, Epilogue, Gemm, GemmOperands, WORKSPACE,
};
use crate::cuda::{CudaSource, LaunchConfig, arguments, pack};
use crate::ops::{Activation, activation, elementwise};
use crate::{Dtype, Tensor, quantised};

const KERNELS: CudaSource = CudaSource { name: "matmul", text: include_str!("kernel.cu") };

/// The library's epilogues need columns that are a multiple of this.
const EPILOGUE_COLUMNS: usize = 8;
/// Rows from which the library multiplies by a derivative. Taken: for fewer it takes a kernel for older GPUs, which needs
/// twice the time on an H200.
const SLOPE_ROWS: usize = 1024;

/// Bytes of workspace: the library's, then copies of what has another dtype.
pub fn bytes(work: &FusedMatmul<'_>) -> usize {
    let copies = work.matmuls.iter().map(|matmul| {
        let dtype = operand_dtype(matmul, work.out.dtype());
        let copies = [matmul.left, matmul.right].map(|operand| copy_bytes(operand, dtype));
        // A layer that is not precise enough in fp8 is multiplied otherwise from then on: no plan knows.
        let fp8 =
            Fp8Matmul::of(matmul, work.out.dtype()).map_or(0, |fp8| fp8.bytes(work.out.dtype()));
        fp8.max(copies.iter().sum())
    });
    // Copies of one matmul are done with when the next begins.
    let bias = work.bias.map_or(0, |bias| bias_bytes(bias, work.out.dtype()));
    WORKSPACE + bias + copies.max().unwrap_or(0usize)
}

/// Of a copy of the bias in the result's dtype; one in f32 may have to be copied to be aligned.
fn bias_bytes(bias: &Tensor, out: Dtype) -> usize {
    let is_ready = bias.dtype() == out && out != Dtype::F32;
    let bytes = if is_ready { 0 } else { bias.shape().elements() * out.bytes() };
    bytes.next_multiple_of(ALIGNMENT)
}

/// The dtype that both operands of a matmul are multiplied in.
fn operand_dtype(matmul: &Matmul<'_>, out: Dtype) -> Dtype {
    if out != Dtype::F32 {
        return out;
    }
    // Both are f32, and need not be as exact as that.
    if matmul.left.n_splits == 1 && matmul.right.n_splits == 1 {
        return Dtype::Bf16;
    }
    match [matmul.left, matmul.right].map(|operand| dense_dtype(&operand)) {
        [Some(left), Some(right)] if left == right => left,
        [Some(Dtype::Bf16), _] | [_, Some(Dtype::Bf16)] => Dtype::Bf16,
        [Some(one), None] | [None, Some(one)] => one,
        _ => Dtype::F32,
    }
}

fn dense_dtype(matrix: &Operand<'_>) -> Option<Dtype> {
    match matrix.data {
        OperandData::Dense(tensor) => Some(tensor.dtype()),
        OperandData::Quantised(_) => None,
    }
}

fn copy_bytes(operand: Operand<'_>, dtype: Dtype) -> usize {
    if dense_dtype(&operand) == Some(dtype) {
        return 0;
    }
    (operand.data.shape().elements() * dtype.bytes()).next_multiple_of(ALIGNMENT)
}

/// The kernel class.
pub fn kernel_name(work: &FusedMatmul<'_>) -> &'static str {
    match Fp8Matmul::of(&work.matmuls[0], work.out.dtype()) {
        Some(_) => "matmul by fp8 units",
        None => work.gpu_kernel_name(),
    }
}

/// Computes the matmuls.
pub fn multiply(cuda: &CudaBackend, work: FusedMatmul<'_>, workspace: &mut Tensor) {
    if work.rows() * work.columns() == 0 {
        return;
    }
    let workspace_layout = MatmulWorkspace::new(&work, workspace.address_mut());
    let (last, first) = work.matmuls.split_first().expect("there is something to multiply");
    let (out, allows_tf32) = (work.out.dtype(), work.allows_tf32);
    let is_added = work.add || work.onto.is_some();
    let add = is_added || !first.is_empty();
    let is_measured = !work.has_data_sizes;
    let plain = |matmul| Gemm { is_measured, ..plain(matmul, out, allows_tf32) };
    let gemm = Gemm { add, epilogue: epilogue(&work), ..plain(last) };
    let gemm = if gemm.has_scales { cuda.feasible(&gemm) } else { gemm };
    let is_by_library = gemm.epilogue != Epilogue::Nothing;
    let bias = work
        .bias
        .filter(|_| is_by_library)
        .map_or(0, |bias| workspace_layout.bias(cuda, bias, out));
    let before = work.pre_activation.filter(|_| work.activation != Activation::None);
    let kept = match work.derivative_at {
        Some(at) => at.input.address(),
        None => before.map_or(0, Tensor::address_mut),
    };
    if !work.add && cuda.wants_trial(&gemm) {
        let trial = MatmulWorkspace { is_trial: true, ..workspace_layout };
        trial.run(cuda, last, work.onto, work.out, gemm, [bias, kept]);
    }
    let mut onto = work.onto;
    for (index, matmul) in first.iter().enumerate() {
        let gemm = Gemm { add: is_added || index > 0, ..plain(matmul) };
        workspace_layout.run(cuda, matmul, onto.take(), work.out, gemm, [0, 0]);
    }
    workspace_layout.run(cuda, last, onto, work.out, gemm, [bias, kept]);
    if let Some(at) = work.derivative_at.filter(|_| !is_by_library) {
        return activation::cuda::backward(cuda, at.activation, &at.input, work.out);
    }
    if !is_by_library && (work.bias.is_some() || work.activation != Activation::None) {
        let columns = work.matmuls[0].right.columns();
        finish(cuda, work.out, work.bias, work.activation, kept, columns);
    }
}

fn plain(matmul: &Matmul<'_>, out: Dtype, allows_tf32: bool) -> Gemm {
    let Matmul { left, right, .. } = matmul;
    let factors = operand_dtype(matmul, out);
    let gemm = Gemm {
        rows: left.rows(),
        columns: right.columns(),
        inner: left.columns(),
        is_transposed: [left.transposed, right.transposed],
        strides: [left.stride(), right.stride()],
        factors,
        has_scales: false,
        out,
        allows_tf32: allows_tf32 && factors == Dtype::F32,
        add: false,
        epilogue: Epilogue::Nothing,
        is_measured: true,
    };
    if Fp8Matmul::of(matmul, out).is_some() { Fp8Matmul::gemm(gemm) } else { gemm }
}

/// What the library does besides multiplying.
fn epilogue(work: &FusedMatmul<'_>) -> Epilogue {
    let (has_bias, is_kept) = (work.bias.is_some(), work.pre_activation.is_some());
    let is_fit =
        work.columns().is_multiple_of(EPILOGUE_COLUMNS) && work.matmuls[0].left.columns() > 0;
    // Its tanh is less exact than f32.
    let has_gelu = is_fit && work.out.dtype() != Dtype::F32;
    // Taken: in fp8 the library's takes twice the time of the matmul.
    let has_slope = has_gelu
        && work.rows() >= SLOPE_ROWS
        && Fp8Matmul::of(&work.matmuls[0], work.out.dtype()).is_none();
    match (work.activation, work.derivative_at.map(|at| at.activation)) {
        (Activation::None, Some(Activation::GeluTanh)) if has_slope => Epilogue::GeluGrad,
        (Activation::None, None) if has_bias && is_fit => Epilogue::Bias,
        (Activation::GeluTanh, None) if has_gelu => Epilogue::Gelu { has_bias, is_kept },
        _ => Epilogue::Nothing,
    }
}

fn finish(
    cuda: &CudaBackend,
    out: &mut Tensor,
    bias: Option<&Tensor>,
    activation: Activation,
    pre_activation: u64,
    columns: usize,
) {
    let n = out.shape().elements();
    let is_fit = pre_activation.is_multiple_of(16);
    let p = if is_fit { pack(columns, &[out, bias.unwrap_or(out)]) } else { 1 };
    let variant =
        CudaVariant::of(&[out.dtype(), bias.map_or(Dtype::F32, Tensor::dtype)]).with_pack(p);
    let arguments = arguments![out, bias, pre_activation, n / p, columns, activation.code()];
    cuda.launch(&KERNELS, "finish", variant, LaunchConfig::per_element(n / p), &arguments);
}

/// Addresses in the workspace: the library's part, the bias, copies of operands.
struct MatmulWorkspace {
    library: u64,
    bias: u64,
    copies: u64,
    /// Whether this is a trial to choose an algorithm.
    is_trial: bool,
}

impl MatmulWorkspace {
    fn new(work: &FusedMatmul<'_>, library: u64) -> Self {
        let bias = library + WORKSPACE as u64;
        let bytes = work.bias.map_or(0, |bias| bias_bytes(bias, work.out.dtype()));
        Self { library, bias, copies: bias + bytes as u64, is_trial: false }
    }

    /// A bias in the dtype of the result.
    fn bias(&self, cuda: &CudaBackend, bias: &Tensor, out: Dtype) -> u64 {
        if bias.dtype() == out && bias.address().is_multiple_of(16) {
            return bias.address();
        }
        let (to, n) = (self.bias, bias.shape().elements());
        let variant = CudaVariant::of(&[bias.dtype(), out]);
        elementwise::cuda::convert(cuda, bias.into(), CudaArg(to), variant, n);
        to
    }

    fn run(
        &self,
        cuda: &CudaBackend,
        matmul: &Matmul<'_>,
        onto: Option<&Tensor>,
        out: &mut Tensor,
        gemm: Gemm,
        [bias, pre_activation]: [u64; 2],
    ) {
        // An empty sum.
        if gemm.inner == 0 {
            match onto {
                Some(onto) => cuda.copy(onto.address(), out.address_mut(), onto.bytes()),
                None if !gemm.add => out.fill_zeros(),
                None => {}
            }
            return;
        }
        if let Some(fp8) = Fp8Matmul::of(matmul, out.dtype()).filter(|_| !gemm.has_scales) {
            let out = out.address_mut();
            let onto = if gemm.add { onto.map_or(out, Tensor::address) } else { 0 };
            let (scale, workspace) = (matmul.scale, self.library);
            let at = GemmOperands { onto, out, scale, workspace, ..GemmOperands::default() };
            return fp8.run_in_strips(cuda, gemm, at, self.copies);
        }
        let ([left, right], scales) = self.operands(cuda, matmul, gemm, out.dtype());
        let (workspace, scale, is_trial) = (self.library, matmul.scale, self.is_trial);
        let out = out.address_mut();
        let onto = onto.map_or(out, Tensor::address);
        let at = GemmOperands {
            left,
            right,
            onto,
            out,
            scale,
            scales,
            bias,
            pre_activation,
            workspace,
            is_trial,
        };
        cuda.gemm(&gemm, at);
    }

    /// Where both operands lie, and in fp8 their scales.
    fn operands(
        &self,
        cuda: &CudaBackend,
        matmul: &Matmul<'_>,
        gemm: Gemm,
        out: Dtype,
    ) -> ([u64; 2], [u64; 2]) {
        let mut to = self.copies;
        if let Some(fp8) = Fp8Matmul::of(matmul, out) {
            return fp8.operands(cuda, to);
        }
        let mut next = |operand| Self::operand(cuda, operand, gemm.factors, &mut to);
        ([next(matmul.left), next(matmul.right)], [0, 0])
    }

    /// Where an operand of a dtype begins; a copy of the whole tensor is put at `to`.
    fn operand(cuda: &CudaBackend, operand: Operand<'_>, dtype: Dtype, to: &mut u64) -> u64 {
        let address = *to;
        *to += copy_bytes(operand, dtype) as u64;
        let first = (operand.window.0 * dtype.bytes()) as u64;
        match operand.data {
            OperandData::Dense(tensor) if tensor.dtype() == dtype => {
                return tensor.address() + first;
            }
            OperandData::Dense(tensor) => {
                let (n, variant) = (tensor.shape().elements(), [tensor.dtype(), dtype]);
                let p = if n % 8 == 0 { pack(n, &[tensor]) } else { 1 };
                let variant = CudaVariant::of(&variant).with_pack(p);
                elementwise::cuda::convert(cuda, tensor.into(), CudaArg(address), variant, n / p);
            }
            OperandData::Quantised(quantised) => {
                quantised::cuda::dequantise(cuda, quantised, dtype, CudaArg(address));
            }
        }
        address + first
    }
}
