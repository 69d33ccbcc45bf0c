//! `metadata.jsonl`, a line of JSON per image, or `metadata.csv`, a row per image, in the two forms
//! that other programs write: Hugging Face's imagefolder has `file_name` and `text`.
//!
//! ```text
//! {"file_name": "a.png", "text": "a dog"}
//! {"image_path": "a.png", "caption": "a dog", "control_path": "edges/a.png"}
//! ```

use std::collections::BTreeMap;
use std::fs;
use std::path::{Component, Path, PathBuf};

use serde::Deserialize;

use super::problem::{Problem, ProblemKind};
use super::{csv, text};

/// The files' names.
pub(super) const NAMES: [&str; 2] = ["metadata.jsonl", "metadata.csv"];

/// What metadata says of one image.
#[derive(Debug)]
pub(super) struct MetadataEntry {
    /// The metadata file.
    pub(super) from: PathBuf,
    pub(super) caption: Option<String>,
    pub(super) references: Vec<PathBuf>,
}

/// Entries by the image's path.
pub(super) type MetadataEntries = BTreeMap<PathBuf, MetadataEntry>;

#[derive(Deserialize)]
struct MetadataLine {
    file_name: Option<PathBuf>,
    image_path: Option<PathBuf>,
    text: Option<String>,
    caption: Option<String>,
    control_path: Option<PathBuf>,
}

/// Reads a file line by line; a bad line is skipped and reported.
pub(super) fn read(path: &Path, entries: &mut MetadataEntries, problems: &mut Vec<Problem>) {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) => {
            return problems.push(Problem::skipped(path, ProblemKind::unreadable(&error)));
        }
    };
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&bytes);
    let is_table = path.extension().is_some_and(|ending| ending == "csv");
    for (number, line) in if is_table { rows(bytes) } else { lines(bytes) } {
        let malformed = |why: String| ProblemKind::MetadataMalformed { line: number, why };
        let line = line.map_err(malformed);
        if let Err(kind) = line.and_then(|line| enter(path, number, line, entries)) {
            problems.push(Problem::skipped(path, kind));
        }
    }
}

/// The entry of each line, or its error; counted from 1.
type MetadataLines = Vec<(usize, Result<MetadataLine, String>)>;

fn lines(bytes: &[u8]) -> MetadataLines {
    let lines = (1..).zip(bytes.split(|byte| *byte == b'\n'));
    let said = lines.filter(|(_, line)| !line.trim_ascii().is_empty());
    let read = |line| serde_json::from_slice(line).map_err(|error| error.to_string());
    said.map(|(number, line)| (number, read(line))).collect()
}

/// Rows of a table, by the names in its first one. They are counted as spreadsheets do.
fn rows(bytes: &[u8]) -> MetadataLines {
    let text = |cell: Vec<u8>| String::from_utf8(cell).map_err(|_| "is not UTF-8".to_owned());
    let mut rest = bytes;
    let mut rows = Vec::new();
    let mut names: Option<Vec<Vec<u8>>> = None;
    for number in 1.. {
        let Some(row) = csv::read_row(rest, b',', true) else { break };
        rest = &rest[row.bytes..];
        let Some(names) = &names else {
            names = Some(row.cells);
            continue;
        };
        if row.is_blank() {
            continue;
        }
        let mut cells: BTreeMap<&[u8], Vec<u8>> =
            names.iter().map(Vec::as_slice).zip(row.cells).collect();
        let mut cell = |name: &str| {
            cells.remove(name.as_bytes()).filter(|cell| !cell.is_empty()).map(text).transpose()
        };
        let mut line = || {
            Ok(MetadataLine {
                file_name: cell("file_name")?.map(Into::into),
                image_path: cell("image_path")?.map(Into::into),
                text: cell("text")?,
                caption: cell("caption")?,
                control_path: cell("control_path")?.map(Into::into),
            })
        };
        rows.push((number, line()));
    }
    rows
}

fn enter(
    path: &Path,
    number: usize,
    line: MetadataLine,
    entries: &mut MetadataEntries,
) -> Result<(), ProblemKind> {
    let malformed = |why: String| ProblemKind::MetadataMalformed { line: number, why };
    let name = line.file_name.or(line.image_path);
    let name = name.ok_or_else(|| malformed("has neither file_name nor image_path".into()))?;
    let image = existing(path, number, &name)?;
    let references = line.control_path.iter().map(|name| existing(path, number, name));
    let references = references.collect::<Result<Vec<_>, _>>()?;
    if entries.contains_key(&image) {
        return Err(malformed(format!("names {} again", name.display())));
    }
    let caption = line.text.or(line.caption).map(|caption| text::tidied(&caption));
    entries.insert(image, MetadataEntry { from: path.into(), caption, references });
    Ok(())
}

/// A path beside the metadata file, if there is a file.
fn existing(metadata: &Path, line: usize, name: &Path) -> Result<PathBuf, ProblemKind> {
    let path = plain(&metadata.parent().unwrap_or(Path::new("")).join(name));
    if path.is_file() {
        return Ok(path);
    }
    Err(ProblemKind::MetadataMissingFile { line, name: name.display().to_string() })
}

/// Normalises `.` and `name/..`, so that one file has one path.
pub(super) fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for component in path.components() {
        match component {
            Component::CurDir => {}
            Component::ParentDir if plain.file_name().is_some() => {
                plain.pop();
            }
            other => plain.push(other),
        }
    }
    plain
}
