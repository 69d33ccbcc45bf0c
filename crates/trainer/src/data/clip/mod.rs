//! Clips for models that make videos: a folder of numbered frames, an animated GIF, WebP or PNG, or a video file. A scan
//! reads how long a clip is and how large its frames are; [`TrainingClip::read`] decodes a segment frame by frame, so that
//! never more than one frame is in memory beside those that the caller keeps.
//!
//! ```text
//! walk/frame_0001.png …          folder      every frame is one frame of `data.fps`
//! walk.gif  walk.webp  walk.png  animation   shown as long as the file says, resampled to `data.fps`
//! walk.mp4  walk.mov  walk.webm  video       the same, by the programs ffprobe and ffmpeg
//! ```
//!
//! Deliberately absent: sound, and frames between two frames. Resampling takes the frame that is shown at that time.

mod animation;
mod folder;
pub(crate) mod program;
#[cfg(test)]
pub(super) mod tests;
mod timing;
mod video;

use std::path::{Path, PathBuf};

pub(super) use folder::in_order;
pub use program::install_command;
pub use timing::{ClipSegment, ClipSettings, whole};

use super::header;
use super::problem::ProblemKind;
use super::resize::scaling_bytes;
use crate::pixels::Pixels;

/// Most frames of a clip. Chosen: more than an hour at 24 frames a second, and little memory for their times.
pub const MOST_FRAMES: usize = 100_000;

/// What is known of a clip before it is decoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrainingClip {
    source: ClipSource,
}

/// Where the frames are, and when they are shown.
#[derive(Clone, Debug, PartialEq, Eq)]
enum ClipSource {
    /// Images in their order.
    Folder { frames: Vec<PathBuf> },
    /// An animated image, with the ends of its frames.
    Animation { ends_us: Vec<u64> },
    /// A file for ffmpeg.
    Video { duration_us: u64 },
}

/// A clip with the width and height of its frames, the right way up.
pub(super) struct SizedClip {
    pub clip: TrainingClip,
    pub size: [u32; 2],
}

/// What a file or folder is.
pub(super) enum Media {
    Image { size: [u32; 2] },
    Clip(SizedClip),
}

/// Looks at a file, or at a folder of frames.
pub(super) fn look(path: &Path) -> Result<Media, ProblemKind> {
    if path.is_dir() {
        return folder::look(path).map(Media::Clip);
    }
    if video::is_video(path)? {
        return video::look(path).map(Media::Clip);
    }
    let header = header::read(path)?;
    if !header.is_animated {
        return Ok(Media::Image { size: header.size });
    }
    let ends_us = animation::frame_ends(path, header.format)?;
    let clip = TrainingClip { source: ClipSource::Animation { ends_us } };
    Ok(Media::Clip(SizedClip { clip, size: header.size }))
}

impl TrainingClip {
    /// Frames at so many a second.
    pub fn n_frames(&self, fps: usize) -> usize {
        match &self.source {
            ClipSource::Folder { frames } => frames.len(),
            ClipSource::Animation { ends_us } => {
                timing::n_frames(ends_us.last().copied().unwrap_or(0), fps)
            }
            ClipSource::Video { duration_us } => timing::n_frames(*duration_us, fps),
        }
    }

    /// The files that it is made of; `path` is the clip's own.
    pub fn files<'a>(&'a self, path: &'a Path) -> Vec<&'a Path> {
        match &self.source {
            ClipSource::Folder { frames } => frames.iter().map(PathBuf::as_path).collect(),
            _ => vec![path],
        }
    }

    /// Bytes at the peak of decoding a frame and scaling it to a width and height; `size` is that of the scan.
    pub fn decoding_bytes(
        &self,
        path: &Path,
        size: [u32; 2],
        to: [u32; 2],
    ) -> Result<usize, ProblemKind> {
        let own = match &self.source {
            ClipSource::Folder { frames } => {
                let of_frame = |frame: &PathBuf| Ok(header::read(frame)?.decoding_bytes);
                frames.iter().map(of_frame).try_fold(0, |most, of| of.map(|of| of.max(most)))?
            }
            ClipSource::Animation { .. } => header::read(path)?.frame_bytes(),
            // Frames on their way, and the last one.
            ClipSource::Video { .. } => 4 * 3 * size[0] as usize * size[1] as usize,
        };
        Ok(own.saturating_add(scaling_bytes(size, to)))
    }

    /// Decodes a segment; each frame is handed over before the next is decoded. `size` is that of the scan.
    pub fn read(
        &self,
        path: &Path,
        size: [u32; 2],
        segment: ClipSegment,
        on_frame: &mut dyn FnMut(Pixels),
    ) -> Result<(), ProblemKind> {
        let mut found = 0;
        let mut counted = |frame: Pixels| -> Result<(), ProblemKind> {
            check_size(path, [frame.width, frame.height], size)?;
            found += 1;
            on_frame(frame);
            Ok(())
        };
        match &self.source {
            ClipSource::Folder { frames } => folder::read(frames, segment, &mut counted)?,
            ClipSource::Animation { ends_us } => {
                animation::read(path, ends_us, segment, &mut counted)?;
            }
            ClipSource::Video { .. } => video::read(path, size, segment, &mut counted)?,
        }
        if found < segment.frames {
            return Err(ProblemKind::ClipEndsEarly { found, expected: segment.frames });
        }
        Ok(())
    }
}

/// Takes a frame, or says why not.
type FrameFn<'a> = &'a mut dyn FnMut(Pixels) -> Result<(), ProblemKind>;

fn check_size(path: &Path, size: [u32; 2], first: [u32; 2]) -> Result<(), ProblemKind> {
    if size == first {
        return Ok(());
    }
    Err(ProblemKind::ClipSizes { first, frame: path.into(), size })
}
