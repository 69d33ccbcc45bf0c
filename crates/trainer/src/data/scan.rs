//! Scans a training folder: images with their captions, sizes, repeats and references, and all problems,
//! before any work is done. Reads names and headers of files; only a JPEG or PNG whose end is not where
//! it should be is read through.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use weights::{BytesDoneFn, WeightsError};

use super::clip::{self, Media, SizedClip, TrainingClip};
use super::mask::ImageMask;
use super::metadata::{MetadataEntries, MetadataEntry, plain};
use super::problem::{Problem, ProblemKind};
use super::roots::DataRoots;
use super::walk::{ImageCandidate, walk};
use super::{header, listing, text};
use crate::archive;
use crate::error::{Result, TrainerError};
use crate::read_ahead::{ReadAhead, read_ahead};

/// Shortest side of an image. Chosen: eight latent pixels, below which a VAE sees nothing but edges.
pub const MIN_SIDE: u32 = 64;

/// Most references of an image. Taken: FLUX.2 klein takes four, and other models fewer.
pub const MAX_REFERENCES: usize = 4;

/// What is looked for in a folder.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MediaKinds {
    /// Images; of animated ones the first frame, and no videos.
    #[default]
    Images,
    /// Images, and clips of any kind.
    ImagesAndClips,
}

/// How a folder is looked through.
#[derive(Clone, Copy, Debug, Default)]
pub struct ScanOptions {
    /// What is looked for.
    pub media: MediaKinds,
    /// Whether files may lie outside the folder, by links or by paths in metadata.
    pub follow_links: bool,
}

impl From<MediaKinds> for ScanOptions {
    fn from(media: MediaKinds) -> Self {
        Self { media, follow_links: false }
    }
}

/// An image or clip to train with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageItem {
    /// The image, the clip, or the folder of its frames.
    pub path: PathBuf,
    /// Its caption, trimmed; empty if there is none.
    pub caption: String,
    /// Where that is from.
    pub caption_source: CaptionSource,
    /// Width and height, the right way up.
    pub size: [u32; 2],
    /// How often an epoch shows it.
    pub repeats: u32,
    /// What it was made from, for image-editing models; reference 1 first, at most
    /// [`MAX_REFERENCES`].
    pub references: Vec<ReferenceImage>,
    /// Of a clip, its frames.
    pub clip: Option<Arc<TrainingClip>>,
    /// Which part of it the loss counts; all of it without one. Found by `mask`.
    pub mask: Option<ImageMask>,
}

/// Where a caption is from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum CaptionSource {
    /// There is none.
    #[default]
    Nowhere,
    /// The name of the folder.
    FolderName,
    /// A file beside the image, whether it could be read or not.
    File(PathBuf),
    /// A metadata file, which counts before any other.
    Metadata,
}

impl CaptionSource {
    fn of(candidate: &ImageCandidate, entry: Option<&MetadataEntry>) -> Self {
        if entry.is_some_and(|entry| entry.caption.is_some()) {
            return Self::Metadata;
        }
        match (candidate.captions.first(), &candidate.class) {
            (Some(path), _) => Self::File(path.clone()),
            (None, Some(_)) => Self::FolderName,
            (None, None) => Self::Nowhere,
        }
    }
}

/// An image that an image-editing model is given beside the prompt (other trainers: control image).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReferenceImage {
    /// The image.
    pub path: PathBuf,
    /// Width and height, the right way up.
    pub size: [u32; 2],
}

/// A folder as found, both lists sorted by path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FolderScan {
    /// What can be trained with.
    pub items: Vec<ImageItem>,
    /// What cannot, or should be looked at.
    pub problems: Vec<Problem>,
}

