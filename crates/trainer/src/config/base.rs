//! `[base]`: the model that is trained, and how it is held.

use compute::{Dtype, Quantisation};

use super::adapter::AdapterKind;
use super::error::ConfigError;
use super::model_path::ModelPath;
use super::section::{ResolvedKeys, section};
use super::source::ValueOrigin;
use super::train::exclude;
use super::value::{quoted, words};
use crate::model::build::Precision;
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
        /// LoRA that acts on the frozen base in training alone, and not in samples nor in the result: one that undoes distillation, such as `hf:ostris/zimage_turbo_training_adapter/zimage_turbo_training_adapter_v2.safetensors` for Z-Image Turbo. A file, a folder, or a name on the hub
        training_adapter: Option<ModelPath> = Default(None), Any;
        /// Train from scratch: the weights of the base are replaced by random ones
        random_init: bool = Default(false), Any;
        /// Data type of activations, and of weights that are not quantised
        dtype: Dtype = Default(Dtype::Bf16), Any;
        /// Quantisation of frozen weights (QLoRA with `nf4`): less memory, less precision. Not set: the plan chooses
        quantise: Option<Quantisation> = Default(None), Any;
        /// Data type that frozen layers multiply in: `dtype`, that of `base.dtype`; `fp8`: about half the time of a matmul, less precision (docs/numerics.md). For NVIDIA GPUs with fp8 tensor cores; the base is held in fp8
        compute: ComputeType = Default(ComputeType::Dtype), Any;
        /// Quantisation of the text encoders while captions are encoded. Not set: the plan chooses
        quantise_encoders: Option<Quantisation> = Default(None), Any;
    }
}

/// What frozen layers multiply in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComputeType {
    /// The data type of activations.
    Dtype,
    /// fp8 (e4m3), by tensor cores.
    Fp8,
}

/// Holds the base in fp8 if it is multiplied so. Refuses what excludes that: rounded activations are as good as those
/// of 16 bits at best, only a frozen base is held in fp8, and no other quantisation can be multiplied so.
pub(super) fn apply_fp8(
    base: &mut BaseConfig,
    adapter: AdapterKind,
    rows: &mut ResolvedKeys,
) -> Result<(), ConfigError> {
    if base.compute == ComputeType::Dtype {
        return Ok(());
    }
    if rows.origin("base.quantise").is_some_and(ValueOrigin::is_default) {
        base.quantise = Some(Quantisation::Fp8);
        rows.replace("base.quantise", &base.quantise);
    }
    let (other, needed) = if base.dtype == Dtype::F32 {
        ("base.dtype", "bf16")
    } else if adapter == AdapterKind::Full {
        ("adapter.kind", "lora")
    } else if base.quantise != Some(Quantisation::Fp8) {
        ("base.quantise", "fp8")
    } else {
        return Ok(());
    };
    exclude("base.compute", other, quoted(needed), rows)
}

impl BaseConfig {
    /// How the model that is trained is held.
    pub fn precision(&self) -> Precision {
        let multiplies_fp8 = self.compute == ComputeType::Fp8;
        Precision { base: self.quantise, multiplies_fp8, ..Precision::plain(self.dtype) }
    }

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

words!(ComputeType {
    "dtype" => Self::Dtype,
    "fp8" => Self::Fp8,
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
