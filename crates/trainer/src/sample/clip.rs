//! Sampled clips: frames of one size at a rate, of which an image is one; and clips as files: animated WebP, frames as PNG,
//! MP4 by the program `ffmpeg`.

use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::thread;

use image::ImageEncoder;
use image::codecs::webp::WebPEncoder;
use weights::folder::fill_folder;
use weights::write::AtomicFile;

use super::Image;
use super::image_file::{self, pixels};
use crate::data::ProblemKind;
use crate::data::clip::install_command;
use crate::data::clip::program::RunningProgram;
use crate::error::{Result, TrainerError};

/// Frames of a strip. Chosen: a motion is seen in as many, and they fit beside each other on a page.
const STRIP_FRAMES: usize = 8;
/// Bytes of an MP4 that are read at once.
const MP4_PIECE: usize = 1 << 16;
/// Milliseconds of a second.
const SECOND: usize = 1000;
/// Bytes before the first chunk of a WebP file; its flag of an animation; a frame's of replacing what is below it.
const RIFF_HEAD: usize = 12;
const ANIMATED: u8 = 2;
const REPLACE: u8 = 2;

/// Frames of one size.
#[derive(Clone, Debug)]
pub struct Clip {
    /// One at least.
    pub frames: Vec<Image>,
    /// Frames per second.
    pub fps: usize,
}

impl Clip {
    /// From values [3, frames, height, width].
    pub fn new(values: &[f32], size: [usize; 2], fps: usize) -> Self {
        let pixels = size[0] * size[1];
        let n_frames = values.len() / (3 * pixels).max(1);
        let frame = |index: usize| {
            let colour = |colour: usize| (colour * n_frames + index) * pixels;
            let values = [0, 1, 2].map(|at| &values[colour(at)..colour(at) + pixels]);
            Image { values: values.concat(), size }
        };
        Self { frames: (0..n_frames).map(frame).collect(), fps }
    }

    /// A few frames side by side, at even distances, the first and the last among them.
    pub fn strip(&self) -> Image {
        let n = self.frames.len().min(STRIP_FRAMES);
        let at = |index: usize| index * (self.frames.len() - 1) / (n - 1).max(1);
        let frames: Vec<&Image> = (0..n).map(|index| &self.frames[at(index)]).collect();
        let [width, height] = frames[0].size;
        let row = |row: usize| {
            frames.iter().flat_map(move |frame| &frame.values[row * width..(row + 1) * width])
        };
        // Rows of all colours, one after the other.
        let values = (0..3 * height).flat_map(row).copied().collect();
        Image { values, size: [n * width, height] }
    }
}

/// A format of clips.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClipFileFormat {
    /// Animated and exact.
    WebP,
    /// H.264 by the program `ffmpeg`.
    Mp4,
}

impl ClipFileFormat {
    /// By the ending of a file's name.
    pub fn from_path(path: &Path) -> Result<Self> {
        let ending = path.extension().unwrap_or_default().to_string_lossy().to_lowercase();
        match ending.as_str() {
            "webp" => Ok(Self::WebP),
            "mp4" => Ok(Self::Mp4),
            _ => Err(TrainerError::Request {
                problem: format!(
                    "cannot write a clip as {}, accepted are .webp and .mp4",
                    path.display()
                ),
                hint: "end the name in .webp, or give a folder that ends in /; --frames 1 makes an image",
            }),
        }
    }
}

/// Writes a clip, whole or not at all.
pub fn write(path: &Path, clip: &Clip) -> Result<()> {
    let bytes = match ClipFileFormat::from_path(path)? {
        ClipFileFormat::WebP => webp(clip).map_err(|source| failed(path, source))?,
        ClipFileFormat::Mp4 => mp4(clip).map_err(|source| without_ffmpeg(path, source))?,
    };
    let mut file = AtomicFile::create(path)?;
    file.write_all(&bytes).map_err(|source| failed(path, source))?;
    file.commit()?;
    Ok(())
}

