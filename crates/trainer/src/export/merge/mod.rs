//! Merges an adapter into its base: a model of the same layout, for programs without LoRA support. Computed in f64
//! and rounded once to the base's format, some rows at a time, so that memory stays small. All is written beside
//! the target, read back, compared, and then renamed: a full disk or a kill leaves no half model.
//!
//! ```text
//! .OUT.NUMBER.partial/                    while it is written; OUT after the check
//!   model_index.json, vae/, tokenizer*/   as in the base
//!   transformer/                          config as in the base, weights with the adapter in them,
//!                                         in as many files as the base has
//!   text_encoder*/                        likewise, if the adapter has a part for them
//! .OUT.NUMBER.partial/NAME.safetensors    if the base is one checkpoint file
//! .OUT.NUMBER.partial/                    of a language model: weights with the adapter in them, in as
//!                                         many files as the base has; all else as in the base
//! ```
//!
//! Unmerged weights of the base that a program could take for the merged ones are left out: other precisions of the
//! same part, checkpoints beside the folders.

mod other_files;
pub(super) mod patch;
mod proof;

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{self, Path, PathBuf};

use weights::convert::encode;
use weights::folder::AtomicFolder;
use weights::load::{load_blocks, load_f32};
use weights::safetensors::OutputTensor;
use weights::write::write_file;
use weights::{BytesDoneFn, Catalog, FileDtype, TensorEncoding, TensorInfo, WeightsError};

use self::other_files::OtherFiles;
use self::patch::MatrixPatch;
use crate::error::{Result, TrainerError};
use crate::model;
use crate::model::adapter::AdaptedComponent;
use crate::model::adapter::read::Component;
use crate::model::diffusion::Pipeline;
use crate::model::diffusion::paths::PartPaths;
use crate::model::llama::language_model::LanguageModel;
use crate::model::scaled_fp8;

/// Values in memory at a time. Chosen: 32 MiB as f64, little beside any model.
const BLOCK: u64 = 4 << 20;

/// A merged model that was written and checked.
#[derive(Clone, Debug)]
pub struct MergedModel {
    /// The folder.
    pub path: PathBuf,
    /// Tensors that the adapter changed.
    pub n_changed: usize,
    /// Tensors of the same files that are what they were, byte for byte.
    pub n_unchanged: usize,
    /// Files that were copied.
    pub n_copied: usize,
    /// Weights of the base that were left out, relative to it.
    pub left_out: Vec<PathBuf>,
    /// The largest error of a merged value, in units in the last place (ULP) of its format.
    pub worst_steps: f64,
}

/// A merge whose files were checked.
pub struct AdapterMerge<'a> {
    base: &'a Path,
    parts: Vec<AdaptedComponent<'a>>,
    other_files: OtherFiles,
}

impl<'a> AdapterMerge<'a> {
    /// Of a pipeline and its adapter.
    pub fn plan(pipeline: &'a Pipeline) -> Result<Self> {
        Self::of(&pipeline.path, pipeline.adapted_components())
    }

    /// Of a language model's folder and its adapter.
    pub fn plan_language(base: &'a LanguageModel) -> Result<Self> {
        Self::of(&base.path, base.adapted_component().into_iter().collect())
    }

    fn of(base: &'a Path, mut parts: Vec<AdaptedComponent<'a>>) -> Result<Self> {
        parts.retain(|part| !part.layers.is_empty());
        check(base, &parts)?;
        let rest =
            if base.is_dir() { OtherFiles::of(base, &parts)? } else { OtherFiles::default() };
        Ok(Self { base, parts, other_files: rest })
    }

    /// Bytes of [`Self::run`]'s progress: all files are written, and the merged ones read back.
    pub fn bytes(&self) -> u64 {
        self.other_files.bytes + 2 * self.parts.iter().map(|part| part.catalog.bytes()).sum::<u64>()
    }

