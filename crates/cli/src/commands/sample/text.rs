//! `hearth sample` of a language model: its text goes to standard output as it comes.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use compute::{Device, Params};
use serde::Serialize;
use trainer::TrainerError;
use trainer::model::compress::CompressedModel;
use trainer::sample::text::{GenerationRequest, GenerativeBase, plan_generation};
use trainer::text::{Message, Tokenizer};

use super::SampleArgs;
use crate::commands::CommandOutcome;
use crate::commands::text_stream::{SamplerArgs, StreamedText, TextStream, destination};
use crate::failure::Failure;
use crate::interrupt;
use crate::render;
use crate::terminal;

/// How texts are generated.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Language models")]
pub struct SampleTextArgs {
    /// Maximum number of new tokens [default: 200]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    max_tokens: Option<usize>,

    #[command(flatten)]
    sampling: SamplerArgs,

    /// Send the prompt as a user message, by the model's chat template
    #[arg(long)]
    chat: bool,
}

impl SampleTextArgs {
    /// The first of them that was typed, for a model that has no use for it.
    pub fn first_typed(&self) -> Option<&'static str> {
        let Self { max_tokens, sampling: SamplerArgs { temperature, top_k, top_p }, chat } = self;
        let typed = [
            ("--max-tokens", max_tokens.is_some()),
            ("--temperature", temperature.is_some()),
            ("--top-k", top_k.is_some()),
            ("--top-p", top_p.is_some()),
            ("--chat", *chat),
        ];
        typed.into_iter().find(|(_, is_typed)| *is_typed).map(|(name, _)| name)
    }
}

/// What was generated, or would be.
#[derive(Serialize)]
struct TextSampleReport {
    peak_bytes: usize,
    limit_bytes: usize,
    texts: Vec<TextSampleRow>,
    /// Of a compressed model whose trunk sees all tokens: what compression is measured against.
    #[serde(skip_serializing_if = "Option::is_none")]
    uncompressed_tokens_per_sec: Option<f64>,
    secs: f64,
}

/// One text.
#[derive(Serialize)]
struct TextSampleRow {
    prompt: String,
    text: String,
    seed: u64,
    n_prompt_tokens: usize,
    n_tokens: usize,
    /// Whether it ended with the end-of-text token.
    is_whole: bool,
    /// From the prompt to the first token.
    prompt_secs: f64,
    /// Of all tokens after the first.
    tokens_per_sec: Option<f64>,
}

/// A compressed model has no adapter, and no tokenizer if its tokens are bytes.
pub fn run_compressed(
    arguments: &SampleArgs,
    base: &CompressedModel,
    out: &mut dyn Write,
) -> Result<CommandOutcome, Failure> {
    if let Some(adapter) = &arguments.adapter {
        let problem = format!("a compressed model takes no adapter: {}", adapter.display());
        return Err(TrainerError::Request { problem, hint: "leave out --adapter" }.into());
    }
    let has_own = arguments.base.join("tokenizer.json").exists();
    let tokenizer = if has_own { Tokenizer::open(&arguments.base)? } else { Tokenizer::bytes() };
    run_beside(arguments, base, Some(&base.uncompressed()?), &tokenizer, out)
}

/// A language model.
pub fn run<B: GenerativeBase>(
    arguments: &SampleArgs,
    base: &B,
    tokenizer: &Tokenizer,
    out: &mut dyn Write,
) -> Result<CommandOutcome, Failure> {
    run_beside(arguments, base, None, tokenizer, out)
}

/// The same, and how fast another model is at it.
fn run_beside<B: GenerativeBase>(
    arguments: &SampleArgs,
    base: &B,
    other: Option<&B>,
    tokenizer: &Tokenizer,
    out: &mut dyn Write,
) -> Result<CommandOutcome, Failure> {
    let begun = Instant::now();
    refuse_images(arguments)?;
    let prompts = arguments.prompts()?;
    let requests = requests(arguments, base, tokenizer, &prompts)?;
    let (limit_bytes, precision) =
        (arguments.engine.limit_bytes(arguments.limit)?, arguments.formats.precision());
    let peak_bytes =
        plan_generation(base, precision, &requests, arguments.engine.kind(), limit_bytes)?;
    let mut report = TextSampleReport {
        peak_bytes,
        limit_bytes,
        texts: Vec::new(),
        uncompressed_tokens_per_sec: None,
        secs: 0.0,
    };
    if !arguments.plan {
        let interrupted = interrupt::flag()?;
        let device = arguments.engine.open(peak_bytes)?;
        let tick = |_| !interrupted.load(Ordering::Relaxed);
        let (model, adapters) = base.load_adapted(&device, precision, &tick)?;
        let writer = LoadedTextModel {
            device,
            model,
            params: adapters.params,
            base,
            tokenizer,
            interrupted: Arc::clone(&interrupted),
        };
        for (prompt, request) in prompts.iter().zip(&requests) {
            let mut raw = std::io::stdout();
            let shown = (!arguments.json).then(|| destination(&mut raw, out));
            report.texts.push(writer.generate(prompt, request, shown)?);
        }
        drop(writer);
        if let (Some(other), Some(request)) = (other, requests.first()) {
            report.uncompressed_tokens_per_sec = speed(arguments, other, request, &interrupted)?;
            report_speeds(&report);
        }
    }
    report.secs = begun.elapsed().as_secs_f64();
    if arguments.json {
        render::json::object(out, &report)?;
    } else if arguments.plan {
        writeln!(out, "{}", render::sample::memory(peak_bytes, limit_bytes))?;
    }
    Ok(CommandOutcome::Done)
}

