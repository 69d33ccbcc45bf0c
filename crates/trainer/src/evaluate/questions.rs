//! Files of questions: a line of JSON for each.
//!
//! ```text
//! {"prompt": "The sky is", "choices": ["blue", "green"], "answer": 0}      by its index, its letter or its text
//! {"prompt": "2 + 2 =", "answer": "4"}                                     what is generated has to be equal
//! ```
//!
//! `question` and `input` are other names of the prompt, `options` of the choices, `target` and `label` of the answer, as
//! in data sets of others.

use std::fs;
use std::io;
use std::path::Path;

use serde_json::{Map, Value};

use crate::error::{Result, TrainerError};

/// The most bytes of a file. Chosen: a million questions.
const MOST_BYTES: u64 = 512 << 20;

/// One question.
#[derive(Clone, Debug, PartialEq)]
pub struct Question {
    /// What is asked.
    pub prompt: String,
    /// What is right.
    pub kind: QuestionKind,
}

/// How an answer is judged.
#[derive(Clone, Debug, PartialEq)]
pub enum QuestionKind {
    /// The right one has to be the likeliest. Each begins with the space that parts it from the prompt.
    Choices {
        /// All of them.
        choices: Vec<String>,
        /// The index of the right one.
        right: usize,
    },
    /// The text that is generated has to be this one.
    Exact(String),
}

impl Question {
    /// Whether the right choice is the likeliest, by log-probabilities divided by what is given for each choice.
    pub(super) fn is_right(&self, log_likelihoods: &[f64], by: impl Fn(&str) -> f64) -> bool {
        let QuestionKind::Choices { choices, right } = &self.kind else { return false };
        let score = |at: usize| log_likelihoods[at] / by(choices[at].trim_start());
        let mut best = 0;
        for at in 1..choices.len() {
            // Of equals the first.
            if score(at) > score(best) {
                best = at;
            }
        }
        best == *right
    }
}

/// Reads a file of questions.
pub fn read_questions(path: &Path) -> Result<Vec<Question>> {
    let failed = |source| TrainerError::Io { what: "read questions", path: path.into(), source };
    let about = fs::metadata(path).map_err(failed)?;
    if !about.is_file() || about.len() > MOST_BYTES {
        return Err(failed(io::Error::other("not a file, or one of more than 512 MiB")));
    }
    let text = fs::read_to_string(path).map_err(failed)?;
    let lines = (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty());
    let questions = lines.map(|(number, line)| {
        question(line).map_err(|problem| TrainerError::Request {
            problem: format!("line {number} is no question: {problem}: {}", path.display()),
            hint: "write {\"prompt\": …, \"choices\": […], \"answer\": 0} or {\"prompt\": …, \"answer\": \"…\"}",
        })
    });
    let questions: Vec<Question> = questions.collect::<Result<_>>()?;
    if questions.is_empty() {
        let problem = format!("no questions in {}", path.display());
        return Err(TrainerError::Request { problem, hint: "write one in each line, as JSON" });
    }
    Ok(questions)
}

fn question(line: &str) -> std::result::Result<Question, String> {
    let record: Map<String, Value> = serde_json::from_str(line).map_err(|it| it.to_string())?;
    let prompt = text(&record, &["prompt", "question", "input"])?;
    let Some(choices) = ["choices", "options"].iter().find_map(|key| record.get(*key)) else {
        let answer = text(&record, &["answer", "target", "label"])?;
        return Ok(Question { prompt, kind: QuestionKind::Exact(answer) });
    };
    let choices: Vec<String> =
        serde_json::from_value(choices.clone()).map_err(|it| format!("its choices: {it}"))?;
    if choices.len() < 2 {
        return Err(format!("{} choices, least is 2", choices.len()));
    }
    let right = right_choice(&record, &choices)?;
    let space = if prompt.ends_with(char::is_whitespace) { "" } else { " " };
    let choices = choices.iter().map(|choice| format!("{space}{}", choice.trim_start())).collect();
    Ok(Question { prompt, kind: QuestionKind::Choices { choices, right } })
}

