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
    /// The images between prefix and prompt.
    pub images: TemplateImages,
    /// Whether prompts are filled up to the full length. Nothing attends to what fills them up, which has hidden states too.
    pub is_padded: bool,
}

/// The images that a template has room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TemplateImages {
    /// None.
    None,
    /// Exactly one.
    One,
    /// Any number, each after "Picture" and its number.
    Numbered,
}

/// The token in whose place an image is seen.
pub const IMAGE_TOKEN: &str = "<|image_pad|>";

impl PromptTemplate {
    /// Nothing around a prompt.
    pub const NONE: Self = Self {
        prefix: "",
        suffix: "",
        n_dropped: 0,
        images: TemplateImages::None,
        is_padded: false,
    };

    /// The template with a prompt of text inside.
    pub(super) fn around(&self, prompt: &str) -> String {
        self.around_images(0, prompt)
    }

    /// The same with images before the text.
    pub(super) fn around_images(&self, n_images: usize, prompt: &str) -> String {
        [self.prefix, &self.images.placeholders(n_images), prompt, self.suffix].concat()
    }
}

impl TemplateImages {
    /// Whether a prompt may have so many.
    pub fn allows(self, n: usize) -> bool {
        match self {
            Self::None => n == 0,
            Self::One => n == 1,
            Self::Numbered => true,
        }
    }

    /// How many a prompt may have, for messages.
    pub fn expected(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::One => "one",
            Self::Numbered => "any number",
        }
    }

    /// What stands for so many of them.
    pub(super) fn placeholders(self, n: usize) -> String {
        let vision = format!("<|vision_start|>{IMAGE_TOKEN}<|vision_end|>");
        let placeholder = |number: usize| match self {
            Self::None => String::new(),
            Self::One => vision.clone(),
            Self::Numbered => format!("Picture {number}: {vision}"),
        };
        (1..=n).map(placeholder).collect()
    }

    /// Tokens of the placeholders of so many in the published vocabulary, without those in whose place images are seen:
    /// the start and the end of an image; the word, a space, each digit, a colon, a space.
    pub fn published_tokens(self, n: usize) -> usize {
        let of_one = |number: usize| match self {
            Self::None => 0,
            Self::One => 2,
            Self::Numbered => 6 + number.to_string().len(),
        };
        (1..=n).map(of_one).sum()
    }
}
