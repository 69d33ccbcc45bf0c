//! The chat templates that Ollama has in Go: what each writes, in Go and here.

use crate::text::Tokenizer;
use crate::text::chat::{ChatTemplate, Message};

/// A chat template in Go.
pub struct GoTemplate {
    /// As it is known.
    pub name: &'static str,
    /// What Ollama runs.
    pub go: &'static str,
    /// What it writes, up to where the next answer begins.
    write: fn(&[Message]) -> String,
    /// Whether it puts what the system says into the next message of the user.
    is_system_of_user: bool,
}

/// A template that was recognised.
pub struct FoundTemplate {
    /// The same in Go.
    pub template: &'static GoTemplate,
    /// What the model's own says without a system message.
    pub system: Option<String>,
}

/// Taken: the `TEMPLATE` of models of each family in Ollama's library, in the form with `.Messages` and without tools.
const KNOWN: &[GoTemplate] = &[
    GoTemplate {
        name: "ChatML",
        go: "{{ range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n{{ end }}<|im_start|>assistant\n",
        write: |messages| turns(messages, "<|im_start|>", "\n", "<|im_end|>\n"),
        is_system_of_user: false,
    },
    GoTemplate {
        name: "Llama 3",
        go: "{{ range .Messages }}<|start_header_id|>{{ .Role }}<|end_header_id|>\n\n{{ .Content }}<|eot_id|>{{ end }}\
             <|start_header_id|>assistant<|end_header_id|>\n\n",
        write: |messages| {
            turns(messages, "<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>")
        },
        is_system_of_user: false,
    },
    GoTemplate {
        name: "Zephyr",
        go: "{{ range .Messages }}<|{{ .Role }}|>\n{{ .Content }}</s>\n{{ end }}<|assistant|>\n",
        write: |messages| turns(messages, "<|", "|>\n", "</s>\n"),
        is_system_of_user: false,
    },
    GoTemplate {
        name: "Mistral",
        go: "{{ $system := \"\" }}{{ range .Messages }}{{ if eq .Role \"system\" }}{{ $system = .Content }}\
             {{ else if eq .Role \"user\" }}[INST] {{ if $system }}{{ $system }}\n\n{{ $system = \"\" }}{{ end }}\
             {{ .Content }} [/INST]{{ else }} {{ .Content }}</s>{{ end }}{{ end }}",
        write: |messages| instructions(messages, "[INST] ", " [/INST]"),
        is_system_of_user: true,
    },
    GoTemplate {
        name: "Mistral v3",
        go: "{{ $system := \"\" }}{{ range .Messages }}{{ if eq .Role \"system\" }}{{ $system = .Content }}\
             {{ else if eq .Role \"user\" }}[INST] {{ if $system }}{{ $system }}\n\n{{ $system = \"\" }}{{ end }}\
             {{ .Content }}[/INST]{{ else }} {{ .Content }}</s>{{ end }}{{ end }}",
        write: |messages| instructions(messages, "[INST] ", "[/INST]"),
        is_system_of_user: true,
    },
];

/// Marks where a system message stands.
const MARK: &str = "\u{1}";

impl GoTemplate {
    /// The one that writes what a tokenizer's own template writes, with what that says without a system message.
    pub fn find(tokenizer: &Tokenizer) -> Option<FoundTemplate> {
        let template = tokenizer.template().map(|_| tokenizer.chat_template())?;
        // Ollama puts the token that begins a text before it by itself.
        let start = tokenizer.bos().and_then(|id| tokenizer.token(id)).unwrap_or_default();
        KNOWN.iter().find_map(|known| known.fits(&template, &start))
    }

    /// Whether it writes the same; with what the other says without a system message.
    fn fits(&'static self, template: &ChatTemplate, start: &str) -> Option<FoundTemplate> {
        let written = |messages: &[Message]| {
            let text = template.render(messages, true).ok()?;
            Some(text.strip_prefix(start).unwrap_or(&text).to_owned())
        };
        let user = Message::user("What burns?");
        let turns = [user.clone(), Message::assistant("Wood."), Message::user("And what else?")];
        let alone = written(std::slice::from_ref(&user))?;
        let system = if alone == (self.write)(std::slice::from_ref(&user)) {
            None
        } else {
            Some(self.system_in(&alone, &user)?)
        };
        let said = system.clone().map(|system| Message::system(&system));
        let with_said: Vec<_> = said.iter().chain(&turns).cloned().collect();
        if written(&turns)? != (self.write)(&with_said) {
            return None;
        }
        let told = [&[Message::system("Be brief.")][..], &turns[..]].concat();
        match written(&told) {
            // Some templates put it elsewhere, or refuse it.
            _ if self.is_system_of_user => {}
            text if text.as_deref() == Some(&(self.write)(&told)) => {}
            _ => return None,
        }
        Some(FoundTemplate { template: self, system })
    }

    /// The system message in a text that should have none.
    fn system_in(&self, text: &str, user: &Message) -> Option<String> {
        let marked = (self.write)(&[Message::system(MARK), user.clone()]);
        let (before, after) = marked.split_once(MARK)?;
        Some(text.strip_prefix(before)?.strip_suffix(after)?.to_owned())
    }
}

/// Each message between marks, and the beginning of the next answer.
fn turns(messages: &[Message], before: &str, after_role: &str, after: &str) -> String {
    let turn = |message: &Message| {
        format!("{before}{}{after_role}{}{after}", message.role, message.content)
    };
    let all: String = messages.iter().map(turn).collect();
    format!("{all}{before}assistant{after_role}")
}

/// Messages of the user between marks, and answers after them.
fn instructions(messages: &[Message], before: &str, after: &str) -> String {
    let mut system = String::new();
    let mut text = String::new();
    for message in messages {
        match message.role.as_str() {
            "system" => system = format!("{}\n\n", message.content),
            "user" => {
                text.extend([before, &system, &message.content, after]);
                system.clear();
            }
            _ => text.extend([" ", &message.content, "</s>"]),
        }
    }
    text
}
