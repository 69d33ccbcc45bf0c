//! What text encoders are given.

use std::fmt;
use std::sync::Arc;

use crate::error::Result;
use crate::pixels::Pixels;

/// A prompt: its text, and the images that an editing model sees with it.
#[derive(Clone, Debug, Default)]
pub struct Prompt {
    /// The text.
    pub text: String,
    /// The images, in their order.
    pub images: Vec<PromptImage>,
}

/// An image of a prompt, read when it is encoded.
#[derive(Clone)]
pub struct PromptImage {
    /// Width and height, before the encoder scales it once more.
    pub size: [u32; 2],
    /// Reads it, in this size. Images with one reader are one image, which is encoded once.
    pub read: Arc<dyn Fn() -> Result<Pixels> + Send + Sync>,
}

impl Prompt {
    /// The same with this text if it has none.
    pub(super) fn or_empty(&self, empty: &str) -> Self {
        let is_empty = self.text.is_empty();
        let text = if is_empty { empty.to_owned() } else { self.text.clone() };
        Self { text, images: self.images.clone() }
    }
}

impl From<String> for Prompt {
    fn from(text: String) -> Self {
        Self { text, images: Vec::new() }
    }
}

impl From<&str> for Prompt {
    fn from(text: &str) -> Self {
        text.to_owned().into()
    }
}

impl fmt::Debug for PromptImage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PromptImage").field("size", &self.size).finish_non_exhaustive()
    }
}

/// What is encoded.
#[derive(Clone, Copy)]
pub(super) enum PromptTexts<'a> {
    /// These.
    Given(&'a [Prompt]),
    /// In a dry run: so many, as long as an encoder can see, with images of these sizes.
    Longest { n: usize, images: &'a [[u32; 2]] },
}

impl PromptTexts<'_> {
    pub fn len(self) -> usize {
        match self {
            Self::Given(prompts) => prompts.len(),
            Self::Longest { n, .. } => n,
        }
    }

    /// How many images each prompt has; of those of a dry run, which are alike, one.
    pub fn image_counts(self) -> Vec<usize> {
        match self {
            Self::Given(prompts) => prompts.iter().map(|prompt| prompt.images.len()).collect(),
            Self::Longest { images, .. } => vec![images.len()],
        }
    }
}
