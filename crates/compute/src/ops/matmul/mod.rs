//! Matmuls for the ops that need them: a sum of matmuls with a bias, an activation and rounding, in one pass
//! over the result.

mod cpu;
mod cuda;
mod gpu;

pub(crate) use gpu::matrix_units_agree;

use std::ops::Range;

use super::{Activation, activation};
use crate::device::{Backend, DeviceKind};
use crate::op::OpContext;
use crate::quantised::fp8_rows::Fp8Rows;
use crate::var::Activated;
use crate::work::{KernelCall, StorageFormat};
use crate::{Dtype, Quantised, Result, Shape, Tensor};

/// An operand: a tensor as a matrix, transposed or not.
#[derive(Clone, Copy)]
pub(crate) struct Operand<'a> {
    data: OperandData<'a>,
    transposed: bool,
    /// The first of the stored columns that are meant, and how many are.
    window: (usize, usize),
    /// bf16 values that each value is split into for AMX; see [`crate::cpu::gemm::MatrixView`].
    n_splits: usize,
    /// Its rows rounded to fp8, for a right operand that asks for it; else they are rounded for one matmul.
    fp8_rows: Option<&'a Fp8Rows>,
    /// Whether it may be multiplied in fp8.
    allows_fp8: bool,
}

#[derive(Clone, Copy)]
enum OperandData<'a> {
    Dense(&'a Tensor),
    Quantised(&'a Quantised),
}

impl OperandData<'_> {
    fn shape(&self) -> Shape {
        match self {
            Self::Dense(tensor) => tensor.shape(),
            Self::Quantised(quantised) => quantised.shape(),
        }
    }
}

impl<'a> From<&'a Tensor> for Operand<'a> {
    fn from(tensor: &'a Tensor) -> Self {
        let parts = if tensor.dtype() == Dtype::Bf16 { 1 } else { 3 };
        Self::new(OperandData::Dense(tensor), parts)
    }
}

impl<'a> Operand<'a> {
    /// A tensor, as exact as the other operand's dtype `beside`: more would be lost in the matmul.
    pub fn beside(tensor: &'a Tensor, beside: Dtype) -> Self {
        let matrix = Self::from(tensor);
        if beside == Dtype::Bf16 { Self { n_splits: 1, ..matrix } } else { matrix }
    }

    /// A quantised matrix, as exact as the other operand's dtype `beside`.
    pub fn quantised(quantised: &'a Quantised, beside: Dtype) -> Self {
        let parts = if beside == Dtype::Bf16 { 1 } else { 3 };
        Self::new(OperandData::Quantised(quantised), parts)
    }

    fn new(data: OperandData<'a>, n_splits: usize) -> Self {
        let window = (0, data.shape().width());
        Self { data, transposed: false, window, n_splits, fp8_rows: None, allows_fp8: true }
    }

    /// Some columns of a tensor.
    pub fn columns_of(self, columns: Range<usize>) -> Self {
        assert!(matches!(self.data, OperandData::Dense(_)) && !self.transposed);
        assert!(columns.start <= columns.end && columns.end <= self.window.1);
        Self { window: (columns.start, columns.len()), ..self }
    }

    /// Not to be multiplied in fp8.
    pub fn without_fp8(self) -> Self {
        Self { allows_fp8: false, ..self }
    }

    /// A tensor whose rows may be known in fp8 too.
    pub fn with_fp8_rows(tensor: &'a Tensor, fp8_rows: Option<&'a Fp8Rows>) -> Self {
        Self { fp8_rows, ..Self::from(tensor) }
    }

    /// Transposed.
    pub fn t(self) -> Self {
        Self { transposed: !self.transposed, ..self }
    }

    pub fn rows(&self) -> usize {
        if self.transposed { self.window.1 } else { self.data.shape().rows() }
    }

    pub fn columns(&self) -> usize {
        self.t().rows()
    }

    /// Elements from a row as it is stored to the next.
    fn stride(&self) -> usize {
        self.data.shape().width()
    }

    fn format(&self) -> StorageFormat {
        match self.data {
            OperandData::Dense(tensor) => tensor.dtype().into(),
            OperandData::Quantised(quantised) => quantised.scheme().into(),
        }
    }

    /// The tensor that most of its bytes are in.
    fn tensor(&self) -> &'a Tensor {
        match self.data {
            OperandData::Dense(tensor) => tensor,
            OperandData::Quantised(quantised) => quantised.codes(),
        }
    }
}

/// scale · left · right
#[derive(Clone, Copy)]
pub(crate) struct Matmul<'a> {
    pub left: Operand<'a>,
    pub right: Operand<'a>,
    pub scale: f32,
}

impl<'a> Matmul<'a> {
    /// `left` · `right`
    pub fn new(left: impl Into<Operand<'a>>, right: Operand<'a>) -> Self {
        Self { left: left.into(), right, scale: 1.0 }
    }
}

