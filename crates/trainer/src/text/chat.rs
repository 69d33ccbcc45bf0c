//! A model's chat template: how its conversations are written, and which parts of the text are answers.
//!
//! A template is a program that somebody else wrote. `jinja` runs it; `process` runs it in a process of its own, which
//! may take its memory, its stack and its time without harm to the run.

mod jinja;
mod process;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use self::jinja::JinjaTemplate;
use self::process::TemplateProcess;
pub use self::process::{RequestClock, render_apart, serve};
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
    /// Ours, or without a program to run it apart; or why it is not Jinja.
    Here(std::result::Result<Box<JinjaTemplate>, String>),
    /// In a process of its own.
    Apart(TemplateProcess),
}

impl ChatTemplate {
    /// `ChatML`, with the special tokens that a template may name.
    pub(super) fn chat_ml(tokens: BTreeMap<String, String>) -> Self {
        let template = JinjaTemplate::new(CHAT_ML, tokens).map(Box::new);
        Self { path: PathBuf::new(), runner: TemplateRunner::Here(template) }
    }

    /// Of Jinja that came with a model, from this file. Runs apart if [`render_apart`] was told how; not before it is
    /// needed.
    pub fn of_model(source: &str, tokens: BTreeMap<String, String>, path: &Path) -> Self {
        let runner = match process::program() {
            Some(program) => {
                TemplateRunner::Apart(TemplateProcess::new(program, source.into(), tokens))
            }
            None => TemplateRunner::Here(JinjaTemplate::new(source, tokens).map(Box::new)),
        };
        Self { path: path.into(), runner }
    }

    /// The text of a conversation; with `asks`, up to where the model's next answer begins. What
    /// went wrong is what the template says.
    pub fn render(&self, messages: &[Message], asks: bool) -> std::result::Result<String, String> {
        match &self.runner {
            TemplateRunner::Here(template) => template.as_ref()?.render(messages, asks),
            TemplateRunner::Apart(process) => process.render(messages, asks),
        }
    }

    /// The text of a conversation and the answers in it.
    pub fn conversation(&self, messages: &[Message]) -> std::result::Result<Conversation, String> {
        match &self.runner {
            TemplateRunner::Here(template) => template.as_ref()?.conversation(messages),
            TemplateRunner::Apart(process) => process.conversation(messages),
        }
    }

    /// An error if it turned out that the template cannot be used for any conversation: it is not Jinja, or it
    /// reached a limit, after which it is not run again.
    pub fn check(&self) -> Result<()> {
        let problem = match &self.runner {
            TemplateRunner::Here(template) => template.as_ref().err().cloned(),
            TemplateRunner::Apart(process) => process.given_up(),
        };
        let path = self.path.clone();
        problem.map_or(Ok(()), |problem| Err(TrainerError::ChatTemplate { problem, path }))
    }
}

impl Message {
    fn is_answer(&self) -> bool {
        self.role == "assistant"
    }
}
