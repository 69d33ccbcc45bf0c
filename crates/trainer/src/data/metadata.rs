//! `metadata.jsonl`, a line of JSON per image, or `metadata.csv`, a row per image, in the forms
//! that other programs write: Hugging Face's imagefolder, musubi, `DiffSynth`.
//!
//! ```text
//! {"file_name": "a.png", "text": "a dog"}
//! {"image_path": "a.png", "caption": "a dog", "control_path_0": "in/a.png", "control_path_1": "in/b.png"}
//! {"video_path": "walk.mp4", "caption": "a dog walks"}     a folder of frames is named in the same way
//! {"image": "a.png", "prompt": "a dog", "edit_image": ["in/a.png", "in/b.png"]}
//! ```

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

use machine::Bytes;
use serde_json::{Map, Value};

use super::problem::{Problem, ProblemKind};
use super::scan::MediaKinds;
use super::{csv, text};
use crate::archive;

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

/// Columns that name the image, its caption and its references; of the first two, the first one found
/// is taken.
const IMAGE: [&str; 3] = ["file_name", "image_path", "image"];
const IMAGE_OR_CLIP: [&str; 5] = ["file_name", "video_path", "video", "image_path", "image"];
const CAPTION: [&str; 3] = ["text", "caption", "prompt"];
const REFERENCES: [&str; 5] =
    ["control_path", "edit_image", "reference", "references", "conditioning_image"];

/// The columns of one image.
type MetadataLine = Map<String, Value>;

/// The caption in what `WebDataset` says of a sample.
pub(super) fn sample_caption(bytes: &[u8]) -> Result<String, ProblemKind> {
    let malformed = |why: String| ProblemKind::MetadataMalformed { line: 1, why };
    let sample: MetadataLine =
        serde_json::from_slice(bytes).map_err(|error| malformed(error.to_string()))?;
    let caption = first_text(&sample, &CAPTION).map_err(malformed)?;
    let caption = caption.ok_or_else(|| malformed("has no text, caption or prompt".into()))?;
    Ok(text::tidied(caption))
}

/// Reads a file line by line; a bad line is skipped and reported.
pub(super) fn read(
    path: &Path,
    media: MediaKinds,
    entries: &mut MetadataEntries,
    problems: &mut Vec<Problem>,
) {
    let bytes = match archive::read(path) {
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
        if let Err(kind) = line.and_then(|line| enter(path, number, &line, media, entries)) {
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
        let cells = names.iter().zip(row.cells).filter(|(_, cell)| !cell.is_empty());
        // Others may hold anything.
        let known = cells.filter_map(|(name, cell)| Some((known_column(name)?.to_owned(), cell)));
        let line = known.map(|(name, cell)| Ok((name, Value::String(text(cell)?))));
        rows.push((number, line.collect()));
    }
    rows
}

fn known_column(name: &[u8]) -> Option<&str> {
    let is_known = |name: &&str| {
        IMAGE_OR_CLIP.contains(name) || CAPTION.contains(name) || reference_rank(name).is_some()
    };
    std::str::from_utf8(name).ok().filter(is_known)
}

fn enter(
    path: &Path,
    number: usize,
    line: &MetadataLine,
    media: MediaKinds,
    entries: &mut MetadataEntries,
) -> Result<(), ProblemKind> {
    let malformed = |why: String| ProblemKind::MetadataMalformed { line: number, why };
    let (columns, expected) = match media {
        MediaKinds::Images => (&IMAGE[..], "has no file_name, image_path or image"),
        MediaKinds::ImagesAndClips => {
            (&IMAGE_OR_CLIP[..], "has no file_name, video_path, video, image_path or image")
        }
    };
    let name = first_text(line, columns).map_err(malformed)?;
    let name = name.ok_or_else(|| malformed(expected.into()))?;
    let image = existing(path, number, Path::new(name), media)?;
    if entries.contains_key(&image) {
        return Err(malformed(format!("names {name} again")));
    }
    let caption = first_text(line, &CAPTION).map_err(malformed)?;
    if let Some(bytes) = caption.map(|text| text.len() as u64).filter(|n| *n > text::MOST_BYTES) {
        let [bytes, most] = [bytes, text::MOST_BYTES].map(Bytes);
        return Err(malformed(format!("its caption is {bytes} long, most is {most}")));
    }
    let caption = caption.map(text::tidied);
    // Whether they are there is seen when they are read: without one, the image is left out.
    let references = references(line).map_err(malformed)?;
    let references = references.iter().map(|name| beside(path, Path::new(name))).collect();
    entries.insert(image, MetadataEntry { from: path.into(), caption, references });
    Ok(())
}

/// The text of the first of these columns that is there.
fn first_text<'a>(line: &'a MetadataLine, names: &[&str]) -> Result<Option<&'a str>, String> {
    let found = names
        .iter()
        .find_map(|name| Some((name, line.get(*name)?)).filter(|(_, value)| !value.is_null()));
    let Some((name, value)) = found else { return Ok(None) };
    value.as_str().map(Some).ok_or_else(|| format!("{name} is not text"))
}

/// All that the columns name, in their order.
fn references(line: &MetadataLine) -> Result<Vec<String>, String> {
    let ranked = line.iter().filter_map(|(name, value)| Some((reference_rank(name)?, name, value)));
    let mut columns: Vec<_> = ranked.collect();
    columns.sort_by_key(|(rank, ..)| *rank);
    let mut references = Vec::new();
    for (_, name, value) in columns {
        let named = names(value);
        references
            .extend(named.ok_or_else(|| format!("{name} is neither text nor a list of texts"))?);
    }
    references.retain(|name| !name.is_empty());
    Ok(references)
}

/// What columns of references are sorted by: `control_path_0`, `control_path_1`, … by their numbers.
fn reference_rank(column: &str) -> Option<(usize, u32)> {
    let numbered = || column.strip_prefix("control_path_")?.parse().ok();
    match REFERENCES.iter().position(|known| *known == column) {
        Some(position) => Some((position, 0)),
        None => numbered().map(|number| (0, number)),
    }
}

/// One name or several; a cell of a table may hold a list as JSON has it.
fn names(value: &Value) -> Option<Vec<String>> {
    match value {
        Value::Null => Some(Vec::new()),
        Value::String(text) => {
            Some(serde_json::from_str(text).unwrap_or_else(|_| vec![text.clone()]))
        }
        Value::Array(values) => {
            values.iter().map(|value| value.as_str().map(str::to_owned)).collect()
        }
        _ => None,
    }
}

/// A path beside the metadata file, if there is a file.
fn existing(
    metadata: &Path,
    line: usize,
    name: &Path,
    media: MediaKinds,
) -> Result<PathBuf, ProblemKind> {
    let path = beside(metadata, name);
    // A folder may be a clip.
    if archive::is_file(&path) || (media == MediaKinds::ImagesAndClips && path.is_dir()) {
        return Ok(path);
    }
    Err(ProblemKind::MetadataMissingFile { line, name: name.display().to_string() })
}

fn beside(metadata: &Path, name: &Path) -> PathBuf {
    plain(&metadata.parent().unwrap_or(Path::new("")).join(name))
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
