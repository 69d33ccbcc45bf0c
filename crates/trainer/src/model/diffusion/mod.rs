//! A diffusion pipeline of any family: text encoders, VAE, denoiser (transformer) and scheduler. It is a diffusers
//! folder, or a checkpoint of the original layout with other files for what it lacks (`paths.rs`). Opening reads configs
//! and headers and compares every name and shape; no weights are read before all of it fits together.
//!
//! ```text
//! Pipeline ─┬ TextEncoders   text ─▶ Condition: tensors by name
//!           ├ Vae            images ◀─▶ latents
//!           ├ Denoiser       noisy latents + Condition + timestep ─▶ velocity   one enum, a folder for each family
//!           └ Scheduler      sigmas and timesteps
//! ```

pub mod condition;
pub mod denoiser;
pub mod editing;
pub mod family;
pub mod flux;
pub mod flux2;
pub mod guidance;
pub mod implementation;
pub(crate) mod init;
mod joint;
pub mod kandinsky5;
pub mod part;
pub mod paths;
pub mod qwen_image;
pub mod scheduler;
pub mod sd3;
pub mod text;
pub mod vae;
pub mod z_image;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use compute::Device;
use weights::BytesDoneFn;

use self::denoiser::{Denoiser, DenoiserConfig};
use self::family::{DiffusionFamily, PublishedPipeline};
use self::part::PipelinePart;
use self::paths::{PartPaths, PartSearch};
use self::scheduler::FlowMatchScheduler;
use self::text::TextEncoders;
use self::vae::{LatentShape, Vae};
use crate::error::{Result, TrainerError};
use crate::fingerprint::Fingerprint;
use crate::model::adapter::read::{AdapterFile, Component, TargetModule};
use crate::model::adapter::training::TrainingAdapter;
use crate::model::adapter::{AdaptedComponent, AdapterWeights, Adapters, LayerWeights};
use crate::model::build::Precision;
use crate::model::files::{self, CheckpointLayout, WeightFiles};
use crate::model::{config, hub, kind};

/// The open parts of a pipeline.
pub struct Pipeline {
    /// What was opened.
    pub path: PathBuf,
    /// The denoiser.
    pub transformer: PipelinePart<DenoiserConfig>,
    /// The VAE.
    pub vae: Vae,
    /// The text encoders.
    pub encoders: TextEncoders,
    /// The noise scheduler.
    pub schedule: FlowMatchScheduler,
    /// The transformer's adapter.
    adapter: HashMap<String, LayerWeights>,
    /// The transformer's frozen one, which acts in training alone.
    training_adapter: Option<TrainingAdapter>,
}

impl Pipeline {
    /// Opens a folder; or a checkpoint, with `parts` for what it lacks.
    pub fn open(path: &Path, parts: &PartPaths) -> Result<Self> {
        hub::check(path)?;
        if !path.exists() {
            return Err(not_there(path));
        }
        kind::check(path, kind::ModelKind::Image)?;
        parts.check()?;
        let search = PartSearch::new(path, parts)?;
        let mut transformer = transformer(&search)?;
        transformer.config = as_told(transformer.config, path, parts)?;
        let config = &transformer.config;
        let found = search.find(config.family(), &|spec| text::is_used(&search, spec))?;
        let published = config.family().published_model();
        let vae = Vae::open(found.vae, &(published.vae)())?;
        check_fit(path, &transformer, &vae)?;
        let encoders = TextEncoders::open(&found.tokenizers, found.encoders, config)?;
        let schedule = schedule(&search, config)?;
        Self::new(path, transformer, vae, encoders, schedule).trained_beside(parts)
    }

    /// The same for planning: a published model need not be downloaded, the name of its folder is enough. It
    /// can be built on the meta device like any other.
    pub fn open_or_published(path: &Path, parts: &PartPaths) -> Result<Self> {
        match PublishedPipeline::by_path(path) {
            Some((_, model)) if !hub::is_ready(path) => Self::meta(path, model, parts),
            _ => Self::open(path, parts),
        }
    }

    /// A published model without its files, as if it lay at `path`.
    fn meta(path: &Path, model: &PublishedPipeline, parts: &PartPaths) -> Result<Self> {
        let config = as_told((model.config)(), path, parts)?;
        let tensors = config.tensor_specs()?;
        let transformer = PipelinePart::meta(&path.join(TRANSFORMER), config, tensors);
        let vae = Vae::meta(&path.join("vae"), (model.vae)())?;
        check_fit(path, &transformer, &vae)?;
        let encoders = TextEncoders::meta(path, &transformer.config, (model.encoders)())?;
        Self::new(path, transformer, vae, encoders, (model.schedule)()).trained_beside(parts)
    }

    /// Of parts that fit together.
    fn new(
        path: &Path,
        transformer: PipelinePart<DenoiserConfig>,
        vae: Vae,
        encoders: TextEncoders,
        schedule: FlowMatchScheduler,
    ) -> Self {
        let (path, adapter, training_adapter) = (path.into(), HashMap::new(), None);
        let family = transformer.config.family();
        let schedule = schedule.with_spacing(family.spacing);
        let vae = if family.ignores_vae_shift { vae.ignoring_shift() } else { vae };
        Self { path, transformer, vae, encoders, schedule, adapter, training_adapter }
    }

