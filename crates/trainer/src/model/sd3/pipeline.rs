//! An SD3 model with all that belongs to it: the folder that diffusers saves, or a checkpoint of
//! the original layout with such a folder for what it lacks. Opening reads settings and headers
//! and compares every name and shape; nothing large is read before all of it fits together.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use compute::Device;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use weights::{Catalog, Dtype, Tick};

use super::prompts::TextEncoders;
use super::published::Published;
use super::{Config, Sd3, names};
use crate::error::{Result, TrainerError};
use crate::export::Parts;
use crate::fingerprint::Fingerprint;
use crate::model::adapter::read::{AdapterFile, Component, Module};
use crate::model::adapter::{Adapters, Beside, Given};
use crate::model::build::{Builder, Precision, Want, wants};
use crate::model::config::Unsupported;
use crate::model::files::{self, Files, Layout};
use crate::model::vae::{self, Decoder, Encoder};
use crate::model::{component, config, kind};
use crate::sample::schedule;

/// Width of heads in all published models.
const HEAD: usize = 64;

/// Taken: all parts of the published folders are stored in 16 bits. What a run takes does not depend
/// on it: numbers are converted when they are read.
const PUBLISHED_DTYPE: Dtype = Dtype::F16;

/// The parts, open.
pub struct Pipeline {
    /// What was opened.
    pub path: PathBuf,
    /// The model that draws.
    pub transformer: Part<Config>,
    /// Between pictures and latents.
    pub vae: Part<vae::Config>,
    /// Between words and numbers.
    pub encoders: TextEncoders,
    /// How noise is taken away.
    pub schedule: schedule::Config,
    /// The transformer's adapter.
    adapter: HashMap<String, Given>,
}

/// A model of the pipeline: its settings, its files, how they call its tensors.
pub struct Part<C> {
    /// Its settings.
    pub config: C,
    pub(crate) catalog: Catalog,
    /// What names begin with, if the file is of the original layout.
    original: Option<&'static str>,
    /// Where its settings were read, unless they are in the shapes of its tensors.
    settings: Option<PathBuf>,
}

/// `model_index.json`; which class it names is `kind`'s business.
#[derive(Deserialize)]
struct Index {
    #[serde(rename = "_class_name")]
    _class: String,
}

impl Pipeline {
    /// Opens a folder; or a checkpoint, and `rest` for what it lacks.
    pub fn open(path: &Path, rest: Option<&Path>) -> Result<Self> {
        if !path.exists() {
            return Err(not_there(path));
        }
        kind::check(path, kind::Family::Image)?;
        let folder = if path.is_dir() { path } else { rest.ok_or_else(|| needs_rest(path))? };
        check_class(folder)?;
        let original = if path.is_dir() { None } else { Some(path) };
        let (transformer, vae) = (transformer(folder, original)?, autoencoder(folder, original)?);
        check_fit(path, &transformer, &vae)?;
        let encoders = TextEncoders::open(folder, &transformer.config)?;
        let schedule = config::read_checked(
            &folder.join("scheduler/scheduler_config.json"),
            schedule::Config::check,
        )?;
        Ok(Self::new(path, (transformer, vae), encoders, schedule))
    }

    /// The same for whoever only plans: a published model need not be there, its folder's name will
    /// do. On a device that holds nothing it is like any other.
    pub fn open_or_published(path: &Path, rest: Option<&Path>) -> Result<Self> {
        match Published::of(path) {
            Some(model) if !path.exists() => model.open(path),
            _ => Self::open(path, rest),
        }
    }

    /// Of parts that fit together.
    pub(super) fn new(
        path: &Path,
        (transformer, vae): (Part<Config>, Part<vae::Config>),
        encoders: TextEncoders,
        schedule: schedule::Config,
    ) -> Self {
        let (path, adapter) = (path.into(), HashMap::new());
        Self { path, transformer, vae, encoders, schedule, adapter }
    }

    /// Whether it is known by its published settings alone.
    pub fn is_published(&self) -> bool {
        self.transformer.catalog.is_hollow()
    }

