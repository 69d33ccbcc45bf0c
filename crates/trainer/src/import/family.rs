//! The models that both hearth and other trainers know, as far as an import depends on them.

use super::mapping::Mapping;

/// A family of models.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ForeignFamily {
    Sd3,
    Flux,
    Flux2Klein,
    QwenImage,
    Kandinsky5Image,
    Kandinsky5Video,
    ZImage,
}

/// What hearth trains, for whoever asks for something else.
pub(super) const TRAINED: &str =
    "hearth trains SD3, FLUX.1, FLUX.2 klein, Qwen-Image, Kandinsky 5, Z-Image and language models";

/// Z-Image Turbo with its distillation trained away: a transformer alone, whose other parts are Turbo's.
pub(super) const Z_IMAGE_DE_TURBO: &str =
    "hf:ostris/Z-Image-De-Turbo/z_image_de_turbo_v1_bf16.safetensors";
pub(super) const Z_IMAGE_TURBO: &str = "Tongyi-MAI/Z-Image-Turbo";

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
            Self::Flux | Self::QwenImage | Self::ZImage => "ai-toolkit",
            // FLUX.2 has its modulations outside of them.
            Self::Sd3 | Self::Flux2Klein | Self::Kandinsky5Image | Self::Kandinsky5Video => "kohya",
        }
    }

    /// Refuses a checkpoint of FLUX.2 that is not klein, by its name.
    pub fn refuse_dev(self, mapping: &mut Mapping, from: &str, name: &str) {
        let name = name.to_lowercase().replace(['.', '_'], "-");
        let is_dev = ["flux-2-dev", "flux2-dev"].iter().any(|dev| name.contains(dev));
        if self == Self::Flux2Klein && is_dev {
            mapping.refuse(from, "hearth trains FLUX.2 klein, not dev");
        }
    }
}

/// Tells that queries, keys and values are one layer there.
pub(super) fn tell_fused(mapping: &mut Mapping, from: &str) {
    let why = "q, k and v of a block have a LoRA each; there they are one layer, and share the lower half";
    mapping.differs(from, why);
}
