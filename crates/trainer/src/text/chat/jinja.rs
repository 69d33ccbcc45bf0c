//! Renders a chat template, and finds the assistant's answers in the text.
//!
//! Templates are Jinja as in transformers, with methods of Python's strings. There is no clock: a template
//! that asks for the date uses its fallback, so that the same files always give the same tokens.
//! Deliberately absent: tools and documents; content in parts, but for images before a text.

use std::collections::BTreeMap;

use minijinja::{Environment, Error, ErrorKind, Value};
use serde::Serialize;

use super::{Conversation, Message};

/// Chosen: a hundred times what a long conversation takes.
const MOST_INSTRUCTIONS: u64 = 2_000_000;

const NAME: &str = "chat";

/// A placeholder answer: a private-use character.
const OTHER: &str = "\u{f8ff}";

/// A template that is run in this process: it is trusted, or the process can be spared.
pub struct JinjaTemplate {
    environment: Environment<'static>,
    /// As `eos_token`.
    tokens: BTreeMap<String, String>,
}

impl JinjaTemplate {
    /// Of Jinja, with the special tokens that it may name.
    pub(super) fn new(source: &str, tokens: BTreeMap<String, String>) -> Result<Self, String> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_fuel(Some(MOST_INSTRUCTIONS));
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        let added = environment.add_template_owned(NAME, without_generation(source));
        added.map_err(|error| format!("cannot be used: {}", said(&error)))?;
        Ok(Self { environment, tokens })
    }

    /// The text of a conversation; with `asks`, up to where the model's next answer begins. What
    /// went wrong is what the template says.
    pub(super) fn render(&self, messages: &[Message], asks: bool) -> Result<String, String> {
        let mut context: BTreeMap<&str, Value> =
            self.tokens.iter().map(|(name, token)| (name.as_str(), token.into())).collect();
        let messages: Vec<TemplateMessage<'_>> = messages.iter().map(Into::into).collect();
        context.insert("messages", Value::from_serialize(messages));
        context.insert("add_generation_prompt", asks.into());
        // What transformers hands over where there are none.
        context.insert("tools", Value::from(()));
        context.insert("documents", Value::from(()));
        let rendered =
            self.environment.get_template(NAME).and_then(|template| template.render(context));
        rendered.map_err(|error| said(&error))
    }

    /// The text of a conversation and the answers in it: what the template adds to all before an
    /// answer and the prompt for one.
    pub(super) fn conversation(&self, messages: &[Message]) -> Result<Conversation, String> {
        let text = self.render(messages, false)?;
        let mut answers = Vec::new();
        for (at, message) in messages.iter().enumerate().filter(|(_, message)| message.is_answer())
        {
            let start = self.start(messages, at, &text)?;
            let with = self.render(&messages[..=at], false)?;
            let answer = start..shared(&with, &text).max(start);
            // Some templates change earlier answers, e.g. drop their reasoning: those are context, not targets.
            let is_whole = with == text || text[answer.clone()].contains(message.content.trim());
            if is_whole && !answer.is_empty() {
                answers.push(answer);
            }
        }
        if answers.is_empty() {
            return Err("the chat template gives no answer of the assistant".into());
        }
        Ok(Conversation { text, answers })
    }

    /// Where an answer begins: behind the prompt for it, or, where the template writes more there
    /// than it keeps, where the text would differ if the answer were another.
    fn start(&self, messages: &[Message], at: usize, text: &str) -> Result<usize, String> {
        let before = self.render(&messages[..at], true)?;
        if text.starts_with(&before) {
            return Ok(before.len());
        }
        let mut other = messages.to_vec();
        other[at].content = OTHER.into();
        Ok(shared(&self.render(&other, false)?, text))
    }
}

/// A message as templates know it.
#[derive(Serialize)]
struct TemplateMessage<'a> {
    role: &'a str,
    content: TemplateContent<'a>,
}

/// A text, or parts of which the last is one.
#[derive(Serialize)]
#[serde(untagged)]
enum TemplateContent<'a> {
    Text(&'a str),
    Parts(Vec<TemplatePart<'a>>),
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "lowercase")]
enum TemplatePart<'a> {
    Image,
    Text { text: &'a str },
}

impl<'a> From<&'a Message> for TemplateMessage<'a> {
    fn from(Message { role, content: text, n_images }: &'a Message) -> Self {
        let images = (0..*n_images).map(|_| TemplatePart::Image);
        let content = match n_images {
            0 => TemplateContent::Text(text),
            _ => TemplateContent::Parts(images.chain([TemplatePart::Text { text }]).collect()),
        };
        Self { role, content }
    }
}

/// How many bytes two texts have in common at their start; whole letters.
fn shared(a: &str, b: &str) -> usize {
    let same = a.chars().zip(b.chars()).take_while(|(a, b)| a == b);
    same.map(|(letter, _)| letter.len_utf8()).sum()
}