/// Tokens that a speed is measured over. Chosen: more than the first few, which are slower, and soon done.
const TIMED_TOKENS: usize = 64;

/// Tokens per second of a model; none if there is no memory for it.
fn speed<B: GenerativeBase>(
    arguments: &SampleArgs,
    base: &B,
    request: &GenerationRequest,
    interrupted: &AtomicBool,
) -> Result<Option<f64>, Failure> {
    let max_tokens = request.max_tokens.min(TIMED_TOKENS);
    let request = GenerationRequest { max_tokens, ..request.clone() };
    let (limit_bytes, precision) =
        (arguments.engine.limit_bytes(arguments.limit)?, arguments.formats.precision());
    let requests = std::slice::from_ref(&request);
    let planned = plan_generation(base, precision, requests, arguments.engine.kind(), limit_bytes);
    let peak_bytes = match planned {
        Ok(peak_bytes) => peak_bytes,
        Err(TrainerError::TooLarge { .. }) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let device = arguments.engine.open(peak_bytes)?;
    let tick = |_| !interrupted.load(Ordering::Relaxed);
    let (model, adapters) = base.load_adapted(&device, precision, &tick)?;
    let (mut first, mut n_tokens) = (None, 0);
    let mut count = |_| {
        first.get_or_insert_with(Instant::now);
        n_tokens += 1;
        !interrupted.load(Ordering::Relaxed)
    };
    // To the end of the measurement, whatever the text says.
    base.generate(&device, &model, &adapters.params, &request, &|_| false, &mut count)?;
    let secs = first.map_or(0.0, |first| first.elapsed().as_secs_f64());
    Ok((n_tokens > 1).then(|| f64::from(n_tokens - 1) / secs))
}

/// On standard error, where it is no part of a text.
fn report_speeds(report: &TextSampleReport) {
    let known = report.texts.iter().filter_map(|text| text.tokens_per_sec);
    let (n, sum) = known.fold((0.0, 0.0), |(n, sum), speed| (n + 1.0, sum + speed));
    if let Some(all) = report.uncompressed_tokens_per_sec.filter(|_| n > 0.0) {
        let speed = sum / n;
        let text = format!(
            "{speed:.0} tokens/s, {:.2} times the {all:.0} of a trunk that sees all of them\n",
            speed / all
        );
        // It may be closed; the text is written.
        _ = terminal::stderr().write_all(text.as_bytes());
    }
}

/// What only images have.
fn refuse_images(arguments: &SampleArgs) -> Result<(), Failure> {
    let Some(name) = arguments.images.first_typed() else { return Ok(()) };
    let problem = format!(
        "{name} is for image models, this is a language model: {}",
        arguments.base.display()
    );
    let hint = "leave it out; texts go to standard output";
    Err(TrainerError::Request { problem, hint }.into())
}

/// The prompts in tokens, each with a seed of its own.
fn requests(
    arguments: &SampleArgs,
    base: &impl GenerativeBase,
    tokenizer: &Tokenizer,
    prompts: &[String],
) -> Result<Vec<GenerationRequest>, Failure> {
    let SampleTextArgs { max_tokens, sampling, chat } = &arguments.writing;
    let max_tokens = max_tokens.unwrap_or(200);
    let mut requests = Vec::with_capacity(prompts.len());
    for (seed, prompt) in (arguments.seed..).zip(prompts) {
        let prompt = match chat {
            true => tokenizer.chat_template().encode(tokenizer, &[Message::user(prompt)])?,
            false => encode_prompt(tokenizer, prompt)?,
        };
        let request = GenerationRequest { prompt, max_tokens, sampler: sampling.sampler(seed) };
        base.check_request(&request)?;
        requests.push(request);
    }
    Ok(requests)
}

/// A text to go on with, as texts began in training.
fn encode_prompt(tokenizer: &Tokenizer, prompt: &str) -> Result<Vec<u32>, Failure> {
    let start = tokenizer.bos().into_iter();
    Ok(start.chain(tokenizer.encode(prompt)?).collect())
}

/// A loaded model with all that its texts need.
struct LoadedTextModel<'a, B: GenerativeBase> {
    device: Device,
    model: B::Model,
    params: Params,
    base: &'a B,
    tokenizer: &'a Tokenizer,
    interrupted: Arc<AtomicBool>,
}

impl<B: GenerativeBase> LoadedTextModel<'_, B> {
    /// Writes one text, and shows it as it comes if it is to be shown.
    fn generate(
        &self,
        prompt: &str,
        request: &GenerationRequest,
        shown: Option<&mut dyn Write>,
    ) -> Result<TextSampleRow, Failure> {
        let ends = self.base.eos_token_ids();
        let is_end = |token: u32| ends.contains(&token) || self.tokenizer.is_eos(token);
        let mut stream = TextStream::begin(self.tokenizer, shown);
        let mut take = |token| stream.take(token) && !self.interrupted.load(Ordering::Relaxed);
        let Self { device, model, params, .. } = self;
        let written = self.base.generate(device, model, params, request, &is_end, &mut take)?;
        let StreamedText { text, prompt_secs, tokens_per_sec } = stream.end(written)?;
        Ok(TextSampleRow {
            prompt: prompt.into(),
            text,
            seed: request.sampler.seed,
            n_prompt_tokens: request.prompt.len(),
            n_tokens: written.n_tokens,
            is_whole: written.is_eos,
            prompt_secs,
            tokens_per_sec,
        })
    }
}
