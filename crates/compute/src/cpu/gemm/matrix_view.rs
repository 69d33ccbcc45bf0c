//! Views of matrices of any real dtype.

use half::{bf16, f16};

use crate::dtype::Real;
use crate::quantised::{Fp8, Int8, Nf4};
use crate::{Dtype, Tensor};

/// Runs the body with the data as a [`FloatSource`], compiled once for each dtype.
macro_rules! with_source {
    ($floats:expr, $source:ident => $body:expr) => {
        match $floats {
            $crate::cpu::gemm::Floats::F32($source) => $body,
            $crate::cpu::gemm::Floats::Bf16($source) => $body,
            $crate::cpu::gemm::Floats::F16($source) => $body,
            $crate::cpu::gemm::Floats::Int8($source) => $body,
            $crate::cpu::gemm::Floats::Nf4($source) => $body,
            $crate::cpu::gemm::Floats::Fp8($source) => $body,
        }
    };
}
pub(super) use with_source;

/// Values of any real dtype, to be read.
#[derive(Clone, Copy)]
pub(crate) enum Floats<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
    F16(&'a [f16]),
    Int8(Int8<'a>),
    Nf4(Nf4<'a>),
    Fp8(Fp8<'a>),
}

impl Floats<'_> {
    /// Values of one row from `at` on, as f32.
    pub fn load(self, at: usize, to: &mut [f32]) {
        with_source!(self, source => source.load(at, to));
    }
}

impl<'a> From<&'a Tensor> for Floats<'a> {
    fn from(tensor: &'a Tensor) -> Self {
        match tensor.dtype() {
            Dtype::F32 => Self::F32(tensor.data()),
            Dtype::Bf16 => Self::Bf16(tensor.data()),
            Dtype::F16 => Self::F16(tensor.data()),
            other => unreachable!("an op let {other} through as a real format"),
        }
    }
}

/// Values that are read as f32.
pub(crate) trait FloatSource: Copy {
    /// Those from `at` on, as many as there is room for.
    fn load(self, at: usize, to: &mut [f32]);
}

impl<T: Real> FloatSource for &[T] {
    #[inline(always)]
    fn load(self, at: usize, to: &mut [f32]) {
        T::widen(&self[at..at + to.len()], to);
    }
}

/// A matrix within a tensor, by its strides, one of which is 1.
#[derive(Clone, Copy)]
pub(crate) struct MatrixView<'a> {
    pub data: Floats<'a>,
    /// Index of the first element.
    pub start: usize,
    pub row_stride: usize,
    pub column_stride: usize,
    /// bf16 values that each value is split into for AMX: those whose sum it is, 3, or the nearest alone, 1.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    // Only AMX reads it.
    pub n_splits: usize,
}

impl<'a> MatrixView<'a> {
    /// Rows of `width` values, one after the other.
    pub fn rows(data: Floats<'a>, width: usize) -> Self {
        let parts = if matches!(data, Floats::Bf16(_)) { 1 } else { 3 };
        Self { data, start: 0, row_stride: width, column_stride: 1, n_splits: parts }
    }

    /// As exact as bf16 is enough.
    pub fn as_bf16(self) -> Self {
        Self { n_splits: 1, ..self }
    }

    /// Transposed.
    pub fn t(self) -> Self {
        Self { row_stride: self.column_stride, column_stride: self.row_stride, ..self }
    }

    /// From a row and a column on.
    pub fn offset_by(self, row: usize, column: usize) -> Self {
        Self { start: self.start + row * self.row_stride + column * self.column_stride, ..self }
    }
}
