//! The header of an image file: its size after EXIF orientation, whether it is animated, whether it is complete.
//! Reads no more than that needs, so that a folder of thousands is looked through in seconds.
//!
//! JPEG is parsed here and not by `image`, which reads the whole file to find the size, and decodes a
//! truncated one as grey without an error. The ends of the other formats are checked for
//! the same reason: before anything is decoded.

use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::Path;

use image::codecs::gif::GifDecoder;
use image::codecs::jpeg::JpegDecoder;
use image::codecs::webp::WebPDecoder;
use image::metadata::Orientation;
use image::{ImageDecoder, ImageError, ImageFormat, Limits};

use super::contain::contained;
use super::png_rows::PngImage;
use super::problem::ProblemKind;
use super::sniff;
use crate::archive::DataFile;

/// Most pixels of an image. Chosen: more than any camera makes today.
pub const MOST_PIXELS: u64 = 256_000_000;

/// Longest file. Chosen: `MOST_PIXELS` of noise at 3 bytes each, and some.
const MOST_BYTES: u64 = 1 << 30;

/// What is known of an image before it is decoded.
#[derive(Clone, Copy, Debug)]
pub(super) struct ImageHeader {
    pub(super) format: ImageFormat,
    /// Width and height, the right way up.
    pub(super) size: [u32; 2],
    pub(super) orientation: Orientation,
    pub(super) is_animated: bool,
    /// Bytes at the peak of decoding it to 8-bit RGB.
    pub(super) decoding_bytes: usize,
}

impl ImageHeader {
    /// Allocation limits for `image`: what was planned, and no more.
    pub(super) fn limits(&self) -> Limits {
        let mut limits = Limits::default();
        limits.max_alloc = Some(self.decoding_bytes as u64);
        limits
    }

    /// Bytes at the peak of decoding a frame of an animation: canvases of this one and the one before, the frame, and
    /// what is handed out, each of four channels, and some.
    pub(super) fn frame_bytes(&self) -> usize {
        let [width, height] = self.size.map(|side| side as usize);
        self.decoding_bytes.saturating_add(width * height * 24)
    }
}

/// Reads it, and refuses what cannot be decoded or would take too much.
pub(super) fn read(path: &Path) -> Result<ImageHeader, ProblemKind> {
    let file = DataFile::open(path).map_err(|error| ProblemKind::unreadable(&error))?;
    match file.length() {
        0 => Err(ProblemKind::ZeroBytes),
        bytes if bytes > MOST_BYTES => Err(ProblemKind::TooLong { bytes, most: MOST_BYTES }),
        bytes => contained(|| ImageFile { file: BufReader::new(file), bytes }.header())?,
    }
}

/// A file being looked at.
struct ImageFile {
    file: BufReader<DataFile>,
    bytes: u64,
}

impl ImageFile {
    fn header(mut self) -> Result<ImageHeader, ProblemKind> {
        let mut start = Vec::with_capacity(sniff::LENGTH);
        self.from(0)
            .and_then(|file| file.take(sniff::LENGTH as u64).read_to_end(&mut start))
            .map_err(|error| ProblemKind::unreadable(&error))?;
        let format = sniff::sniff(&start)?;
        let bytes = self.bytes;
        let HeaderInfo { size, orientation, is_animated, decoding_bytes } = match format {
            ImageFormat::Png => self.png(),
            ImageFormat::Gif => self.gif(),
            ImageFormat::WebP => self.webp(&start),
            _ => self.jpeg(),
        }
        .map_err(|error| explain(error, bytes))?;
        let pixels = u64::from(size[0]) * u64::from(size[1]);
        if pixels > MOST_PIXELS {
            return Err(ProblemKind::Huge { size, pixels, most: MOST_PIXELS });
        }
        let size = if turns_sides(orientation) { [size[1], size[0]] } else { size };
        // A copy that is turned, and what is of no account beside an image.
        let copies = if orientation == Orientation::NoTransforms { 1 } else { 2 };
        let decoding_bytes = decoding_bytes.max(copies * 3 * pixels as usize) + FIXED_BYTES;
        Ok(ImageHeader { format, size, orientation, is_animated, decoding_bytes })
    }

