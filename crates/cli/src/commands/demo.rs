//! `hearth demo`: a whole fine-tuning on the built-in model, in a minute or two.

use std::cell::RefCell;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use trainer::Result as Trained;
use trainer::config::{RawConfig, RunConfig};
use trainer::demo::autoencoder::Progress;
use trainer::demo::{kit, show, unpack};
use trainer::event::Why;
use trainer::event::history::History;
use trainer::train::{Start, claim};

use super::engine::Engine;
use super::train::watched;
use crate::commands::Outcome;
use crate::failure::Failure;
use crate::interrupt;
use crate::render::ending;
use crate::render::line::Line;
use crate::render::progress::{clear, redraw};
use crate::render::training::Screen;
use crate::text::{BOLD, DIM};

/// Fine-tune the built-in model, and look at what that did.
///
/// The model is a small Stable Diffusion 3 that draws plain shapes. A dozen pictures teach it a new
/// style; the same prompts are drawn before and after. Needs no download and no graphics card. Does
/// what `hearth train recipes/demo.toml` does.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth demo
  hearth demo --out first-try --device cpu
  hearth demo --kit new-kit        makes the built-in model's encoders and autoencoder anew")]
pub struct Arguments {
    /// Folder for all that is written [default: hearth-demo, or a new name like it]
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,

    /// Make the built-in model's other parts anew, and stop
    #[arg(long, value_name = "FOLDER", conflicts_with = "out")]
    kit: Option<PathBuf>,

    #[command(flatten)]
    engine: Engine,

    /// Print nothing but warnings and errors
    #[arg(long)]
    quiet: bool,

    /// Print every event as a line of JSON
    #[arg(long)]
    json: bool,
}

/// The job, as everybody can run it.
const JOB: &str = include_str!("../../../../recipes/demo.toml");

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<Outcome, Failure> {
    let engine = &arguments.engine;
    if let Some(folder) = &arguments.kit {
        return make_kit(folder, arguments, out);
    }
    let folder = arguments.out.clone().unwrap_or_else(free_name);
    let config = prepare(&folder)?;
    let screen = Arc::new(Screen::new(&config, false, (arguments.quiet, arguments.json)));
    let engine_on = engine.for_job(&config);
    let end = watched(&config, &engine_on.on(None)?, Start::default(), &screen)?;
    if end.why == Why::Interrupted {
        if screen.has_reader() {
            let job = folder.join("config.toml");
            let (step, job) = (end.step, job.display());
            writeln!(out, "saved after step {step}; go on with\n  hearth train {job} --resume")?;
        }
        return Ok(Outcome::Interrupted);
    }
    let picture = show::before_after(&folder)?;
    if screen.has_reader() {
        let history = History::open(&folder)?;
        write!(out, "{}", ending::page(&config, &end, &history, &engine.typed()))?;
        writeln!(out, "{DIM}the same prompts before and after{DIM:#}")?;
        writeln!(out, "  {BOLD}{}{BOLD:#}", picture.display())?;
        writeln!(out, "{DIM}your own images{DIM:#}\n  {YOUR_OWN}")?;
    }
    Ok(end.why.into())
}

/// What to do next.
const YOUR_OWN: &str =
    "hearth train --images YOUR-IMAGES --base STABLE-DIFFUSION-3.5-FOLDER --out YOUR-LORA";

/// Reads the job with its paths inside the folder, and unpacks the model there.
fn prepare(folder: &Path) -> Trained<RunConfig> {
    let base = folder.join("base");
    let mut raw = RawConfig::from_text(JOB, Path::new("recipes/demo.toml"))?;
    for (key, path) in [
        ("base.path", base.clone()),
        ("data.images", folder.join("pictures")),
        ("output.folder", folder.to_owned()),
    ] {
        raw.set_path(key, &path)?;
    }
    let config = raw.resolve()?;
    claim::check(&config, &[show::FILE_NAME])?;
    unpack(&base)?;
    Ok(config)
}

/// Makes the parts of the built-in model that are not trained by `recipes/demo-base.toml`.
fn make_kit(folder: &Path, arguments: &Arguments, out: &mut dyn Write) -> Result<Outcome, Failure> {
    let device = arguments.engine.open(KIT_BYTES)?;
    let interrupted = interrupt::flag()?;
    let drawn = RefCell::new(None);
    kit::write(folder, &device, &|Progress { step, of, error }| {
        let line = || {
            Line::new("")
                .bar(step as f64 / of as f64)
                .part(0, format!("step {step} of {of}"))
                .part(1, format!("error {error:.5}"))
        };
        if !arguments.quiet {
            redraw(&mut drawn.borrow_mut(), line);
        }
        !interrupted.load(Ordering::Relaxed)
    })?;
    clear();
    if !arguments.quiet {
        writeln!(out, "{}", folder.display())?;
    }
    Ok(Outcome::Done)
}

/// Chosen: several times what its training takes.
const KIT_BYTES: usize = 2 << 30;

/// A name that nothing has yet: the demo may be run again and again.
fn free_name() -> PathBuf {
    let names = (2..).map(|n| PathBuf::from(format!("hearth-demo-{n}")));
    let mut names = std::iter::once(PathBuf::from("hearth-demo")).chain(names);
    names.find(|name| !name.exists()).expect("there is no end of numbers")
}
