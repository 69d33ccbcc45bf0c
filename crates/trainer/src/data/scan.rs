//! Scans a training folder: images with their captions, sizes, repeats and controls, and all problems,
//! before any work is done. Reads names and headers of files; only a JPEG or PNG whose end is not where
//! it should be is read through.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use weights::{BytesDoneFn, WeightsError};

use super::metadata::{MetadataEntry, plain};
use super::problem::{Problem, ProblemKind};
use super::walk::{ImageCandidate, walk};
use super::{header, text};
use crate::error::{Result, TrainerError};

/// Shortest side of an image. Chosen: eight latent pixels, below which a VAE sees nothing but edges.
pub const MIN_SIDE: u32 = 64;

/// An image to train with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageItem {
    /// The image.
    pub path: PathBuf,
    /// Its caption, trimmed; empty if there is none.
    pub caption: String,
    /// Width and height, the right way up.
    pub size: [u32; 2],
    /// How often an epoch shows it.
    pub repeats: u32,
    /// The control image, for models that take one.
    pub control: Option<PathBuf>,
}

/// A folder as found, both lists sorted by path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FolderScan {
    /// What can be trained with.
    pub items: Vec<ImageItem>,
    /// What cannot, or should be looked at.
    pub problems: Vec<Problem>,
}

/// Looks through a folder and all below. Fails only if the folder itself cannot be read, or `tick`, which is asked
/// before each image, says to stop.
pub fn scan(folder: &Path, tick: BytesDoneFn<'_>) -> Result<FolderScan> {
    fs::read_dir(folder).map_err(|source| TrainerError::Io {
        what: "read",
        path: folder.into(),
        source,
    })?;
    let found = walk(folder);
    let mut entries = found.entries;
    let mut problems = found.problems;
    // Whatever it is called, metadata knows it.
    problems.retain(|problem| {
        problem.kind != ProblemKind::Ignored || !entries.contains_key(&plain(&problem.path))
    });
    let mut scan = FolderScan { items: Vec::new(), problems };
    let controls: BTreeSet<PathBuf> =
        entries.values().filter_map(|entry| entry.control.clone()).collect();
    for candidate in found.candidates {
        if !tick(0) {
            return Err(WeightsError::Cancelled.into());
        }
        let path = plain(&candidate.path);
        let entry = entries.remove(&path);
        // A control is no image to train with, unless metadata says so.
        if entry.is_some() || !controls.contains(&path) {
            scan.add(candidate, entry);
        }
    }
    // What metadata names and folders did not show: images elsewhere, or with odd names.
    for (path, entry) in entries {
        let (captions, control) = (Vec::new(), None);
        scan.add(ImageCandidate { path, captions, control, repeats: 1, class: None }, Some(entry));
    }
    scan.items.sort_by(|a, b| a.path.cmp(&b.path));
    // Problems of one file stay in the order in which they were found.
    scan.problems.sort_by(|a, b| a.path.cmp(&b.path));
    // One control may belong to several images.
    scan.problems.dedup();
    Ok(scan)
}

impl FolderScan {
    fn add(&mut self, candidate: ImageCandidate, entry: Option<MetadataEntry>) {
        let Some(size) = self.image(&candidate.path) else { return };
        let named = entry.as_ref().and_then(|entry| entry.control.clone());
        let control = named.or_else(|| candidate.control.clone());
        if let Some(control) = &control
            && self.image(control).is_none()
        {
            let kind = ProblemKind::ControlUnusable { control: control.clone() };
            return self.problems.push(Problem::skipped(candidate.path, kind));
        }
        let caption = self.caption(&candidate, entry);
        let ImageCandidate { path, repeats, .. } = candidate;
        self.items.push(ImageItem { path, caption, size, repeats, control });
    }

    /// The size of an image that can be used.
    fn image(&mut self, path: &Path) -> Option<[u32; 2]> {
        let header = match header::read(path) {
            Ok(header) => header,
            Err(kind) => {
                self.problems.push(Problem::skipped(path, kind));
                return None;
            }
        };
        let size = header.size;
        if size.iter().any(|side| *side < MIN_SIDE) {
            let kind = ProblemKind::TooSmall { size, least: MIN_SIDE };
            self.problems.push(Problem::skipped(path, kind));
            return None;
        }
        if header.is_animated {
            self.problems.push(Problem::warning(path, ProblemKind::Animated));
        }
        Some(size)
    }

    /// From metadata, else from a file beside, else from the folder's name.
    fn caption(&mut self, candidate: &ImageCandidate, entry: Option<MetadataEntry>) -> String {
        let named = entry.and_then(|entry| Some((entry.from, entry.caption?)));
        let mut captions: Vec<(PathBuf, String)> = named.into_iter().collect();
        for path in &candidate.captions {
            match text::read(path) {
                Ok(text) => captions.push((path.clone(), text)),
                Err(kind) => self.problems.push(Problem::warning(path, kind)),
            }
        }
        let mut warn = |kind| self.problems.push(Problem::warning(&candidate.path, kind));
        let mut captions = captions.into_iter();
        let Some((taken, caption)) = captions.next() else {
            // A caption file that could not be read has been reported. The folder's words are not
            // put in its place: somebody wrote others.
            return match (&candidate.class, candidate.captions.is_empty()) {
                (Some(class), true) => class.clone(),
                (None, true) => {
                    warn(ProblemKind::CaptionMissing);
                    String::new()
                }
                _ => String::new(),
            };
        };
        if captions.any(|(_, other)| other != caption) {
            warn(ProblemKind::CaptionTwice { taken });
        }
        if caption.is_empty() {
            warn(ProblemKind::CaptionEmpty);
        }
        caption
    }
}
