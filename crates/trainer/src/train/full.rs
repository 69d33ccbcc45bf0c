//! A checkpoint of a full fine-tune as a model folder: what the run would have written, had it ended
//! there. The checkpoint holds the parameters already, so that the model is not written twice with each of
//! them.

use std::collections::HashMap;
use std::path::Path;

use weights::load::load_f32;
use weights::{Catalog, WeightsError};

use crate::config::adapter::AdapterKind;
use crate::config::training_data::TrainingData;
use crate::config::{RawConfig, RunConfig};
use crate::error::{Result, TrainerError};
use crate::export::{language, model};
use crate::model::adapter::read::{STATE, adapter_in, is_checkpoint};
use crate::model::build::{TensorRole, TensorSpec};
use crate::model::diffusion::Pipeline;
use crate::model::files;
use crate::model::llama::language_model::LanguageModel;
use crate::task::session::{EMA_PREFIX, PARAMETER_PREFIX};
use crate::train::folder::{CONFIG, INITIAL};
use crate::train::language::LanguagePipeline;

/// A checkpoint of a full fine-tune, open.
pub struct FullCheckpoint {
    config: RunConfig,
    catalog: Catalog,
    /// The checkpoint's tensors by the model's names.
    names: HashMap<String, String>,
}

/// A model that was made of a checkpoint.
pub struct FullModel {
    /// Tensors that were trained.
    pub n_tensors: usize,
    /// Their format.
    pub dtype: weights::FileDtype,
}

impl FullCheckpoint {
    /// Opens the checkpoint of a run that trained all weights of `base`; none if there is another thing at
    /// that place. What else has to be known is in the run's folder.
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
        // What is not trained of a model that began with random weights is not the base's either.
        let initial = run.join(INITIAL);
        if config.base.random_init && initial.exists() {
            config.base.path = initial;
        }
        let catalog = Catalog::open(&folder.join(STATE))?;
        let names = names(&catalog);
        if names.is_empty() {
            return Err(TrainerError::Request {
                problem: format!(
                    "the checkpoint does not name its parameters: {}",
                    folder.display()
                ),
                hint: "an older hearth wrote it: go on with --resume, and export the next",
            });
        }
        Ok(Some(Self { config, catalog, names }))
    }

    /// Writes the model into a folder that is not there yet, and opens it again.
    pub fn write(&self, rest: Option<&Path>, out: &Path) -> Result<FullModel> {
        let numbers = |name: &str| -> std::result::Result<Option<Vec<f32>>, WeightsError> {
            let Some(stored) = self.names.get(name) else { return Ok(None) };
            let tensor = self.catalog.find(stored)?;
            load_f32(&self.catalog, tensor, 0..tensor.numel()).map(Some)
        };
        let dtype = files::file_dtype(self.config.base.dtype);
        match self.config.data {
            TrainingData::Images { .. } => {
                let pipeline = Pipeline::open(&self.config.base.path, rest)?;
                self.check(&pipeline.transformer.config.tensor_specs()?)?;
                model::write(&pipeline, &numbers, self.config.base.dtype, out)?;
                Pipeline::open(out, None)?;
            }
            TrainingData::Texts { .. } => {
                let LanguagePipeline { base, tokenizer } =
                    LanguagePipeline::open(&self.config, false)?;
                self.check(&base.tensor_specs()?)?;
                language::write_model(&base, &tokenizer, dtype, out, &mut |_, want| {
                    Ok(numbers(&want.name)?.expect("all of the model was trained"))
                })?;
                LanguageModel::open(out)?;
            }
        }
        Ok(FullModel { n_tensors: self.names.len(), dtype })
    }

    /// That these are the base's tensors: no other's are to be written among them.
    fn check(&self, wants: &[TensorSpec]) -> Result<()> {
        let n_trained = wants.iter().filter(|want| self.names.contains_key(&want.name)).count();
        let mut problem = (n_trained < self.names.len())
            .then(|| format!("{} of {} tensors", self.names.len() - n_trained, self.names.len()))
            .map(|lacking| format!("the base lacks {lacking} of the checkpoint"));
        for want in wants {
            let n_wanted = want.shape.elements() as u64;
            let found = match self.names.get(&want.name) {
                Some(stored) => self.catalog.find(stored)?.numel(),
                // What is computed and not trained, as the table of positions.
                None if want.role == TensorRole::Array => n_wanted,
                None => 0,
            };
            if found != n_wanted {
                let name = &want.name;
                let found =
                    format!("{name} has {found} numbers in the checkpoint, {n_wanted} in the base");
                problem = problem.or(Some(found));
            }
        }
        let hint = "give the base that the run began with";
        problem.map_or(Ok(()), |problem| Err(TrainerError::Request { problem, hint }))
    }
}

/// What lies in a checkpoint, by the model's names: EMA where there are any, as in what a run
/// writes at its end.
fn names(catalog: &Catalog) -> HashMap<String, String> {
    let stored = |parameter: &String| {
        let mean = parameter.replacen(PARAMETER_PREFIX, EMA_PREFIX, 1);
        if catalog.find(&mean).is_ok() { mean } else { parameter.clone() }
    };
    let named = catalog.metadata.iter().filter(|(stored, _)| stored.starts_with(PARAMETER_PREFIX));
    named.map(|(parameter, name)| (name.clone(), stored(parameter))).collect()
}
