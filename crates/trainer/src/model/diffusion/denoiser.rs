//! The model that takes noise away, of whatever family. A family is a folder here and a line in `families!`; what it
//! has to say is [`Architecture`] (its settings, before anything is loaded) and [`Network`] (the loaded model).

use std::path::Path;

use compute::ops::PatchOrder;
use compute::{Tape, Tensor, Var};
use serde::de::DeserializeOwned;
use weights::Catalog;

use super::condition::{Condition, Conditions};
use super::family::Family;
use super::text::{Encoded, Widths};
use super::{flux, sd3};
use crate::error::Result;
use crate::model::build::{Builder, Want, wants};
use crate::model::config::{self, Unsupported};
use crate::model::files::Layout;
use crate::model::piece::Piece;
use crate::model::recompute::Recompute;
use crate::objective::flow::Level;

/// Every family: the name of its variants, and its folder.
macro_rules! families {
    ($($name:ident = $folder:ident;)+) => {
        /// A family's settings: what `transformer/config.json` says.
        #[derive(Clone, Debug)]
        pub enum Config {
            $(#[doc = concat!("Of `", stringify!($folder), "`.")] $name($folder::Config),)+
        }

        /// A family's model, loaded.
        pub enum Denoiser {
            $(#[doc = concat!("Of `", stringify!($folder), "`.")] $name(Box<<$folder::Config as Architecture>::Model>),)+
        }

        /// Does the same with whichever settings or model it is.
        macro_rules! dispatch {
            ($kind:ident, $it:expr, $inner:ident => $work:expr) => {
                match $it { $($kind::$name($inner) => $work,)+ }
            };
        }

        /// All families.
        pub const FAMILIES: &[&Family] = &[$(&$folder::FAMILY),+];

        impl Config {
            /// Reads the settings of a family's folder and checks them.
            pub fn read(family: &Family, path: &Path) -> Result<Self> {
                $(if family.name == $folder::FAMILY.name {
                    return read_one(path).map(Self::$name);
                })+
                unreachable!("every family is in the list")
            }

            /// Of a checkpoint in the family's original layout, by the shapes of its tensors, and what the names of
            /// the model begin with there. `beside` is the folder of a model of the same family.
            pub fn of_checkpoint(
                family: &Family,
                catalog: &Catalog,
                beside: &Path,
            ) -> Result<Option<(Self, &'static str)>> {
                $(if family.name == $folder::FAMILY.name {
                    let found = <$folder::Config as Architecture>::of_checkpoint(catalog, beside)?;
                    return Ok(found.map(|(config, prefix)| (Self::$name(config), prefix)));
                })+
                unreachable!("every family is in the list")
            }

            /// Puts the model together.
            pub fn build(&self, build: &mut Builder<'_>) -> Result<Denoiser> {
                Ok(match self { $(Self::$name(config) => Denoiser::$name(Box::new(config.build(build)?)),)+ })
            }

            /// The family.
            pub fn family(&self) -> &'static Family {
                match self { $(Self::$name(_) => &$folder::FAMILY,)+ }
            }
        }

        $(impl From<$folder::Config> for Config {
            fn from(config: $folder::Config) -> Self {
                Self::$name(config)
            }
        })+
    };
}

families! {
    Sd3 = sd3;
    Flux = flux;
}

/// What a family's settings say.
pub trait Architecture: DeserializeOwned {
    /// The model, loaded.
    type Model: Network;

    /// That all of it can be computed.
    fn check(&self) -> std::result::Result<(), Unsupported>;

    /// See [`Config::of_checkpoint`].
    fn of_checkpoint(catalog: &Catalog, beside: &Path) -> Result<Option<(Self, &'static str)>>;

    /// Asks for every weight, and puts the model together.
    fn build(&self, build: &mut Builder<'_>) -> Result<Self::Model>;

    /// How the original layout calls the weights, if names begin with `prefix` there.
    fn original(&self, prefix: &'static str) -> Layout<'static>;

    /// Where a layer lies in the original layout.
    fn original_module(&self, module: &str) -> Vec<Piece>;

    /// The latents it takes.
    fn latents(&self) -> Latents;

    /// That its text encoders, in the family's order, give what it expects; none of an encoder that is left out.
    fn check_text(&self, widths: &[Option<Widths>]) -> std::result::Result<(), Unsupported>;

    /// A prompt as the model sees it: what each text encoder made of it, and the number of its tokens.
    fn condition(&self, encoded: &[(usize, Encoded)]) -> Condition;
}

/// The latents that a model takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Latents {
    /// Their channels.
    pub channels: usize,
    /// Pixels of a latent along a token's side.
    pub patch: usize,
    /// The most tokens along a side, where that is limited.
    pub most_tokens: Option<usize>,
}

/// A family's model.
pub trait Network {
    /// The velocity as tokens [samples, tokens, patch · patch · channels].
    fn forward<'m>(
        &'m self,
        tape: &Tape<'m>,
        input: Input<'_>,
        recompute: Recompute,
    ) -> Result<Var>;

    /// Pixels of a latent along a token's side, and how a predicted token lists them.
    fn patches(&self) -> (usize, PatchOrder);
}

/// What is predicted from.
#[derive(Clone, Copy)]
pub struct Input<'a> {
    /// Noisy latents [samples, channels, height, width].
    pub latents: &'a Tensor,
    /// How noisy each is.
    pub levels: &'a [Level],
    /// What the model is told of each.
    pub condition: &'a Conditions,
    /// How closely each prompt is to be followed, where the model is told.
    pub guidance: Option<&'a [f32]>,
}

/// What a model predicted: the velocity, from data to noise.
pub struct Prediction {
    /// [samples, tokens, patch · patch · channels]
    pub tokens: Var,
    /// Height and width of the latents.
    size: [usize; 2],
    patches: (usize, PatchOrder),
}

impl Denoiser {
    /// The velocity of noisy latents: the one way through a model, for training, sampling, proofs and measurements.
    pub fn predict<'m>(
        &'m self,
        tape: &Tape<'m>,
        input: Input<'_>,
        recompute: Recompute,
    ) -> Result<Prediction> {
        let shape = input.latents.shape();
        let size = [shape.sizes()[2], shape.sizes()[3]];
        let (tokens, patches) = dispatch!(Self, self, model => {
            (model.forward(tape, input, recompute)?, model.patches())
        });
        Ok(Prediction { tokens, size, patches })
    }

    /// Latents in the order of a prediction's tokens.
    pub fn arrange(&self, tape: &Tape<'_>, latents: Tensor) -> Result<Tensor> {
        let (patch, order) = dispatch!(Self, self, model => model.patches());
        Ok(tape.patchify(&latents.into(), patch, order)?.into_tensor())
    }

    /// Latents of tokens in this order, so many rows and columns of them.
    pub fn unpack(&self, tape: &Tape<'_>, tokens: Tensor, size: [usize; 2]) -> Result<Tensor> {
        let (patch, order) = dispatch!(Self, self, model => model.patches());
        let size = size.map(|tokens| tokens * patch);
        Ok(tape.unpatchify(&tokens.into(), size, patch, order)?.into_tensor())
    }
}

