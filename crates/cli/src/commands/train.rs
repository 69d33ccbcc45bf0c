//! `hearth train`: pictures or texts to a proven adapter, or a model.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use machine::awake::Awake;
use trainer::config::RunConfig;
use trainer::config::adapter::AdapterKind;
use trainer::event::history::History;
use trainer::event::{End, Why};
use trainer::train::{On, Start, checkpoint, train};

use super::engine::{COMPUTER, Engine, Limit};
use super::job::{Flag, Job};
use crate::commands::Outcome;
use crate::failure::Failure;
use crate::interrupt;
use crate::render::ending;
use crate::render::training::Screen;
use crate::text::quoted;

/// Train an adapter on a folder of pictures, or on texts.
///
/// Encodes pictures and captions, or turns texts into tokens, once, says before the first step how much memory each phase takes
/// and takes no more, trains, shows samples along the way, and writes the adapter for the programs
/// that were asked for, a model card and a report. Ctrl-C saves; --resume goes on as if nothing had
/// happened, also after a crash. Where memory gets short or the computer hot, the run is paced, which
/// changes nothing of what is learnt (docs/thermal.md).
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth train --images my-cat --base stable-diffusion-3.5-medium --out cat
  hearth train --text my-notes --base SmolLM2-135M --out notes
  hearth train recipes/demo.toml
  hearth train recipes/lm-tiny.toml
  hearth train job.toml --steps 500 --rank 32 --lr 5e-5
  hearth train job.toml --set data.trigger=zwx --set data.validation=unset
  hearth train job.toml --mode overnight --max-temp 80
  hearth train job.toml --resume")]
pub struct Arguments {
    #[command(flatten)]
    job: Job,

    /// Go on with the run in the output folder, from its last checkpoint
    #[arg(long)]
    resume: bool,

    /// Write the adapter also of a run that diverged
    #[arg(long)]
    force: bool,

    /// The most memory to take: 16GB, or 70% of what hearth would take [default: all of that]
    #[arg(long, visible_alias = "max-memory", value_name = "SIZE", help_heading = COMPUTER)]
    limit: Option<Limit>,

    /// How the computer is treated: quiet, balanced, full or overnight [machine.mode]
    #[arg(long, help_heading = COMPUTER)]
    mode: Option<String>,

    // Not as a comment, where the key would be taken for a link.
    #[arg(
        long,
        value_name = "CELSIUS",
        allow_negative_numbers = true,
        help_heading = COMPUTER,
        help = "The highest temperature in °C, instead of the mode's [machine.max_temp]"
    )]
    max_temp: Option<String>,

    #[command(flatten)]
    engine: Engine,

    /// Print nothing but warnings and errors
    #[arg(long)]
    quiet: bool,

    /// Print every event as a line of JSON
    #[arg(long)]
    json: bool,
}

impl Arguments {
    /// How the computer is treated, as keys of the job.
    fn treatment(&self) -> [Flag<'_>; 2] {
        [
            ("--mode", "machine.mode", self.mode.as_deref()),
            ("--max-temp", "machine.max_temp", self.max_temp.as_deref()),
        ]
    }
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<Outcome, Failure> {
    let config = arguments.job.resolve_with("train", &arguments.treatment())?;
    let engine = arguments.engine.for_job(&config);
    engine.check_trust()?;
    let on = engine.on(arguments.limit)?;
    let start = Start { resume: arguments.resume, force: arguments.force };
    let screen = Screen::new(&config, start.resume, (arguments.quiet, arguments.json));
    let screen = Arc::new(screen);
    // Where the system has no such thing, a computer that people left alone may fall asleep.
    let _awake = Awake::hold();
    let end = watched(&config, &on, start, &screen)?;
    if screen.has_reader() {
        let history = History::open(&config.output.folder)?;
        write!(out, "{}", ending::page(&config, &end, &history, &engine.typed()))?;
    }
    if end.why == Why::Interrupted && screen.has_reader() {
        let words = std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned());
        writeln!(out, "{}", so_far(&config, end.step))?;
        writeln!(out, "saved after step {}; go on with\n  {}", end.step, resuming(words))?;
    }
    Ok(end.why.into())
}

/// Trains while a screen shows it; Ctrl-C ends the run in order.
pub fn watched(
    config: &RunConfig,
    on: &On<'_>,
    start: Start,
    screen: &Arc<Screen>,
) -> Result<End, Failure> {
    let stop = Arc::new(AtomicBool::new(false));
    let (seen, raised) = (Arc::clone(screen), Arc::clone(&stop));
    interrupt::on_first(move || seen.stop(|| raised.store(true, Ordering::Relaxed)))?;
    let end = train(config, on, start, &[&|record| screen.hear(record)], &stop);
    screen.end();
    Ok(end?)
}

/// Where what was learnt until now can be used.
fn so_far(config: &RunConfig, step: u64) -> String {
    let folder = config.output.folder.join(checkpoint::path(step));
    let folder = quoted(&folder.display().to_string());
    match config.adapter.kind {
        AdapterKind::Lora | AdapterKind::Dora => format!("the adapter so far is in\n  {folder}"),
        AdapterKind::None => {
            let base = quoted(&config.base.path.display().to_string());
            format!("the model so far:\n  hearth export {folder} --base {base} --out model")
        }
    }
}

/// The command that goes on with a run: the words that began it, for a shell, and `--resume`.
fn resuming(words: impl Iterator<Item = String>) -> String {
    let begun = words.filter(|word| word != RESUME).map(|word| quoted(&word));
    ["hearth".into()].into_iter().chain(begun).chain([RESUME.into()]).collect::<Vec<_>>().join(" ")
}

const RESUME: &str = "--resume";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_typed_is_said_again() {
        let again = |words: &[&str]| resuming(words.iter().map(|word| (*word).to_owned()));
        let words = ["train", "job.toml", "--device", "cuda:0", "--limit", "70%"];
        assert_eq!(again(&words), "hearth train job.toml --device cuda:0 --limit 70% --resume");
        let words = ["train", "--resume", "--out", "my run", "--set", "data.trigger='s", ""];
        assert_eq!(
            again(&words),
            r"hearth train --out 'my run' --set 'data.trigger='\''s' '' --resume"
        );
    }
}