    fn from(&mut self, at: u64) -> io::Result<&mut BufReader<DataFile>> {
        self.file.seek(SeekFrom::Start(at))?;
        Ok(&mut self.file)
    }

    fn ends_with(&mut self, mark: &[u8]) -> io::Result<bool> {
        let Some(at) = self.bytes.checked_sub(mark.len() as u64) else { return Ok(false) };
        let mut end = vec![0; mark.len()];
        self.from(at)?.read_exact(&mut end)?;
        Ok(end == mark)
    }

    fn png(&mut self) -> Result<HeaderInfo, ImageError> {
        const END: &[u8] = b"\0\0\0\0IEND\xae\x42\x60\x82";
        let file = self.from(0)?.get_ref().try_clone()?;
        let image = PngImage::open(BufReader::new(file))?;
        if !self.ends_with(END)? {
            png_end(self.from(8)?)?;
        }
        Ok(HeaderInfo {
            size: image.size(),
            orientation: image.orientation(),
            is_animated: image.is_animated(),
            decoding_bytes: image.decoding_bytes(),
        })
    }

    fn webp(&mut self, start: &[u8]) -> Result<HeaderInfo, ImageError> {
        // RIFF, then the length of everything after it.
        let length =
            start.get(4..8).and_then(|bytes| bytes.try_into().ok()).map(u32::from_le_bytes);
        if length.is_some_and(|length| u64::from(length) + 8 > self.bytes) {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        let bytes = self.bytes;
        let mut decoder = WebPDecoder::new(self.from(0)?)?;
        let size = size(&decoder);
        decoder.set_limits(beside_pixels(size))?;
        // Planes at half the size and RGB; RGBA and what is made of it; both, with a mask.
        let per_pixel = match start.get(12..16) {
            Some(b"VP8 ") => 5,
            Some(b"VP8L") => 9,
            _ => 13,
        };
        Ok(HeaderInfo {
            size,
            orientation: decoder.orientation()?,
            is_animated: decoder.has_animation(),
            decoding_bytes: per_pixel * area(size) + 2 * bytes as usize,
        })
    }

    fn gif(&mut self) -> Result<HeaderInfo, ImageError> {
        let size = size(&GifDecoder::new(self.from(0)?)?);
        let n_frames = gif_frames(&mut self.file)?;
        Ok(HeaderInfo {
            size,
            orientation: Orientation::NoTransforms,
            is_animated: n_frames > 1,
            // The frame, and the canvas that it is put upon.
            decoding_bytes: 8 * area(size),
        })
    }

    fn jpeg(&mut self) -> Result<HeaderInfo, ImageError> {
        let has_end = self.ends_with(&[0xff, 0xd9])?;
        let segments = JpegSegments::read(self.from(2)?, has_end)?;
        // A scan or an end before any frame: the decoder's own error explains it.
        let size = segments
            .size
            .map_or_else(|| Ok(size(&JpegDecoder::new(self.from(0)?)?)), Ok::<_, ImageError>)?;
        Ok(HeaderInfo {
            size,
            orientation: segments.orientation.unwrap_or(Orientation::NoTransforms),
            is_animated: false,
            decoding_bytes: segments.decoding_bytes(size) + 2 * self.bytes as usize,
        })
    }
}

/// Bytes that are of no account beside an image. Chosen: buffers of files, tables of codes.
const FIXED_BYTES: usize = 1 << 20;

/// What a format's own header says.
struct HeaderInfo {
    /// As stored.
    size: [u32; 2],
    orientation: Orientation,
    is_animated: bool,
    /// Before the image is turned.
    decoding_bytes: usize,
}

fn area([width, height]: [u32; 2]) -> usize {
    (width as usize).saturating_mul(height as usize).min(MOST_PIXELS as usize + 1)
}

/// Most bytes beside the pixels, as EXIF. Chosen: that of cameras has some kilobytes.
pub(super) const MOST_BESIDE: usize = 2 << 20;

/// Limits for what stands beside the pixels, and a row of them.
pub(super) fn beside_pixels([width, _]: [u32; 2]) -> Limits {
    let mut limits = Limits::default();
    limits.max_alloc = Some(MOST_BESIDE as u64 + 8 * u64::from(width));
    limits
}

fn size(decoder: &impl ImageDecoder) -> [u32; 2] {
    decoder.dimensions().into()
}

fn turns_sides(orientation: Orientation) -> bool {
    use Orientation::{Rotate90, Rotate90FlipH, Rotate270, Rotate270FlipH};
    matches!(orientation, Rotate90 | Rotate270 | Rotate90FlipH | Rotate270FlipH)
}

/// The problem that a decoder's error means, for a file of that length.
pub(super) fn explain(error: ImageError, bytes: u64) -> ProblemKind {
    match error {
        ImageError::IoError(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            ProblemKind::Truncated { bytes }
        }
        ImageError::IoError(error) => ProblemKind::unreadable(&error),
        ImageError::Unsupported(error) => {
            ProblemKind::UnsupportedFormat { name: error.to_string().to_lowercase() }
        }
        error => ProblemKind::Damaged { why: error.to_string().to_lowercase() },
    }
}

/// Chunks of length, name, data, checksum, up to the one that is the end.
fn png_end(file: &mut BufReader<DataFile>) -> io::Result<()> {
    loop {
        let [length, name] = [array(file)?, array(file)?];
        file.seek_relative(i64::from(u32::from_be_bytes(length)))?;
        // The checksum is read, as seeking past the end of a file is no error.
        array::<4>(file)?;
        if name == *b"IEND" {
            return Ok(());
        }
    }
}

/// Counts frames up to the second, which is enough to detect an animation.
fn gif_frames(file: &mut BufReader<DataFile>) -> io::Result<usize> {
    let mut n_frames = 0;
    gif_blocks(file, |block| {
        n_frames += usize::from(block == GifBlock::Frame);
        n_frames < 2
    })?;
    Ok(n_frames)
}

/// What a GIF is made of, as far as it matters here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GifBlock {
    /// How long the next frame is shown, in hundredths of a second.
    Control { delay: u16 },
    /// A frame.
    Frame,
}

