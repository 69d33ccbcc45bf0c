//! Detects which model lies at a path by its settings and tensor names, so that an unsupported one is
//! refused by its own name. What cannot be detected is left to whoever opens it.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;
use weights::Catalog;

use super::compress::{CompressedModel, CompressorTraining};
use super::diffusion::Pipeline;
use super::diffusion::denoiser::{DenoiserConfig, FAMILIES};
use super::diffusion::family::{DiffusionFamily, PublishedPipeline};
use super::diffusion::paths::PartPaths;
use super::llama::language_model::LanguageModel;
use super::llama::published::PublishedLlama;
use super::llama::{LanguageFamily, names};
use super::vae::VaeConfig;
use super::{component, config, hub};
use crate::error::{Result, TrainerError};

/// A model that hearth can use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelKind {
    /// A diffusion model of a family that hearth knows, as a folder or a checkpoint.
    Image,
    /// A language model of a family that hearth knows, as a folder or a GGUF file.
    Language,
    /// Qwen2.5-VL, as a folder.
    VisionLanguage,
    /// CLIP, text and images, as a folder.
    Clip,
}

/// What lies at a path.
#[derive(Clone, Debug, PartialEq, Eq)]
enum DetectedModel {
    /// One that hearth can use, and what it calls itself.
    Known(ModelKind, String),
    /// Anything else, described.
    Other(String),
}

impl DetectedModel {
    fn name(self) -> String {
        match self {
            Self::Known(_, name) | Self::Other(name) => name,
        }
    }
}

/// A model, open.
pub enum OpenModel {
    /// A diffusion model with all that belongs to it.
    Image(Box<Pipeline>),
    /// A language model.
    Language(Box<LanguageModel>),
    /// A compressed language model.
    Compressed(Box<CompressedModel>),
}

/// Opens whichever model lies at a path; a checkpoint of an image model with `parts` for what it lacks.
pub fn open(path: &Path, parts: &PartPaths) -> Result<OpenModel> {
    if CompressedModel::is_at(path) {
        let base = CompressedModel::open(path, CompressorTraining::default())?;
        return Ok(OpenModel::Compressed(Box::new(base)));
    }
    if is_language(path) {
        return LanguageModel::open(path).map(|base| OpenModel::Language(Box::new(base)));
    }
    Pipeline::open(path, parts).map(|pipeline| OpenModel::Image(Box::new(pipeline)))
}

/// Whether a language model lies there. A GGUF file that cannot be read counts as one: opening it says why.
fn is_language(path: &Path) -> bool {
    if path.is_dir() {
        let is_of_diffusers = || path.join(MODEL_INDEX).exists() || is_diffusers_part(path);
        return path.join("config.json").exists() && !is_of_diffusers();
    }
    let is_gguf = path.extension().is_some_and(|kind| kind.eq_ignore_ascii_case("gguf"));
    is_gguf && Catalog::open(path).map_or(true, |catalog| names::is_gguf(&catalog))
}

/// Whether a language model lies there, or a published one is named so.
pub fn is_language_or_named(path: &Path) -> bool {
    if hub::is_ready(path) { is_language(path) } else { PublishedLlama::by_path(path).is_some() }
}

/// The family of the language model at a path, or of the published one that it is named after; Llama, as presets are, where
/// that cannot be detected. Reads only headers.
pub fn language_family(path: &Path) -> LanguageFamily {
    let found = if path.is_dir() && hub::is_ready(path) {
        let settings = settings(path).unwrap_or_default();
        settings["model_type"].as_str().and_then(LanguageFamily::of_model_type)
    } else if let Ok(catalog) = Catalog::open(path) {
        let architecture = catalog.metadata.get("general.architecture");
        architecture.and_then(|name| LanguageFamily::of_architecture(name))
    } else {
        PublishedLlama::by_path(path).map(|model| model.config().family)
    };
    found.unwrap_or(LanguageFamily::Llama)
}

