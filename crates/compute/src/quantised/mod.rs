//! Quantised frozen matrices: a byte or half of one per value, and scales. Matmuls read them as
//! they are, block by block; a dequantised copy of the whole never exists.
//!
//! - int8: whole numbers from -127 to 127, scaled so that the largest of a row is 127.
//! - fp8: eight bits with a sign, four of exponent and three of fraction (e4m3), scaled so that the
//!   largest of a row is 448, the largest there is.
//! - nf4: one of sixteen numbers, dense near zero as weights are (Dettmers et al., arXiv
//!   2305.14314), relative to the largest of 64 in a row. Those largest are quantised again: their
//!   distance from their mean, relative to the largest of 256 of them, by the codebook of the 8-bit
//!   optimizers. Bit for bit as the bitsandbytes library stores them.

mod cpu;
pub(crate) mod cuda;
pub(crate) mod gpu;
pub(crate) mod read;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;

#[cfg(test)]
use read::e4m3;
pub(crate) use read::{Fp8, Int8, Nf4};

use crate::cpu::gemm::Floats;
use crate::device::Backend;
use crate::op::Op;
use crate::{BlockSwap, Dtype, Result, Shape, Tensor};

/// Numbers that share a scale in nf4, and scales that share one in turn.
const BLOCK: usize = 64;
const GROUP: usize = 256;

/// How numbers are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantisation {
    /// 8-bit integers with a scale per row.
    Int8,
    /// 4-bit numbers with a scale per 64, itself of 8 bits.
    Nf4,
    /// 8-bit floats with a scale per row.
    Fp8,
}

impl fmt::Display for Quantisation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Int8 => "int8",
            Self::Nf4 => "nf4",
            Self::Fp8 => "fp8",
        })
    }
}

/// A quantised frozen matrix [rows, width]. Clones share the memory.
#[derive(Clone, Debug)]
pub struct Quantised(Arc<QuantisedInner>);

#[derive(Debug)]
struct QuantisedInner {
    scheme: Quantisation,
    shape: Shape,
    /// A byte per number; for nf4 half of one, the first number in the upper half.
    codes: Tensor,
    scales: Scales,
}

#[derive(Debug)]
enum Scales {
    /// f32 `[rows]`
    PerRow(Tensor),
    PerBlock {
        /// u8, one per block.
        codes: Tensor,
        /// f32, one per group of those.
        groups: Tensor,
        /// f32 `[1]`
        mean: Tensor,
    },
}

/// What a matrix is stored in, in the order of [`QuantisedInner::tensors`]: how many numbers of which dtype.
fn parts(shape: Shape, how: Quantisation) -> Vec<(usize, Dtype)> {
    let numbers = shape.elements();
    let blocks = numbers / BLOCK;
    match how {
        Quantisation::Nf4 => vec![
            (blocks, Dtype::U8),
            (blocks.div_ceil(GROUP), Dtype::F32),
            (1, Dtype::F32),
            (numbers / 2, Dtype::U8),
        ],
        Quantisation::Int8 | Quantisation::Fp8 => {
            vec![(shape.rows(), Dtype::F32), (numbers, Dtype::U8)]
        }
    }
}

impl QuantisedInner {
    /// Of what `parts` asks for.
    fn of(how: Quantisation, shape: Shape, tensors: Vec<Tensor>) -> Self {
        let mut tensors = tensors.into_iter();
        let mut next = || tensors.next().expect("as many as its parts");
        let scales = match how {
            Quantisation::Nf4 => Scales::PerBlock { codes: next(), groups: next(), mean: next() },
            Quantisation::Int8 | Quantisation::Fp8 => Scales::PerRow(next()),
        };
        Self { scheme: how, shape, codes: next(), scales }
    }

    fn tensors(&self) -> Vec<&Tensor> {
        match &self.scales {
            Scales::PerRow(scales) => vec![scales, &self.codes],
            Scales::PerBlock { codes, groups, mean } => vec![codes, groups, mean, &self.codes],
        }
    }
}

