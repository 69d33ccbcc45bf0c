//! A generated text: shown while it comes, and timed.

use std::io::{self, IsTerminal, Stdout, Write};
use std::time::Instant;

use trainer::TrainerError;
use trainer::sample::text::GenerationResult;
use trainer::sample::token_sampler::TokenSampler;
use trainer::text::Tokenizer;
use trainer::text::tokenizer::TokenDecoder;

use crate::failure::Failure;

/// How tokens are chosen.
#[derive(Debug, clap::Args)]
pub struct SamplerArgs {
    /// Sampling temperature; 0 is greedy decoding [default: 0.8]
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    pub temperature: Option<f32>,

    /// Top-k sampling: only from the K likeliest tokens
    #[arg(long, value_name = "K", allow_negative_numbers = true)]
    pub top_k: Option<usize>,

    /// Top-p (nucleus) sampling: only from the likeliest tokens with this total probability [default: 0.95]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub top_p: Option<f32>,
}

impl SamplerArgs {
    pub fn sampler(&self, seed: u64) -> TokenSampler {
        let (temperature, top_p) = (self.temperature.unwrap_or(0.8), self.top_p.unwrap_or(0.95));
        TokenSampler { temperature, top_k: self.top_k, top_p, seed }
    }
}

/// Where texts go: a file or another program is given them as they are, a terminal might obey them.
pub fn destination<'a>(raw: &'a mut Stdout, safe: &'a mut dyn Write) -> &'a mut dyn Write {
    if raw.is_terminal() { safe } else { raw }
}

/// A text that is on its way.
pub struct TextStream<'t, 'w> {
    decoder: TokenDecoder<'t>,
    /// None if it is not shown.
    shown: Option<&'w mut dyn Write>,
    text: String,
    begun: Instant,
    first: Option<Instant>,
    failed: Option<io::Error>,
}

/// The same at its end.
pub struct StreamedText {
    pub text: String,
    /// From the prompt to the first token.
    pub prompt_secs: f64,
    /// Of all tokens after the first.
    pub tokens_per_sec: Option<f64>,
}

impl<'t, 'w> TextStream<'t, 'w> {
    pub fn begin(tokenizer: &'t Tokenizer, shown: Option<&'w mut dyn Write>) -> Self {
        let (decoder, begun) = (tokenizer.decoder(), Instant::now());
        Self { decoder, shown, text: String::new(), begun, first: None, failed: None }
    }

    /// The next token. Returns whether the text so far could be shown.
    pub fn take(&mut self, token: u32) -> bool {
        self.first.get_or_insert_with(Instant::now);
        let more = self.decoder.push(token);
        self.failed = show(&mut self.shown, &more).err();
        self.text.push_str(&more);
        self.failed.is_none()
    }

    /// Shows the rest, and ends the line.
    pub fn end(self, written: GenerationResult) -> Result<StreamedText, Failure> {
        let Self { decoder, mut shown, mut text, begun, first, failed } = self;
        if let Some(error) = failed {
            return Err(error.into());
        }
        if written.is_lost {
            return Err(TrainerError::OutputLost { what: "the text".into() }.into());
        }
        let more = decoder.finish();
        show(&mut shown, &(more.clone() + "\n"))?;
        text.push_str(&more);
        let first = first.unwrap_or_else(Instant::now);
        let after = written.n_tokens.saturating_sub(1);
        Ok(StreamedText {
            text,
            prompt_secs: (first - begun).as_secs_f64(),
            tokens_per_sec: (after > 0).then(|| after as f64 / first.elapsed().as_secs_f64()),
        })
    }
}

fn show(shown: &mut Option<&mut dyn Write>, more: &str) -> io::Result<()> {
    let Some(out) = shown else { return Ok(()) };
    out.write_all(more.as_bytes())?;
    out.flush()
}