    /// The same with the adapter that acts in training alone, if one was named.
    fn trained_beside(self, parts: &PartPaths) -> Result<Self> {
        let open = |path: &PathBuf| TrainingAdapter::open(path, &self.target_modules()?);
        let training_adapter = parts.training_adapter.as_ref().map(open).transpose()?;
        Ok(Self { training_adapter, ..self })
    }

    /// The adapter that acts in training alone.
    pub fn training_adapter(&self) -> Option<&TrainingAdapter> {
        self.training_adapter.as_ref()
    }

    /// The layers and norms of the transformer that an adapter can be for.
    fn target_modules(&self) -> Result<Vec<TargetModule>> {
        let config = &self.transformer.config;
        let layouts = |module: &str| config.adapter_layouts(module);
        Ok(TargetModule::with_norms(&config.tensor_specs()?, layouts))
    }

    /// What is known of all models like this one.
    pub fn family(&self) -> &'static DiffusionFamily {
        self.transformer.config.family()
    }

    /// Whether it was opened by its published config, without files.
    pub fn is_published(&self) -> bool {
        self.transformer.catalog.is_meta()
    }

    /// Bytes of all its weights, as they are on disk or would be.
    pub fn weight_bytes(&self) -> u64 {
        let adapted = self.adapted_components();
        adapted.iter().map(|part| part.catalog.bytes()).sum::<u64>() + self.vae.catalog().bytes()
    }

    /// Loads an adapter beside the layers it is for.
    pub fn add_adapter(&mut self, path: &Path) -> Result<()> {
        self.take_adapter(AdapterFile::open(path)?)
    }

    /// The same from an open file.
    pub fn take_adapter(&mut self, mut file: AdapterFile) -> Result<()> {
        self.adapter = file.take(Component::Transformer, None, &self.target_modules()?)?;
        self.encoders.take_adapter(&mut file)?;
        file.check_all_taken()
    }

    /// The adapter by component.
    pub fn adapter(&self) -> AdapterWeights {
        let own = self.adapter.clone().into_iter().collect();
        std::iter::once((Component::Transformer, own)).chain(self.encoders.adapter()).collect()
    }

    /// The components that an adapter can be for, on disk, with the adapter beside them.
    pub fn adapted_components(&self) -> Vec<AdaptedComponent<'_>> {
        let PipelinePart { catalog, .. } = &self.transformer;
        let (component, layout) = (Component::Transformer, self.transformer.layout());
        let own = AdaptedComponent { component, catalog, layout, layers: &self.adapter };
        std::iter::once(own).chain(self.encoders.adapted_components()).collect()
    }

    /// Sets the adapter.
    pub fn set_adapter(&mut self, parts: AdapterWeights) {
        for (component, layers) in parts {
            let layers = layers.into_iter().collect();
            match component {
                Component::Transformer => self.adapter = layers,
                Component::TextEncoder(place) => self.encoders.set_adapter(place, layers),
                Component::Language => unreachable!("the parts are those that were asked for"),
            }
        }
    }

    /// The shape of the latent of a clip of this width, height and number of frames; an image has one.
    pub fn latent_shape(&self, size: [usize; 2], frames: usize) -> LatentShape {
        self.vae.latent_shape(size, frames)
    }

    /// Pixels of an image along the side of a token.
    pub fn pixels_per_token(&self) -> usize {
        self.vae.vae_scale_factor() * self.transformer.config.latent_spec().patch_size
    }

    /// The most pixels of an image along a side, where that is limited.
    pub fn max_side(&self) -> Option<usize> {
        Some(self.transformer.config.latent_spec().max_tokens_per_side? * self.pixels_per_token())
    }

    /// Tokens of an image of this width and height, or of a clip with so many frames.
    pub fn image_tokens(&self, [width, height]: [usize; 2], frames: usize) -> usize {
        let frames = self.latent_shape([width, height], frames).frames;
        frames * (width / self.pixels_per_token()) * (height / self.pixels_per_token())
    }

    /// Identifies this model.
    pub fn fingerprint(&self) -> Result<Fingerprint> {
        let base = files::fingerprint(&self.transformer.catalog)?;
        let beside = self.training_adapter.as_ref().map(TrainingAdapter::fingerprint);
        Ok(beside.map_or(base.clone(), |beside| base.with("training adapter", beside)))
    }

    /// The loaded adapter.
    pub fn loaded_adapter(&self) -> Adapters {
        Adapters::loaded(self.adapter.clone())
    }

    /// Loads the denoiser, with adapters beside its layers.
    pub fn load_denoiser(
        &self,
        device: &Device,
        precision: Precision,
        adapters: &mut Adapters,
        tick: BytesDoneFn<'_>,
    ) -> Result<Denoiser> {
        let config = &self.transformer.config;
        let files = self.transformer.files()?;
        self.training_adapter.iter().for_each(|training| adapters.set_training(training.clone()));
        files::load_model(device, &files, precision, adapters, tick, |build| config.build(build))
    }
}

