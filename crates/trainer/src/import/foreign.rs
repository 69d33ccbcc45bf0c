//! The keys of a config, one by one. Whatever is asked for is known to be a key of the trainer; whatever was there and
//! was asked for is dealt with. What is left over is told.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::error::ImportError;
use super::notes::{is_off, shown};
use super::yaml;

/// A config's keys and values: `train.lr`, `datasets[0].resolution`. Lists of tables are taken apart, others are values.
pub(super) struct ForeignConfig {
    path: PathBuf,
    leaves: BTreeMap<String, Value>,
    known: BTreeSet<String>,
    dealt_with: BTreeSet<String>,
}

impl ForeignConfig {
    pub fn new(path: &Path, root: &Value) -> Self {
        let (known, dealt_with) = (BTreeSet::new(), BTreeSet::new());
        let mut config = Self { path: path.into(), leaves: BTreeMap::new(), known, dealt_with };
        config.add("", root);
        config
    }

    /// Adds a value and all in it under a key.
    pub fn add(&mut self, key: &str, value: &Value) {
        match value {
            Value::Object(table) if !table.is_empty() => {
                for (name, value) in table {
                    let key = if key.is_empty() { name.clone() } else { format!("{key}.{name}") };
                    self.add(&key, value);
                }
            }
            Value::Array(parts) if parts.iter().any(Value::is_object) => {
                for (index, value) in parts.iter().enumerate() {
                    self.add(&format!("{key}[{index}]"), value);
                }
            }
            value => {
                self.leaves.insert(key.into(), value.clone());
            }
        }
    }

    /// The value of a key, which is dealt with by that. `null` is as if it were not there.
    pub fn value(&mut self, key: &str) -> Option<Value> {
        self.known.insert(without_numbers(key));
        let value = self.leaves.get(key)?;
        self.dealt_with.insert(key.into());
        (!value.is_null()).then(|| value.clone())
    }

    /// The value of a key that is left for a rule to tell about.
    pub fn peek(&self, key: &str) -> Option<&Value> {
        self.leaves.get(key).filter(|value| !value.is_null())
    }

    /// Whether a key is there and not switched off; the key stays to be dealt with.
    pub fn is_on(&self, key: &str) -> bool {
        self.peek(key).is_some_and(|value| !is_off(value))
    }

    /// How many tables a list has.
    pub fn count(&self, list: &str) -> usize {
        let numbers = self.leaves.keys().filter_map(|key| {
            let rest = key.strip_prefix(list)?.strip_prefix('[')?;
            rest.split_once(']')?.0.parse::<usize>().ok()
        });
        numbers.max().map_or(0, |last| last + 1)
    }

    pub fn number(&mut self, key: &str) -> Result<Option<f64>, ImportError> {
        self.read(key, "a number", |value| match value {
            Value::Number(number) => number.as_f64(),
            Value::String(text) => yaml::number(text.trim()).and_then(|number| number.as_f64()),
            _ => None,
        })
    }

    pub fn whole(&mut self, key: &str) -> Result<Option<u64>, ImportError> {
        self.read(key, "a whole number", |value| {
            let number = match value {
                Value::Number(number) => number.as_f64(),
                Value::String(text) => yaml::number(text.trim()).and_then(|number| number.as_f64()),
                _ => None,
            };
            // Beyond it, numbers with a fraction have none.
            number
                .filter(|it| *it >= 0.0 && it.fract() == 0.0 && *it < 2f64.powi(53))
                .map(|it| it as u64)
        })
    }

    pub fn flag(&mut self, key: &str) -> Result<Option<bool>, ImportError> {
        self.read(key, "true or false", |value| match value {
            Value::Bool(flag) => Some(*flag),
            Value::String(text) => match text.trim().to_lowercase().as_str() {
                "true" | "1" | "yes" => Some(true),
                "false" | "0" | "no" | "" => Some(false),
                _ => None,
            },
            Value::Number(number) => match number.as_u64() {
                Some(0) => Some(false),
                Some(1) => Some(true),
                _ => None,
            },
            _ => None,
        })
    }

    /// A text; an empty one is as if it were not there.
    pub fn text(&mut self, key: &str) -> Result<Option<String>, ImportError> {
        let text = self.read(key, "text", |value| match value {
            Value::String(text) => Some(text.trim().to_owned()),
            Value::Number(number) => Some(number.to_string()),
            _ => None,
        })?;
        Ok(text.filter(|text| !text.is_empty()))
    }

    /// A text or a list of texts.
    pub fn texts(&mut self, key: &str) -> Result<Vec<String>, ImportError> {
        let texts = self.read(key, "a text or a list of texts", |value| match value {
            Value::String(text) => Some(vec![text.clone()]),
            Value::Array(parts) => {
                parts.iter().map(|part| part.as_str().map(str::to_owned)).collect()
            }
            _ => None,
        })?;
        Ok(texts.unwrap_or_default())
    }

    /// A number or a list of numbers, which may also be a text with commas.
    pub fn numbers(&mut self, key: &str) -> Result<Vec<f64>, ImportError> {
        let numbers = self.read(key, "a number or a list of numbers", |value| {
            let of = |value: &Value| match value {
                Value::Number(number) => number.as_f64(),
                Value::String(text) => yaml::number(text.trim()).and_then(|number| number.as_f64()),
                _ => None,
            };
            match value {
                Value::Array(parts) => parts.iter().map(of).collect(),
                Value::String(text) => {
                    let parts = text.trim_matches(['[', ']', '(', ')']).split([',', 'x']);
                    parts.map(|part| of(&Value::String(part.into()))).collect()
                }
                value => of(value).map(|number| vec![number]),
            }
        })?;
        Ok(numbers.unwrap_or_default())
    }

    fn read<T>(
        &mut self,
        key: &str,
        accepted: &str,
        of: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>, ImportError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        of(&value).map(Some).ok_or_else(|| self.refuse(key, &value, accepted))
    }

    /// That something else is accepted.
    pub fn refuse(&self, key: &str, value: &Value, accepted: &str) -> ImportError {
        ImportError::Value {
            key: key.into(),
            typed: shown(value),
            accepted: accepted.into(),
            path: self.path.clone(),
        }
    }

    /// That there is no job without it.
    pub fn missing(&self, key: &str) -> ImportError {
        ImportError::MissingKey { key: key.into(), path: self.path.clone() }
    }

    /// What nobody asked for.
    pub fn left_over(&self) -> Vec<(String, Value)> {
        let left = self.leaves.iter().filter(|(key, _)| !self.dealt_with.contains(*key));
        left.map(|(key, value)| (key.clone(), value.clone())).collect()
    }

    /// What somebody asked for.
    pub fn read_values(&self) -> Vec<(String, Value)> {
        let read = self.leaves.iter().filter(|(key, _)| self.dealt_with.contains(*key));
        read.map(|(key, value)| (key.clone(), value.clone())).collect()
    }

    /// All keys that were asked for.
    pub fn known(&self) -> impl Iterator<Item = &str> {
        self.known.iter().map(String::as_str)
    }
}

/// A key with `[]` for the place in a list.
pub(super) fn without_numbers(key: &str) -> String {
    let mut text = String::new();
    let mut is_number = false;
    for c in key.chars() {
        is_number &= c != ']';
        if !is_number {
            text.push(c);
        }
        is_number |= c == '[';
    }
    text
}
