//! `hearth export`: an adapter for other programs, or added to its base.

mod full;
mod language;

use std::io::Write;
use std::path::PathBuf;

use serde_json::json;
use trainer::TrainerError;
use trainer::export::merge::{AdapterMerge, MergedModel};
use trainer::export::{ExportedFile, export};
use trainer::model::adapter::AdapterFormat;
use trainer::model::adapter::read::AdapterFile;
use trainer::model::{self, OpenModel};
use trainer::train::full::FullCheckpoint;

use super::named_value::{self, NamedValue};
use crate::commands::CommandOutcome;
use crate::failure::Failure;
use crate::render;
use crate::render::export::ExportRow;
use crate::render::progress::ByteProgress;

/// Write an adapter as diffusers, PEFT, kohya and ComfyUI read it.
///
/// Takes an adapter that any of them wrote. Every file is read again by the rules of the program it is
/// for: every tensor must find its layer in the base, and add the same to it as before. With --merge
/// the adapter is added to the base instead: a model folder like the base's, that needs no adapter.
/// A checkpoint of a run is an adapter too; that of a full fine-tune becomes a model folder.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth export fox.safetensors --base stable-diffusion-3.5-medium --out fox
  hearth export fox/peft --base sd3 --format comfyui --out ComfyUI/models/loras --name fox
  hearth export fox.safetensors --base stable-diffusion-3.5-medium --merge --out fox-sd3.5-medium
  hearth export notes --base Qwen3-4B --merge --out Qwen3-4B-notes
  hearth export run/checkpoints/step-000250 --base stable-diffusion-3.5-medium --out early")]
pub struct ExportArgs {
    /// The adapter: a file, PEFT's folder, the folder of a run, or one of its checkpoints
    adapter: PathBuf,

    /// The model it is for: a folder of diffusers or transformers, a GGUF file, or a checkpoint in the
    /// original layout
    #[arg(long, value_name = "PATH")]
    base: PathBuf,

    /// A folder that has what a checkpoint lacks: text encoders, tokenizers, scheduler
    #[arg(long, value_name = "FOLDER")]
    rest: Option<PathBuf>,

    /// Where the files go
    #[arg(long, value_name = "FOLDER")]
    out: PathBuf,

    /// Programs to write for; adapters of language models are for PEFT only [default: all]
    #[arg(long, value_delimiter = ',', value_parser = named_value::parser::<AdapterFormat>())]
    format: Vec<AdapterFormat>,

    /// What files for kohya and ComfyUI begin with [default: the adapter's name]
    #[arg(long)]
    name: Option<String>,

    /// Write the whole base with the adapter added to it, into a folder that is not there yet
    #[arg(long, conflicts_with_all = ["format", "name"])]
    merge: bool,

    /// Take an adapter also with values that are not finite, as a run that diverged has them
    #[arg(long)]
    force: bool,

    /// Print one JSON object per file, or for what was merged
    #[arg(long)]
    json: bool,
}

impl ExportArgs {
    fn open_adapter(&self) -> trainer::Result<AdapterFile> {
        Ok(AdapterFile::open(&self.adapter)?.with_any_values(self.force))
    }
}

pub fn run(arguments: &ExportArgs, out: &mut dyn Write) -> Result<CommandOutcome, Failure> {
    if arguments.out.is_file() {
        let problem = format!("--out is a file, expected a folder: {}", arguments.out.display());
        let hint = "choose a folder; it is made if it is not there";
        return Err(TrainerError::Request { problem, hint }.into());
    }
    if let Some(checkpoint) = FullCheckpoint::open(&arguments.adapter, &arguments.base)? {
        return full::run(arguments, &checkpoint, out);
    }
    let mut pipeline = match model::open(&arguments.base, arguments.rest.as_deref())? {
        OpenModel::Language(base) => return language::run(arguments, *base, out),
        OpenModel::Image(pipeline) => *pipeline,
    };
    if let Some(name) = arguments.name.as_ref().filter(|name| name.contains(['/', '\\'])) {
        let problem = format!("--name is {name:?}, accepted is the beginning of a file name");
        return Err(TrainerError::Request { problem, hint: "give the folder with --out" }.into());
    }
    pipeline.take_adapter(arguments.open_adapter()?)?;
    if arguments.merge {
        return run_merge(arguments, AdapterMerge::plan(&pipeline)?, out);
    }
    let stem = || arguments.adapter.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let name = arguments.name.clone().unwrap_or_else(stem);
    let mut rows = Vec::new();
    let is_wanted =
        |format: &AdapterFormat| arguments.format.is_empty() || arguments.format.contains(format);
    for format in AdapterFormat::NAMES.iter().map(|(_, format)| *format).filter(is_wanted) {
        let exported = export(&mut pipeline, format, &arguments.out, &name)?;
        rows.push(ExportRow::new(format, exported));
    }
    show(arguments, &rows, out)
}

impl ExportRow {
    fn new(program: AdapterFormat, exported: ExportedFile) -> Self {
        let ExportedFile { path, n_layers, difference, .. } = exported;
        Self {
            format: named_value::value_name(&program),
            path,
            layers: n_layers,
            unmatched: 0,
            difference,
        }
    }
}

fn show(
    arguments: &ExportArgs,
    rows: &[ExportRow],
    out: &mut dyn Write,
) -> Result<CommandOutcome, Failure> {
    if arguments.json {
        for row in rows {
            writeln!(out, "{}", serde_json::to_string(row).map_err(std::io::Error::from)?)?;
        }
    } else {
        write!(out, "{}", render::export::page(rows))?;
    }
    Ok(CommandOutcome::Done)
}

fn run_merge(
    arguments: &ExportArgs,
    merge: AdapterMerge<'_>,
    out: &mut dyn Write,
) -> Result<CommandOutcome, Failure> {
    let progress = ByteProgress::begin("merging", merge.bytes())?;
    let merged = merge.run(&arguments.out, &|bytes| progress.tick(bytes))?;
    drop(progress);
    if arguments.json {
        let MergedModel { path, n_changed, n_unchanged, n_copied, left_out, worst_steps } = &merged;
        let row = json!({
            "path": path, "changed": n_changed, "unchanged": n_unchanged, "copied": n_copied,
            "left_out": left_out, "worst_steps": worst_steps,
        });
        writeln!(out, "{row}")?;
    } else {
        write!(out, "{}", render::export::merged(&merged))?;
    }
    Ok(CommandOutcome::Done)
}
