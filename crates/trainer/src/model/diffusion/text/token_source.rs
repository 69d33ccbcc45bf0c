//! The tokens of a text for one encoder: from its tokenizer; or, for a meta model, as many tokens as it
//! would make. A plan depends on their number alone.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{Result, TrainerError};
use crate::model::encoder::tokenizer::{
    EncodedPrompt, PromptTemplate, PromptTokenizer, Truncation,
};

/// Where tokens come from.
pub(super) enum TokenSource {
    /// A tokenizer, and the files it was read from.
    Loaded(Box<PromptTokenizer>, Vec<PathBuf>),
    /// Meta: this many, all the same.
    Meta(usize),
}

impl TokenSource {
    /// A tokenizer's folder, for texts of so many tokens inside of a template.
    pub fn open(folder: &Path, length: usize, template: PromptTemplate) -> Result<Self> {
        let files = files_in(folder)?;
        let tokenizer = PromptTokenizer::open_with(folder, length, template)?;
        Ok(Self::Loaded(Box::new(tokenizer), files))
    }

    /// The tokens of a text.
    pub fn encode(&self, text: &str) -> EncodedPrompt {
        match self {
            Self::Loaded(tokenizer, _) => tokenizer.encode(text),
            Self::Meta(n) => EncodedPrompt { ids: vec![0; *n], n_tokens: *n, dropped: 0 },
        }
    }

    /// The same with so many images before the text, each one token.
    pub fn encode_with_images(&self, text: &str, n_images: usize) -> Vec<u32> {
        match self {
            Self::Loaded(tokenizer, _) => tokenizer.encode_with_images(text, n_images).ids,
            Self::Meta(n) => vec![0; *n],
        }
    }

    /// Tokens that stand for so many images in a template.
    pub fn placeholder_tokens(&self, template: PromptTemplate, n_images: usize) -> usize {
        match self {
            Self::Loaded(tokenizer, _) => tokenizer.placeholder_tokens(n_images),
            Self::Meta(_) => template.images.published_tokens(n_images) + n_images,
        }
    }

    /// The id of a token, if there is one.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        match self {
            Self::Loaded(tokenizer, _) => tokenizer.token_id(token),
            Self::Meta(_) => None,
        }
    }

    /// As many as a text can have.
    pub fn max_tokens(&self) -> usize {
        match self {
            Self::Loaded(tokenizer, _) => tokenizer.max_tokens(),
            Self::Meta(n) => *n,
        }
    }

    /// What of a text is truncated, if anything.
    pub fn truncation<'t>(&self, text: &'t str) -> Option<Truncation<'t>> {
        match self {
            Self::Loaded(tokenizer, _) => tokenizer.truncation(text),
            Self::Meta(_) => None,
        }
    }

    /// Vocabulary size.
    pub fn vocab_size(&self) -> usize {
        match self {
            Self::Loaded(tokenizer, _) => tokenizer.vocab_size(),
            Self::Meta(_) => 1,
        }
    }

    /// The files that tokenisation depends on.
    pub fn sources(&self) -> &[PathBuf] {
        match self {
            Self::Loaded(_, files) => files,
            Self::Meta(_) => &[],
        }
    }
}

/// The plain files of a folder, by name.
fn files_in(folder: &Path) -> Result<Vec<PathBuf>> {
    let io = |source| TrainerError::Io { what: "list", path: folder.into(), source };
    let entries = fs::read_dir(folder).map_err(io)?;
    let paths = entries.map(|entry| entry.map(|entry| entry.path()));
    let mut paths = paths.collect::<std::result::Result<Vec<_>, _>>().map_err(io)?;
    paths.retain(|path| path.is_file());
    paths.sort();
    Ok(paths)
}
