//! How a model is built: a family asks a [`ModelBuilder`] for its weights by name and shape. Where they
//! come from (files, random init, the meta device), in which dtype they are held and which layers get
//! an adapter is not the family's business.

#[cfg(test)]
mod tests;

use std::fmt::Display;

use compute::ops::Weight;
use compute::{
    BlockSwap, Device, DeviceKind, Dtype, ParamKey, Quantisation, Quantised, RandomSequence, Shape,
    Tag, Tensor, Var,
};

use super::adapter::{Adapters, NormKeys, NormPart};
use super::layer::{LayerWeight, LinearLayer, ModelTensor, NormTensor};
use super::offload::Offload;
use crate::error::{Result, TrainerError};

/// A tensor that a model asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Its name in diffusers or transformers.
    pub name: String,
    /// Its shape there.
    pub shape: Shape,
    /// How it may be held.
    pub role: TensorRole,
    /// Which of the model's blocks it is a part of, if it is of any.
    pub block: Option<usize>,
}

/// What a tensor is for, which decides its dtype.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorRole {
    /// The matrix of a layer inside a block: nearly all of a model's parameters, and the part that is
    /// quantised if any is.
    Matrix,
    /// The matrix of a layer that makes modulation vectors: quantised as others are, and left as it is where others
    /// are multiplied in fp8, since all of a block depends on it.
    Modulation,
    /// Any other array in the model's dtype: embeddings, convolutions, the first and last layers.
    Array,
    /// Biases and weights of norms: f32 always.
    Vector,
}

/// In which dtypes a model is held, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Precision {
    /// Of activations, and of weights that are not quantised.
    pub dtype: Dtype,
    /// How the matrices of blocks are quantised, if they are.
    pub base: Option<Quantisation>,
    /// Whether those of fp8 are multiplied so, with activations rounded to fp8 too.
    pub multiplies_fp8: bool,
    /// Which blocks are offloaded to the host and copied to the device one by one.
    pub offload: Offload,
}

impl Precision {
    /// Nothing quantised, all of it on the device.
    pub const fn plain(dtype: Dtype) -> Self {
        Self { dtype, base: None, multiplies_fp8: false, offload: Offload::None }
    }

    /// The dtype that a tensor is loaded in.
    pub fn dtype_of(self, role: TensorRole) -> Dtype {
        if role == TensorRole::Vector { Dtype::F32 } else { self.dtype }
    }

    /// The dtype that a frozen tensor is held in whose files have it in `stored`. On a CPU a matrix of 16 bits stays so
    /// beside activations in f32: they are multiplied exactly, in half the memory and, by AMX, half the time.
    pub fn frozen_dtype(self, device: &Device, want: &TensorSpec, stored: Option<Dtype>) -> Dtype {
        let dtype = self.dtype_of(want.role);
        let is_matrix = matches!(want.role, TensorRole::Matrix | TensorRole::Modulation);
        let is_plain = is_matrix && self.quantisation(want).is_none();
        let is_mixed = matches!(device.kind(), DeviceKind::Cpu { .. }) && dtype == Dtype::F32;
        stored.filter(|_| is_plain && is_mixed).unwrap_or(dtype)
    }

    /// How a tensor is quantised. Blocks of nf4 do not fit every width; such a matrix stays as it is.
    pub fn quantisation(self, want: &TensorSpec) -> Option<Quantisation> {
        let is_fit = |how| how != Quantisation::Nf4 || want.shape.width().is_multiple_of(NF4_BLOCK);
        let is_quantised = match want.role {
            TensorRole::Matrix => true,
            TensorRole::Modulation => !self.multiplies_fp8,
            TensorRole::Array | TensorRole::Vector => false,
        };
        self.base.filter(|how| is_quantised && is_fit(*how))
    }
}

/// Allocates memory for the model's offloaded blocks; none if there are none. Each tensor comes with the dtype of
/// [`Precision::frozen_dtype`].
pub(super) fn new_block_swap<'a>(
    device: &Device,
    precision: Precision,
    wants: impl Iterator<Item = (&'a TensorSpec, Dtype)>,
) -> Result<Option<BlockSwap>> {
    let mut blocks: Vec<Vec<usize>> = Vec::new();
    for (want, dtype) in wants {
        let Some(block) = want.block else { continue };
        blocks.resize(blocks.len().max(block + 1), Vec::new());
        match precision.quantisation(want) {
            _ if !precision.offload.offloads(block) => {}
            Some(how) => blocks[block].extend(Quantised::sizes(want.shape, how)),
            None => blocks[block].push(want.shape.elements() * dtype.bytes()),
        }
    }
    let is_any = blocks.iter().any(|sizes| !sizes.is_empty());
    let made = is_any.then(|| BlockSwap::new(device, &blocks));
    Ok(made.transpose()?)
}

