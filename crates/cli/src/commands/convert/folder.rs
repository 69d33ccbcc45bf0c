//! `hearth convert` of a language model to a folder: for transformers, or for Ollama.

use std::io::Write;

use trainer::export::gguf::GgufMix;
use trainer::export::{language, ollama};
use trainer::model::llama::language_model::LanguageModel;
use trainer::text::Tokenizer;
use weights::{Catalog, FileDtype, TensorEncoding};

use super::{ConvertArgs, request};
use crate::commands::CommandOutcome;
use crate::commands::file_format::FileFormat;
use crate::failure::Failure;
use crate::render;
use crate::render::progress::ByteProgress;

/// As transformers reads it.
pub fn run(arguments: &ConvertArgs, out: &mut dyn Write) -> Result<CommandOutcome, Failure> {
    let base = open(arguments)?;
    let folder = &arguments.out;
    let tokenizer = Tokenizer::open(&base.path)?;
    let dtype = match arguments.dtype {
        Some(dtype) => dtype.plain(folder)?,
        None => base.catalog().map_or(FileDtype::F16, own_dtype),
    };
    let n_values: usize = base.tensor_specs()?.iter().map(|want| want.shape.elements()).sum();
    let progress = ByteProgress::begin("converting", n_values as u64 * dtype.bytes())?;
    let tick = |bytes| progress.tick(bytes);
    language::write_merged(&base, &tokenizer, dtype, folder, &tick)?;
    drop(progress);
    writeln!(out, "{}: a model for transformers, all in {dtype}", folder.display())?;
    Ok(CommandOutcome::Done)
}

/// A GGUF file and a Modelfile.
pub fn run_ollama(arguments: &ConvertArgs, out: &mut dyn Write) -> Result<CommandOutcome, Failure> {
    let base = open(arguments)?;
    let mix = arguments.dtype.map_or(GgufMix::F16, FileFormat::mix);
    let bytes = base.catalog().map_or(0, Catalog::bytes);
    let progress = ByteProgress::begin("converting", bytes)?;
    let tick = |bytes| progress.tick(bytes);
    let written = ollama::write_model(&base, mix, &arguments.out, &tick)?;
    drop(progress);
    render::export::show_ollama(&written, false, out)?;
    Ok(CommandOutcome::Done)
}

fn open(arguments: &ConvertArgs) -> Result<LanguageModel, Failure> {
    let folder = &arguments.out;
    if arguments.checksum {
        let problem = format!("no checksum is counted of {}", folder.display());
        return Err(request(problem, "leave --checksum out, and use b3sum"));
    }
    if folder.exists() {
        let problem = format!("--out is there already: {}", folder.display());
        return Err(request(problem, "choose another folder, or remove this one first"));
    }
    Ok(LanguageModel::open(arguments.path.checked()?)?)
}

/// That of the largest tensor. Scales of blocks are f16, so f16 holds what they hold, in more digits than bf16.
fn own_dtype(catalog: &Catalog) -> FileDtype {
    let largest = catalog.tensors.iter().max_by_key(|tensor| tensor.numel());
    match largest.map(|tensor| tensor.encoding) {
        Some(TensorEncoding::Plain(dtype @ (FileDtype::F32 | FileDtype::Bf16))) => dtype,
        _ => FileDtype::F16,
    }
}
