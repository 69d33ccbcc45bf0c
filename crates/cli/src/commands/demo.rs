//! `hearth demo`: a LoRA on the built-in model, in a minute or two.

use std::cell::RefCell;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use trainer::Result as Trained;
use trainer::config::{RawConfig, RunConfig};
use trainer::demo::autoencoder::DecoderProgress;
use trainer::demo::{kit, show, unpack};
use trainer::event::EndReason;
use trainer::event::history::History;
use trainer::train::{TrainOptions, output_folder};

use super::device::DeviceArgs;
use super::serve;
use super::train::train_with_screen;
use crate::commands::CommandOutcome;
use crate::failure::Failure;
use crate::interrupt;
use crate::render::line::ProgressLine;
use crate::render::progress::{clear, redraw};
use crate::render::run_summary;
use crate::render::screen::ScreenArgs;
use crate::render::training::TrainingScreen;
use crate::text::{BOLD, DIM};

/// Fine-tune a small built-in model, in a minute or two.
///
/// The model is a small Stable Diffusion 3 that draws plain shapes. A LoRA learns a new style from a dozen
/// images; the same prompts are drawn before and after. Needs no download and no GPU. Does the same as
/// `hearth train recipes/demo.toml`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth demo
  hearth demo --out first-try --device cpu
  hearth demo --kit new-kit        makes the text encoders and VAE of the built-in model")]
pub struct DemoArgs {
    /// Output folder [default: hearth-demo, or hearth-demo-2 and so on]
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,

    /// Make the text encoders and VAE of the built-in model, and stop
    #[arg(long, value_name = "FOLDER", conflicts_with = "out")]
    kit: Option<PathBuf>,

    #[command(flatten)]
    engine: DeviceArgs,

    #[command(flatten)]
    screen: ScreenArgs,
}

/// The job, as everybody can run it.
const JOB: &str = include_str!("../../../../recipes/demo.toml");

pub fn run(arguments: &DemoArgs, out: &mut dyn Write) -> Result<CommandOutcome, Failure> {
    let engine = &arguments.engine;
    if let Some(folder) = &arguments.kit {
        return make_kit(folder, arguments, out);
    }
    let folder = arguments.out.clone().unwrap_or_else(free_name);
    let config = prepare(&folder)?;
    let page = serve::beside(arguments.screen, &folder)?;
    let screen = Arc::new(TrainingScreen::new(&config, false, arguments.screen, page));
    let engine_on = engine.for_job(&config);
    let end = train_with_screen(
        &config,
        &engine_on.device_setup(None)?,
        TrainOptions::default(),
        &screen,
    )?;
    if end.reason == EndReason::Interrupted {
        if screen.prints_text() {
            let job = folder.join("config.toml");
            let (step, job) = (end.step, job.display());
            writeln!(out, "saved after step {step}; continue with\n  hearth train {job} --resume")?;
        }
        return Ok(CommandOutcome::Interrupted);
    }
    let image = show::before_after(&folder)?;
    if screen.prints_text() {
        let history = History::open(&folder)?;
        write!(out, "{}", run_summary::page(&config, &end, &history, &engine.device_flag()))?;
        writeln!(out, "{DIM}the same prompts before and after{DIM:#}")?;
        writeln!(out, "  {BOLD}{}{BOLD:#}", image.display())?;
        writeln!(out, "{DIM}your own images{DIM:#}\n  {YOUR_OWN}")?;
    }
    Ok(end.reason.into())
}

/// What to do next.
const YOUR_OWN: &str =
    "hearth train --images YOUR-IMAGES --base STABLE-DIFFUSION-3.5-FOLDER --out YOUR-LORA";

/// Reads the job, and unpacks the model into the folder.
fn prepare(folder: &Path) -> Trained<RunConfig> {
    let config = job(folder)?;
    output_folder::check(&config, &[show::FILE_NAME])?;
    unpack(&folder.join("base"))?;
    Ok(config)
}

/// The job with its paths inside the folder.
fn job(folder: &Path) -> Trained<RunConfig> {
    // `hearth-demo/base`, which is not there yet, would be the name of a model on the hub.
    let base = Path::new(".").join(folder).join("base");
    let mut raw = RawConfig::from_text(JOB, Path::new("recipes/demo.toml"))?;
    for (key, path) in [
        ("base.path", base),
        ("data.images", folder.join("images")),
        ("output.folder", folder.to_owned()),
    ] {
        raw.set_path(key, &path)?;
    }
    Ok(raw.resolve()?)
}

/// Makes the parts of the built-in model that are not trained by `recipes/demo-base.toml`.
fn make_kit(
    folder: &Path,
    arguments: &DemoArgs,
    out: &mut dyn Write,
) -> Result<CommandOutcome, Failure> {
    let device = arguments.engine.open(KIT_BYTES)?;
    let interrupted = interrupt::flag()?;
    let drawn = RefCell::new(None);
    kit::write(folder, &device, &|DecoderProgress { step, total: of, error }| {
        let line = || {
            ProgressLine::new("")
                .bar(step as f64 / of as f64)
                .part(0, format!("step {step} of {of}"))
                .part(1, format!("error {error:.5}"))
        };
        if !arguments.screen.quiet {
            redraw(&mut drawn.borrow_mut(), line);
        }
        !interrupted.load(Ordering::Relaxed)
    })?;
    clear();
    if !arguments.screen.quiet {
        writeln!(out, "{}", folder.display())?;
    }
    Ok(CommandOutcome::Done)
}

/// Chosen: several times what its training takes.
const KIT_BYTES: usize = 2 << 30;

/// A name that nothing has yet: the demo may be run again and again.
fn free_name() -> PathBuf {
    let names = (2..).map(|n| PathBuf::from(format!("hearth-demo-{n}")));
    let mut names = std::iter::once(PathBuf::from("hearth-demo")).chain(names);
    names.find(|name| !name.exists()).expect("there is no end of numbers")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_is_in_the_folder_and_not_on_the_hub() {
        for folder in ["hearth-demo", "some/where", "/models/demo"] {
            let base = job(Path::new(folder)).unwrap().base.path;
            assert!(base.ends_with(Path::new(folder).join("base")), "{}", base.display());
            assert!(weights::hub::HubPath::of(&base).is_none(), "{}", base.display());
        }
    }
}
