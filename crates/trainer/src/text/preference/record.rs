//! A preference in a record: the forms that TRL and Unsloth take. Texts are used as they are, lists of messages are
//! written by the chat template.
//!
//! ```text
//! {"prompt": "…", "chosen": "…", "rejected": "…"}
//! {"prompt": [{"role": "user", "content": "…"}], "chosen": [{"role": "assistant", …}], "rejected": […]}
//! {"chosen": "…", "rejected": "…"}      what both begin with is the prompt; of messages too
//! {"prompt": "…", "completion": "…", "label": true}
//! {"prompt": "…", "answer": "…"}        a prompt alone; other keys are for whoever gives the reward
//! ```

use serde_json::{Map, Value};

use crate::data::fault::TextFault;
use crate::text::RecordKind;
use crate::text::chat::Message;
use crate::text::record::{MOST_KEYS, TextRecord, check_turns, messages, text, wrong};

/// A prompt or an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Speech {
    Text(String),
    Messages(Vec<Message>),
}

/// A prompt with a chosen and a rejected answer.
pub fn pair(fields: &Map<String, Value>) -> Result<[TextRecord; 2], TextFault> {
    check_keys(fields, &["chosen", "rejected"], RecordKind::Pairs)?;
    let (chosen, rejected) = (speech(fields, "chosen")?, speech(fields, "rejected")?);
    if chosen == rejected {
        return Err(TextFault::SameAnswers);
    }
    let prompt = prompt(fields)?;
    let (prompt, answers) = match (prompt, chosen, rejected) {
        // The prompt is in both answers; where it is given as well, as a text, it is that of the first message.
        (None | Some(Speech::Text(_)), Speech::Messages(chosen), Speech::Messages(rejected)) => {
            let n = common(&chosen, &rejected);
            let (prompt, answer) = chosen.split_at(n);
            let answers = [answer, &rejected[n..]].map(|it| Speech::Messages(it.to_vec()));
            (Speech::Messages(prompt.to_vec()), answers)
        }
        (None, Speech::Text(chosen), Speech::Text(rejected)) => {
            let n = common_text(&chosen, &rejected);
            let answers = [&chosen[n..], &rejected[n..]].map(|it| Speech::Text(it.into()));
            (Speech::Text(chosen[..n].into()), answers)
        }
        (Some(prompt), chosen, rejected) => (prompt, [chosen, rejected]),
        (None, chosen, _) => return Err(mixed(&chosen)),
    };
    let [chosen, rejected] = answers;
    Ok([answered(prompt.clone(), chosen)?, answered(prompt, rejected)?])
}

/// A prompt with an answer, and whether people liked it.
pub fn labelled(fields: &Map<String, Value>) -> Result<[TextRecord; 2], TextFault> {
    check_keys(fields, &["completion", "label"], RecordKind::Labelled)?;
    let answer = speech(fields, "completion")?;
    let (prompt, answer) = match (prompt(fields)?, answer) {
        (Some(prompt), answer) => (prompt, answer),
        (None, Speech::Messages(mut all)) => {
            let last = all.split_off(all.len() - 1);
            (Speech::Messages(all), Speech::Messages(last))
        }
        (None, answer) => (Speech::Text(String::new()), answer),
    };
    Ok([answered(prompt, answer)?, TextRecord::Label(label(&fields["label"])?)])
}

/// A prompt alone, and the whole record for whoever rewards what the model makes of it.
pub fn prompted(fields: &Map<String, Value>) -> Result<[TextRecord; 2], TextFault> {
    check_keys(fields, &["prompt"], RecordKind::Prompts)?;
    let prompt = match speech(fields, "prompt")? {
        Speech::Text(text) if text.trim().is_empty() => return Err(TextFault::Empty),
        Speech::Text(text) => TextRecord::Prompt(text),
        Speech::Messages(messages) => {
            let turns = messages.iter().cloned().chain([Message::assistant("…")]);
            check_turns(&turns.collect::<Vec<_>>(), 0)?;
            TextRecord::Question(messages)
        }
    };
    Ok([prompt, TextRecord::Fields(Value::Object(fields.clone()).to_string())])
}

