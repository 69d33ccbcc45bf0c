//! A language model to train or sample: a folder as transformers saves it, one GGUF file, or a preset to
//! train from scratch. Opening reads config and headers and compares every name and shape; no weights
//! are read before all of it fits together.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use compute::Device;
use weights::{BytesDoneFn, Catalog};

use super::init::LlamaInit;
use super::preset::LlamaPreset;
use super::published::PublishedLlama;
use super::{Llama, LlamaConfig, gguf, names};
use crate::error::{Result, TrainerError};
use crate::fingerprint::{Fingerprint, PartHashes};
use crate::model::adapter::read::{AdapterFile, Component, TargetModule};
use crate::model::adapter::{AdaptedComponent, Adapters, LayerWeights};
use crate::model::build::{ModelBuilder, Precision, TensorSpec, tensor_specs};
use crate::model::files::{self, WeightFiles};
use crate::model::{component, config, hub, kind};

/// The model, open.
pub struct LanguageModel {
    /// What was opened; the name of a preset.
    pub path: PathBuf,
    /// Its config.
    pub config: LlamaConfig,
    /// Its weights; none for a preset.
    catalog: Option<Catalog>,
    /// Seed of a preset's random init.
    seed: u64,
    /// Its adapter.
    adapter: HashMap<String, LayerWeights>,
}

impl LanguageModel {
    /// Opens a folder or a GGUF file.
    pub fn open(path: &Path) -> Result<Self> {
        hub::check(path)?;
        if !path.exists() {
            return Err(not_there(path));
        }
        kind::check(path, kind::ModelKind::Language)?;
        if path.is_dir() && !path.join("config.json").exists() {
            return Err(TrainerError::Request {
                problem: format!("no language model in {}: it has no config.json", path.display()),
                hint: "give the folder that transformers saved, with config.json, tokenizer.json and \
                       safetensors, or a GGUF file",
            });
        }
        let (config, catalog) = if path.is_dir() {
            let config = config::read_checked(&path.join("config.json"), LlamaConfig::check)?;
            (config, component::weights(path)?)
        } else {
            let catalog = Catalog::open(path)?;
            (gguf::config(&catalog)?, catalog)
        };
        Self::with(path, config, Some(catalog), 0)
    }

    /// The same for planning: a published model need not be downloaded, the name of its folder is enough. It
    /// can be built on the meta device like any other.
    pub fn open_or_published(path: &Path) -> Result<Self> {
        match PublishedLlama::by_path(path) {
            Some(model) if !hub::is_ready(path) => {
                let config = model.config();
                let tensors = tensor_specs(|build| Llama::new(&config, build))?;
                let sizes = |want: &TensorSpec| {
                    want.shape.sizes().iter().map(|size| *size as u64).collect()
                };
                let tensors = tensors.iter().map(|want| (want.name.clone(), sizes(want)));
                let catalog = Catalog::meta(path, weights::FileDtype::Bf16, tensors);
                Self::with(path, config, Some(catalog), 0)
            }
            _ => Self::open(path),
        }
    }

    /// A randomly initialised model of a preset, for a vocabulary of this size.
    pub fn preset(preset: LlamaPreset, vocabulary: usize, seed: u64) -> Result<Self> {
        Self::with(Path::new(preset.name()), preset.config(vocabulary), None, seed)
    }

    /// The same config with random init.
    #[must_use]
    pub fn from_scratch(self, seed: u64) -> Self {
        Self { catalog: None, seed, ..self }
    }

    fn with(path: &Path, config: LlamaConfig, catalog: Option<Catalog>, seed: u64) -> Result<Self> {
        let base = Self { path: path.into(), config, catalog, seed, adapter: HashMap::new() };
        base.files()?;
        Ok(base)
    }

    /// What its files hold; nothing for a preset.
    pub fn catalog(&self) -> Option<&Catalog> {
        self.catalog.as_ref()
    }

    /// Where its tokenizer is: in its folder, or in the GGUF file itself. A preset has none.
    pub fn tokenizer(&self) -> Option<&Path> {
        self.catalog().map(|_| self.path.as_path())
    }

