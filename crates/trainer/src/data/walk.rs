//! Folders, and which files in them belong together: images, captions beside them, references of
//! the same name, metadata. Looks at names only; what is in the files is `scan`'s.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};

use super::listing::FolderListing;
use super::metadata::{self, MetadataEntries};
use super::problem::{Problem, ProblemKind};

/// Most repeats in a folder's name. Chosen: more is a year, as in `2024_holidays`.
const MOST_REPEATS: u32 = 999;

/// A file that is named like an image, with what its place says of it.
#[derive(Debug)]
pub(super) struct ImageCandidate {
    pub(super) path: PathBuf,
    /// In the order in which they count.
    pub(super) captions: Vec<PathBuf>,
    pub(super) references: Vec<PathBuf>,
    pub(super) repeats: u32,
    /// From the folder's name.
    pub(super) class: Option<String>,
}

/// Everything found below a folder.
#[derive(Debug, Default)]
pub(super) struct FolderWalk {
    pub(super) candidates: Vec<ImageCandidate>,
    pub(super) entries: MetadataEntries,
    pub(super) problems: Vec<Problem>,
    /// Folders by their real paths, which ends loops of links.
    seen: BTreeSet<PathBuf>,
}

/// What is known of a folder from those above it.
#[derive(Clone, Debug)]
struct FolderContext {
    repeats: u32,
    class: Option<String>,
    /// Where references for its images are.
    references: Option<PathBuf>,
}

/// Walks through a folder and all below.
pub(super) fn walk(folder: &Path) -> FolderWalk {
    let mut walk = FolderWalk::default();
    walk.folder(folder, &FolderContext { repeats: 1, class: None, references: None });
    walk
}

impl FolderWalk {
    fn folder(&mut self, path: &Path, above: &FolderContext) {
        let Some(place) = self.enter(path, above) else { return };
        let listing = match FolderListing::read(path) {
            Ok(listing) => listing,
            Err(error) => return self.skip(path, ProblemKind::unreadable(&error)),
        };
        for path in &listing.metadata {
            metadata::read(path, &mut self.entries, &mut self.problems);
        }
        self.images(path, &listing, &place);
        self.unused(&listing);
        self.folders(&listing, &place);
    }

    fn skip(&mut self, path: &Path, kind: ProblemKind) {
        self.problems.push(Problem::skipped(path, kind));
    }

    fn warn(&mut self, path: &Path, kind: ProblemKind) {
        self.problems.push(Problem::warning(path, kind));
    }

    /// What the folder's own name adds; nothing if it is not to be read.
    fn enter(&mut self, path: &Path, above: &FolderContext) -> Option<FolderContext> {
        let real = match fs::canonicalize(path) {
            Ok(real) => real,
            Err(error) => {
                self.skip(path, ProblemKind::unreadable(&error));
                return None;
            }
        };
        // A link's own name counts; `.` has none.
        let name = path.file_name().or(real.file_name());
        let name = name.and_then(OsStr::to_str).and_then(repeats_and_class);
        if !self.seen.insert(real.clone()) {
            self.skip(path, ProblemKind::FolderTwice { target: real });
            return None;
        }
        match name {
            Some((0, _)) => {
                self.skip(path, ProblemKind::NoRepeats);
                None
            }
            Some((repeats, class)) => Some(FolderContext { repeats, class, ..above.clone() }),
            None => Some(above.clone()),
        }
    }

    fn images(&mut self, folder: &Path, listing: &FolderListing, place: &FolderContext) {
        let references = place.references.as_deref().map(references_by_stem).unwrap_or_default();
        let mut unpaired = references.clone();
        let mut first: BTreeMap<&OsStr, &Path> = BTreeMap::new();
        for path in &listing.images {
            let stem = path.file_stem().unwrap_or_default();
            if let Some(other) = first.get(stem) {
                self.warn(path, ProblemKind::DuplicateStem { other: other.to_path_buf() });
            }
            first.entry(stem).or_insert(path);
            if let Some(folder) =
                place.references.as_ref().filter(|_| !references.contains_key(stem))
            {
                self.warn(path, ProblemKind::ReferenceMissing { folder: folder.clone() });
            }
            unpaired.remove(stem);
            self.candidates.push(ImageCandidate {
                path: path.clone(),
                captions: listing.captions.get(stem).cloned().unwrap_or_default(),
                references: references.get(stem).cloned().into_iter().collect(),
                repeats: place.repeats,
                class: place.class.clone(),
            });
        }
        for reference in unpaired.values() {
            self.skip(reference, ProblemKind::ReferenceUnpaired { folder: folder.into() });
        }
    }

    /// Nobody should believe that these are trained on.
    fn unused(&mut self, listing: &FolderListing) {
        let stems: BTreeSet<&OsStr> =
            listing.images.iter().filter_map(|path| path.file_stem()).collect();
        let unpaired =
            listing.captions.iter().filter(|(stem, _)| !stems.contains(stem.as_os_str()));
        for path in unpaired.flat_map(|(_, paths)| paths) {
            self.skip(path, ProblemKind::CaptionUnpaired);
        }
        for path in &listing.others {
            self.skip(path, ProblemKind::Ignored);
        }
    }

    fn folders(&mut self, listing: &FolderListing, place: &FolderContext) {
        let named = |name: &str| {
            let is_named =
                |path: &&PathBuf| path.file_name().is_some_and(|n| n.eq_ignore_ascii_case(name));
            listing.folders.iter().find(is_named)
        };
        let pair = named("images").zip(named("control"));
        for path in &listing.folders {
            let references = match (pair, &place.references) {
                (Some((_, control)), _) if control == path => continue,
                (Some((images, control)), _) if images == path => Some(control.clone()),
                // Folders below pair with those of the same name.
                (_, Some(references)) => path.file_name().map(|name| references.join(name)),
                _ => None,
            };
            self.folder(path, &FolderContext { references, ..place.clone() });
        }
    }
}

/// A folder that is not there has none; its images are then reported to lack theirs.
fn references_by_stem(folder: &Path) -> BTreeMap<OsString, PathBuf> {
    let images = FolderListing::read(folder).unwrap_or_default().images;
    // In reverse, so that the first of two with one name stays.
    let named = |path: PathBuf| (path.file_stem().unwrap_or_default().to_owned(), path);
    images.into_iter().rev().map(named).collect()
}

/// `10_sks dog` means ten times, and `sks dog` where there is no caption (kohya's folders).
fn repeats_and_class(name: &str) -> Option<(u32, Option<String>)> {
    let (digits, class) = name.split_once('_')?;
    let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    let repeats = digits.parse().ok().filter(|repeats| is_number && *repeats <= MOST_REPEATS)?;
    let class = class.trim();
    Some((repeats, (!class.is_empty()).then(|| class.to_owned())))
}