/// Values that share a scale in nf4.
const NF4_BLOCK: usize = 64;

/// A weight as it is held.
#[derive(Clone)]
pub enum WeightTensor {
    /// Not quantised.
    Dense(Var),
    /// Quantised.
    Quantised(Quantised),
}

impl<'a> From<&'a WeightTensor> for Weight<'a> {
    fn from(held: &'a WeightTensor) -> Self {
        match held {
            WeightTensor::Dense(weight) => weight.into(),
            WeightTensor::Quantised(weight) => weight.into(),
        }
    }
}

/// Where weights come from.
pub trait WeightSource {
    /// Hands over a tensor.
    fn take(&mut self, device: &Device, want: TensorSpec) -> Result<WeightTensor>;

    /// The model's offloaded blocks, if any.
    fn block_swap(&self) -> Option<&BlockSwap> {
        None
    }
}

/// Builds a model; see the module's comment.
pub struct ModelBuilder<'a> {
    device: &'a Device,
    precision: Precision,
    source: &'a mut dyn WeightSource,
    adapters: &'a mut Adapters,
    /// Prefix of all names.
    prefix: String,
    /// The block being built.
    block: Option<usize>,
    /// Whether the model's output does not depend on what is being built.
    is_unused: bool,
    /// Whether linear layers have biases.
    has_biases: bool,
    /// Whether CUDA may round f32 factors to TF32.
    allows_tf32: bool,
}

impl<'a> ModelBuilder<'a> {
    /// At the root of a model.
    pub fn new(
        device: &'a Device,
        precision: Precision,
        source: &'a mut dyn WeightSource,
        adapters: &'a mut Adapters,
    ) -> Self {
        let (prefix, block) = (String::new(), None);
        let (is_unused, has_biases, allows_tf32) = (false, true, false);
        Self {
            device,
            precision,
            source,
            adapters,
            prefix,
            block,
            is_unused,
            has_biases,
            allows_tf32,
        }
    }

