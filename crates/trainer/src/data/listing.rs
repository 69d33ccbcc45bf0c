//! The names in one folder, by what their endings say they are.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::metadata;
use crate::archive;

/// Endings of images. Those without a decoder are among them, so that they are reported and not
/// silently left out.
const IMAGES: &[&str] = &[
    "png", "apng", "jpg", "jpeg", "jpe", "jfif", "webp", "gif", "bmp", "tif", "tiff", "avif",
    "heic", "heif", "jxl", "jp2", "psd",
];

/// Endings of videos.
const VIDEOS: &[&str] = &["mp4", "m4v", "mov", "webm", "mkv", "avi"];

/// Endings of captions, the first one found is taken.
const CAPTIONS: &[&str] = &["txt", "caption", SAMPLE];

/// The ending of what `WebDataset` says of a sample, its caption among it: in archives alone.
const SAMPLE: &str = "json";

/// The names in one folder, by what they are, sorted.
#[derive(Debug, Default)]
pub(super) struct FolderListing {
    pub(super) folders: Vec<PathBuf>,
    pub(super) images: Vec<PathBuf>,
    pub(super) videos: Vec<PathBuf>,
    /// By the name without its ending.
    pub(super) captions: BTreeMap<OsString, Vec<PathBuf>>,
    pub(super) metadata: Vec<PathBuf>,
    /// What is none of these.
    pub(super) others: Vec<PathBuf>,
}

impl FolderListing {
    pub(super) fn read(folder: &Path) -> std::io::Result<Self> {
        let mut paths = archive::children(folder)?;
        paths.retain(|path| !is_ignored(path));
        paths.sort();
        let mut listing = Self::default();
        for path in paths {
            listing.put(path);
        }
        for captions in listing.captions.values_mut() {
            captions
                .sort_by_key(|path| CAPTIONS.iter().position(|ending| has_ending(path, ending)));
            // A caption beside it is the same one.
            let n_others = captions.iter().filter(|path| !has_ending(path, SAMPLE)).count();
            captions.truncate(n_others.max(1));
        }
        Ok(listing)
    }

    fn put(&mut self, path: PathBuf) {
        let has = |endings: &[&str]| endings.iter().any(|ending| has_ending(&path, ending));
        if archive::is_dir(&path) {
            self.folders.push(path);
        } else if has(IMAGES) {
            self.images.push(path);
        } else if is_video(&path) {
            self.videos.push(path);
        } else if !archive::is_file(&path) {
            // A pipe would be waited for. Images are asked the same when they are opened, and
            // reported; a caption that is none is missed anyway.
        } else if has(CAPTIONS) && (archive::is_inside(&path) || !has_ending(&path, SAMPLE)) {
            let stem = path.file_stem().unwrap_or_default().to_owned();
            self.captions.entry(stem).or_default().push(path);
        } else if metadata::NAMES.iter().any(|name| path.file_name() == Some(name.as_ref())) {
            self.metadata.push(path);
        } else {
            self.others.push(path);
        }
    }
}

/// Whether a file is named like a video.
pub(super) fn is_video(path: &Path) -> bool {
    VIDEOS.iter().any(|ending| has_ending(path, ending))
}

/// Hidden files, among them the `._*` of macOS, and what systems leave behind.
fn is_ignored(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.starts_with('.') || ["Thumbs.db", "desktop.ini", "__MACOSX"].contains(&&*name)
}

fn has_ending(path: &Path, ending: &str) -> bool {
    path.extension().is_some_and(|found| found.eq_ignore_ascii_case(ending))
}
