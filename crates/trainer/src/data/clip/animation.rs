//! Animated GIF, WebP and PNG. How long each frame is shown is read from the blocks of the file; `image` decodes and
//! composes the frames.

use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::Path;

use image::codecs::gif::GifDecoder;
use image::codecs::png::PngDecoder;
use image::codecs::webp::WebPDecoder;
use image::{AnimationDecoder, DynamicImage, Frames, ImageDecoder, ImageFormat, ImageResult, Rgba};

use super::timing::{SECOND_US, shown};
use super::{ClipSegment, FrameFn, MOST_FRAMES};
use crate::archive::DataFile;
use crate::data::contain::contained;
use crate::data::decode::over_white;
use crate::data::header::{self, ImageHeader};
use crate::data::problem::ProblemKind;

/// Frames that are shown for no longer than this are shown for [`USUAL_US`]. Taken: Chromium, Firefox and Safari, which
/// do so since many old files have delays of zero.
const SHORTEST_US: u64 = 10_000;
const USUAL_US: u64 = 100_000;

/// When each frame ends, from the beginning on.
pub(super) fn frame_ends(path: &Path, format: ImageFormat) -> Result<Vec<u64>, ProblemKind> {
    let unreadable = |error: io::Error| ProblemKind::unreadable(&error);
    let mut file = BufReader::new(DataFile::open(path).map_err(unreadable)?);
    let bytes = file.get_ref().length();
    let delays = match format {
        ImageFormat::Gif => gif_delays(&mut file),
        ImageFormat::WebP => webp_delays(&mut file),
        _ => png_delays(&mut file),
    };
    let delays = delays.map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => ProblemKind::Truncated { bytes },
        _ => ProblemKind::unreadable(&error),
    })?;
    match delays.len() {
        0 => Err(ProblemKind::Damaged { why: "it has no frames".into() }),
        n if n > MOST_FRAMES => Err(ProblemKind::ClipTooLong { frames: n, most: MOST_FRAMES }),
        _ => Ok(ends(&delays)),
    }
}

fn ends(delays_us: &[u64]) -> Vec<u64> {
    let mut end = 0;
    let ends = delays_us.iter().map(|delay| {
        end += if *delay <= SHORTEST_US { USUAL_US } else { *delay };
        end
    });
    ends.collect()
}

/// Decodes from the first frame on, since each may build on those before it.
pub(super) fn read(
    path: &Path,
    ends_us: &[u64],
    segment: ClipSegment,
    on_frame: FrameFn<'_>,
) -> Result<(), ProblemKind> {
    let ClipSegment { start, frames, fps } = segment;
    let header = header::read(path)?;
    let file = DataFile::open(path).map_err(|error| ProblemKind::unreadable(&error))?;
    let bytes = file.length();
    let explain = |error| header::explain(error, bytes);
    let decoded = contained(|| decoded_frames(BufReader::new(file), &header))?;
    let mut decoded = decoded.map_err(explain)?;
    let mut wanted = (start..start + frames).map(|at| shown(ends_us, at, fps)).peekable();
    for number in 0.. {
        let Some(next) = wanted.peek() else { break };
        let Some(frame) = contained(|| decoded.next())? else { break };
        let frame = frame.map_err(explain)?;
        if number < *next {
            continue;
        }
        let mut image = DynamicImage::from(frame.into_buffer());
        image.apply_orientation(header.orientation);
        let pixels = over_white(image);
        while wanted.next_if_eq(&number).is_some() {
            on_frame(pixels.clone())?;
        }
    }
    Ok(())
}

fn decoded_frames(file: BufReader<DataFile>, header: &ImageHeader) -> ImageResult<Frames<'static>> {
    let mut limits = header.limits();
    limits.max_alloc = Some(header.frame_bytes() as u64);
    Ok(match header.format {
        ImageFormat::Gif => {
            let mut decoder = GifDecoder::new(file)?;
            decoder.set_limits(limits)?;
            decoder.into_frames()
        }
        ImageFormat::WebP => {
            let mut decoder = WebPDecoder::new(file)?;
            // Without one, a frame is never cleared for the next. That of the file is a hint that no browser takes.
            let alpha = if decoder.color_type().has_alpha() { 0 } else { u8::MAX };
            decoder.set_background_color(Rgba([0, 0, 0, alpha]))?;
            decoder.set_limits(limits)?;
            decoder.into_frames()
        }
        _ => {
            let mut decoder = PngDecoder::with_limits(file, header::beside_pixels(header.size))?;
            decoder.set_limits(limits)?;
            decoder.apng()?.into_frames()
        }
    })
}

/// The delay of a frame is in a block before it, in hundredths of a second.
fn gif_delays(file: &mut BufReader<DataFile>) -> io::Result<Vec<u64>> {
    let mut delays = Vec::new();
    let mut delay = 0;
    header::gif_blocks(file, |block| {
        match block {
            header::GifBlock::Control { delay: next } => delay = u64::from(next) * SECOND_US / 100,
            header::GifBlock::Frame => delays.push(std::mem::take(&mut delay)),
        }
        delays.len() <= MOST_FRAMES
    })?;
    Ok(delays)
}

/// Chunks of a name, a length and data. That of a frame begins with its place, its size and its time in milliseconds.
fn webp_delays(file: &mut BufReader<DataFile>) -> io::Result<Vec<u64>> {
    let mut delays = Vec::new();
    let end = file.seek(SeekFrom::End(0))?;
    let mut at = 12;
    while at + 8 <= end && delays.len() <= MOST_FRAMES {
        file.seek(SeekFrom::Start(at))?;
        let [name, length] = [array::<4>(file)?, array(file)?];
        let length = u64::from(u32::from_le_bytes(length));
        if name == *b"ANMF" {
            let [.., a, b, c, _] = array::<16>(file)?;
            delays.push(u64::from(u32::from_le_bytes([a, b, c, 0])) * SECOND_US / 1000);
        }
        at = at.saturating_add(8 + length + length % 2);
    }
    Ok(delays)
}

/// Chunks of a length, a name, data and a checksum. That before a frame ends with its time as a fraction of a second.
fn png_delays(file: &mut BufReader<DataFile>) -> io::Result<Vec<u64>> {
    let mut delays = Vec::new();
    let mut at = 8;
    while delays.len() <= MOST_FRAMES {
        file.seek(SeekFrom::Start(at))?;
        let [length, name] = [array(file)?, array::<4>(file)?];
        let length = u64::from(u32::from_be_bytes(length));
        if name == *b"IEND" {
            return Ok(delays);
        }
        if name == *b"fcTL" {
            let [.., a, b, c, d, _, _] = array::<26>(file)?;
            let [above, below] = [[a, b], [c, d]].map(u16::from_be_bytes).map(u64::from);
            // Taken: the specification of APNG reads a denominator of zero as 100.
            delays.push(above * SECOND_US / if below == 0 { 100 } else { below });
        }
        at = at.saturating_add(12 + length);
    }
    Ok(delays)
}

fn array<const N: usize>(file: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    file.read_exact(&mut bytes)?;
    Ok(bytes)
}
