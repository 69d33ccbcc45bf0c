//! The facts of a model family as data: names, defaults, published models. Adding a family is filling one of these.

use std::path::Path;

use super::denoiser::{DenoiserConfig, FAMILIES};
use super::editing::Editing;
use super::guidance::Guidance;
use super::scheduler::{FlowMatchScheduler, SigmaSpacing};
use super::text::{EncoderConfig, TextEncoderSpec};
use crate::model::adapter::TargetPreset;
use crate::model::vae::VaeConfig;
use crate::objective::flow::WeightingScheme;

/// The facts of a family.
#[derive(Debug)]
pub struct DiffusionFamily {
    /// Its name in jobs and messages.
    pub name: &'static str,
    /// As people call its models, with the article.
    pub title: &'static str,
    /// The classes of its pipelines in `model_index.json`; the first is text-to-image.
    pub pipelines: &'static [&'static str],
    /// What the result of those pipelines calls the images, or clips.
    pub pipeline_output: &'static str,
    /// Whether those pipelines take a negative prompt as text, and not only encoded.
    pub takes_negative_text: bool,
    /// The class of its transformer.
    pub transformer: &'static str,
    /// A part of a tensor's name that every checkpoint of its original layout has, and no other.
    pub tensor_marker: &'static str,
    /// Names under which its VAE is shared as one file.
    pub vae_files: &'static [&'static str],
    /// Its text encoders.
    pub encoders: &'static [TextEncoderSpec],
    /// Those that can be trained, by name: CLIPs whose adapter diffusers' pipeline reads with the transformer's.
    pub trainable_encoders: &'static [&'static str],
    /// The prompt that stands for none: as which an empty prompt is encoded.
    pub empty_prompt: &'static str,
    /// Whether prompts are cleaned before they are encoded: HTML entities become characters, white space a single space.
    pub cleans_prompts: bool,
    /// `max_sequence_length` of diffusers' pipeline where it is not given.
    pub max_sequence_length: usize,
    /// How its sampler spaces sigmas.
    pub spacing: SigmaSpacing,
    /// Whether its models see latents without the shift that the VAE's settings state.
    pub ignores_vae_shift: bool,
    /// Whether the sampler of its authors counts, that of the published models, and not `scheduler_config.json`.
    pub ignores_scheduler_config: bool,
    /// Its kind of guidance.
    pub guidance: Guidance,
    /// How it takes reference images; none if it makes images from prompts alone.
    pub editing: Option<Editing>,
    /// The clips that it makes; none if it makes images.
    pub video: Option<VideoDefaults>,
    /// Of a model that is distilled to few steps: what to do instead of training it as it is.
    pub distilled: Option<&'static str>,
    /// Defaults of sampling.
    pub sampling: SamplingDefaults,
    /// The default weighting scheme of training timesteps.
    pub scheme: WeightingScheme,
    /// The default LoRA targets.
    pub targets: &'static [&'static str],
    /// Lists of LoRA targets by a name.
    pub target_presets: &'static [TargetPreset],
    /// Metadata of exported adapters.
    pub export: ExportMetadata,
    /// Its published models.
    pub published: &'static [PublishedPipeline],
}

/// Defaults of sampling.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingDefaults {
    /// Denoising steps.
    pub steps: usize,
    /// Guidance scale.
    pub guidance: f64,
    /// Pixels along each side.
    pub resolution: usize,
    /// The negative prompt where none is given.
    pub negative_prompt: &'static str,
}

/// The clips that a family makes where nothing else is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VideoDefaults {
    /// Frames.
    pub frames: usize,
    /// Frames per second.
    pub fps: usize,
}

/// Metadata of exported adapters.
#[derive(Clone, Copy, Debug)]
pub struct ExportMetadata {
    /// kohya's `ss_network_module`.
    pub network: &'static str,
    /// `modelspec.architecture`.
    pub architecture: &'static str,
    /// The hub's tag for adapters of this family.
    pub tag: &'static str,
    /// How ComfyUI's files have a `LoRA`.
    pub comfyui: ComfyuiLora,
}

