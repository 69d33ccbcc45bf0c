//! Video files, by the programs ffprobe and ffmpeg. They may open that file alone, and only as one of three formats: a
//! list of other files or addresses in the disguise of a video is refused.

use std::ffi::OsString;
use std::io::Read;
use std::path::Path;

use serde_json::Value;

use super::program::RunningProgram;
use super::timing::SECOND_US;
use super::{ClipSegment, ClipSource, FrameFn, MOST_FRAMES, SizedClip, TrainingClip};
use crate::archive::{self, DataFile};
use crate::data::header::MOST_PIXELS;
use crate::data::problem::ProblemKind;
use crate::data::{listing, sniff};
use crate::pixels::Pixels;

/// Formats that are opened: MP4 and MOV; MKV and `WebM`; AVI. As ffmpeg calls them.
const FORMATS: &str = "mov,matroska,avi";

/// Most of what ffprobe says. Chosen: some hundred times what it says of a video.
const MOST_SAID: usize = 1 << 20;

/// What is asked of a file.
const ENTRIES: &str = "stream=width,height,avg_frame_rate,nb_frames,duration,sample_aspect_ratio\
    :stream_side_data=rotation:stream_tags=rotate,DURATION:format=duration";

/// Options that both programs take before a file, and the file, which is no option whatever its name is.
fn input(path: &Path) -> Result<Vec<OsString>, ProblemKind> {
    let path = std::path::absolute(path).map_err(|error| ProblemKind::unreadable(&error))?;
    let mut address = OsString::from("file:");
    address.push(path);
    let options = ["-protocol_whitelist", "file", "-format_whitelist", FORMATS, "-i"];
    Ok(options.into_iter().map(OsString::from).chain([address]).collect())
}

fn options(words: &[&str]) -> Vec<OsString> {
    words.iter().map(OsString::from).collect()
}

/// Whether a file is a video by its first bytes. One that is named like a video and is none is refused.
pub(super) fn is_video(path: &Path) -> Result<bool, ProblemKind> {
    if !archive::is_file(path) {
        return Ok(false);
    }
    let file = DataFile::open(path).map_err(|error| ProblemKind::unreadable(&error))?;
    let mut start = Vec::with_capacity(sniff::LENGTH);
    let read = file.take(sniff::LENGTH as u64).read_to_end(&mut start);
    read.map_err(|error| ProblemKind::unreadable(&error))?;
    if sniff::is_video(&start) {
        if archive::is_inside(path) {
            return Err(ProblemKind::Unreadable {
                why: "is a video in an archive: unpack it".into(),
            });
        }
        return Ok(true);
    }
    match listing::is_video(path) {
        true if start.is_empty() => Err(ProblemKind::ZeroBytes),
        true => Err(ProblemKind::NotAVideo { looks_like: sniff::looks_like(&start) }),
        false => Ok(false),
    }
}

/// Asks ffprobe.
pub(super) fn look(path: &Path) -> Result<SizedClip, ProblemKind> {
    let first = options(&["-v", "error", "-select_streams", "v:0", "-show_entries", ENTRIES]);
    let arguments = [first, options(&["-of", "json"]), input(path)?].concat();
    let mut program = RunningProgram::start("ffprobe", &arguments, MOST_SAID)?;
    let said = program.next()?.unwrap_or_default();
    program.finish()?;
    let said: Value = serde_json::from_slice(&said).unwrap_or_default();
    let header = VideoHeader::read(&said).map_err(|why| ProblemKind::Damaged { why })?;
    let VideoHeader { size, duration_us } = header;
    let pixels = u64::from(size[0]) * u64::from(size[1]);
    if pixels > MOST_PIXELS {
        return Err(ProblemKind::Huge { size, pixels, most: MOST_PIXELS });
    }
    Ok(SizedClip { clip: TrainingClip { source: ClipSource::Video { duration_us } }, size })
}

/// What ffprobe says of a video.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct VideoHeader {
    /// Width and height as shown: turned, and with square pixels.
    pub size: [u32; 2],
    pub duration_us: u64,
}

impl VideoHeader {
    pub(super) fn read(said: &Value) -> Result<Self, String> {
        let stream = &said["streams"][0];
        if stream.is_null() {
            return Err("it has no video".into());
        }
        let side = |name: &str| stream[name].as_u64().and_then(|side| u32::try_from(side).ok());
        let (Some(width), Some(height)) = (side("width"), side("height")) else {
            return Err("it does not say how large it is".into());
        };
        if width == 0 || height == 0 {
            return Err(format!("its frames are {width} x {height} pixels"));
        }
        let size = square_pixels([width, height], stream["sample_aspect_ratio"].as_str());
        let size = if is_turned(stream) { [size[1], size[0]] } else { size };
        let length = duration_us(said).ok_or("it does not say how long it is")?;
        Ok(Self { size, duration_us: length })
    }
}

