//! Exports a language model: its adapter for PEFT, or the whole model as a folder for transformers. GGUF files are
//! written by `gguf`.
//!
//! ```text
//! OUT/peft/                     adapter_config.json, adapter_model.safetensors
//!
//! OUT/                          a whole model
//!   config.json                   as in the base, but for the format of numbers
//!   model.safetensors             all tensors; above 10 GB model-00001-of-0000N.safetensors and so on,
//!                                 with model.safetensors.index.json, which says what lies where
//!   tokenizer.json, …             as in the base; of a GGUF file, what it holds of them
//! ```

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use weights::write::{SHARD_BYTES, write_whole};
use weights::{BytesDoneFn, FileDtype, WeightsError};

use super::merge::patch::{MatrixPatch, apply_patches};
use super::model::{copy_files, is_weights, staged};
use super::{AdapterFormat, BaseNorms, ExportBase, ExportedFile, compare, kept_if_equal, write};
use crate::error::{Result, TrainerError};
use crate::model::adapter::read::{AdapterFile, Component};
use crate::model::build::TensorSpec;
use crate::model::compress::CompressedModel;
use crate::model::config;
use crate::model::files::{self, ShardedOutput, ValuesFn};
use crate::model::llama::language_model::LanguageModel;
use crate::text::Tokenizer;

/// Writes the adapter of `base` into `folder` for PEFT, and checks it.
pub fn write_adapter(base: &mut LanguageModel, folder: &Path) -> Result<ExportedFile> {
    let layers = base.adapter();
    let n_layers = layers.len();
    let parts = vec![(Component::Language, layers)];
    let tensors = &base.tensor_specs()?[..];
    let files = base.files()?;
    let of_base = |name: &str| files.as_ref().map(|files| files.values(name)).transpose();
    let norms = BaseNorms::Values(&of_base);
    let export_base = ExportBase { tensors, original: &|_| Vec::new(), family: None, norms };
    let path = write(&parts, AdapterFormat::Peft, folder, "", &export_base)?;
    drop(files);
    let difference = kept_if_equal(&path, || {
        base.take_adapter(AdapterFile::open(&path)?.with_any_values(true))?;
        let again = vec![(Component::Language, base.adapter())];
        compare(&parts, &again, AdapterFormat::Peft, &path)
    })?;
    let [(_, layers)] = <[_; 1]>::try_from(parts).expect("it was made of one above");
    base.set_adapter(layers);
    Ok(ExportedFile { format: AdapterFormat::Peft, path, n_layers, difference })
}

/// Writes a whole model with the base's configuration, one tensor at a time, in shards of at most so many bytes but for
/// a tensor that is larger: beside `out` first, so that `out` is complete or unchanged.
pub fn write_model(
    base: &LanguageModel,
    tokenizer: &Tokenizer,
    dtype: FileDtype,
    max_shard_bytes: u64,
    out: &Path,
    values: ValuesFn<'_>,
) -> Result<()> {
    let (tensors, config) = (base.tensor_specs()?, settings(base)?);
    let folder = ModelFolder { path: &base.path, tensors, config };
    write_folder(&folder, tokenizer, dtype, max_shard_bytes, out, values)
}

/// What a model's folder is made of, besides values.
pub struct ModelFolder<'a> {
    /// Where its other files are, if it is a folder.
    path: &'a Path,
    tensors: Vec<TensorSpec>,
    /// `config.json`
    config: Value,
}

impl<'a> ModelFolder<'a> {
    /// Of a compressed model.
    pub fn of_compressed(base: &'a CompressedModel) -> Result<Self> {
        let config = serde_json::to_value(&base.config).expect("settings are plain JSON");
        Ok(Self { path: &base.path, tensors: base.tensor_specs()?, config })
    }
}

/// Writes a model as [`write_model`] does.
pub fn write_folder(
    ModelFolder { path, tensors, config }: &ModelFolder<'_>,
    tokenizer: &Tokenizer,
    dtype: FileDtype,
    max_shard_bytes: u64,
    out: &Path,
    values: ValuesFn<'_>,
) -> Result<()> {
    staged(out, |folder| {
        let failed = |source| TrainerError::Io { what: "write", path: folder.into(), source };
        fs::create_dir_all(folder).map_err(failed)?;
        if path.is_dir() {
            let is_index = |path: &Path| path.to_string_lossy().ends_with(".index.json");
            copy_files(path, folder, |path| !is_weights(path) && !is_index(path))?;
        } else {
            tokenizer.save(folder)?;
        }
        write_whole(&folder.join("config.json"), with_dtype(config, dtype).as_bytes())?;
        // Required by transformers.
        let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        let output = ShardedOutput { folder, stem: "model", max_shard_bytes };
        files::save_shards(output, &metadata, tensors, dtype, values)
    })
}

