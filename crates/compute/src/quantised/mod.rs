//! Quantised frozen matrices: a byte or half of one per value, and scales. Matmuls read them as
//! they are, block by block; a dequantised copy of the whole never exists. Those of fp8 may also be multiplied
//! as they are, by tensor cores that can, with a left operand that is rounded to fp8 too (`fp8_rows.rs`).
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
pub(crate) mod fp8_rows;
pub(crate) mod gpu;
pub(crate) mod read;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub use fp8_rows::check_fp8_matmuls;
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
    /// Whether matmuls multiply its codes, where the device can.
    fp8: Option<Fp8Layer>,
}

/// A layer that is multiplied in fp8.
#[derive(Debug)]
struct Fp8Layer {
    name: String,
    /// Whether it still is; see [`Quantised::stop_fp8`].
    is_on: AtomicBool,
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
        Self { scheme: how, shape, codes: next(), scales, fp8: None }
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

    /// The same matrix, whose codes matmuls multiply where it is of fp8 and the device can: with CUDA, for a left
    /// operand of 16 bits, if rows and width are multiples of 16. Elsewhere it is multiplied as ever. The layer's name
    /// is for who looks at it.
    #[must_use]
    pub fn multiplied_in_fp8(self, layer: &str) -> Self {
        let QuantisedInner { scheme, shape, .. } = *self.0;
        let tensors = self.0.tensors().into_iter().cloned().collect();
        let inner = QuantisedInner::of(scheme, shape, tensors);
        let fp8 = Some(Fp8Layer { name: layer.into(), is_on: AtomicBool::new(true) });
        Self(Arc::new(QuantisedInner { fp8, ..inner }))
    }

    /// Multiplies it, and all clones, as other matrices from now on.
    pub(crate) fn stop_fp8(&self) {
        self.0.fp8.iter().for_each(|fp8| fp8.is_on.store(false, Ordering::Relaxed));
    }

    /// The name of the layer, if it was to be multiplied in fp8.
    pub(crate) fn fp8_layer(&self) -> Option<&str> {
        self.0.fp8.as_ref().map(|fp8| fp8.name.as_str())
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

    /// The scales of its rows, if matmuls multiply its codes.
    pub(crate) fn multiplied_scales(&self) -> Option<&Tensor> {
        let QuantisedInner { scheme, scales, fp8, .. } = &*self.0;
        let is_on = fp8.as_ref().is_some_and(|fp8| fp8.is_on.load(Ordering::Relaxed));
        match scales {
            Scales::PerRow(scales) if *scheme == Quantisation::Fp8 && is_on => Some(scales),
            _ => None,
        }
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