/// Refuses a path that holds another kind of model than is needed.
pub fn check(path: &Path, needed: ModelKind) -> Result<()> {
    let (found, hint) = match detect(path) {
        None => return Ok(()),
        Some(DetectedModel::Known(kind, _)) if kind == needed => return Ok(()),
        Some(found) if needed == ModelKind::VisionLanguage => (found.name(), WRITES_CAPTIONS),
        Some(found) if needed == ModelKind::Clip => (found.name(), CLIP_MODELS),
        Some(DetectedModel::Known(ModelKind::VisionLanguage, name)) => (name, CAPTIONS_ALONE),
        Some(DetectedModel::Known(ModelKind::Clip, name)) => (name, SCORES_ALONE),
        Some(DetectedModel::Known(_, name)) => (name, SWAPPED),
        Some(DetectedModel::Other(name)) => (name, SO_FAR),
    };
    let expected = match needed {
        ModelKind::Image => IMAGE_MODELS,
        ModelKind::Language => {
            "a Llama, Mistral, Mixtral, Qwen2, Qwen3, Gemma 3 or Phi-3 language model"
        }
        ModelKind::VisionLanguage => "a Qwen2.5-VL model",
        ModelKind::Clip => "a CLIP model",
    };
    Err(TrainerError::WrongModel { found, expected, path: path.into(), hint })
}

/// The family, or the variant of one, of the diffusion model at a path, or of the published one that it is named
/// after; `None` where that cannot be detected. Reads only headers.
pub fn family(path: &Path) -> Option<&'static DiffusionFamily> {
    if path.is_dir() && hub::is_ready(path) {
        let class = pipeline_class(path).ok()?;
        let family = DiffusionFamily::of_pipeline(&class)?;
        let config = DenoiserConfig::read(family, &path.join("transformer/config.json"));
        return Some(config.map_or(family, |config| {
            let config = config.with_pipeline(&class).with_distillation(is_distilled(path));
            config.with_name(path).family()
        }));
    }
    let Ok(catalog) = Catalog::open(path) else {
        return PublishedPipeline::by_path(path).map(|(_, model)| (model.config)().family());
    };
    let family = family_of_checkpoint(&catalog)?;
    let config = DenoiserConfig::of_checkpoint(family, &catalog, Path::new("")).ok().flatten();
    let class = DenoiserConfig::pipeline_of_file(family, path).unwrap_or_default();
    Some(config.map_or(family, |(config, _)| config.with_pipeline(class).with_name(path).family()))
}

/// The family whose original layout a checkpoint has.
pub fn family_of_checkpoint(catalog: &Catalog) -> Option<&'static DiffusionFamily> {
    let has = |mark: &str| catalog.tensors.iter().any(|tensor| tensor.name.contains(mark));
    FAMILIES.iter().copied().find(|family| has(family.tensor_marker))
}

/// Whether a folder is a part of a diffusers pipeline, which has a `config.json` as language models do.
fn is_diffusers_part(folder: &Path) -> bool {
    settings(folder).is_some_and(|settings| settings.get("_class_name").is_some())
}

const IMAGE_MODELS: &str =
    "an SD3, SD3.5, FLUX.1, FLUX.2 klein, Qwen-Image, Kandinsky 5 or Z-Image model";
const SO_FAR: &str = "hearth trains SD3, SD3.5, FLUX.1, FLUX.2 klein, Qwen-Image, Kandinsky 5 and Z-Image models (a diffusers folder, or a checkpoint) and \
                      Llama, Mistral, Mixtral, Qwen2, Qwen3, Gemma 3 and Phi-3 language models (a transformers folder, or a GGUF file) so far";
const SWAPPED: &str = "image models are trained with --images FOLDER ([data]), language models with --text PATH ([text])";

/// The remedy for a model that writes no captions.
pub const WRITES_CAPTIONS: &str = "captions are written by Qwen2.5-VL: Qwen/Qwen2.5-VL-3B-Instruct, -7B-Instruct, or the text encoder of \
                               a Qwen-Image folder";
const CAPTIONS_ALONE: &str = "it is not trained: `hearth caption` writes captions with it, and Qwen-Image has it as text encoder";