/// Writes the base with its adapter merged, from any kind of file; `merge` does so for a folder that keeps its
/// formats.
pub fn write_merged(
    base: &LanguageModel,
    tokenizer: &Tokenizer,
    dtype: FileDtype,
    out: &Path,
    tick: BytesDoneFn<'_>,
) -> Result<()> {
    let layers = base.adapter();
    let Some(files) = base.files()? else {
        return Err(TrainerError::Request {
            problem: format!("{} has no weights to add an adapter to", base.path.display()),
            hint: "give a folder or a GGUF file",
        });
    };
    write_model(base, tokenizer, dtype, SHARD_BYTES, out, &mut |_, want| {
        let values = files.values(&want.name)?;
        if !tick(values.len() as u64 * dtype.bytes()) {
            return Err(WeightsError::Cancelled);
        }
        let module = want.name.strip_suffix(".weight");
        let Some(given) = module.and_then(|module| layers.get(module)) else { return Ok(values) };
        let [_, width] = given.sizes();
        let merged = apply_patches(&[MatrixPatch::for_whole(given)], 0, width, &values);
        Ok(merged.into_iter().map(|value| value as f32).collect())
    })
}

/// `config.json` of the base, or as a preset's would be.
fn settings(base: &LanguageModel) -> Result<Value> {
    let own = base.path.join("config.json");
    if own.exists() {
        return config::read(&own);
    }
    Ok(serde_json::to_value(&base.config).expect("settings are plain JSON"))
}

/// `config.json`, with the dtype of the weights.
fn with_dtype(config: &Value, dtype: FileDtype) -> String {
    let mut config = config.clone();
    let name = match dtype {
        FileDtype::Bf16 => "bfloat16",
        FileDtype::F16 => "float16",
        _ => "float32",
    };
    // Versions before 5 know the first, later ones both.
    config["torch_dtype"] = json!(name);
    config["dtype"] = json!(name);
    format!("{config:#}\n")
}

#[cfg(test)]
mod tests {
    use weights::Catalog;

    use super::*;
    use crate::model::llama::preset::LlamaPreset;

    #[test]
    fn a_large_model_is_written_in_shards_and_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let (out, limit) = (folder.path().join("model"), 600_000);
        let tokenizer = Tokenizer::bytes();
        let base = LanguageModel::preset(LlamaPreset::Tiny, tokenizer.vocab_size(), 1).unwrap();
        // Values that differ between tensors and between their elements.
        let values = |at: usize, n: usize| -> Vec<f32> {
            (0..n).map(|index| (at * 31 + index) as f32 * 1e-4).collect()
        };
        write_model(&base, &tokenizer, FileDtype::F32, limit, &out, &mut |at, want| {
            Ok(values(at, want.shape.elements()))
        })
        .unwrap();
        assert!(!out.join("model.safetensors").exists());
        let index = config::read::<Value>(&out.join("model.safetensors.index.json")).unwrap();
        let names = index["weight_map"].as_object().unwrap();
        assert_eq!(names.len(), base.tensor_specs().unwrap().len());
        for shard in names.values().map(|name| out.join(name.as_str().unwrap())) {
            let shard = Catalog::open(&shard).unwrap();
            assert!(shard.bytes() <= limit || shard.tensors.len() == 1);
            assert_eq!(shard.metadata["format"], "pt");
        }
        let again = LanguageModel::open(&out).unwrap();
        let files = again.files().unwrap().unwrap();
        assert!(again.catalog().unwrap().files.len() > 4);
        for (at, want) in base.tensor_specs().unwrap().iter().enumerate() {
            let read = files.values(&want.name).unwrap();
            assert_eq!(read, values(at, want.shape.elements()), "{}", want.name);
        }
    }

    #[test]
    fn a_link_is_replaced_and_not_written_through() {
        let folder = tempfile::tempdir().unwrap();
        let (diary, peft) = (folder.path().join("diary"), folder.path().join("peft"));
        fs::write(&diary, "dear diary").unwrap();
        fs::create_dir(&peft).unwrap();
        std::os::unix::fs::symlink(&diary, peft.join("adapter_config.json")).unwrap();
        let norms = BaseNorms::Values(&|_| Ok(None));
        let base = ExportBase { tensors: &[], original: &|_| Vec::new(), family: None, norms };
        write(&Vec::new(), AdapterFormat::Peft, folder.path(), "", &base).unwrap();
        assert_eq!(fs::read_to_string(&diary).unwrap(), "dear diary");
        assert!(peft.join("adapter_config.json").symlink_metadata().unwrap().is_file());
    }
}
