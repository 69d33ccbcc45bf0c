//! Which folders are clips: numbered frames that somebody names as a whole. A folder of numbered images is far more often
//! just that, so numbers alone make no clip.
//!
//! ```text
//! walk/frame_0001.png … + walk.txt beside it, or walk/caption.txt
//! clips/walk/0001.jpg …   in a folder that is called `clips` or `videos`
//! {"file_name": "walk", "text": "a dog walks"}   in metadata.jsonl beside it
//! ```
//!
//! In any case all images in it have one name and a number each, none has a caption of its own, and there are no folders
//! below it.

use std::path::{Path, PathBuf};

use super::clip;
use super::listing::FolderListing;

/// Names of folders whose folders of numbered images are clips.
const CLIP_FOLDERS: [&str; 2] = ["clips", "videos"];

/// The caption of a clip in its own folder, without its ending.
const CAPTION: &str = "caption";

/// Whether folders in this one are clips if they can be.
pub(super) fn is_among_clips(folder: &Path) -> bool {
    let name = folder.file_name().unwrap_or_default();
    CLIP_FOLDERS.iter().any(|known| name.eq_ignore_ascii_case(known))
}

/// The captions of a folder that is a clip, in the order in which they count; `None` if it is none. `beside` are caption
/// files of its name, and `is_named` is whether its place or metadata says that it is one.
pub(super) fn captions(
    folder: &Path,
    beside: Vec<PathBuf>,
    is_named: bool,
) -> Option<Vec<PathBuf>> {
    let listing = FolderListing::read(folder).ok()?;
    let FolderListing { folders, images, videos, captions, metadata, .. } = listing;
    let has_own = captions.keys().any(|stem| stem != CAPTION) || !metadata.is_empty();
    let inside = captions.into_iter().filter(|(stem, _)| stem == CAPTION);
    let inside: Vec<PathBuf> = inside.flat_map(|(_, paths)| paths).collect();
    let is_named = is_named || !beside.is_empty() || !inside.is_empty();
    if !is_named || has_own || !folders.is_empty() || !videos.is_empty() {
        return None;
    }
    clip::in_order(&images)?;
    Some([beside, inside].concat())
}
