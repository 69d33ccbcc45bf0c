//! What can be wrong with a file of a training folder: one variant per cause, with the facts. They
//! are shown together after a scan, so none of them ends it.

use std::fmt;
use std::path::{Path, PathBuf};

use machine::Bytes;

use super::bucket::Bucket;
use super::clip::install_command;
use super::fault::{FileSpan, TextFault};

/// Something wrong or noteworthy about one file or folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The file or folder.
    pub path: PathBuf,
    /// What it is.
    pub kind: ProblemKind,
    /// Whether it is left out of training; otherwise this is a warning.
    pub is_skipped: bool,
}

impl Problem {
    /// It is left out of training.
    pub(crate) fn skipped(path: impl Into<PathBuf>, kind: ProblemKind) -> Self {
        Self { path: path.into(), kind, is_skipped: true }
    }

    /// It is used all the same.
    pub(crate) fn warning(path: impl Into<PathBuf>, kind: ProblemKind) -> Self {
        Self { path: path.into(), kind, is_skipped: false }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.path.display(), self.kind)
    }
}

/// The causes. Text is kept where a library or the system gave nothing better.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProblemKind {
    /// A file without content.
    #[error("has zero bytes")]
    ZeroBytes,
    /// An I/O error.
    #[error("cannot be read: {why}")]
    Unreadable {
        /// The system's error.
        why: String,
    },
    /// Not an image, despite its name.
    #[error("is not an image: looks like {looks_like}")]
    NotAnImage {
        /// What the first bytes are like.
        looks_like: String,
    },
    /// The end is missing.
    #[error("is truncated: ends after {}, in the middle of the image", Bytes(*bytes))]
    Truncated {
        /// How long the file is.
        bytes: u64,
    },
    /// The decoder failed.
    #[error("is damaged: {why}")]
    Damaged {
        /// The decoder's error.
        why: String,
    },
    /// An image that hearth has no decoder for.
    #[error("has format {name}, supported are png, jpeg, webp, gif")]
    UnsupportedFormat {
        /// The format, or the part of a format.
        name: String,
    },
    /// Fewer pixels than the size it is trained in.
    #[error(
        "is scaled up from {} x {} to {} x {} pixels; {}",
        size[0], size[1], bucket.width, bucket.height, fitting(*fits)
    )]
    ScaledUp {
        /// Width and height, the right way up.
        size: [u32; 2],
        /// The size it is trained in.
        bucket: Bucket,
        /// The largest usual resolution that it has enough pixels for.
        fits: Option<usize>,
    },
    /// Too few pixels to train on.
    #[error("is too small: {} x {} pixels, least is {least} on each side", size[0], size[1])]
    TooSmall {
        /// Width and height, the right way up.
        size: [u32; 2],
        /// The least of either.
        least: u32,
    },
    /// More pixels than the limit.
    #[error("is too large: {} x {} pixels are {pixels}, most is {most}", size[0], size[1])]
    Huge {
        /// Width and height as the file says.
        size: [u32; 2],
        /// Width times height.
        pixels: u64,
        /// The limit.
        most: u64,
    },
    /// More memory to decode it than there is for that.
    #[error("takes {} to decode, most is {}", Bytes(*needed as u64), Bytes(*limit as u64))]
    DecodingMemory {
        /// Bytes at the peak of decoding it.
        needed: usize,
        /// The limit.
        limit: usize,
    },
    /// A file above the size limit.
    #[error("is too long: {}, most is {}", Bytes(*bytes), Bytes(*most))]
    TooLong {
        /// Its length.
        bytes: u64,
        /// The limit.
        most: u64,
    },
    /// An image without a reference, for a model that edits images.
    #[error("has no reference image, which a model that edits images needs")]
    ReferenceNone,
    /// References that the model has no use for.
    #[error("has reference images, which this model does not take")]
    ReferencesUnused,
    /// Too long and narrow for a text encoder to see.
    #[error(
        "has a reference that is too long: {} x {} pixels, most is {most} times as long as wide",
        size[0], size[1]
    )]
    ReferenceTooLong {
        /// Its width and height.
        size: [u32; 2],
        /// The longest ratio of its sides.
        most: u32,
    },
    /// More regularisation images than others.
    #[error(
        "has {of} regularisation images, of which {n} are not used: an epoch shows as many of them as of the others"
    )]
    RegularisationSurplus {
        /// How many are not used.
        n: usize,
        /// Of how many.
        of: usize,
    },
    /// An image without a mask, in a set with masks.
    #[error("has no mask: all of it counts")]
    MaskMissing,
    /// A mask that cannot be read.
    #[error("has a mask that cannot be used: {} {why}", name(mask))]
    MaskUnusable {
        /// The mask.
        mask: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// A mask of another aspect ratio than its image.
    #[error(
        "has a mask of another shape: the image has {} x {} pixels, the mask {} x {}",
        size[0], size[1], mask[0], mask[1]
    )]
    MaskShape {
        /// Width and height of the image.
        size: [u32; 2],
        /// The same of the mask.
        mask: [u32; 2],
    },
    /// Several frames.
    #[error("is animated: the first frame is taken")]
    Animated,
    /// Not a video, despite its name.
    #[error("is not a video: looks like {looks_like}")]
    NotAVideo {
        /// What the first bytes are like.
        looks_like: String,
    },
    /// Videos that cannot be read without another program.
    #[error(
        "has {n} video{}, which the program ffmpeg reads, and it is not installed: {}",
        if *n == 1 { "" } else { "s" }, install_command()
    )]
    ProgramMissing {
        /// How many there are in the folder.
        n: usize,
    },
    /// A folder that metadata names as a clip, and that is none.
    #[error("is not a clip: a folder of frames has at least two images, name_1.png, name_2.png, …")]
    NotFrames,
    /// A frame that cannot be decoded.
    #[error("has a frame that cannot be used: {} {why}", name(frame))]
    ClipFrame {
        /// The frame.
        frame: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// Frames of several sizes.
    #[error(
        "has frames of two sizes: the first of {} x {} pixels, {} of {} x {}",
        first[0], first[1], name(frame), size[0], size[1]
    )]
    ClipSizes {
        /// Of the first frame.
        first: [u32; 2],
        /// The first that differs.
        frame: PathBuf,
        /// Of that.
        size: [u32; 2],
    },
    /// Fewer frames than its header promises.
    #[error("ends early: {found} of {expected} frames can be decoded")]
    ClipEndsEarly {
        /// As many as there are.
        found: usize,
        /// As many as there should be.
        expected: usize,
    },
    /// More frames than the limit.
    #[error("is too long: {frames} frames, most is {most}")]
    ClipTooLong {
        /// How many there are.
        frames: usize,
        /// The limit.
        most: usize,
    },
    /// Too few frames to be a clip.
    #[error("is too short: {frames} frames at {fps} fps, least is {least}")]
    ClipTooShort {
        /// How many there are.
        frames: usize,
        /// At so many a second.
        fps: usize,
        /// The fewest that a model sees as a clip.
        least: usize,
    },
    /// Fewer frames than the job asks for.
    #[error("has {frames} frames at {fps} fps, data.frames is {wanted}: {used} are used")]
    ClipShort {
        /// How many there are.
        frames: usize,
        /// At so many a second.
        fps: usize,
        /// As many as the job asks for.
        wanted: usize,
        /// As many as are trained on.
        used: usize,
    },
    /// Neither a caption file nor metadata nor words in the folder's name.
    #[error("has no caption: an empty one is taken")]
    CaptionMissing,
    /// A caption file with nothing in it.
    #[error("has an empty caption")]
    CaptionEmpty,
    /// A caption in another encoding; guessing it would put wrong letters into the training.
    #[error("is not UTF-8: byte {at} is 0x{byte:02x}, an empty caption is taken")]
    CaptionNotUtf8 {
        /// Where the first wrong byte is.
        at: usize,
        /// The byte.
        byte: u8,
    },
    /// A caption of which only T5 sees all: nothing is lost.
    #[error("has a caption of {tokens} tokens: CLIP sees the first {most}, T5 all of them")]
    CaptionBeyondClip {
        /// Tokens of CLIP, those that begin and end a text included.
        tokens: usize,
        /// As many as CLIP sees.
        most: usize,
    },
    /// A caption whose end no encoder sees.
    #[error("has a caption of {tokens} tokens, {encoder} sees {most}: cut off is {lost:?}")]
    CaptionCut {
        /// The encoder that sees the most of it.
        encoder: &'static str,
        /// Its tokens, those that begin and end a text included.
        tokens: usize,
        /// As many as it sees.
        most: usize,
        /// The text that is not seen.
        lost: String,
    },
    /// A caption file without an image.
    #[error("is a caption without an image of the same name")]
    CaptionUnpaired,
    /// A file that is nothing we know.
    #[error(
        "is ignored: neither an image, nor a caption (.txt, .caption), nor metadata (.jsonl, .csv)"
    )]
    Ignored,
    /// A table that may hold captions, or images, of which nothing is used.
    #[error("is a Parquet table, which hearth does not read")]
    Parquet,
    /// The same bytes twice.
    #[error("is the same image as {}: both are trained on", other.display())]
    SameImage {
        /// The first of them.
        other: PathBuf,
    },
    /// Two captions for one image.
    #[error("has two captions that differ: that of {} is taken", taken.display())]
    CaptionTwice {
        /// The file whose caption is taken.
        taken: PathBuf,
    },
    /// A line of metadata.jsonl that says nothing.
    #[error("line {line} is malformed: {why}")]
    MetadataMalformed {
        /// Counted from 1.
        line: usize,
        /// What is wrong with it.
        why: String,
    },
    /// A line of metadata.jsonl about a file that is not there.
    #[error("line {line} names a missing file: {name}")]
    MetadataMissingFile {
        /// Counted from 1.
        line: usize,
        /// The name as it stands there.
        name: String,
    },
    /// Two images whose names differ in the ending only, so that caption and references are shared.
    #[error("shares its name with {}: captions and references are found by name", other.display())]
    DuplicateStem {
        /// The other image.
        other: PathBuf,
    },
    /// An image beside others that have a reference.
    #[error("has no reference of the same name in {}", folder.display())]
    ReferenceMissing {
        /// Where one was looked for.
        folder: PathBuf,
    },
    /// A reference that cannot be used.
    #[error("has a reference that cannot be used: {}", reference.display())]
    ReferenceUnusable {
        /// The reference; its own problem is listed, too.
        reference: PathBuf,
    },
    /// More references than a model takes.
    #[error("has {n} references, most is {most}")]
    ReferencesTooMany {
        /// How many were found.
        n: usize,
        /// The limit.
        most: usize,
    },
    /// A reference without an image.
    #[error("is a reference without an image of the same name in {}", folder.display())]
    ReferenceUnpaired {
        /// Where one was looked for.
        folder: PathBuf,
    },
    /// An image of which the cache of another trainer has no latents or prompt that can be used.
    #[error("is not imported: {why}")]
    NotImported {
        /// What is missing, or does not fit.
        why: String,
    },
    /// A folder named for no repeats.
    #[error("has 0 repeats in its name, least is 1")]
    NoRepeats,
    /// A file of the cache that is not what was written.
    #[error("is damaged and was put aside, what it held is encoded again: {why}")]
    ShardDamaged {
        /// How it was found out.
        why: String,
    },
    /// A cache of another form.
    #[error("is of an older version: images and captions are encoded again, and it may be deleted")]
    CacheOlder,
    /// A text, or a line of one.
    #[error("{}{fault}", at.map_or_else(String::new, |at| format!("{at} ")))]
    Text {
        /// Where; none if it is all of the file.
        at: Option<FileSpan>,
        /// What is wrong with it.
        fault: TextFault,
    },
    /// A link, or a path in metadata, to a file outside the folder.
    #[error("leads out of the folder, to {}: follow_links = true would use it", target.display())]
    OutsideFolder {
        /// Where the file is.
        target: PathBuf,
    },
    /// A link to a folder that was read already.
    #[error("leads to a folder that was read already: {}", target.display())]
    FolderTwice {
        /// The folder.
        target: PathBuf,
    },
}

