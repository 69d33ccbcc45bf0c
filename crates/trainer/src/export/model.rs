//! A whole model as a diffusers folder: the trained transformer with the other parts of its base.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use weights::folder::AtomicFolder;
use weights::load::load_f32;
use weights::write::copy_whole;
use weights::{FileDtype, WeightsError};

use crate::error::{Result, TrainerError};
use crate::model::diffusion::{Pipeline, TRANSFORMER, init};
use crate::model::files;
use crate::model::files::ShardedOutput;

/// How diffusers names files of weights.
const STEM: &str = "diffusion_pytorch_model";

/// The values of a trained tensor, by name; called for one tensor at a time.
pub type TrainedTensorFn<'a> =
    &'a dyn Fn(&str) -> std::result::Result<Option<Vec<f32>>, WeightsError>;

/// Writes the model with the trained transformer: beside `out` first, so that `out` is complete or unchanged.
pub fn write(
    pipeline: &Pipeline,
    trained: TrainedTensorFn<'_>,
    dtype: compute::Dtype,
    max_shard_bytes: u64,
    out: &Path,
) -> Result<()> {
    staged(out, |folder| {
        copy_rest(&pipeline.path, folder)?;
        let folder = &folder.join(TRANSFORMER);
        let output = ShardedOutput { folder, stem: STEM, max_shard_bytes };
        write_transformer(pipeline, trained, dtype, output)
    })
}

/// Fills a folder beside `out`, and then renames it. What an earlier attempt left there is removed, and so is this
/// one's if it fails.
pub(super) fn staged(out: &Path, fill: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let failed = |source| TrainerError::Io { what: "write", path: out.into(), source };
    let folder = AtomicFolder::create(out).map_err(failed)?;
    fill(folder.path())?;
    folder.commit().map_err(failed)
}

fn write_transformer(
    pipeline: &Pipeline,
    trained: TrainedTensorFn<'_>,
    dtype: compute::Dtype,
    output: ShardedOutput<'_>,
) -> Result<()> {
    let transformer = &pipeline.transformer;
    let wants = transformer.config.tensor_specs()?;
    let dtype = files::file_dtype(dtype);
    files::save_shards(output, &BTreeMap::new(), &wants, dtype, &mut |_, want| {
        if let Some(values) = trained(&want.name)? {
            return Ok(values);
        }
        // Computed and not trained, as position embeddings.
        let found = transformer.catalog.find(&want.name)?;
        load_f32(&transformer.catalog, found, 0..found.numel())
    })
}

/// Writes the model of a folder with randomly initialised weights.
pub fn write_initial(base: &Path, seed: u64, out: &Path) -> Result<()> {
    let config = init::config_of(base)?;
    copy_rest(base, out)?;
    init::write_random_init(
        &config,
        seed,
        FileDtype::F32,
        &out.join(TRANSFORMER).join(format!("{STEM}.safetensors")),
    )
}

/// The other folders of a model.
const OTHERS: [&str; 9] = [
    "processor",
    "scheduler",
    "tokenizer",
    "tokenizer_2",
    "tokenizer_3",
    "text_encoder",
    "text_encoder_2",
    "text_encoder_3",
    "vae",
];

/// What files of weights end in: beside a model's folders there are often whole checkpoints.
const WEIGHTS_SUFFIXES: [&str; 5] = ["safetensors", "bin", "ckpt", "pt", "gguf"];

/// Copies a model's folder but for the weights of its transformer.
pub(crate) fn copy_rest(from: &Path, to: &Path) -> Result<()> {
    copy_files(from, to, |path| !is_weights(path))?;
    for name in OTHERS.iter().filter(|name| from.join(name).is_dir()) {
        copy_files(&from.join(name), &to.join(name), |_| true)?;
    }
    let [from, to] = [from, to].map(|folder| folder.join(TRANSFORMER));
    copy_files(&from, &to, |path| path.ends_with("config.json"))
}

/// Whether a file holds weights, by its name.
pub(super) fn is_weights(path: &Path) -> bool {
    WEIGHTS_SUFFIXES.iter().any(|end| path.extension().is_some_and(|found| found == *end))
}

/// Copies the plain files of a folder that are wanted; hidden ones never are.
pub(super) fn copy_files(from: &Path, to: &Path, is_wanted: impl Fn(&Path) -> bool) -> Result<()> {
    let failed = |source| TrainerError::Io { what: "copy", path: from.into(), source };
    fs::create_dir_all(to).map_err(failed)?;
    for entry in fs::read_dir(from).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let name = path.file_name().unwrap_or_default();
        let is_hidden = name.to_string_lossy().starts_with('.');
        if path.is_file() && !is_hidden && is_wanted(&path) {
            copy_whole(&path, &to.join(name))?;
        }
    }
    Ok(())
}
