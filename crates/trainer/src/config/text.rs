//! `[text]`: the texts that a language model learns from. A job has this section or `[data]`.

use std::path::PathBuf;

use super::error::ConfigError;
use super::section::section;
use super::source::RawValue;
use super::value::{ConfigValue, words};
use crate::text::{HeldOut, TokenWidth};

section! {
    /// The texts that a language model learns from.
    pub RawText => TextConfig {
        /// A file of text, JSON, CSV or tokens, or a folder of such files; docs/texts.md has the forms
        path: PathBuf = Required, Any;
        /// Tokens of a sequence; shorter documents are put together, longer ones cut
        length: usize = Default(1024), Within(8.0, 1_048_576.0);
        /// A tokenizer.json, or a folder or model that has one; the model's own unless set, bytes where there is none
        tokenizer: Option<PathBuf> = Default(None), Any;
        /// What the loss is measured on and that is not trained on: a share of the documents below 1, or files of their own
        validation: HeldOut = Default(HeldOut::None), Any;
        /// How wide tokens are in files of tokens that do not say so
        token_format: Option<TokenWidth> = Default(None), Any;
        /// Folder of texts as tokens, which several jobs may share; `cache` in `output.folder` unless set
        cache: Option<PathBuf> = Default(None), Any;
    }
}

words!(TokenWidth {
    "u16" => Self::Two,
    "u32" => Self::Four,
});

impl ConfigValue for HeldOut {
    fn accepted() -> String {
        "a share below 1, or a path".into()
    }

    fn read(typed: &RawValue<'_>) -> Result<Self, ConfigError> {
        if typed.value.as_str().is_some() {
            return PathBuf::read(typed).map(Self::Path);
        }
        match f64::read(typed).map_err(|_| typed.refuse(Self::accepted()))? {
            0.0 => Ok(Self::None),
            share if (0.0..1.0).contains(&share) => Ok(Self::Share(share)),
            _ => Err(typed.refuse(Self::accepted())),
        }
    }

    fn write(&self) -> Option<String> {
        match self {
            Self::None => Some("0".into()),
            Self::Share(share) => share.write(),
            Self::Path(path) => path.write(),
        }
    }
}
