//! The denoiser (transformer), of any family. A family is a folder here and a line in `families!`; it implements
//! [`Architecture`] (its config, before anything is loaded) and [`DenoiserNetwork`] (the loaded model).

#[cfg(test)]
mod loss_tests;
#[cfg(test)]
mod masked_loss_tests;

use std::path::Path;

use compute::ops::{ErrorLoss, ErrorWeights, PatchOrder, PatchedSize};
use compute::{Dtype, Tape, Tensor, Var};
use serde::de::DeserializeOwned;
use weights::Catalog;

use super::condition::{ConditionLayout, Conditions};
use super::family::DiffusionFamily;
use super::implementation::Implementation;
use super::text::EmbeddingWidths;
use super::{flux, flux2, kandinsky5, qwen_image, sd3, z_image};
use crate::error::Result;
use crate::model::build::{ModelBuilder, TensorSpec, tensor_specs};
use crate::model::config::{self, Unsupported};
use crate::model::files::CheckpointLayout;
use crate::model::recompute::Recompute;
use crate::model::tensor_piece::TensorPiece;
use crate::objective::flow::Timestep;
use crate::objective::velocity_loss::{LossKind, VelocityLoss};

/// Every family: the name of its variants, its folder and its config.
macro_rules! families {
    ($($name:ident = $folder:ident::$config:ident;)+) => {
        /// A family's config: what `transformer/config.json` says.
        #[derive(Clone, Debug)]
        pub enum DenoiserConfig {
            $(#[doc = concat!("Of `", stringify!($folder), "`.")] $name($folder::$config),)+
        }

        /// A family's model, loaded.
        pub enum Denoiser {
            $(#[doc = concat!("Of `", stringify!($folder), "`.")] $name(Box<<$folder::$config as Architecture>::Model>),)+
        }

        /// Does the same with the config or model of any family.
        macro_rules! dispatch {
            ($kind:ident, $it:expr, $inner:ident => $work:expr) => {
                match $it { $($kind::$name($inner) => $work,)+ }
            };
        }

        /// All families.
        pub const FAMILIES: &[&DiffusionFamily] = &[$(&$folder::FAMILY),+];

        impl DenoiserConfig {
            /// Reads the settings of a family's folder and checks them.
            pub fn read(family: &DiffusionFamily, path: &Path) -> Result<Self> {
                $(if family.name == $folder::FAMILY.name {
                    return read_one(path).map(Self::$name);
                })+
                unreachable!("every family is in the list")
            }

            /// Of a checkpoint in the family's original layout, by the shapes of its tensors, and what the names of
            /// the model begin with there. `beside` is the folder of a model of the same family.
            pub fn of_checkpoint(
                family: &DiffusionFamily,
                catalog: &Catalog,
                beside: &Path,
            ) -> Result<Option<(Self, &'static str)>> {
                $(if family.name == $folder::FAMILY.name {
                    let found = <$folder::$config as Architecture>::of_checkpoint(catalog, beside)?;
                    return Ok(found.map(|(config, prefix)| (Self::$name(config), prefix)));
                })+
                unreachable!("every family is in the list")
            }

            /// The same for the variant that a class of pipelines is for.
            #[must_use]
            pub fn with_pipeline(self, class: &str) -> Self {
                match self { $(Self::$name(config) => Self::$name(config.with_pipeline(class)),)+ }
            }

            /// The same for a model that is distilled to few steps, or is not.
            #[must_use]
            pub fn with_distillation(self, is_distilled: bool) -> Self {
                match self { $(Self::$name(config) => Self::$name(config.with_distillation(is_distilled)),)+ }
            }

            /// The same for the variant that the name of a model's folder or file says.
            #[must_use]
            pub fn with_name(self, path: &Path) -> Self {
                let name = weights::hub::model_name(path).to_lowercase();
                match self { $(Self::$name(config) => Self::$name(config.with_name(&name)),)+ }
            }

            /// The same run as another program does; `None` where all programs do the same.
            pub fn with_implementation(self, implementation: Implementation) -> Option<Self> {
                match self {
                    $(Self::$name(config) => config.with_implementation(implementation).map(Self::$name),)+
                }
            }

            /// Whether the reference's latents are [samples, frames, height, width, channels].
            pub fn is_channels_last(&self) -> bool {
                match self { $(Self::$name(_) => <$folder::$config as Architecture>::CHANNELS_LAST,)+ }
            }

            /// The class of the pipeline that a checkpoint of a family is for, as far as its name says.
            pub fn pipeline_of_file(family: &DiffusionFamily, path: &Path) -> Option<&'static str> {
                let stem = path.file_stem()?.to_string_lossy().to_lowercase().replace('_', "-");
                $(if family.name == $folder::FAMILY.name {
                    return <$folder::$config as Architecture>::pipeline_of_file(&stem);
                })+
                None
            }

            /// Builds the model.
            pub fn build(&self, build: &mut ModelBuilder<'_>) -> Result<Denoiser> {
                Ok(match self { $(Self::$name(config) => Denoiser::$name(Box::new(config.build(build)?)),)+ })
            }
        }

        $(impl From<$folder::$config> for DenoiserConfig {
            fn from(config: $folder::$config) -> Self {
                Self::$name(config)
            }
        })+
    };
}

families! {
    Sd3 = sd3::Sd3Config;
    // Before FLUX.1, whose checkpoints have no name that these have not.
    Flux2 = flux2::Flux2Config;
    Flux = flux::FluxConfig;
    QwenImage = qwen_image::QwenImageConfig;
    Kandinsky5 = kandinsky5::Kandinsky5Config;
    ZImage = z_image::ZImageConfig;
}

/// A family's config.
pub trait Architecture: DeserializeOwned {
    /// The model, loaded.
    type Model: DenoiserNetwork;

    /// Whether the reference's latents are [samples, frames, height, width, channels].
    const CHANNELS_LAST: bool = false;

    /// The facts of its family, or of the variant that the config is of.
    fn family(&self) -> &'static DiffusionFamily;

    /// Checks that all of it is supported.
    fn check(&self) -> std::result::Result<(), Unsupported>;

    /// The same for the variant that a class of pipelines is for; where that is not in `transformer/config.json`.
    #[must_use]
    fn with_pipeline(self, _class: &str) -> Self {
        self
    }

    /// The same for a model that `model_index.json` says is distilled to few steps, or says nothing of; where the family has
    /// both.
    #[must_use]
    fn with_distillation(self, _is_distilled: bool) -> Self {
        self
    }

    /// The same for the variant that a model's name, in lower case, says; where that is in no other file.
    #[must_use]
    fn with_name(self, _name: &str) -> Self {
        self
    }

    /// The same run as another program does; `None` where all programs do the same.
    fn with_implementation(self, _: Implementation) -> Option<Self> {
        None
    }

    /// The class of the pipeline that a checkpoint is for, by its name in lower case with hyphens.
    fn pipeline_of_file(_stem: &str) -> Option<&'static str> {
        None
    }

    /// See [`DenoiserConfig::of_checkpoint`].
    fn of_checkpoint(catalog: &Catalog, beside: &Path) -> Result<Option<(Self, &'static str)>>;

    /// Asks for every weight, and builds the model.
    fn build(&self, build: &mut ModelBuilder<'_>) -> Result<Self::Model>;

    /// How the original layout calls the weights, if names begin with `prefix` there.
    fn original(&self, prefix: &'static str) -> CheckpointLayout<'static>;

    /// Where a layer lies in the original layout.
    fn original_module(&self, module: &str) -> Vec<TensorPiece>;

    /// Where a layer lies in adapters of a program with a layout of its own.
    fn other_module(&self, _module: &str) -> Option<TensorPiece> {
        None
    }

    /// The latents it takes.
    fn latent_spec(&self) -> LatentSpec;

    /// Checks that its text encoders, in the family's order, have the expected widths; `None` for one that is left out.
    fn check_text(
        &self,
        widths: &[Option<EmbeddingWidths>],
    ) -> std::result::Result<(), Unsupported>;

    /// How the outputs of its text encoders make up its conditioning.
    fn condition_layout(&self) -> ConditionLayout;
}

/// The latents that a model takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentSpec {
    /// Their channels.
    pub channels: usize,
    /// Pixels of a latent along a token's side.
    pub patch_size: usize,
    /// The most tokens along a side, where that is limited.
    pub max_tokens_per_side: Option<usize>,
}

/// A family's model.
pub trait DenoiserNetwork {
    /// The velocity as tokens [samples, tokens, patch · patch · channels].
    fn forward<'m>(
        &'m self,
        tape: &Tape<'m>,
        input: DenoiserInput<'_>,
        recompute: Recompute,
    ) -> Result<Var>;

    /// How latents are cut into tokens.
    fn patches(&self) -> LatentPatches;
}

/// How latents are cut into tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentPatches {
    /// Pixels of a latent along a token's side.
    pub size: usize,
    /// How a token orders its values.
    pub order: PatchOrder,
}

