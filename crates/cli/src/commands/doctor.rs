//! `hearth doctor`: what this computer is, what of it hearth plans with, and what is wrong.

use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver};

use machine::budget::{Budget, budget};
use machine::findings::{Finding, findings};
use machine::sampler::Sampler;
use machine::sense::Sense;
use machine::{Machine, Recording, Source};
use serde::Serialize;

use crate::commands::Outcome;
use crate::failure::Failure;
use crate::{interrupt, render};

/// Show what this computer is, what of it hearth will use, and what is wrong.
///
/// Reads processor, memory, pressure, heat, power, GPUs, drivers and libraries. What cannot be read is
/// shown as unknown with the reason; that is never an error.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth doctor
  hearth doctor --watch                             again every second, until Ctrl-C
  hearth doctor --json | jq .budget.memory          one figure for a script
  hearth doctor --record my-machine.toml            all answers in a file, to keep or to send
  hearth doctor --machine machines/dgx-spark.toml   a computer you do not have")]
pub struct Arguments {
    /// Print everything as JSON, readings with unit, source and age
    #[arg(long)]
    json: bool,

    /// Look at a recorded machine instead of this one
    #[arg(long, value_name = "FILE")]
    machine: Option<PathBuf>,

    /// Write every answer this computer gave to a new file, to be replayed with --machine
    #[arg(long, value_name = "FILE", conflicts_with = "machine")]
    record: Option<PathBuf>,

    /// Look again every second and whenever the system reports memory pressure, until Ctrl-C
    #[arg(long, conflicts_with_all = ["machine", "record"])]
    watch: bool,
}

/// All that doctor has to say.
#[derive(Serialize)]
pub struct Diagnosis {
    hearth: &'static str,
    pub machine: Machine,
    pub budget: Budget,
    pub findings: Vec<Finding>,
}

impl Diagnosis {
    fn of(source: &mut Source) -> Self {
        let machine = Machine::probe(source);
        let (budget, findings) = (budget(&machine), findings(&machine));
        Self { hearth: env!("CARGO_PKG_VERSION"), machine, budget, findings }
    }
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<Outcome, Failure> {
    let mut source = match &arguments.machine {
        Some(path) => Source::replay(Recording::load(path)?),
        None => Source::live(),
    };
    if arguments.watch {
        return watch(&mut source, arguments.json, out);
    }
    let diagnosis = Diagnosis::of(&mut source);
    if let Some(path) = &arguments.record {
        let title = diagnosis.machine.title.clone();
        Recording { title, ..source.recording().clone() }.save(path)?;
    }
    show(&diagnosis, arguments.json, out)?;
    Ok(Outcome::Done)
}

fn show(diagnosis: &Diagnosis, json: bool, out: &mut dyn Write) -> Result<(), Failure> {
    if json {
        serde_json::to_writer_pretty(&mut *out, diagnosis).map_err(std::io::Error::from)?;
        writeln!(out)?;
    } else {
        write!(out, "{}", render::doctor::page(diagnosis))?;
    }
    Ok(())
}

/// A terminal is redrawn in place; anything else gets one page or one line of JSON after another.
fn watch(source: &mut Source, json: bool, out: &mut dyn Write) -> Result<Outcome, Failure> {
    const HOME_AND_CLEAR: &str = "\x1b[H\x1b[J";
    let mut seen = Diagnosis::of(source);
    let wakes = wakes(&seen)?;
    let redraw = !json && std::io::stdout().is_terminal();
    loop {
        if json {
            serde_json::to_writer(&mut *out, &seen).map_err(std::io::Error::from)?;
            writeln!(out)?;
        } else {
            let page = render::doctor::page(&seen);
            write!(out, "{}{page}", if redraw { HOME_AND_CLEAR } else { "" })?;
        }
        out.flush()?;
        match wakes.recv() {
            Ok(Wake::Reading) => seen = Diagnosis::of(source),
            Ok(Wake::Interrupt) | Err(_) => return Ok(Outcome::Interrupted),
        }
    }
}

/// Why to look again, or to end.
enum Wake {
    Reading,
    Interrupt,
}

/// The sampler's clock is the one of every run: each second, and when memory becomes scarce.
fn wakes(seen: &Diagnosis) -> Result<Receiver<Wake>, Failure> {
    let (sender, receiver) = mpsc::channel();
    let sense = Sense::of(&seen.machine, seen.budget.device, None);
    let sampler = Sampler::start(Source::live(), sense)?;
    let interrupted = sender.clone();
    let relay = move || while sampler.next().is_some_and(|_| sender.send(Wake::Reading).is_ok()) {};
    std::thread::spawn(relay);
    interrupt::on_first(move || _ = interrupted.send(Wake::Interrupt))?;
    Ok(receiver)
}
