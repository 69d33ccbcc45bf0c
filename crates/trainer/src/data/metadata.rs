//! `metadata.jsonl`: a line of JSON per picture, in the two forms that other programs write.
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
use super::text;

/// The file's name.
pub(super) const NAME: &str = "metadata.jsonl";

/// What metadata says of one picture.
#[derive(Debug)]
pub(super) struct Entry {
    /// The metadata file.
    pub(super) from: PathBuf,
    pub(super) caption: Option<String>,
    pub(super) control: Option<PathBuf>,
}

/// Entries by the picture's path.
pub(super) type Entries = BTreeMap<PathBuf, Entry>;

#[derive(Deserialize)]
struct Line {
    file_name: Option<PathBuf>,
    image_path: Option<PathBuf>,
    text: Option<String>,
    caption: Option<String>,
    control_path: Option<PathBuf>,
}

/// Reads a file line by line; a bad line costs that line.
pub(super) fn read(path: &Path, entries: &mut Entries, problems: &mut Vec<Problem>) {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) => {
            return problems.push(Problem::skipped(path, ProblemKind::unreadable(&error)));
        }
    };
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&bytes);
    for (at, line) in bytes.split(|byte| *byte == b'\n').enumerate() {
        if line.trim_ascii().is_empty() {
            continue;
        }
        if let Err(kind) = read_line(path, at + 1, line, entries) {
            problems.push(Problem::skipped(path, kind));
        }
    }
}

fn read_line(
    path: &Path,
    number: usize,
    line: &[u8],
    entries: &mut Entries,
) -> Result<(), ProblemKind> {
    let malformed = |why: String| ProblemKind::MetadataMalformed { line: number, why };
    let line: Line = serde_json::from_slice(line).map_err(|error| malformed(error.to_string()))?;
    let name = line.file_name.or(line.image_path);
    let name = name.ok_or_else(|| malformed("has neither file_name nor image_path".into()))?;
    let picture = existing(path, number, &name)?;
    let control = line.control_path.map(|name| existing(path, number, &name)).transpose()?;
    if entries.contains_key(&picture) {
        return Err(malformed(format!("names {} again", name.display())));
    }
    let caption = line.text.or(line.caption).map(|caption| text::tidied(&caption));
    entries.insert(picture, Entry { from: path.into(), caption, control });
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

/// Without `.` and `name/..`, so that one file has one path.
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