/// The input of a denoiser.
#[derive(Clone, Copy)]
pub struct DenoiserInput<'a> {
    /// Noisy latents: of images [samples, channels, height, width], of clips with frames after the channels.
    pub latents: &'a Tensor,
    /// Latents of the reference images of an editing model, without noise; of each [samples, channels, height, width].
    pub references: &'a [Tensor],
    /// The timestep of each.
    pub timesteps: &'a [Timestep],
    /// The conditioning of each.
    pub condition: &'a Conditions,
    /// The embedded guidance scale of each, for models that take one.
    pub guidance: Option<&'a [f32]>,
    /// The dtype to which families that do so round timesteps and guidance scales: that of the activations, or f32 where
    /// the output is compared with a reference in f32.
    pub time_dtype: Dtype,
}

impl DenoiserInput<'_> {
    /// All images as tokens, the one that is denoised first: [samples, tokens, patch · patch · channels]; and rows and
    /// columns of tokens of each, in a frame.
    pub fn image_tokens(
        &self,
        tape: &Tape<'_>,
        LatentPatches { size: patch, order }: LatentPatches,
    ) -> Result<(Var, Vec<[usize; 2]>)> {
        let images = || std::iter::once(self.latents).chain(self.references);
        let size = |image: &Tensor| frame_size(image).map(|side| side / patch);
        let sizes = images().map(size).collect();
        let tokens = |image: &Tensor| tape.patchify(&image.clone().into(), patch, order);
        if self.references.is_empty() {
            return Ok((tokens(self.latents)?, sizes));
        }
        let parts = images().map(tokens).collect::<compute::Result<Vec<Var>>>()?;
        Ok((tape.concat_tokens(&parts.iter().collect::<Vec<_>>())?, sizes))
    }
}

