//! `hearth bench compress`: language models that differ only in which tokens their trunk sees, each trained with as many
//! floating-point operations as the others, and measured on held-out text.

use std::io::Write;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use compute::{CancelToken, Dtype};
use trainer::bench::compress::{CompressArm, CompressBench, bits_per_byte};
use trainer::event::{Event, EventRecord};
use trainer::model::llama::preset::LlamaPreset;
use trainer::train::{TrainOptions, train};

use super::{median, private_folder, text};
use crate::commands::CommandOutcome;
use crate::commands::device::DeviceArgs;
use crate::commands::named_value;
use crate::failure::Failure;
use crate::render;
use crate::render::bench::figures::CompressFigures;

/// Compare ways to choose the tokens that a language model's trunk sees, at equal FLOPs.
///
/// Trains a model for each way and seed, as `hearth train` with `[compress]` does, and measures bits per byte on
/// held-out text. See docs/compression.md.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth bench compress --text books --validation held-out.txt --preset tiny --length 256 --steps 200
  hearth bench compress --text books --validation held-out.txt --arms reinforce,random --seeds 1 --json
  hearth bench compress --text books --validation held-out.txt --device cuda:0 --set optimizer.warmup_steps=100")]
pub struct BenchCompressArgs {
    /// Texts to train on: a file or a folder
    #[arg(long)]
    text: PathBuf,

    /// Texts to measure on: a file or a folder
    #[arg(long)]
    validation: PathBuf,

    /// Ways to choose tokens: reinforce, grpo, gumbel, ratio, all, stride, random, spaces, rarest, bytes, bpe
    #[arg(long, value_delimiter = ',', value_parser = arm,
          default_value = "reinforce,grpo,gumbel,ratio,all,stride,random,spaces,rarest,bytes,bpe")]
    arms: Vec<CompressArm>,

    /// Runs of each, with seeds from 1 on
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,

    /// The first seed
    #[arg(long, default_value_t = 1)]
    first_seed: u64,

    /// Size of the trunk: tiny, 25M, 125M, 350M or 1B
    #[arg(long, default_value = "25M", value_parser = text::preset)]
    preset: LlamaPreset,

    /// Bytes per sequence
    #[arg(long, default_value_t = 2048)]
    length: usize,

    /// Sequences per step (batch size)
    #[arg(long, default_value_t = 32)]
    batch: usize,

    /// What all arms have equally much of: `flops`, or `steps`, each with as many bytes
    #[arg(long, default_value = "flops")]
    equal: EqualPart,

    /// Steps of `reinforce`; with `--equal flops` the others take as many as cost the same
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,

    /// The trunk sees one byte in so many
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u64).range(2..=64))]
    keep_one_in: u64,

    /// Vocabulary of byte-pair encoding
    #[arg(long, default_value_t = 4096)]
    vocabulary: usize,

    /// Learning rate, the same for all
    #[arg(long, default_value_t = 6e-4)]
    learning_rate: f64,

    /// Number format of activations; weights are f32
    #[arg(long, default_value = "bf16", value_parser = named_value::parser::<Dtype>())]
    dtype: Dtype,

    /// Another setting of all jobs, as `KEY=VALUE`; may be given several times
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,

    #[command(flatten)]
    engine: DeviceArgs,

    /// Print one JSON object per run
    #[arg(long)]
    json: bool,
}

/// What all arms have equally much of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum EqualPart {
    /// Floating-point operations.
    Flops,
    /// Steps.
    Steps,
}

fn arm(name: &str) -> Result<CompressArm, String> {
    let names = || CompressArm::ALL.map(CompressArm::name).join(", ");
    CompressArm::from_name(name).ok_or_else(|| format!("not one of {}", names()))
}

