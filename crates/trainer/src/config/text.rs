//! `[text]`: the texts that a language model learns from. A job has this section or `[data]`.

use std::path::PathBuf;

use super::data::Validation;
use super::section::section;

section! {
    /// The texts that a language model learns from.
    pub RawText => Text {
        /// A file of text, of JSON lines or of tokens, or a folder of such files
        path: PathBuf = Required, Any;
        /// Tokens of a sequence; shorter documents are put together, longer ones cut
        length: usize = Default(1024), Within(8.0, 1_048_576.0);
        /// A tokenizer.json, or a folder or model that has one; the model's own unless set, bytes where there is none
        tokenizer: Option<PathBuf> = Default(None), Any;
        /// Documents held out to measure the loss on: how many, or below 1 which share
        validation: Validation = Default(Validation::None), Any;
        /// Folder of texts as tokens, which several jobs may share; `cache` in `output.folder` unless set
        cache: Option<PathBuf> = Default(None), Any;
    }
}