/// The output of a denoiser: the velocity, from data to noise.
pub struct DenoiserOutput {
    /// [samples, tokens, patch · patch · channels]
    pub tokens: Var,
    /// Height and width of the latents, with frames where these have them.
    size: PatchedSize,
    patches: LatentPatches,
}

impl Denoiser {
    /// The velocity of noisy latents: the one forward pass for training, sampling, tests and benchmarks.
    pub fn predict<'m>(
        &'m self,
        tape: &Tape<'m>,
        input: DenoiserInput<'_>,
        recompute: Recompute,
    ) -> Result<DenoiserOutput> {
        let size = patched_size(input.latents);
        let (tokens, patches) = dispatch!(Self, self, model => {
            (model.forward(tape, input, recompute)?, model.patches())
        });
        Ok(DenoiserOutput { tokens, size, patches })
    }

    /// Latents in the order of a prediction's tokens.
    pub fn patchify(&self, tape: &Tape<'_>, latents: Tensor) -> Result<Tensor> {
        let LatentPatches { size: patch, order } = dispatch!(Self, self, model => model.patches());
        Ok(tape.patchify(&latents.into(), patch, order)?.into_tensor())
    }

    /// Latents from tokens in this order, with so many rows and columns of tokens, or frames, rows and columns.
    pub fn unpatchify(
        &self,
        tape: &Tape<'_>,
        tokens: Tensor,
        size: impl Into<PatchedSize>,
    ) -> Result<Tensor> {
        let LatentPatches { size: patch, order } = dispatch!(Self, self, model => model.patches());
        let size = match size.into() {
            PatchedSize::Image(size) => PatchedSize::Image(size.map(|tokens| tokens * patch)),
            PatchedSize::Clip([frames, rows, columns]) => {
                PatchedSize::Clip([frames, rows * patch, columns * patch])
            }
        };
        Ok(tape.unpatchify(&tokens.into(), size, patch, order)?.into_tensor())
    }
}

impl DenoiserOutput {
    /// As latents, with the rank of the input's.
    pub fn latents(&self, tape: &Tape<'_>) -> Result<Var> {
        let LatentPatches { size: patch, order } = self.patches;
        Ok(tape.unpatchify(&self.tokens, self.size, patch, order)?)
    }

    /// The mean of what errors against a patchified target cost.
    pub fn loss(&self, tape: &Tape<'_>, target: &Tensor, loss: &BatchLoss<'_>) -> Result<Var> {
        let BatchLoss { function: VelocityLoss { kind, threshold }, factors, .. } = *loss;
        let upload = |values: Vec<f32>| tape.device().upload([values.len()], &values);
        let thresholds = kind
            .has_threshold()
            .then(|| upload(loss.sigmas.iter().map(|sigma| threshold.at(*sigma)).collect()));
        let thresholds = thresholds.transpose()?;
        let cost = match (kind, &thresholds) {
            (LossKind::L1, _) => ErrorLoss::Absolute,
            (LossKind::Huber | LossKind::SmoothL1, Some(c)) => ErrorLoss::Huber(c),
            (LossKind::PseudoHuber | LossKind::PseudoSmoothL1, Some(c)) => {
                ErrorLoss::PseudoHuber(c)
            }
            _ => ErrorLoss::Squared,
        };
        let weights = upload(loss.sample_weights())?;
        let weights = ErrorWeights { weights: Some(&weights), mask: None, elements: factors };
        Ok(tape.error_loss(&self.tokens, target, cost, weights)?)
    }
}

