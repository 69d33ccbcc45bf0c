//! `hearth inspect`: the tensors of a model file or folder, and what looks wrong.

use std::fs::DirEntry;
use std::io::Write;
use std::path::{Path, PathBuf};

use trainer::model::kind::MODEL_INDEX;
use weights::checksum::checksum;
use weights::survey::{is_lora_up, odd_values, oddities, value_stats};
use weights::{Catalog, TensorInfo, WeightsError};

use super::model_arg::ModelArg;
use crate::commands::CommandOutcome;
use crate::failure::Failure;
use crate::render;
use crate::render::inspect::{ModelSurvey, TensorRow};
use crate::render::progress::ByteProgress;

/// Show the tensors of a model file or folder, and what looks wrong.
///
/// Reads safetensors, sharded or not, PyTorch files and GGUF. Only headers are read, and the values of LoRA
/// adapters, which are small; --values reads all values.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth inspect adapter.safetensors            is it complete, was it trained?
  hearth inspect stable-diffusion-3.5-medium    every component of a diffusers folder
  hearth inspect model.gguf --all               one line per tensor
  hearth inspect model/ --values                look for NaN and infinity in all values
  hearth inspect model/ --json | jq '.[].tensors[].name'")]
pub struct InspectArgs {
    /// Model file, shard index or folder, or the name of a fetched model
    path: ModelArg,

    /// List every tensor instead of one line per repeated layer
    #[arg(long)]
    all: bool,

    /// Read all values and report NaN, infinity and extremes
    #[arg(long)]
    values: bool,

    /// Read all files and show their BLAKE3 checksums
    #[arg(long)]
    checksum: bool,

    /// Print everything as JSON
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &InspectArgs, out: &mut dyn Write) -> Result<CommandOutcome, Failure> {
    let catalogs = open_all(arguments.path.checked()?)?;
    let looked_at = |tensor: &TensorInfo| arguments.values || is_lora_up(&tensor.name);
    let tensors = catalogs.iter().flat_map(|catalog| &catalog.tensors);
    let looked_at_bytes: u64 =
        tensors.filter(|tensor| looked_at(tensor)).map(|tensor| tensor.bytes).sum();
    let checksum_bytes: u64 =
        catalogs.iter().map(Catalog::bytes).filter(|_| arguments.checksum).sum();
    let progress = ByteProgress::begin("reading", looked_at_bytes + checksum_bytes)?;
    let mut surveys = Vec::new();
    for catalog in &catalogs {
        let checksums =
            if arguments.checksum { checksums(catalog, &progress)? } else { Vec::new() };
        surveys.push(ModelSurvey { checksums, ..survey(catalog, &looked_at, &progress)? });
    }
    drop(progress);
    if arguments.json {
        render::json::object(out, &surveys)?;
    } else {
        for survey in &surveys {
            write!(out, "{}", render::inspect::page(survey, arguments.all))?;
        }
    }
    Ok(CommandOutcome::Done)
}

/// A pipeline folder has its models in subfolders, one per component; files beside them are the same in one piece.
fn open_all(path: &Path) -> Result<Vec<Catalog>, WeightsError> {
    if !path.join(MODEL_INDEX).exists() {
        match Catalog::open_each(path) {
            Err(WeightsError::NoModel { .. }) => {}
            opened => return opened,
        }
    }
    let list = |source| WeightsError::io("list", path, source);
    let entries =
        std::fs::read_dir(path).and_then(Iterator::collect::<Result<Vec<_>, _>>).map_err(list)?;
    let mut folders: Vec<_> =
        entries.iter().map(DirEntry::path).filter(|path| path.is_dir()).collect();
    folders.sort_unstable();
    let mut catalogs = Vec::new();
    for folder in &folders {
        match Catalog::open_each(folder) {
            Err(WeightsError::NoModel { .. }) => {}
            opened => catalogs.extend(opened?),
        }
    }
    if catalogs.is_empty() {
        Err(WeightsError::NoModel { path: path.into() })
    } else {
        Ok(catalogs)
    }
}

fn checksums(catalog: &Catalog, progress: &ByteProgress) -> Result<Vec<String>, WeightsError> {
    let sum = |file: &PathBuf| Ok(checksum(file, &|bytes| progress.tick(bytes))?.to_string());
    catalog.files.iter().map(sum).collect()
}

fn survey(
    catalog: &Catalog,
    looked_at: &dyn Fn(&TensorInfo) -> bool,
    progress: &ByteProgress,
) -> Result<ModelSurvey, WeightsError> {
    let mut odd = oddities(catalog);
    let mut tensors = Vec::new();
    for tensor in &catalog.tensors {
        let found = if looked_at(tensor) {
            value_stats(catalog, tensor, &|bytes| progress.tick(bytes))?
        } else {
            None
        };
        odd.extend(found.as_ref().and_then(|values| odd_values(tensor, values)));
        tensors.push(TensorRow {
            name: tensor.name.clone(),
            format: tensor.encoding.to_string(),
            shape: tensor.shape.clone(),
            bytes: tensor.bytes,
            values: found,
        });
    }
    Ok(ModelSurvey {
        path: catalog.path.clone(),
        files: catalog.files.clone(),
        checksums: Vec::new(),
        bytes: catalog.bytes(),
        params: catalog.tensors.iter().map(TensorInfo::numel).sum(),
        metadata: catalog.metadata.clone(),
        tensors,
        warnings: odd,
    })
}