fn check_keys(
    fields: &Map<String, Value>,
    needed: &[&str],
    kind: RecordKind,
) -> Result<(), TextFault> {
    if needed.iter().all(|key| fields.contains_key(*key)) {
        return Ok(());
    }
    let keys = fields.keys().take(MOST_KEYS).cloned().collect();
    Err(TextFault::NoPreference { keys, expected: kind.expected().into() })
}

fn prompt(fields: &Map<String, Value>) -> Result<Option<Speech>, TextFault> {
    match fields.get("prompt") {
        None | Some(Value::Null) => Ok(None),
        Some(_) => speech(fields, "prompt").map(Some),
    }
}

fn speech(fields: &Map<String, Value>, key: &str) -> Result<Speech, TextFault> {
    match &fields[key] {
        list @ Value::Array(_) => messages(key, list).map(Speech::Messages),
        Value::String(_) => text(fields, key).map(Speech::Text),
        other => Err(wrong(key, other, "a text or a list of messages")),
    }
}

/// A table has words, other programs write numbers.
fn label(value: &Value) -> Result<bool, TextFault> {
    let said = match value {
        Value::Bool(label) => Some(*label),
        Value::Number(number) => match number.as_f64() {
            Some(1.0) => Some(true),
            Some(0.0) => Some(false),
            _ => None,
        },
        Value::String(text) => match text.trim().to_lowercase().as_str() {
            "true" | "1" => Some(true),
            "false" | "0" => Some(false),
            _ => None,
        },
        _ => None,
    };
    said.ok_or_else(|| wrong("label", value, "true or false"))
}

/// A prompt with one answer to it.
fn answered(prompt: Speech, answer: Speech) -> Result<TextRecord, TextFault> {
    match (prompt, answer) {
        (Speech::Text(_), Speech::Text(completion)) if completion.trim().is_empty() => {
            Err(TextFault::Empty)
        }
        (Speech::Text(prompt), Speech::Text(completion)) => {
            Ok(TextRecord::Completion { prompt, completion })
        }
        (Speech::Messages(prompt), answer) => {
            let (n_prompt, mut messages) = (prompt.len(), prompt);
            match answer {
                Speech::Text(content) => messages.push(Message::assistant(&content)),
                Speech::Messages(answer) => messages.extend(answer),
            }
            check_turns(&messages, 0)?;
            Ok(TextRecord::Conversation { messages, n_prompt })
        }
        (Speech::Text(_), answer) => Err(mixed(&answer)),
    }
}

fn mixed(answer: &Speech) -> TextFault {
    let (found, expected) = match answer {
        Speech::Text(_) => ("a text", "a list of messages, as the others are"),
        Speech::Messages(_) => ("a list", "a text, as the prompt is"),
    };
    TextFault::Value { key: "chosen".into(), found: found.into(), expected: expected.into() }
}

/// How many messages both begin with; one at least is left of each.
fn common(a: &[Message], b: &[Message]) -> usize {
    let same = a.iter().zip(b).take_while(|(a, b)| a == b).count();
    same.min(a.len().min(b.len()) - 1)
}

