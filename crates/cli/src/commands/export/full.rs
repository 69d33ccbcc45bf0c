//! `hearth export` of a full fine-tune's checkpoint: a model folder.

use std::io::Write;

use serde_json::json;
use trainer::TrainerError;
use trainer::train::full::{FullCheckpoint, FullModel};

use super::ExportArgs;
use crate::commands::CommandOutcome;
use crate::failure::Failure;
use crate::render::progress::ByteProgress;

pub fn run(
    arguments: &ExportArgs,
    checkpoint: &FullCheckpoint,
    out: &mut dyn Write,
) -> Result<CommandOutcome, Failure> {
    refuse_adapters(arguments)?;
    let folder = arguments.out.display();
    if arguments.out.exists() {
        return Err(TrainerError::Request {
            problem: format!("--out is there already: {folder}"),
            hint: "choose another folder, or remove this one first",
        }
        .into());
    }
    let progress = ByteProgress::begin("writing", checkpoint.bytes())?;
    let FullModel { n_tensors, dtype } =
        checkpoint
            .write(&arguments.parts.paths(), &arguments.out, &|bytes| progress.tick(bytes))?;
    drop(progress);
    if arguments.json {
        let row =
            json!({ "path": arguments.out, "tensors": n_tensors, "dtype": dtype.to_string() });
        writeln!(out, "{row}")?;
    } else {
        writeln!(
            out,
            "{folder}: a model with the checkpoint's {n_tensors} tensors, all in {dtype}"
        )?;
    }
    Ok(CommandOutcome::Done)
}

/// What only adapters have.
fn refuse_adapters(arguments: &ExportArgs) -> Result<(), Failure> {
    let given = [
        ("--merge", arguments.merge),
        ("--format", !arguments.format.is_empty()),
        ("--name", arguments.name.is_some()),
    ];
    let Some((name, _)) = given.iter().find(|(_, is_given)| *is_given) else { return Ok(()) };
    let path = arguments.adapter.display();
    let problem = format!("{name} is for adapters, this checkpoint is of a full fine-tune: {path}");
    Err(TrainerError::Request { problem, hint: "leave it out: a model folder is written" }.into())
}