    /// Puts an adapter's matrices beside the layers they are for.
    pub fn add_adapter(&mut self, path: &Path) -> Result<()> {
        self.take_adapter(AdapterFile::open(path)?)
    }

    /// The same of a file that is open.
    pub fn take_adapter(&mut self, mut file: AdapterFile) -> Result<()> {
        let config = &self.transformer.config;
        let wants = wants(|build| Sd3::new(config, build))?;
        let original = |module: &str| names::original_module(module, config.num_layers);
        self.adapter = file.take(Component::Transformer, &Module::of(&wants, original))?;
        self.encoders.take_adapter(&mut file)?;
        file.check_all_taken()
    }

    /// The adapter's matrices by the parts they are for.
    pub fn adapter(&self) -> Parts {
        let own = self.adapter.clone().into_iter().collect();
        std::iter::once((Component::Transformer, own)).chain(self.encoders.adapter()).collect()
    }

    /// The parts that an adapter can be for, as they lie on disk, with the matrices beside them.
    pub fn beside(&self) -> Vec<Beside<'_>> {
        let Part { catalog, .. } = &self.transformer;
        let (component, layout) = (Component::Transformer, self.transformer.layout());
        let own = Beside { component, catalog, layout, layers: &self.adapter };
        std::iter::once(own).chain(self.encoders.beside()).collect()
    }

    /// Puts such matrices beside the layers they are for.
    pub fn set_adapter(&mut self, parts: Parts) {
        for (component, layers) in parts {
            let layers = layers.into_iter().collect();
            match component {
                Component::Transformer => self.adapter = layers,
                Component::TextEncoder(index) => self.encoders.set_adapter(index, layers),
                Component::Language => unreachable!("the parts are those that were asked for"),
            }
        }
    }

    /// Channels, height and width of the latent of a picture of this width and height.
    pub fn latent_sizes(&self, size: [usize; 2]) -> [usize; 3] {
        let [width, height] = size.map(|side| side / self.vae.config.reduction());
        [self.vae.config.latent_channels, height, width]
    }

    /// What tells this model from others.
    pub fn fingerprint(&self) -> Result<Fingerprint> {
        files::fingerprint(&self.transformer.catalog)
    }

    /// The adapter it was given.
    pub fn own_adapter(&self) -> Adapters {
        Adapters::given(self.adapter.clone())
    }

    /// The model that draws, with adapters beside its layers.
    pub fn load_transformer(
        &self,
        device: &Device,
        precision: Precision,
        adapters: &mut Adapters,
        tick: Tick<'_>,
    ) -> Result<Sd3> {
        let build = |build: &mut Builder<'_>| Sd3::new(&self.transformer.config, build);
        files::open(device, &self.transformer.files()?, precision, adapters, tick, build)
    }

    /// Latents to pictures.
    pub fn load_decoder(
        &self,
        device: &Device,
        precision: Precision,
        tick: Tick<'_>,
    ) -> Result<Decoder> {
        let build = |build: &mut Builder<'_>| Decoder::new(&self.vae.config, build);
        let files = self.vae.find(build)?;
        files::open(device, &files, precision, &mut Adapters::none(), tick, build)
    }

    /// Pictures to latents. Its half of the files is compared here and not when the pipeline is
    /// opened: whoever draws can do without.
    pub fn load_encoder(
        &self,
        device: &Device,
        precision: Precision,
        tick: Tick<'_>,
    ) -> Result<Encoder> {
        let build = |build: &mut Builder<'_>| Encoder::new(&self.vae.config, build);
        let files = self.vae.find(build)?;
        files::open(device, &files, precision, &mut Adapters::none(), tick, build)
    }
}

/// That both have their weights, and speak of the same latents.
pub(super) fn check_fit(
    path: &Path,
    transformer: &Part<Config>,
    vae: &Part<vae::Config>,
) -> Result<()> {
    transformer.files()?;
    vae.find(|build| Decoder::new(&vae.config, build))?;
    let (latent, wanted) = (vae.config.latent_channels, transformer.config.in_channels);
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
        hint: Published::of(path).map_or("check the path", Published::hint),
    }
}