/// Walks through the blocks as long as it is told to go on. A file may lack its end, but not the end of a block.
pub(super) fn gif_blocks(
    file: &mut BufReader<DataFile>,
    mut on_block: impl FnMut(GifBlock) -> bool,
) -> io::Result<()> {
    file.seek(SeekFrom::Start(6))?;
    let [_, _, _, _, flags, _, _] = array(file)?;
    skip_colours(file, flags)?;
    let mut has_frame = false;
    loop {
        match array(file) {
            // An extension: a label, then blocks.
            Ok([0x21]) => {
                if array(file)? == [0xf9] {
                    let [length, _, low, high, _] = array(file)?;
                    file.seek_relative(i64::from(length) - 4)?;
                    let delay = u16::from_le_bytes([low, high]);
                    if !on_block(GifBlock::Control { delay }) {
                        return Ok(());
                    }
                }
            }
            Ok([0x2c]) => {
                if !on_block(GifBlock::Frame) {
                    return Ok(());
                }
                let [.., flags] = array::<9>(file)?;
                skip_colours(file, flags)?;
                array::<1>(file)?;
                has_frame = true;
            }
            Ok(_) => return Ok(()),
            Err(_) if has_frame => return Ok(()),
            Err(error) => return Err(error),
        }
        skip_blocks(file)?;
    }
}