/// Replaces the `generation` tag, by which some templates mark answers for transformers, by a plain block.
fn without_generation(source: &str) -> String {
    let mut rest = source;
    let mut out = String::with_capacity(source.len());
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        let end = tag.find("%}").map_or(tag.len(), |end| end + 2);
        let (tag, after) = tag.split_at(end);
        out.push_str(before);
        let word = tag.trim_matches(|c: char| "{%}-+".contains(c) || c.is_whitespace());
        out.push_str(&match word {
            "generation" => tag.replace("generation", "if true"),
            "endgeneration" => tag.replace("endgeneration", "endif"),
            _ => tag.into(),
        });
        rest = after;
    }
    out + rest
}

/// Jinja's message with the line, without the kind of error.
fn said(error: &Error) -> String {
    let what = error.detail().map_or_else(|| error.kind().to_string(), Into::into);
    error
        .line()
        .map_or_else(|| what.clone(), |line| format!("{what} (line {line} of the template)"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn template(source: &str) -> Result<JinjaTemplate, String> {
        JinjaTemplate::new(source, BTreeMap::from([("eos_token".into(), "</s>".into())]))
    }

    fn chat(contents: &[&str]) -> Vec<Message> {
        let roles = ["user", "assistant"].into_iter().cycle();
        let message = |(role, content): (&str, &&str)| Message::new(role, content);
        roles.zip(contents).map(message).collect()
    }

    /// The answers that are learnt.
    fn answers(source: &str, contents: &[&str]) -> Result<Vec<String>, String> {
        let Conversation { text, answers } =
            template(source).unwrap().conversation(&chat(contents))?;
        Ok(answers.into_iter().map(|range| text[range].to_owned()).collect())
    }

    const PLAIN: &str = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{{ eos_token }}{% endfor %}\
        {% if add_generation_prompt %}a:{% endif %}";

    #[test]
    fn every_answer_is_found_with_its_end() {
        assert_eq!(answers(PLAIN, &["a", "b", "a", "b"]).unwrap(), ["b</s>", "b</s>"]);
        assert_eq!(answers(PLAIN, &["a", ""]).unwrap(), ["</s>"]);
    }

    /// As templates that drop the thoughts of earlier answers do.
    #[test]
    fn an_answer_that_is_written_otherwise_later_is_none() {
        let source = "{% for m in messages %}{% if m.role == 'assistant' and not loop.last %}a:-\
            {% else %}{{ m.role[0] }}:{{ m.content }};{% endif %}{% endfor %}\
            {% if add_generation_prompt %}a:{% endif %}";
        assert_eq!(answers(source, &["a", "b", "c", "d"]).unwrap(), ["d;"]);
    }

    /// As templates do that begin an answer with thoughts, or put the token that ends a text behind
    /// the last one.
    #[test]
    fn answers_are_found_where_the_prompt_for_one_is_not_kept() {
        let thinks = PLAIN.replace("a:{% endif %}", "a:<think>{% endif %}");
        assert_eq!(answers(&thinks, &["a", "b", "a", "b"]).unwrap(), ["b</s>", "b</s>"]);
        let ends = PLAIN.replace("{{ eos_token }}{% endfor %}", ";{% endfor %}")
            + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}";
        assert_eq!(answers(&ends, &["a", "b", "a", "c"]).unwrap(), ["b;", "c;</s>"]);
    }

    #[test]
    fn what_a_template_refuses_is_said() {
        let refuses = "{{ raise_exception('no system here') }}";
        assert_eq!(
            answers(refuses, &["a", "b"]).unwrap_err(),
            "no system here (line 1 of the template)"
        );
        let mute = "{% for m in messages %}x{% endfor %}";
        assert!(answers(mute, &["a"]).unwrap_err().contains("no answer"));
        let endless =
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}";
        assert!(answers(endless, &["a", "b"]).unwrap_err().contains("fuel"));
        let broken = template("a\n{% if %}").map(drop).unwrap_err();
        assert!(broken.contains("(line 2 of the template)"), "{broken}");
    }

    #[test]
    fn images_are_parts_before_the_text() {
        let source = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}\
            {% for part in m.content %}<{{ part.type }}>{{ part.text }}{% endfor %}{% endif %};{% endfor %}";
        let messages = [Message::system("be brief"), Message::about_image("what is it?")];
        let text = template(source).unwrap().render(&messages, false).unwrap();
        assert_eq!(text, "be brief;<image><text>what is it?;");
    }

    /// Of Python, and without a clock.
    #[test]
    fn templates_use_methods_of_python() {
        let source = "{{ messages[0].content.strip().upper() }} {{ messages[0]['content'].split('b')[0] }} \
            {{ 'date' if strftime_now is defined else 'no date' }}";
        let text = template(source).unwrap().render(&chat(&[" abc "]), false);
        assert_eq!(text.unwrap(), "ABC  a no date");
    }
}
