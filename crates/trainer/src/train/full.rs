//! Exports a checkpoint of a full fine-tune as a model folder, one tensor at a time: at the end of a run, and by
//! `hearth export`. The checkpoint has the parameters in its state; a second copy of the model with each checkpoint
//! would be waste.

use std::collections::HashMap;
use std::path::Path;

use weights::load::load_f32;
use weights::{BytesDoneFn, Catalog, WeightsError};

use crate::config::adapter::AdapterKind;
use crate::config::optimizer::OptimizerKind;
use crate::config::training_data::TrainingData;
use crate::config::{RawConfig, RunConfig};
use crate::error::{Result, TrainerError};
use crate::event::{Event, EventSink, Phase, ProgressUnit};
use crate::export::language::{self, ModelFolder};
use crate::export::model;
use crate::model::adapter::read::{adapter_in, is_checkpoint, state_file};
use crate::model::build::{TensorRole, TensorSpec};
use crate::model::compress::CompressedModel;
use crate::model::diffusion::Pipeline;
use crate::model::diffusion::paths::PartPaths;
use crate::model::files;
use crate::model::llama::language_model::LanguageModel;
use crate::optim::{STATE_Z, averaged_on_host};
use crate::task::session::{EMA_PREFIX, OPTIMIZER_PREFIX, PARAMETER_PREFIX, find_saved};
use crate::train::compress;
use crate::train::folder::{CONFIG, INITIAL};
use crate::train::language::LanguagePipeline;

/// The folder of a run's model, and how an event calls it.
pub(super) const MODEL: &str = "model";

/// A checkpoint of a full fine-tune, open.
pub struct FullCheckpoint {
    config: RunConfig,
    catalog: Catalog,
    /// The checkpoint's tensors by the model's names.
    names: HashMap<String, String>,
}

/// A model exported from a checkpoint.
pub struct FullModel {
    /// Tensors that were trained.
    pub n_tensors: usize,
    /// Their format.
    pub dtype: weights::FileDtype,
}

impl FullCheckpoint {
    /// Opens a checkpoint of a full fine-tune of `base`; none if `folder` is something else. The run's folder has
    /// its configuration.
    pub fn open(folder: &Path, base: &Path) -> Result<Option<Self>> {
        if !is_checkpoint(folder) || adapter_in(folder).is_some() {
            return Ok(None);
        }
        let run = folder.join("../..");
        let mut raw = RawConfig::from_file(&run.join(CONFIG))?;
        raw.set_path("base.path", base)?;
        let mut config = raw.resolve()?;
        if config.adapter.kind != AdapterKind::Full {
            return Ok(None);
        }
        // After a random init, tensors that are not trained come from the initial model.
        let initial = run.join(INITIAL);
        if config.base.random_init && initial.exists() {
            config.base.path = initial.into();
        }
        Self::of_run(config, folder).map(Some)
    }

    /// A checkpoint of a run with that configuration.
    pub(super) fn of_run(config: RunConfig, folder: &Path) -> Result<Self> {
        let catalog = Catalog::open(&state_file(folder))?;
        let names = names(&catalog);
        if names.is_empty() {
            return Err(TrainerError::Request {
                problem: format!(
                    "the checkpoint does not name its parameters: {}",
                    folder.display()
                ),
                hint: "it is from an older hearth: continue the run with --resume, and export its next checkpoint",
            });
        }
        Ok(Self { config, catalog, names })
    }

    /// Writes the model into a new folder, and opens it to check it. `tick` hears of every tensor.
    pub fn write(&self, parts: &PartPaths, out: &Path, tick: BytesDoneFn<'_>) -> Result<FullModel> {
        match &self.config.data {
            TrainingData::Images { .. } => {
                let pipeline = Pipeline::open(&self.config.base.path, parts)?;
                let written = self.write_image_model(&pipeline, out, tick)?;
                Pipeline::open(out, &PartPaths::default())?;
                Ok(written)
            }
            TrainingData::Texts { compress: Some(compress), .. } => {
                let pipeline = compress::open(&self.config, compress, false)?;
                let written = self.write_compressed_model(&pipeline, out, tick)?;
                CompressedModel::open(out, compress.training())?;
                Ok(written)
            }
            TrainingData::Texts { compress: None, .. } => {
                let pipeline = LanguagePipeline::open(&self.config, false)?;
                let written = self.write_language_model(&pipeline, out, tick)?;
                LanguageModel::open(out)?;
                Ok(written)
            }
        }
    }

    /// Bytes of the tensors that are read.
    pub fn bytes(&self) -> u64 {
        let stored = self.names.values().filter_map(|name| self.catalog.find(name).ok());
        stored.map(|tensor| tensor.bytes).sum()
    }

    pub(super) fn write_image_model(
        &self,
        pipeline: &Pipeline,
        out: &Path,
        tick: BytesDoneFn<'_>,
    ) -> Result<FullModel> {
        self.check(&pipeline.transformer.config.tensor_specs()?)?;
        let max_shard_bytes = self.config.output.max_shard_size.0;
        let values = |name: &str| self.values(name, tick);
        model::write(pipeline, &values, self.config.base.dtype, max_shard_bytes, out)?;
        Ok(self.written())
    }

