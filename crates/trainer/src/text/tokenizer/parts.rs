//! The parts of a `tokenizer.json` that change, split and join texts. A part of another type is refused by name rather
//! than tried, and so is one that the crate panics on, or that makes a text grow without end.

use std::path::Path;

use serde_json::Value;

use crate::model::encoder::tokenizer::TokenizerError;

/// Normalisers, ways to split, and decoders, as `tokenizer.json` calls them.
const PARTS: [(&str, &[&str]); 3] = [
    ("normalizer", &["Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Prepend", "Replace", "Sequence"]),
    (
        "pre_tokenizer",
        &[
            "ByteLevel",
            "Digits",
            "Metaspace",
            "Punctuation",
            "Sequence",
            "Split",
            "WhitespaceSplit",
        ],
    ),
    (
        "decoder",
        &["ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Sequence", "Strip"],
    ),
];

/// A sequence's parts, by the names that the three kinds of it give them.
const INNER: [&str; 3] = ["normalizers", "pretokenizers", "decoders"];

/// Parts of one kind. Chosen: ten times those of any tokenizer.
const MOST_PARTS: usize = 64;

/// How many times as long a text may become. Chosen: five times what a space as `▁` takes.
const MOST_GROWTH: usize = 16;

/// Bytes before a text. Chosen: twenty times those of any tokenizer.
const MOST_PREPENDED: usize = 64;

/// Checks all parts of a file.
pub(super) fn check(path: &Path, file: &Value) -> Result<(), TokenizerError> {
    for (part, known) in PARTS {
        let mut checked = PartCheck { path, part, known, n_parts: 0, growth: 1 };
        checked.add(&file[part])?;
    }
    Ok(())
}

/// The parts of one kind, as far as they were looked at.
struct PartCheck<'a> {
    path: &'a Path,
    part: &'static str,
    known: &'static [&'static str],
    n_parts: usize,
    /// How many times as long a text may become by them.
    growth: usize,
}

impl PartCheck<'_> {
    fn add(&mut self, value: &Value) -> Result<(), TokenizerError> {
        if value.is_null() {
            return Ok(());
        }
        let Self { path, part, known, .. } = *self;
        let r#type = value["type"].as_str().unwrap_or("unknown");
        if !known.contains(&r#type) {
            let (found, path) = (r#type.into(), path.into());
            return Err(TokenizerError::UnknownPart { part, found, known, path });
        }
        self.n_parts += 1;
        if self.n_parts > MOST_PARTS {
            return Err(self.malformed(format!("{part} has more than {MOST_PARTS} parts")));
        }
        match r#type {
            "Replace" => self.add_replace(value)?,
            "Prepend" => self.add_prepend(value)?,
            // The crate counts back from the end of an empty token.
            "Strip" if value["stop"] != 0 => {
                let stop = &value["stop"];
                return Err(
                    self.malformed(format!("{part} strips {stop} at the end of tokens, not 0"))
                );
            }
            _ => {}
        }
        let inner = INNER.iter().filter_map(|key| value[*key].as_array()).flatten();
        inner.into_iter().try_for_each(|value| self.add(value))
    }

    /// The crate panics where nothing is replaced by something.
    fn add_replace(&mut self, value: &Value) -> Result<(), TokenizerError> {
        let part = self.part;
        let pattern = &value["pattern"];
        let least = match (pattern["String"].as_str(), pattern["Regex"].as_str()) {
            (Some(text), _) => text.len(),
            (None, regex) => usize::from(regex.is_some_and(takes_something)),
        };
        if least == 0 {
            return Err(
                self.malformed(format!("{part} could replace nothing, by the pattern {pattern}"))
            );
        }
        let content = value["content"].as_str().map_or(0, str::len);
        self.growth = self.growth.saturating_mul(content.div_ceil(least).max(1));
        if self.growth > MOST_GROWTH {
            let growth = self.growth;
            return Err(self.malformed(format!(
                "{part} can make a text {growth} times as long, most is {MOST_GROWTH}"
            )));
        }
        Ok(())
    }

    /// The crate loses count where nothing is put before a text.
    fn add_prepend(&self, value: &Value) -> Result<(), TokenizerError> {
        let n = value["prepend"].as_str().map_or(0, str::len);
        if (1..=MOST_PREPENDED).contains(&n) {
            return Ok(());
        }
        let expected = format!("expected 1 to {MOST_PREPENDED}");
        Err(self.malformed(format!("puts {n} bytes before a text, {expected}")))
    }

    fn malformed(&self, problem: String) -> TokenizerError {
        TokenizerError::malformed(self.path, problem)
    }
}

/// Whether every match of a regular expression has a letter: it has nothing that could do without, such as groups, `*`
/// or `^`. More would need its parser, and tokenizers need no more: `\s+`, ` {2,}`.
fn takes_something(regex: &str) -> bool {
    let mut before = None;
    let is_plain = |c: char| {
        let is_plain = match (before, c) {
            // A letter of a class, or one that stands for itself.
            (Some('\\'), c) => "sSdDwWnrtpP".contains(c) || c.is_ascii_punctuation(),
            (Some('{'), c) => c.is_ascii_digit() && c != '0' || c.is_ascii_uppercase(),
            (_, c) => !"()|*?^$".contains(c),
        };
        before = (before != Some('\\')).then_some(c);
        is_plain
    };
    !regex.is_empty() && regex.chars().all(is_plain)
}