impl Quantised {
    /// Quantises `matrix` [rows, width] of any real dtype.
    pub fn new(matrix: &Tensor, how: Quantisation) -> Result<Self> {
        let device = matrix.device();
        let op = Op::standalone("quantise", device);
        op.expect_real("matrix", matrix)?;
        let [rows, width] = op.expect_rank("matrix", matrix)?;
        let numbers = rows * width;
        if how == Quantisation::Nf4 {
            op.expect_multiple("width of the matrix", width, BLOCK)?;
        }
        let tensors = parts(matrix.shape(), how).into_iter();
        let tensors = tensors.map(|(n, dtype)| device.alloc([n], dtype)).collect::<Result<_>>()?;
        let mut inner = QuantisedInner::of(how, matrix.shape(), tensors);
        op.count(numbers, &[matrix, &inner.codes]);
        let blocks = if how == Quantisation::Nf4 { numbers / BLOCK } else { 0 };
        let mut exact_scales = op.workspace([blocks], Dtype::F32)?;
        match op.backend() {
            Backend::Meta => {}
            Backend::Cpu(backend) => {
                cpu::quantise(backend, matrix, &mut inner, exact_scales.data_mut());
            }
            Backend::Cuda(backend) => {
                cuda::quantise(backend, matrix, &mut inner, &mut exact_scales);
            }
            Backend::Gpu(backend) => gpu::quantise(backend, matrix, &mut inner, &mut exact_scales),
        }
        Ok(Self(Arc::new(inner)))
    }

    /// [rows, width]
    pub fn shape(&self) -> Shape {
        self.0.shape
    }

    /// Bytes of its numbers and scales.
    pub fn bytes(&self) -> usize {
        self.0.tensors().iter().map(|tensor| tensor.bytes()).sum()
    }

    /// Bytes of each tensor that a matrix of this shape is stored in.
    pub fn sizes(shape: Shape, how: Quantisation) -> Vec<usize> {
        parts(shape, how).into_iter().map(|(n, dtype)| n * dtype.bytes()).collect()
    }

    /// A copy of it in an offloaded block.
    pub fn offload(&self, block_swap: &BlockSwap, block: usize) -> Result<Self> {
        let offloaded =
            self.0.tensors().into_iter().map(|tensor| block_swap.offload(block, tensor));
        let QuantisedInner { scheme: how, shape, .. } = *self.0;
        Ok(Self(Arc::new(QuantisedInner::of(how, shape, offloaded.collect::<Result<_>>()?))))
    }

    /// The numbers, as they come back.
    ///
    /// # Panics
    /// On a meta device.
    pub fn to_f32_vec(&self) -> Result<Vec<f32>> {
        let (device, shape) = (self.0.codes.device(), self.0.shape);
        if let Backend::Cuda(backend) = device.backend() {
            let mut numbers = device.alloc(shape, Dtype::F32)?;
            cuda::dequantise(backend, self, Dtype::F32, (&mut numbers).into());
            device.synchronise()?;
            return Ok(numbers.to_vec());
        }
        if let Backend::Gpu(backend) = device.backend() {
            let mut numbers = device.alloc(shape, Dtype::F32)?;
            gpu::dequantise(backend, self, &mut numbers);
            device.synchronise()?;
            return Ok(numbers.to_vec());
        }
        let mut numbers = vec![0.0; shape.elements()];
        let width = shape.width();
        for (row, to) in numbers.chunks_exact_mut(width.max(1)).enumerate() {
            self.floats().load(row * width, to);
        }
        Ok(numbers)
    }

    pub(crate) fn scheme(&self) -> Quantisation {
        self.0.scheme
    }

    pub(crate) fn codes(&self) -> &Tensor {
        &self.0.codes
    }

    /// The numbers, to be read.
    pub(crate) fn floats(&self) -> Floats<'_> {
        let (codes, width) = (self.0.codes.data::<u8>(), self.0.shape.width());
        match (&self.0.scales, self.0.scheme) {
            (Scales::PerBlock { codes: block_codes, groups, mean }, _) => Floats::Nf4(Nf4::new(
                codes,
                block_codes.data(),
                groups.data(),
                mean.data::<f32>()[0],
            )),
            (Scales::PerRow(scales), Quantisation::Fp8) => {
                Floats::Fp8(Fp8 { codes, scales: scales.data(), width })
            }
            (Scales::PerRow(scales), _) => {
                Floats::Int8(Int8 { codes, scales: scales.data(), width })
            }
        }
    }
}
