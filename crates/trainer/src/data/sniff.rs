//! What a file is by its first bytes. Names lie: half of all broken images are pages of a server
//! that says no, saved as .jpg.

use image::ImageFormat;

use super::problem::ProblemKind;

/// As many bytes as the rules below look at.
pub(super) const LENGTH: usize = 64;

/// The format, or what it is instead.
pub(super) fn sniff(start: &[u8]) -> Result<ImageFormat, ProblemKind> {
    if let Some(format) = supported(start) {
        return Ok(format);
    }
    if let Some(name) = unsupported(start) {
        return Err(ProblemKind::UnsupportedFormat { name: name.to_owned() });
    }
    Err(ProblemKind::NotAnImage { looks_like: looks_like(start) })
}

fn supported(start: &[u8]) -> Option<ImageFormat> {
    match start {
        [0x89, b'P', b'N', b'G', b'\r', b'\n', 0x1a, b'\n', ..] => Some(ImageFormat::Png),
        [0xff, 0xd8, 0xff, ..] => Some(ImageFormat::Jpeg),
        [b'G', b'I', b'F', b'8', b'7' | b'9', b'a', ..] => Some(ImageFormat::Gif),
        [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => Some(ImageFormat::WebP),
        _ => None,
    }
}

/// Formats that people do put into training folders.
fn unsupported(start: &[u8]) -> Option<&'static str> {
    const STARTS: &[(&[u8], &str)] = &[
        (b"BM", "bmp"),
        (b"II*\0", "tiff"),
        (b"MM\0*", "tiff"),
        (b"8BPS", "photoshop"),
        (b"\xff\x0a", "jpeg xl"),
        (b"\0\0\0\x0cJXL ", "jpeg xl"),
        (b"\0\0\0\x0cjP  ", "jpeg 2000"),
        (b"\xff\x4f\xff\x51", "jpeg 2000"),
        (b"\0\0\x01\0", "ico"),
        (b"DDS ", "dds"),
        (b"qoif", "qoi"),
        (b"v/1\x01", "openexr"),
        (b"#?RADIANCE", "radiance hdr"),
        (b"P5\n", "pnm"),
        (b"P6\n", "pnm"),
    ];
    if start.get(4..8) == Some(b"ftyp") {
        return match start.get(8..12)? {
            b"avif" | b"avis" => Some("avif"),
            b"heic" | b"heix" | b"hevc" | b"mif1" | b"msf1" => Some("heic"),
            _ => Some(MP4),
        };
    }
    STARTS.iter().find(|(bytes, _)| start.starts_with(bytes)).map(|(_, name)| *name)
}

/// Whether these are the first bytes of a video: MP4 or MOV, MKV or `WebM`, AVI.
pub(super) fn is_video(start: &[u8]) -> bool {
    match start {
        [0x1a, 0x45, 0xdf, 0xa3, ..] => true,
        [b'R', b'I', b'F', b'F', _, _, _, _, rest @ ..] => rest.starts_with(b"AVI "),
        [_, _, _, _, b'f', b't', b'y', b'p', ..] => unsupported(start) == Some(MP4),
        // MOV files of old have no `ftyp`.
        [_, _, _, _, rest @ ..] => MOV.iter().any(|name| rest.starts_with(name)),
        _ => false,
    }
}

/// What a MOV file may begin with.
const MOV: [&[u8]; 3] = [b"moov", b"mdat", b"wide"];

/// What the container of most videos is called.
const MP4: &str = "a video (mp4)";

pub(super) fn looks_like(start: &[u8]) -> String {
    let text = std::str::from_utf8(start).unwrap_or_else(|error| {
        // A letter cut in two at the end of what was read is no sign of anything.
        let whole = &start[..if error.error_len().is_none() { error.valid_up_to() } else { 0 }];
        std::str::from_utf8(whole).unwrap_or_default()
    });
    let low = text.trim_start_matches('\u{feff}').trim_start().to_lowercase();
    let begins = |words: &[&str]| words.iter().any(|word| low.starts_with(word));
    if begins(&["version https://git-lfs"]) {
        return "a pointer of git lfs, the image itself was not fetched".into();
    }
    if begins(&["<!doctype html", "<html", "<head", "<body"]) {
        return "a web page (html)".into();
    }
    if begins(&["<svg"]) {
        return "a drawing (svg)".into();
    }
    if begins(&["<?xml", "<"]) {
        return "xml".into();
    }
    if begins(&["{", "["]) {
        return "json".into();
    }
    if begins(&["%pdf"]) {
        return "pdf".into();
    }
    if start.starts_with(b"PK\x03\x04") {
        return "a zip archive".into();
    }
    if start.iter().all(|byte| *byte == 0) {
        return "nothing but zeros".into();
    }
    if !low.is_empty() && !low.contains(|c: char| c.is_control() && !c.is_whitespace()) {
        let shown: String = low.lines().next().unwrap_or_default().chars().take(24).collect();
        return format!("text, \"{shown}\"");
    }
    let shown: Vec<String> = start.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    format!("bytes {}", shown.join(" "))
}