/// The name of a file, without its folder.
fn name(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).display().to_string()
}

/// The resolution that an image fits.
fn fitting(resolution: Option<usize>) -> String {
    let fits = |side| format!("it fits data.resolution = {side}");
    resolution.map_or_else(|| "it fits no usual data.resolution".into(), fits)
}

impl ProblemKind {
    /// From what the system said.
    pub(super) fn unreadable(error: &std::io::Error) -> Self {
        Self::Unreadable { why: error.to_string().to_lowercase() }
    }

    /// In a few words, as behind a number: `2 unreadable`. The same for all files with this problem.
    pub fn reason(&self) -> String {
        let words = match self {
            Self::TooSmall { least, .. } => return format!("smaller than {least} px"),
            Self::ScaledUp { fits, .. } => {
                return format!("images scaled up, smaller than their bucket; {}", fitting(*fits));
            }
            Self::CaptionBeyondClip { most, .. } => {
                return format!(
                    "captions are longer than CLIP's {most} tokens; T5 sees all of them"
                );
            }
            Self::CaptionCut { encoder, most, .. } => {
                return format!("captions are cut: {encoder} sees {most} tokens");
            }
            Self::UnsupportedFormat { name } => {
                return format!("in a format not supported, {name}");
            }
            Self::Text { fault, .. } => return fault.reason(),
            Self::ZeroBytes => "empty",
            Self::Unreadable { .. } => "unreadable",
            Self::NotAnImage { .. } => "not an image",
            Self::Truncated { .. } => "truncated",
            Self::Damaged { .. } => "damaged",
            Self::Huge { .. } => "with too many pixels",
            Self::DecodingMemory { .. } => "with too much to decode",
            Self::TooLong { .. } => "too long",
            Self::ReferenceUnusable { .. } => "with a reference that cannot be used",
            Self::ReferencesTooMany { .. } => "with too many references",
            Self::NotImported { .. } => "images not imported, or not all of them",
            Self::ReferenceNone => "without a reference image, which this model needs",
            Self::ReferencesUnused => "images with references, which this model does not take",
            Self::ReferenceTooLong { .. } => "with a reference that is too long and narrow",
            Self::NotAVideo { .. } => "not a video",
            Self::ProgramMissing { .. } => {
                return format!("videos: ffmpeg is not installed ({})", install_command());
            }
            Self::NotFrames => "not a folder of frames",
            Self::ClipFrame { .. } => "clips with a frame that cannot be used",
            Self::ClipSizes { .. } => "clips with frames of two sizes",
            Self::ClipEndsEarly { .. } => "clips that end early",
            Self::ClipTooLong { .. } => "clips that are too long",
            Self::ClipTooShort { least, fps, .. } => {
                return format!("clips shorter than {least} frames at {fps} fps");
            }
            Self::ClipShort { wanted, .. } => {
                return format!("clips shorter than data.frames = {wanted}");
            }
            Self::RegularisationSurplus { .. } => {
                "folders with more regularisation images than others"
            }
            Self::MaskMissing => "images without a mask: all of them counts",
            Self::MaskUnusable { .. } => "with a mask that cannot be used",
            Self::MaskShape { .. } => "with a mask of another shape",
            Self::Animated => "animated images: the first frame is used",
            Self::CaptionMissing => "images without a caption: an empty one is used",
            Self::CaptionEmpty => "images with an empty caption",
            Self::CaptionNotUtf8 { .. } => "captions not in UTF-8: an empty one is used",
            Self::CaptionUnpaired => "captions without an image",
            Self::CaptionTwice { .. } => "images with two captions that differ",
            Self::Ignored => "files ignored: neither an image, nor a caption, nor metadata",
            Self::Parquet => {
                "Parquet tables, which hearth does not read: convert them to metadata.csv"
            }
            Self::SameImage { .. } => "images that are the same as another one",
            Self::MetadataMalformed { .. } => "malformed lines of metadata",
            Self::MetadataMissingFile { .. } => "lines of metadata that name a missing file",
            Self::DuplicateStem { .. } => {
                "images that share a name, and with it caption and references"
            }
            Self::ReferenceMissing { .. } => "images without a reference",
            Self::ReferenceUnpaired { .. } => "references without an image",
            Self::NoRepeats => "folders with 0 repeats",
            Self::ShardDamaged { .. } => "damaged files of the cache, encoded again",
            Self::CacheOlder => "caches of an older version, encoded again",
            Self::OutsideFolder { .. } => "outside the folder, used only with follow_links = true",
            Self::FolderTwice { .. } => "links to folders that were read already",
        };
        words.into()
    }

