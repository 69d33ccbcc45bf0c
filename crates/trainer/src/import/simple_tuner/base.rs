//! The base: models that flavours stand for, and the adapter beside it.

use super::super::error::ImportError;
use super::super::family::{ForeignFamily, Z_IMAGE_DE_TURBO, Z_IMAGE_TURBO};
use super::super::mapping::Mapping;
use super::super::training_adapter::{self, Z_IMAGE_TURBO_ADAPTERS};

/// Models that a family's flavours stand for; the first is the default.
const FLAVOURS: &[(ForeignFamily, &[(&str, &str)])] = &[
    (
        ForeignFamily::Flux,
        &[
            ("krea", "black-forest-labs/FLUX.1-Krea-dev"),
            ("dev", "black-forest-labs/FLUX.1-dev"),
            ("schnell", "black-forest-labs/FLUX.1-schnell"),
            ("kontext", "black-forest-labs/FLUX.1-Kontext-dev"),
        ],
    ),
    (
        ForeignFamily::Sd3,
        &[
            ("medium", "stabilityai/stable-diffusion-3.5-medium"),
            ("large", "stabilityai/stable-diffusion-3.5-large"),
        ],
    ),
    (
        ForeignFamily::QwenImage,
        &[
            ("v2.0", "Qwen/Qwen-Image-2512"),
            ("v1.0", "Qwen/Qwen-Image"),
            ("edit-v1", "Qwen/Qwen-Image-Edit"),
            ("edit-v2", "Qwen/Qwen-Image-Edit-2509"),
            ("edit-v3", "Qwen/Qwen-Image-Edit-2511"),
        ],
    ),
    (
        ForeignFamily::Kandinsky5Image,
        &[
            ("t2i-lite-sft", "kandinskylab/Kandinsky-5.0-T2I-Lite-sft-Diffusers"),
            ("t2i-lite-pretrain", "kandinskylab/Kandinsky-5.0-T2I-Lite-pretrain-Diffusers"),
        ],
    ),
    (
        ForeignFamily::Kandinsky5Video,
        &[
            ("t2v-lite-sft-5s", "kandinskylab/Kandinsky-5.0-T2V-Lite-sft-5s-Diffusers"),
            ("t2v-lite-pretrain-5s", "kandinskylab/Kandinsky-5.0-T2V-Lite-pretrain-5s-Diffusers"),
            ("t2v-pro-sft-5s-hd", "kandinskylab/Kandinsky-5.0-T2V-Pro-sft-5s-Diffusers"),
        ],
    ),
    (
        ForeignFamily::Flux2Klein,
        &[
            ("klein-9b", "black-forest-labs/FLUX.2-klein-base-9B"),
            ("klein-4b", "black-forest-labs/FLUX.2-klein-base-4B"),
        ],
    ),
    (
        ForeignFamily::ZImage,
        &[
            (TURBO_V2, Z_IMAGE_TURBO),
            ("turbo", Z_IMAGE_TURBO),
            ("base", "Tongyi-MAI/Z-Image"),
            ("ostris-de-turbo", Z_IMAGE_DE_TURBO),
        ],
    ),
];

/// Z-Image Turbo with the second of its training adapters.
const TURBO_V2: &str = "turbo-ostris-v2";

/// Writes the base.
pub(super) fn write(mapping: &mut Mapping, family: ForeignFamily) -> Result<(), ImportError> {
    let from = "model_flavour";
    let flavour = mapping.config.text(from)?;
    if mapping.config.peek("pretrained_model_name_or_path").is_some() {
        return mapping.base("pretrained_model_name_or_path").map(drop);
    }
    let of_family = FLAVOURS.iter().find(|(of, _)| *of == family).map_or(&[][..], |(_, all)| all);
    let found = match &flavour {
        Some(name) => of_family.iter().find(|(of, _)| of == name),
        None => of_family.first(),
    };
    let Some((_, model)) = found else {
        mapping.refuse(from, "hearth does not train this model");
        return Ok(());
    };
    mapping.set_or("base.path", flavour.map(|_| *model), *model, from);
    if *model == Z_IMAGE_DE_TURBO {
        mapping.set_default("base.rest", Z_IMAGE_TURBO, "the other parts are Turbo's");
    }
    Ok(())
}

/// Writes the adapter that undoes a distillation while training, which Z-Image Turbo has if nothing is said.
pub(super) fn training_adapter(
    mapping: &mut Mapping,
    family: ForeignFamily,
) -> Result<(), ImportError> {
    let (from, file_from) = ("assistant_lora_path", "assistant_lora_weight_name");
    if mapping.config.flag("disable_assistant_lora")? == Some(true) {
        return Ok(());
    }
    let flavour = mapping.config.text("model_flavour")?;
    let default = match flavour.as_deref().unwrap_or(TURBO_V2) {
        TURBO_V2 => Some("zimage_turbo_training_adapter_v2.safetensors"),
        "turbo" => Some("zimage_turbo_training_adapter_v1.safetensors"),
        _ => None,
    };
    let default = default.filter(|_| family == ForeignFamily::ZImage);
    let is_lora = mapping.value("adapter.kind").is_some_and(|kind| kind != "full");
    let typed = mapping.config.text(from)?;
    if typed.is_none() && (default.is_none() || !is_lora) {
        return Ok(());
    }
    let file = mapping.config.text(file_from)?.or(default.map(str::to_owned));
    let is_typed = typed.is_some();
    let folder = typed.unwrap_or_else(|| Z_IMAGE_TURBO_ADAPTERS.into());
    let path = match &file {
        Some(file) if !folder.ends_with(".safetensors") => {
            mapping.places.model_file(&format!("{folder}/{file}"))
        }
        _ => mapping.places.model_file(&folder),
    };
    if is_typed {
        training_adapter::write(mapping, &path, from);
    } else {
        training_adapter::write_default(mapping, &path, from);
    }
    let strength = mapping.config.number("assistant_lora_strength")?.unwrap_or(1.0);
    if strength != 1.0 {
        mapping.differs("assistant_lora_strength", "the adapter acts with all its strength");
    }
    if mapping.config.is_on("assistant_lora_inference_strength") {
        mapping.differs("assistant_lora_inference_strength", "samples are drawn without it");
    }
    Ok(())
}
