//! A folder of numbered frames.

use std::path::{Path, PathBuf};

use super::{ClipSegment, ClipSource, FrameFn, MOST_FRAMES, SizedClip, TrainingClip, check_size};
use crate::data::decode::decode;
use crate::data::header;
use crate::data::listing::FolderListing;
use crate::data::problem::ProblemKind;

/// Frames by their numbers: at least two images of one name, each with a number of its own at the end. `None` if they are
/// just images.
pub(in crate::data) fn in_order(images: &[PathBuf]) -> Option<Vec<PathBuf>> {
    let mut numbered = Vec::with_capacity(images.len());
    let mut name = None;
    for path in images {
        let stem = path.file_stem()?.to_str()?;
        let rest = stem.trim_end_matches(|c: char| c.is_ascii_digit());
        if *name.get_or_insert(rest) != rest {
            return None;
        }
        numbered.push((stem[rest.len()..].parse::<u64>().ok()?, path));
    }
    numbered.sort();
    let is_unique = numbered.windows(2).all(|two| two[0].0 != two[1].0);
    let frames = numbered.into_iter().map(|(_, path)| path.clone());
    (images.len() > 1 && is_unique).then(|| frames.collect())
}

/// Reads the headers of all frames: one that is missing in the middle would be seen as a jump.
pub(super) fn look(folder: &Path) -> Result<SizedClip, ProblemKind> {
    let listing = FolderListing::read(folder).map_err(|error| ProblemKind::unreadable(&error))?;
    let frames = in_order(&listing.images).ok_or(ProblemKind::NotFrames)?;
    if frames.len() > MOST_FRAMES {
        return Err(ProblemKind::ClipTooLong { frames: frames.len(), most: MOST_FRAMES });
    }
    let mut first = None;
    for frame in &frames {
        let header = header::read(frame).map_err(|kind| unusable(frame, &kind))?;
        check_size(frame, header.size, *first.get_or_insert(header.size))?;
    }
    let size = first.ok_or(ProblemKind::NotFrames)?;
    Ok(SizedClip { clip: TrainingClip { source: ClipSource::Folder { frames } }, size })
}

/// Decodes the frames of a segment.
pub(super) fn read(
    frames: &[PathBuf],
    segment: ClipSegment,
    on_frame: FrameFn<'_>,
) -> Result<(), ProblemKind> {
    for frame in frames.iter().skip(segment.start).take(segment.frames) {
        on_frame(decode(frame).map_err(|kind| unusable(frame, &kind))?)?;
    }
    Ok(())
}

fn unusable(frame: &Path, kind: &ProblemKind) -> ProblemKind {
    ProblemKind::ClipFrame { frame: frame.into(), why: kind.to_string() }
}