    /// For the parts below `name`.
    pub fn at(&mut self, name: impl Display) -> ModelBuilder<'_> {
        let (prefix, is_unused) = (format!("{}{name}.", self.prefix), self.is_unused);
        ModelBuilder { prefix, ..self.unused(is_unused) }
    }

    /// For parts that files hold and that nothing depends on, if `is_unused`: they can learn nothing.
    pub fn unused(&mut self, is_unused: bool) -> ModelBuilder<'_> {
        ModelBuilder {
            device: self.device,
            precision: self.precision,
            source: &mut *self.source,
            adapters: &mut *self.adapters,
            prefix: self.prefix.clone(),
            block: self.block,
            is_unused,
            has_biases: self.has_biases,
            allows_tf32: self.allows_tf32,
        }
    }

    /// For parts whose linear layers have no biases.
    pub fn without_biases(&mut self) -> ModelBuilder<'_> {
        let is_unused = self.is_unused;
        ModelBuilder { has_biases: false, ..self.unused(is_unused) }
    }

    /// For one of the model's blocks, which may be offloaded.
    pub fn block(&mut self, name: impl Display, index: usize) -> ModelBuilder<'_> {
        self.block_after(0, name, index)
    }

    /// The same for a block of a second list, which comes after `n` others.
    pub fn block_after(&mut self, n: usize, name: impl Display, index: usize) -> ModelBuilder<'_> {
        let number = n + index;
        if let Some(ring) = self.source.block_swap().filter(|_| self.adapters.reads_weights()) {
            ring.enter(number, None);
        }
        ModelBuilder { block: Some(number), ..self.at(format!("{name}.{index}")) }
    }

    /// The model's offloaded blocks, if any.
    pub fn block_swap(&self) -> Option<BlockSwap> {
        self.source.block_swap().cloned()
    }

    /// Lets CUDA round f32 factors to TF32 in layers that ask for [`ModelBuilder::allows_tf32`].
    pub fn allow_tf32(&mut self) -> &mut Self {
        self.allows_tf32 = true;
        self
    }

    /// Whether CUDA may do so.
    pub fn allows_tf32(&self) -> bool {
        self.allows_tf32
    }

    /// The model's device.
    pub fn device(&self) -> &Device {
        self.device
    }

    /// Dtype of activations.
    pub fn dtype(&self) -> Dtype {
        self.precision.dtype
    }

    /// A linear layer inside a block, `name.weight` [outputs, inputs] and `name.bias`, if layers have one.
    pub fn linear(
        &mut self,
        name: impl Display,
        inputs: usize,
        outputs: usize,
    ) -> Result<LinearLayer> {
        self.layer(name, TensorRole::Matrix, inputs, outputs, self.has_biases)
    }

    /// The same for a layer that makes a block's modulation vectors.
    pub fn modulation(
        &mut self,
        name: impl Display,
        inputs: usize,
        outputs: usize,
    ) -> Result<LinearLayer> {
        self.layer(name, TensorRole::Modulation, inputs, outputs, self.has_biases)
    }

    /// The same without a bias.
    pub fn linear_no_bias(
        &mut self,
        name: impl Display,
        inputs: usize,
        outputs: usize,
    ) -> Result<LinearLayer> {
        self.layer(name, TensorRole::Matrix, inputs, outputs, false)
    }

    /// A linear layer at either end of a model, which is never quantised.
    pub fn linear_unquantised(
        &mut self,
        name: impl Display,
        inputs: usize,
        outputs: usize,
    ) -> Result<LinearLayer> {
        self.layer(name, TensorRole::Array, inputs, outputs, self.has_biases)
    }

    /// The patch embedding, stored as a convolution [outputs, channels, patch, patch] with stride equal to
    /// the patch.
    pub fn patch_embed(&mut self, name: impl Display, sizes: [usize; 4]) -> Result<LinearLayer> {
        let [outputs, channels, height, width] = sizes;
        let weight = self.array(format!("{name}.weight"), sizes)?;
        let weight = weight.reshape([outputs, channels * height * width]);
        let weight = self.matrix(&name, WeightTensor::Dense(weight))?;
        Ok(LinearLayer {
            weight,
            bias: Some(self.bias(name, outputs)?),
            adapter: None,
            training: None,
        })
    }

    fn layer(
        &mut self,
        name: impl Display,
        role: TensorRole,
        inputs: usize,
        outputs: usize,
        has_bias: bool,
    ) -> Result<LinearLayer> {
        let weight = match self.take(format!("{name}.weight"), [outputs, inputs], role)? {
            WeightTensor::Quantised(weight) if self.precision.multiplies_fp8 => {
                let layer = format!("{}{name}", self.prefix);
                WeightTensor::Quantised(weight.multiplied_in_fp8(&layer))
            }
            weight => weight,
        };
        let bias = if has_bias { Some(self.bias(&name, outputs)?) } else { None };
        let module = format!("{}{name}", self.prefix);
        let adapter = if self.adapters.excludes(&module, self.is_unused) {
            None
        } else {
            self.adapters.attach(self.device, &module, &weight, [outputs, inputs])?
        };
        let (sizes, dtype) = ([outputs, inputs], self.precision.dtype);
        let training = self.adapters.attach_training(self.device, &module, sizes, dtype)?;
        Ok(LinearLayer { weight: self.matrix(name, weight)?, bias, adapter, training })
    }

    /// A layer's matrix, trainable in a full fine-tune.
    fn matrix(&mut self, name: impl Display, held: WeightTensor) -> Result<LayerWeight> {
        match held {
            WeightTensor::Dense(weight) if self.adapters.is_full() => {
                let name = format!("{}{name}.weight", self.prefix);
                Ok(LayerWeight::Trained(self.train(name, weight)?))
            }
            held => Ok(LayerWeight::Frozen(held)),
        }
    }

    fn bias(&mut self, name: impl Display, width: usize) -> Result<ModelTensor> {
        self.small(&format!("{name}.bias"), width)
    }

    /// The weight of a norm, `name.weight`, trainable in a full fine-tune and beside adapters.
    pub fn norm(&mut self, name: impl Display, width: usize) -> Result<NormTensor> {
        let tensor = self.small(&format!("{name}.weight"), width)?;
        let added = self.attach_norm(name, width, false)?.map(|keys| keys.weight);
        Ok(NormTensor { tensor, added })
    }

    /// The weight and the bias of a layer norm, `name.weight` and `name.bias`, trainable as those of [`Self::norm`].
    pub fn layer_norm(&mut self, name: impl Display, width: usize) -> Result<[NormTensor; 2]> {
        let weight = self.small(&format!("{name}.weight"), width)?;
        let bias = self.bias(&name, width)?;
        let added = self.attach_norm(name, width, true)?;
        Ok([
            NormTensor { tensor: weight, added: added.map(|keys| keys.weight) },
            NormTensor { tensor: bias, added: added.and_then(|keys| keys.bias) },
        ])
    }

    fn attach_norm(
        &mut self,
        name: impl Display,
        width: usize,
        has_bias: bool,
    ) -> Result<Option<NormKeys>> {
        let module = format!("{}{name}", self.prefix);
        let part = NormPart { has_bias, is_unused: self.is_unused };
        self.adapters.attach_norm(self.device, &module, width, part)
    }

    fn small(&mut self, name: &str, width: usize) -> Result<ModelTensor> {
        let vector = self.vector(name, width)?;
        self.slot(name, vector)
    }

    /// An embedding (or tied head), `name.weight` [rows, width]: never quantised, trainable in a full
    /// fine-tune.
    pub fn embedding(&mut self, name: impl Display, sizes: [usize; 2]) -> Result<ModelTensor> {
        self.parameter(format!("{name}.weight"), sizes)
    }

    /// An array that is trainable in a full fine-tune, such as a learned token: never quantised.
    pub fn parameter(&mut self, name: impl Display, sizes: [usize; 2]) -> Result<ModelTensor> {
        let name = name.to_string();
        let table = self.array(&name, sizes)?;
        self.slot(&name, table)
    }

    fn slot(&mut self, name: &str, tensor: Var) -> Result<ModelTensor> {
        if !self.adapters.is_full() {
            return Ok(ModelTensor::Frozen(tensor));
        }
        Ok(ModelTensor::Trained(self.train(format!("{}{name}", self.prefix), tensor)?))
    }

    /// Makes a tensor of the model a parameter.
    fn train(&mut self, name: String, tensor: Var) -> Result<ParamKey> {
        if self.is_unused {
            self.adapters.unused.push(name.clone());
        }
        self.adapters.train(name, tensor)
    }

    /// An array in the model's dtype, never trained.
    pub fn array(&mut self, name: impl Display, shape: impl Into<Shape>) -> Result<Var> {
        self.dense(name, shape, TensorRole::Array)
    }

    /// A vector in f32, never trained.
    pub fn vector(&mut self, name: impl Display, width: usize) -> Result<Var> {
        self.dense(name, [width], TensorRole::Vector)
    }

    fn dense(
        &mut self,
        name: impl Display,
        shape: impl Into<Shape>,
        role: TensorRole,
    ) -> Result<Var> {
        match self.take(name, shape, role)? {
            WeightTensor::Dense(var) => Ok(var),
            WeightTensor::Quantised(_) => unreachable!("only matrices are quantised"),
        }
    }

    fn take(
        &mut self,
        name: impl Display,
        shape: impl Into<Shape>,
        role: TensorRole,
    ) -> Result<WeightTensor> {
        let (name, shape) = (format!("{}{name}", self.prefix), shape.into());
        let want = TensorSpec { name, shape, role, block: self.block };
        self.source.take(self.device, want)
    }
}

