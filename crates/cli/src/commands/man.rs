//! `hearth man`: manual pages, one for the program and one per command.
//!
//! ```text
//! DIR/hearth.1
//! DIR/hearth-doctor.1
//! DIR/hearth-….1
//! ```

use std::io::Write;
use std::path::PathBuf;

use clap::{Command, CommandFactory};
use clap_mangen::Man;

use crate::args::Cli;
use crate::commands::CommandOutcome;
use crate::failure::Failure;

/// Print hearth's manual page, or write one per command into a folder.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth man | man -l -                            read it
  hearth man --out ~/.local/share/man/man1         install all pages")]
pub struct ManArgs {
    /// Write all pages into this folder instead of printing the first
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

pub fn run(arguments: &ManArgs, out: &mut dyn Write) -> Result<CommandOutcome, Failure> {
    let mut program = Cli::command();
    program.build();
    let Some(folder) = &arguments.out else {
        Man::new(program).render(out)?;
        return Ok(CommandOutcome::Done);
    };
    let verbs: Vec<_> = program.get_subcommands().filter(|verb| is_shown(verb)).cloned().collect();
    for (name, command) in std::iter::once(("hearth".to_owned(), program))
        .chain(verbs.into_iter().map(|verb| (format!("hearth-{}", verb.get_name()), verb)))
    {
        let path = folder.join(format!("{name}.1"));
        let mut page = Vec::new();
        Man::new(command).render(&mut page)?;
        weights::write::write_whole(&path, &page)?;
        writeln!(out, "{}", path.display())?;
    }
    Ok(CommandOutcome::Done)
}

/// `help` is a page of every other, and what is hidden is not for people.
fn is_shown(verb: &Command) -> bool {
    verb.get_name() != "help" && !verb.is_hide_set()
}
