//! What completions are worth: by the rewards that hearth has, or by a program.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde_json::{Map, Value};

use super::reward_program::RewardProgram;
use crate::config::preference::PreferenceConfig;
use crate::config::reward::RewardSource;
use crate::error::{Result, TrainerError};

/// A completion to be rewarded.
pub(super) struct RewardedText<'a> {
    /// Its record, as JSON.
    pub record: &'a str,
    /// What the model wrote.
    pub completion: String,
}

/// Says what completions are worth.
#[derive(Default)]
pub(super) struct Rewarder {
    /// Started when it is first needed: a plan never does.
    program: Mutex<Option<RewardProgram>>,
}

impl Rewarder {
    /// The rewards of a batch. `check` fails when somebody asks to stop.
    pub fn rewards(
        &self,
        preference: &PreferenceConfig,
        texts: &[RewardedText<'_>],
        check: &dyn Fn() -> Result<()>,
    ) -> Result<Vec<f64>> {
        let mut records = Vec::with_capacity(texts.len());
        for text in texts {
            records.push(fields(text.record)?);
        }
        match &preference.reward {
            Some(RewardSource::Program(words)) => {
                let timeout = Duration::from_secs_f64(preference.reward_timeout.min(1e9));
                let lines = records.into_iter().zip(texts).map(|(mut fields, text)| {
                    fields.insert("completion".into(), text.completion.clone().into());
                    Value::Object(fields).to_string()
                });
                self.ask(words, &lines.collect::<Vec<_>>(), timeout, check)
            }
            Some(RewardSource::ExactMatch) => {
                each(&records, texts, |answer, text| answer.trim() == text.trim())
            }
            Some(RewardSource::LastNumber) => each(&records, texts, |answer, text| {
                last_number(answer).is_some_and(|answer| last_number(text) == Some(answer))
            }),
            None => unreachable!("a job without a reward is refused when it is read"),
        }
    }

    fn ask(
        &self,
        words: &[String],
        lines: &[String],
        timeout: Duration,
        check: &dyn Fn() -> Result<()>,
    ) -> Result<Vec<f64>> {
        let mut held = self.program.lock().unwrap_or_else(PoisonError::into_inner);
        // Taken out: one that fails is dropped, and with that killed.
        let mut running = match held.take() {
            Some(mut program) => {
                if program.is_running()? {
                    Some(program)
                } else {
                    None
                }
            }
            None => None,
        };
        let mut program = match running.take() {
            Some(program) => program,
            None => RewardProgram::start(words)?,
        };
        let rewards = program.rewards(lines, timeout, check)?;
        *held = Some(program);
        Ok(rewards)
    }
}

fn fields(record: &str) -> Result<Map<String, Value>> {
    serde_json::from_str(record).map_err(|error| TrainerError::Request {
        problem: format!("a record of the cache is no JSON: {error}"),
        hint: "remove the folder of cached tokens (text.cache), so that the texts are read again",
    })
}

/// 1 where a completion agrees with the answer of its record, else 0.
fn each(
    records: &[Map<String, Value>],
    texts: &[RewardedText<'_>],
    agrees: impl Fn(&str, &str) -> bool,
) -> Result<Vec<f64>> {
    let reward = |(fields, text): (&Map<String, Value>, &RewardedText<'_>)| {
        let agreed = agrees(&answer(fields)?, &text.completion);
        Ok(f64::from(u8::from(agreed)))
    };
    records.iter().zip(texts).map(reward).collect()
}

fn answer(fields: &Map<String, Value>) -> Result<String> {
    match fields.get("answer") {
        Some(Value::String(text)) => Ok(text.clone()),
        Some(number @ Value::Number(_)) => Ok(number.to_string()),
        _ => {
            let keys: Vec<&str> = fields.keys().map(String::as_str).collect();
            Err(TrainerError::Request {
                problem: format!(
                    "the reward compares with the answer of a record, and one has the keys {}",
                    keys.join(", ")
                ),
                hint: "give every record an `answer` that is a text or a number, or set preference.reward to a program",
            })
        }
    }
}

/// The last number of a text. Commas may stand between thousands; a full stop at the end is that of a sentence.
fn last_number(text: &str) -> Option<f64> {
    let is_part = |c: char| c.is_ascii_digit() || ".,-".contains(c);
    let mut pieces = text.split(|c: char| !is_part(c)).rev();
    pieces.find_map(number)
}

fn number(piece: &str) -> Option<f64> {
    let end = piece.rfind(|c: char| c.is_ascii_digit())? + 1;
    // `5-3` and `--3` end with a 3.
    let start = match piece[..end].rfind('-') {
        Some(sign @ 1..) => sign + 1,
        Some(0) | None => 0,
    };
    piece[start..end].trim_start_matches(',').replace(',', "").parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_number_is_found() {
        for (text, expected) in [
            ("It is 42.", Some(42.0)),
            ("first 7, then 1,234.50 dollars", Some(1234.5)),
            ("x = -3", Some(-3.0)),
            ("5-3", Some(3.0)),
            ("#### 18", Some(18.0)),
            ("none", None),
            ("...", None),
            ("1.2.3 is a version", None),
        ] {
            assert_eq!(last_number(text), expected, "{text}");
        }
    }

    #[test]
    fn answers_are_compared() {
        let of = |reward: &str, answer: &str, completion: &str| {
            let record = format!(r#"{{"prompt": "?", "answer": {answer}}}"#);
            let records = [fields(&record).unwrap()];
            let texts = [RewardedText { record: &record, completion: completion.into() }];
            match reward {
                "exact_match" => {
                    each(&records, &texts, |answer, text| answer.trim() == text.trim())
                }
                _ => each(&records, &texts, |a, b| last_number(a) == last_number(b)),
            }
        };
        assert_eq!(of("exact_match", "\"Paris\"", " Paris\n").unwrap(), [1.0]);
        assert_eq!(of("exact_match", "4", "4").unwrap(), [1.0]);
        assert_eq!(of("exact_match", "4", "5").unwrap(), [0.0]);
        assert_eq!(of("last_number", "\"so #### 1,000\"", "that is 1000.").unwrap(), [1.0]);
        let error = of("exact_match", "null", "5").unwrap_err().to_string();
        assert!(error.contains("one has the keys"), "{error}");
    }
}
