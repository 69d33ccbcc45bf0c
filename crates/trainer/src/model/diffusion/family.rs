//! What a family is known by, what its jobs begin with, and which of its models are published. Data alone: adding a
//! family is filling one of these.

use std::path::Path;

use super::denoiser::{DenoiserConfig, FAMILIES};
use super::guidance::Guidance;
use super::scheduler::{FlowMatchScheduler, SigmaSpacing};
use super::text::{EncoderConfig, TextEncoderSpec};
use crate::model::vae;
use crate::objective::flow::WeightingScheme;

/// The facts of a family.
#[derive(Debug)]
pub struct DiffusionFamily {
    /// As jobs and messages call it.
    pub name: &'static str,
    /// As people call its models, with the article.
    pub title: &'static str,
    /// Whether it can only be planned so far: its pipeline was not held against the reference as a whole yet.
    pub is_plan_only: bool,
    /// The classes of its pipelines in `model_index.json`; the first makes images of prompts.
    pub pipelines: &'static [&'static str],
    /// The class of its transformer.
    pub transformer: &'static str,
    /// A part of a tensor's name that every checkpoint of its original layout has, and no other.
    pub tensor_marker: &'static str,
    /// Its text encoders.
    pub encoders: &'static [TextEncoderSpec],
    /// How its sampler spaces levels of noise.
    pub spacing: SigmaSpacing,
    /// How it follows a prompt.
    pub guidance: Guidance,
    /// What samples are like unless told otherwise.
    pub sampling: SamplingDefaults,
    /// How training draws levels of noise unless told otherwise.
    pub scheme: WeightingScheme,
    /// Which layers those are that get an adapter unless told otherwise.
    pub targets: &'static [&'static str],
    /// What other programs are told of an adapter.
    pub export: ExportMetadata,
    /// Its published models.
    pub published: &'static [PublishedPipeline],
}

/// What samples are like unless told otherwise.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingDefaults {
    /// Steps from noise to image.
    pub steps: usize,
    /// The scale of guidance.
    pub guidance: f64,
    /// Pixels along each side.
    pub resolution: usize,
}

/// What other programs are told of an adapter.
#[derive(Clone, Copy, Debug)]
pub struct ExportMetadata {
    /// kohya's `ss_network_module`.
    pub network: &'static str,
    /// `modelspec.architecture`.
    pub architecture: &'static str,
    /// The hub's tag for adapters of this family.
    pub tag: &'static str,
}

/// A published model, known without its files: a plan can be made for a model that nobody has downloaded yet.
#[derive(Debug)]
pub struct PublishedPipeline {
    /// What the name of its folder begins with, in small letters.
    pub name: &'static str,
    /// How to come by it.
    pub hint: &'static str,
    /// Its names on the hub, each with that of a folder or checkpoint that holds it.
    pub hub: &'static [(&'static str, &'static str)],
    /// What `transformer/config.json` says.
    pub config: fn() -> DenoiserConfig,
    /// What `vae/config.json` says.
    pub vae: fn() -> vae::VaeConfig,
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

    /// Layers that get an adapter unless told otherwise.
    pub fn targets(&self) -> Vec<String> {
        self.targets.iter().map(|target| (*target).to_owned()).collect()
    }

    /// The one whose defaults are taken where a base does not tell its family.
    pub fn fallback() -> &'static Self {
        FAMILIES[0]
    }

    /// The family whose transformer is called so.
    pub fn of_transformer(class: &str) -> Option<&'static Self> {
        FAMILIES.iter().copied().find(|family| class == family.transformer)
    }
}

impl PublishedPipeline {
    /// The one that a folder is called after: its name begins with the model's, in any case.
    pub fn by_path(path: &Path) -> Option<(&'static DiffusionFamily, &'static Self)> {
        let name = path.file_name()?.to_string_lossy().to_lowercase();
        let all =
            FAMILIES.iter().flat_map(|family| family.published.iter().map(|it| (*family, it)));
        let fits = all.filter(|(_, model)| name.starts_with(model.name));
        // Of two that fit, the one that says more.
        fits.max_by_key(|(_, model)| model.name.len())
    }

    /// The hub's name of a folder or a checkpoint without its ending.
    pub fn hub_name(stem: &str) -> Option<&'static str> {
        let all = FAMILIES.iter().flat_map(|family| family.published).flat_map(|model| model.hub);
        all.into_iter().find(|(own, _)| *own == stem).map(|(_, hub)| *hub)
    }
}
