//! `[base]`: the model that is trained, and how it is held.

use compute::{Dtype, Quantisation};

use super::model_path::ModelPath;
use super::section::section;
use super::value::words;
use crate::model::diffusion::implementation::Implementation;
use crate::model::diffusion::paths::PartPaths;

section! {
    /// The model that is trained, and how it is held.
    pub RawBase => BaseConfig {
        /// Model to train: a diffusers or transformers folder, a checkpoint file, or a GGUF file of a language model or FLUX.1; or the name of one that `hearth fetch` downloaded, such as `black-forest-labs/FLUX.1-dev`
        path: ModelPath = Required, Any;
        /// Folder with what a checkpoint file lacks: a diffusers folder, or one with `tokenizer/` and `tokenizer_2/` alone
        rest: Option<ModelPath> = Default(None), Any;
        /// VAE of a checkpoint file, such as `ae.safetensors`. Not set: in `base.rest`, or beside the checkpoint
        vae: Option<ModelPath> = Default(None), Any;
        /// Text encoders of a checkpoint file, such as `clip_l.safetensors` and `t5xxl_fp16.safetensors`. Empty: in `base.rest`, or beside the checkpoint
        text_encoders: Vec<ModelPath> = Default(Vec::new()), Any;
        /// Whose prompt templates and sigmas Kandinsky 5 is run with: `original`, its authors', or `diffusers`. Not set: `original`
        implementation: Option<Implementation> = Default(None), Any;
        /// LoRA that acts on the frozen base in training alone, and not in samples nor in the result: one that undoes distillation, such as `ostris/zimage_turbo_training_adapter` for Z-Image Turbo. A file, a folder, or a name on the hub
        training_adapter: Option<ModelPath> = Default(None), Any;
        /// Train from scratch: the weights of the base are replaced by random ones
        random_init: bool = Default(false), Any;
        /// Data type of activations, and of weights that are not quantised
        dtype: Dtype = Default(Dtype::Bf16), Any;
        /// Quantisation of frozen weights (QLoRA with `nf4`): less memory, less precision. Not set: the plan chooses
        quantise: Option<Quantisation> = Default(None), Any;
        /// Quantisation of the text encoders while captions are encoded. Not set: the plan chooses
        quantise_encoders: Option<Quantisation> = Default(None), Any;
    }
}

impl BaseConfig {
    /// Where the parts are that a checkpoint lacks.
    pub fn parts(&self) -> PartPaths {
        let Self { rest, vae, text_encoders, implementation, training_adapter, .. } = self;
        PartPaths {
            rest: rest.as_ref().map(Into::into),
            vae: vae.as_ref().map(Into::into),
            text_encoders: text_encoders.iter().map(Into::into).collect(),
            implementation: *implementation,
            training_adapter: training_adapter.as_ref().map(Into::into),
        }
    }
}

words!(Dtype {
    "f32" => Self::F32,
    "bf16" => Self::Bf16,
    "f16" => Self::F16,
});

words!(Option<Implementation> {
    "original" => Some(Implementation::Original),
    "diffusers" => Some(Implementation::Diffusers),
});

words!(Option<Quantisation> {
    "none" => None,
    "int8" => Some(Quantisation::Int8),
    "nf4" => Some(Quantisation::Nf4),
    "fp8" => Some(Quantisation::Fp8),
});