/// How ComfyUI's files have a `LoRA`. ComfyUI reads both; diffusers has a converter of each family, which takes one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComfyuiLora {
    /// `lora_down`, `lora_up` and `alpha`.
    Alpha,
    /// `lora_A` and `lora_B`, with the scale in B. Taken: `Flux2LoraLoaderMixin.lora_state_dict`, which takes
    /// `lora_down` for a file of kohya's, and has no place for alpha in others.
    Scaled,
}

/// The licence of a published model, as its model card on the hub states it.
#[derive(Clone, Copy, Debug)]
pub struct ModelLicense {
    /// The hub's `license`.
    pub id: &'static str,
    /// The hub's `license_name`, where `license` is `other`.
    pub name: Option<&'static str>,
    /// A sentence for people: its name, and what it allows.
    pub summary: &'static str,
}

/// A published model, known without its files: a plan can be made for a model that nobody has downloaded yet.
#[derive(Debug)]
pub struct PublishedPipeline {
    /// Prefix of its folder's name, in lower case.
    pub name: &'static str,
    /// Where to download it.
    pub hint: &'static str,
    /// Its names on the hub, each with that of a folder or checkpoint that holds it.
    pub hub: &'static [(&'static str, &'static str)],
    /// Its licence.
    pub license: ModelLicense,
    /// What `transformer/config.json` says.
    pub config: fn() -> DenoiserConfig,
    /// What `vae/config.json` says.
    pub vae: fn() -> VaeConfig,
    /// What the settings of its text encoders say, in the family's order.
    pub encoders: fn() -> Vec<EncoderConfig>,
    /// What `scheduler/scheduler_config.json` says.
    pub schedule: fn() -> FlowMatchScheduler,
}

impl DiffusionFamily {
    /// The family whose pipelines are called so.
    pub fn of_pipeline(class: &str) -> Option<&'static Self> {
        FAMILIES.iter().copied().find(|family| family.pipelines.contains(&class))
    }

    /// A base of it, in messages.
    pub fn as_base(&self) -> String {
        format!("{} base", self.title)
    }

    /// The default LoRA targets.
    pub fn targets(&self) -> Vec<String> {
        self.targets.iter().map(|target| (*target).to_owned()).collect()
    }

    /// The published model of this family, or variant, for settings that files do not tell.
    pub fn published_model(&self) -> &'static PublishedPipeline {
        let is_own = |model: &&PublishedPipeline| (model.config)().family().title == self.title;
        self.published.iter().find(is_own).unwrap_or(&self.published[0])
    }

    /// The family whose defaults are used where the base's family is not known.
    pub fn fallback() -> &'static Self {
        FAMILIES[0]
    }

    /// The family whose transformer is called so.
    pub fn of_transformer(class: &str) -> Option<&'static Self> {
        FAMILIES.iter().copied().find(|family| class == family.transformer)
    }
}

impl PublishedPipeline {
    /// The model that a folder is named after: its name begins with the model's, ignoring case.
    pub fn by_path(path: &Path) -> Option<(&'static DiffusionFamily, &'static Self)> {
        let name = weights::hub::model_name(path).to_lowercase();
        let all =
            FAMILIES.iter().flat_map(|family| family.published.iter().map(|it| (*family, it)));
        let fits = all.filter(|(_, model)| name.starts_with(model.name));
        // Of two that match, the longer name.
        fits.max_by_key(|(_, model)| model.name.len())
    }

    /// The hub's name of a folder or a checkpoint without its ending.
    pub fn hub_name(stem: &str) -> Option<&'static str> {
        let mut all = Self::all().flat_map(|model| model.hub);
        all.find(|(own, _)| *own == stem).map(|(_, hub)| *hub)
    }

    /// The licence of a model that the hub calls so.
    pub fn license_of(hub: &str) -> Option<ModelLicense> {
        let mut all = Self::all();
        all.find(|model| model.hub.iter().any(|(_, name)| *name == hub)).map(|model| model.license)
    }

    fn all() -> impl Iterator<Item = &'static Self> {
        FAMILIES.iter().flat_map(|family| family.published)
    }
}