    pub(super) fn write_language_model(
        &self,
        LanguagePipeline { base, tokenizer }: &LanguagePipeline,
        out: &Path,
        tick: BytesDoneFn<'_>,
    ) -> Result<FullModel> {
        self.check(&base.tensor_specs()?)?;
        let dtype = files::file_dtype(self.config.base.dtype);
        let max_shard_bytes = self.config.output.max_shard_size.0;
        language::write_model(base, tokenizer, dtype, max_shard_bytes, out, &mut |_, want| {
            Ok(self.values(&want.name, tick)?.expect("all of the model was trained"))
        })?;
        Ok(self.written())
    }

    pub(super) fn write_compressed_model(
        &self,
        LanguagePipeline { base, tokenizer }: &LanguagePipeline<CompressedModel>,
        out: &Path,
        tick: BytesDoneFn<'_>,
    ) -> Result<FullModel> {
        self.check(&base.tensor_specs()?)?;
        let dtype = files::file_dtype(self.config.base.dtype);
        let max_shard_bytes = self.config.output.max_shard_size.0;
        let folder = ModelFolder::of_compressed(base)?;
        language::write_folder(&folder, tokenizer, dtype, max_shard_bytes, out, &mut |_, want| {
            Ok(self.values(&want.name, tick)?.expect("all of the model was trained"))
        })?;
        Ok(self.written())
    }

    fn written(&self) -> FullModel {
        let dtype = files::file_dtype(self.config.base.dtype);
        FullModel { n_tensors: self.names.len(), dtype }
    }

    /// The values of a tensor of the model, if it was trained.
    fn values(
        &self,
        name: &str,
        tick: BytesDoneFn<'_>,
    ) -> std::result::Result<Option<Vec<f32>>, WeightsError> {
        let Some(stored) = self.names.get(name) else { return Ok(None) };
        let tensor = self.catalog.find(stored)?;
        if !tick(tensor.bytes) {
            return Err(WeightsError::Cancelled);
        }
        let mut values = load_f32(&self.catalog, tensor, 0..tensor.numel())?;
        if self.config.optimizer.kind == OptimizerKind::AdamWScheduleFree {
            let index = stored.trim_start_matches(PARAMETER_PREFIX);
            let z = self.catalog.find(&format!("{OPTIMIZER_PREFIX}{index}.{STATE_Z}"))?;
            let z = load_f32(&self.catalog, z, 0..z.numel())?;
            averaged_on_host(&self.config.optimizer, &mut values, &z);
        }
        Ok(Some(values))
    }

    /// Fails unless the checkpoint's tensors are those of the base.
    fn check(&self, wants: &[TensorSpec]) -> Result<()> {
        let n_trained = wants.iter().filter(|want| self.names.contains_key(&want.name)).count();
        let mut problem = (n_trained < self.names.len())
            .then(|| format!("{} of {} tensors", self.names.len() - n_trained, self.names.len()))
            .map(|lacking| format!("the base lacks {lacking} of the checkpoint"));
        for want in wants {
            let n_wanted = want.shape.elements() as u64;
            let found = match self.names.get(&want.name) {
                Some(stored) => self.catalog.find(stored)?.numel(),
                // Computed and not trained, as position embeddings.
                None if want.role == TensorRole::Array => n_wanted,
                None => 0,
            };
            if found != n_wanted {
                let name = &want.name;
                let found =
                    format!("{name} has {found} values in the checkpoint, {n_wanted} in the base");
                problem = problem.or(Some(found));
            }
        }
        let hint = "use the base that the run started from";
        problem.map_or(Ok(()), |problem| Err(TrainerError::Request { problem, hint }))
    }
}

/// Writes the model of a finished run with `write`, and emits that.
pub(super) fn export_result(
    config: &RunConfig,
    checkpoint: &Path,
    events: &EventSink<'_>,
    write: impl FnOnce(&FullCheckpoint, BytesDoneFn<'_>) -> Result<FullModel>,
) -> Result<()> {
    let checkpoint = FullCheckpoint::of_run(config.clone(), checkpoint)?;
    events.begin_phase(Phase::Export, ProgressUnit::Bytes, checkpoint.bytes())?;
    let tick = |bytes| events.advance(ProgressUnit::Bytes, bytes);
    let FullModel { n_tensors, .. } = write(&checkpoint, &tick)?;
    let (format, path) = (MODEL.into(), MODEL.into());
    events.emit(Event::Exported { format, path, layers: n_tensors })
}

/// A checkpoint's parameters by the model's names: their EMA where there is one, as in the export at the end.
fn names(catalog: &Catalog) -> HashMap<String, String> {
    let stored = |parameter: &String| {
        let ema = find_saved(catalog, &parameter.replacen(PARAMETER_PREFIX, EMA_PREFIX, 1));
        ema.map_or_else(|_| parameter.clone(), |ema| ema.name.clone())
    };
    let named = catalog.metadata.iter().filter(|(stored, _)| stored.starts_with(PARAMETER_PREFIX));
    named.map(|(parameter, name)| (name.clone(), stored(parameter))).collect()
}
