//! `hearth sample` of a language model: its text goes to standard output as it comes.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use compute::{Device, Params};
use serde::Serialize;
use trainer::TrainerError;
use trainer::model::llama::Llama;
use trainer::model::llama::base::Base;
use trainer::sample::choice::Choice;
use trainer::sample::text::{Request, plan, write};
use trainer::text::{Message, Tokenizer};

use super::Arguments;
use crate::commands::Outcome;
use crate::failure::Failure;
use crate::interrupt;
use crate::render;

/// How texts are written.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Language models")]
pub struct Writing {
    /// The most tokens to write [default: 200]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    max_tokens: Option<usize>,

    /// Sampling temperature; 0 always takes the likeliest token [default: 0.8]
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    temperature: Option<f32>,

    /// Sample from the K likeliest tokens only
    #[arg(long, value_name = "K", allow_negative_numbers = true)]
    top_k: Option<usize>,

    /// Sample from the likeliest tokens that together have this probability [default: 0.95]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    top_p: Option<f32>,

    /// Ask the prompt as a question, by the model's chat template
    #[arg(long)]
    chat: bool,
}

impl Writing {
    /// The first of them that was typed, for a model that has no use for it.
    pub fn first_typed(&self) -> Option<&'static str> {
        let Self { max_tokens, temperature, top_k, top_p, chat } = self;
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

/// What was written, or would be.
#[derive(Serialize)]
struct Report {
    peak_bytes: usize,
    limit_bytes: usize,
    texts: Vec<Row>,
    secs: f64,
}

/// One text.
#[derive(Serialize)]
struct Row {
    prompt: String,
    text: String,
    seed: u64,
    n_prompt_tokens: usize,
    n_tokens: usize,
    /// Whether the model said that this is all.
    is_whole: bool,
    /// From the prompt to the first token.
    prompt_secs: f64,
    /// Of all tokens after the first.
    tokens_per_sec: Option<f64>,
}

pub fn run(arguments: &Arguments, mut base: Base, out: &mut dyn Write) -> Result<Outcome, Failure> {
    let begun = Instant::now();
    refuse_pictures(arguments)?;
    if let Some(adapter) = &arguments.adapter {
        base.add_adapter(adapter)?;
    }
    let tokenizer = Tokenizer::open(&arguments.base)?;
    let prompts = arguments.prompts()?;
    let requests = requests(arguments, &base, &tokenizer, &prompts)?;
    let (limit_bytes, precision) =
        (arguments.engine.limit_bytes(arguments.limit)?, arguments.formats.precision());
    let peak_bytes = plan(&base, precision, &requests, arguments.engine.kind(), limit_bytes)?;
    let mut report = Report { peak_bytes, limit_bytes, texts: Vec::new(), secs: 0.0 };
    if !arguments.plan {
        let interrupted = interrupt::flag()?;
        let device = arguments.engine.open(peak_bytes)?;
        let tick = |_| !interrupted.load(Ordering::Relaxed);
        let (model, adapters) = base.load_adapted(&device, precision, &tick)?;
        let writer =
            Writer { device, model, params: adapters.params, base, tokenizer, interrupted };
        for (prompt, request) in prompts.iter().zip(&requests) {
            let shown: Option<&mut dyn Write> = if arguments.json { None } else { Some(&mut *out) };
            report.texts.push(writer.write(prompt, request, shown)?);
        }
    }
    report.secs = begun.elapsed().as_secs_f64();
    if arguments.json {
        serde_json::to_writer_pretty(&mut *out, &report).map_err(std::io::Error::from)?;
        writeln!(out)?;
    } else if arguments.plan {
        writeln!(out, "{}", render::drawing::memory(peak_bytes, limit_bytes))?;
    }
    Ok(Outcome::Done)
}

/// What only pictures have.
fn refuse_pictures(arguments: &Arguments) -> Result<(), Failure> {
    let Some(name) = arguments.images.first_typed() else { return Ok(()) };
    let problem =
        format!("{name} is for image models, this one writes: {}", arguments.base.display());
    let hint = "leave it out; texts go to standard output";
    Err(TrainerError::Request { problem, hint }.into())
}

/// The prompts in tokens, each with a seed of its own.
fn requests(
    arguments: &Arguments,
    base: &Base,
    tokenizer: &Tokenizer,
    prompts: &[String],
) -> Result<Vec<Request>, Failure> {
    let Writing { max_tokens, temperature, top_k, top_p, chat } = arguments.writing;
    let (max_tokens, temperature) = (max_tokens.unwrap_or(200), temperature.unwrap_or(0.8));
    let top_p = top_p.unwrap_or(0.95);
    let mut requests = Vec::with_capacity(prompts.len());
    for (seed, prompt) in (arguments.seed..).zip(prompts) {
        let prompt = if chat { asked(tokenizer, prompt)? } else { begun(tokenizer, prompt)? };
        let choice = Choice { temperature, top_k, top_p, seed };
        let request = Request { prompt, max_tokens, choice };
        request.check(&base.config)?;
        requests.push(request);
    }
    Ok(requests)
}

/// A text to go on with, as texts began in training.
fn begun(tokenizer: &Tokenizer, prompt: &str) -> Result<Vec<u32>, Failure> {
    let start = tokenizer.start().into_iter();
    Ok(start.chain(tokenizer.encode(prompt)?).collect())
}

/// A question, up to where the answer begins.
fn asked(tokenizer: &Tokenizer, prompt: &str) -> Result<Vec<u32>, Failure> {
    let question = Message { role: "user".into(), content: prompt.into() };
    let text = tokenizer.chat()?.render(&[question], true).map_err(|said| {
        let problem = format!("the chat template refuses the prompt: {said}");
        TrainerError::Request { problem, hint: "leave out --chat" }
    })?;
    Ok(tokenizer.encode(&text)?)
}

/// A loaded model with all that its texts need.
struct Writer {
    device: Device,
    model: Llama,
    params: Params,
    base: Base,
    tokenizer: Tokenizer,
    interrupted: Arc<AtomicBool>,
}

impl Writer {
    /// Writes one text, and shows it as it comes if it is to be shown.
    fn write(
        &self,
        prompt: &str,
        request: &Request,
        mut shown: Option<&mut dyn Write>,
    ) -> Result<Row, Failure> {
        let begun = Instant::now();
        let (mut text, mut decoder) = (String::new(), self.tokenizer.decoder());
        let (mut first, mut failed) = (None, None);
        let ends = &self.base.config.eos_token_ids;
        let is_end = |token: u32| ends.contains(&token) || self.tokenizer.is_end(token);
        let mut show = |more: &str| match &mut shown {
            Some(out) => out.write_all(more.as_bytes()).and_then(|()| out.flush()),
            None => Ok(()),
        };
        let model = (&self.model, &self.params);
        let written = write(&self.device, model, request, &is_end, &mut |token| {
            first.get_or_insert_with(Instant::now);
            let more = decoder.push(token);
            failed = show(&more).err();
            text.push_str(&more);
            failed.is_none() && !self.interrupted.load(Ordering::Relaxed)
        })?;
        if let Some(error) = failed {
            return Err(error.into());
        }
        let more = decoder.finish();
        show(&(more.clone() + "\n"))?;
        text.push_str(&more);
        let first = first.unwrap_or_else(Instant::now);
        let after = written.n_tokens.saturating_sub(1);
        Ok(Row {
            prompt: prompt.into(),
            text,
            seed: request.choice.seed,
            n_prompt_tokens: request.prompt.len(),
            n_tokens: written.n_tokens,
            is_whole: written.is_whole,
            prompt_secs: (first - begun).as_secs_f64(),
            tokens_per_sec: (after > 0).then(|| after as f64 / first.elapsed().as_secs_f64()),
        })
    }
}
