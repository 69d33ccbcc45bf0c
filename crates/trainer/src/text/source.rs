//! Which files a job's texts are in, in an order that depends on nothing but their names, and what
//! form each has. Looks at names only.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use weights::checksum::{Hash, Stamp};
use weights::{Tick, WeightsError};

use crate::cache::hashes::Hashes;
use crate::data::{Problem, ProblemKind};
use crate::error::{Result, TrainerError};

/// How texts lie in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// The file is one text.
    Text,
    /// A record of JSON on each line.
    Lines,
    /// Tokens, made elsewhere with the same vocabulary.
    Tokens,
}

/// Endings of files, without the dot.
const ENDINGS: [(&str, Form); 7] = [
    ("txt", Form::Text),
    ("text", Form::Text),
    ("md", Form::Text),
    ("jsonl", Form::Lines),
    ("ndjson", Form::Lines),
    ("json", Form::Lines),
    ("bin", Form::Tokens),
];

/// A file with texts.
#[derive(Clone, Debug)]
pub(super) struct Source {
    pub path: PathBuf,
    pub form: Form,
    /// Of what is in it.
    pub hash: Hash,
    /// The file's stamp when its checksum was taken.
    pub stamp: Stamp,
}

/// The files of a path: itself, or all below it whose endings are known. What cannot be read is
/// listed and left out.
pub(super) fn find(
    path: &Path,
    hashes: &mut Hashes,
    tick: Tick<'_>,
    problems: &mut Vec<Problem>,
) -> Result<Vec<Source>> {
    let about = fs::metadata(path);
    let about =
        about.map_err(|source| TrainerError::Io { what: "read", path: path.into(), source })?;
    let mut found = Vec::new();
    if !about.is_dir() && !about.is_file() {
        // A pipe would be waited for.
        return Err(WeightsError::NotAFile { path: path.into() }.into());
    }
    if about.is_dir() {
        walk(path, &mut BTreeSet::new(), &mut found, problems);
    } else {
        // Whoever names a file means it, whatever it is called.
        found.push((path.to_path_buf(), form_of(path).unwrap_or(Form::Text)));
    }
    let mut sources = Vec::with_capacity(found.len());
    for (path, form) in found {
        match hashes.of(&path, tick) {
            Ok((hash, stamp)) => sources.push(Source { path, form, hash, stamp }),
            Err(error @ TrainerError::Weights(WeightsError::Cancelled)) => return Err(error),
            Err(error) => {
                let kind = ProblemKind::Unreadable { why: error.to_string() };
                problems.push(Problem::skipped(path, kind));
            }
        }
    }
    Ok(sources)
}

fn form_of(path: &Path) -> Option<Form> {
    let ending = path.extension()?;
    let known = ENDINGS.iter().find(|(known, _)| ending.eq_ignore_ascii_case(known));
    known.map(|(_, form)| *form)
}

/// Folders by their real paths, which ends loops of links.
fn walk(
    folder: &Path,
    seen: &mut BTreeSet<PathBuf>,
    found: &mut Vec<(PathBuf, Form)>,
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
        if path.is_dir() {
            walk(&path, seen, found, problems);
        } else if let Some(form) = form_of(&path).filter(|_| path.is_file()) {
            found.push((path, form));
        }
    }
}
