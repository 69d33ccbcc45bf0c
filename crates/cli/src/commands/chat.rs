//! `hearth chat`: a conversation with a language model, in the terminal or through a pipe.

mod input;
mod saved;

use std::io::{self, IsTerminal, Write};
use std::sync::Arc;

use serde::Serialize;
use trainer::model::llama::language_model::LanguageModel;
use trainer::sample::chat::{ChatSession, context_length, fit, plan_chat};
use trainer::text::{ChatTemplate, Message, Tokenizer};
use weights::hub::model_name;

use self::input::ChatInput;
use self::saved::LastSaved;
use super::device::{COMPUTER, DeviceArgs, FormatArgs, MemoryLimitArg};
use super::model_arg::ModelArg;
use super::text_stream::{SamplerArgs, TextStream, destination};
use crate::commands::CommandOutcome;
use crate::failure::Failure;
use crate::interrupt::{self, AnswerInterrupt};
use crate::render;
use crate::terminal;

/// Talk to a language model.
///
/// Answers come token by token, by the model's own chat template. Keys and values of the conversation stay in memory, so
/// that only what is new is computed. When the context is full, the oldest questions are left out. The memory is planned
/// before the model is loaded, and no more is taken. Messages may also come through a pipe, one per line; then nothing but
/// answers is printed.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth chat --base HuggingFaceTB/SmolLM2-135M-Instruct
  hearth chat --base Qwen3-4B.gguf --quantise nf4 --context 8192
  hearth chat --base Qwen/Qwen3-0.6B --adapter notes --system 'Answer in one sentence.'
  hearth chat --base Qwen3-4B.gguf --plan               the memory that it takes
  echo 'Why is the sky blue?' | hearth chat --base Qwen3-4B.gguf --temperature 0")]
pub struct ChatArgs {
    /// Language model: a transformers folder, a GGUF file, or the name of a fetched model
    #[arg(long, value_name = "MODEL")]
    base: ModelArg,

    /// LoRA or DoRA adapter: the folder of a run, or a file or folder of PEFT
    #[arg(long, value_name = "PATH")]
    adapter: Option<ModelArg>,

    /// System message: what the model is told about its part
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,

    /// Maximum number of tokens of an answer
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = positive)]
    max_tokens: usize,

    /// Tokens of a conversation [default: 4096, or as many as the model is made for]
    #[arg(long, value_name = "N")]
    context: Option<usize>,

    #[command(flatten)]
    sampling: SamplerArgs,

    /// Seed of the first answer; each following one takes the next seed
    #[arg(long, default_value_t = 1)]
    seed: u64,

    /// Memory limit: 16GB, or 70% of the default limit [default: free memory less a reserve]
    #[arg(long, value_name = "SIZE", help_heading = COMPUTER)]
    limit: Option<MemoryLimitArg>,

    #[command(flatten)]
    formats: FormatArgs,

    #[command(flatten)]
    engine: DeviceArgs,

    /// Show the memory that it takes, and stop
    #[arg(long)]
    plan: bool,

    /// Print each answer as one JSON object on a line
    #[arg(long)]
    json: bool,
}

fn positive(text: &str) -> Result<usize, String> {
    let parsed = text.parse().ok().filter(|n| *n > 0);
    parsed.ok_or_else(|| "accepted is a whole number above 0".to_owned())
}

/// An answer, for programs.
#[derive(Serialize)]
struct AnswerRow {
    text: String,
    /// Tokens of the conversation up to the answer, and how many messages were left out of it.
    n_prompt_tokens: usize,
    n_forgotten: usize,
    n_tokens: usize,
    /// Whether the model ended it.
    is_whole: bool,
    prompt_secs: f64,
    tokens_per_sec: Option<f64>,
}

pub fn run(arguments: &ChatArgs, out: &mut dyn Write) -> Result<CommandOutcome, Failure> {
    let mut base = LanguageModel::open(&arguments.base)?;
    if let Some(adapter) = &arguments.adapter {
        base.add_adapter(adapter)?;
    }
    let tokenizer = Tokenizer::open(&arguments.base)?;
    let context = context_length(&base.config, arguments.context)?;
    let (limit, precision) =
        (arguments.engine.limit_bytes(arguments.limit)?, arguments.formats.precision());
    let peak_bytes = plan_chat(&base, precision, context, arguments.engine.kind(), limit)?;
    if arguments.plan {
        writeln!(out, "{}", render::sample::memory(peak_bytes, limit))?;
        return Ok(CommandOutcome::Done);
    }
    let interrupt = interrupt::of_answers()?;
    let device = arguments.engine.open(peak_bytes)?;
    let (model, adapters) = base.load_adapted(&device, precision, &|_| true)?;
    let session = ChatSession::new(&device, &model, &adapters.params, context)?;
    let mut chat = Chat {
        arguments,
        base: &base,
        tokenizer: &tokenizer,
        template: tokenizer.chat_template(),
        session,
        interrupt,
        messages: Vec::new(),
        n_answers: 0,
        last_speed: None,
        last_saved: LastSaved::default(),
    };
    chat.set_system(arguments.system.as_deref().unwrap_or_default());
    if chat.is_watched() {
        let name = model_name(&arguments.base);
        let about = render::sample::memory(peak_bytes, limit);
        tell(&format!("{name}, {context} tokens of context, {about}\n/help lists commands\n"));
    }
    chat.talk(out)?;
    Ok(CommandOutcome::Done)
}

/// On standard error, where it is no part of an answer. It may be closed.
fn tell(text: &str) {
    _ = terminal::stderr().write_all(text.as_bytes());
}

