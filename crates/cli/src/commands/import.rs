//! `hearth import`: another trainer's config as a job.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use serde_json::json;
use trainer::TrainerError;
use trainer::import::{self, ImportedJob, KeyVerdict};

use crate::commands::CommandOutcome;
use crate::commands::output;
use crate::failure::Failure;
use crate::render;

/// Turn another trainer's config into a job.
///
/// Reads configs of ai-toolkit, kohya's sd-scripts, musubi-tuner, SimpleTuner, diffusion-pipe, FlyMyAI, mlx-lm and
/// OneTrainer, with the files that they name. Which one it is follows from its content. Values that the config leaves
/// out are that trainer's defaults. Every key becomes a line of the job, or is listed with the reason why not. Nothing
/// of the config is executed.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth import flux.yaml --out flux.toml               then: hearth plan flux.toml
  hearth import train.sh                                print the job
  hearth import config.json --json | jq '.notes[] | select(.verdict == \"differs\")'")]
pub struct ImportArgs {
    /// Config of another trainer: YAML, TOML, JSON, or a shell script with its command
    config: PathBuf,

    /// New job file; one that exists is left alone [default: print the job]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &ImportArgs, out: &mut dyn Write) -> Result<CommandOutcome, Failure> {
    let ImportArgs { config, out: file, json } = arguments;
    if let Some(file) = file {
        refuse_existing(file)?;
    }
    let current = std::env::current_dir()
        .map_err(|error| Failure::Read { path: PathBuf::from("."), error })?;
    // A job that is printed is one in the current folder.
    let job = file.clone().unwrap_or_else(|| PathBuf::from("job.toml"));
    let imported = import::import(config, &job, &current).map_err(TrainerError::from)?;
    if let Some(file) = file {
        write_new(file, &imported.text)?;
    }
    match file {
        _ if *json => writeln!(out, "{:#}", as_json(&imported, file.as_deref()))?,
        Some(file) => write!(out, "{}", render::import::page(&imported, file))?,
        None => {
            for note in imported.notes.iter().filter(|note| note.verdict == KeyVerdict::Unknown) {
                render::warn(&format!("{note}"));
            }
            write!(out, "{}", imported.text)?;
        }
    }
    Ok(CommandOutcome::Done)
}

fn as_json(imported: &ImportedJob, file: Option<&Path>) -> serde_json::Value {
    json!({
        "trainer": imported.trainer,
        "source": imported.source,
        "job": file,
        "lines": imported.lines,
        "notes": imported.notes,
        "text": imported.text,
    })
}

fn refuse_existing(file: &Path) -> Result<(), Failure> {
    if !file.exists() {
        return output::check_file(file);
    }
    let problem = format!("file exists already: {}", file.display());
    Err(TrainerError::Request { problem, hint: "give --out a name that is not taken" }.into())
}

fn write_new(file: &Path, text: &str) -> Result<(), Failure> {
    let failed = |error: std::io::Error| match error.kind() {
        ErrorKind::AlreadyExists => {
            refuse_existing(file).err().unwrap_or(Failure::Write { path: file.into(), error })
        }
        _ => Failure::Write { path: file.into(), error },
    };
    let mut new = File::create_new(file).map_err(failed)?;
    let written = new.write_all(text.as_bytes()).and_then(|()| new.sync_all());
    written.inspect_err(|_| _ = fs::remove_file(file)).map_err(failed)
}
