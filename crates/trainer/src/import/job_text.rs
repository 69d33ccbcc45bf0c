//! A job as text: each value with the key it came from, and above all what is not the same.

use std::fmt::Write as _;

use serde_json::Value;

use super::ImportedJob;
use super::mapping::JobLine;
use super::notes::{KeyNote, KeyVerdict};

/// Sections in the order in which people read a job.
const SECTIONS: [&str; 10] = [
    "base",
    "data",
    "text",
    "adapter",
    "train",
    "optimizer",
    "sample",
    "generate",
    "machine",
    "output",
];

/// Longer lists have a line for each part.
const LINE: usize = 80;

/// What each kind of note is called.
pub const HEADINGS: [(KeyVerdict, &str); 4] = [
    (KeyVerdict::Needed, "Still needed"),
    (KeyVerdict::Differs, "Not the same here"),
    (KeyVerdict::Unknown, "Unknown keys, left out"),
    (KeyVerdict::NoEffect, "No effect here"),
];

/// The whole file.
pub(super) fn text(job: &ImportedJob) -> String {
    let name = job.source.file_name().unwrap_or_default().to_string_lossy();
    let mut text = format!("# Imported from {}, a config of {}.\n", one_line(&name), job.trainer);
    text += "# Behind each value stands the key it came from; (default) is that trainer's, where the file has none.\n";
    for (verdict, heading) in HEADINGS {
        let notes: Vec<&KeyNote> =
            job.notes.iter().filter(|note| note.verdict == verdict).collect();
        if !notes.is_empty() {
            let _ = writeln!(text, "#\n# {heading}:");
        }
        for note in notes {
            let _ = writeln!(text, "#   {}", one_line(&note.to_string()));
        }
    }
    let used = job.notes.iter().filter(|note| note.verdict == KeyVerdict::Used);
    let used: Vec<&str> = used.map(|note| note.key.as_str()).collect();
    if !used.is_empty() {
        let _ = writeln!(text, "#\n# Read too: {}", one_line(&used.join(", ")));
    }
    for section in SECTIONS {
        let of = |line: &&JobLine| line.key.split_once('.').is_some_and(|(of, _)| of == section);
        let mut lines: Vec<&JobLine> = job.lines.iter().filter(of).collect();
        lines.sort_by_key(|line| line.set);
        let mut before = None;
        for JobLine { key, set, value, from, is_default } in lines {
            if before.replace(set) != Some(set) {
                let heading = match set {
                    Some(_) => format!("[[{section}]]"),
                    None => format!("[{section}]"),
                };
                let _ = writeln!(text, "\n{heading}");
            }
            let name = key.split_once('.').map_or(*key, |(_, name)| name);
            let default = if *is_default { " (default)" } else { "" };
            let from = one_line(&format!("{from}{default}"));
            match value {
                Value::Array(parts) if toml(value).len() > LINE => {
                    let _ = writeln!(text, "{name} = [ # {from}");
                    for part in parts {
                        let _ = writeln!(text, "    {},", toml(part));
                    }
                    text += "]\n";
                }
                value => {
                    let _ = writeln!(text, "{name} = {} # {from}", toml(value));
                }
            }
        }
    }
    text
}

/// A line break in a value would end the comment.
fn one_line(text: &str) -> String {
    text.replace(char::is_control, " ")
}

/// A value as TOML.
fn toml(value: &Value) -> String {
    match value {
        Value::String(text) => toml::Value::from(text.as_str()).to_string(),
        Value::Number(number) if number.is_f64() => {
            format!("{:?}", number.as_f64().unwrap_or_default())
        }
        Value::Array(parts) => {
            let parts: Vec<_> = parts.iter().map(toml).collect();
            format!("[{}]", parts.join(", "))
        }
        Value::Object(table) => {
            let pairs: Vec<_> =
                table.iter().map(|(key, value)| format!("{key} = {}", toml(value))).collect();
            format!("{{ {} }}", pairs.join(", "))
        }
        value => value.to_string(),
    }
}
