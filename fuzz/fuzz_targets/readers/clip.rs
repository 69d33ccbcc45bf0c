//! Animated images as clips: each frame that a scan counts is decoded, or the file is refused.

use std::fs;

use trainer::data::{ClipSegment, MediaKinds, scan};

/// Most memory of a frame that is decoded.
const MOST_BYTES: usize = 8 << 20;

pub fn read(bytes: &[u8]) {
    // Videos are for ffmpeg.
    if ![&b"GIF8"[..], b"RIFF", b"\x89PNG"].iter().any(|start| bytes.starts_with(start)) {
        return;
    }
    let folder = crate::place("clips");
    fs::create_dir_all(&folder).expect("the temporary folder can be written to");
    fs::write(folder.join("a.webp"), bytes).expect("it can be written");
    let Ok(found) = scan(&folder, &[], MediaKinds::ImagesAndClips, &|_| true) else { return };
    for item in found.items {
        let Some(clip) = &item.clip else { continue };
        let decoding = clip.decoding_bytes(&item.path, item.size, [32, 32]);
        if decoding.is_ok_and(|bytes| bytes < MOST_BYTES) {
            let segment = ClipSegment { start: 0, frames: clip.n_frames(8).min(9), fps: 8 };
            let mut n_frames = 0;
            let read = clip.read(&item.path, item.size, segment, &mut |_| n_frames += 1);
            assert!(read.is_err() || n_frames == segment.frames, "{n_frames} frames");
        }
    }
}
