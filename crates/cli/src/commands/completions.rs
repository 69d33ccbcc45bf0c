//! `hearth completions`: the script that makes a shell complete hearth's commands and options.

use std::io::Write;

use clap::CommandFactory;
use clap_complete::Shell;

use crate::args::Cli;
use crate::commands::CommandOutcome;
use crate::failure::Failure;

/// Print a completion script for your shell.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth completions bash > ~/.local/share/bash-completion/completions/hearth
  hearth completions zsh > ~/.zfunc/_hearth
  hearth completions fish > ~/.config/fish/completions/hearth.fish")]
pub struct CompletionsArgs {
    /// Shell
    shell: Shell,
}

pub fn run(arguments: &CompletionsArgs, out: &mut dyn Write) -> Result<CommandOutcome, Failure> {
    // Into memory first: the generator panics when its writer fails.
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut Cli::command(), "hearth", &mut script);
    out.write_all(&script)?;
    Ok(CommandOutcome::Done)
}