impl Prediction {
    /// As latents [samples, channels, height, width].
    pub fn latents(&self, tape: &Tape<'_>) -> Result<Var> {
        let (patch, order) = self.patches;
        Ok(tape.unpatchify(&self.tokens, self.size, patch, order)?)
    }

    /// The mean square of its distance from a target that was arranged as it is, each sample by its weight.
    pub fn loss(&self, tape: &Tape<'_>, target: &Tensor, weights: &[f32]) -> Result<Var> {
        let weights = tape.device().upload([weights.len()], weights)?;
        Ok(tape.mse(&self.tokens, target, Some(&weights), None)?)
    }
}

impl Config {
    /// All tensors of the model, by our names, which are those of diffusers.
    pub fn tensors(&self) -> Result<Vec<Want>> {
        wants(|build| self.build(build))
    }

    /// How the original layout calls the weights, if names begin with `prefix` there.
    pub fn original(&self, prefix: &'static str) -> Layout<'static> {
        dispatch!(Self, self, config => config.original(prefix))
    }

    /// Where a layer lies in the original layout.
    pub fn original_module(&self, module: &str) -> Vec<Piece> {
        dispatch!(Self, self, config => config.original_module(module))
    }

    /// The latents it takes.
    pub fn latents(&self) -> Latents {
        dispatch!(Self, self, config => config.latents())
    }

    /// That text encoders give what the model expects.
    pub fn check_text(&self, widths: &[Option<Widths>]) -> std::result::Result<(), Unsupported> {
        dispatch!(Self, self, config => config.check_text(widths))
    }

    /// A prompt as the model sees it.
    pub fn condition(&self, encoded: &[(usize, Encoded)]) -> Condition {
        dispatch!(Self, self, config => config.condition(encoded))
    }
}

fn read_one<C: Architecture>(path: &Path) -> Result<C> {
    config::read_checked(path, C::check)
}