    /// Writes and checks the model; `out` must not exist.
    pub fn run(self, out: &Path, tick: BytesDoneFn<'_>) -> Result<MergedModel> {
        let Self { base, parts, other_files: rest } = self;
        check_outside(base, out)?;
        check_empty(out)?;
        let unwritable = |source| failed("write", out, source);
        let staging = AtomicFolder::create(out).map_err(unwritable)?;
        let mut merged = MergedModel {
            path: out.into(),
            n_changed: 0,
            n_unchanged: 0,
            n_copied: rest.files.len(),
            left_out: rest.left_out.clone(),
            worst_steps: 0.0,
        };
        rest.copy(base, staging.path(), tick)?;
        for part in &parts {
            let folder = if base.is_dir() { &part.component.folder() } else { "" };
            merge_part(part, &staging.path().join(folder), tick, &mut merged)?;
        }
        // A single checkpoint file is no whole model.
        if base.is_dir() {
            model::open(staging.path(), &PartPaths::default())?;
        }
        // Somebody may have put something there meanwhile.
        check_empty(out)?;
        staging.commit().map_err(unwritable)?;
        Ok(merged)
    }
}

/// Fails if the adapter cannot be merged.
fn check(base: &Path, parts: &[AdaptedComponent<'_>]) -> Result<()> {
    if parts.is_empty() {
        let problem = "it has no matrices to merge".into();
        return Err(TrainerError::Adapter { problem, path: base.into() });
    }
    let is_elsewhere = |part: &&AdaptedComponent<'_>| part.component != Component::Transformer;
    if let Some(part) = parts.iter().find(is_elsewhere).filter(|_| !base.is_dir()) {
        let folder = part.component.folder();
        return Err(TrainerError::Request {
            problem: format!("the adapter changes {folder}, which is not in {}", base.display()),
            hint: "give the model as a diffusers folder with --base",
        });
    }
    parts.iter().try_for_each(check_formats)
}

/// Fails if `out` is in the base: a copy into itself has no end.
fn check_outside(base: &Path, out: &Path) -> Result<()> {
    let whole = |path: &Path| path::absolute(path).map_err(|source| failed("find", path, source));
    if !whole(out)?.starts_with(whole(base)?) {
        return Ok(());
    }
    Err(TrainerError::Request {
        problem: format!("--out lies in the base: {}", out.display()),
        hint: "choose a folder outside of it",
    })
}

/// Fails unless all files are safetensors, and all merged tensors f32, f16 or bf16.
fn check_formats(part: &AdaptedComponent<'_>) -> Result<()> {
    let refused_with = |what: String, hint| TrainerError::Request {
        problem: format!("cannot merge into {what}, needed is safetensors with f32, f16 or bf16"),
        hint,
    };
    let refused = |what| {
        let hint = "convert the base with `hearth convert`, or fetch it in another format";
        refused_with(what, hint)
    };
    let is_other = |file: &&PathBuf| file.extension().is_none_or(|kind| kind != "safetensors");
    if let Some(file) = part.catalog.files.iter().find(is_other) {
        return Err(refused(file.display().to_string()));
    }
    for key in patch::patches(part).keys() {
        let tensor = part.catalog.find(key)?;
        if !matches!(dtype(tensor), FileDtype::F32 | FileDtype::F16 | FileDtype::Bf16) {
            let file = part.catalog.files[tensor.file].display();
            return Err(refused(format!("{key}, stored as {}, of {file}", tensor.encoding)));
        }
        if let Some(scale) = scaled_fp8::scale_of(part.catalog, tensor)? {
            let hint = "fetch the base in bf16 or f16 for the merge; adapters for it fit both";
            return Err(refused_with(format!("{key}, stored with {}", scale.name), hint));
        }
    }
    Ok(())
}

/// The format of a tensor of a safetensors file.
fn dtype(tensor: &TensorInfo) -> FileDtype {
    match tensor.encoding {
        TensorEncoding::Plain(dtype) => dtype,
        TensorEncoding::Blocks(_) => {
            unreachable!("only GGUF has blocks, and all files are safetensors")
        }
    }
}

/// Writes the merged files of a part, and checks them.
fn merge_part(
    part: &AdaptedComponent<'_>,
    folder: &Path,
    tick: BytesDoneFn<'_>,
    merged: &mut MergedModel,
) -> Result<()> {
    let patches = patch::patches(part);
    for file in &part.catalog.files {
        let base = Catalog::open(file)?;
        let target = folder.join(file.file_name().unwrap_or_default());
        write(&base, &patches, &target, tick)?;
        let proven = proof::prove(&base, &Catalog::open(&target)?, &patches, tick)?;
        merged.n_changed += proven.n_changed;
        merged.n_unchanged += proven.n_unchanged;
        merged.worst_steps = merged.worst_steps.max(proven.worst_steps);
    }
    Ok(())
}

/// The patches of a part's tensors, by their names in its files.
type MatrixPatches<'a> = HashMap<String, Vec<MatrixPatch<'a>>>;

fn write(
    base: &Catalog,
    patches: &MatrixPatches<'_>,
    target: &Path,
    tick: BytesDoneFn<'_>,
) -> Result<()> {
    let output = |tensor: &TensorInfo| OutputTensor {
        name: tensor.name.clone(),
        dtype: dtype(tensor),
        shape: tensor.shape.clone(),
    };
    let tensors = base.tensors.iter().map(output).collect();
    let failed = |source| WeightsError::io("write", target, source);
    let mut buffer = Vec::new();
    write_file(target, &base.metadata, tensors, false, &mut |output, out| {
        let tensor = base.find(&output.name)?;
        let Some(patches) = patches.get(&tensor.name) else {
            return load_blocks(base, tensor, output.dtype, &mut buffer, tick, &mut |block| {
                out.write_all(block).map_err(failed)
            });
        };
        each_rows(base, tensor, tick, &mut |first, width, values| {
            let values: Vec<f32> = patch::apply_patches(patches, first, width, values)
                .into_iter()
                .map(|value| value as f32)
                .collect();
            buffer.resize(values.len() * output.dtype.bytes() as usize, 0);
            encode(&values, output.dtype, &mut buffer);
            out.write_all(&buffer).map_err(failed)
        })
    })?;
    Ok(())
}

/// Takes the first row's index, the width of rows, and some whole rows.
type RowsFn<'a> = &'a mut dyn FnMut(usize, usize, &[f32]) -> weights::Result<()>;

/// Reads a matrix some rows at a time.
fn each_rows(
    catalog: &Catalog,
    tensor: &TensorInfo,
    tick: BytesDoneFn<'_>,
    take: RowsFn<'_>,
) -> weights::Result<()> {
    let rows = tensor.shape.first().copied().unwrap_or(1);
    let width = (tensor.numel() / rows.max(1)).max(1);
    let step = (BLOCK / width).max(1);
    for first in (0..rows).step_by(step as usize) {
        let values = first * width..(first + step).min(rows) * width;
        let bytes = (values.end - values.start) * dtype(tensor).bytes();
        take(first as usize, width as usize, &load_f32(catalog, tensor, values)?)?;
        if !tick(bytes) {
            return Err(WeightsError::Cancelled);
        }
    }
    Ok(())
}

/// Fails unless there is nothing where the merged model goes, or an empty folder.
fn check_empty(out: &Path) -> Result<()> {
    let is_used = fs::read_dir(out).is_ok_and(|mut entries| entries.next().is_some());
    if is_used || out.is_file() {
        return Err(TrainerError::Request {
            problem: format!("--out exists and is not empty: {}", out.display()),
            hint: "choose another folder, or remove this one first",
        });
    }
    Ok(())
}

fn failed(what: &'static str, path: &Path, source: io::Error) -> TrainerError {
    TrainerError::Io { what, path: path.into(), source }
}
