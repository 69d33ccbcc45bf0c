//! Reads a caption file: UTF-8, or UTF-16 with a byte order mark. Another encoding is reported and not guessed, as a wrong
//! guess would silently train on wrong letters.

use std::io::Read;
use std::path::Path;

use super::metadata;
use super::problem::ProblemKind;
use crate::archive::DataFile;

/// Longest caption file. Chosen: a thousand times what any text encoder reads.
pub(super) const MOST_BYTES: u64 = 1 << 20;

/// The caption in a file, without a byte order mark and trimmed. Line ends within are kept as one
/// character each.
pub(super) fn read(path: &Path) -> Result<String, ProblemKind> {
    let mut bytes = Vec::new();
    DataFile::open(path)
        .and_then(|file| file.take(MOST_BYTES + 1).read_to_end(&mut bytes))
        .map_err(|error| ProblemKind::unreadable(&error))?;
    if bytes.len() as u64 > MOST_BYTES {
        return Err(ProblemKind::TooLong { bytes: bytes.len() as u64, most: MOST_BYTES });
    }
    if path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("json")) {
        return metadata::sample_caption(&bytes);
    }
    if let Some(text) = utf16(&bytes) {
        return Ok(tidied(&text));
    }
    let text = std::str::from_utf8(&bytes).map_err(|error| {
        let at = error.valid_up_to();
        ProblemKind::CaptionNotUtf8 { at, byte: bytes[at] }
    })?;
    Ok(tidied(text))
}

/// Text with a UTF-16 byte order mark, as some editors on Windows save it.
fn utf16(bytes: &[u8]) -> Option<String> {
    let (rest, word): (_, fn([u8; 2]) -> u16) = match bytes {
        [0xff, 0xfe, rest @ ..] => (rest, u16::from_le_bytes),
        [0xfe, 0xff, rest @ ..] => (rest, u16::from_be_bytes),
        _ => return None,
    };
    let words = rest.chunks_exact(2).map(|pair| word([pair[0], pair[1]]));
    char::decode_utf16(words).collect::<Result<_, _>>().ok()
}

/// Normalises a caption, from any source.
pub(super) fn tidied(text: &str) -> String {
    text.trim_start_matches('\u{feff}').trim().replace("\r\n", "\n")
}
