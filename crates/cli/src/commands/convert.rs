//! `hearth convert`: any model file we read, as one safetensors file, in any float format.

use std::io::Write;
use std::path::PathBuf;

use weights::copy::{Copy, Target, copy};
use weights::{Catalog, Dtype};

use crate::commands::Outcome;
use crate::commands::shard::list;
use crate::failure::Failure;
use crate::render::progress::Progress;

/// Write a PyTorch archive, a GGUF or another safetensors model as one safetensors file.
///
/// Names are kept as they are. Nothing in a PyTorch archive is executed. Quantised GGUF tensors
/// are turned back into numbers.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth convert checkpoint.pt --out checkpoint.safetensors
  hearth convert model.gguf --out model.safetensors --dtype bf16
  hearth convert model/ --out model-f32.safetensors --dtype f32")]
pub struct Arguments {
    /// A model file, an index of shards, or a folder
    path: PathBuf,

    /// The file to write; one of that name is replaced when all is written
    #[arg(long, value_name = "FILE")]
    out: PathBuf,

    /// The format of floating-point numbers; without it each tensor keeps its own, and quantised
    /// ones become f16
    #[arg(long)]
    dtype: Option<FloatFormat>,

    /// Print the file's BLAKE3 checksum, as `b3sum` does
    #[arg(long)]
    checksum: bool,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum FloatFormat {
    F32,
    F16,
    Bf16,
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<Outcome, Failure> {
    let Arguments { path, out: file, dtype, checksum } = arguments;
    let catalog = Catalog::open(path)?;
    let dtype = dtype.map(|format| match format {
        FloatFormat::F32 => Dtype::F32,
        FloatFormat::F16 => Dtype::F16,
        FloatFormat::Bf16 => Dtype::Bf16,
    });
    let progress = Progress::begin("converting", catalog.bytes())?;
    let how = Copy { target: Target::File(file), dtype, checksum: *checksum };
    let written = copy(&catalog, &how, &|bytes| progress.tick(bytes))?;
    drop(progress);
    list(&written, out)?;
    Ok(Outcome::Done)
}
