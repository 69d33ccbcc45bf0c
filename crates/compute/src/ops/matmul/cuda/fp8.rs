//! Matmuls in fp8 with a quantised matrix. Tensor cores want both operands with those numbers side by side that are
//! multiplied by each other. For x·Wᵀ both are; for gradient·W the codes of W are transposed first, in the
//! workspace: that takes a tenth of the matmul's time, and to keep both forms would take the memory that fp8 saves.
//! There the scales of W's rows lie along the sum: they multiply the gradient before it is rounded.
//!
//! The library takes scales of rows on Hopper alone, and not for every size. Else it multiplies strips of rows without,
//! and a kernel scales them: a pass more over the result, which matmuls of 8-bit numbers save several times.

use super::super::{Matmul, OperandData};
use super::KERNELS;
use crate::cuda::{
    ALIGNMENT, CudaArg, CudaBackend, CudaVariant, Gemm, GemmOperands, LaunchConfig, arguments,
};
use crate::quantised::cuda::{round_rows, transpose_codes};
use crate::quantised::fp8_rows::{Fp8Rows, MOST, is_multiplied};
use crate::{Dtype, Quantised, Tensor};

/// Bytes of a strip of sums. Chosen: enough rows that a GPU is busy, of a layer of any width.
const STRIP_BYTES: usize = 16 << 20;
/// Columns are multiples of this.
const PACK: usize = 8;

/// x times a quantised matrix, or its transpose.
pub(super) struct Fp8Matmul<'a> {
    x: &'a Tensor,
    /// Of x, if they are known.
    rows: Option<&'a Fp8Rows>,
    weight: &'a Quantised,
    is_transposed: bool,
}

impl<'a> Fp8Matmul<'a> {
    /// The matmul, if it is done in fp8 where the result is of this dtype.
    pub fn of(matmul: &Matmul<'a>, out: Dtype) -> Option<Self> {
        let Matmul { left, right, .. } = matmul;
        match (left.data, right.data) {
            (OperandData::Dense(x), OperandData::Quantised(weight))
                if !left.transposed && right.allows_fp8 =>
            {
                let rows = left.fp8_rows.filter(|_| right.transposed);
                let is_transposed = right.transposed;
                is_multiplied(weight, out).then_some(Self { x, rows, weight, is_transposed })
            }
            _ => None,
        }
    }

    /// As the library is asked for it.
    pub fn gemm(gemm: Gemm) -> Gemm {
        let (factors, has_scales) = (Dtype::U8, true);
        let (is_transposed, strides) = ([false, true], [gemm.inner; 2]);
        Gemm { is_transposed, strides, factors, has_scales, allows_tf32: false, ..gemm }
    }

    /// Bytes of workspace, on any GPU.
    pub fn bytes(&self, out: Dtype) -> usize {
        let columns = if self.is_transposed {
            self.weight.shape().rows()
        } else {
            self.weight.shape().width()
        };
        let rows = self.x.shape().rows().min(strip_rows(columns, out));
        self.operand_bytes() + rows * columns * strip_dtype(out).bytes()
    }

    fn operand_bytes(&self) -> usize {
        let x = if self.rows.is_some() { 0 } else { self.x_bytes().iter().sum() };
        let weight = if self.is_transposed { 0 } else { self.weight.codes().bytes() };
        x + weight.next_multiple_of(ALIGNMENT)
    }

    /// Of codes, and of scales.
    fn x_bytes(&self) -> [usize; 2] {
        let [codes, scales] = [self.x.shape().elements(), 4 * self.x.shape().rows()];
        [codes, scales].map(|bytes| bytes.next_multiple_of(ALIGNMENT))
    }

    /// Where the codes of both operands lie, and their scales; what is missing is made in the workspace at `to`.
    pub fn operands(&self, cuda: &CudaBackend, to: u64) -> ([u64; 2], [u64; 2]) {
        let weight_scales = self.weight.multiplied_scales().expect("it is multiplied in fp8");
        let (left, after) = if let Some(rows) = self.rows {
            ([rows.codes.address(), rows.scales.address()], to)
        } else {
            let [codes, scales] = self.x_bytes().map(|bytes| bytes as u64);
            let left = [to, to + codes];
            let factors = (!self.is_transposed).then_some(weight_scales);
            round_rows(cuda, self.x, factors, left.map(CudaArg));
            (left, to + codes + scales)
        };
        let right = if self.is_transposed {
            [self.weight.codes().address(), weight_scales.address()]
        } else {
            transpose_codes(cuda, self.weight, CudaArg(after));
            [after, cuda.table("ones", || vec![1.0; MOST]).0]
        };
        ([left[0], right[0]], [left[1], right[1]])
    }

    /// The matmul without scales of rows in the library; `at` has where the result goes, and what it is added to.
    pub fn run_in_strips(&self, cuda: &CudaBackend, gemm: Gemm, at: GemmOperands, to: u64) {
        let ([left, right], [row_scales, column_scales]) = self.operands(cuda, to);
        let strip = to + self.operand_bytes() as u64;
        let Gemm { rows, columns, inner, out, .. } = gemm;
        let (dtype, step) = (strip_dtype(out), strip_rows(columns, out));
        for first in (0..rows).step_by(step) {
            let rows = step.min(rows - first);
            let part = Gemm { rows, out: dtype, add: false, ..gemm };
            let left = left + (first * inner) as u64;
            cuda.gemm(&part, GemmOperands { left, right, onto: strip, out: strip, ..at });
            let offset = (first * columns * out.bytes()) as u64;
            let onto = if at.onto == 0 { 0 } else { at.onto + offset };
            let scales = row_scales + (first * size_of::<f32>()) as u64;
            let packs = rows * columns / PACK;
            let of_rows =
                arguments![strip, scales, column_scales, onto, at.out + offset, packs, columns];
            let variant = CudaVariant::of(&[dtype, out]).with_pack(PACK);
            let grid = LaunchConfig::per_element(packs);
            cuda.launch(&KERNELS, "scale_and_add", variant, grid, &of_rows);
        }
    }
}

/// Sums of numbers up to 448 are too large for f16.
fn strip_dtype(out: Dtype) -> Dtype {
    if out == Dtype::F16 { Dtype::F32 } else { out }
}

/// Rows of a strip.
fn strip_rows(columns: usize, out: Dtype) -> usize {
    (STRIP_BYTES / (columns * strip_dtype(out).bytes())).max(1)
}
