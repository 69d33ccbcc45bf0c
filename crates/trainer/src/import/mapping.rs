//! The job while it is made: keys of the config become lines of the job, and every line knows where it came from.

use std::path::PathBuf;

use serde::Serialize;
use serde_json::Value;

use super::document::{Document, read_text};
use super::error::ImportError;
use super::foreign::{ForeignConfig, without_numbers};
use super::notes::{KeyNote, KeyRule, KeyVerdict, is_off};
use super::places::Places;
use crate::suggest::nearest;

/// A key of the job with its value.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct JobLine {
    /// The key of the job: `train.steps`.
    pub key: &'static str,
    /// Of several sets of images, which one it is of.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub set: Option<usize>,
    /// Its value.
    pub value: Value,
    /// The key of the config that it follows from, or why it is so.
    pub from: String,
    /// Whether the config does not set it, so that it is the other trainer's default.
    pub is_default: bool,
}

impl JobLine {
    /// Whether a key of an error is this one: `adapter.pattern[0].match`, or `data[1].flip` of a set of images.
    pub(super) fn names(&self, key: &str) -> bool {
        let of_set = |set: usize| key.strip_prefix("data[")?.strip_prefix(&format!("{set}]"));
        match (self.set.and_then(of_set), self.key.strip_prefix("data")) {
            (Some(name), Some(own)) => name.split('[').next() == Some(own),
            _ => key.split('[').next() == Some(self.key),
        }
    }
}

/// A job in the making.
pub(super) struct Mapping {
    /// The name of the other trainer.
    pub trainer: &'static str,
    pub config: ForeignConfig,
    pub places: Places,
    pub lines: Vec<JobLine>,
    pub notes: Vec<KeyNote>,
    /// The folders of the sets of images, as they are typed.
    pub folders: Vec<String>,
    /// Which set of images lines of `[data]` are of.
    set: usize,
}

/// Keys that hold for all sets of images.
const COMMON_KEYS: [&str; 4] =
    ["data.bucket_step", "data.reference_resolution", "data.frames", "data.fps"];

impl Mapping {
    pub fn new(trainer: &'static str, config: ForeignConfig, places: Places) -> Self {
        let (lines, notes, folders) = (Vec::new(), Vec::new(), Vec::new());
        Self { trainer, config, places, lines, notes, folders, set: 0 }
    }

    /// Lines of `[data]` are of this set of images from here on.
    pub fn begin_set(&mut self, set: usize) {
        self.set = set;
    }

    /// All lines; those of a single set of images are of `[data]`.
    pub fn take_lines(&mut self) -> Vec<JobLine> {
        let mut lines = std::mem::take(&mut self.lines);
        if lines.iter().all(|line| line.set.unwrap_or(0) == 0) {
            for line in &mut lines {
                line.set = None;
            }
        }
        lines
    }

    /// Writes a value that a key of the config sets.
    pub fn set(&mut self, key: &'static str, value: impl Into<Value>, from: &str) {
        self.line(key, value.into(), from.into(), false);
    }

    /// Writes what the other trainer does without the key.
    pub fn set_default(&mut self, key: &'static str, value: impl Into<Value>, from: &str) {
        self.line(key, value.into(), from.into(), true);
    }

    /// Writes a value that was set, or else the default.
    pub fn set_or(
        &mut self,
        key: &'static str,
        set: Option<impl Into<Value>>,
        default: impl Into<Value>,
        from: &str,
    ) {
        match set {
            Some(value) => self.set(key, value, from),
            None => self.set_default(key, default, from),
        }
    }

    /// Of two values for a key, which a config with an old and a new name has, the first counts.
    fn line(&mut self, key: &'static str, value: Value, from: String, is_default: bool) {
        match self.value(key) {
            None => {
                let set = self.set_of(key);
                self.lines.push(JobLine { key, set, value, from, is_default });
            }
            Some(first) if COMMON_KEYS.contains(&key) && *first != value => {
                self.differs(&from, format!("{key} holds for all sets of images, it is {first}"));
            }
            Some(_) => {}
        }
    }

    /// Takes back what was written for keys of this set of images.
    pub fn leave_out(&mut self, keys: &[&str]) {
        let set = Some(self.set);
        self.lines.retain(|line| line.set != set || !keys.contains(&line.key));
    }