/// Where a transformer lies in a model's folder.
pub(crate) const TRANSFORMER: &str = "transformer";

/// Checks that both have their weights, and the same latent channels. A config that was inferred is checked here.
fn check_fit(path: &Path, transformer: &PipelinePart<DenoiserConfig>, vae: &Vae) -> Result<()> {
    let problem =
        |config::Unsupported(problem)| TrainerError::Config { problem, path: path.into() };
    transformer.config.check().map_err(problem)?;
    transformer.files()?;
    vae.check()?;
    let (latent, wanted) = (vae.channels(), transformer.config.latent_spec().channels);
    if latent == wanted {
        return Ok(());
    }
    let problem =
        format!("latent_channels of the vae is {latent}, in_channels of the transformer {wanted}");
    Err(TrainerError::Config { problem, path: path.into() })
}

fn not_there(path: &Path) -> TrainerError {
    TrainerError::Request {
        problem: format!("no model at {}", path.display()),
        hint: PublishedPipeline::by_path(path).map_or("check the path", |(_, model)| model.hint),
    }
}

/// The family of a folder as diffusers saves it.
fn family_of(folder: &Path) -> Result<&'static DiffusionFamily> {
    let index = folder.join(kind::MODEL_INDEX);
    if !index.exists() {
        let problem = format!("has no {}", kind::MODEL_INDEX);
        return Err(TrainerError::Folder { what: "model folder", problem, path: folder.into() });
    }
    let class = kind::pipeline_class(folder)?;
    kind::check(folder, kind::ModelKind::Image)?;
    DiffusionFamily::of_pipeline(&class).ok_or_else(|| {
        let problem = format!("{class} is not a pipeline that hearth knows");
        TrainerError::Folder { what: "model folder", problem, path: folder.into() }
    })
}

/// The transformer of the folder, or of the checkpoint, whose config is inferred from its shapes.
fn transformer(search: &PartSearch<'_>) -> Result<PipelinePart<DenoiserConfig>> {
    let family = search.family()?;
    let beside = search.folder.as_deref().unwrap_or(Path::new("")).join(TRANSFORMER);
    let class = search.pipeline_class(family);
    let Some(catalog) = &search.checkpoint else {
        let read = |settings: &Path| DenoiserConfig::read(family, settings);
        return PipelinePart::open(&beside, |settings| {
            let config = read(settings)?.with_pipeline(class.as_deref().unwrap_or_default());
            Ok(config.with_distillation(search.folder.as_deref().is_some_and(kind::is_distilled)))
        });
    };
    let path = catalog.path.clone();
    let Some((config, prefix)) = DenoiserConfig::of_checkpoint(family, catalog, &beside)? else {
        let name = family.name.to_uppercase();
        let problem = format!("holds no {name} transformer in the original layout");
        return Err(TrainerError::Folder { what: "checkpoint", problem, path });
    };
    let config = config.with_pipeline(class.as_deref().unwrap_or_default());
    Ok(PipelinePart::original(config, catalog.clone(), prefix))
}

/// The config for the variant that the model's name says, run as the program that was asked for.
fn as_told(config: DenoiserConfig, path: &Path, parts: &PartPaths) -> Result<DenoiserConfig> {
    let config = config.with_name(path);
    let Some(implementation) = parts.implementation else { return Ok(config) };
    let base = config.family().as_base();
    config.with_implementation(implementation).ok_or_else(|| TrainerError::Request {
        problem: format!("implementation is {implementation}, but for {base} there is only one"),
        hint: "leave implementation out: it is for Kandinsky 5",
    })
}

/// The scheduler of the folder; or the published one, if a checkpoint's folder has none or is of another variant.
fn schedule(search: &PartSearch<'_>, config: &DenoiserConfig) -> Result<FlowMatchScheduler> {
    let family = config.family();
    let is_other = |folder: &Path| {
        let is_file = search.checkpoint.is_some();
        let is_variant = kind::family(folder).is_none_or(|found| found.title == family.title);
        is_file && !(is_variant && folder.join(SCHEDULER).exists())
    };
    let is_used = |folder: &&PathBuf| !family.ignores_scheduler_config && !is_other(folder);
    match search.folder.as_ref().filter(is_used) {
        Some(folder) => config::read_checked(&folder.join(SCHEDULER), FlowMatchScheduler::check),
        None => Ok((family.published_model().schedule)()),
    }
}

const SCHEDULER: &str = "scheduler/scheduler_config.json";

impl PipelinePart<DenoiserConfig> {
    fn files(&self) -> Result<WeightFiles<'_>> {
        WeightFiles::find(&self.catalog, &self.layout(), |build| self.config.build(build))
    }

    fn layout(&self) -> CheckpointLayout<'static> {
        self.original.map_or_else(CheckpointLayout::identity, |prefix| self.config.original(prefix))
    }
}
