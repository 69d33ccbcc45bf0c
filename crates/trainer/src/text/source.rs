//! Which files a job's texts are in, in an order that depends on nothing but their names, and what
//! form each has by its name.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use weights::checksum::{FileStamp, Hash};
use weights::{BytesDoneFn, WeightsError};

use super::foreign;
use crate::data::fault::TextFault;
use crate::data::roots::DataRoots;
use crate::data::{Problem, ProblemKind};
use crate::error::{Result, TrainerError};
use crate::hashes::HashCache;

/// How texts lie in a file. Names say it first; `read` looks again when a file is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TextForm {
    /// The file is one text.
    Text,
    /// A record of JSON on each line.
    Lines,
    /// Records that are parts of one JSON list, or go over several lines.
    Values,
    /// A row for each record, below one with the names of its columns; what is between cells.
    Table(u8),
    /// Tokens, made elsewhere with the same vocabulary.
    Tokens,
}

/// Endings of files, without the dot.
const ENDINGS: [(&str, TextForm); 9] = [
    ("txt", TextForm::Text),
    ("text", TextForm::Text),
    ("md", TextForm::Text),
    ("jsonl", TextForm::Lines),
    ("ndjson", TextForm::Lines),
    ("json", TextForm::Lines),
    ("csv", TextForm::Table(b',')),
    ("tsv", TextForm::Table(b'\t')),
    ("bin", TextForm::Tokens),
];

/// A file with texts.
#[derive(Clone, Debug)]
pub(super) struct TextSource {
    pub path: PathBuf,
    pub form: TextForm,
    /// Of what is in it.
    pub hash: Hash,
    /// The file's stamp when its checksum was taken.
    pub stamp: FileStamp,
}

/// The files of a path: itself, or all below it whose endings are known. What cannot be read, or does
/// not say what it is, is listed and left out; hidden files are not even listed.
pub(super) fn find(
    path: &Path,
    follow_links: bool,
    hashes: &mut HashCache,
    tick: BytesDoneFn<'_>,
    problems: &mut Vec<Problem>,
) -> Result<Vec<TextSource>> {
    let about = fs::metadata(path);
    let about =
        about.map_err(|source| TrainerError::Io { what: "read", path: path.into(), source })?;
    let mut found = Vec::new();
    if !about.is_dir() && !about.is_file() {
        // A pipe would be waited for.
        return Err(WeightsError::NotAFile { path: path.into() }.into());
    }
    if about.is_dir() {
        let roots = DataRoots::new([path], follow_links);
        walk(path, &roots, &mut BTreeSet::new(), &mut found, problems);
    } else {
        // Whoever names a file means it, whatever it is called.
        found.push((path.to_path_buf(), form_by_name(path).unwrap_or(TextForm::Text)));
    }
    let mut sources = Vec::with_capacity(found.len());
    for (path, form) in found {
        match hashes.hash_file(&path, tick) {
            Ok((hash, stamp)) => sources.push(TextSource { path, form, hash, stamp }),
            Err(error @ TrainerError::Weights(WeightsError::Cancelled)) => return Err(error),
            Err(error) => {
                let kind = ProblemKind::Unreadable { why: error.to_string() };
                problems.push(Problem::skipped(path, kind));
            }
        }
    }
    Ok(sources)
}

fn form_by_name(path: &Path) -> Option<TextForm> {
    let ending = path.extension()?;
    let known = ENDINGS.iter().find(|(known, _)| ending.eq_ignore_ascii_case(known));
    known.map(|(_, form)| *form)
}

/// Of a file that nobody named, so that its name has to say what it is.
fn form_in_folder(path: &Path) -> std::result::Result<TextForm, TextFault> {
    if foreign::is_about(path) {
        return Err(TextFault::About);
    }
    // A pipe would be waited for.
    if let Some(form) = form_by_name(path).filter(|_| path.is_file()) {
        return Ok(form);
    }
    let ending = path.extension().map(|ending| ending.to_string_lossy().into_owned());
    Err(foreign::by_name(path).unwrap_or(TextFault::Ending { ending }))
}

/// Folders by their real paths, which ends loops of links.
fn walk(
    folder: &Path,
    roots: &DataRoots,
    seen: &mut BTreeSet<PathBuf>,
    found: &mut Vec<(PathBuf, TextForm)>,
    problems: &mut Vec<Problem>,
) {
    let unreadable =
        |error: std::io::Error| ProblemKind::Unreadable { why: error.to_string().to_lowercase() };
    let listed = fs::canonicalize(folder).and_then(|real| {
        let entries = fs::read_dir(folder)?.map(|entry| entry.map(|entry| entry.path()));
        Ok((real, entries.collect::<std::io::Result<Vec<_>>>()?))
    });
    let (real, mut paths) = match listed {
        Ok(listed) => listed,
        Err(error) => return problems.push(Problem::skipped(folder, unreadable(error))),
    };
    if !seen.insert(real.clone()) {
        return problems.push(Problem::skipped(folder, ProblemKind::FolderTwice { target: real }));
    }
    paths.sort();
    for path in paths {
        let is_hidden = path.file_name().is_none_or(|name| name.to_string_lossy().starts_with('.'));
        if is_hidden {
            continue;
        }
        if let Err(kind) = roots.check(&path) {
            problems.push(Problem::skipped(path, kind));
        } else if path.is_dir() {
            walk(&path, roots, seen, found, problems);
        } else {
            match form_in_folder(&path) {
                Ok(form) => found.push((path, form)),
                Err(fault) => {
                    problems.push(Problem::skipped(path, ProblemKind::Text { at: None, fault }));
                }
            }
        }
    }
}
