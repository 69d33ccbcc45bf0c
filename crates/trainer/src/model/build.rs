//! How a model is put together: a family asks a [`Builder`] for its weights by name and shape.
//! Where they come from (files, random numbers, nowhere), in which format they are held and which
//! layers get an adapter is not the family's business.

use std::fmt::Display;

use compute::ops::Weight;
use compute::{
    Device, Dtype, Kind, ParamKey, Quantisation, Quantised, Ring, Shape, Tag, Tensor, Var,
};

use super::adapter::Adapters;
use super::layer::{Layer, Matrix, Slot};
use super::stream::Stream;
use crate::error::Result;

/// A tensor that a model asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Want {
    /// Its name, as diffusers and transformers call it.
    pub name: String,
    /// Its shape there.
    pub shape: Shape,
    /// How it may be held.
    pub role: Role,
    /// Which of the model's blocks it is a part of, if it is of any.
    pub block: Option<usize>,
}

/// What a tensor is for, which decides its format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The matrix of a layer inside a block: nearly all of a model's weight, and the part that is
    /// quantised if any is.
    Matrix,
    /// Any other array in the model's format: embeddings, convolutions, the first and last layers.
    Array,
    /// Biases and weights of norms: f32 always.
    Vector,
}

/// In which formats a model is held, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Precision {
    /// Of activations, and of weights that are not quantised.
    pub dtype: Dtype,
    /// How the matrices of blocks are quantised, if they are.
    pub base: Option<Quantisation>,
    /// Which blocks live on the host and come to the device one by one.
    pub stream: Stream,
}

impl Precision {
    /// Nothing quantised, all of it on the device.
    pub const fn plain(dtype: Dtype) -> Self {
        Self { dtype, base: None, stream: Stream::None }
    }

    /// The format that a tensor is loaded in.
    pub fn of(self, role: Role) -> Dtype {
        if role == Role::Vector { Dtype::F32 } else { self.dtype }
    }

    /// How a tensor is quantised. Blocks of nf4 do not fit every width; such a matrix stays as it is.
    pub fn quantisation(self, want: &Want) -> Option<Quantisation> {
        let is_fit = |how| how != Quantisation::Nf4 || want.shape.width().is_multiple_of(NF4_BLOCK);
        self.base.filter(|how| want.role == Role::Matrix && is_fit(*how))
    }
}

/// Takes memory for the blocks among what a model asks for, if they stream; none if they do not.
pub(super) fn ring<'a>(
    device: &Device,
    precision: Precision,
    wants: impl Iterator<Item = &'a Want>,
) -> Result<Option<Ring>> {
    let mut blocks: Vec<Vec<usize>> = Vec::new();
    for want in wants {
        let Some(block) = want.block else { continue };
        blocks.resize(blocks.len().max(block + 1), Vec::new());
        match precision.quantisation(want) {
            _ if !precision.stream.does(block) => {}
            Some(how) => blocks[block].extend(Quantised::sizes(want.shape, how)),
            None => blocks[block].push(want.shape.elements() * precision.of(want.role).bytes()),
        }
    }
    let is_any = blocks.iter().any(|sizes| !sizes.is_empty());
    let made = is_any.then(|| Ring::new(device, &blocks));
    Ok(made.transpose()?)
}

/// Numbers that share a scale in nf4.
const NF4_BLOCK: usize = 64;

/// A weight as it is held.
#[derive(Clone)]
pub enum Held {
    /// Number by number.
    Dense(Var),
    /// In few bits.
    Quantised(Quantised),
}

impl<'a> From<&'a Held> for Weight<'a> {
    fn from(held: &'a Held) -> Self {
        match held {
            Held::Dense(weight) => weight.into(),
            Held::Quantised(weight) => weight.into(),
        }
    }
}

/// Where weights come from.
pub trait Source {
    /// Hands over a tensor.
    fn take(&mut self, device: &Device, want: Want) -> Result<Held>;

    /// Where the model's blocks are, if they stream.
    fn ring(&self) -> Option<&Ring> {
        None
    }
}

/// Puts a model together; see the module's comment.
pub struct Builder<'a> {
    device: &'a Device,
    precision: Precision,
    source: &'a mut dyn Source,
    adapters: &'a mut Adapters,
    /// What names begin with.
    prefix: String,
    /// The block that is put together.
    block: Option<usize>,
    /// Whether nothing that the model gives depends on what is put together.
    is_unused: bool,
}

impl<'a> Builder<'a> {
    /// At the root of a model.
    pub fn new(
        device: &'a Device,
        precision: Precision,
        source: &'a mut dyn Source,
        adapters: &'a mut Adapters,
    ) -> Self {
        let (prefix, block) = (String::new(), None);
        Self { device, precision, source, adapters, prefix, block, is_unused: false }
    }

