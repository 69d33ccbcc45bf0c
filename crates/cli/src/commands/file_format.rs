//! The number formats of model files, as they are typed for `--dtype`.

use std::path::Path;

use trainer::TrainerError;
use trainer::export::gguf::GgufMix;
use weights::FileDtype;

use crate::failure::Failure;
use crate::text::name_of;

/// As typed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum FileFormat {
    F32,
    F16,
    Bf16,
    /// 8 bits in blocks of 32, for GGUF files
    #[value(name = "q8_0")]
    Q8_0,
    /// 6 bits in blocks of 256, for GGUF files, as all below
    #[value(name = "q6_k")]
    Q6K,
    /// 5 bits, 6 for tensors that suffer most
    #[value(name = "q5_k_m")]
    Q5KM,
    /// 5 bits
    #[value(name = "q5_k_s")]
    Q5KS,
    /// 4 bits, 6 for tensors that suffer most
    #[value(name = "q4_k_m")]
    Q4KM,
    /// 4 bits, 5 for some tensors of the first layers
    #[value(name = "q4_k_s")]
    Q4KS,
}

impl FileFormat {
    /// The formats of a GGUF file.
    pub fn mix(self) -> GgufMix {
        match self {
            Self::F32 => GgufMix::F32,
            Self::F16 => GgufMix::F16,
            Self::Bf16 => GgufMix::Bf16,
            Self::Q8_0 => GgufMix::Q8_0,
            Self::Q6K => GgufMix::Q6K,
            Self::Q5KM => GgufMix::Q5KM,
            Self::Q5KS => GgufMix::Q5KS,
            Self::Q4KM => GgufMix::Q4KM,
            Self::Q4KS => GgufMix::Q4KS,
        }
    }

    /// The format of a file or folder of safetensors, which has no blocks.
    pub fn plain(self, out: &Path) -> Result<FileDtype, Failure> {
        match self {
            Self::F32 => Ok(FileDtype::F32),
            Self::F16 => Ok(FileDtype::F16),
            Self::Bf16 => Ok(FileDtype::Bf16),
            _ => {
                let name = name_of(&self);
                let problem = format!("{name} is no format of {}", out.display());
                let hint = "write a .gguf file, or choose f16 or bf16";
                Err(TrainerError::Request { problem, hint }.into())
            }
        }
    }
}
