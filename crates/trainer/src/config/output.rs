//! `[output]`: what is written, and where.

use std::path::PathBuf;

use machine::Bytes;
use weights::write::SHARD_BYTES;

use super::error::ConfigError;
use super::section::section;
use super::source::RawValue;
use super::value::{ConfigValue, Switch, lists, quoted, words};
use crate::model::adapter::AdapterFormat;

section! {
    /// What is written, and where.
    pub RawOutput => OutputConfig {
        /// Output folder: checkpoints, samples, the adapter or model, the report
        folder: PathBuf = Default("output".into()), Any;
        /// File name of the adapter (kohya: `output_name`)
        name: FileName = Default(FileName("adapter".into())), Any;
        /// Steps between checkpoints (kohya: `save_every_n_steps`)
        save_every: Switch<u64> = Default(Switch::On(250)), AtLeast(1.0);
        /// Number of latest checkpoints to keep
        keep: usize = Default(3), AtLeast(1.0);
        /// Also keep the checkpoint with the lowest validation loss, and save one at every new minimum
        keep_best: bool = Default(true), Any;
        /// Largest file of a checkpoint or model; larger ones are sharded (diffusers: `max_shard_size`)
        max_shard_size: Bytes = Default(Bytes(SHARD_BYTES)), Any;
        /// Formats of the adapter file. `loha` and `lokr`: `peft` if not set; with `adapter.train_norm`: `comfyui`
        formats: Vec<AdapterFormat> = Default(vec![AdapterFormat::Diffusers]), Filled;
        /// License named in the model card, such as `cc-by-4.0`
        license: Option<String> = Default(None), Filled;
        /// Author named in the model card
        author: Option<String> = Default(None), Filled;
        /// Also write the run for TensorBoard, into `tensorboard` in the output folder
        tensorboard: bool = Default(false), Any;
    }
}

words!(AdapterFormat {
    "diffusers" => Self::Diffusers,
    "peft" => Self::Peft,
    "kohya" => Self::Kohya,
    "comfyui" => Self::Comfyui,
});

lists!(AdapterFormat: "diffusers, peft, kohya, comfyui");

/// A name that every system takes for a file, and none for a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileName(String);

impl FileName {
    /// As text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl ConfigValue for FileName {
    fn accepted() -> String {
        "a file name without / \\ : * ? \" < >".into()
    }

    fn read(typed: &RawValue<'_>) -> Result<Self, ConfigError> {
        let is_plain = |name: &&str| {
            let odd = |c: char| c.is_control() || "/\\:*?\"<>|".contains(c);
            !name.trim().is_empty() && !name.starts_with('.') && !name.contains(odd)
        };
        let name = typed.value.as_str().filter(is_plain);
        name.map(|name| Self(name.into())).ok_or_else(|| typed.refuse(Self::accepted()))
    }

    fn write(&self) -> Option<String> {
        Some(quoted(&self.0))
    }
}
