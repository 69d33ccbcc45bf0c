//! What can be wrong with a file of a training folder: one variant per cause, with the facts. They
//! are shown together after a scan, so none of them ends it.

use std::path::PathBuf;

use crate::text::Fault;

/// Something wrong or noteworthy about one file or folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Whose problem it is.
    pub path: PathBuf,
    /// What it is.
    pub kind: ProblemKind,
    /// Whether training goes without what is there; otherwise this is a warning.
    pub is_skipped: bool,
}

impl Problem {
    /// Training goes without it.
    pub(crate) fn skipped(path: impl Into<PathBuf>, kind: ProblemKind) -> Self {
        Self { path: path.into(), kind, is_skipped: true }
    }

    /// It is used all the same.
    pub(crate) fn warning(path: impl Into<PathBuf>, kind: ProblemKind) -> Self {
        Self { path: path.into(), kind, is_skipped: false }
    }
}

/// The causes. Text is kept where a library or the system gave nothing better.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProblemKind {
    /// A file without content.
    #[error("has zero bytes")]
    ZeroBytes,
    /// The system did not let us read it.
    #[error("cannot be read: {why}")]
    Unreadable {
        /// What the system said.
        why: String,
    },
    /// A picture by its name only.
    #[error("is not a picture: looks like {looks_like}")]
    NotAnImage {
        /// What the first bytes are like.
        looks_like: String,
    },
    /// The end is missing.
    #[error("is truncated: ends after {bytes} bytes, in the middle of the picture")]
    Truncated {
        /// How long the file is.
        bytes: u64,
    },
    /// The decoder found a contradiction.
    #[error("is damaged: {why}")]
    Damaged {
        /// What the decoder said.
        why: String,
    },
    /// A picture that hearth has no decoder for.
    #[error("has format {name}, supported are png, jpeg, webp, gif")]
    UnsupportedFormat {
        /// The format, or the part of a format.
        name: String,
    },
    /// Fewer pixels than anything can be learnt from.
    #[error("is too small: {} x {} pixels, least is {least} on each side", size[0], size[1])]
    TooSmall {
        /// Width and height, the right way up.
        size: [u32; 2],
        /// The least of either.
        least: u32,
    },
    /// More pixels than we are ready to hold.
    #[error("is too large: {} x {} pixels are {pixels}, most is {most}", size[0], size[1])]
    Huge {
        /// Width and height as the file says.
        size: [u32; 2],
        /// Their product.
        pixels: u64,
        /// The most of that.
        most: u64,
    },
    /// A longer file than we are ready to read.
    #[error("is too long: {bytes} bytes, most is {most}")]
    TooLong {
        /// Its length.
        bytes: u64,
        /// The most of that.
        most: u64,
    },
    /// Several frames.
    #[error("is animated: the first frame is taken")]
    Animated,
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
    /// Two captions for one picture.
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
    /// Two pictures whose names differ in the ending only, so that caption and control are shared.
    #[error("shares its name with {}: captions and controls are found by name", other.display())]
    DuplicateStem {
        /// The other picture.
        other: PathBuf,
    },
    /// A picture beside others that have a control.
    #[error("has no control of the same name in {}", folder.display())]
    ControlMissing {
        /// Where one was looked for.
        folder: PathBuf,
    },
    /// A control that cannot be used.
    #[error("has a control that cannot be used: {}", control.display())]
    ControlUnusable {
        /// The control; its own problem is listed, too.
        control: PathBuf,
    },
    /// A control without a picture.
    #[error("is a control without a picture of the same name in {}", folder.display())]
    ControlUnpaired {
        /// Where one was looked for.
        folder: PathBuf,
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
    /// A text, or a line of one.
    #[error("{}{fault}", line.map_or_else(String::new, |line| format!("line {line} ")))]
    Text {
        /// Counted from 1; none if it is all of the file.
        line: Option<u64>,
        /// What is wrong with it.
        fault: Fault,
    },
    /// A link to a folder that was read already.
    #[error("leads to a folder that was read already: {}", target.display())]
    FolderTwice {
        /// The folder.
        target: PathBuf,
    },
}

impl ProblemKind {
    /// From what the system said.
    pub(super) fn unreadable(error: &std::io::Error) -> Self {
        Self::Unreadable { why: error.to_string().to_lowercase() }
    }
}
