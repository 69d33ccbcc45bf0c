//! A tensor as it lies in a file: name, shape, how its values are encoded, and where.

use std::fmt;

use crate::dtype::FileDtype;
use crate::gguf::GgufBlockFormat;

/// One tensor of a model file. Holds no data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name in the file.
    pub name: String,
    /// Sizes, outermost first.
    pub shape: Vec<u64>,
    /// How its values are stored.
    pub encoding: TensorEncoding,
    /// The file it lies in, as an index into the catalog's files.
    pub file: usize,
    /// Offset of its first byte from the file's start.
    pub offset: u64,
    /// Bytes it takes there.
    pub bytes: u64,
    /// Strides in elements; absent where the tensor lies
    /// densely in row-major order. Only PyTorch archives have others, and what was selected of a tensor.
    pub strides: Option<Vec<u64>>,
}

impl TensorInfo {
    /// How many elements it has.
    pub fn numel(&self) -> u64 {
        numel_of(&self.shape).expect("readers refuse shapes that overflow")
    }

    /// What lies at `index` of dimension `dim`, without that dimension (PyTorch's `select`). `None` if it has no such
    /// index or no values, or is stored in quantised blocks.
    pub fn select(&self, dim: usize, index: u64) -> Option<Self> {
        let TensorEncoding::Plain(dtype) = self.encoding else { return None };
        self.shape.get(dim).filter(|size| index < **size && !self.shape.contains(&0))?;
        let mut shape = self.shape.clone();
        let mut strides = self.strides.clone().unwrap_or_else(|| dense_strides(&shape));
        shape.remove(dim);
        let offset = self.offset + index * strides.remove(dim) * dtype.bytes();
        let steps = shape.iter().zip(&strides);
        let last: u64 = steps.map(|(size, stride)| (size - 1) * stride).sum();
        let bytes = (last + 1) * dtype.bytes();
        let strides = (!is_dense(&shape, &strides)).then_some(strides);
        Some(Self { shape, offset, bytes, strides, ..self.clone() })
    }
}

fn dense_strides(shape: &[u64]) -> Vec<u64> {
    (1..=shape.len()).map(|dim| shape[dim..].iter().product()).collect()
}

/// Whether values follow each other without gaps, the last dimension fastest. Where there is but one step to make, its
/// length does not matter.
pub(crate) fn is_dense(shape: &[u64], strides: &[u64]) -> bool {
    let mut expected = 1;
    shape.contains(&0)
        || shape.iter().zip(strides).rev().all(|(size, stride)| {
            let fits = *size == 1 || *stride == expected;
            expected *= size;
            fits
        })
}

/// How a tensor's values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorEncoding {
    /// One after the other.
    Plain(FileDtype),
    /// In quantised blocks (GGUF).
    Blocks(GgufBlockFormat),
}

impl TensorEncoding {
    /// Bytes that `count` values take; nothing if that does not fit or is no whole number of
    /// blocks.
    pub fn bytes_for(self, count: u64) -> Option<u64> {
        let per_block = self.values_per_block();
        let block_bytes = match self {
            Self::Plain(dtype) => dtype.bytes(),
            Self::Blocks(format) => format.bytes(),
        };
        if count.is_multiple_of(per_block) {
            (count / per_block).checked_mul(block_bytes)
        } else {
            None
        }
    }

    /// How many values stand or fall together.
    pub fn values_per_block(self) -> u64 {
        match self {
            Self::Plain(_) => 1,
            Self::Blocks(format) => format.values_per_block(),
        }
    }
}

impl fmt::Display for TensorEncoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plain(dtype) => write!(f, "{dtype}"),
            Self::Blocks(format) => write!(f, "{format}"),
        }
    }
}

/// The number of elements of a shape, unless it overflows.
pub fn numel_of(shape: &[u64]) -> Option<u64> {
    // A zero anywhere makes the tensor empty, however large its other sizes are.
    if shape.contains(&0) {
        return Some(0);
    }
    shape.iter().try_fold(1_u64, |numel, size| numel.checked_mul(*size))
}
