//! `hearth evaluate`: how good a language model is, with its adapter and without.

use std::cell::Cell;
use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::Instant;

use tempfile::TempDir;
use trainer::TrainerError;
use trainer::evaluate::{Evaluation, Question, read_questions};
use trainer::event::evaluation::RunEvaluation;
use trainer::event::journal;
use trainer::model::llama::language_model::LanguageModel;
use trainer::report;
use trainer::text::{HeldOut, RecordKind, TextDataRequest, TextDataset, Tokenizer};
use weights::hub::model_name;

use super::device::{COMPUTER, DeviceArgs, FormatArgs, MemoryLimitArg};
use super::model_arg::ModelArg;
use crate::commands::CommandOutcome;
use crate::failure::Failure;
use crate::interrupt;
use crate::render;
use crate::render::evaluate::{EvaluationReport, ModelScores};
use crate::render::line::ProgressLine;
use crate::render::progress::{clear, duration, redraw};

/// Measure how good a language model is: the perplexity of texts, and the share of questions that it answers right.
///
/// With an adapter, the base alone is measured too, so that before and after stand side by side; with that of a run, in its
/// report too. Questions are lines of JSON. Of those with choices, the choice that the model thinks likeliest counts; others are answered by greedy decoding,
/// and have to be equal. The memory is planned before the model is loaded, and no more is taken.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth evaluate --base HuggingFaceTB/SmolLM2-135M --text held-out.jsonl
  hearth evaluate --base Qwen3-4B.gguf --adapter notes --text held-out.txt --questions quiz.jsonl
  hearth evaluate --base Qwen/Qwen3-0.6B --questions quiz.jsonl --json

A line of quiz.jsonl:
  {\"prompt\": \"The sky is\", \"choices\": [\"blue\", \"green\"], \"answer\": 0}
  {\"prompt\": \"2 + 2 =\", \"answer\": \"4\"}")]
pub struct EvaluateArgs {
    /// Language model: a transformers folder, a GGUF file, or the name of a fetched model
    #[arg(long, value_name = "MODEL")]
    base: ModelArg,

    /// LoRA or DoRA adapter: the folder of a run, or a file or folder of PEFT
    #[arg(long, value_name = "PATH")]
    adapter: Option<ModelArg>,

    /// Texts for the perplexity: a file or folder, as for training
    #[arg(long, value_name = "PATH", required_unless_present = "questions")]
    text: Option<PathBuf>,

    /// Questions: a .jsonl file
    #[arg(long, value_name = "FILE")]
    questions: Option<PathBuf>,

    /// Tokens of the pieces that texts are cut into [default: 1024, or as many as the model is made for]
    #[arg(long, value_name = "N", requires = "text")]
    length: Option<usize>,

    /// Maximum number of tokens of an answer
    #[arg(long, value_name = "N", default_value_t = 32)]
    max_tokens: usize,

    /// Memory limit: 16GB, or 70% of the default limit [default: free memory less a reserve]
    #[arg(long, value_name = "SIZE", help_heading = COMPUTER)]
    limit: Option<MemoryLimitArg>,

    #[command(flatten)]
    formats: FormatArgs,

