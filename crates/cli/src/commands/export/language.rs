//! `hearth export` of a language model's adapter.

use std::io::Write;
use std::path::Path;

use serde_json::json;
use trainer::TrainerError;
use trainer::export::gguf::{self, GgufSummary};
use trainer::export::language::{write_adapter, write_merged};
use trainer::export::merge::AdapterMerge;
use trainer::export::{mlx, ollama};
use trainer::model::llama::language_model::LanguageModel;
use trainer::text::Tokenizer;

use super::{ExportArgs, ExportFormat, ExportRow, run_merge, show};
use crate::commands::CommandOutcome;
use crate::commands::named_value;
use crate::failure::Failure;
use crate::render;
use crate::render::progress::ByteProgress;
use trainer::model::adapter::AdapterFormat;

pub fn run(
    arguments: &ExportArgs,
    mut base: LanguageModel,
    out: &mut dyn Write,
) -> Result<CommandOutcome, Failure> {
    base.take_adapter(arguments.open_adapter()?)?;
    if arguments.merge && arguments.is_gguf() {
        return merge_gguf(arguments, &base, out);
    }
    if arguments.format.contains(&ExportFormat::Ollama) {
        return run_ollama(arguments, base, out);
    }
    if arguments.merge && arguments.base.is_dir() {
        return run_merge(arguments, AdapterMerge::plan_language(&base)?, out);
    }
    if arguments.merge {
        return merge_file(arguments, &base, out);
    }
    let peft = ExportFormat::Adapter(AdapterFormat::Peft);
    let formats = if arguments.format.is_empty() { &[peft][..] } else { &arguments.format };
    let mut rows = Vec::new();
    for format in formats {
        rows.push(match format {
            ExportFormat::Mlx => mlx_row(&base, &arguments.out)?,
            format if *format == peft => {
                ExportRow::new(AdapterFormat::Peft, write_adapter(&mut base, &arguments.out)?)
            }
            other => {
                let name = named_value::value_name(other);
                return Err(TrainerError::Request {
                    problem: format!("--format {name} is for image models"),
                    hint: "choose from peft, mlx and ollama",
                }
                .into());
            }
        });
    }
    show(arguments, &rows, out)
}

fn mlx_row(base: &LanguageModel, out: &Path) -> Result<ExportRow, Failure> {
    let path = out.join("mlx");
    let (layers, difference) = mlx::write_adapter(base, &path)?;
    Ok(ExportRow { format: "mlx".into(), path, layers, unmatched: 0, difference })
}

/// The base with its adapter becomes a GGUF file.
fn merge_gguf(
    arguments: &ExportArgs,
    base: &LanguageModel,
    out: &mut dyn Write,
) -> Result<CommandOutcome, Failure> {
    let path = &arguments.out;
    refuse_existing(path)?;
    let tokenizer = Tokenizer::open(&base.path)?;
    let bytes = base.catalog().map_or(0, weights::Catalog::bytes);
    let progress = ByteProgress::begin("merging", bytes)?;
    let tick = |bytes| progress.tick(bytes);
    let summary = gguf::write_model(base, &tokenizer, arguments.mix(), path, &tick)?;
    drop(progress);
    if arguments.json {
        let changed = base.adapter().len();
        let GgufSummary { formats, fallbacks } = &summary;
        let row =
            json!({ "path": path, "changed": changed, "formats": formats, "fallbacks": fallbacks });
        writeln!(out, "{row}")?;
    } else {
        write!(out, "{}", render::export::gguf(path, &summary))?;
    }
    Ok(CommandOutcome::Done)
}

/// A folder for `ollama create`.
fn run_ollama(
    arguments: &ExportArgs,
    mut base: LanguageModel,
    out: &mut dyn Write,
) -> Result<CommandOutcome, Failure> {
    if arguments.format.len() > 1 {
        let problem = "--format ollama stands alone: it writes a folder of its own".to_owned();
        let hint = "write the other formats with a second command";
        return Err(TrainerError::Request { problem, hint }.into());
    }
    refuse_existing(&arguments.out)?;
    let bytes = base.catalog().map_or(0, weights::Catalog::bytes);
    let progress = ByteProgress::begin("writing", bytes)?;
    let tick = |bytes| progress.tick(bytes);
    let (mix, folder) = (arguments.mix(), &arguments.out);
    let written = if arguments.merge {
        ollama::write_model(&base, mix, folder, &tick)?
    } else {
        let name = weights::hub::model_name(&arguments.adapter);
        ollama::write_adapter(&mut base, &name, mix, folder, &tick)?
    };
    drop(progress);
    render::export::show_ollama(&written, arguments.json, out)?;
    Ok(CommandOutcome::Done)
}

fn refuse_existing(path: &Path) -> Result<(), Failure> {
    if !path.exists() {
        return Ok(());
    }
    let problem = format!("--out is there already: {}", path.display());
    Err(TrainerError::Request { problem, hint: "choose another name, or remove it first" }.into())
}

/// A LoRA alone becomes a GGUF file.
pub fn run_gguf(arguments: &ExportArgs, out: &mut dyn Write) -> Result<CommandOutcome, Failure> {
    let path = &arguments.out;
    refuse_existing(path)?;
    let mut base = LanguageModel::open(&arguments.base)?;
    base.take_adapter(arguments.open_adapter()?)?;
    let name = weights::hub::model_name(&arguments.adapter);
    let layers = gguf::write_adapter(&base, &name, path)?;
    let format = "llama.cpp".to_owned();
    let row = ExportRow { format, path: path.clone(), layers, unmatched: 0, difference: 0.0 };
    show(arguments, &[row], out)
}

/// A GGUF file and an adapter become a folder of transformers.
fn merge_file(
    arguments: &ExportArgs,
    base: &LanguageModel,
    out: &mut dyn Write,
) -> Result<CommandOutcome, Failure> {
    refuse_existing(&arguments.out)?;
    let tokenizer = Tokenizer::open(&base.path)?;
    let count: usize = base.tensor_specs()?.iter().map(|want| want.shape.elements()).sum();
    // The scales of blocks are f16, so nothing is out of its range, and fewer digits are lost than in
    // bf16.
    let dtype = weights::FileDtype::F16;
    let progress = ByteProgress::begin("merging", count as u64 * dtype.bytes())?;
    write_merged(base, &tokenizer, dtype, &arguments.out, &|bytes| progress.tick(bytes))?;
    drop(progress);
    let changed = base.adapter().len();
    if arguments.json {
        writeln!(out, "{}", json!({ "path": arguments.out, "changed": changed }))?;
    } else {
        writeln!(out, "{}: {changed} matrices changed, all in {dtype}", arguments.out.display())?;
    }
    Ok(CommandOutcome::Done)
}
