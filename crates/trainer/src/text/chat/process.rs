//! A chat template in a process of its own: this program once more, with the verb `render-chat`.
//!
//! The interpreter counts instructions, but one of them can take all memory, and its parser all of the stack. So the
//! process has limits, and what reaches one is an error here and no more. One process serves all conversations; it ends
//! when its input does, so also when the run is killed.
//!
//! ```text
//! to it      {"template": "{% for …", "tokens": {"eos_token": "</s>"}}        once
//!            {"messages": [{"role": "user", "content": "…"}], "asks": true}   a line for each conversation
//! from it    {"Ok": {"text": "…", "answers": []}} or {"Err": "why"}           a line for each of them, in order
//! ```

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::Instant;

use machine::Bytes;
use serde::{Deserialize, Serialize};

use super::jinja::JinjaTemplate;
use super::{Conversation, Message};

/// Memory of the process. Chosen: a conversation is at most 8 MiB, and lies there some ten times over.
const MOST_BYTES: u64 = 512 << 20;

/// Time for one conversation. Chosen: a thousand times what a long one takes.
const MOST_SECS: u64 = 10;

/// Bytes of an answer. Chosen: four times the longest conversation, in the longest way to write it as JSON.
const MOST_ANSWER: u64 = 192 << 20;

/// What of the process's last words is read. Chosen: some ten lines.
const MOST_SAID: u64 = 4096;

static PROGRAM: OnceLock<PathBuf> = OnceLock::new();

/// Says which program has the verb `render-chat`, once at its start. Without, the templates of models are run in this
/// process, which a template made to do harm can end.
pub fn render_apart(program: PathBuf) {
    // Whoever says it twice says the same.
    _ = PROGRAM.set(program);
}

pub(super) fn program() -> Option<&'static Path> {
    PROGRAM.get().map(PathBuf::as_path)
}

#[derive(Serialize, Deserialize)]
struct TemplateSetup {
    template: String,
    tokens: BTreeMap<String, String>,
}

#[derive(Serialize, Deserialize)]
struct ChatRequest {
    messages: Vec<Message>,
    /// Only the text, up to where the next answer begins or not; missing: the answers in it too.
    asks: Option<bool>,
}

type ChatAnswer = Result<Conversation, String>;

/// A template that is run apart.
pub struct TemplateProcess {
    program: &'static Path,
    setup: String,
    state: Mutex<ProcessState>,
}

#[derive(Default)]
struct ProcessState {
    running: Option<RunningTemplate>,
    /// The limit that was reached, or why there is no process.
    given_up: Option<String>,
}

impl TemplateProcess {
    /// Starts nothing yet.
    pub(super) fn new(
        program: &'static Path,
        template: String,
        tokens: BTreeMap<String, String>,
    ) -> Self {
        let setup = line(&TemplateSetup { template, tokens });
        Self { program, setup, state: Mutex::default() }
    }

    pub(super) fn render(&self, messages: &[Message], asks: bool) -> Result<String, String> {
        self.answer(messages, Some(asks)).map(|conversation| conversation.text)
    }

    pub(super) fn conversation(&self, messages: &[Message]) -> ChatAnswer {
        self.answer(messages, None)
    }

    pub(super) fn given_up(&self) -> Option<String> {
        self.state().given_up.clone()
    }

    fn state(&self) -> MutexGuard<'_, ProcessState> {
        self.state.lock().expect("no thread panics with it")
    }

    fn start(&self) -> Result<RunningTemplate, String> {
        let mut started = RunningTemplate::start(self.program)?;
        started.answer(&self.setup).map_err(|end| end.why)?.map(|_| started)
    }

    /// A process that somebody else ended is started once more; one that reached a limit is not.
    fn answer(&self, messages: &[Message], asks: Option<bool>) -> ChatAnswer {
        let request = line(&ChatRequest { messages: messages.into(), asks });
        let mut state = self.state();
        let mut is_second = false;
        loop {
            if let Some(why) = &state.given_up {
                return Err(why.clone());
            }
            let running = state.running.take().map_or_else(|| self.start(), Ok);
            let answered = running.map(|mut running| (running.answer(&request), running));
            match answered {
                Ok((Ok(answer), running)) => {
                    state.running = Some(running);
                    return answer;
                }
                Ok((Err(end), _)) if !end.is_limit && !is_second => is_second = true,
                Ok((Err(ProcessEnd { why, .. }), _)) | Err(why) => state.given_up = Some(why),
            }
        }
    }
}