    #[command(flatten)]
    engine: DeviceArgs,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Pieces of texts unless others are asked for. Chosen: as `text.length`.
const DEFAULT_LENGTH: usize = 1024;

pub fn run(arguments: &EvaluateArgs, out: &mut dyn Write) -> Result<CommandOutcome, Failure> {
    let mut base = LanguageModel::open(&arguments.base)?;
    let tokenizer = Tokenizer::open(&arguments.base)?;
    let texts = open_texts(arguments, &base, &tokenizer)?;
    let questions = match &arguments.questions {
        Some(path) => read_questions(path)?,
        None => Vec::new(),
    };
    let interrupted = interrupt::flag()?;
    let go_on = || !interrupted.load(Ordering::Relaxed);
    let dataset = texts.as_ref().map(|texts| &texts.dataset);
    let asked =
        AskedEvaluation { arguments, tokenizer: &tokenizer, texts: dataset, questions: &questions };
    let of_base = asked.scores(&base, model_name(&arguments.base), &go_on)?;
    let of_adapter = match &arguments.adapter {
        Some(adapter) => {
            base.add_adapter(adapter)?;
            Some(asked.scores(&base, model_name(adapter), &go_on)?)
        }
        None => None,
    };
    let report = EvaluationReport { base: of_base, adapter: of_adapter };
    if arguments.json {
        render::json::object(out, &report)?;
    } else {
        write!(out, "{}", render::evaluate::page(&report))?;
    }
    let paths = keep(arguments, report)?;
    if let Some([evaluation, report]) = paths.filter(|_| !arguments.json) {
        writeln!(out, "{} and {}", evaluation.display(), report.display())?;
    }
    Ok(CommandOutcome::Done)
}

/// Puts the figures of a run's adapter into the run's folder and its report.
fn keep(
    arguments: &EvaluateArgs,
    found: EvaluationReport,
) -> Result<Option<[PathBuf; 2]>, Failure> {
    let EvaluateArgs { text: texts, questions, adapter, .. } = arguments;
    let is_run = |path: &&ModelArg| path.join(journal::FILE_NAME).is_file();
    let (Some(run), Some(scores)) = (adapter.as_ref().filter(is_run), found.adapter) else {
        return Ok(None);
    };
    let (base, adapter) = (found.base.scores, scores.scores);
    let (texts, questions) = (texts.clone(), questions.clone());
    let path = RunEvaluation { texts, questions, base, adapter }.write(run)?;
    Ok(Some([path, report::write(run)?]))
}

/// Texts in tokens, which lie in a folder that is removed with them.
struct TemporaryTexts {
    dataset: TextDataset,
    _folder: TempDir,
}

fn open_texts(
    arguments: &EvaluateArgs,
    base: &LanguageModel,
    tokenizer: &Tokenizer,
) -> Result<Option<TemporaryTexts>, Failure> {
    let Some(path) = &arguments.text else { return Ok(None) };
    let most = base.config.max_position_embeddings;
    let length = arguments.length.unwrap_or(DEFAULT_LENGTH.min(most));
    if length > most {
        let problem = format!("texts of {length} tokens, the model is made for {most}");
        return Err(TrainerError::Request { problem, hint: "give a smaller --length" }.into());
    }
    let folder = tempfile::tempdir()?;
    let request = TextDataRequest {
        path: path.clone(),
        kind: RecordKind::Texts,
        follow_links: false,
        width: None,
        length,
        held_out: HeldOut::None,
        seed: 0,
        folder: folder.path().into(),
    };
    let dataset = TextDataset::open(&request, tokenizer, &|_| true)?;
    Ok(Some(TemporaryTexts { dataset, _folder: folder }))
}

/// What a model is asked, with its adapter and without.
struct AskedEvaluation<'a> {
    arguments: &'a EvaluateArgs,
    tokenizer: &'a Tokenizer,
    texts: Option<&'a TextDataset>,
    questions: &'a [Question],
}

impl AskedEvaluation<'_> {
    fn scores(
        &self,
        base: &LanguageModel,
        name: String,
        go_on: &dyn Fn() -> bool,
    ) -> Result<ModelScores, Failure> {
        let EvaluateArgs { engine, formats, limit, max_tokens, .. } = self.arguments;
        let (texts, questions, max_tokens) = (self.texts, self.questions, *max_tokens);
        let evaluation = Evaluation { texts, questions, max_tokens };
        let prepared = evaluation.prepare(base, self.tokenizer)?;
        let precision = formats.precision();
        let peak_bytes = prepared.plan(precision, engine.kind(), engine.limit_bytes(*limit)?)?;
        let device = engine.open(peak_bytes)?;
        let (begun, total) = (Instant::now(), prepared.n_passes());
        let (done, drawn) = (Cell::new(0), Cell::new(Some(begun)));
        let tick = || {
            done.set(done.get() + 1);
            let mut last = drawn.get();
            redraw(&mut last, || line(&name, done.get(), total, begun));
            drawn.set(last);
            go_on()
        };
        let scores = prepared.run(&device, precision, &tick);
        clear();
        Ok(ModelScores { scores: scores?, peak_bytes, secs: begun.elapsed().as_secs_f64(), name })
    }
}

fn line(name: &str, done: usize, total: usize, begun: Instant) -> ProgressLine {
    let left = begun.elapsed().as_secs_f64() / done as f64 * (total - done) as f64;
    ProgressLine::new(format!("{name}:"))
        .bar(done as f64 / total as f64)
        .part(0, format!("{done} of {total}"))
        .part(1, format!("{} left", duration(left)))
}
