//! `hearth bench cluster`: how fast a job is on several machines together, beside the sum of their speeds alone.

use std::io::Write;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use cluster::World;
use compute::CancelToken;
use trainer::TrainerError;
use trainer::config::RunConfig;
use trainer::event::{Event, EventRecord, RankShare};
use trainer::train::{DeviceSetup, TrainOptions, train};

use super::{median, private_folder};
use crate::commands::CommandOutcome;
use crate::commands::device::DeviceArgs;
use crate::commands::job::JobArgs;
use crate::commands::nodes::{self, NodesArgs};
use crate::failure::Failure;
use crate::render;
use crate::render::bench::figures::{ClusterFigures, RankFigures};

/// Measure a job on several machines together, beside the sum of their speeds.
///
/// Every rank first trains the job by itself, all at the same time, then all train it together. Nothing is kept.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth bench cluster job.toml --nodes mac.local,spark.local
  hearth bench cluster job.toml --nodes localhost:2 --measure 40 --json
  mpirun -n 2 --bind-to none hearth bench cluster job.toml")]
pub struct BenchClusterArgs {
    #[command(flatten)]
    job: JobArgs,

    /// Steps to measure, after some that warm up
    #[arg(long, default_value_t = 24, value_name = "STEPS", value_parser = clap::value_parser!(u64).range(4..))]
    measure: u64,

    #[command(flatten)]
    engine: DeviceArgs,

    #[command(flatten)]
    nodes: NodesArgs,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &BenchClusterArgs, out: &mut dyn Write) -> Result<CommandOutcome, Failure> {
    // A third is for warming up: memory, and shares that follow the speeds.
    let steps = (arguments.measure + arguments.measure / 2).to_string();
    let flags = [
        ("--measure", "train.steps", Some(steps.as_str())),
        ("--measure", "output.save_every", Some("off")),
    ];
    let config = arguments.job.resolve_with("bench cluster", &flags)?;
    if let Some(outcome) = arguments.nodes.run(out)? {
        return Ok(outcome);
    }
    let world = World::join().map_err(TrainerError::from)?;
    let Some(world) = world.filter(|world| world.size() > 1) else {
        let problem = "one machine has nothing to be compared with".into();
        let hint = "name several: --nodes mac.local,spark.local, or localhost:2".into();
        return Err(Failure::Usage { problem, hint });
    };
    let figures = measure(arguments, &config, &world)?;
    let is_first = world.rank() == 0;
    nodes::leave(Some(world), false)?;
    if is_first && arguments.json {
        render::json::line(out, &figures)?;
    } else if is_first {
        write!(out, "{}", render::bench::cluster(&figures))?;
    }
    Ok(CommandOutcome::Done)
}

fn measure(
    arguments: &BenchClusterArgs,
    config: &RunConfig,
    world: &World,
) -> Result<ClusterFigures, Failure> {
    let engine = arguments.engine.for_job(config).for_rank(Some(world));
    let folder = private_folder(&std::env::current_dir()?)?;
    let setup = |world| Ok::<_, Failure>(DeviceSetup { world, ..engine.device_setup(None)? });
    let cluster = |error: cluster::ClusterError| Failure::from(TrainerError::from(error));
    world.barrier().map_err(cluster)?;
    let alone = trained(config, &setup(None)?, &folder.path().join("alone"), arguments.measure)?;
    let mut all_alone = vec![0.0; world.size()];
    all_alone[world.rank()] = alone.step_secs;
    let all_alone = world.sum(all_alone).map_err(cluster)?;
    let place = folder.path().join("together");
    let together = trained(config, &setup(Some(world))?, &place, arguments.measure)?;
    let sum: f64 = all_alone.iter().map(|secs| 1.0 / secs).sum();
    let rank =
        |(alone_secs, share): (&f64, RankShare)| RankFigures { alone_secs: *alone_secs, share };
    Ok(ClusterFigures {
        together_secs: together.step_secs,
        of_the_sum: 1.0 / together.step_secs / sum,
        ranks: all_alone.iter().zip(together.ranks).map(rank).collect(),
    })
}

/// What was seen of a run.
#[derive(Default)]
struct SeenRun {
    secs: Vec<f64>,
    ranks: Vec<RankShare>,
}

/// Median seconds of a step, and how ranks shared it.
struct MeasuredRun {
    step_secs: f64,
    ranks: Vec<RankShare>,
}

fn trained(
    config: &RunConfig,
    setup: &DeviceSetup<'_>,
    folder: &Path,
    n: u64,
) -> Result<MeasuredRun, Failure> {
    let mut config = config.clone();
    config.output.folder = folder.into();
    let seen = Mutex::new(SeenRun::default());
    let listener = |record: &EventRecord| {
        let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
        match &record.event {
            Event::Step(step) => seen.secs.push(step.secs),
            Event::Ranks { ranks, .. } => seen.ranks.clone_from(ranks),
            _ => {}
        }
    };
    train(&config, setup, TrainOptions::default(), &[&listener], &CancelToken::default())?;
    let SeenRun { secs, ranks } = seen.into_inner().unwrap_or_else(PoisonError::into_inner);
    let measured = secs.len().saturating_sub(n as usize);
    Ok(MeasuredRun { step_secs: median(secs[measured..].iter().copied()), ranks })
}