impl DenoiserOutput {
    /// The loss of one sample without its weight, as a number alone.
    pub fn sample_loss(
        &self,
        tape: &Tape<'_>,
        target: &Tensor,
        loss: &BatchLoss<'_>,
        at: usize,
    ) -> Result<Var> {
        let own = |tensor: &Tensor| tensor.narrow(at..at + 1);
        let Self { tokens, size, patches } = self;
        let output = Self { tokens: own(tokens.tensor()).into(), size: *size, patches: *patches };
        let factors = loss.factors.map(own);
        let (sigmas, factors) = (&loss.sigmas[at..=at], factors.as_ref());
        output.loss(tape, &own(target), &BatchLoss { sigmas, weights: &[1.0], factors, ..*loss })
    }
}

/// How errors of a batch count.
#[derive(Clone, Copy)]
pub struct BatchLoss<'a> {
    /// What they cost.
    pub function: VelocityLoss,
    /// The share of noise of each sample.
    pub sigmas: &'a [f32],
    /// The weight of each sample.
    pub weights: &'a [f32],
    /// The factor of each value, in the order of tokens; 1 without.
    pub factors: Option<&'a Tensor>,
}

impl BatchLoss<'_> {
    /// Weights, over thresholds where the loss is divided by them.
    fn sample_weights(&self) -> Vec<f32> {
        let VelocityLoss { kind, threshold } = self.function;
        let divisor = |sigma: f32| if kind.is_divided() { threshold.at(sigma) } else { 1.0 };
        self.weights
            .iter()
            .zip(self.sigmas)
            .map(|(weight, sigma)| weight / divisor(*sigma))
            .collect()
    }
}

impl DenoiserConfig {
    /// The facts of its family, or of the variant that it is.
    pub fn family(&self) -> &'static DiffusionFamily {
        dispatch!(Self, self, config => config.family())
    }

    /// All tensors of the model, by diffusers' names.
    pub fn tensor_specs(&self) -> Result<Vec<TensorSpec>> {
        tensor_specs(|build| self.build(build))
    }

    /// How the original layout calls the weights, if names begin with `prefix` there.
    pub fn original(&self, prefix: &'static str) -> CheckpointLayout<'static> {
        dispatch!(Self, self, config => config.original(prefix))
    }

    /// Where a layer lies in the original layout.
    pub fn original_module(&self, module: &str) -> Vec<TensorPiece> {
        dispatch!(Self, self, config => config.original_module(module))
    }

    /// What the original layout calls a norm whose vector is a weight there too; FLUX has a `scale`.
    pub fn original_norm(&self, module: &str) -> Option<String> {
        let pieces = (self.original("").pieces)(&format!("{module}.weight"));
        pieces.first()?.key.strip_suffix(".weight").map(str::to_owned)
    }

    /// Where a layer lies in adapters, the original layout first.
    pub fn adapter_layouts(&self, module: &str) -> Vec<Vec<TensorPiece>> {
        let other = dispatch!(Self, self, config => config.other_module(module));
        let mut layouts = vec![self.original_module(module)];
        layouts.extend(other.map(|piece| vec![piece]));
        layouts
    }

    /// Checks that all of it is supported.
    pub fn check(&self) -> std::result::Result<(), Unsupported> {
        dispatch!(Self, self, config => config.check())
    }

    /// The latents it takes.
    pub fn latent_spec(&self) -> LatentSpec {
        dispatch!(Self, self, config => config.latent_spec())
    }

    /// Checks that text encoders have the widths that the model expects.
    pub fn check_text(
        &self,
        widths: &[Option<EmbeddingWidths>],
    ) -> std::result::Result<(), Unsupported> {
        dispatch!(Self, self, config => config.check_text(widths))
    }

    /// How the outputs of text encoders make up the conditioning.
    pub fn condition_layout(&self) -> ConditionLayout {
        dispatch!(Self, self, config => config.condition_layout())
    }
}

/// Height and width of latents.
fn frame_size(latents: &Tensor) -> [usize; 2] {
    let shape = latents.shape();
    let [.., height, width] = shape.sizes() else { unreachable!("latents have both") };
    [*height, *width]
}

/// The same, with frames where the latents have them.
fn patched_size(latents: &Tensor) -> PatchedSize {
    match (latents.shape().sizes(), frame_size(latents)) {
        ([_, _, frames, _, _], [height, width]) => PatchedSize::Clip([*frames, height, width]),
        (_, size) => PatchedSize::Image(size),
    }
}

fn read_one<C: Architecture>(path: &Path) -> Result<C> {
    config::read_checked(path, C::check)
}