/// Writes every frame into a folder, as `0001.png` and so on.
pub fn write_frames(folder: &Path, clip: &Clip, texts: &[(&str, String)]) -> Result<()> {
    fill_folder(
        folder,
        |source| failed(folder, source),
        || {
            let mut numbered = clip.frames.iter().zip(1..);
            numbered.try_for_each(|(frame, number)| {
                image_file::write(&folder.join(format!("{number:04}.png")), frame, texts)
            })
        },
    )
}

/// Writes the clip as MP4 beside its file where `ffmpeg` is installed and can; its path.
pub fn write_mp4_beside(path: &Path, clip: &Clip) -> Option<PathBuf> {
    let beside = path.with_extension("mp4");
    write(&beside, clip).ok().map(|()| beside)
}

fn failed(path: &Path, source: std::io::Error) -> TrainerError {
    TrainerError::Io { what: "write", path: path.into(), source }
}

fn without_ffmpeg(path: &Path, source: std::io::Error) -> TrainerError {
    if source.kind() != std::io::ErrorKind::NotFound {
        return failed(path, source);
    }
    TrainerError::Request {
        problem: format!(
            "the program ffmpeg is not installed, which writes {}: {}",
            path.display(),
            install_command()
        ),
        hint: "install it, or end the name in .webp",
    }
}

/// An animation of lossless frames that is repeated for ever. Taken: the container as Google's "WebP Container
/// Specification" has it; `image` writes single images.
fn webp(clip: &Clip) -> std::io::Result<Vec<u8>> {
    let [width, height] = clip.frames[0].size;
    let canvas = [&three(width - 1)[..], &three(height - 1)].concat();
    let mut chunks = chunk(*b"VP8X", &[&[ANIMATED, 0, 0, 0][..], &canvas].concat());
    chunks.extend(chunk(*b"ANIM", &[0; 6]));
    for (index, frame) in clip.frames.iter().enumerate() {
        // Rounded so that errors do not add up.
        let time = |index: usize| (index * SECOND + clip.fps / 2) / clip.fps.max(1);
        let millis = three(time(index + 1) - time(index));
        // At the corner, and in the place of the last one: frames cover each other.
        let head = [&[0; 6][..], &canvas, &millis, &[REPLACE]].concat();
        chunks.extend(chunk(*b"ANMF", &[head, still(frame)?].concat()));
    }
    let body = [&b"WEBP"[..], &chunks].concat();
    Ok(chunk(*b"RIFF", &body))
}

/// The chunk of an image within its file.
fn still(frame: &Image) -> std::io::Result<Vec<u8>> {
    let ([width, height], mut file) = (frame.size, Vec::new());
    let encoder = WebPEncoder::new_lossless(&mut file);
    let (width, height) = (width as u32, height as u32);
    encoder
        .write_image(&pixels(frame), width, height, image::ExtendedColorType::Rgb8)
        .map_err(std::io::Error::other)?;
    Ok(file.split_off(RIFF_HEAD))
}

/// A chunk of a RIFF file: name, length, and data of even length.
fn chunk(name: [u8; 4], data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u32).to_le_bytes();
    let padding = &[0][..data.len() % 2];
    [&name[..], &length, data, padding].concat()
}

/// A number in 24 bits.
fn three(number: usize) -> [u8; 3] {
    let [a, b, c, _] = (number as u32).to_le_bytes();
    [a, b, c]
}

/// By `ffmpeg`, which reads frames from a pipe and writes into another: no path is passed to it.
fn mp4(clip: &Clip) -> std::io::Result<Vec<u8>> {
    let [width, height] = clip.frames[0].size;
    let (size, rate) = (format!("{width}x{height}"), clip.fps.to_string());
    let input = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", &size, "-r", &rate, "-i", "pipe:0"];
    let codec = ["-c:v", "libx264", "-crf", "18", "-pix_fmt", "yuv420p"];
    let output = ["-movflags", "frag_keyframe+empty_moov", "-f", "mp4", "pipe:1"];
    let before = ["-nostdin", "-loglevel", "error"];
    let arguments = [&before[..], &input, &codec, &output].concat();
    let arguments: Vec<OsString> = arguments.into_iter().map(OsString::from).collect();
    encoded(clip, &arguments).map_err(|kind| match kind {
        ProblemKind::ProgramMissing { .. } => std::io::ErrorKind::NotFound.into(),
        kind => std::io::Error::other(format!("what ffmpeg was given {kind}")),
    })
}

