//! `[output]`: what is written, and where.

use std::path::PathBuf;

use super::error::ConfigError;
use super::section::section;
use super::source::RawValue;
use super::value::{ConfigValue, Switch, lists, quoted, words};
use crate::model::adapter::AdapterFormat;

section! {
    /// What is written, and where.
    pub RawOutput => OutputConfig {
        /// Folder for checkpoints, samples, the adapter and its report
        folder: PathBuf = Default("output".into()), Any;
        /// What the adapter's files are called
        name: FileName = Default(FileName("adapter".into())), Any;
        /// Steps between two checkpoints
        save_every: Switch<u64> = Default(Switch::On(250)), AtLeast(1.0);
        /// Checkpoints kept, the latest
        keep: usize = Default(3), AtLeast(1.0);
        /// Keep the checkpoint with the lowest held-out loss too, and save one at every new low
        keep_best: bool = Default(true), Any;
        /// Programs that the adapter is written for
        formats: Vec<AdapterFormat> = Default(vec![AdapterFormat::Diffusers]), Filled;
        /// Licence named in the model card, such as `cc-by-4.0`
        license: Option<String> = Default(None), Filled;
        /// Author named in the model card
        author: Option<String> = Default(None), Filled;
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