/// A conversation that goes on.
struct Chat<'a> {
    arguments: &'a ChatArgs,
    base: &'a LanguageModel,
    tokenizer: &'a Tokenizer,
    template: ChatTemplate,
    session: ChatSession<'a>,
    interrupt: Arc<AnswerInterrupt>,
    messages: Vec<Message>,
    n_answers: u64,
    last_speed: Option<f64>,
    last_saved: LastSaved,
}

impl Chat<'_> {
    /// Whether a person sits there.
    fn is_watched(&self) -> bool {
        io::stdin().is_terminal() && !self.arguments.json
    }

    /// Reads and answers until the end. What goes wrong is told, and the conversation goes on; through a pipe it ends.
    fn talk(&mut self, out: &mut dyn Write) -> Result<(), Failure> {
        let mut lines = io::stdin().lock();
        loop {
            if self.is_watched() {
                tell("> ");
            }
            let input = input::read(&mut lines)?;
            if input == ChatInput::End {
                return Ok(());
            }
            match self.obey(input, out) {
                Err(failure @ Failure::Output(_)) => return Err(failure),
                Err(failure) if !self.is_watched() => return Err(failure),
                Err(failure) => _ = failure.report(&mut terminal::stderr()),
                Ok(()) => {}
            }
        }
    }

    fn obey(&mut self, input: ChatInput, out: &mut dyn Write) -> Result<(), Failure> {
        match input {
            ChatInput::Message(text) => return self.ask(Message::user(&text), out),
            ChatInput::Retry => return self.retry(out),
            ChatInput::System(text) => self.set_system(&text),
            ChatInput::Reset => self.messages.retain(|message| message.role == "system"),
            ChatInput::Info => tell(&self.info()),
            ChatInput::Help => tell(input::HELP),
            ChatInput::Save(path) => {
                let n = saved::save(&path, &self.messages, &mut self.last_saved)?;
                tell(&format!("saved as conversation {n} of {}\n", path.display()));
            }
            ChatInput::Load(path) => {
                self.messages = saved::load(&path)?;
                tell(&format!("{} messages\n", self.messages.len()));
            }
            ChatInput::Wrong(problem) => {
                return Err(Failure::Usage {
                    problem,
                    hint: "/help lists the commands".to_owned(),
                });
            }
            ChatInput::End => {}
        }
        Ok(())
    }

    fn set_system(&mut self, text: &str) {
        self.messages.retain(|message| message.role != "system");
        if !text.is_empty() {
            self.messages.insert(0, Message::system(text));
        }
    }

    fn info(&self) -> String {
        let (n, context) = (self.session.n_read(), self.session.context());
        let speed = self.last_speed.map_or(String::new(), |it| format!(", {it:.1} tokens/s"));
        format!("{} messages, {n} of {context} tokens{speed}\n", self.messages.len())
    }

    /// The last question once more.
    fn retry(&mut self, out: &mut dyn Write) -> Result<(), Failure> {
        let last = self.messages.iter().rposition(|message| message.role == "user");
        let Some(last) = last else {
            let problem = "there is no question to answer again".to_owned();
            return Err(Failure::Usage { problem, hint: "ask one".to_owned() });
        };
        let question = self.messages[last].clone();
        self.messages.truncate(last);
        self.ask(question, out)
    }

    /// Answers a question. One that cannot be answered is not part of the conversation.
    fn ask(&mut self, question: Message, out: &mut dyn Write) -> Result<(), Failure> {
        let mut messages = self.messages.clone();
        messages.push(question);
        let n_before = messages.len();
        let max_tokens = self.arguments.max_tokens;
        // A quarter of the context is left for an answer, or as much as one may take.
        let room = self.session.context() - max_tokens.min(self.session.context().div_ceil(4));
        let tokens = fit(&self.template, self.tokenizer, &mut messages, room)?;
        let n_forgotten = n_before - messages.len();
        let answer = self.answer(&tokens, out)?;
        if n_forgotten > 0 && self.is_watched() {
            tell(&format!("(the context was full: {n_forgotten} messages were left out)\n"));
        }
        messages.push(Message::assistant(&answer.text));
        self.messages = messages;
        self.last_speed = answer.tokens_per_sec;
        if self.arguments.json {
            let row = AnswerRow { n_prompt_tokens: tokens.len(), n_forgotten, ..answer };
            render::json::line(out, &row)?;
            out.flush()?;
        }
        Ok(())
    }

    fn answer(&mut self, tokens: &[u32], out: &mut dyn Write) -> Result<AnswerRow, Failure> {
        let sampler =
            self.arguments.sampling.sampler(self.arguments.seed.wrapping_add(self.n_answers));
        self.n_answers += 1;
        let ends = &self.base.config.eos_token_ids;
        let is_end = |token: u32| ends.contains(&token) || self.tokenizer.is_eos(token);
        let mut raw = io::stdout();
        let shown = (!self.arguments.json).then(|| destination(&mut raw, out));
        let mut stream = TextStream::begin(self.tokenizer, shown);
        let interrupt = &self.interrupt;
        let mut take = |token| stream.take(token) && !interrupt.is_asked();
        interrupt.begin();
        let written =
            self.session.answer(tokens, self.arguments.max_tokens, sampler, &is_end, &mut take);
        interrupt.end();
        let written = written?;
        let streamed = stream.end(written)?;
        Ok(AnswerRow {
            text: streamed.text,
            n_prompt_tokens: tokens.len(),
            n_forgotten: 0,
            n_tokens: written.n_tokens,
            is_whole: written.is_eos,
            prompt_secs: streamed.prompt_secs,
            tokens_per_sec: streamed.tokens_per_sec,
        })
    }
}