    /// How many things it is about: one, or the records of a stretch.
    pub(super) fn count(&self) -> usize {
        match self {
            Self::ProgramMissing { n } => *n,
            Self::Text { at, fault } => fault.count().unwrap_or(at.map_or(1, FileSpan::count)),
            _ => 1,
        }
    }

    /// Whether it is about some of the records in a file, and not about all of it.
    pub(crate) fn is_of_record(&self) -> bool {
        matches!(
            self,
            Self::Text { at: Some(_), .. }
                | Self::Text { fault: TextFault::More { .. } | TextFault::Vocabulary { .. }, .. }
        )
    }

    /// Whether an image is left out for it.
    pub(super) fn is_of_image(&self) -> bool {
        matches!(
            self,
            Self::ZeroBytes
                | Self::Unreadable { .. }
                | Self::NotAnImage { .. }
                | Self::Truncated { .. }
                | Self::Damaged { .. }
                | Self::UnsupportedFormat { .. }
                | Self::TooSmall { .. }
                | Self::Huge { .. }
                | Self::OutsideFolder { .. }
                | Self::DecodingMemory { .. }
                | Self::TooLong { .. }
                | Self::NotAVideo { .. }
                | Self::ProgramMissing { .. }
                | Self::NotFrames
                | Self::ClipFrame { .. }
                | Self::ClipSizes { .. }
                | Self::ClipEndsEarly { .. }
                | Self::ClipTooLong { .. }
                | Self::ClipTooShort { .. }
                | Self::ReferenceNone
                | Self::ReferenceTooLong { .. }
                | Self::ReferenceUnusable { .. }
                | Self::ReferencesTooMany { .. }
                | Self::MaskUnusable { .. }
                | Self::MaskShape { .. }
        )
    }

    /// Whether nothing is lost by it.
    pub fn is_note(&self) -> bool {
        matches!(
            self,
            Self::CaptionBeyondClip { .. }
                | Self::Ignored
                | Self::CacheOlder
                | Self::ScaledUp { .. }
                | Self::ClipShort { .. }
                | Self::ReferencesUnused
                | Self::RegularisationSurplus { .. }
        )
    }
}
