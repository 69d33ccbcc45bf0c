//! `hearth shard`: one model in several files with an index, or several files joined into one.

use std::io::Write;
use std::path::PathBuf;

use machine::Bytes;
use weights::Catalog;
use weights::copy::{Copy, Target, copy};
use weights::write::{SHARD_BYTES, Written};

use crate::commands::Outcome;
use crate::failure::Failure;
use crate::render::progress::Progress;

/// Split a model into safetensors shards with an index, as transformers and diffusers read them.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth shard model.safetensors --out model/                 shards of at most 10 GB
  hearth shard model.safetensors --out model/ --max-size 2GB
  hearth shard transformer/ --out joined/ --max-size 1TB      all in one file
  hearth shard transformer/ --out t/ --stem diffusion_pytorch_model")]
pub struct Arguments {
    /// A model file, an index of shards, or a folder
    path: PathBuf,

    /// The folder to write into; made if it does not exist
    #[arg(long, value_name = "DIR")]
    out: PathBuf,

    /// The most a shard may hold
    #[arg(long, value_name = "SIZE", default_value_t = Limit(Bytes(SHARD_BYTES)))]
    max_size: Limit,

    /// What the files' names start with
    #[arg(long, default_value = "model")]
    stem: String,

    /// Print the BLAKE3 checksum of each file, as `b3sum` does
    #[arg(long)]
    checksum: bool,
}

/// A size as it is typed; shown in bytes, so that help states exactly what will be done.
#[derive(Clone, Copy, Debug)]
struct Limit(Bytes);

impl std::fmt::Display for Limit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0.0)
    }
}

impl std::str::FromStr for Limit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.parse().map(Self)
    }
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<Outcome, Failure> {
    let Arguments { path, out: folder, max_size, stem, checksum } = arguments;
    let catalog = Catalog::open(path)?;
    std::fs::create_dir_all(folder)
        .map_err(|error| Failure::Write { path: folder.clone(), error })?;
    let progress = Progress::begin("writing", catalog.bytes())?;
    let how = Copy {
        target: Target::Shards { folder, stem, limit: max_size.0.0 },
        dtype: None,
        checksum: *checksum,
    };
    let written = copy(&catalog, &how, &|bytes| progress.tick(bytes))?;
    drop(progress);
    list(&written, out)?;
    Ok(Outcome::Done)
}

/// One line per file, in the form that `b3sum --check` reads where there are checksums.
pub fn list(written: &[Written], out: &mut dyn Write) -> std::io::Result<()> {
    for Written { path, checksum } in written {
        match checksum {
            Some(checksum) => writeln!(out, "{checksum}  {}", path.display())?,
            None => writeln!(out, "{}", path.display())?,
        }
    }
    Ok(())
}
