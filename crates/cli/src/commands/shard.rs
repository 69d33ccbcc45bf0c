//! `hearth shard`: one model in several files with an index, or several files joined into one.

use std::io::Write;
use std::path::PathBuf;

use machine::Bytes;
use trainer::TrainerError;
use weights::Catalog;
use weights::copy::{CopyOptions, CopyTarget, copy};
use weights::write::{SHARD_BYTES, WrittenFile};

use super::model_arg::ModelArg;
use crate::commands::CommandOutcome;
use crate::failure::Failure;
use crate::render::progress::ByteProgress;

/// Split a model into safetensors shards with an index, as transformers and diffusers read them.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth shard model.safetensors --out model/                 shards of at most 10 GB
  hearth shard model.safetensors --out model/ --max-size 2GB
  hearth shard transformer/ --out joined/ --max-size 1TB      all in one file
  hearth shard transformer/ --out t/ --stem diffusion_pytorch_model")]
pub struct ShardArgs {
    /// Model file, shard index or folder, or the name of a fetched model
    path: ModelArg,

    /// Output folder; created if it does not exist
    #[arg(long, value_name = "DIR")]
    out: PathBuf,

    /// Maximum size of a shard [default: 10GB]
    #[arg(long, value_name = "SIZE")]
    max_size: Option<Bytes>,

    /// Prefix of the file names
    #[arg(long, default_value = "model")]
    stem: String,

    /// Print the BLAKE3 checksum of each file, as `b3sum` does
    #[arg(long)]
    checksum: bool,
}

pub fn run(arguments: &ShardArgs, out: &mut dyn Write) -> Result<CommandOutcome, Failure> {
    let ShardArgs { path, out: folder, max_size, stem, checksum } = arguments;
    if stem.is_empty() || stem.contains(['/', '\\']) {
        let problem = format!("--stem is {stem:?}, accepted is the beginning of a file name");
        return Err(TrainerError::Request { problem, hint: "leave it out for `model`" }.into());
    }
    let limit = max_size.map_or(SHARD_BYTES, |size| size.0);
    if limit == 0 {
        let problem = "--max-size is 0, accepted is a size such as 2GB".into();
        return Err(TrainerError::Request { problem, hint: "leave it out for 10 GB" }.into());
    }
    let catalog = Catalog::open(path.checked()?)?;
    std::fs::create_dir_all(folder)
        .map_err(|error| Failure::Write { path: folder.clone(), error })?;
    let progress = ByteProgress::begin("writing", catalog.bytes())?;
    let how = CopyOptions {
        target: CopyTarget::Shards { folder, stem, limit },
        dtype: None,
        checksum: *checksum,
    };
    let written = copy(&catalog, &how, &|bytes| progress.tick(bytes))?;
    drop(progress);
    print_files(&written, out)?;
    Ok(CommandOutcome::Done)
}

/// One line per file, in the form that `b3sum --check` reads where there are checksums.
pub fn print_files(written: &[WrittenFile], out: &mut dyn Write) -> std::io::Result<()> {
    for WrittenFile { path, checksum } in written {
        match checksum {
            Some(checksum) => writeln!(out, "{checksum}  {}", path.display())?,
            None => writeln!(out, "{}", path.display())?,
        }
    }
    Ok(())
}
