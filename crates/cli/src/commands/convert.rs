//! `hearth convert`: any model file we read, as one safetensors file, in any float format; a language
//! model also as a GGUF file, and by `folder` as a folder.

mod folder;

use std::io::Write;
use std::path::{Path, PathBuf};

use trainer::TrainerError;
use trainer::export::gguf::{self, GgufMix};
use weights::Catalog;
use weights::copy::{CopyOptions, CopyTarget, copy};

use super::file_format::FileFormat;
use super::model_arg::ModelArg;
use crate::commands::CommandOutcome;
use crate::commands::output;
use crate::commands::shard::print_files;
use crate::failure::Failure;
use crate::render;
use crate::render::progress::ByteProgress;

/// Convert models to one safetensors file, language models to GGUF and back to a folder.
///
/// Tensor names are kept. No code in a PyTorch pickle is executed. Quantised GGUF tensors are dequantised. GGUF
/// files are written with names, settings and vocabulary as llama.cpp reads them.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth convert checkpoint.pt --out checkpoint.safetensors
  hearth convert model.gguf --out model.safetensors --dtype bf16
  hearth convert model/ --out model-f32.safetensors --dtype f32
  hearth convert model.gguf --out model                      # a folder for transformers
  hearth convert SmolLM2-135M-Instruct/ --out smollm2.gguf --dtype q4_k_m
  hearth convert SmolLM2-135M-Instruct/ --out smollm2-ollama --format ollama")]
pub struct ConvertArgs {
    /// Model file, shard index or folder, or the name of a fetched model
    path: ModelArg,

    /// Output file: .safetensors or .gguf; an existing one is replaced once all is written. Of a language model also a new
    /// folder as transformers reads it
    #[arg(long, value_name = "PATH")]
    out: PathBuf,

    /// Program to write a folder for: ollama has a GGUF file and a Modelfile
    #[arg(long)]
    format: Option<FolderFormat>,

    /// Number format; blocks of 8 to 4 bits are for GGUF [default: each tensor's own, f16 for quantised ones and for
    /// matrices in GGUF]
    #[arg(long)]
    dtype: Option<FileFormat>,

    /// Print the BLAKE3 checksum of the file, as `b3sum` does
    #[arg(long)]
    checksum: bool,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum FolderFormat {
    Ollama,
}

pub fn run(arguments: &ConvertArgs, out: &mut dyn Write) -> Result<CommandOutcome, Failure> {
    let ConvertArgs { path, out: file, dtype, checksum, format } = arguments;
    let ending = file.extension().unwrap_or_default().to_string_lossy().to_lowercase();
    let is_file = ["safetensors", "gguf"].contains(&ending.as_str());
    let is_refused = ["pt", "pth", "bin", "ckpt"].contains(&ending.as_str());
    // A folder is for a whole language model.
    let needs_file = !is_file && format.is_none() && is_file_of_tensors(path);
    if is_refused || needs_file {
        let problem =
            format!("cannot write {}, accepted are .safetensors and .gguf", file.display());
        return Err(request(problem, "end the name in .safetensors, or in .gguf for llama.cpp"));
    }
    match format {
        None if is_file => {}
        None => return folder::run(arguments, out),
        Some(FolderFormat::Ollama) if is_file => {
            let problem = format!("--out is {}, --format ollama writes a folder", file.display());
            return Err(request(
                problem,
                "give a folder; it will hold a GGUF file and a Modelfile",
            ));
        }
        Some(FolderFormat::Ollama) => return folder::run_ollama(arguments, out),
    }
    let catalog = Catalog::open(path.checked()?)?;
    output::check_file(file)?;
    if ending == "gguf" {
        return run_gguf(arguments, catalog.bytes(), out);
    }
    let dtype = dtype.map(|dtype| dtype.plain(file)).transpose()?;
    let progress = ByteProgress::begin("converting", catalog.bytes())?;
    let how = CopyOptions { target: CopyTarget::File(file), dtype, checksum: *checksum };
    let written = copy(&catalog, &how, &|bytes| progress.tick(bytes))?;
    drop(progress);
    print_files(&written, out)?;
    Ok(CommandOutcome::Done)
}

fn run_gguf(
    arguments: &ConvertArgs,
    bytes: u64,
    out: &mut dyn Write,
) -> Result<CommandOutcome, Failure> {
    let ConvertArgs { path, out: file, dtype, checksum, .. } = arguments;
    if *checksum {
        let problem = format!("no checksum is counted of {}", file.display());
        return Err(request(problem, "leave --checksum out, and use b3sum"));
    }
    let mix = dtype.map_or(GgufMix::F16, FileFormat::mix);
    let progress = ByteProgress::begin("converting", bytes)?;
    let summary = gguf::write_folder(path, file, mix, &|bytes| progress.tick(bytes))?;
    drop(progress);
    write!(out, "{}", render::export::gguf(file, &summary))?;
    Ok(CommandOutcome::Done)
}

/// A file that is not a whole model, as GGUF files are.
fn is_file_of_tensors(path: &Path) -> bool {
    path.is_file() && path.extension().is_none_or(|ending| !ending.eq_ignore_ascii_case("gguf"))
}

fn request(problem: String, hint: &'static str) -> Failure {
    TrainerError::Request { problem, hint }.into()
}
