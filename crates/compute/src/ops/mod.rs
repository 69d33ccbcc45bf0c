//! The ops, a folder each: `mod.rs` says what an op computes, checks shapes, takes memory, counts
//! the work and matches on the backend; `cpu.rs` computes; `tests.rs` holds a plain reference and
//! the cases that every backend must pass. `docs/ops.md` shows how to add one.

pub(crate) mod activation;
mod affine;
mod attention;
mod avg_pool;
mod channel_rms_norm;
mod conv;
mod cross_entropy;
mod dora;
mod elementwise;
mod embedding;
mod gather;
mod glu;
mod group_norm;
mod grouped_linear;
mod gumbel;
mod khatri_rao;
mod linear;
mod matmul;
mod mix_groups;
mod mse;
mod noise;
pub(crate) mod norm_modulate;
mod optimizer;
mod patchify;
mod qk_norm_rope;
mod rms_norm;
mod route;
mod tokens;
mod top_k;
mod upsample;

pub use activation::Activation;
pub use attention::Attention;
pub use conv::{Conv2d, Conv3d, ConvPadding};
pub use cross_entropy::{IGNORE_INDEX, RowLosses, RowWeights};
pub use dora::row_norms;
pub(crate) use elementwise::accumulate;
pub use khatri_rao::SharedAxis;
pub(crate) use linear::Fp8Checks;
pub use linear::{Fp8Check, Linear, Lora, Weight};
pub(crate) use matmul::matrix_units_agree;
pub use mse::{ErrorLoss, ErrorWeights};
pub use noise::{LatentScaling, LatentStd, NoisyLatents, add_noise, sample_latents};
pub use optimizer::{
    Adafactor, AdamW, BlockCodes, FactoredMoments, GradClip, Moments, Moments8bit, Muon, Prodigy,
    ProdigyState, ScheduleFreeState, adafactor, adamw, adamw_8bit, count_not_finite, ema,
    global_norm, global_norm_into, lerp, lion, momentum, muon, prodigy, prodigy_distance,
    schedule_free, stochastic_round,
};
pub use patchify::{PatchOrder, PatchedSize};
pub use qk_norm_rope::{QkNormRope, Rope, RopeAxis, RopePairs, rope_table};
pub use route::{Routing, RowGroups};
pub use top_k::top_k;

use crate::op::Op;
use crate::var::{Chunk, Var};
use crate::{ComputeError, Dtype, Result, Shape, Tensor};

