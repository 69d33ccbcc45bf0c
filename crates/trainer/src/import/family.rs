//! The models that both hearth and other trainers know, as far as an import depends on them.

/// A family of models.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ForeignFamily {
    Sd3,
    Flux,
    QwenImage,
    Kandinsky5Image,
    Kandinsky5Video,
}

/// What hearth trains, for whoever asks for something else.
pub(super) const TRAINED: &str =
    "hearth trains SD3, FLUX.1, Qwen-Image, Kandinsky 5 and language models";

impl ForeignFamily {
    /// By the name of a model, as the hub has it.
    pub fn by_name(name: &str) -> Option<Self> {
        let name = name.to_lowercase();
        let has = |part: &str| name.contains(part);
        if has("kandinsky-5") || has("kandinsky5") {
            let is_image = has("t2i") || has("i2i");
            return Some(if is_image { Self::Kandinsky5Image } else { Self::Kandinsky5Video });
        }
        let is_flux = (has("flux.1") || has("flux1")) && !has("flux.2");
        match () {
            () if is_flux => Some(Self::Flux),
            () if has("qwen-image") || has("qwen_image") => Some(Self::QwenImage),
            () if has("stable-diffusion-3") || has("sd3") => Some(Self::Sd3),
            () => None,
        }
    }

    /// The word for all linear layers of its blocks, modulations too.
    pub fn all_layers(self) -> &'static str {
        match self {
            Self::Flux | Self::QwenImage => "ai-toolkit",
            Self::Sd3 | Self::Kandinsky5Image | Self::Kandinsky5Video => "kohya",
        }
    }
}
