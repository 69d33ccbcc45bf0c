//! Why a tokenizer could not be opened: one variant per cause.

use std::io;
use std::path::{Path, PathBuf};

/// Everything that can go wrong with the files of a tokenizer.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// An I/O error.
    #[error("cannot read {}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A folder without the files of a tokenizer.
    #[error("no tokenizer: looked for {}: {}", looked_for.join(", then for "), folder.display())]
    Missing {
        /// The files that make one, in the order in which they were looked for.
        looked_for: &'static [&'static str],
        /// The folder.
        folder: PathBuf,
    },
    /// A vocabulary in a format that is not supported.
    #[error("only a SentencePiece model, no tokenizer.json beside {}", path.display())]
    SentencePiece {
        /// The file.
        path: PathBuf,
    },
    /// Invalid JSON, or JSON of another structure.
    #[error("invalid JSON at line {line}, column {column}: {problem}: {}", path.display())]
    Json {
        /// From 1.
        line: usize,
        /// From 1; 0 if the line is empty.
        column: usize,
        /// What is wrong there.
        problem: String,
        /// The file.
        path: PathBuf,
    },
    /// The file is valid JSON with invalid content.
    #[error("tokenizer file is malformed: {problem}: {}", path.display())]
    Malformed {
        /// What is wrong, with both values.
        problem: String,
        /// The file.
        path: PathBuf,
    },
    /// A tokenizer of a model that is not known here.
    #[error("tokenizer of class {class}, known are CLIPTokenizer, T5Tokenizer and Qwen2Tokenizer: {}", path.display())]
    UnknownClass {
        /// As the file says.
        class: String,
        /// The file that says so.
        path: PathBuf,
    },
    /// A part of a tokenizer that is not known here.
    #[error("{part} is {found}, known are {}: {}", known.join(", "), path.display())]
    UnknownPart {
        /// What the file calls the part.
        part: &'static str,
        /// What it is.
        found: String,
        /// What it can be.
        known: &'static [&'static str],
        /// The file.
        path: PathBuf,
    },
    /// A text that could not be turned into tokens.
    #[error("text cannot be turned into tokens: {problem}")]
    Text {
        /// The tokenizer's error.
        problem: String,
    },
    /// Padding or truncation on the wrong side.
    #[error("{setting} is {found}, the encoders need right: {}", path.display())]
    Side {
        /// The setting's name in the file.
        setting: &'static str,
        /// What it is set to.
        found: String,
        /// The file.
        path: PathBuf,
    },
    /// The settings remove a special token that is needed.
    #[error("no {role} in the tokenizer's settings: {}", folder.display())]
    NoSpecialToken {
        /// The token's name in the settings, as `pad_token`.
        role: &'static str,
        /// The folder.
        folder: PathBuf,
    },
    /// The settings name a token that has no id.
    #[error("{role} is {token:?}, which is not in the vocabulary: {}", folder.display())]
    SpecialToken {
        /// The token's name in the settings, as `pad_token`.
        role: &'static str,
        /// The token.
        token: String,
        /// The folder.
        folder: PathBuf,
    },
    /// No room for a text between BOS and EOS.
    #[error("a length of {length} tokens, the special tokens alone take {needed}")]
    TooShort {
        /// Requested length.
        length: usize,
        /// Special tokens of every text.
        needed: usize,
    },
}

impl TokenizerError {
    pub(crate) fn io(path: &Path, source: io::Error) -> Self {
        Self::Io { path: path.into(), source }
    }

    pub(crate) fn json(path: &Path, error: &serde_json::Error) -> Self {
        let (line, column) = (error.line(), error.column());
        let text = error.to_string();
        let problem = text.strip_suffix(&format!(" at line {line} column {column}"));
        Self::Json { line, column, problem: problem.unwrap_or(&text).into(), path: path.into() }
    }

    pub(crate) fn malformed(path: &Path, problem: impl Into<String>) -> Self {
        Self::Malformed { problem: problem.into(), path: path.into() }
    }

    /// What the user can do about it.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Io { source, .. } => match source.kind() {
                io::ErrorKind::NotADirectory => "give the folder that the tokenizer's files are in",
                _ => "check the permissions of the file and its folder",
            },
            Self::Missing { .. } => "check the path, or download the model's tokenizer folders too",
            Self::SentencePiece { .. } => {
                "write a tokenizer.json, with transformers in Python: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            }
            Self::Json { .. } | Self::Malformed { .. } => {
                "download the file again, or ask its author"
            }
            Self::UnknownClass { .. } => "give the folder of a CLIP, T5 or Qwen2 tokenizer",
            Self::UnknownPart { .. } => "give the tokenizer of a model that hearth trains",
            Self::Text { .. } => "download the tokenizer's files again, all from one model",
            Self::Side { .. } | Self::NoSpecialToken { .. } | Self::SpecialToken { .. } => {
                "take all files of the folder from one and the same model"
            }
            Self::TooShort { .. } => "ask for more tokens per text",
        }
    }
}
