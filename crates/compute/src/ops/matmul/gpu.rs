//! Matmuls by wgpu. Operands are read in whatever dtype they have and multiplied in f32; a second matmul, as of
//! LoRA, is summed up with the first before anything is rounded.

use super::{FusedMatmul, Matmul, Operand, OperandData};
use crate::device::Backend;
use crate::gpu::{GpuArg, GpuBackend, GpuVariant, MatrixUnits, WgslSource, arguments, is_wide};
use crate::op::OpContext;
use crate::ops::activation;
use crate::quantised::gpu::{dequantise, parts};
use crate::{Device, Dtype, Quantisation, Quantised, RandomSequence, Result, Tensor};

const KERNELS: WgslSource = WgslSource {
    name: "matmul",
    text: concat!(
        include_str!("lines.wgsli"),
        include_str!("plain.wgsli"),
        include_str!("kernels.wgsl")
    ),
};

const BY_F32_UNITS: WgslSource = WgslSource {
    name: "matmul by units",
    text: concat!(
        "enable wgpu_cooperative_matrix;\nalias Element = f32;\n",
        include_str!("lines.wgsli"),
        include_str!("units.wgsli"),
        include_str!("kernels.wgsl")
    ),
};

const BY_F16_UNITS: WgslSource = WgslSource {
    name: "matmul by f16 units",
    text: concat!(
        "enable wgpu_cooperative_matrix, f16;\nalias Element = f16;\n",
        include_str!("lines.wgsli"),
        include_str!("units.wgsli"),
        include_str!("kernels.wgsl")
    ),
};

/// Rows and columns of a workgroup with matrix units, and its subgroups; as in the kernel source.
const UNITS_SIDE: usize = 64;
const UNITS_SUBGROUPS: usize = 4;
/// Rows and columns at least. Chosen: of fewer, most of a workgroup would be idle.
const UNITS_LEAST: usize = 32;
/// How far units may be from plain kernels when they are tried. Chosen: some thousand times the rounding of
/// sums of that size, and a thousandth of what a number in the wrong place changes.
const UNITS_ERROR: f32 = 1e-3;

/// Rows and columns of a thread, as in the kernel source.
const SIDE: usize = 8;
/// Threads of a workgroup. Chosen: those of two rows of 32, with sixty-four by sixty-four numbers of the result.
const THREADS: usize = 64;
/// Threads that work on a small result, if the depth can be cut into enough slices. Chosen: as many as Apple's
/// chips of ten cores keep busy.
const ENOUGH: usize = 8192;
/// The same for a program on a CPU of some cores, where threads that wait for each other are dear.
const ENOUGH_SOFTWARE: usize = 128;
/// Depth of a slice at least.
const DEPTH: usize = 64;

/// Floats of workspace: a quantised left operand, which only a change of adapters asks for, is copied.
pub fn floats(work: &FusedMatmul<'_>) -> usize {
    let copies = work.matmuls.iter().map(|matmul| match matmul.left.data {
        OperandData::Dense(_) => 0,
        OperandData::Quantised(quantised) => quantised.shape().elements(),
    });
    copies.max().unwrap_or(0)
}

/// Computes the matmuls.
pub fn multiply(gpu: &GpuBackend, work: FusedMatmul<'_>, workspace: &mut Tensor) {
    let (first, others) = work.matmuls.split_first().expect("there is something to multiply");
    // One more is summed up in the same pass, all others before it.
    let (second, before) = match others.split_last() {
        Some((last, before)) if is_second(last) && first.scale == 1.0 => (Some(last), before),
        _ => (None, others),
    };
    let mut add = work.add;
    if let Some(onto) = work.onto {
        gpu.copy(onto, work.out);
        add = true;
    }
    for matmul in before {
        let plain = FusedMatmul { add, ..FusedMatmul::new(&[], &mut *work.out) };
        run(gpu, plain, matmul, None, workspace);
        add = true;
    }
    let derivative_at = work.derivative_at;
    run(gpu, FusedMatmul { add, out: &mut *work.out, ..work }, first, second, workspace);
    if let Some(at) = derivative_at {
        activation::gpu::backward(gpu, at.activation, &at.input, work.out);
    }
}

