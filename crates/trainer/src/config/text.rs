//! `[text]`: the texts that a language model learns from. A job has this section or `[data]`.

use std::path::PathBuf;

use super::error::ConfigError;
use super::model_path::ModelPath;
use super::section::section;
use super::source::RawValue;
use super::value::{ConfigValue, words};
use crate::text::{HeldOut, TokenWidth};

section! {
    /// The texts that a language model learns from.
    pub RawText => TextConfig {
        /// Training text: a file of text, JSON, CSV or tokens, or a folder of such files; formats in docs/texts.md
        path: PathBuf = Required, Any;
        /// Sequence length in tokens; short documents are packed together, long ones split
        length: usize = Default(1024), Within(8.0, 1_048_576.0);
        /// tokenizer.json, or a folder or model with one, or the name of a model. Not set: that of the base, or bytes if it has none
        tokenizer: Option<ModelPath> = Default(None), Any;
        /// Text held out for validation: a share of the documents below 1, or the path of other files
        validation: HeldOut = Default(HeldOut::None), Any;
        /// Use files outside a folder too, which links in it lead to
        follow_links: bool = Default(false), Any;
        /// Integer width of token files that do not state it
        token_format: Option<TokenWidth> = Default(None), Any;
        /// Folder of cached tokens, may be shared by jobs. Not set: `cache` in `output.folder`
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
