//! `hearth render-chat`: what the program starts of itself to run a model's chat template, which is somebody else's
//! code, within limits. Not for people.

use std::io;
use std::thread;
use std::time::Duration;

use trainer::text::chat::{RequestClock, serve};

use crate::commands::CommandOutcome;
use crate::failure::Failure;

/// Stack for templates, the same on all systems. Chosen: what the first thread of a program has on Linux.
const STACK_BYTES: usize = 8 << 20;

/// How often the time is looked at. Chosen: late by less than a person notices.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Render conversations by a chat template, within limits; for hearth itself.
#[derive(Debug, clap::Args)]
pub struct RenderChatArgs {
    /// Most seconds for one conversation
    #[arg(long, value_name = "N")]
    seconds: u64,
    /// Most bytes of memory
    #[arg(long, value_name = "N")]
    bytes: u64,
}

pub fn run(arguments: &RenderChatArgs) -> Result<CommandOutcome, Failure> {
    machine::process::confine(arguments.bytes);
    let clock = RequestClock::default();
    thread::scope(|scope| {
        let work = || serve(io::stdin().lock(), io::stdout().lock(), &clock);
        let work = thread::Builder::new().stack_size(STACK_BYTES).spawn_scoped(scope, work)?;
        while !work.is_finished() {
            if let Some(last_words) = clock.overdue(arguments.seconds) {
                io::Write::write_all(&mut io::stderr(), last_words.as_bytes())?;
                std::process::abort();
            }
            thread::sleep(LOOK_EVERY);
        }
        work.join().expect("it does not panic")?;
        Ok(CommandOutcome::Done)
    })
}