/// The text under the first of these keys that is there.
fn text(record: &Map<String, Value>, keys: &[&str]) -> std::result::Result<String, String> {
    let found = keys.iter().find_map(|key| record.get(*key));
    match found {
        Some(Value::String(text)) if !text.is_empty() => Ok(text.clone()),
        Some(Value::Number(number)) => Ok(number.to_string()),
        Some(_) => Err(format!("its {} is no text", keys[0])),
        None => Err(format!("it has no {}", keys[0])),
    }
}

/// By its index, its letter or its text.
fn right_choice(
    record: &Map<String, Value>,
    choices: &[String],
) -> std::result::Result<usize, String> {
    let answer = ["answer", "target", "label"].iter().find_map(|key| record.get(*key));
    let index = match answer {
        Some(Value::Number(number)) => number.as_u64().map(|index| index as usize),
        Some(Value::String(typed)) => {
            let by_text = choices.iter().position(|choice| choice == typed);
            let letter = match typed.as_bytes() {
                [letter] if letter.is_ascii_uppercase() => Some(usize::from(letter - b'A')),
                _ => None,
            };
            by_text.or(letter)
        }
        _ => None,
    };
    let is_there = |index: &usize| *index < choices.len();
    index.filter(is_there).ok_or_else(|| {
        format!("its answer is none of its {} choices, by index, letter or text", choices.len())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choices(texts: [&str; 2], right: usize) -> QuestionKind {
        QuestionKind::Choices { choices: texts.map(Into::into).into(), right }
    }

    #[test]
    fn questions_are_read_as_others_write_them() {
        for (line, prompt, kind) in [
            (
                r#"{"prompt": "a", "choices": ["x", "y"], "answer": 1}"#,
                "a",
                choices([" x", " y"], 1),
            ),
            (
                r#"{"question": "a ", "options": [" x", "y"], "answer": "A"}"#,
                "a ",
                choices(["x", "y"], 0),
            ),
            (
                r#"{"input": "a", "choices": ["B", "A"], "label": "A"}"#,
                "a",
                choices([" B", " A"], 1),
            ),
            (r#"{"prompt": "a", "answer": "4", "more": 1}"#, "a", QuestionKind::Exact("4".into())),
            (r#"{"prompt": "a", "target": 4}"#, "a", QuestionKind::Exact("4".into())),
        ] {
            assert_eq!(question(line).unwrap(), Question { prompt: prompt.into(), kind }, "{line}");
        }
    }

    #[test]
    fn what_is_no_question_is_said() {
        for (line, says) in [
            ("{", "EOF"),
            ("[]", "expected a map"),
            (r#"{"answer": "4"}"#, "it has no prompt"),
            (r#"{"prompt": "a"}"#, "it has no answer"),
            (r#"{"prompt": "", "answer": "4"}"#, "its prompt is no text"),
            (r#"{"prompt": "a", "choices": ["x"], "answer": 0}"#, "1 choices, least is 2"),
            (r#"{"prompt": "a", "choices": ["x", 2], "answer": 0}"#, "its choices: invalid type"),
            (r#"{"prompt": "a", "choices": ["x", "y"], "answer": 2}"#, "none of its 2 choices"),
            (r#"{"prompt": "a", "choices": ["x", "y"], "answer": "C"}"#, "none of its 2 choices"),
            (r#"{"prompt": "a", "choices": ["x", "y"]}"#, "none of its 2 choices"),
        ] {
            let said = question(line).unwrap_err();
            assert!(said.contains(says), "{line}: {said}");
        }
    }

    #[test]
    fn long_choices_are_judged_by_their_length_too() {
        let kind = choices([" ab", " abcdef"], 1);
        let question = Question { prompt: "a".into(), kind };
        let likely = [-2.0, -3.0];
        assert!(!question.is_right(&likely, |_| 1.0));
        assert!(question.is_right(&likely, |choice| choice.len() as f64));
        // Of equals the first counts, whichever is right.
        assert!(!question.is_right(&[-2.0, -2.0], |_| 1.0));
    }
}
