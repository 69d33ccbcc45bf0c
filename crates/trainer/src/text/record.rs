//! A record of a file: which of the forms that people share it has, and whether it makes sense.
//!
//! ```text
//! {"text": "…"}                                                         all of it is learnt
//! {"prompt": "…", "completion": "…"}                                    the completion is learnt
//! {"instruction": "…", "input": "…", "output": "…"}                     Alpaca: the output is learnt
//! {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}
//! {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}    ShareGPT
//!                                                                       the answers are learnt
//! ```
//!
//! Where preferences are learnt from, as TRL and Unsloth have them; each text may also be a list of messages:
//!
//! ```text
//! {"prompt": "…", "chosen": "…", "rejected": "…"}                       the prompt may be part of both answers instead
//! {"prompt": "…", "completion": "…", "label": true}                     whether people liked it
//! {"prompt": "…"}                                                       the model makes the answers
//! ```
//!
//! Other keys are left alone. A record that makes no sense is a fault, never the end.

use serde_json::{Map, Value};

use super::chat::Message;
use super::{RecordKind, preference};
use crate::data::fault::TextFault;

/// What a record says.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum TextRecord {
    /// To be learnt from start to end.
    Text(String),
    /// A text of which the second part is learnt.
    Completion { prompt: String, completion: String },
    /// A task, what it is about if anything, and the answer, which is learnt.
    Instruction { instruction: String, input: String, output: String },
    /// Of which the assistant's answers are learnt, but for those in the first so many messages.
    Conversation { messages: Vec<Message>, n_prompt: usize },
    /// Whether people liked the answer before it.
    Label(bool),
    /// A prompt that the model completes.
    Prompt(String),
    /// The same as messages.
    Question(Vec<Message>),
    /// All that a record says, as JSON.
    Fields(String),
}

/// Reads one record of JSON: the documents that it is made of.
pub(super) fn read(json: &[u8], kind: RecordKind) -> Result<Vec<TextRecord>, TextFault> {
    let json = std::str::from_utf8(json).map_err(|error| not_utf8(json, error))?;
    let value: Value = serde_json::from_str(json).map_err(|error| not_json(&error))?;
    match value {
        Value::Object(fields) => from_fields(&fields, kind),
        other => Err(wrong("a record", &other, "an object in braces")),
    }
}

/// What some keys and their values say.
pub(super) fn from_fields(
    fields: &Map<String, Value>,
    kind: RecordKind,
) -> Result<Vec<TextRecord>, TextFault> {
    match kind {
        RecordKind::Texts => Ok(vec![text_record(fields)?]),
        RecordKind::Pairs => preference::pair(fields).map(Vec::from),
        RecordKind::Labelled => preference::labelled(fields).map(Vec::from),
        RecordKind::Prompts => preference::prompted(fields).map(Vec::from),
    }
}

fn text_record(fields: &Map<String, Value>) -> Result<TextRecord, TextFault> {
    let has = |key: &str| fields.contains_key(key);
    // Before all else: they have prompts and completions too, and the worse of two answers, or one
    // that people did not like, is not to be learnt.
    for keys in [["chosen", "rejected"], ["completion", "label"]] {
        if keys.iter().all(|key| has(key)) {
            return Err(TextFault::Preference { keys: keys.join(", ") });
        }
    }
    if let Some(key) = ["messages", "conversations"].into_iter().find(|key| has(key)) {
        let messages = conversation(key, fields)?;
        return Ok(TextRecord::Conversation { messages, n_prompt: 0 });
    }
    let output = ["output", "response"].into_iter().find(|key| has(key));
    if let Some(output) = output.filter(|_| has("instruction")) {
        let input = ["input", "context"].into_iter().find(|key| has(key));
        return Ok(TextRecord::Instruction {
            instruction: filled(fields, "instruction")?,
            input: input.map_or(Ok(String::new()), |input| text(fields, input))?,
            output: filled(fields, output)?,
        });
    }
    if has("prompt") && has("completion") {
        let (prompt, completion) = (text(fields, "prompt")?, filled(fields, "completion")?);
        return Ok(TextRecord::Completion { prompt, completion });
    }
    if has("text") {
        return filled(fields, "text").map(TextRecord::Text);
    }
    Err(TextFault::Keys { keys: fields.keys().take(MOST_KEYS).cloned().collect() })
}

