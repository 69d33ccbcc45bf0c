//! The text that a language model is given around a prompt: instructions and the turns of a conversation. It is tokenised
//! with the prompt inside, since a prompt that begins with a line break becomes one token with the line break before it.

/// A prompt template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptTemplate {
    /// Before the prompt.
    pub prefix: &'static str,
    /// After the prompt.
    pub suffix: &'static str,
    /// So many hidden states are dropped, whatever their tokens are: as many as the prefix has tokens in the published
    /// vocabulary.
    pub n_dropped: usize,
}

impl PromptTemplate {
    /// Nothing around a prompt.
    pub const NONE: Self = Self { prefix: "", suffix: "", n_dropped: 0 };

    /// The template with a prompt inside.
    pub(super) fn around(&self, prompt: &str) -> String {
        [self.prefix, prompt, self.suffix].concat()
    }
}
