//! An adapter added to its base: a model of the same layout that needs no adapter, for programs that
//! take none. Computed in f64 and rounded once to the format the base is stored in. Streams rows, so
//! that memory stays small whatever the model's size. All is written beside the target, read back
//! and compared, and only then given its name: a full disk or a kill leaves no half model.
//!
//! ```text
//! OUT.partial/                            while it is written; OUT after the proof
//!   model_index.json, vae/, tokenizer*/   as in the base
//!   transformer/                          config as in the base, weights with the adapter in them,
//!                                         in as many files as the base has
//!   text_encoder*/                        likewise, if the adapter has a part for them
//! OUT.partial/NAME.safetensors            if the base is one checkpoint file
//! OUT.partial/                            of a language model: weights with the adapter in them, in as
//!                                         many files as the base has; all else as in the base
//! ```
//!
//! Weights of the base that nothing was added to and that a program could take for the merged ones
//! are left out: other precisions of the same part, checkpoints beside the folders.

mod other_files;
pub(super) mod patch;
mod proof;

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{self, Path, PathBuf};

use weights::convert::encode;
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
use crate::model::llama::language_model::LanguageModel;

/// Numbers held at a time. Chosen: 32 MB as f64, little beside any model.
const BLOCK: u64 = 4 << 20;

/// A model that was written and proven.
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
    /// The largest distance of a number from base and adapter, in steps of its format.
    pub worst_steps: f64,
}

/// A merge that can be done, as far as files tell before they are read.
pub struct AdapterMerge<'a> {
    base: &'a Path,
    parts: Vec<AdaptedComponent<'a>>,
    other_files: OtherFiles,
}

impl<'a> AdapterMerge<'a> {
    /// Of what `pipeline` holds and the adapter beside it.
    pub fn plan(pipeline: &'a Pipeline) -> Result<Self> {
        Self::of(&pipeline.path, pipeline.adapted_components())
    }

    /// Of a language model's folder and the adapter beside it.
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

    /// Bytes that [`Self::run`] will tell of: all are written, and what is merged is read again.
    pub fn bytes(&self) -> u64 {
        self.other_files.bytes + 2 * self.parts.iter().map(|part| part.catalog.bytes()).sum::<u64>()
    }

    /// Writes and proves the model; `out` is not there yet.
    pub fn run(self, out: &Path, tick: BytesDoneFn<'_>) -> Result<MergedModel> {
        let Self { base, parts, other_files: rest } = self;
        check_outside(base, out)?;
        let staging = StagingFolder::create(out)?;
        let mut merged = MergedModel {
            path: out.into(),
            n_changed: 0,
            n_unchanged: 0,
            n_copied: rest.files.len(),
            left_out: rest.left_out.clone(),
            worst_steps: 0.0,
        };
        rest.copy(base, &staging.path, tick)?;
        for part in &parts {
            let folder = if base.is_dir() { &part.component.folder() } else { "" };
            merge_part(part, &staging.path.join(folder), tick, &mut merged)?;
        }
        // A checkpoint alone is no model.
        if base.is_dir() {
            model::open(&staging.path, None)?;
        }
        staging.finish()?;
        Ok(merged)
    }
}

/// What cannot be merged is known before anything is written.
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

/// A copy of a folder into itself has no end.
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

/// That all files can be written again, and all changed numbers in the format they have.
fn check_formats(part: &AdaptedComponent<'_>) -> Result<()> {
    let refused = |what: String| TrainerError::Request {
        problem: format!("cannot merge into {what}, needed is safetensors with f32, f16 or bf16"),
        hint: "convert the base with `hearth convert`, or fetch it in another format",
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

/// Writes all files of a part again, and compares them with what they were made of.
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

/// What is added to the tensors of a part, by their names in its files.
type MatrixPatches<'a> = HashMap<String, Vec<MatrixPatch<'a>>>;

fn write(
    base: &Catalog,
    patches: &MatrixPatches<'_>,
    target: &Path,
    tick: BytesDoneFn<'_>,
) -> Result<()> {
    let entering = |tensor: &TensorInfo| OutputTensor {
        name: tensor.name.clone(),
        dtype: dtype(tensor),
        shape: tensor.shape.clone(),
    };
    let tensors = base.tensors.iter().map(entering).collect();
    let failed = |source| WeightsError::io("write", target, source);
    let mut buffer = Vec::new();
    write_file(target, &base.metadata, tensors, false, &mut |entering, out| {
        let tensor = base.find(&entering.name)?;
        let Some(patches) = patches.get(&tensor.name) else {
            return load_blocks(base, tensor, entering.dtype, &mut buffer, tick, &mut |block| {
                out.write_all(block).map_err(failed)
            });
        };
        each_rows(base, tensor, tick, &mut |first, width, numbers| {
            let numbers: Vec<f32> = patch::apply_patches(patches, first, width, numbers)
                .into_iter()
                .map(|number| number as f32)
                .collect();
            buffer.resize(numbers.len() * entering.dtype.bytes() as usize, 0);
            encode(&numbers, entering.dtype, &mut buffer);
            out.write_all(&buffer).map_err(failed)
        })
    })?;
    Ok(())
}

/// Takes the first row's index, the width of rows, and some whole rows.
type RowsFn<'a> = &'a mut dyn FnMut(usize, usize, &[f32]) -> weights::Result<()>;

/// Hands over a matrix some rows at a time.
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
        let numbers = first * width..(first + step).min(rows) * width;
        let bytes = (numbers.end - numbers.start) * dtype(tensor).bytes();
        take(first as usize, width as usize, &load_f32(catalog, tensor, numbers)?)?;
        if !tick(bytes) {
            return Err(WeightsError::Cancelled);
        }
    }
    Ok(())
}

/// A folder that gets its name when all of it is there, and goes away otherwise.
struct StagingFolder {
    path: PathBuf,
    target: PathBuf,
    is_done: bool,
}

impl StagingFolder {
    fn create(target: &Path) -> Result<Self> {
        let mut name = target.file_name().unwrap_or_default().to_os_string();
        name.push(".partial");
        let path = target.with_file_name(name);
        let is_used = fs::read_dir(target).is_ok_and(|mut entries| entries.next().is_some());
        if is_used || target.is_file() {
            return Err(TrainerError::Request {
                problem: format!("--out is there already and not empty: {}", target.display()),
                hint: "choose another folder, or remove this one first",
            });
        }
        let beside = path.parent().unwrap_or(Path::new(""));
        fs::create_dir_all(beside).map_err(|source| failed("create", beside, source))?;
        match fs::create_dir(&path) {
            Ok(()) => Ok(Self { path, target: target.into(), is_done: false }),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                Err(TrainerError::Request {
                    problem: format!("another merge left this, or is at work: {}", path.display()),
                    hint: "remove the folder if no other hearth is running",
                })
            }
            Err(source) => Err(failed("create", &path, source)),
        }
    }

    fn finish(mut self) -> Result<()> {
        if self.target.is_dir() {
            // Only if it is empty.
            fs::remove_dir(&self.target).map_err(|source| failed("write", &self.target, source))?;
        }
        fs::rename(&self.path, &self.target)
            .map_err(|source| failed("write", &self.target, source))?;
        self.is_done = true;
        Ok(())
    }
}

impl Drop for StagingFolder {
    fn drop(&mut self) {
        if !self.is_done {
            _ = fs::remove_dir_all(&self.path);
        }
    }
}

fn failed(what: &'static str, path: &Path, source: io::Error) -> TrainerError {
    TrainerError::Io { what, path: path.into(), source }
}
