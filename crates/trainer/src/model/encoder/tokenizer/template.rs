//! The text that a language model is given around a prompt: instructions and the turns of a conversation.
//!
//! It is kept as token ids, and decoded by the tokenizer: the reference tokenises the text as a whole, and a prompt that
//! begins with a line break becomes one token with the line break before it.

use std::path::Path;

use super::TokenizerError;

/// A prompt template, by the ids of its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptTemplate {
    /// Before the prompt. As many hidden states are dropped, whatever the tokens are.
    pub prefix: &'static [u32],
    /// After the prompt.
    pub suffix: &'static [u32],
}

impl PromptTemplate {
    /// Nothing around a prompt.
    pub const NONE: Self = Self { prefix: &[], suffix: &[] };
}

/// The same as text.
pub(super) struct TemplateText {
    template: PromptTemplate,
    pub(super) prefix: String,
    suffix: String,
}

impl TemplateText {
    /// Checks that an empty prompt gives the ids of the template.
    pub fn decode(
        tokenizer: &tokenizers::Tokenizer,
        template: PromptTemplate,
        folder: &Path,
    ) -> Result<Self, TokenizerError> {
        let text = |ids: &[u32]| {
            let decoded = tokenizer.decode(ids, false);
            decoded.map_err(|error| TokenizerError::Text { problem: error.to_string() })
        };
        let (prefix, suffix) = (text(template.prefix)?, text(template.suffix)?);
        let decoded = Self { template, prefix, suffix };
        let found = tokenizer.encode_fast(decoded.around(""), false);
        let found = found.map_err(|error| TokenizerError::Text { problem: error.to_string() })?;
        let expected = template.prefix.iter().chain(template.suffix);
        let mut expected = expected.copied().enumerate();
        let got = |at: usize| found.get_ids().get(at);
        match expected.find(|(at, id)| got(*at) != Some(id)) {
            None => Ok(decoded),
            Some((at, expected)) => Err(TokenizerError::Template {
                position: at + 1,
                expected,
                got: got(at).map_or_else(|| "missing".into(), u32::to_string),
                folder: folder.into(),
            }),
        }
    }

    /// The template with a prompt inside.
    pub fn around(&self, prompt: &str) -> String {
        [&self.prefix, prompt, &self.suffix].concat()
    }

    /// Tokens before a prompt.
    pub fn n_prefix(&self) -> usize {
        self.template.prefix.len()
    }

    /// Tokens after a prompt.
    pub fn n_suffix(&self) -> usize {
        self.template.suffix.len()
    }
}