    /// The files that its output depends on.
    pub fn sources(&self) -> Vec<PathBuf> {
        let settings = self.path.is_dir().then(|| self.path.join("config.json"));
        let files = self.catalog().map(|catalog| catalog.files.clone());
        settings.into_iter().chain(files.unwrap_or_default()).collect()
    }

    /// All of its tensors.
    pub fn tensor_specs(&self) -> Result<Vec<TensorSpec>> {
        tensor_specs(|build| Llama::new(&self.config, build))
    }

    /// Identifies this model.
    pub fn fingerprint(&self) -> Result<Fingerprint> {
        if let Some(catalog) = &self.catalog {
            return files::fingerprint(catalog);
        }
        // With the type names of the first release: its runs resume.
        let config = format!("{:?}", self.config);
        let config = config.replace("LlamaConfig {", "Config {").replace("RopeConfig {", "Rope {");
        // Nor do models without them know of settings that came later.
        let config = config.replace(&format!(", rotary_dim: {}", self.config.head_dim), "");
        let later = ", full_attention: [], local_rope_theta: None, query_pre_attn_scalar: None, \
             experts: None";
        let config = config.replace(later, "");
        let text = format!("{config} {}", self.seed);
        let whole = blake3::hash(text.as_bytes()).to_hex().to_string();
        Ok(Fingerprint { whole, parts: PartHashes::new() })
    }

    /// Loads the model, with adapters beside its layers.
    pub fn load(
        &self,
        device: &Device,
        precision: Precision,
        adapters: &mut Adapters,
        tick: BytesDoneFn<'_>,
    ) -> Result<Llama> {
        let build = |build: &mut ModelBuilder<'_>| Llama::new(&self.config, build);
        if let Some(files) = self.files()? {
            return files::load_model(device, &files, precision, adapters, tick, build);
        }
        let mut source = LlamaInit::new(&self.config, precision, self.seed);
        build(&mut ModelBuilder::new(device, precision, &mut source, adapters))
    }

    /// Its weights on disk; nothing for a preset.
    pub fn files(&self) -> Result<Option<WeightFiles<'_>>> {
        let find = |catalog| {
            let layout = names::layout_of(catalog, &self.config);
            WeightFiles::find(catalog, &layout, |build| Llama::new(&self.config, build))
        };
        self.catalog().map(find).transpose()
    }

    /// Loads an adapter beside the layers it is for.
    pub fn add_adapter(&mut self, path: &Path) -> Result<()> {
        self.take_adapter(AdapterFile::open(path)?)
    }

    /// The same from an open file.
    pub fn take_adapter(&mut self, mut file: AdapterFile) -> Result<()> {
        let modules = TargetModule::with_norms(&self.tensor_specs()?, |_| Vec::new());
        self.adapter = file.take(Component::Language, None, &modules)?;
        file.check_all_taken()
    }

    /// Sets the adapter.
    pub fn set_adapter(&mut self, layers: BTreeMap<String, LayerWeights>) {
        self.adapter = layers.into_iter().collect();
    }

    /// The adapter by layer.
    pub fn adapter(&self) -> BTreeMap<String, LayerWeights> {
        self.adapter.clone().into_iter().collect()
    }

    /// Loads the model with its adapter.
    pub fn load_adapted(
        &self,
        device: &Device,
        precision: Precision,
        tick: BytesDoneFn<'_>,
    ) -> Result<(Llama, Adapters)> {
        let mut adapters = Adapters::loaded(self.adapter.clone());
        let model = self.load(device, precision, &mut adapters, tick)?;
        adapters.check_all_used(&self.path)?;
        Ok((model, adapters))
    }

    /// The model on disk, with the adapter beside it; `None` for a preset.
    pub fn adapted_component(&self) -> Option<AdaptedComponent<'_>> {
        let catalog = self.catalog()?;
        let layout = names::layout_of(catalog, &self.config);
        Some(AdaptedComponent {
            component: Component::Language,
            catalog,
            layout,
            layers: &self.adapter,
        })
    }
}

fn not_there(path: &Path) -> TrainerError {
    TrainerError::Request {
        problem: format!("no model at {}", path.display()),
        hint: match PublishedLlama::by_path(path) {
            Some(_) => {
                "`hearth fetch OWNER/NAME` downloads it, give that name as the base; a plan needs its name alone"
            }
            None => "check the path",
        },
    }
}
