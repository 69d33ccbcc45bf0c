//! `hearth bench`: the measured figures of this machine, optionally beside a peer's.

pub mod load;

use std::io::Write;

use crate::commands::Outcome;
use crate::failure::Failure;

/// Measure this machine.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth bench load                        how fast model files come into memory, and go to disk
  hearth bench load --python .venv/bin/python --json")]
pub struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    Load(load::Arguments),
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<Outcome, Failure> {
    match &arguments.what {
        What::Load(arguments) => load::run(arguments, out),
    }
}
