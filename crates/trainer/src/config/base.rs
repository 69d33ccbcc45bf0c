//! `[base]`: the model that is trained, and how it is held.

use std::path::PathBuf;

use compute::{Dtype, Quantisation};

use super::section::section;
use super::value::words;

section! {
    /// The model that is trained, and how it is held.
    pub RawBase => BaseConfig {
        /// The model: a folder as diffusers saves it, or one checkpoint file
        path: PathBuf = Required, Any;
        /// Folder with what a checkpoint file lacks (encoders, tokenizers, VAE)
        rest: Option<PathBuf> = Default(None), Any;
        /// Whether the model begins with random weights instead of its own, to be trained from scratch
        fresh: bool = Default(false), Any;
        /// Format of activations, and of weights that are not quantised
        dtype: Dtype = Default(Dtype::Bf16), Any;
        /// How the frozen matrices are held; saves memory and costs precision. Not set: the plan chooses
        quantise: Option<Quantisation> = Default(None), Any;
        /// The same for text encoders while captions are encoded. Not set: the plan chooses
        quantise_encoders: Option<Quantisation> = Default(None), Any;
    }
}

words!(Dtype {
    "f32" => Self::F32,
    "bf16" => Self::Bf16,
    "f16" => Self::F16,
});

words!(Option<Quantisation> {
    "none" => None,
    "int8" => Some(Quantisation::Int8),
    "nf4" => Some(Quantisation::Nf4),
    "fp8" => Some(Quantisation::Fp8),
});
