//! Folders, and which files in them belong together: images, captions beside them, references of
//! the same name, metadata. Looks at names only; what is in the files is `scan`'s.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::ops::Bound;
use std::path::{Path, PathBuf};

use super::clip_folder;
use super::listing::FolderListing;
use super::metadata::{self, MetadataEntries};
use super::pairs::{InputsByOutput, ReferenceFolder, folder_pair};
use super::problem::{Problem, ProblemKind};
use super::roots::DataRoots;
use super::scan::MediaKinds;
use crate::archive;

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
    media: MediaKinds,
    roots: DataRoots,
    pub(super) candidates: Vec<ImageCandidate>,
    pub(super) entries: MetadataEntries,
    pub(super) problems: Vec<Problem>,
    /// Folders by their real paths, which ends loops of links.
    seen: BTreeSet<PathBuf>,
    /// Folders of references, likewise.
    set_apart: BTreeSet<PathBuf>,
}

/// What is known of a folder from those above it.
#[derive(Clone, Debug)]
struct FolderContext {
    repeats: u32,
    class: Option<String>,
    /// Where references for its images are: reference 1 first.
    references: Vec<PathBuf>,
}

/// Walks through a folder and all below. `references` are folders of references for it, and not
/// trained on if they are below it.
pub(super) fn walk(
    folder: &Path,
    references: &[PathBuf],
    media: MediaKinds,
    roots: &DataRoots,
) -> FolderWalk {
    let set_apart = references.iter().filter_map(|path| archive::real_path(path).ok()).collect();
    let roots = roots.clone();
    let mut walk = FolderWalk { media, roots, set_apart, ..FolderWalk::default() };
    walk.folder(folder, &FolderContext { repeats: 1, class: None, references: references.into() });
    walk
}

impl FolderWalk {
    fn folder(&mut self, path: &Path, above: &FolderContext) {
        let Some(place) = self.enter(path, above) else { return };
        let mut listing = match FolderListing::read(path) {
            Ok(listing) => listing,
            Err(error) => return self.skip(path, ProblemKind::unreadable(&error)),
        };
        if archive::is_archive(path) {
            for (member, why) in archive::refused(path) {
                self.skip(&member, ProblemKind::Unreadable { why });
            }
        }
        self.place_videos(&mut listing);
        for path in &listing.metadata {
            match self.roots.check(path) {
                Ok(()) => metadata::read(path, self.media, &mut self.entries, &mut self.problems),
                Err(kind) => self.skip(path, kind),
            }
        }
        let n_before = self.candidates.len();
        self.images(path, &listing, &place);
        self.clip_folders(path, &mut listing, &place);
        self.unused(&listing, n_before);
        self.folders(&listing, &place);
    }

    /// Videos are clips, or nothing that a model of images knows.
    fn place_videos(&self, listing: &mut FolderListing) {
        let videos = std::mem::take(&mut listing.videos);
        let into = match self.media {
            MediaKinds::Images => &mut listing.others,
            MediaKinds::ImagesAndClips => &mut listing.images,
        };
        into.extend(videos);
        into.sort();
    }

    /// Folders of frames become candidates, and are no folders any more.
    fn clip_folders(&mut self, folder: &Path, listing: &mut FolderListing, place: &FolderContext) {
        if self.media == MediaKinds::Images {
            return;
        }
        let is_among_clips = clip_folder::is_among_clips(folder);
        for path in std::mem::take(&mut listing.folders) {
            let beside = listing.captions.get(path.file_name().unwrap_or_default());
            let beside = beside.cloned().unwrap_or_default();
            let named = metadata::plain(&path);
            let is_named = is_among_clips || self.entries.contains_key(&named);
            let captions = clip_folder::captions(&path, beside, is_named);
            let Some(captions) = captions.filter(|_| !self.has_entry_below(&named)) else {
                listing.folders.push(path);
                continue;
            };
            if let Some(FolderContext { repeats, class, .. }) = self.enter(&path, place) {
                let references = Vec::new();
                self.candidates.push(ImageCandidate { path, captions, references, repeats, class });
            }
        }
    }

    /// Whether metadata names a file in a folder.
    fn has_entry_below(&self, folder: &Path) -> bool {
        let from = (Bound::Excluded(folder), Bound::Unbounded);
        let next = self.entries.range::<Path, _>(from).next();
        next.is_some_and(|(path, _)| path.starts_with(folder))
    }

    fn skip(&mut self, path: &Path, kind: ProblemKind) {
        self.problems.push(Problem::skipped(path, kind));
    }

    fn warn(&mut self, path: &Path, kind: ProblemKind) {
        self.problems.push(Problem::warning(path, kind));
    }

