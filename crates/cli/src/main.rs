//! `hearth`, the program: reads the arguments, runs one command, prints its failure if it has one.
//! Exit codes are decided here and nowhere else; `hearth help` documents them.

mod args;
mod commands;
mod dashboard;
mod failure;
mod interrupt;
mod render;
mod terminal;
mod text;
mod web;

use std::io::{self, Write};
use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;

use crate::args::{Cli, CliCommand};
use crate::commands::CommandOutcome;
use crate::failure::Failure;

fn main() -> ExitCode {
    failure::end_on_panic();
    if let Some(program) = machine::process::own_program() {
        trainer::text::chat::render_apart(program);
    }
    // Not locked: what `--json` prints of a run comes from several threads.
    let mut out = terminal::stdout();
    let outcome = args().and_then(|args| run(args, &mut out)).and_then(|outcome| {
        out.flush()?;
        Ok(outcome)
    });
    let failure = match outcome {
        Ok(CommandOutcome::Done) => return ExitCode::SUCCESS,
        Ok(CommandOutcome::Differs) => return ExitCode::FAILURE,
        Ok(CommandOutcome::Interrupted) => interrupt::leave(interrupt::EXIT_CODE),
        // Whoever closed the pipe (`| head`) has seen enough.
        Err(Failure::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => {
            return ExitCode::SUCCESS;
        }
        Err(failure) => failure,
    };
    // With standard error gone as well there is nobody left to tell.
    _ = failure.report(&mut terminal::stderr());
    match failure {
        // MPI waits for it, and would not let the process end.
        failure if failure.is_rank_lost() => interrupt::leave(1),
        Failure::Usage { .. } => ExitCode::from(USAGE_EXIT_CODE),
        failure if failure.is_cancelled() => ExitCode::from(interrupt::EXIT_CODE),
        _ => ExitCode::FAILURE,
    }
}

/// As every shell's own commands have it, and clap.
const USAGE_EXIT_CODE: u8 = 2;

/// What was typed; prints help and ends where that was asked for.
fn args() -> Result<Cli, Failure> {
    Cli::try_parse().or_else(|error| {
        let is_help = error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand;
        if is_help || !error.use_stderr() { error.exit() } else { Err(error.into()) }
    })
}

fn run(args: Cli, out: &mut dyn Write) -> Result<CommandOutcome, Failure> {
    match args.command {
        CliCommand::Demo(arguments) => commands::demo::run(&arguments, out),
        CliCommand::Fetch(arguments) => commands::fetch::run(&arguments, out),
        CliCommand::Doctor(arguments) => commands::doctor::run(&arguments, out),
        CliCommand::Inspect(arguments) => commands::inspect::run(&arguments, out),
        CliCommand::Shard(arguments) => commands::shard::run(&arguments, out),
        CliCommand::Convert(arguments) => commands::convert::run(&arguments, out),
        CliCommand::Plan(arguments) => commands::plan::run(&arguments, out),
        CliCommand::Caption(arguments) => commands::caption::run(&arguments, out),
        CliCommand::Cache(arguments) => commands::cache::run(&arguments, out),
        CliCommand::Train(arguments) => commands::train::run(&arguments, out),
        CliCommand::Watch(arguments) => commands::watch::run(&arguments, out),
        CliCommand::Runs(arguments) => commands::runs::run(&arguments, out),
        CliCommand::Sample(arguments) => commands::sample::run(&arguments, out),
        CliCommand::Chat(arguments) => commands::chat::run(&arguments, out),
        CliCommand::Evaluate(arguments) => commands::evaluate::run(&arguments, out),
        CliCommand::ClipScore(arguments) => commands::clip_score::run(&arguments, out),
        CliCommand::Export(arguments) => commands::export::run(&arguments, out),
        CliCommand::Import(arguments) => commands::import::run(&arguments, out),
        CliCommand::Serve(arguments) => commands::serve::run(&arguments, out),
        CliCommand::Verify(arguments) => commands::verify::run(&arguments, out),
        CliCommand::Bench(arguments) => commands::bench::run(&arguments, out),
        CliCommand::Completions(arguments) => commands::completions::run(&arguments, out),
        CliCommand::Man(arguments) => commands::man::run(&arguments, out),
        CliCommand::RenderChat(arguments) => commands::render_chat::run(&arguments),
    }
}