/// The matrix units that multiply these without a loss: those of f16 only what is f16 anyway.
fn units_for(
    gpu: &GpuBackend,
    matmul: &Matmul<'_>,
    second: Option<&Matmul<'_>>,
) -> Option<MatrixUnits> {
    let is_f16 = |matrix: Operand<'_>| matches!(matrix.data, OperandData::Dense(tensor) if tensor.dtype() == Dtype::F16);
    let is_exact = is_f16(matmul.left) && is_f16(matmul.right) && second.is_none();
    gpu.matrix_units().filter(|units| units.element == Dtype::F32 || is_exact)
}

/// Whether a matmul can be summed up with another that has no scale.
fn is_second(matmul: &Matmul<'_>) -> bool {
    let is_whole = |matrix: Operand<'_>| matrix.window == (0, matrix.stride());
    let is_f32 = |matrix: Operand<'_>| matches!(matrix.data, OperandData::Dense(tensor) if tensor.dtype() == Dtype::F32);
    let is_fit = |matrix| is_f32(matrix) && is_whole(matrix);
    is_fit(matmul.left) && is_fit(matmul.right) && !matmul.left.transposed
}

fn run(
    gpu: &GpuBackend,
    work: FusedMatmul<'_>,
    matmul: &Matmul<'_>,
    second: Option<&Matmul<'_>>,
    workspace: &mut Tensor,
) {
    let Matmul { left, right, scale } = matmul;
    let (rows, columns, inner) = (left.rows(), right.columns(), left.columns());
    let left_tensor = match left.data {
        OperandData::Dense(tensor) => tensor,
        OperandData::Quantised(quantised) => copied(gpu, quantised, workspace),
    };
    let (kernel, right_arguments, right_format, is_fp8) = right_operand(gpu, right);
    let (second_left, second_right) =
        second.map(|second| (second.left.tensor(), second.right.tensor())).unzip();
    let (second_inner, second_scale) =
        second.map_or((0, 0.0), |second| (second.left.columns(), second.scale));
    let units = units_for(gpu, matmul, second);
    let layout = MatmulTiling::new(gpu, units, [rows, columns, inner]);
    let out = work.out;
    let before = work.pre_activation.as_deref();
    let variant = GpuVariant::of(&[left_tensor.dtype(), right_format, out.dtype()])
        .with("THREADS", layout.threads)
        .with("WIDTH", units.map_or(1, |units| units.width))
        .with("LEFT_T", left.transposed.into())
        .with("RIGHT_T", right.transposed.into())
        .with("LEFT_WIDE", is_wide(left.stride(), &[Some(left_tensor)]).into())
        .with("RIGHT_WIDE", is_wide_operand(right).into())
        .with("EVEN", (inner % SIDE == 0).into())
        .with("SECOND", second.map_or(0, |second| 1 + usize::from(second.right.transposed)))
        .with("SECOND_WIDE", second.is_none_or(is_wide_matmul).into())
        .with("WIDE", is_wide(columns, &[Some(out), before, work.bias]).into())
        .with("SLICES", layout.slices)
        .with("SHARED", if layout.slices == 1 { 1 } else { THREADS })
        .with("KIND", work.activation.code() as usize)
        .with("FP8", is_fp8.into());
    let tensors = arguments![second_left, second_right, work.bias, work.pre_activation, out];
    let numbers = arguments![rows, columns, inner, *scale, second_inner, second_scale];
    let rest = arguments![layout.beside, work.add];
    let arguments = [&arguments![left_tensor][..], &right_arguments, &tensors, &numbers, &rest];
    gpu.launch(layout.source, kernel, &variant, layout.groups, &arguments.concat());
}

/// Whether both operands can be read by whole eights.
fn is_wide_matmul(Matmul { left, right, .. }: &Matmul<'_>) -> bool {
    is_wide_operand(left) && is_wide_operand(right)
}

/// The same of one.
fn is_wide_operand(operand: &Operand<'_>) -> bool {
    let (first, count) = operand.window;
    let is_even = first.is_multiple_of(SIDE) && count.is_multiple_of(SIDE);
    is_even && is_wide(operand.stride(), &[Some(operand.tensor())])
}

/// How a result is shared among threads.
struct MatmulTiling {
    source: &'static WgslSource,
    threads: usize,
    /// Blocks of a workgroup that lie beside each other.
    beside: usize,
    /// Threads that share a block, each with a part of the depth.
    slices: usize,
    groups: usize,
}

