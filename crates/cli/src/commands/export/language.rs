//! `hearth export` of a language model's adapter.

use std::io::Write;

use serde_json::json;
use trainer::TrainerError;
use trainer::export::gguf;
use trainer::export::language::{write_adapter, write_merged};
use trainer::export::merge::AdapterMerge;
use trainer::model::llama::language_model::LanguageModel;
use trainer::text::Tokenizer;

use super::{ExportArgs, ExportRow, run_merge, show};
use crate::commands::CommandOutcome;
use crate::commands::named_value;
use crate::failure::Failure;
use crate::render::progress::ByteProgress;
use trainer::model::adapter::AdapterFormat;

pub fn run(
    arguments: &ExportArgs,
    mut base: LanguageModel,
    out: &mut dyn Write,
) -> Result<CommandOutcome, Failure> {
    base.take_adapter(arguments.open_adapter()?)?;
    if arguments.merge && arguments.base.is_dir() {
        return run_merge(arguments, AdapterMerge::plan_language(&base)?, out);
    }
    if arguments.merge {
        return merge_file(arguments, &base, out);
    }
    if let Some(other) = arguments.format.iter().find(|program| **program != AdapterFormat::Peft) {
        let name = named_value::value_name(other);
        return Err(TrainerError::Request {
            problem: format!("--format {name} is for image models"),
            hint: "leave it out: adapters of language models are written for PEFT",
        }
        .into());
    }
    let row = ExportRow::new(AdapterFormat::Peft, write_adapter(&mut base, &arguments.out)?);
    show(arguments, &[row], out)
}

/// A LoRA alone becomes a GGUF file.
pub fn run_gguf(arguments: &ExportArgs, out: &mut dyn Write) -> Result<CommandOutcome, Failure> {
    let path = &arguments.out;
    if path.exists() {
        return Err(TrainerError::Request {
            problem: format!("--out is there already: {}", path.display()),
            hint: "choose another name, or remove it first",
        }
        .into());
    }
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
    if arguments.out.exists() {
        return Err(TrainerError::Request {
            problem: format!("--out is there already: {}", arguments.out.display()),
            hint: "choose another folder, or remove this one first",
        }
        .into());
    }
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