/// Looks through a folder and all below. `references` are folders of reference images for those in `folder`, by name.
/// Fails only if one of these folders cannot be read, or `tick`, which is asked before each image, says to stop.
pub fn scan(
    folder: &Path,
    references: &[PathBuf],
    options: impl Into<ScanOptions>,
    tick: BytesDoneFn<'_>,
) -> Result<FolderScan> {
    let ScanOptions { media, follow_links } = options.into();
    let folders = || std::iter::once(folder).chain(references.iter().map(PathBuf::as_path));
    for path in folders() {
        let read = |source| TrainerError::Io { what: "read", path: path.into(), source };
        archive::children(path).map_err(read)?;
    }
    let roots = DataRoots::new(folders(), follow_links);
    let found = walk(folder, references, media, &roots);
    let mut entries = found.entries;
    let mut problems = found.problems;
    let references: BTreeSet<PathBuf> =
        entries.values().flat_map(|entry| entry.references.clone()).collect();
    problems.retain(|problem| !is_settled(problem, &entries, &references));
    let looked = look_at_videos(&found.candidates, media, &roots, tick)?;
    let n_unread = BTreeMap::new();
    let mut scan = ScanBuilder { media, roots, items: Vec::new(), problems, looked, n_unread };
    for candidate in found.candidates {
        if !tick(0) {
            return Err(WeightsError::Cancelled.into());
        }
        let path = plain(&candidate.path);
        let entry = entries.remove(&path);
        // A reference is no image to train with, unless metadata says so.
        if entry.is_some() || !references.contains(&path) {
            scan.add(candidate, entry);
        }
    }
    // What metadata names and folders did not show: images elsewhere, or with odd names.
    for (path, entry) in entries {
        let (captions, references) = (Vec::new(), Vec::new());
        let candidate = ImageCandidate { path, captions, references, repeats: 1, class: None };
        scan.add(candidate, Some(entry));
    }
    Ok(scan.finish())
}

/// Programs that look at videos at once. Chosen: each takes some 50 ms, most of which is its start.
const MOST_PROGRAMS: ReadAhead = ReadAhead::by(16);

/// What videos are, all at once: each is looked at by a program of its own.
fn look_at_videos(
    candidates: &[ImageCandidate],
    media: MediaKinds,
    roots: &DataRoots,
    tick: BytesDoneFn<'_>,
) -> Result<LookedVideos> {
    let mut looked = LookedVideos::new();
    let is_video = |path: &&PathBuf| media == MediaKinds::ImagesAndClips && listing::is_video(path);
    let videos = candidates.iter().map(|it| &it.path).filter(is_video);
    let videos: Vec<&PathBuf> = videos.filter(|path| roots.check(path).is_ok()).collect();
    thread::scope(|scope| {
        for (index, media) in read_ahead(scope, &videos, MOST_PROGRAMS, |path| clip::look(path)) {
            if !tick(0) {
                return Err(WeightsError::Cancelled.into());
            }
            looked.insert(videos[index].clone(), media);
        }
        Ok(looked)
    })
}

type LookedVideos = BTreeMap<PathBuf, std::result::Result<Media, ProblemKind>>;

/// Whether metadata says what the name does not.
fn is_settled(
    problem: &Problem,
    entries: &MetadataEntries,
    references: &BTreeSet<PathBuf>,
) -> bool {
    let path = plain(&problem.path);
    match problem.kind {
        ProblemKind::Ignored => entries.contains_key(&path) || references.contains(&path),
        ProblemKind::ReferenceMissing { .. } => {
            entries.get(&path).is_some_and(|entry| !entry.references.is_empty())
        }
        ProblemKind::ReferenceUnpaired { .. } => references.contains(&path),
        _ => false,
    }
}

/// A folder being looked through.
struct ScanBuilder {
    media: MediaKinds,
    roots: DataRoots,
    items: Vec<ImageItem>,
    problems: Vec<Problem>,
    /// Those that were looked at before.
    looked: LookedVideos,
    /// Videos in each folder that no program could read.
    n_unread: BTreeMap<PathBuf, usize>,
}

impl ScanBuilder {
    fn finish(self) -> FolderScan {
        let Self { mut items, mut problems, n_unread, .. } = self;
        items.sort_by(|a, b| a.path.cmp(&b.path));
        let unread = n_unread.into_iter();
        problems.extend(
            unread.map(|(folder, n)| Problem::skipped(folder, ProblemKind::ProgramMissing { n })),
        );
        // Problems of one file stay in the order in which they were found.
        problems.sort_by(|a, b| a.path.cmp(&b.path));
        // One reference may belong to several images.
        problems.dedup();
        FolderScan { items, problems }
    }