/// The remedy for a path without a CLIP model.
pub const CLIP_MODELS: &str = "give a folder of a CLIP model of transformers, or the name of one: openai/clip-vit-large-patch14";
const SCORES_ALONE: &str = "it is not trained: `hearth clip-score` measures samples with it, and image models have its text model as text encoder";

fn detect(path: &Path) -> Option<DetectedModel> {
    if !path.is_dir() {
        return from_names(&Catalog::open(path).ok()?, path);
    }
    if let Ok(class) = pipeline_class(path) {
        return Some(from_pipeline(&class));
    }
    if path.join("adapter_config.json").exists()
        || path.join("pytorch_lora_weights.safetensors").exists()
    {
        return Some(DetectedModel::Other("a LoRA adapter".into()));
    }
    if path.join("events.jsonl").exists() && path.join("config.toml").exists() {
        let written =
            if path.join("model").is_dir() { "its model is in model/" } else { "no model" };
        return Some(DetectedModel::Other(format!("the folder of a training run ({written})")));
    }
    match settings(path) {
        Some(settings) => from_config(&settings),
        // Whoever reads it says what is wrong with it.
        None if path.join("config.json").exists() => None,
        None => from_names(&component::weights(path).ok()?, path),
    }
}

/// `model_index.json` of a pipeline.
#[derive(Deserialize)]
struct ModelIndex {
    #[serde(rename = "_class_name")]
    class: String,
    #[serde(default)]
    is_distilled: bool,
}

/// The file that diffusers' folders have, and those of transformers have not.
pub const MODEL_INDEX: &str = "model_index.json";

/// The class of the pipeline in a folder that diffusers saved.
pub fn pipeline_class(folder: &Path) -> Result<String> {
    config::read::<ModelIndex>(&folder.join(MODEL_INDEX)).map(|index| index.class)
}

/// Whether a folder that diffusers saved says that its model is distilled to few steps.
pub fn is_distilled(folder: &Path) -> bool {
    config::read::<ModelIndex>(&folder.join(MODEL_INDEX)).is_ok_and(|index| index.is_distilled)
}

fn settings(folder: &Path) -> Option<Value> {
    config::read(&folder.join("config.json")).ok()
}

/// Pipelines of diffusers by the prefix of their class, longer names first.
const PIPELINES: [(&str, &str); 12] = [
    ("StableDiffusionXL", "an SDXL pipeline"),
    ("StableDiffusion", "a Stable Diffusion 1 or 2 pipeline"),
    ("Flux2", "a FLUX.2 pipeline"),
    ("Flux", "a FLUX.1 pipeline"),
    ("QwenImage", "a Qwen-Image pipeline"),
    ("Kandinsky", "a Kandinsky pipeline"),
    ("ZImage", "a Z-Image pipeline"),
    ("PixArt", "a PixArt pipeline"),
    ("Sana", "a Sana pipeline"),
    ("AuraFlow", "an AuraFlow pipeline"),
    ("Wan", "a Wan video pipeline"),
    ("", "a diffusers pipeline"),
];

fn from_pipeline(class: &str) -> DetectedModel {
    if let Some(family) = DiffusionFamily::of_pipeline(class) {
        return DetectedModel::Known(
            ModelKind::Image,
            format!("{} image model ({class})", family.title),
        );
    }
    let known = PIPELINES.iter().find(|(start, _)| class.starts_with(start));
    let what = known.map_or("a diffusers pipeline", |(_, what)| what);
    DetectedModel::Other(format!("{what} ({class})"))
}