/// As wide as it is shown: DVDs and some cameras have pixels that are not square.
fn square_pixels([width, height]: [u32; 2], ratio: Option<&str>) -> [u32; 2] {
    let parts = ratio.and_then(|ratio| ratio.split_once(':'));
    let parsed = parts.and_then(|(a, b)| Some((a.parse::<u64>().ok()?, b.parse::<u64>().ok()?)));
    match parsed {
        Some((above, below)) if above > 0 && below > 0 && above != below => {
            let shown = (u64::from(width) * above + below / 2) / below;
            [u32::try_from(shown).unwrap_or(u32::MAX).max(1), height]
        }
        _ => [width, height],
    }
}

/// Whether a phone was held upright; ffmpeg turns the frames.
fn is_turned(stream: &Value) -> bool {
    let mut sides = stream["side_data_list"].as_array().into_iter().flatten();
    let degrees = sides.find_map(|data| data["rotation"].as_i64());
    let tag = || stream["tags"]["rotate"].as_str()?.parse().ok();
    degrees.or_else(tag).is_some_and(|degrees: i64| degrees.rem_euclid(180) == 90)
}

/// That of the stream, of its tags (MKV), of its frames, or of the file, which may have sound that is longer.
fn duration_us(said: &Value) -> Option<u64> {
    let stream = &said["streams"][0];
    let secs = |value: &Value| value.as_str()?.parse::<f64>().ok();
    let counted = || {
        let (above, below) = stream["avg_frame_rate"].as_str()?.split_once('/')?;
        let rate = above.parse::<f64>().ok()? / below.parse::<f64>().ok()?;
        Some(secs(&stream["nb_frames"])? / rate)
    };
    let found = secs(&stream["duration"])
        .or_else(|| clock_secs(stream["tags"]["DURATION"].as_str()?))
        .or_else(counted)
        .or_else(|| secs(&said["format"]["duration"]))?;
    // Taken for any length that a computer can count; a float too large for it becomes the largest number.
    (found.is_finite() && found > 0.0).then(|| (found * SECOND_US as f64).round() as u64)
}

/// `00:00:05.040000000`.
fn clock_secs(text: &str) -> Option<f64> {
    let parts: Option<Vec<f64>> = text.split(':').map(|part| part.trim().parse().ok()).collect();
    match parts?[..] {
        [hours, minutes, secs] => Some(hours * 3600.0 + minutes * 60.0 + secs),
        _ => None,
    }
}

/// Frames that a header may promise too many: lengths are rounded, and end with the sound. Chosen: as many as are seen
/// in files of phones and of ffmpeg itself.
const MOST_REPEATED: usize = 2;

/// Asks ffmpeg for frames. The last one is repeated where the header rounded the length up.
pub(super) fn read(
    path: &Path,
    [width, height]: [u32; 2],
    segment: ClipSegment,
    on_frame: FrameFn<'_>,
) -> Result<(), ProblemKind> {
    let ClipSegment { start, frames, fps } = segment;
    if frames > MOST_FRAMES {
        return Err(ProblemKind::ClipTooLong { frames, most: MOST_FRAMES });
    }
    let from_us = start as u64 * SECOND_US / fps.max(1) as u64;
    let from = format!("{}.{:06}", from_us / SECOND_US, from_us % SECOND_US);
    let filter = format!(
        "fps={fps},scale={width}:{height}:flags=bicubic+accurate_rnd+full_chroma_int,setsar=1"
    );
    let before = options(&["-v", "error", "-nostdin", "-ss", &from]);
    let count = frames.to_string();
    let after = options(&[
        "-map",
        "0:v:0",
        "-vf",
        &filter,
        "-frames:v",
        &count,
        "-pix_fmt",
        "rgb24",
        "-f",
        "rawvideo",
        "pipe:1",
    ]);
    let bytes = width as usize * height as usize * 3;
    let arguments = [before, input(path)?, after].concat();
    let mut program = RunningProgram::start("ffmpeg", &arguments, bytes)?;
    let mut last = None;
    let mut found = 0;
    while found < frames
        && let Some(rgb) = program.next()?.filter(|rgb| rgb.len() == bytes)
    {
        found += 1;
        if frames - found <= MOST_REPEATED {
            last = Some(rgb.clone());
        }
        on_frame(Pixels { width, height, rgb })?;
    }
    if found == 0 {
        // Only then is what it says the reason.
        program.finish()?;
    }
    if let Some(rgb) = last.filter(|_| frames - found <= MOST_REPEATED) {
        for _ in found..frames {
            on_frame(Pixels { width, height, rgb: rgb.clone() })?;
        }
    }
    Ok(())
}
