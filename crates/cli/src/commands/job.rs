//! A job as it is given on the command line: a file, or pictures or texts and a model.

use std::path::PathBuf;

use trainer::TrainerError;
use trainer::config::{RawConfig, RunConfig};

use crate::failure::Failure;

/// Which job.
#[derive(Debug, clap::Args)]
pub struct Job {
    /// The job, a TOML file; docs/config.md lists its keys
    #[arg(value_name = "JOB", required_unless_present = "base")]
    file: Option<PathBuf>,

    /// Folder of pictures, each with its caption beside it [data.images]
    #[arg(long, value_name = "FOLDER")]
    images: Option<PathBuf>,

    /// Texts for a language model: a file or a folder of text, JSON lines or tokens [text.path]
    #[arg(long, value_name = "PATH", conflicts_with = "images")]
    text: Option<PathBuf>,

    /// The model: a diffusers or transformers folder, a checkpoint in the original layout, or a GGUF
    /// file [base.path]
    #[arg(long, value_name = "PATH")]
    base: Option<PathBuf>,

    /// Folder for all that is written [output.folder]
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,

    /// Another value for a key of the job; may be given several times
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
}

impl Job {
    /// As it is meant.
    pub fn resolve(&self) -> Result<RunConfig, Failure> {
        self.resolve_with(&[])
    }

    /// As it is meant, with more values for its keys.
    pub fn resolve_with(&self, more: &[String]) -> Result<RunConfig, Failure> {
        let Self { file, images, text, base, out, set } = self;
        let resolve = || {
            let mut raw = match file {
                Some(path) => RawConfig::from_file(path)?,
                None => RawConfig::empty(),
            };
            for (key, path) in [
                ("data.images", images),
                ("text.path", text),
                ("base.path", base),
                ("output.folder", out),
            ] {
                path.as_deref().map_or(Ok(()), |path| raw.set_path(key, path))?;
            }
            set.iter().chain(more).try_for_each(|argument| raw.set(argument))?;
            raw.resolve()
        };
        resolve().map_err(|error| Failure::Trainer(TrainerError::Job(error)))
    }
}
