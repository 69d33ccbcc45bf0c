//! `hearth train`: images or texts to a LoRA, or to a fully fine-tuned model.

use std::io::Write;
use std::sync::Arc;

use cluster::{World, supervisor};
use compute::CancelToken;
use machine::awake::Awake;
use trainer::TrainerError;
use trainer::config::RunConfig;
use trainer::event::history::History;
use trainer::event::{EndReason, RunEnd};
use trainer::train::{DeviceSetup, TrainOptions, train};

use super::device::{COMPUTER, DeviceArgs, MemoryLimitArg};
use super::job::{JobArgs, JobFlag};
use super::nodes::{self, NodesArgs};
use super::resume::{resume_command, so_far};
use super::serve;
use crate::commands::CommandOutcome;
use crate::failure::Failure;
use crate::interrupt;
use crate::render::run_summary;
use crate::render::screen::ScreenArgs;
use crate::render::training::TrainingScreen;

/// Train a LoRA, a DoRA or a full fine-tune on a folder of images, or on texts.
///
/// Encodes images and captions, or tokenises texts, once. Plans the memory of every phase before the first
/// step, and takes no more. Trains, draws samples along the way, and writes the adapter for the programs that
/// were asked for, with a model card and a report.
///
/// Ctrl-C saves; --resume continues bit for bit, also after a crash. If memory gets short or the computer hot,
/// the run slows down; the result is the same (docs/thermal.md).
///
/// All else is a key of the job, in its file or by --set: EMA (train.ema), gradient checkpointing
/// (train.recompute), gradient accumulation, block offloading, quantisation of the base (base.quantise).
/// docs/config.md lists every key.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth train --images my-cat --base stable-diffusion-3.5-medium --out cat
  hearth train --text my-notes --base SmolLM2-135M --out notes
  hearth train --text pairs.jsonl --base SmolLM2-135M-Instruct --set preference.method=dpo
  hearth train recipes/demo.toml
  hearth train recipes/lm-tiny.toml
  hearth train job.toml --steps 500 --rank 32 --lr 5e-5
  hearth train job.toml --set adapter.kind=full                full fine-tune, without LoRA
  hearth train job.toml --set train.ema=0.999 --set train.recompute=block
  hearth train job.toml --set data.trigger=zwx --set data.validation=unset
  hearth train job.toml --mode overnight --max-temp 80
  hearth train job.toml --resume
  hearth train job.toml --nodes mac.local,spark.local          two machines in one job (docs/clusters.md)
  hearth train job.toml --gpus 2")]
pub struct TrainArgs {
    #[command(flatten)]
    job: JobArgs,

    /// Continue the run in the output folder from its last checkpoint
    #[arg(long)]
    resume: bool,

    /// Write the adapter even if the run diverged
    #[arg(long)]
    force: bool,

    /// Memory limit: 16GB, or 70% of the default limit [default: free memory less a reserve]
    #[arg(long, visible_alias = "max-memory", value_name = "SIZE", help_heading = COMPUTER)]
    limit: Option<MemoryLimitArg>,

    /// Heat and noise: quiet, balanced, full or overnight [machine.mode]
    #[arg(long, help_heading = COMPUTER)]
    mode: Option<String>,

    // Not as a comment, where the key would be taken for a link.
    #[arg(
        long,
        value_name = "CELSIUS",
        allow_negative_numbers = true,
        help_heading = COMPUTER,
        help = "Temperature limit in °C, instead of the mode's [machine.max_temp]"
    )]
    max_temp: Option<String>,

    #[command(flatten)]
    engine: DeviceArgs,

    #[command(flatten)]
    nodes: NodesArgs,

    #[command(flatten)]
    screen: ScreenArgs,
}

impl TrainArgs {
    /// What the governor may do, as keys of the job.
    fn governor_flags(&self) -> [JobFlag<'_>; 2] {
        [
            ("--mode", "machine.mode", self.mode.as_deref()),
            ("--max-temp", "machine.max_temp", self.max_temp.as_deref()),
        ]
    }
}

pub fn run(arguments: &TrainArgs, out: &mut dyn Write) -> Result<CommandOutcome, Failure> {
    let config = arguments.job.resolve_with("train", &arguments.governor_flags())?;
    if let Some(outcome) = arguments.nodes.run(out)? {
        return Ok(outcome);
    }
    let world = World::join().map_err(TrainerError::from)?;
    let ranks = world.as_ref().filter(|world| world.is_shared());
    let engine = arguments.engine.for_job(&config).for_rank(ranks);
    engine.check_trust()?;
    let on = DeviceSetup { world: ranks, ..engine.device_setup(arguments.limit)? };
    let is_first = ranks.is_none_or(|world| world.rank() == 0);
    let start = TrainOptions { resume: arguments.resume, force: arguments.force };
    let shown = if is_first { arguments.screen } else { ScreenArgs::SILENT };
    let page = serve::beside(shown, &config.output.folder)?;
    let screen = TrainingScreen::new(&config, start.resume, shown, page);
    let screen = Arc::new(screen);
    // Where the system has no such thing, a computer that people left alone may fall asleep.
    let _awake = Awake::hold();
    let end = train_with_screen(&config, &on, start, &screen)?;
    drop(on);
    let is_paused = end.reason == EndReason::Interrupted;
    nodes::leave(world, is_paused)?;
    if is_paused && supervisor::is_supervised() {
        // It knows, and speaks for all.
        return Ok(CommandOutcome::Done);
    }
    if screen.prints_text() {
        let history = History::open(&config.output.folder)?;
        write!(out, "{}", run_summary::page(&config, &end, &history, &engine.device_flag()))?;
    }
    if is_paused && screen.prints_text() {
        let words = std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned());
        writeln!(out, "{}", so_far(&config, end.step))?;
        writeln!(out, "saved after step {}; continue with\n  {}", end.step, resume_command(words))?;
    }
    Ok(end.reason.into())
}

/// Trains while a screen shows it; Ctrl-C ends the run in order.
pub fn train_with_screen(
    config: &RunConfig,
    on: &DeviceSetup<'_>,
    start: TrainOptions,
    screen: &Arc<TrainingScreen>,
) -> Result<RunEnd, Failure> {
    let stop = CancelToken::default();
    let (seen, raised) = (Arc::clone(screen), stop.clone());
    interrupt::on_first(move || seen.stop(|| raised.cancel()))?;
    nodes::stop_when_asked(on.world, &stop);
    let end = train(config, on, start, &[&|record| screen.on_event(record)], &stop);
    screen.end();
    Ok(end?)
}