    /// For the parts below `name`.
    pub fn at(&mut self, name: impl Display) -> Builder<'_> {
        let (prefix, is_unused) = (format!("{}{name}.", self.prefix), self.is_unused);
        Builder { prefix, ..self.unused(is_unused) }
    }

    /// For parts that files hold and that nothing depends on, if `is_unused`: they can learn nothing.
    pub fn unused(&mut self, is_unused: bool) -> Builder<'_> {
        Builder {
            device: self.device,
            precision: self.precision,
            source: &mut *self.source,
            adapters: &mut *self.adapters,
            prefix: self.prefix.clone(),
            block: self.block,
            is_unused,
        }
    }

    /// For one of the model's blocks, which may stream.
    pub fn block(&mut self, name: impl Display, index: usize) -> Builder<'_> {
        self.block_after(0, name, index)
    }

    /// The same for a block of a second list, which comes after `n` others.
    pub fn block_after(&mut self, n: usize, name: impl Display, index: usize) -> Builder<'_> {
        let number = n + index;
        if let Some(ring) = self.source.ring().filter(|_| self.adapters.reads_weights()) {
            ring.enter(number, None);
        }
        Builder { block: Some(number), ..self.at(format!("{name}.{index}")) }
    }

    /// Where the model's blocks are, if they stream.
    pub fn ring(&self) -> Option<Ring> {
        self.source.ring().cloned()
    }

    /// Where the model will live.
    pub fn device(&self) -> &Device {
        self.device
    }

    /// Format of activations.
    pub fn dtype(&self) -> Dtype {
        self.precision.dtype
    }

    /// A linear layer inside a block, `name.weight` [outputs, inputs] and `name.bias`.
    pub fn linear(&mut self, name: impl Display, inputs: usize, outputs: usize) -> Result<Layer> {
        self.layer(name, Role::Matrix, inputs, outputs, true)
    }

    /// The same without a bias.
    pub fn plain(&mut self, name: impl Display, inputs: usize, outputs: usize) -> Result<Layer> {
        self.layer(name, Role::Matrix, inputs, outputs, false)
    }

    /// A linear layer at either end of a model, which is never quantised.
    pub fn edge(&mut self, name: impl Display, inputs: usize, outputs: usize) -> Result<Layer> {
        self.layer(name, Role::Array, inputs, outputs, true)
    }

    /// The layer that makes tokens of patches, stored as a convolution [outputs, channels, patch,
    /// patch] whose windows do not overlap.
    pub fn patches(&mut self, name: impl Display, sizes: [usize; 4]) -> Result<Layer> {
        let [outputs, channels, height, width] = sizes;
        let weight = self.array(format!("{name}.weight"), sizes)?;
        let weight = weight.reshape([outputs, channels * height * width]);
        let weight = self.matrix(&name, Held::Dense(weight))?;
        Ok(Layer { weight, bias: Some(self.bias(name, outputs)?), adapter: None })
    }

    fn layer(
        &mut self,
        name: impl Display,
        role: Role,
        inputs: usize,
        outputs: usize,
        has_bias: bool,
    ) -> Result<Layer> {
        let weight = self.take(format!("{name}.weight"), [outputs, inputs], role)?;
        let bias = if has_bias { Some(self.bias(&name, outputs)?) } else { None };
        let module = format!("{}{name}", self.prefix);
        let adapter = if self.adapters.leaves_out(&module, self.is_unused) {
            None
        } else {
            self.adapters.attach(self.device, &module, &weight, [outputs, inputs])?
        };
        Ok(Layer { weight: self.matrix(name, weight)?, bias, adapter })
    }

    /// A layer's matrix, to be trained if all of the model is.
    fn matrix(&mut self, name: impl Display, held: Held) -> Result<Matrix> {
        match held {
            Held::Dense(weight) if self.adapters.trains_all() => {
                let name = format!("{}{name}.weight", self.prefix);
                Ok(Matrix::Trained(self.train(name, weight)?))
            }
            held => Ok(Matrix::Frozen(held)),
        }
    }

    fn bias(&mut self, name: impl Display, width: usize) -> Result<Slot> {
        self.small(&format!("{name}.bias"), width)
    }

    /// The weight of a norm, `name.weight`, which is trained if all of the model is.
    pub fn norm(&mut self, name: impl Display, width: usize) -> Result<Slot> {
        self.small(&format!("{name}.weight"), width)
    }

    fn small(&mut self, name: &str, width: usize) -> Result<Slot> {
        let vector = self.vector(name, width)?;
        self.slot(name, vector)
    }

    /// A table of which rows are looked up or compared with, `name.weight` [rows, width], which is
    /// never quantised, and trained if all of the model is.
    pub fn table(&mut self, name: impl Display, sizes: [usize; 2]) -> Result<Slot> {
        let name = format!("{name}.weight");
        let table = self.array(&name, sizes)?;
        self.slot(&name, table)
    }

    fn slot(&mut self, name: &str, tensor: Var) -> Result<Slot> {
        if !self.adapters.trains_all() {
            return Ok(Slot::Frozen(tensor));
        }
        Ok(Slot::Trained(self.train(format!("{}{name}", self.prefix), tensor)?))
    }

    /// Makes a tensor of the model's own a parameter.
    fn train(&mut self, name: String, tensor: Var) -> Result<ParamKey> {
        if self.is_unused {
            self.adapters.unused.push(name.clone());
        }
        self.adapters.train(name, tensor)
    }

    /// An array in the model's format.
    pub fn array(&mut self, name: impl Display, shape: impl Into<Shape>) -> Result<Var> {
        self.dense(name, shape, Role::Array)
    }

    /// A vector in f32.
    pub fn vector(&mut self, name: impl Display, width: usize) -> Result<Var> {
        self.dense(name, [width], Role::Vector)
    }

    fn dense(&mut self, name: impl Display, shape: impl Into<Shape>, role: Role) -> Result<Var> {
        match self.take(name, shape, role)? {
            Held::Dense(var) => Ok(var),
            Held::Quantised(_) => unreachable!("only matrices are quantised"),
        }
    }

    fn take(&mut self, name: impl Display, shape: impl Into<Shape>, role: Role) -> Result<Held> {
        let (name, shape) = (format!("{}{name}", self.prefix), shape.into());
        let want = Want { name, shape, role, block: self.block };
        self.source.take(self.device, want)
    }
}