fn skip_colours(file: &mut BufReader<DataFile>, flags: u8) -> io::Result<()> {
    let has_table = flags & 0x80 != 0;
    file.seek_relative(if has_table { 3 << ((flags & 7) + 1) } else { 0 })
}

/// Each begins with its length; one without content is the last.
fn skip_blocks(file: &mut BufReader<DataFile>) -> io::Result<()> {
    loop {
        let [length] = array(file)?;
        if length == 0 {
            return Ok(());
        }
        file.seek_relative(i64::from(length))?;
    }
}

/// What the segments of a JPEG say.
#[derive(Default)]
struct JpegSegments {
    size: Option<[u32; 2]>,
    orientation: Option<Orientation>,
    n_channels: usize,
    is_progressive: bool,
    /// Channels of the first scan.
    n_in_scan: usize,
}

impl JpegSegments {
    /// Up to the first scan; a file that does not end as one should is walked to its end.
    fn read(file: &mut BufReader<DataFile>, has_end: bool) -> io::Result<Self> {
        let mut segments = Self::default();
        loop {
            match next_marker(file)? {
                0xd9 => return Ok(segments),
                // Without a length: restart markers, and one that is unused.
                0x01 | 0xd0..=0xd8 => {}
                0xda if has_end => {
                    let [_, _, channels] = array(file)?;
                    segments.n_in_scan = channels.into();
                    return Ok(segments);
                }
                marker => segments.add(marker, file)?,
            }
        }
    }

    /// Pixels, rows on their way, and all coefficients where not each row is complete at once.
    fn decoding_bytes(&self, size: [u32; 2]) -> usize {
        // Blocks of 8 by 8, up to four of them in both directions.
        let padded = size.map(|side| side.saturating_add(32));
        let is_whole = !self.is_progressive && self.n_in_scan == self.n_channels;
        let coefficients = if is_whole { 0 } else { 2 * self.n_channels.min(4) };
        let rgb = if self.n_channels == 1 { 4 } else { 3 };
        rgb * area(size) + coefficients * area(padded) + size[0] as usize * 1024
    }

    fn add(&mut self, marker: u8, file: &mut BufReader<DataFile>) -> io::Result<()> {
        let length = u16::from_be_bytes(array(file)?).saturating_sub(2);
        // The frame: bits, height, width. Tables have numbers in the same range.
        if matches!(marker, 0xc0..=0xcf) && !matches!(marker, 0xc4 | 0xc8 | 0xcc) && length >= 6 {
            let [_, a, b, c, d, channels] = array(file)?;
            self.is_progressive = marker == 0xc2;
            self.n_channels = channels.into();
            let [height, width] = [[a, b], [c, d]].map(|two| u16::from_be_bytes(two).into());
            self.size = Some([width, height]);
            return file.seek_relative(i64::from(length) - 6);
        }
        if marker != 0xe1 {
            return file.seek_relative(length.into());
        }
        let mut data = vec![0; length.into()];
        file.read_exact(&mut data)?;
        let exif = data.strip_prefix(b"Exif\0\0");
        self.orientation = self.orientation.or_else(|| Orientation::from_exif_chunk(exif?));
        Ok(())
    }
}

/// The next byte that is neither data nor filling after 0xff. Data after the start of a scan is
/// skipped in the same manner: 0xff is followed by a zero in it.
fn next_marker(file: &mut BufReader<DataFile>) -> io::Result<u8> {
    loop {
        let buffered = file.fill_buf()?;
        if buffered.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let Some(at) = buffered.iter().position(|byte| *byte == 0xff) else {
            let length = buffered.len();
            file.consume(length);
            continue;
        };
        file.consume(at);
        let mut byte = 0xff;
        while byte == 0xff {
            [byte] = array(file)?;
        }
        if byte != 0 {
            return Ok(byte);
        }
    }
}

fn array<const N: usize>(file: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    file.read_exact(&mut bytes)?;
    Ok(bytes)
}