/// How many bytes both begin with, up to the space before the word in which they differ.
fn common_text(a: &str, b: &str) -> usize {
    let same = a.char_indices().zip(b.chars()).find(|((_, a), b)| a != b);
    let n = same.map_or(a.len().min(b.len()), |((at, _), _)| at);
    if a[..n].ends_with(' ') { n - 1 } else { n }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(value: Value) -> Map<String, Value> {
        let Value::Object(fields) = value else { panic!("{value} is no object") };
        fields
    }

    fn completion(prompt: &str, completion: &str) -> TextRecord {
        TextRecord::Completion { prompt: prompt.into(), completion: completion.into() }
    }

    fn said(role: &str, content: &str) -> Value {
        json!({"role": role, "content": content})
    }

    #[test]
    fn pairs_of_texts_and_of_messages_are_read() {
        let plain = json!({"prompt": "2+2=", "chosen": " 4", "rejected": " 5", "score": 1});
        assert_eq!(pair(&of(plain)).unwrap(), [completion("2+2=", " 4"), completion("2+2=", " 5")]);
        let inside = json!({"chosen": "The sky is blue.", "rejected": "The sky is green."});
        assert_eq!(
            pair(&of(inside)).unwrap(),
            [completion("The sky is", " blue."), completion("The sky is", " green.")]
        );
        let (user, good, bad) =
            (said("user", "hi"), said("assistant", "a"), said("assistant", "b"));
        let explicit = json!({"prompt": [user], "chosen": [good], "rejected": [bad]});
        let implicit = json!({"chosen": [user, good], "rejected": [user, bad]});
        // As in UltraFeedback.
        let both = json!({"prompt": "hi", "chosen": [user, good], "rejected": [user, bad]});
        for form in [explicit, implicit, both] {
            let [chosen, rejected] = pair(&of(form)).unwrap();
            for (read, answer) in [(chosen, "a"), (rejected, "b")] {
                let messages = vec![Message::user("hi"), Message::assistant(answer)];
                assert_eq!(read, TextRecord::Conversation { messages, n_prompt: 1 });
            }
        }
    }

    #[test]
    fn labels_are_read_however_they_are_written() {
        for (label, is_desirable) in
            [(json!(true), true), (json!(0), false), (json!("False"), false), (json!("1"), true)]
        {
            let record = json!({"prompt": "a", "completion": "b", "label": label});
            let read = labelled(&of(record)).unwrap();
            assert_eq!(read, [completion("a", "b"), TextRecord::Label(is_desirable)]);
        }
    }

    #[test]
    fn prompts_keep_their_record() {
        let record = json!({"prompt": "2+2=", "answer": 4});
        let read = prompted(&of(record)).unwrap();
        let fields = TextRecord::Fields(r#"{"prompt":"2+2=","answer":4}"#.into());
        assert!(read[0] == TextRecord::Prompt("2+2=".into()), "{read:?}");
        assert_eq!(fields_of(&read[1]), fields_of(&fields));
        let asked = json!({"prompt": [said("system", "brief"), said("user", "hi")]});
        let question = vec![Message::system("brief"), Message::user("hi")];
        assert_eq!(prompted(&of(asked)).unwrap()[0], TextRecord::Question(question));
        for (record, why) in [
            (json!({"text": "a"}), "has the keys text, expected prompt"),
            (json!({"prompt": " "}), "is empty"),
            (
                json!({"prompt": [said("user", "a"), said("assistant", "b")]}),
                "message 3 of the assistant comes after the assistant",
            ),
        ] {
            assert_eq!(prompted(&of(record)).unwrap_err().to_string(), why);
        }
    }

    /// Keys may come in another order.
    fn fields_of(record: &TextRecord) -> Value {
        let TextRecord::Fields(text) = record else { panic!("{record:?}") };
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn what_is_no_preference_says_why() {
        let user = said("user", "hi");
        for (record, why) in [
            (json!({"text": "a"}), "has the keys text, expected prompt, chosen and rejected"),
            (
                json!({"prompt": "a", "chosen": "b", "rejected": "b"}),
                "has the same answer as chosen and as rejected",
            ),
            (
                json!({"prompt": "a", "chosen": 3, "rejected": "b"}),
                "has chosen that is a number, expected a text or a list of messages",
            ),
            (
                json!({"prompt": [user], "chosen": [user], "rejected": "b"}),
                "message 2 of the user comes after the user",
            ),
            (json!({"prompt": "a", "chosen": " ", "rejected": "b"}), "is empty"),
        ] {
            assert_eq!(pair(&of(record)).unwrap_err().to_string(), why);
        }
        let record = json!({"prompt": "a", "completion": "b", "label": "good"});
        let error = labelled(&of(record)).unwrap_err().to_string();
        assert_eq!(error, "has label that is a text, expected true or false");
    }
}
