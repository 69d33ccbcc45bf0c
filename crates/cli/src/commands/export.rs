//! `hearth export`: an adapter for other programs, or merged into its base.

mod full;
mod language;

use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::json;
use trainer::TrainerError;
use trainer::export::merge::{AdapterMerge, MergedModel};
use trainer::export::{ExportedFile, can_hold, export};
use trainer::model::adapter::AdapterFormat;
use trainer::model::adapter::read::AdapterFile;
use trainer::model::{self, OpenModel};
use trainer::train::full::FullCheckpoint;

use super::model_arg::ModelArg;
use super::named_value::{self, NamedValue};
use super::parts::PartArgs;
use crate::commands::CommandOutcome;
use crate::failure::Failure;
use crate::render;
use crate::render::export::ExportRow;
use crate::render::progress::ByteProgress;

/// Convert a LoRA for diffusers, PEFT, kohya or ComfyUI, or merge it into its base model.
///
/// Reads adapters that any of them wrote. Every written file is read back by the rules of the program it is
/// for: each tensor must match a layer of the base, with the same weight update as before. With --merge the
/// adapter is merged into the base: a model folder that needs no adapter. A checkpoint of a run works too; one
/// of a full fine-tune becomes a model folder.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth export fox.safetensors --base stable-diffusion-3.5-medium --out fox
  hearth export fox/peft --base sd3 --format comfyui --out ComfyUI/models/loras --name fox
  hearth export fox.safetensors --base stable-diffusion-3.5-medium --merge --out fox-sd3.5-medium
  hearth export notes --base Qwen3-4B --merge --out Qwen3-4B-notes
  hearth export notes --base Qwen3-4B --out notes.gguf       # llama-cli --lora notes.gguf
  hearth export run/checkpoints/step-000250 --base stable-diffusion-3.5-medium --out early")]
pub struct ExportArgs {
    /// Adapter: a file, a PEFT folder, the folder of a run, or one of its checkpoints
    adapter: ModelArg,

    /// Base model: a diffusers or transformers folder, a GGUF file, a single-file checkpoint, or the name of a
    /// fetched model
    #[arg(long, value_name = "MODEL")]
    base: ModelArg,

    #[command(flatten)]
    parts: PartArgs,

    /// Output folder; of a language model's LoRA also a .gguf file, for llama.cpp and Ollama
    #[arg(long, value_name = "PATH")]
    out: PathBuf,

    /// Programs to write for; adapters of language models are for PEFT only [default: all]
    #[arg(long, value_delimiter = ',', value_parser = named_value::parser::<AdapterFormat>())]
    format: Vec<AdapterFormat>,

    /// Prefix of kohya and ComfyUI file names [default: the adapter's name]
    #[arg(long)]
    name: Option<String>,

    /// Merge the adapter into the base, and write the whole model into a new folder
    #[arg(long, conflicts_with_all = ["format", "name"])]
    merge: bool,

    /// Accept NaN or infinite values, as a run that diverged has them
    #[arg(long)]
    force: bool,

    /// Print one JSON object per file, or for the merged model
    #[arg(long)]
    json: bool,
}

impl ExportArgs {
    /// Whether a GGUF file is asked for.
    fn is_gguf(&self) -> bool {
        let ending = self.out.extension().unwrap_or_default();
        !self.merge && ending.eq_ignore_ascii_case("gguf")
    }

    fn open_adapter(&self) -> trainer::Result<AdapterFile> {
        Ok(AdapterFile::open(&self.adapter)?.with_any_values(self.force))
    }
}

pub fn run(arguments: &ExportArgs, out: &mut dyn Write) -> Result<CommandOutcome, Failure> {
    if arguments.is_gguf() {
        return language::run_gguf(arguments, out);
    }
    if arguments.out.is_file() {
        let problem = format!("--out is a file, expected a folder: {}", arguments.out.display());
        let hint = "choose a folder; it is made if it is not there";
        return Err(TrainerError::Request { problem, hint }.into());
    }
    if let Some(checkpoint) = FullCheckpoint::open(&arguments.adapter, &arguments.base)? {
        return full::run(arguments, &checkpoint, out);
    }
    let mut pipeline = match model::open(&arguments.base, &arguments.parts.paths())? {
        OpenModel::Language(base) => return language::run(arguments, *base, out),
        OpenModel::Compressed(base) => {
            let problem = format!("a compressed model has no adapters: {}", base.path.display());
            let hint = "its folder is what a run exports; nothing else reads it";
            return Err(TrainerError::Request { problem, hint }.into());
        }
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
    let adapter = weights::hub::model_name(&arguments.adapter);
    let stem =
        || Path::new(&adapter).file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let name = arguments.name.clone().unwrap_or_else(stem);
    let mut rows = Vec::new();
    let is_wanted = |format: &AdapterFormat| match &arguments.format[..] {
        [] => can_hold(&pipeline, *format),
        typed => typed.contains(format),
    };
    let all = AdapterFormat::NAMES.iter().map(|(_, format)| *format);
    for format in all.filter(is_wanted).collect::<Vec<_>>() {
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