fn needs_rest(path: &Path) -> TrainerError {
    TrainerError::Request {
        problem: format!("a single file has no text encoders and tokenizers: {}", path.display()),
        hint: "name a folder of the same family that has them with --rest",
    }
}

fn check_class(folder: &Path) -> Result<()> {
    let index = folder.join("model_index.json");
    let problem = |problem: String| TrainerError::Folder {
        what: "model folder",
        problem,
        path: folder.into(),
    };
    if !index.exists() {
        return Err(problem("has no model_index.json".into()));
    }
    config::read::<Index>(&index)?;
    kind::check(folder, kind::Family::Image)
}

/// The folder's, or the checkpoint's, whose settings are in its shapes.
fn transformer(folder: &Path, original: Option<&Path>) -> Result<Part<Config>> {
    let Some(path) = original else {
        return Part::open(&folder.join("transformer"), Config::check);
    };
    let catalog = Catalog::open(path)?;
    // A model of the same family has heads as wide.
    let beside = folder.join("transformer/config.json");
    let d_head =
        if beside.exists() { config::read::<Config>(&beside)?.attention_head_dim } else { HEAD };
    let found = names::prefix(&catalog)
        .and_then(|prefix| Some((prefix, names::infer(&catalog, prefix, d_head)?)));
    let Some((prefix, config)) = found else {
        let problem = "holds no SD3 transformer in the original layout".into();
        return Err(TrainerError::Folder { what: "checkpoint", problem, path: path.into() });
    };
    Ok(Part { config, catalog, original: Some(prefix), settings: None })
}

/// The folder's, or the checkpoint's own if it has one.
fn autoencoder(folder: &Path, original: Option<&Path>) -> Result<Part<vae::Config>> {
    let part = Part::open(&folder.join("vae"), vae::Config::check)?;
    let Some(path) = original else { return Ok(part) };
    let catalog = Catalog::open(path)?;
    Ok(match vae::names::prefix(&catalog) {
        Some(prefix) => Part { catalog, original: Some(prefix), ..part },
        None => part,
    })
}

impl<C: DeserializeOwned> Part<C> {
    /// A component's folder.
    pub(super) fn open(
        folder: &Path,
        check: fn(&C) -> std::result::Result<(), Unsupported>,
    ) -> Result<Self> {
        let settings = folder.join("config.json");
        let config = config::read_checked(&settings, check)?;
        let catalog = component::weights(folder)?;
        Ok(Self { config, catalog, original: None, settings: Some(settings) })
    }
}

impl<C> Part<C> {
    /// One that is not there: it would lie in `folder` and hold these tensors.
    pub(super) fn hollow(folder: &Path, config: C, tensors: Vec<Want>) -> Self {
        let sizes = |want: &Want| want.shape.sizes().iter().map(|size| *size as u64).collect();
        let tensors = tensors.into_iter().map(|want| (want.name.clone(), sizes(&want)));
        let catalog = Catalog::hollow(folder, PUBLISHED_DTYPE, tensors);
        Self { config, catalog, original: None, settings: Some(folder.join("config.json")) }
    }

    /// The files that decide what it computes.
    pub fn sources(&self) -> Vec<PathBuf> {
        self.settings.iter().chain(&self.catalog.files).cloned().collect()
    }
}

impl Part<Config> {
    fn files(&self) -> Result<Files<'_>> {
        Files::find(&self.catalog, &self.layout(), |build| Sd3::new(&self.config, build))
    }

    fn layout(&self) -> Layout<'static> {
        self.original.map_or_else(Layout::same, |prefix| names::original(&self.config, prefix))
    }
}

impl Part<vae::Config> {
    /// The weights of one half.
    fn find<T>(&self, build: impl FnOnce(&mut Builder<'_>) -> Result<T>) -> Result<Files<'_>> {
        let Self { config, catalog, original, .. } = self;
        let layout = match original {
            Some(prefix) => vae::names::original(config, prefix),
            None => vae::names::diffusers(catalog),
        };
        Files::find(catalog, &layout, build)
    }
}