/// Chosen: what fits on a line of a screen.
pub(super) const MOST_KEYS: usize = 8;

/// Where the first byte is that is no UTF-8.
pub(super) fn not_utf8(line: &[u8], error: std::str::Utf8Error) -> TextFault {
    let at = error.valid_up_to();
    TextFault::NotUtf8 { at, byte: line[at] }
}

fn not_json(error: &serde_json::Error) -> TextFault {
    let (line, column) = (error.line(), error.column());
    let text = error.to_string();
    let why = text.strip_suffix(&format!(" at line {line} column {column}")).unwrap_or(&text);
    TextFault::NotJson { column, why: why.to_lowercase() }
}

pub(super) fn text(fields: &Map<String, Value>, key: &str) -> Result<String, TextFault> {
    let value = &fields[key];
    value.as_str().map(Into::into).ok_or_else(|| wrong(key, value, "a text"))
}

pub(super) fn filled(fields: &Map<String, Value>, key: &str) -> Result<String, TextFault> {
    let text = text(fields, key)?;
    if text.trim().is_empty() { Err(TextFault::Empty) } else { Ok(text) }
}

fn conversation(key: &str, fields: &Map<String, Value>) -> Result<Vec<Message>, TextFault> {
    let mut messages = messages(key, &fields[key])?;
    // ShareGPT keeps it apart, if at all.
    let system = fields.get("system").and_then(Value::as_str).filter(|content| !content.is_empty());
    if let Some(content) = system {
        messages.insert(0, Message::system(content));
    }
    check_turns(&messages, usize::from(system.is_some()))?;
    Ok(messages)
}

/// The messages of a list, whoever speaks.
pub(super) fn messages(key: &str, value: &Value) -> Result<Vec<Message>, TextFault> {
    let list = value.as_array().filter(|list| !list.is_empty());
    let list = list.ok_or_else(|| wrong(key, value, "a list of messages"))?;
    let message = |(number, value): (usize, &Value)| {
        let field = |keys: [&str; 2]| {
            let key = keys.into_iter().find(|key| value.get(key).is_some()).unwrap_or(keys[0]);
            let of = format!("message {number}'s {key}");
            value[key].as_str().map(String::from).ok_or_else(|| wrong(&of, &value[key], "a text"))
        };
        let role = role(field(["role", "from"])?);
        Ok(Message { role, content: field(["content", "value"])?, n_images: 0 })
    };
    (1..).zip(list).map(message).collect()
}

/// That everybody speaks in turn, and the assistant last. The first `n_apart` are none of the list that was typed.
pub(super) fn check_turns(messages: &[Message], n_apart: usize) -> Result<(), TextFault> {
    for (index, message) in messages.iter().enumerate() {
        let before = index.checked_sub(1).map(|before| &messages[before]);
        check_turn((index + 1).saturating_sub(n_apart), before, message)?;
    }
    match messages.last() {
        Some(Message { role, .. }) if role != "assistant" => {
            Err(TextFault::Unanswered { role: role.clone() })
        }
        _ => Ok(()),
    }
}

/// As chat templates call those who speak.
fn role(name: String) -> String {
    match name.as_str() {
        "human" => "user".into(),
        "gpt" | "chatgpt" | "model" | "bot" => "assistant".into(),
        "observation" | "function" => "tool".into(),
        _ => name,
    }
}

/// That somebody may speak after somebody else.
fn check_turn(number: usize, before: Option<&Message>, message: &Message) -> Result<(), TextFault> {
    let after = before.map(|message| message.role.as_str());
    let is_in_turn = match message.role.as_str() {
        "system" => after.is_none(),
        "user" => after != Some("user"),
        "assistant" => matches!(after, Some("user" | "tool")),
        "tool" => matches!(after, Some("assistant" | "tool")),
        role => return Err(TextFault::Role { message: number, role: role.into() }),
    };
    if is_in_turn {
        return Ok(());
    }
    let role = message.role.clone();
    Err(TextFault::Turn { message: number, role, after: after.map(Into::into) })
}

