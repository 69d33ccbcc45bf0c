//! A model's chat template: how its conversations are written, and which parts of the text are answers.
//!
//! A template is a program that somebody else wrote. `jinja` runs it; `process` runs it in a process of its own, which
//! may take its memory, its stack and its time without harm to the run.

mod jinja;
mod process;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

use self::jinja::JinjaTemplate;
use self::process::TemplateProcess;
pub use self::process::{RequestClock, render_apart, serve};
use super::Tokenizer;
use crate::error::{Result, TrainerError};

/// `ChatML`, for models without a chat template.
const CHAT_ML: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n\
    {{ message.content }}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// One part of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// Who says it: system, user, assistant or tool.
    pub role: String,
    /// What is said.
    pub content: String,
    /// Images that are shown before it.
    #[serde(default, skip_serializing_if = "is_none")]
    pub n_images: usize,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde passes it so.
fn is_none(n: &usize) -> bool {
    *n == 0
}

/// A conversation as a text.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Conversation {
    /// All of it.
    pub text: String,
    /// The byte ranges of the assistant's answers, with the end-of-turn token of each.
    pub answers: Vec<Range<usize>>,
}

/// How a model's conversations are written.
pub struct ChatTemplate {
    path: PathBuf,
    runner: TemplateRunner,
}

enum TemplateRunner {
    /// Ours, or without a program to run it apart.
    Here(LazyTemplate),
    /// In a process of its own.
    Apart(TemplateProcess),
}

/// Jinja that is not read before it is needed: most texts are no conversations.
struct LazyTemplate {
    source: String,
    tokens: BTreeMap<String, String>,
    /// Or why it is not Jinja.
    made: OnceLock<std::result::Result<JinjaTemplate, String>>,
}

impl LazyTemplate {
    fn new(source: &str, tokens: BTreeMap<String, String>) -> Self {
        Self { source: source.into(), tokens, made: OnceLock::new() }
    }

    fn get(&self) -> std::result::Result<&JinjaTemplate, String> {
        let make = || JinjaTemplate::new(&self.source, self.tokens.clone());
        self.made.get_or_init(make).as_ref().map_err(Clone::clone)
    }
}

impl ChatTemplate {
    /// `ChatML`, with the special tokens that a template may name.
    pub(super) fn chat_ml(tokens: BTreeMap<String, String>) -> Self {
        let template = LazyTemplate::new(CHAT_ML, tokens);
        Self { path: PathBuf::new(), runner: TemplateRunner::Here(template) }
    }

    /// Of Jinja that came with a model, from this file. Runs apart if [`render_apart`] was told how; not before it is
    /// needed.
    pub fn of_model(source: &str, tokens: BTreeMap<String, String>, path: &Path) -> Self {
        let runner = match process::program() {
            Some(program) => {
                TemplateRunner::Apart(TemplateProcess::new(program, source.into(), tokens))
            }
            None => TemplateRunner::Here(LazyTemplate::new(source, tokens)),
        };
        Self { path: path.into(), runner }
    }

    /// The text of a conversation; with `asks`, up to where the model's next answer begins. What
    /// went wrong is what the template says.
    pub fn render(&self, messages: &[Message], asks: bool) -> std::result::Result<String, String> {
        match &self.runner {
            TemplateRunner::Here(template) => template.get()?.render(messages, asks),
            TemplateRunner::Apart(process) => process.render(messages, asks),
        }
    }

    /// The tokens of a conversation, up to where the model's next answer begins.
    pub fn encode(&self, tokenizer: &Tokenizer, messages: &[Message]) -> Result<Vec<u32>> {
        let rendered = self.render(messages, true);
        self.check()?;
        let text = rendered.map_err(|said| TrainerError::Request {
            problem: format!("the chat template refuses the conversation: {said}"),
            hint: "some templates take no system message; `hearth sample` without --chat needs none",
        })?;
        tokenizer.encode(&text)
    }

    /// The text of a conversation and the answers in it.
    pub fn conversation(&self, messages: &[Message]) -> std::result::Result<Conversation, String> {
        match &self.runner {
            TemplateRunner::Here(template) => template.get()?.conversation(messages),
            TemplateRunner::Apart(process) => process.conversation(messages),
        }
    }

    /// An error if it turned out that the template cannot be used for any conversation: it is not Jinja, or it
    /// reached a limit, after which it is not run again.
    pub fn check(&self) -> Result<()> {
        let problem = match &self.runner {
            TemplateRunner::Here(template) => {
                template.made.get().and_then(|made| made.as_ref().err().cloned())
            }
            TemplateRunner::Apart(process) => process.given_up(),
        };
        let path = self.path.clone();
        problem.map_or(Ok(()), |problem| Err(TrainerError::ChatTemplate { problem, path }))
    }
}

impl Message {
    /// Of a role by its name.
    pub fn new(role: &str, content: &str) -> Self {
        Self { role: role.into(), content: content.into(), n_images: 0 }
    }

    /// Of the user.
    pub fn user(content: &str) -> Self {
        Self::new("user", content)
    }

    /// The user's about an image.
    pub fn about_image(content: &str) -> Self {
        Self { n_images: 1, ..Self::user(content) }
    }

    /// The model's.
    pub fn assistant(content: &str) -> Self {
        Self::new("assistant", content)
    }

    /// What a model is told about its part.
    pub fn system(content: &str) -> Self {
        Self::new("system", content)
    }

    pub(super) fn is_answer(&self) -> bool {
        self.role == "assistant"
    }
}