    /// What the folder's own name adds; nothing if it is not to be read.
    fn enter(&mut self, path: &Path, above: &FolderContext) -> Option<FolderContext> {
        if let Err(kind) = self.roots.check(path) {
            self.skip(path, kind);
            return None;
        }
        let real = match archive::real_path(path) {
            Ok(real) => real,
            Err(error) => {
                self.skip(path, ProblemKind::unreadable(&error));
                return None;
            }
        };
        // A link's own name counts; `.` has none.
        let own = if archive::is_archive(path) { path.file_stem() } else { path.file_name() };
        let name = own.or(real.file_name());
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
        let inputs = InputsByOutput::find(&listing.images, &mut self.problems);
        let images: Vec<&PathBuf> =
            listing.images.iter().filter(|path| !inputs.is_input(path)).collect();
        let stems: BTreeSet<&OsStr> = images.iter().filter_map(|path| path.file_stem()).collect();
        let read = |path: &PathBuf| ReferenceFolder::read(path, &stems, &mut self.problems);
        let mut references: Vec<ReferenceFolder> = place.references.iter().map(read).collect();
        self.shared_names(&images);
        for path in images {
            let stem = path.file_stem().unwrap_or_default();
            let captions = inputs.caption_stems(stem, &stems).into_iter();
            let captions = captions.filter_map(|stem| listing.captions.get(&stem));
            let mut own = inputs.inputs(stem);
            if own.is_empty() {
                own = self.references(path, &mut references);
            }
            self.candidates.push(ImageCandidate {
                path: path.clone(),
                captions: captions.flatten().cloned().collect(),
                references: own,
                repeats: place.repeats,
                class: place.class.clone(),
            });
        }
        for reference in references.iter().flat_map(ReferenceFolder::unpaired) {
            self.skip(reference, ProblemKind::ReferenceUnpaired { folder: folder.into() });
        }
    }

    fn shared_names(&mut self, images: &[&PathBuf]) {
        let mut first: BTreeMap<&OsStr, &Path> = BTreeMap::new();
        for path in images {
            let stem = path.file_stem().unwrap_or_default();
            if let Some(other) = first.get(stem) {
                self.warn(path, ProblemKind::DuplicateStem { other: other.to_path_buf() });
            }
            first.entry(stem).or_insert(path);
        }
    }

    /// Those of an image, from every folder.
    fn references(&mut self, image: &Path, folders: &mut [ReferenceFolder]) -> Vec<PathBuf> {
        let mut references = Vec::new();
        for folder in folders {
            let found = folder.take(image.file_stem().unwrap_or_default());
            if found.is_empty() {
                self.warn(image, ProblemKind::ReferenceMissing { folder: folder.path.clone() });
            }
            references.extend(found);
        }
        references
    }

    /// Nobody should believe that these are trained on. `n_before` candidates are of other folders.
    fn unused(&mut self, listing: &FolderListing, n_before: usize) {
        let candidates = &self.candidates[n_before..];
        let used: BTreeSet<PathBuf> =
            candidates.iter().flat_map(|image| &image.captions).cloned().collect();
        for path in listing.captions.values().flatten().filter(|path| !used.contains(*path)) {
            self.skip(path, ProblemKind::CaptionUnpaired);
        }
        for path in &listing.others {
            let is_table = path.extension().is_some_and(|ending| ending == "parquet");
            let kind = if is_table { ProblemKind::Parquet } else { ProblemKind::Ignored };
            self.skip(path, kind);
        }
    }

    fn folders(&mut self, listing: &FolderListing, place: &FolderContext) {
        let pair = folder_pair(&listing.folders);
        for path in &listing.folders {
            let references = match &pair {
                Some(pair) if pair.references.contains(path) => continue,
                Some(pair) if pair.target == *path => pair.references.clone(),
                // Folders below pair with those of the same name.
                _ => {
                    let name = path.file_name().unwrap_or_default();
                    place.references.iter().map(|folder| folder.join(name)).collect()
                }
            };
            let is_set_apart =
                archive::real_path(path).is_ok_and(|real| self.set_apart.contains(&real));
            if !is_set_apart {
                self.folder(path, &FolderContext { references, ..place.clone() });
            }
        }
    }
}

/// `10_sks dog` means ten times, and `sks dog` where there is no caption (kohya's folders).
fn repeats_and_class(name: &str) -> Option<(u32, Option<String>)> {
    let (digits, class) = name.split_once('_')?;
    let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    let repeats = digits.parse().ok().filter(|repeats| is_number && *repeats <= MOST_REPEATS)?;
    let class = class.trim();
    Some((repeats, (!class.is_empty()).then(|| class.to_owned())))
}