fn encoded(clip: &Clip, arguments: &[OsString]) -> std::result::Result<Vec<u8>, ProblemKind> {
    let (mut program, stdin) = RunningProgram::start_piped("ffmpeg", arguments, MP4_PIECE)?;
    // It is killed where reading fails, so that nobody writes to it for ever.
    thread::scope(move |scope| {
        let write = move || {
            // Where it ended early, its status says so.
            let mut stdin = stdin.expect("it is piped");
            clip.frames.iter().try_for_each(|frame| stdin.write_all(&pixels(frame))).ok();
        };
        let writer = thread::Builder::new().spawn_scoped(scope, write);
        writer.map_err(|error| ProblemKind::Unreadable { why: error.to_string() })?;
        let mut bytes = Vec::new();
        while let Some(piece) = program.next()? {
            bytes.extend(piece);
        }
        program.finish()?;
        Ok(bytes)
    })
}

#[cfg(test)]
mod tests {
    use image::AnimationDecoder;
    use image::codecs::webp::WebPDecoder;

    use super::*;

    const SIZE: [usize; 2] = [6, 4];

    /// Frames of one grey each.
    fn clip(greys: &[f32], fps: usize) -> Clip {
        let pixels = SIZE[0] * SIZE[1];
        let colour = || greys.iter().flat_map(|grey| vec![*grey; pixels]);
        let values: Vec<f32> = (0..3).flat_map(|_| colour()).collect();
        Clip::new(&values, SIZE, fps)
    }

    #[test]
    fn a_webp_has_all_frames_and_their_time() {
        let greys = [0.0, 0.2, 0.4, 1.0, 0.6];
        let clip = clip(&greys, 24);
        let bytes = webp(&clip).unwrap();
        let decoder = WebPDecoder::new(std::io::Cursor::new(bytes)).unwrap();
        let frames = decoder.into_frames().collect_frames().unwrap();
        assert_eq!(frames.len(), greys.len());
        let mut millis = 0;
        for (frame, grey) in frames.iter().zip(greys) {
            let (numerator, denominator) = frame.delay().numer_denom_ms();
            millis += numerator / denominator;
            let byte = (grey * 255.0).round() as u8;
            assert!(frame.buffer().pixels().all(|pixel| pixel.0 == [byte, byte, byte, 255]));
        }
        assert_eq!(millis, 5 * 1000 / 24);
    }

    #[test]
    fn a_strip_has_the_first_and_the_last_frame() {
        let greys: Vec<f32> = (0..17).map(|at| at as f32 / 16.0).collect();
        let strip = clip(&greys, 24).strip();
        assert_eq!(strip.size, [SIZE[0] * STRIP_FRAMES, SIZE[1]]);
        assert_eq!(strip.values.len(), 3 * strip.size[0] * strip.size[1]);
        let row = &strip.values[..strip.size[0]];
        assert_eq!((row[0], row[strip.size[0] - 1]), (0.0, 1.0));
        assert_eq!(clip(&[0.5], 24).strip().size, SIZE);
    }

    #[test]
    fn frames_are_numbered_files() {
        let folder = tempfile::tempdir().unwrap();
        write_frames(&folder.path().join("walk"), &clip(&[0.0, 1.0], 24), &[]).unwrap();
        for name in ["0001.png", "0002.png"] {
            assert!(folder.path().join("walk").join(name).exists(), "{name}");
        }
    }

    #[test]
    fn other_endings_are_refused() {
        for name in ["walk.gif", "walk"] {
            let error = ClipFileFormat::from_path(Path::new(name)).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains(".webp and .mp4"), "{error}");
        }
    }
}
