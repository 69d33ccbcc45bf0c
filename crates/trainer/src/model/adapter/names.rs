//! What other programs call a layer in the files of adapters.
//!
//! | written by | a layer's name there |
//! |---|---|
//! | diffusers, ai-toolkit | `transformer.<layer>.lora_A.weight`; alpha in the header, or none |
//! | PEFT | `base_model.model.<layer>.lora_A.weight`; alpha in `adapter_config.json` beside |
//! | kohya | `lora_unet_<original layer, dots as _>.lora_down.weight`; `.alpha` |
//! | ComfyUI | `diffusion_model.<original layer>.lora_down.weight`; `.alpha` or none; FLUX.2: `.lora_A.weight` |
//! | `OneTrainer`, `LyCORIS` | `lora_transformer_<layer>`, `lycoris_<layer>`, dots as _ |
//! | the same, of a norm | `<any of these stems>.w_norm`, `.b_norm`; ComfyUI: also `.diff`, `.diff_b` |
//! | `XLabs` | `double_blocks.0.processor.qkv_lora1.down.weight`; no alpha |
//!
//! Text encoders are `text_encoder_2.` in diffusers, `lora_te2_` in kohya's files and `text_encoders.clip_g.transformer.`
//! in ComfyUI's.

use super::read::Component;

/// What other programs call a text encoder.
#[derive(Clone, Copy, Debug)]
pub struct EncoderNames {
    /// How kohya's names begin, as `lora_te1`. The first is written, all are read.
    pub kohya: &'static [&'static str],
    /// ComfyUI's name, as `clip_l`.
    pub comfyui: &'static str,
}

/// The two matrices' endings, as programs write them.
pub(super) const LORA_SUFFIXES: [[&str; 2]; 8] = [
    [".lora_A.weight", ".lora_B.weight"],
    [".lora_A.default.weight", ".lora_B.default.weight"],
    [".lora_down.weight", ".lora_up.weight"],
    [".lora.down.weight", ".lora.up.weight"],
    [".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight"],
    ["_lora.down.weight", "_lora.up.weight"],
    [".lora_A", ".lora_B"],
    [".down.weight", ".up.weight"],
];

pub(super) const MAGNITUDE_SUFFIXES: [&str; 4] = [
    ".lora_magnitude_vector",
    ".lora_magnitude_vector.weight",
    ".lora_magnitude_vector.default.weight",
    ".dora_scale",
];

/// What ComfyUI's files may call what is added to a weight and a bias, besides `LyCORIS`' names of it for norms.
pub(super) const DIFF: [&str; 2] = ["diff", "diff_b"];

/// Prefix of CLIP's layers, which newer transformers leave out.
pub(crate) const CLIP_PREFIX: &str = "text_model.";

/// Names of a layer in programs that use diffusers' layer names.
pub(super) fn stems(component: Component, names: Option<EncoderNames>, layer: &str) -> Vec<String> {
    let flat = layer.replace('.', "_");
    let folder = component.folder();
    let mut stems = vec![format!("{folder}.{layer}"), format!("base_model.model.{folder}.{layer}")];
    match component {
        Component::Transformer => stems.extend([
            layer.to_owned(),
            format!("base_model.model.{layer}"),
            format!("diffusion_model.{layer}"),
            format!("lora_unet_{flat}"),
            format!("lora_transformer_{flat}"),
            format!("lycoris_{flat}"),
        ]),
        Component::TextEncoder(index) => {
            stems.extend(layer.strip_prefix(CLIP_PREFIX).map(|short| format!("{folder}.{short}")));
            let Some(EncoderNames { kohya, comfyui }) = names else {
                stems.push(format!("lora_te{index}_{flat}"));
                return stems;
            };
            stems.extend(kohya.iter().map(|prefix| format!("{prefix}_{flat}")));
            stems.push(format!("text_encoders.{comfyui}.transformer.{layer}"));
        }
        Component::Language => stems = vec![format!("base_model.model.{layer}"), layer.to_owned()],
    }
    stems
}

/// Names of a layer in programs that use the original layer names.
pub(super) fn original_stems(component: Component, layer: &str) -> Vec<String> {
    match component {
        Component::Transformer => vec![
            format!("lora_unet_{}", layer.replace('.', "_")),
            format!("lycoris_{}", layer.replace('.', "_")),
            format!("diffusion_model.{layer}"),
            format!("model.diffusion_model.{layer}"),
            format!("base_model.model.{layer}"),
            layer.to_owned(),
        ],
        Component::TextEncoder(_) | Component::Language => Vec::new(),
    }
}