/// Why a process is no more.
struct ProcessEnd {
    why: String,
    is_limit: bool,
}

/// Killed when dropped.
struct RunningTemplate {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl RunningTemplate {
    fn start(program: &Path) -> Result<Self, String> {
        let mut command = Command::new(program);
        command.args(["render-chat", "--seconds", &MOST_SECS.to_string()]);
        command.args(["--bytes", &MOST_BYTES.to_string()]).env_clear();
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // Ctrl-C in a terminal is for the run, which ends this one in its own time.
        machine::process::apart_from_terminal(&mut command);
        let failed = |error: io::Error| format!("cannot be run in a process of its own: {error}");
        let mut child = command.spawn().map_err(failed)?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let (input, output) = input.zip(output).expect("both were asked for");
        Ok(Self { child, input, output: BufReader::new(output) })
    }

    fn answer(&mut self, request: &str) -> Result<ChatAnswer, ProcessEnd> {
        let mut answer = Vec::new();
        // A process that has ended takes nothing, and then says nothing.
        _ = self.input.write_all(request.as_bytes()).and_then(|()| self.input.flush());
        _ = self.output.by_ref().take(MOST_ANSWER).read_until(b'\n', &mut answer);
        if answer.len() as u64 == MOST_ANSWER {
            let why = format!("gives more than {} of text", Bytes(MOST_ANSWER));
            return Err(ProcessEnd { why, is_limit: true });
        }
        serde_json::from_slice(&answer).map_err(|_| self.end())
    }

    /// What its last words say; the first two are those of the standard library.
    fn end(&mut self) -> ProcessEnd {
        let mut said = Vec::new();
        if let Some(stderr) = self.child.stderr.take() {
            _ = stderr.take(MOST_SAID).read_to_end(&mut said);
        }
        let said = String::from_utf8_lossy(&said);
        let limit = if said.contains("memory allocation of") {
            Some(format!("takes more than {} of memory", Bytes(MOST_BYTES)))
        } else if said.contains("overflowed its stack") {
            Some("is nested too deeply, or has too many operators in a row".into())
        } else {
            said.lines().find(|line| line.starts_with(OUT_OF_TIME)).map(Into::into)
        };
        let is_limit = limit.is_some();
        let mut status =
            || self.child.wait().map_or_else(|error| error.to_string(), |it| it.to_string());
        let why = limit.unwrap_or_else(|| format!("ended its process with {}", status()));
        ProcessEnd { why, is_limit }
    }
}

impl Drop for RunningTemplate {
    fn drop(&mut self) {
        // Either may fail only because it has ended.
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

/// What the process says when a conversation took too long.
const OUT_OF_TIME: &str = "runs longer than";

/// When work on the present line began, for whoever watches the time.
#[derive(Default)]
pub struct RequestClock(Mutex<Option<Instant>>);

impl RequestClock {
    /// The last words, where the present line took longer than so many seconds.
    pub fn overdue(&self, secs: u64) -> Option<String> {
        let began = *self.0.lock().expect("no thread panics with it");
        let is_over = began.is_some_and(|began| began.elapsed().as_secs() >= secs);
        is_over.then(|| format!("{OUT_OF_TIME} {secs} s"))
    }

    fn set(&self, began: Option<Instant>) {
        *self.0.lock().expect("no thread panics with it") = began;
    }
}

/// The other end: answers every line until there are no more.
pub fn serve(
    mut input: impl BufRead,
    mut output: impl Write,
    clock: &RequestClock,
) -> io::Result<()> {
    let mut template = None;
    let mut request = String::new();
    while input.read_line(&mut request)? > 0 {
        clock.set(Some(Instant::now()));
        let answer = match &template {
            None => {
                let TemplateSetup { template: source, tokens } = serde_json::from_str(&request)?;
                let made = JinjaTemplate::new(&source, tokens);
                made.map(|made| template = Some(made)).map(|()| Conversation::default())
            }
            Some(template) => answer(template, serde_json::from_str(&request)?),
        };
        clock.set(None);
        output.write_all(line(&answer).as_bytes())?;
        output.flush()?;
        request.clear();
    }
    Ok(())
}

fn answer(template: &JinjaTemplate, ChatRequest { messages, asks }: ChatRequest) -> ChatAnswer {
    match asks {
        None => template.conversation(&messages),
        Some(asks) => {
            template.render(&messages, asks).map(|text| Conversation { text, answers: Vec::new() })
        }
    }
}

fn line(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("it is plain data") + "\n"
}