/// All that a model asks for, in its order: it is put together on a device that holds nothing.
pub fn wants<T>(build: impl FnOnce(&mut Builder<'_>) -> Result<T>) -> Result<Vec<Want>> {
    struct Listing(Vec<Want>);
    impl Source for Listing {
        fn take(&mut self, device: &Device, want: Want) -> Result<Held> {
            let tensor = device.zeros(want.shape, Dtype::F32)?;
            self.0.push(want);
            Ok(Held::Dense(tensor.into()))
        }
    }
    let device = Device::meta(Kind::cpu(1), usize::MAX / 2);
    let (mut listing, mut adapters) = (Listing(Vec::new()), Adapters::none());
    build(&mut Builder::new(&device, Precision::plain(Dtype::F32), &mut listing, &mut adapters))?;
    Ok(listing.0)
}

/// Weights of random numbers, the same for the same seed: for measuring what needs no training.
pub struct Random {
    precision: Precision,
    seed: u64,
    stream: u64,
    ring: Option<Ring>,
}

impl Random {
    /// From a seed.
    pub fn new(precision: Precision, seed: u64) -> Self {
        Self { precision, seed, stream: 0, ring: None }
    }

    /// The same for a model that asks for this, whose blocks may stream.
    pub fn of(device: &Device, precision: Precision, seed: u64, wants: &[Want]) -> Result<Self> {
        Ok(Self { ring: ring(device, precision, wants.iter())?, ..Self::new(precision, seed) })
    }
}

/// As small as trained weights are, so that activations stay finite through many blocks.
pub(crate) const DEVIATION: f32 = 0.02;

impl Source for Random {
    fn take(&mut self, device: &Device, want: Want) -> Result<Held> {
        self.stream += 1;
        let dtype = self.precision.of(want.role);
        let normal = || device.normal(want.shape, dtype, DEVIATION, (self.seed, self.stream));
        let is_norm = want.role == Role::Vector && want.name.ends_with("weight");
        let make = || -> compute::Result<Tensor> {
            if is_norm {
                device.upload(want.shape, &vec![1.0f32; want.shape.elements()])
            } else {
                normal()
            }
        };
        let held =
            device.tagged(Tag::Weights, || hold(make()?, self.precision.quantisation(&want)))?;
        park(held, home(self.ring.as_ref(), &want))
    }

    fn ring(&self) -> Option<&Ring> {
        self.ring.as_ref()
    }
}

/// The block that a weight belongs to, if that lives on the host.
pub(super) fn home<'r>(ring: Option<&'r Ring>, want: &Want) -> Option<(&'r Ring, usize)> {
    ring.zip(want.block).filter(|(ring, block)| ring.has(*block))
}

/// Quantises a loaded tensor if it is to be.
pub(super) fn hold(tensor: Tensor, how: Option<Quantisation>) -> Result<Held> {
    Ok(match how {
        Some(how) => Held::Quantised(Quantised::new(&tensor, how)?),
        None => Held::Dense(tensor.into()),
    })
}

/// Moves a weight to where its block lives, if that is on the host.
pub(super) fn park(held: Held, to: Option<(&Ring, usize)>) -> Result<Held> {
    let Some((ring, block)) = to else { return Ok(held) };
    Ok(match held {
        Held::Dense(weight) => Held::Dense(ring.park(block, weight.tensor())?.into()),
        Held::Quantised(weight) => Held::Quantised(weight.park(ring, block)?),
    })
}