    fn add(&mut self, candidate: ImageCandidate, entry: Option<MetadataEntry>) {
        if let Err(kind) = self.roots.check(&candidate.path) {
            return self.problems.push(Problem::skipped(candidate.path, kind));
        }
        let Some((size, clip)) = self.image_or_clip(&candidate.path) else { return };
        let mut frames = clip.iter().flat_map(|clip| clip.files(&candidate.path));
        if let Some(kind) = frames.find_map(|frame| self.roots.check(frame).err()) {
            return self.problems.push(Problem::skipped(candidate.path, kind));
        }
        let named = entry.as_ref().map(|entry| entry.references.clone());
        let named = named.filter(|references| !references.is_empty());
        let paths = named.unwrap_or_else(|| candidate.references.clone());
        let references = match self.references(paths) {
            Ok(references) => references,
            Err(kind) => return self.problems.push(Problem::skipped(candidate.path, kind)),
        };
        let caption_source = CaptionSource::of(&candidate, entry.as_ref());
        let caption = self.caption(&candidate, entry);
        let ImageCandidate { path, repeats, .. } = candidate;
        let mask = None;
        self.items.push(ImageItem {
            path,
            caption,
            caption_source,
            size,
            repeats,
            references,
            clip,
            mask,
        });
    }

    /// All of them with their sizes. An image is not trained with a part of its references: the caption speaks of all.
    fn references(
        &mut self,
        paths: Vec<PathBuf>,
    ) -> std::result::Result<Vec<ReferenceImage>, ProblemKind> {
        let n = paths.len();
        if n > MAX_REFERENCES {
            return Err(ProblemKind::ReferencesTooMany { n, most: MAX_REFERENCES });
        }
        let read = |path: PathBuf| match self.reference(&path) {
            Some(size) => Ok(ReferenceImage { path, size }),
            None => Err(ProblemKind::ReferenceUnusable { reference: path }),
        };
        paths.into_iter().map(read).collect()
    }

    /// The size of a reference that can be used.
    fn reference(&mut self, path: &Path) -> Option<[u32; 2]> {
        if let Err(kind) = self.roots.check(path) {
            self.problems.push(Problem::skipped(path, kind));
            return None;
        }
        self.image(path)
    }

    /// The size of an image or a clip that can be used, and the clip.
    fn image_or_clip(&mut self, path: &Path) -> Option<([u32; 2], Option<Arc<TrainingClip>>)> {
        if self.media == MediaKinds::Images {
            return self.image(path).map(|size| (size, None));
        }
        let looked = self.looked.remove(path).unwrap_or_else(|| clip::look(path));
        let (size, clip) = match looked {
            Ok(Media::Image { size }) => (size, None),
            Ok(Media::Clip(SizedClip { clip, size })) => (size, Some(Arc::new(clip))),
            Err(ProblemKind::ProgramMissing { n }) => {
                *self.n_unread.entry(path.parent().unwrap_or(path).into()).or_default() += n;
                return None;
            }
            Err(kind) => {
                self.problems.push(Problem::skipped(path, kind));
                return None;
            }
        };
        self.is_large_enough(path, size).then_some((size, clip))
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
        if !self.is_large_enough(path, header.size) {
            return None;
        }
        if header.is_animated {
            self.problems.push(Problem::warning(path, ProblemKind::Animated));
        }
        Some(header.size)
    }

    fn is_large_enough(&mut self, path: &Path, size: [u32; 2]) -> bool {
        let is_small = size.iter().any(|side| *side < MIN_SIDE);
        if is_small {
            let kind = ProblemKind::TooSmall { size, least: MIN_SIDE };
            self.problems.push(Problem::skipped(path, kind));
        }
        !is_small
    }

    /// From metadata, else from a file beside, else from the folder's name.
    fn caption(&mut self, candidate: &ImageCandidate, entry: Option<MetadataEntry>) -> String {
        let named = entry.and_then(|entry| Some((entry.from, entry.caption?)));
        let mut captions: Vec<(PathBuf, String)> = named.into_iter().collect();
        for path in &candidate.captions {
            match self.roots.check(path).and_then(|()| text::read(path)) {
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