pub(super) fn wrong(key: &str, value: &Value, expected: &str) -> TextFault {
    let found = match value {
        Value::Null => "missing",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(list) if list.is_empty() => "an empty list",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    };
    TextFault::Value { key: key.into(), found: found.into(), expected: expected.into() }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn faulty(line: &str, said: &str) {
        let fault = read(line.as_bytes(), RecordKind::Texts).unwrap_err().to_string();
        assert!(fault.contains(said), "{said:?} is not in {fault:?}");
    }

    fn one(line: &[u8]) -> TextRecord {
        read(line, RecordKind::Texts).unwrap().remove(0)
    }

    fn turns(roles: &[&str]) -> String {
        let messages: Vec<Value> =
            roles.iter().map(|role| json!({"role": role, "content": "x"})).collect();
        json!({"messages": messages}).to_string()
    }

    #[test]
    fn forms_are_read() {
        let text = one(br#"{"text": "a\nb", "id": 7}"#);
        assert_eq!(text, TextRecord::Text("a\nb".into()));
        let task = one(br#"{"instruction": "add", "input": "", "output": "3", "id": 1}"#);
        let [instruction, input, output] = ["add", "", "3"].map(String::from);
        assert_eq!(task, TextRecord::Instruction { instruction, input, output });
        let task = one(br#"{"instruction": "add", "context": "1, 2", "response": "3"}"#);
        assert!(matches!(task, TextRecord::Instruction { input, .. } if input == "1, 2"));
        let pair = one(br#"{"completion": " b", "prompt": ""}"#);
        assert_eq!(pair, TextRecord::Completion { prompt: String::new(), completion: " b".into() });
        for roles in [
            &["user", "assistant"][..],
            &["system", "user", "assistant", "user", "assistant"],
            &["user", "assistant", "tool", "tool", "assistant"],
        ] {
            let read = one(turns(roles).as_bytes());
            assert!(matches!(read, TextRecord::Conversation { n_prompt: 0, .. }), "{roles:?}");
        }
    }

    #[test]
    fn names_of_other_programs_are_known() {
        let share = json!({"system": "be brief", "conversations": [
            {"from": "human", "value": "a?"}, {"from": "gpt", "value": "b"}]});
        let TextRecord::Conversation { messages, .. } = one(share.to_string().as_bytes()) else {
            panic!("{share}")
        };
        let said: Vec<_> = messages.iter().map(|m| format!("{}: {}", m.role, m.content)).collect();
        assert_eq!(said, ["system: be brief", "user: a?", "assistant: b"]);
        faulty(
            r#"{"prompt": "a", "chosen": "b", "rejected": "c"}"#,
            "is a preference (chosen, rejected): learning from those takes preference.method",
        );
        faulty(r#"{"prompt": "a", "completion": "b", "label": false}"#, "(completion, label)");
        faulty(
            r#"{"conversations": [{"from": "gpt", "value": "b"}]}"#,
            "of the assistant comes first",
        );
    }

    #[test]
    fn what_makes_no_sense_says_why() {
        faulty("{\"text\": \"a\"", "is not JSON: eof while parsing an object at column 12");
        faulty("[1]", "a record that is a list, expected an object");
        faulty("{}", "has no keys, expected text, prompt with completion, instruction with output");
        faulty(r#"{"prompt": "a", "answer": "b"}"#, "has the keys answer, prompt, expected");
        faulty(r#"{"text": 7}"#, "has text that is a number, expected a text");
        faulty(r#"{"text": " \n"}"#, "is empty");
        faulty(r#"{"prompt": "a", "completion": ""}"#, "is empty");
        faulty(r#"{"messages": []}"#, "messages that is an empty list");
        faulty(r#"{"messages": [{"role": "user"}]}"#, "message 1's content that is missing");
        faulty(&turns(&["robot"]), "message 1 is of role \"robot\"");
        faulty(&turns(&["assistant"]), "message 1 of the assistant comes first");
        faulty(&turns(&["user", "user"]), "message 2 of the user comes after the user");
        faulty(&turns(&["user", "system"]), "message 2 of the system comes after the user");
        faulty(&turns(&["user", "assistant", "user"]), "ends with the user");
        let fault = read(b"{\"text\": \"\xff\"}", RecordKind::Texts).unwrap_err();
        assert_eq!(fault, TextFault::NotUtf8 { at: 10, byte: 0xff });
    }
}