impl MatmulTiling {
    fn new(
        gpu: &GpuBackend,
        units: Option<MatrixUnits>,
        [rows, columns, inner]: [usize; 3],
    ) -> Self {
        if let Some(units) = units.filter(|_| rows.min(columns) >= UNITS_LEAST) {
            let source = if units.element == Dtype::F16 { &BY_F16_UNITS } else { &BY_F32_UNITS };
            let threads = UNITS_SUBGROUPS * units.width;
            let groups = rows.div_ceil(UNITS_SIDE) * columns.div_ceil(UNITS_SIDE);
            return Self { source, threads, beside: 1, slices: 1, groups };
        }
        let (down, across) = (rows.div_ceil(SIDE), columns.div_ceil(SIDE));
        let slices = slices(gpu, down * across, inner);
        let places = THREADS / slices;
        let groups = |beside: &usize| across.div_ceil(*beside) * down.div_ceil(places / beside);
        let fits = [8, 4, 2, 1].into_iter().filter(|beside| *beside <= places);
        let beside = fits.min_by_key(groups).expect("one block fits beside nothing");
        Self { source: &KERNELS, threads: THREADS, beside, slices, groups: groups(&beside) }
    }
}

/// Into how many slices the depth of so many blocks is cut.
fn slices(gpu: &GpuBackend, blocks: usize, inner: usize) -> usize {
    let enough = if gpu.is_software() { ENOUGH_SOFTWARE } else { ENOUGH };
    let powers = [16, 8, 4, 2].into_iter();
    powers.filter(|slices| slices * blocks <= enough && slices * DEPTH <= inner).max().unwrap_or(1)
}

/// Whether matrix units multiply as plain kernels do, with each operand transposed or not.
pub fn matrix_units_agree(device: &Device) -> Result<bool> {
    let Backend::Gpu(gpu) = device.backend() else { return Ok(false) };
    gpu.set_matrix_units(true);
    let is_f16 = gpu.matrix_units().is_some_and(|units| units.element == Dtype::F16);
    let dtype = if is_f16 { Dtype::F16 } else { Dtype::Bf16 };
    let tensor = |rows, width, index| {
        device.normal([rows, width], dtype, 1.0, RandomSequence::new(7, index))
    };
    let (left, right) =
        ([tensor(70, 88, 1)?, tensor(88, 70, 2)?], [tensor(88, 76, 3)?, tensor(76, 88, 4)?]);
    for (is_left_t, is_right_t) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        let transposed = |tensor, is_t| {
            let matrix = Operand::from(tensor);
            if is_t == 1 { matrix.t() } else { matrix }
        };
        let matmul = Matmul {
            left: transposed(&left[is_left_t], is_left_t),
            right: transposed(&right[is_right_t], is_right_t),
            scale: 0.5,
        };
        let multiplied = |by_units: bool| -> Result<Vec<f32>> {
            let mut out = device.alloc([70, 76], Dtype::F32)?;
            gpu.set_matrix_units(by_units);
            FusedMatmul::new(&[matmul], &mut out).run(OpContext::new(device))?;
            device.synchronise()?;
            Ok(out.to_vec())
        };
        let (plain, units) = (multiplied(false)?, multiplied(true)?);
        // A sum of 88 terms of about one, each of which f32 has exactly.
        if !plain.iter().zip(&units).all(|(a, b)| (a - b).abs() < UNITS_ERROR) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The kernel for a right operand, what it is given for it, its dtype, and whether that is fp8.
fn right_operand<'a>(
    gpu: &GpuBackend,
    right: &Operand<'a>,
) -> (&'static str, Vec<GpuArg<'a>>, Dtype, bool) {
    match right.data {
        OperandData::Dense(tensor) => {
            let (first, _) = right.window;
            let numbers = arguments![tensor, right.stride(), first];
            ("matmul", numbers.to_vec(), tensor.dtype(), false)
        }
        OperandData::Quantised(quantised) => {
            let is_fp8 = quantised.scheme() == Quantisation::Fp8;
            let kernel = match quantised.scheme() {
                Quantisation::Nf4 => "matmul_by_blocks",
                Quantisation::Int8 | Quantisation::Fp8 => "matmul_by_rows",
            };
            (kernel, parts(gpu, quantised), Dtype::F32, is_fp8)
        }
    }
}

fn copied<'a>(gpu: &GpuBackend, quantised: &Quantised, workspace: &'a mut Tensor) -> &'a Tensor {
    dequantise(gpu, quantised, workspace);
    workspace
}