/// By the `config.json` of transformers, or of a part of a pipeline.
fn from_config(settings: &Value) -> Option<DetectedModel> {
    let part = settings["_class_name"].as_str();
    let class = part.or_else(|| settings["architectures"][0].as_str());
    let kind = settings["model_type"].as_str().unwrap_or_default();
    if part.is_none() && LanguageFamily::of_model_type(kind).is_some() {
        let name = format!("a language model ({})", class.unwrap_or(kind));
        return Some(DetectedModel::Known(ModelKind::Language, name));
    }
    if part.is_none() && kind == "qwen2_5_vl" {
        let name = format!("a vision-language model ({})", class.unwrap_or(kind));
        return Some(DetectedModel::Known(ModelKind::VisionLanguage, name));
    }
    if part.is_none() && kind == "clip" {
        let name = format!("a CLIP model ({})", class.unwrap_or(kind));
        return Some(DetectedModel::Known(ModelKind::Clip, name));
    }
    let class = class.or(Some(kind).filter(|kind| !kind.is_empty()))?;
    let what = match class {
        class if VaeConfig::CLASSES.contains(&class) => "a VAE alone",
        class if class.starts_with("SD3Transformer") => "the transformer of an SD3 pipeline alone",
        class if class.contains("Transformer2D") => "the transformer of another pipeline",
        class if class.starts_with("UNet") => "the UNet of a Stable Diffusion 1, 2 or XL pipeline",
        class if class.starts_with("CLIPText") || class.starts_with("T5Encoder") => {
            "a text encoder alone"
        }
        class if class.ends_with("ForCausalLM") => "a language model of another family",
        _ => "another model",
    };
    Some(DetectedModel::Other(format!("{what} ({class})")))
}

/// Parts of tensor names that identify a kind of file, the most specific first.
const NAME_MARKERS: [(&str, &str); 19] = [
    (".lora_A.", "a LoRA adapter"),
    (".lora_down.", "a LoRA adapter"),
    (".lora.down.", "a LoRA adapter"),
    (".hada_w1_a", "a LoHa adapter"),
    (".lokr_w1", "a LoKr adapter"),
    ("single_transformer_blocks.0.", "the transformer of a FLUX.1 pipeline alone"),
    ("conditioner.embedders.1.", "an SDXL checkpoint"),
    ("cond_stage_model.transformer.", "a Stable Diffusion 1.5 checkpoint"),
    ("cond_stage_model.model.", "a Stable Diffusion 2 checkpoint"),
    ("input_blocks.0.0.", "the UNet of a Stable Diffusion 1, 2 or XL checkpoint"),
    ("down_blocks.0.attentions.", "the UNet of a Stable Diffusion 1, 2 or XL pipeline"),
    ("transformer_blocks.0.attn.add_q_proj.", "the transformer of an SD3 pipeline alone"),
    ("text_model.encoder.layers.0.", "a CLIP text encoder alone"),
    ("encoder.block.0.layer.0.SelfAttention", "a T5 text encoder alone"),
    ("enc.blk.0.attn_q", "a T5 text encoder alone"),
    (
        "model.layers.0.self_attn.",
        "the weights of a language model without config.json and tokenizer",
    ),
    ("decoder.mid_block.", "a VAE alone"),
    ("decoder.mid.block_1.", "a VAE alone"),
    ("decoder.middle.0.residual.", "a VAE alone"),
];

/// By the names of tensors.
fn from_names(catalog: &Catalog, path: &Path) -> Option<DetectedModel> {
    let has = |mark: &str| catalog.tensors.iter().any(|tensor| tensor.name.contains(mark));
    // Checkpoints hold other parts beside the model.
    if let Some(family) = family_of_checkpoint(catalog).filter(|_| !has(".lora_")) {
        return Some(DetectedModel::Known(
            ModelKind::Image,
            format!("{} checkpoint", family.title),
        ));
    }
    if catalog.find("token_embd.weight").is_ok() && !has("enc.blk.0.") {
        return Some(DetectedModel::Known(ModelKind::Language, "a language model (GGUF)".into()));
    }
    let (_, what) = NAME_MARKERS.iter().find(|(mark, _)| has(mark))?;
    let is_gguf = path.extension().is_some_and(|end| end.eq_ignore_ascii_case("gguf"));
    Some(DetectedModel::Other(if is_gguf { format!("{what} (GGUF)") } else { (*what).to_owned() }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_family_is_named_where_another_model_is_refused() {
        for family in FAMILIES {
            let name = family.title.split(' ').nth(1).unwrap();
            assert!(IMAGE_MODELS.contains(name) && SO_FAR.contains(name), "{name}");
        }
    }
}