/// The sum of some matmuls with an epilogue.
pub(crate) struct FusedMatmul<'a> {
    pub matmuls: &'a [Matmul<'a>],
    /// Added to each row; f32, or on a GPU of the dtype of `out`.
    pub bias: Option<&'a Tensor>,
    pub activation: Activation,
    /// Takes the sum as it was before the activation; of the dtype of `out`.
    pub pre_activation: Option<&'a mut Tensor>,
    /// Multiplies the result by the derivative of an activation at these values, of the shape and dtype of
    /// `out`.
    pub derivative_at: Option<&'a Activated>,
    /// Takes the result, row by row, in whatever shape.
    pub out: &'a mut Tensor,
    /// Whether to add to what `out` holds.
    pub add: bool,
    /// What else to add to; of the shape and dtype of `out`. Not with an activation.
    pub onto: Option<&'a Tensor>,
    /// Whether CUDA may round f32 factors to TF32.
    pub allows_tf32: bool,
    /// Whether how many rows there are depends on data: then CUDA takes the first algorithm that is offered.
    pub has_data_sizes: bool,
}

impl<'a> FusedMatmul<'a> {
    /// Matmuls alone.
    pub fn new(matmuls: &'a [Matmul<'a>], out: &'a mut Tensor) -> Self {
        Self {
            matmuls,
            bias: None,
            activation: Activation::None,
            pre_activation: None,
            derivative_at: None,
            out,
            add: false,
            onto: None,
            allows_tf32: false,
            has_data_sizes: false,
        }
    }

    pub fn rows(&self) -> usize {
        self.matmuls[0].left.rows()
    }

    pub fn columns(&self) -> usize {
        self.matmuls[0].right.columns()
    }

    /// The kernel class on a GPU: whether reading takes longest, or computing. All matmuls and the activation
    /// are one call: a second matmul makes the first a little deeper.
    fn gpu_kernel_name(&self) -> &'static str {
        let inner = self.matmuls.iter().map(|matmul| matmul.left.columns()).max();
        let least = self.rows().min(self.columns()).min(inner.unwrap_or(0));
        if least < cpu::NARROW { "narrow matmul" } else { "matmul by gpu" }
    }

    fn count(&self, cx: OpContext<'_>, kernel: &'static str) {
        let (mut flops, mut tensors) = (0, vec![&*self.out]);
        tensors.extend(self.onto);
        if self.activation != Activation::None {
            flops += activation::FLOPS * self.rows() * self.columns();
            tensors.extend(self.pre_activation.as_deref());
        }
        if let Some(at) = self.derivative_at {
            flops += activation::FLOPS * self.rows() * self.columns();
            tensors.push(&at.input);
        }
        for Matmul { left, right, .. } in self.matmuls {
            flops += 2 * self.rows() * self.columns() * left.columns();
            tensors.extend([left.tensor(), right.tensor()]);
        }
        let Matmul { left, right, .. } = self.matmuls[0];
        let formats = [left.format(), right.format()];
        cx.count_call(&KernelCall { formats, ..KernelCall::new(kernel, flops, &tensors) });
    }

    /// Asks for the memory that it takes, and gives it back.
    pub fn reserve(&self, cx: OpContext<'_>) -> Result<()> {
        let (n, dtype) = match cx.device.kind() {
            DeviceKind::Cpu { threads, has_amx } => {
                (cpu::MatmulPlan::new(self, threads, has_amx).floats(), Dtype::F32)
            }
            DeviceKind::Cuda { .. } => (cuda::bytes(self), Dtype::U8),
            DeviceKind::Gpu { .. } => (gpu::floats(self), Dtype::F32),
        };
        cx.workspace([n], dtype).map(drop)
    }

    /// Computes it.
    pub fn run(self, cx: OpContext<'_>) -> Result<()> {
        let (rows, columns) = (self.rows(), self.columns());
        let is_plain = self.activation == Activation::None && !self.add;
        assert!(is_plain || self.onto.is_none() && self.derivative_at.is_none());
        for Matmul { left, right, .. } in self.matmuls {
            assert_eq!(
                (left.rows(), left.columns(), right.columns()),
                (rows, right.rows(), columns)
            );
            assert_eq!(left.window, (0, left.stride()), "only right operands may be a part");
        }
        match cx.device.kind() {
            DeviceKind::Cpu { threads, has_amx } => {
                let plan = cpu::MatmulPlan::new(&self, threads, has_amx);
                self.count(cx, plan.kernel(&self));
                let mut workspace = cx.workspace([plan.floats()], Dtype::F32)?;
                if let Backend::Cpu(backend) = cx.backend() {
                    cpu::multiply(backend, &plan, self, workspace.data_mut());
                }
            }
            DeviceKind::Cuda { .. } => {
                self.count(cx, cuda::kernel_name(&self));
                let mut workspace = cx.workspace([cuda::bytes(&self)], Dtype::U8)?;
                if let Backend::Cuda(backend) = cx.backend() {
                    cuda::multiply(backend, self, &mut workspace);
                }
            }
            DeviceKind::Gpu { .. } => {
                self.count(cx, self.gpu_kernel_name());
                let mut workspace = cx.workspace([gpu::floats(&self)], Dtype::F32)?;
                if let Backend::Gpu(backend) = cx.backend() {
                    gpu::multiply(backend, self, &mut workspace);
                }
            }
        }
        Ok(())
    }
}
