//! `hearth convert`: any model file we read, as one safetensors file, in any float format; a language
//! model also as a GGUF file.

use std::io::Write;
use std::path::PathBuf;

use trainer::TrainerError;
use trainer::export::gguf;
use weights::copy::{CopyOptions, CopyTarget, copy};
use weights::{Catalog, FileDtype};

use super::model_arg::ModelArg;
use crate::commands::CommandOutcome;
use crate::commands::output;
use crate::commands::shard::print_files;
use crate::failure::Failure;
use crate::render::progress::ByteProgress;

/// Convert PyTorch, GGUF or sharded models to one safetensors file, or a language model to GGUF.
///
/// Tensor names are kept. No code in a PyTorch pickle is executed. Quantised GGUF tensors are dequantised. GGUF
/// files are written with names, settings and vocabulary as llama.cpp reads them.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth convert checkpoint.pt --out checkpoint.safetensors
  hearth convert model.gguf --out model.safetensors --dtype bf16
  hearth convert model/ --out model-f32.safetensors --dtype f32
  hearth convert SmolLM2-135M-Instruct/ --out smollm2.gguf --dtype q8_0")]
pub struct ConvertArgs {
    /// Model file, shard index or folder, or the name of a fetched model
    path: ModelArg,

    /// Output file: .safetensors or .gguf; an existing one is replaced once all is written
    #[arg(long, value_name = "FILE")]
    out: PathBuf,

    /// Number format [default: each tensor's own, f16 for quantised ones and for matrices in GGUF]
    #[arg(long)]
    dtype: Option<FloatFormat>,

    /// Print the BLAKE3 checksum of the file, as `b3sum` does
    #[arg(long)]
    checksum: bool,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum FloatFormat {
    F32,
    F16,
    Bf16,
    /// 8 bits in blocks of 32, for GGUF files
    #[value(name = "q8_0")]
    Q8_0,
}

pub fn run(arguments: &ConvertArgs, out: &mut dyn Write) -> Result<CommandOutcome, Failure> {
    let ConvertArgs { path, out: file, dtype, checksum } = arguments;
    let ending = file.extension().unwrap_or_default().to_string_lossy().to_lowercase();
    if !["safetensors", "gguf"].contains(&ending.as_str()) {
        let problem =
            format!("cannot write {}, accepted are .safetensors and .gguf", file.display());
        return Err(request(problem, "end the name in .safetensors, or in .gguf for llama.cpp"));
    }
    let catalog = Catalog::open(path.checked()?)?;
    output::check_file(file)?;
    if ending == "gguf" {
        return run_gguf(arguments, catalog.bytes(), out);
    }
    let dtype = match dtype {
        None => None,
        Some(FloatFormat::F32) => Some(FileDtype::F32),
        Some(FloatFormat::F16) => Some(FileDtype::F16),
        Some(FloatFormat::Bf16) => Some(FileDtype::Bf16),
        Some(FloatFormat::Q8_0) => {
            let problem = format!("q8_0 is no format of {}", file.display());
            return Err(request(problem, "write a .gguf file, or choose f16 or bf16"));
        }
    };
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
    let ConvertArgs { path, out: file, dtype, checksum } = arguments;
    if *checksum {
        let problem = format!("no checksum is counted of {}", file.display());
        return Err(request(problem, "leave --checksum out, and use b3sum"));
    }
    let format = match dtype {
        Some(FloatFormat::F32) => gguf::GgufFormat::F32,
        None | Some(FloatFormat::F16) => gguf::GgufFormat::F16,
        Some(FloatFormat::Bf16) => gguf::GgufFormat::Bf16,
        Some(FloatFormat::Q8_0) => gguf::GgufFormat::Q8_0,
    };
    let progress = ByteProgress::begin("converting", bytes)?;
    gguf::write_folder(path, file, format, &|bytes| progress.tick(bytes))?;
    drop(progress);
    writeln!(out, "{}", file.display())?;
    Ok(CommandOutcome::Done)
}

fn request(problem: String, hint: &'static str) -> Failure {
    TrainerError::Request { problem, hint }.into()
}