    /// What was written for a key of the job, or of this set of images.
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.value_of(key, self.set_of(key))
    }

    /// The same of a set.
    pub fn value_of(&self, key: &str, set: Option<usize>) -> Option<&Value> {
        let line = self.lines.iter().find(|line| line.key == key && line.set == set);
        line.map(|line| &line.value)
    }

    fn set_of(&self, key: &str) -> Option<usize> {
        let is_common = COMMON_KEYS.contains(&key);
        key.starts_with("data.").then_some(if is_common { 0 } else { self.set })
    }

    /// A number as it is, or the trainer's default.
    pub fn number(
        &mut self,
        from: &str,
        key: &'static str,
        default: f64,
    ) -> Result<f64, ImportError> {
        let number = self.config.number(from)?;
        self.set_or(key, number, default, from);
        Ok(number.unwrap_or(default))
    }

    /// The same for a whole number.
    pub fn whole(
        &mut self,
        from: &str,
        key: &'static str,
        default: u64,
    ) -> Result<u64, ImportError> {
        let number = self.config.whole(from)?;
        self.set_or(key, number, default, from);
        Ok(number.unwrap_or(default))
    }

    /// A number that is off where it is 0.
    pub fn limit(
        &mut self,
        from: &str,
        key: &'static str,
        default: f64,
    ) -> Result<(), ImportError> {
        let number = self.config.number(from)?;
        let value = |number: f64| if number > 0.0 { Value::from(number) } else { "off".into() };
        self.set_or(key, number.map(value), value(default), from);
        Ok(())
    }

    /// A path that has to be there.
    pub fn path(&mut self, from: &str, key: &'static str) -> Result<(), ImportError> {
        let path = self.config.text(from)?.ok_or_else(|| self.config.missing(from))?;
        let path = self.places.written(&path);
        self.set(key, path, from);
        Ok(())
    }

    /// The base model: a path, or the hub's name.
    pub fn base(&mut self, from: &str) -> Result<String, ImportError> {
        let typed = self.config.text(from)?.ok_or_else(|| self.config.missing(from))?;
        let path = self.places.model(&typed);
        self.set("base.path", path, from);
        Ok(typed)
    }

    /// Another file that the config names, with its values.
    pub fn document(&mut self, from: &str) -> Result<Option<Document>, ImportError> {
        let Some(path) = self.file(from)? else { return Ok(None) };
        Document::read(&path).map(Some)
    }

    /// The same as text.
    pub fn text_file(&mut self, from: &str) -> Result<Option<String>, ImportError> {
        self.file(from)?.map(|path| read_text(&path)).transpose()
    }

    fn file(&mut self, from: &str) -> Result<Option<PathBuf>, ImportError> {
        let Some(typed) = self.config.text(from)? else { return Ok(None) };
        let looked_at = self.places.candidates(&typed);
        let found = looked_at.iter().find(|path| path.is_file()).cloned();
        found.map(Some).ok_or(ImportError::MissingFile { key: from.into(), looked_at })
    }

    /// That hearth does something else than this key says.
    pub fn differs(&mut self, key: &str, why: impl Into<String>) {
        self.note(KeyVerdict::Differs, key, why.into());
    }

    /// That the result is the same without it.
    pub fn no_effect(&mut self, key: &str, why: impl Into<String>) {
        self.note(KeyVerdict::NoEffect, key, why.into());
    }

    /// That there is no job with it.
    pub fn refuse(&mut self, key: &str, why: impl Into<String>) {
        self.note(KeyVerdict::Refused, key, why.into());
    }

    /// That the job runs only when something is added.
    pub fn needs(&mut self, key: &str, why: impl Into<String>) {
        self.note(KeyVerdict::Needed, key, why.into());
    }

    fn note(&mut self, verdict: KeyVerdict, key: &str, why: String) {
        let value = self.config.value(key);
        let note = KeyNote { verdict, key: key.into(), value, why };
        // What several sets of images have in common is told once.
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    /// Deals with the keys that no code asked for: by a rule, or as unknown ones.
    pub fn deal_with_rest(&mut self, rules: &[&[KeyRule]]) {
        let rules: Vec<&KeyRule> = rules.iter().copied().flatten().collect();
        for (key, value) in self.config.left_over() {
            let bare = without_numbers(&key);
            let note = match rules.iter().find(|rule| rule.matches(&bare)) {
                Some(_) if value.is_null() => continue,
                Some(rule) => rule.note(&key, &value, |switch| self.config.is_on(switch)),
                None => self.unknown(&key, &bare, value, &rules),
            };
            self.notes.push(note);
        }
        self.deal_with_silent();
    }

    /// Tells of keys that were read and that no line or note names: they are off, or others stand for them.
    fn deal_with_silent(&mut self) {
        for (key, value) in self.config.read_values() {
            let is_told = self.lines.iter().any(|line| line.from.contains(&key))
                || self.notes.iter().any(|note| note.key == key);
            if is_told || value.is_null() {
                continue;
            }
            let (verdict, why) = if is_off(&value) {
                (KeyVerdict::NoEffect, "as hearth does it".into())
            } else {
                (KeyVerdict::Used, "keys of the job follow from it".into())
            };
            self.notes.push(KeyNote { verdict, key, value: Some(value), why });
        }
    }

    fn unknown(&self, key: &str, bare: &str, value: Value, rules: &[&KeyRule]) -> KeyNote {
        let of_rules = rules.iter().flat_map(|rule| rule.keys()).filter(|key| !key.ends_with('*'));
        let of_rules = of_rules.map(|key| key.trim_start_matches('~'));
        let near = nearest(bare, self.config.known().chain(of_rules));
        let why = match near {
            Some(near) => format!("no key of {}; did you mean `{near}`?", self.trainer),
            None => format!("no key of {}", self.trainer),
        };
        KeyNote { verdict: KeyVerdict::Unknown, key: key.into(), value: Some(value), why }
    }
}
