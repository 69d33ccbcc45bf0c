//! The images of a folder that have no caption yet, and the files that captions are written to.
//!
//! ```text
//! folder/a.png      the image
//! folder/a.txt      its caption, whole or not there at all: a run that was interrupted goes on where it was
//! ```

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use weights::BytesDoneFn;
use weights::write::write_whole;

use crate::data::{
    self, CaptionSource, FolderScan, ImageItem, MediaKinds, Pixels, Problem, ProblemKind,
    ScanOptions, scan,
};
use crate::error::{Result, TrainerError};

/// How a folder is looked through.
#[derive(Clone, Debug)]
pub struct CaptionFolderOptions {
    /// The ending of caption files: `txt` or `caption`.
    pub extension: String,
    /// Whether captions that are there are written anew.
    pub overwrites: bool,
    /// Whether images may lie outside the folder, by links.
    pub follow_links: bool,
}

/// What is to be done in a folder.
#[derive(Clone, Debug, Default)]
pub struct CaptionTasks {
    /// Images without a caption, by path.
    pub tasks: Vec<CaptionTask>,
    /// How many have one already.
    pub n_captioned: usize,
    /// How many of those have it in a metadata file, which nothing is written to.
    pub n_in_metadata: usize,
    /// Files that cannot be used, or should be looked at.
    pub problems: Vec<Problem>,
}

/// An image that is to be captioned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CaptionTask {
    /// The image.
    pub image: PathBuf,
    /// Its width and height.
    pub size: [u32; 2],
    /// The file that its caption is written to.
    pub to: PathBuf,
    /// Whether a file of that name is replaced.
    pub overwrites: bool,
}

impl CaptionTasks {
    /// Looks through a folder and all below. Fails if there is not one image that can be used.
    pub fn find(
        folder: &Path,
        options: &CaptionFolderOptions,
        tick: BytesDoneFn<'_>,
    ) -> Result<Self> {
        let (media, follow_links) = (MediaKinds::Images, options.follow_links);
        let FolderScan { items, mut problems } =
            scan(folder, &[], ScanOptions { media, follow_links }, tick)?;
        problems.retain(|problem| problem.kind != ProblemKind::CaptionMissing);
        let mut tasks = Self { problems, ..Self::default() };
        if items.is_empty() {
            return Err(tasks.nothing_to_caption(folder));
        }
        let mut targets = BTreeSet::new();
        for item in items {
            match CaptionTask::of(&item, options) {
                // Of images that share a name, the first one is captioned for both.
                Some(task) if targets.insert(task.to.clone()) => tasks.tasks.push(task),
                _ => {
                    tasks.n_captioned += 1;
                    let in_metadata = item.caption_source == CaptionSource::Metadata;
                    tasks.n_in_metadata += usize::from(in_metadata);
                }
            }
        }
        Ok(tasks)
    }

    fn nothing_to_caption(&self, folder: &Path) -> TrainerError {
        let first = self.problems.iter().find(|problem| problem.is_skipped);
        let first = first.map_or_else(String::new, |problem| format!("; {problem}"));
        TrainerError::Request {
            problem: format!("no image that can be used in {}{first}", folder.display()),
            hint: "give a folder with png, jpeg, webp or gif images of at least 64 x 64 pixels",
        }
    }
}

impl CaptionTask {
    /// None if the image has a caption that stays.
    fn of(item: &ImageItem, options: &CaptionFolderOptions) -> Option<Self> {
        let CaptionFolderOptions { extension, overwrites, .. } = options;
        let usual = item.path.with_extension(OsStr::new(extension));
        let to = match &item.caption_source {
            CaptionSource::Nowhere | CaptionSource::FolderName => usual,
            CaptionSource::File(path) if *overwrites => path.clone(),
            // Metadata counts before a file, which would have no effect.
            CaptionSource::File(_) | CaptionSource::Metadata => return None,
        };
        let (image, size, overwrites) = (item.path.clone(), item.size, *overwrites);
        let task = Self { image, size, to, overwrites };
        (overwrites || !task.is_there()).then_some(task)
    }

    /// Whether there is a file of its caption's name, or anything else.
    fn is_there(&self) -> bool {
        self.to.symlink_metadata().is_ok()
    }

    /// The pixels of the image, as large as it was when the folder was looked through.
    pub fn pixels(&self) -> std::result::Result<Pixels, ProblemKind> {
        let pixels = data::decode(&self.image)?;
        if [pixels.width, pixels.height] != self.size {
            return Err(ProblemKind::Unreadable { why: "it was changed a moment ago".into() });
        }
        Ok(pixels)
    }

    /// Writes its caption. Returns false, and writes nothing, if somebody else did meanwhile.
    pub fn write(&self, caption: &str) -> Result<bool> {
        if !self.overwrites && self.is_there() {
            return Ok(false);
        }
        write_whole(&self.to, format!("{caption}\n").as_bytes())?;
        Ok(true)
    }
}
