//! A file of another trainer as one tree of values, whatever it is written in: JSON, TOML, YAML, or a training command
//! in a shell script. The content decides, not the ending.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::command_line::{self, TrainingCommand};
use super::error::ImportError;
use super::yaml;

/// Chosen: a hundred times what trainers' own examples have.
const MAX_BYTES: u64 = 1 << 20;

/// A file that was read.
pub(super) struct Document {
    /// The file.
    pub path: PathBuf,
    /// What it says.
    pub root: Value,
    /// The program that a shell script starts.
    pub program: Option<String>,
}

impl Document {
    /// Reads a file in any of the formats.
    pub fn read(path: &Path) -> Result<Self, ImportError> {
        let text = read_text(path)?;
        Self::parse(&text, path)
    }

    /// The same of a text that is, or would be, at `path`.
    pub fn parse(text: &str, path: &Path) -> Result<Self, ImportError> {
        let text = text.trim_start_matches('\u{feff}');
        let document = |root| Self { path: path.into(), root, program: None };
        let syntax = |format, problem: String| {
            let problem = problem.trim_end().replace('\n', ", ");
            ImportError::Syntax { format, problem, path: path.into() }
        };
        let start = text.trim_start();
        if start.starts_with('{') || start.starts_with("[\n") || start.starts_with("[{") {
            let root = serde_json::from_str(text);
            return root.map(document).map_err(|error| syntax("JSON", error.to_string()));
        }
        if let Some(command) = command_line::find(text) {
            let TrainingCommand { program, flags } =
                command.map_err(|problem| syntax("a plain shell script", problem))?;
            return Ok(Self { program: Some(program), ..document(Value::Object(flags)) });
        }
        let error = match text.parse::<toml::Table>() {
            Ok(table) => return Ok(document(of_toml(toml::Value::Table(table)))),
            Err(error) => error,
        };
        if is_like_toml(text) {
            return Err(syntax("TOML", toml_problem(text, &error)));
        }
        match yaml::parse(text).map_err(|problem| syntax("YAML", problem))? {
            root @ Value::Object(_) => Ok(document(root)),
            _ => Err(ImportError::UnknownTrainer {
                looked_for: vec![
                    "JSON, TOML, YAML or a shell script with a training command".into(),
                ],
                path: path.into(),
            }),
        }
    }
}

/// Whether more lines assign with `=` than with `:`.
fn is_like_toml(text: &str) -> bool {
    let count = |sign: char| {
        let is_key = |c: char| c.is_ascii_alphanumeric() || "-_.\" ".contains(c);
        let assigns = |line: &&str| {
            line.split_once(sign).is_some_and(|(key, _)| !key.is_empty() && key.chars().all(is_key))
        };
        text.lines().filter(assigns).count()
    };
    count('=') > count(':')
}

/// What the parser said, with the line but without its text, which may be long.
fn toml_problem(text: &str, error: &toml::de::Error) -> String {
    let start = error.span().map_or(0, |span| span.start);
    let line = text.get(..start).unwrap_or_default().matches('\n').count() + 1;
    format!("{} in line {line}", error.message())
}

/// A text of a bounded size.
pub(super) fn read_text(path: &Path) -> Result<String, ImportError> {
    let failed = |source| ImportError::Read { path: path.into(), source };
    let mut text = String::new();
    let file = File::open(path).map_err(failed)?;
    file.take(MAX_BYTES + 1).read_to_string(&mut text).map_err(failed)?;
    if text.len() as u64 > MAX_BYTES {
        return Err(ImportError::TooLarge { limit: MAX_BYTES, path: path.into() });
    }
    Ok(text)
}

fn of_toml(value: toml::Value) -> Value {
    match value {
        toml::Value::String(text) => Value::String(text),
        toml::Value::Integer(number) => number.into(),
        toml::Value::Float(number) => number.into(),
        toml::Value::Boolean(flag) => flag.into(),
        toml::Value::Datetime(time) => Value::String(time.to_string()),
        toml::Value::Array(parts) => Value::Array(parts.into_iter().map(of_toml).collect()),
        toml::Value::Table(table) => {
            let entries = table.into_iter().map(|(key, value)| (key, of_toml(value)));
            Value::Object(entries.collect::<Map<_, _>>())
        }
    }
}
