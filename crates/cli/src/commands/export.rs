//! `hearth export`: an adapter for other programs, or merged into its base.

mod full;
mod language;

use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::json;
use trainer::TrainerError;
use trainer::export::gguf::GgufMix;
use trainer::export::merge::{AdapterMerge, MergedModel};
use trainer::export::{ExportedFile, can_hold, export};
use trainer::model::adapter::AdapterFormat;
use trainer::model::adapter::read::AdapterFile;
use trainer::model::{self, OpenModel};
use trainer::train::full::FullCheckpoint;

use super::file_format::FileFormat;
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
  hearth export notes --base Qwen3-4B --merge --out notes-q4.gguf --dtype q4_k_m
  hearth export notes --base Qwen3-4B --out notes.gguf       # llama-cli --lora notes.gguf
  hearth export notes --base Qwen3-4B --format ollama --dtype q4_k_m --out notes-ollama
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

    /// Output folder; of a language model's LoRA, or of it merged, also a .gguf file for llama.cpp
    #[arg(long, value_name = "PATH")]
    out: PathBuf,

    /// Programs to write for; adapters of language models are for peft, mlx and ollama [default: all for images, peft for
    /// language]
    #[arg(long, value_delimiter = ',', value_parser = named_value::parser::<ExportFormat>())]
    format: Vec<ExportFormat>,

    /// Prefix of kohya and ComfyUI file names [default: the adapter's name]
    #[arg(long)]
    name: Option<String>,

    /// Merge the adapter into the base, and write the whole model into a new folder
    #[arg(long, conflicts_with = "name")]
    merge: bool,

    /// Number format of a whole model as a GGUF file: with --merge and a .gguf file, or for ollama [default: f16]
    #[arg(long)]
    dtype: Option<FileFormat>,

    /// Accept NaN or infinite values, as a run that diverged has them
    #[arg(long)]
    force: bool,

    /// Print one JSON object per file, or for the merged model
    #[arg(long)]
    json: bool,
}

/// A program that adapters are written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExportFormat {
    Adapter(AdapterFormat),
    Mlx,
    Ollama,
}

impl ExportArgs {
    /// Whether a GGUF file is asked for.
    fn is_gguf(&self) -> bool {
        self.out.extension().unwrap_or_default().eq_ignore_ascii_case("gguf")
    }

    /// The formats of GGUF files.
    fn mix(&self) -> GgufMix {
        self.dtype.map_or(GgufMix::F16, FileFormat::mix)
    }

    /// What is asked for together must be possible together.
    fn check(&self) -> Result<(), Failure> {
        let is_ollama = self.format.contains(&ExportFormat::Ollama);
        let other = self.format.iter().find(|format| **format != ExportFormat::Ollama);
        if let Some(other) = other.filter(|_| self.merge) {
            let problem = format!(
                "--format {} is for adapters, --merge writes a whole model",
                named_value::value_name(other)
            );
            let hint = "leave --format out; the folder loads in transformers, diffusers and mlx-lm";
            return Err(TrainerError::Request { problem, hint }.into());
        }
        if is_ollama && self.is_gguf() {
            let problem =
                format!("--out is {}, --format ollama writes a folder", self.out.display());
            let hint = "give a folder; it will hold GGUF files and a Modelfile";
            return Err(TrainerError::Request { problem, hint }.into());
        }
        if self.dtype.is_some() && !is_ollama && !(self.merge && self.is_gguf()) {
            let problem = "--dtype is for whole models as GGUF files".to_owned();
            let hint = "leave it out, or give --format ollama, or --merge with --out NAME.gguf";
            return Err(TrainerError::Request { problem, hint }.into());
        }
        Ok(())
    }

    fn open_adapter(&self) -> trainer::Result<AdapterFile> {
        Ok(AdapterFile::open(&self.adapter)?.with_any_values(self.force))
    }
}

pub fn run(arguments: &ExportArgs, out: &mut dyn Write) -> Result<CommandOutcome, Failure> {
    arguments.check()?;
    if arguments.is_gguf() && !arguments.merge {
        return language::run_gguf(arguments, out);
    }
    if arguments.out.is_file() && !arguments.is_gguf() {
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
    let formats = image_formats(arguments)?;
    pipeline.take_adapter(arguments.open_adapter()?)?;
    if arguments.merge {
        return run_merge(arguments, AdapterMerge::plan(&pipeline)?, out);
    }
    let adapter = weights::hub::model_name(&arguments.adapter);
    let stem =
        || Path::new(&adapter).file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let name = arguments.name.clone().unwrap_or_else(stem);
    let mut rows = Vec::new();
    let is_wanted = |format: &AdapterFormat| match &formats[..] {
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

/// The formats as typed, all of which are for image models.
fn image_formats(arguments: &ExportArgs) -> Result<Vec<AdapterFormat>, Failure> {
    if arguments.merge && arguments.is_gguf() {
        let problem = format!("image models are not written as GGUF: {}", arguments.out.display());
        return Err(TrainerError::Request { problem, hint: "give a folder with --out" }.into());
    }
    let each = arguments.format.iter().map(|format| match format {
        ExportFormat::Adapter(format) => Ok(*format),
        other => Err(TrainerError::Request {
            problem: format!("--format {} is for language models", named_value::value_name(other)),
            hint: "choose from diffusers, peft, kohya and comfyui",
        }),
    });
    Ok(each.collect::<Result<_, _>>()?)
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
