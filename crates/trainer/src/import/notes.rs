//! What became of a key that is not in the job: a note with the reason.

use std::fmt;

use serde::Serialize;
use serde_json::Value;

/// What became of a key that is not in the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum KeyVerdict {
    /// The result is the same without it.
    NoEffect,
    /// hearth does something else; the result differs.
    Differs,
    /// hearth cannot do it, and there is no job without it.
    Refused,
    /// Not a key of that trainer.
    Unknown,
    /// Read, and reflected in keys of the job that name another one.
    Used,
    /// The job runs only when something is added, which the other trainer fetches by itself.
    Needed,
}

/// A key of the config and why it is not in the job, or not as it was.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KeyNote {
    /// What became of it.
    pub verdict: KeyVerdict,
    /// The key.
    pub key: String,
    /// Its value; nothing if it has the trainer's default.
    pub value: Option<Value>,
    /// Why.
    pub why: String,
}

impl fmt::Display for KeyNote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { key, value, why, .. } = self;
        match value {
            Some(value) => write!(f, "{key} = {}: {why}", shown(value)),
            None => write!(f, "{key}: {why}"),
        }
    }
}

/// Characters of a value that are shown: enough for any number or word.
const SHOWN: usize = 40;

/// A value in a line of text.
pub(super) fn shown(value: &Value) -> String {
    let text = value.to_string();
    let short: String = text.chars().take(SHOWN).collect();
    if short.len() == text.len() { short } else { format!("{short} …") }
}

/// What a trainer's key means here, where no code of ours reads it.
pub(super) struct KeyRule {
    /// Keys, separated by spaces; `*` at the end stands for anything, `[]` for any number in a list, `~` at the start
    /// for any section.
    keys: &'static str,
    verdict: KeyVerdict,
    /// Values with which the key does nothing; without any, those that switch things off.
    off: &'static [&'static str],
    /// A key that switches these on.
    switch: Option<&'static str>,
    why: &'static str,
}

/// Keys without which the result is the same.
pub(super) const fn no_effect(keys: &'static str, why: &'static str) -> KeyRule {
    KeyRule { keys, verdict: KeyVerdict::NoEffect, off: &[], switch: None, why }
}

/// Keys that change the result there and not here.
pub(super) const fn differs(keys: &'static str, why: &'static str) -> KeyRule {
    KeyRule { keys, verdict: KeyVerdict::Differs, off: &[], switch: None, why }
}

/// Keys that hearth cannot do without the job being another one.
pub(super) const fn refused(keys: &'static str, why: &'static str) -> KeyRule {
    KeyRule { keys, verdict: KeyVerdict::Refused, off: &[], switch: None, why }
}

impl KeyRule {
    /// Unless the value is one of these, in small letters; a value that switches the key off is not.
    pub const fn unless(self, off: &'static [&'static str]) -> Self {
        Self { off, ..self }
    }

    /// Only where another key is on.
    pub const fn with(self, switch: &'static str) -> Self {
        Self { switch: Some(switch), ..self }
    }

    /// The keys, one by one.
    pub fn keys(&self) -> impl Iterator<Item = &'static str> {
        self.keys.split_whitespace()
    }

    /// Whether it is about this key, with numbers in lists left out.
    pub fn matches(&self, key: &str) -> bool {
        self.keys().any(|pattern| {
            let (pattern, key) = match pattern.strip_prefix('~') {
                Some(name) => (name, key.rsplit('.').next().unwrap_or(key)),
                None => (pattern, key),
            };
            match pattern.strip_suffix('*') {
                Some(start) => key.starts_with(start),
                None => key == pattern,
            }
        })
    }

    /// What it says of a key with this value.
    pub fn note(&self, key: &str, value: &Value, is_on: impl Fn(&str) -> bool) -> KeyNote {
        let note = |verdict, why: &str| KeyNote {
            verdict,
            key: key.into(),
            value: Some(value.clone()),
            why: why.into(),
        };
        if self.verdict == KeyVerdict::NoEffect {
            return note(KeyVerdict::NoEffect, self.why);
        }
        let is_harmless = match self.off {
            [] => is_off(value),
            off => off.contains(&word(value).as_str()),
        };
        if is_harmless {
            return note(KeyVerdict::NoEffect, "as hearth does it");
        }
        match self.switch {
            Some(switch) if !is_on(switch) => {
                note(KeyVerdict::NoEffect, &format!("`{switch}` is off"))
            }
            _ => note(self.verdict, self.why),
        }
    }
}

/// Whether a value switches its key off.
pub(super) fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Bool(true) => false,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => ["", "0", "0.0", "false", "no", "none", "null", "off"]
            .contains(&text.trim().to_lowercase().as_str()),
        Value::Array(parts) => parts.is_empty(),
        Value::Object(parts) => parts.is_empty(),
    }
}

/// A value as a word, in small letters.
pub(super) fn word(value: &Value) -> String {
    match value {
        Value::String(text) => text.trim().to_lowercase(),
        other => other.to_string(),
    }
}
