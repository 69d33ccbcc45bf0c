//! A compressed model to train or sample: a folder that hearth exported, or a preset to train from scratch.
//!
//! ```text
//! FOLDER/
//!   config.json          CompressorConfig
//!   model.safetensors    embed_tokens, encoder.layers.N, policy, early_norm, trunk.in_proj, trunk.layers.N, trunk.norm,
//!                        trunk.out_proj, decoder.layers.N, norm; a layer's tensors are named as a Llama's
//!   tokenizer.json, …    none for bytes
//! ```

use std::path::{Path, PathBuf};

use compute::Device;
use weights::{BytesDoneFn, Catalog};

use super::{Compressor, CompressorConfig, CompressorTraining};
use crate::error::Result;
use crate::fingerprint::{Fingerprint, PartHashes};
use crate::model::adapter::Adapters;
use crate::model::build::{ModelBuilder, Precision, TensorSpec, tensor_specs};
use crate::model::files::{self, CheckpointLayout, WeightFiles};
use crate::model::llama::init::LlamaInit;
use crate::model::{component, config};

/// The model, open.
pub struct CompressedModel {
    /// What was opened; the name of a preset.
    pub path: PathBuf,
    /// Its shape.
    pub config: CompressorConfig,
    /// How it is trained.
    pub training: CompressorTraining,
    catalog: Option<Catalog>,
    seed: u64,
}

impl CompressedModel {
    /// Whether one lies in a folder.
    pub fn is_at(path: &Path) -> bool {
        config::read::<CompressorConfig>(&path.join("config.json")).is_ok()
    }

    /// Opens a folder.
    pub fn open(path: &Path, training: CompressorTraining) -> Result<Self> {
        let config = config::read_checked(&path.join("config.json"), CompressorConfig::check)?;
        let catalog = Some(component::weights(path)?);
        let model = Self { path: path.into(), config, training, catalog, seed: 0 };
        model.files()?;
        Ok(model)
    }

    /// A randomly initialised one.
    pub fn random_init(
        path: &Path,
        config: CompressorConfig,
        training: CompressorTraining,
        seed: u64,
    ) -> Self {
        Self { path: path.into(), config, training, catalog: None, seed }
    }

    /// The same with a trunk that sees all tokens, to compare speeds with.
    pub fn uncompressed(&self) -> Result<Self> {
        let mut all = Self::open(&self.path, self.training)?;
        all.config.keep_one_in = 1;
        Ok(all)
    }

    /// What its files hold; nothing for a preset.
    pub fn catalog(&self) -> Option<&Catalog> {
        self.catalog.as_ref()
    }

    /// All of its tensors.
    pub fn tensor_specs(&self) -> Result<Vec<TensorSpec>> {
        tensor_specs(|build| Compressor::new(&self.config, build))
    }

    /// Identifies this model.
    pub fn fingerprint(&self) -> Result<Fingerprint> {
        if let Some(catalog) = &self.catalog {
            return files::fingerprint(catalog);
        }
        let text = format!("{:?} {}", self.config, self.seed);
        let whole = blake3::hash(text.as_bytes()).to_hex().to_string();
        Ok(Fingerprint { whole, parts: PartHashes::new() })
    }

    /// Loads the model.
    pub fn load(
        &self,
        device: &Device,
        precision: Precision,
        adapters: &mut Adapters,
        tick: BytesDoneFn<'_>,
    ) -> Result<Compressor> {
        let build = |build: &mut ModelBuilder<'_>| Compressor::new(&self.config, build);
        if let Some(files) = self.files()? {
            return files::load_model(device, &files, precision, adapters, tick, build);
        }
        let mut source = LlamaInit::new(&self.config.trunk, precision, self.seed);
        build(&mut ModelBuilder::new(device, precision, &mut source, adapters))
    }

    fn files(&self) -> Result<Option<WeightFiles<'_>>> {
        let find = |catalog| {
            WeightFiles::find(catalog, &CheckpointLayout::identity(), |build| {
                Compressor::new(&self.config, build)
            })
        };
        self.catalog().map(find).transpose()
    }
}