/// Most tensors of a model. Chosen: Qwen3-235B-A22B, with 128 experts in each of 94 layers, has 36 thousand.
const MOST_TENSORS: usize = 65_536;

/// Most tensors of a model that are stored as one. Taken from FLUX's `linear1`: query, key, value and feed-forward.
const MOST_FUSED: usize = 4;

/// Tensors of a model that its files need not hold. Chosen: position embeddings and such are few.
const MOST_COMPUTED: usize = 64;

/// Most values of a tensor. Chosen: far more than any memory holds, and bytes can be counted.
const MOST_VALUES: usize = 1 << 48;

/// All tensors that a model asks for, in order, found by building it on the meta device. Settings are believed up to
/// what a model can have: a file may claim a million blocks.
pub fn tensor_specs<T>(
    build: impl FnOnce(&mut ModelBuilder<'_>) -> Result<T>,
) -> Result<Vec<TensorSpec>> {
    list_tensors(MOST_TENSORS, String::new(), build)
}

/// The same of a model whose files hold so many tensors: settings that ask for far more are refused before it is built.
/// A few that are missing are for the caller to name.
pub fn tensor_specs_of_files<T>(
    n_stored: usize,
    build: impl FnOnce(&mut ModelBuilder<'_>) -> Result<T>,
) -> Result<Vec<TensorSpec>> {
    let most = n_stored.saturating_mul(MOST_FUSED).saturating_add(MOST_COMPUTED).min(MOST_TENSORS);
    list_tensors(most, format!(", while its files hold {n_stored}"), build)
}

fn list_tensors<T>(
    most: usize,
    stored: String,
    build: impl FnOnce(&mut ModelBuilder<'_>) -> Result<T>,
) -> Result<Vec<TensorSpec>> {
    struct Listing {
        specs: Vec<TensorSpec>,
        most: usize,
        /// What its files hold, to be said.
        stored: String,
    }
    impl Listing {
        fn check(&self, TensorSpec { name, shape, .. }: &TensorSpec) -> Result<()> {
            let n = shape.sizes().iter().try_fold(1usize, |n, size| n.checked_mul(*size));
            let Self { most, stored, .. } = self;
            let problem = if self.specs.len() == *most {
                format!("more than {most} tensors, one of them {name}{stored}")
            } else if n.is_none_or(|n| n > MOST_VALUES) {
                format!("{name} of {shape}, which no memory holds")
            } else {
                return Ok(());
            };
            Err(TrainerError::OversizedModel { problem })
        }
    }
    impl WeightSource for Listing {
        fn take(&mut self, device: &Device, want: TensorSpec) -> Result<WeightTensor> {
            self.check(&want)?;
            let tensor = device.zeros(want.shape, Dtype::F32)?;
            self.specs.push(want);
            Ok(WeightTensor::Dense(tensor.into()))
        }
    }
    let device = Device::meta(DeviceKind::cpu(1), usize::MAX / 2);
    let (specs, mut adapters) = (Vec::new(), Adapters::none());
    let mut listing = Listing { specs, most, stored };
    build(&mut ModelBuilder::new(
        &device,
        Precision::plain(Dtype::F32),
        &mut listing,
        &mut adapters,
    ))?;
    Ok(listing.specs)
}

/// What published models are stored in.
const PUBLISHED: Dtype = Dtype::Bf16;

/// Random weights from a seed: for benchmarks that need no trained model.
pub struct RandomWeights {
    precision: Precision,
    seed: u64,
    sequence: u64,
    block_swap: Option<BlockSwap>,
}

impl RandomWeights {
    /// From a seed.
    pub fn new(precision: Precision, seed: u64) -> Self {
        Self { precision, seed, sequence: 0, block_swap: None }
    }

    /// The same for a model with these tensors, whose blocks may be offloaded.
    pub fn with_block_swap(
        device: &Device,
        precision: Precision,
        seed: u64,
        wants: &[TensorSpec],
    ) -> Result<Self> {
        let held = |want| (want, precision.frozen_dtype(device, want, Some(PUBLISHED)));
        let block_swap = new_block_swap(device, precision, wants.iter().map(held))?;
        Ok(Self { block_swap, ..Self::new(precision, seed) })
    }
}

/// As small as trained weights are, so that activations stay finite through many blocks.
pub(crate) const INIT_STD: f32 = 0.02;

impl WeightSource for RandomWeights {
    fn take(&mut self, device: &Device, want: TensorSpec) -> Result<WeightTensor> {
        self.sequence += 1;
        let dtype = self.precision.frozen_dtype(device, &want, Some(PUBLISHED));
        let normal = || {
            device.normal(
                want.shape,
                dtype,
                INIT_STD,
                RandomSequence::new(self.seed, self.sequence),
            )
        };
        let ends = ["weight", "gamma"];
        let is_norm =
            want.role == TensorRole::Vector && ends.iter().any(|end| want.name.ends_with(end));
        let make = || -> compute::Result<Tensor> {
            if is_norm {
                device.upload(want.shape, &vec![1.0f32; want.shape.elements()])
            } else {
                normal()
            }
        };
        let held = device
            .with_tag(Tag::Weights, || quantise(make()?, self.precision.quantisation(&want)))?;
        offload(held, offload_target(self.block_swap.as_ref(), &want))
    }

    fn block_swap(&self) -> Option<&BlockSwap> {
        self.block_swap.as_ref()
    }
}

/// The block that a weight belongs to, if that is offloaded.
pub(super) fn offload_target<'r>(
    ring: Option<&'r BlockSwap>,
    want: &TensorSpec,
) -> Option<(&'r BlockSwap, usize)> {
    ring.zip(want.block).filter(|(ring, block)| ring.is_offloaded(*block))
}

/// Quantises a loaded tensor if it is to be.
pub(super) fn quantise(tensor: Tensor, how: Option<Quantisation>) -> Result<WeightTensor> {
    Ok(match how {
        Some(how) => WeightTensor::Quantised(Quantised::new(&tensor, how)?),
        None => WeightTensor::Dense(tensor.into()),
    })
}

/// Moves a weight to the host if its block is offloaded.
pub(super) fn offload(held: WeightTensor, to: Option<(&BlockSwap, usize)>) -> Result<WeightTensor> {
    let Some((ring, block)) = to else { return Ok(held) };
    Ok(match held {
        WeightTensor::Dense(weight) => {
            WeightTensor::Dense(ring.offload(block, weight.tensor())?.into())
        }
        WeightTensor::Quantised(weight) => WeightTensor::Quantised(weight.offload(ring, block)?),
    })
}
