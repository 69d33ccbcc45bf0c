//! A line of a file of records: which of the three forms it has, and whether it makes sense.
//!
//! ```text
//! {"text": "…"}                                                         all of it is learnt
//! {"prompt": "…", "completion": "…"}                                    the completion is learnt
//! {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}
//!                                                                       the answers are learnt
//! ```
//!
//! Other keys are left alone. A line that makes no sense is a fault, never the end.

use serde_json::{Map, Value};

use super::chat::Message;
use super::fault::Fault;

/// What a line says.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Record {
    /// To be learnt from start to end.
    Text(String),
    /// A text of which the second part is learnt.
    Completion { prompt: String, completion: String },
    /// Of which the assistant's answers are learnt.
    Conversation(Vec<Message>),
}

/// Reads one line.
pub(super) fn read(line: &[u8]) -> Result<Record, Fault> {
    let line = std::str::from_utf8(line).map_err(|error| not_utf8(line, error))?;
    let value: Value = serde_json::from_str(line).map_err(|error| not_json(&error))?;
    let Value::Object(fields) = value else {
        return Err(wrong("a record", &value, "an object in braces"));
    };
    if let Some(messages) = fields.get("messages") {
        return conversation(messages).map(Record::Conversation);
    }
    if fields.contains_key("prompt") && fields.contains_key("completion") {
        let (prompt, completion) = (text(&fields, "prompt")?, filled(&fields, "completion")?);
        return Ok(Record::Completion { prompt, completion });
    }
    if fields.contains_key("text") {
        return filled(&fields, "text").map(Record::Text);
    }
    Err(Fault::Keys { keys: fields.keys().take(MOST_KEYS).cloned().collect() })
}

/// Chosen: what fits on a line of a screen.
const MOST_KEYS: usize = 8;

/// Where the first byte is that is no UTF-8.
pub(super) fn not_utf8(line: &[u8], error: std::str::Utf8Error) -> Fault {
    let at = error.valid_up_to();
    Fault::NotUtf8 { at, byte: line[at] }
}

fn not_json(error: &serde_json::Error) -> Fault {
    let (line, column) = (error.line(), error.column());
    let text = error.to_string();
    let why = text.strip_suffix(&format!(" at line {line} column {column}")).unwrap_or(&text);
    Fault::NotJson { column, why: why.to_lowercase() }
}

fn text(fields: &Map<String, Value>, key: &str) -> Result<String, Fault> {
    let value = &fields[key];
    value.as_str().map(Into::into).ok_or_else(|| wrong(key, value, "a text"))
}

fn filled(fields: &Map<String, Value>, key: &str) -> Result<String, Fault> {
    let text = text(fields, key)?;
    if text.trim().is_empty() { Err(Fault::Empty) } else { Ok(text) }
}

fn conversation(messages: &Value) -> Result<Vec<Message>, Fault> {
    let list = messages.as_array().filter(|list| !list.is_empty());
    let list = list.ok_or_else(|| wrong("messages", messages, "a list of messages"))?;
    let mut found: Vec<Message> = Vec::with_capacity(list.len());
    for (number, value) in (1..).zip(list) {
        let field = |key: &str| {
            let of = format!("message {number}'s {key}");
            value[key].as_str().map(String::from).ok_or_else(|| wrong(&of, &value[key], "a text"))
        };
        let message = Message { role: field("role")?, content: field("content")? };
        check_turn(number, found.last(), &message)?;
        found.push(message);
    }
    match found.last() {
        Some(Message { role, .. }) if role != "assistant" => {
            Err(Fault::Unanswered { role: role.clone() })
        }
        _ => Ok(found),
    }
}

/// That somebody may speak after somebody else.
fn check_turn(number: usize, before: Option<&Message>, message: &Message) -> Result<(), Fault> {
    let after = before.map(|message| message.role.as_str());
    let is_in_turn = match message.role.as_str() {
        "system" => after.is_none(),
        "user" => after != Some("user"),
        "assistant" => matches!(after, Some("user" | "tool")),
        "tool" => matches!(after, Some("assistant" | "tool")),
        role => return Err(Fault::Role { message: number, role: role.into() }),
    };
    if is_in_turn {
        return Ok(());
    }
    let role = message.role.clone();
    Err(Fault::Turn { message: number, role, after: after.map(Into::into) })
}

fn wrong(key: &str, value: &Value, expected: &str) -> Fault {
    let found = match value {
        Value::Null => "missing",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(list) if list.is_empty() => "an empty list",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    };
    Fault::Value { key: key.into(), found: found.into(), expected: expected.into() }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn faulty(line: &str, said: &str) {
        let fault = read(line.as_bytes()).unwrap_err().to_string();
        assert!(fault.contains(said), "{said:?} is not in {fault:?}");
    }

    fn turns(roles: &[&str]) -> String {
        let messages: Vec<Value> =
            roles.iter().map(|role| json!({"role": role, "content": "x"})).collect();
        json!({"messages": messages}).to_string()
    }

    #[test]
    fn three_forms_are_read() {
        let text = read(br#"{"text": "a\nb", "id": 7}"#).unwrap();
        assert_eq!(text, Record::Text("a\nb".into()));
        let pair = read(br#"{"completion": " b", "prompt": ""}"#).unwrap();
        assert_eq!(pair, Record::Completion { prompt: String::new(), completion: " b".into() });
        for roles in [
            &["user", "assistant"][..],
            &["system", "user", "assistant", "user", "assistant"],
            &["user", "assistant", "tool", "tool", "assistant"],
        ] {
            assert!(
                matches!(read(turns(roles).as_bytes()), Ok(Record::Conversation(_))),
                "{roles:?}"
            );
        }
    }

    #[test]
    fn what_makes_no_sense_says_why() {
        faulty("{\"text\": \"a\"", "is not JSON: eof while parsing an object at column 12");
        faulty("[1]", "a record that is a list, expected an object");
        faulty("{}", "has no keys, expected text, prompt with completion, or messages");
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
        let fault = read(b"{\"text\": \"\xff\"}").unwrap_err();
        assert_eq!(fault, Fault::NotUtf8 { at: 10, byte: 0xff });
    }
}