/// Checks that every op makes on what it is given; each names the op and the tensor.
impl Op<'_> {
    /// Of one shape, known from the other inputs.
    pub fn expect_shape(
        &self,
        what: &'static str,
        tensor: &Tensor,
        expected: impl Into<Shape>,
    ) -> Result<()> {
        self.expect_sizes(what, tensor.shape(), expected)?;
        self.expect_device(what, tensor)
    }

    /// The same for what is no tensor.
    pub fn expect_sizes(
        &self,
        what: &'static str,
        got: Shape,
        expected: impl Into<Shape>,
    ) -> Result<()> {
        let expected = expected.into();
        if expected == got {
            return Ok(());
        }
        Err(ComputeError::Shape { op: self.name, what, expected, got })
    }

    /// Of as many dimensions as the pattern that takes them apart.
    pub fn expect_rank<const RANK: usize>(
        &self,
        what: &'static str,
        tensor: &Tensor,
    ) -> Result<[usize; RANK]> {
        self.expect_device(what, tensor)?;
        let got = tensor.shape();
        let sizes = got.sizes().try_into();
        sizes.map_err(|_| ComputeError::Rank { op: self.name, what, expected: RANK, got })
    }

    /// Of a dtype with fractions.
    pub fn expect_real(&self, what: &'static str, tensor: &Tensor) -> Result<Dtype> {
        let got = tensor.dtype();
        if got.is_real() {
            return self.expect_device(what, tensor).map(|()| got);
        }
        Err(ComputeError::Dtype { op: self.name, what, expected: "f32, bf16 or f16", got })
    }

    /// Of one dtype, known from the op or from the other inputs.
    pub fn expect_dtype(&self, what: &'static str, tensor: &Tensor, expected: Dtype) -> Result<()> {
        let got = tensor.dtype();
        let name = match expected {
            Dtype::F32 => "f32",
            Dtype::Bf16 => "bf16",
            Dtype::F16 => "f16",
            Dtype::U32 => "u32",
            Dtype::I32 => "i32",
            Dtype::U8 => "u8",
        };
        if got == expected {
            return self.expect_device(what, tensor);
        }
        Err(ComputeError::Dtype { op: self.name, what, expected: name, got })
    }

    /// A vector of f32: biases and weights of norms are few, and never rounded.
    pub fn expect_vector(&self, what: &'static str, tensor: &Tensor, length: usize) -> Result<()> {
        self.expect_dtype(what, tensor, Dtype::F32)?;
        self.expect_shape(what, tensor, [length])
    }

    /// A whole number of parts.
    pub fn expect_multiple(&self, what: &'static str, size: usize, by: usize) -> Result<usize> {
        if by > 0 && size.is_multiple_of(by) {
            return Ok(size / by);
        }
        Err(ComputeError::Indivisible { op: self.name, what, size, by })
    }

    /// A value in its range.
    pub fn expect_range(
        &self,
        what: &'static str,
        got: &impl ToString,
        is_fit: bool,
        expected: &str,
    ) -> Result<()> {
        if is_fit {
            return Ok(());
        }
        let (expected, got) = (expected.to_owned(), got.to_string());
        Err(ComputeError::Range { op: self.name, what, expected, got })
    }

    /// Something to take a mean of.
    pub fn expect_some(&self, what: &'static str, tensor: &Tensor) -> Result<()> {
        let shape = tensor.shape();
        if shape.elements() > 0 {
            return Ok(());
        }
        Err(ComputeError::Empty { op: self.name, what, shape })
    }

    /// Indices into `count` of `things`, looked at where there is data to look at.
    pub fn expect_indices(
        &self,
        what: &'static str,
        ids: &Tensor,
        things: &'static str,
        count: usize,
    ) -> Result<()> {
        self.expect_dtype(what, ids, Dtype::U32)?;
        if !self.has_data() {
            return Ok(());
        }
        let ids = ids.indices();
        let Some(&index) = ids.iter().find(|id| **id as usize >= count) else { return Ok(()) };
        let index = index as usize;
        Err(ComputeError::Index { op: self.name, what: things, index, count })
    }

    /// Something that no gradient is wanted for, in ops that have none.
    pub fn expect_no_grad(&self, input: &Var) -> Result<()> {
        if input.grad_target().is_none() {
            return Ok(());
        }
        Err(ComputeError::ForwardOnly { op: self.name })
    }

    /// Part of the rows of a tensor [samples, n · width], of the dtype of what it is used with.
    pub fn expect_chunk(
        &self,
        what: &'static str,
        chunk: Chunk<'_>,
        samples: usize,
        width: usize,
        dtype: Dtype,
    ) -> Result<()> {
        let tensor = chunk.of.tensor();
        self.expect_dtype(what, tensor, dtype)?;
        let count = self.expect_multiple(what, tensor.shape().width(), width)?;
        self.expect_shape(what, tensor, [samples, count * width])?;
        if chunk.index < count {
            return Ok(());
        }
        Err(ComputeError::Index { op: self.name, what: "chunks", index: chunk.index, count })
    }

    fn expect_device(&self, what: &'static str, tensor: &Tensor) -> Result<()> {
        if tensor.device().is_same(self.device) {
            return Ok(());
        }
        Err(ComputeError::Device { op: self.name, what })
    }
}

/// The inputs of an op whose gradients may be wanted, those that are optional among them.
pub(crate) fn inputs<const N: usize>(all: [Option<&Var>; N]) -> Vec<&Var> {
    all.into_iter().flatten().collect()
}