pub fn run(arguments: &BenchCompressArgs, out: &mut dyn Write) -> Result<CommandOutcome, Failure> {
    let folder = private_folder(&std::env::current_dir()?)?;
    let bench = bench(arguments, folder.path().into());
    if arguments.arms.contains(&CompressArm::Bpe) {
        bench.train_tokenizer()?;
    }
    let kind = arguments.engine.kind();
    let reference = bench.job(CompressArm::Reinforce, 1, 1)?;
    let budget = arguments.steps as f64 * bench.step_flops(&reference, kind)? as f64;
    let mut all = Vec::new();
    for seed in arguments.first_seed..arguments.first_seed + arguments.seeds {
        for arm in &arguments.arms {
            let figures = measure(arguments, &bench, *arm, seed, budget)?;
            if arguments.json {
                render::json::line(out, &figures)?;
                out.flush()?;
            }
            all.push(figures);
        }
    }
    if !arguments.json {
        let BenchCompressArgs { preset, length, batch, keep_one_in, .. } = arguments;
        let equal = match arguments.equal {
            EqualPart::Flops => format!("{budget:.1e} FLOPs"),
            EqualPart::Steps => format!("{} steps", arguments.steps),
        };
        let title = format!(
            "{} trunk, one byte in {keep_one_in}, {batch} sequences of {length} bytes a step, {equal} each",
            preset.name(),
        );
        write!(out, "{}", render::bench::compress(&title, &all))?;
    }
    Ok(CommandOutcome::Done)
}

fn bench(arguments: &BenchCompressArgs, folder: PathBuf) -> CompressBench {
    let BenchCompressArgs { text, validation, preset, length, batch, steps, .. } = arguments;
    let own = [
        format!("optimizer.learning_rate={}", arguments.learning_rate),
        format!("base.dtype={}", named_value::value_name(&arguments.dtype)),
    ];
    CompressBench {
        text: text.clone(),
        validation: validation.clone(),
        preset: *preset,
        length: *length,
        batch: *batch,
        steps: *steps,
        keep_one_in: arguments.keep_one_in as usize,
        vocabulary: arguments.vocabulary,
        settings: own.into_iter().chain(arguments.set.iter().cloned()).collect(),
        folder,
    }
}

/// One run.
fn measure(
    arguments: &BenchCompressArgs,
    bench: &CompressBench,
    arm: CompressArm,
    seed: u64,
    budget: f64,
) -> Result<CompressFigures, Failure> {
    let (begun, kind) = (Instant::now(), arguments.engine.kind());
    let flops = bench.step_flops(&bench.job(arm, seed, 1)?, kind)? as f64;
    let steps = match arguments.equal {
        EqualPart::Flops => ((budget / flops).round() as u64).max(1),
        EqualPart::Steps => arguments.steps,
    };
    let config = bench.job(arm, seed, steps)?;
    let (secs, loss) = (Mutex::new(Vec::new()), Mutex::new(f64::NAN));
    let listener = |record: &EventRecord| match &record.event {
        Event::Step(step) => {
            secs.lock().unwrap_or_else(PoisonError::into_inner).push(step.secs);
        }
        Event::Validation { loss: value, .. } => {
            *loss.lock().unwrap_or_else(PoisonError::into_inner) = *value;
        }
        _ => {}
    };
    let setup = arguments.engine.device_setup(None)?;
    train(&config, &setup, TrainOptions::default(), &[&listener], &CancelToken::default())?;
    let secs = secs.into_inner().unwrap_or_else(PoisonError::into_inner);
    let loss = loss.into_inner().unwrap_or_else(PoisonError::into_inner);
    let bytes_per_target = bench.bytes_per_target(&config)?;
    let run = bench.run_folder(arm, seed);
    let kept = bench.kept(&config, &run.join("model"), kind, &setup.open)?;
    let length =
        if arm == CompressArm::Bpe { bench.length / bench.keep_one_in } else { bench.length };
    let step_bytes = (bench.batch * length) as f64 * bytes_per_target;
    super::remove(&run)?;
    Ok(CompressFigures {
        arm: arm.name(),
        seed,
        bits_per_byte: bits_per_byte(loss, bytes_per_target),
        kept_share: kept.map(|kept| kept.share),
        spaces_found: kept.map(|kept| kept.spaces_found),
        bytes_per_s: step_bytes / median(secs.into_iter()),
        steps,
        bytes: step_bytes * steps as f64,
        flops: flops * steps as f64,
        secs: begun.elapsed().as_secs_f64(),
    })
}
