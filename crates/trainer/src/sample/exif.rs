//! What an image was made from, as the EXIF block of a JPEG: other programs look for `parameters` in
//! `UserComment`, where a PNG has a text chunk.
//!
//! Taken: EXIF 2.32 (JEITA CP-3451), sections 4.6.2 (directories) and 4.6.5 (`UserComment`).

/// Bytes of an entry of a directory.
const ENTRY_BYTES: usize = 12;
/// Big-endian, and where the first directory is. Readers differ in which order they take for the comment: that of
/// the block, or always this one.
const HEADER: [u8; 8] = [b'M', b'M', 0, 42, 0, 0, 0, 8];
const IMAGE_DESCRIPTION: u16 = 0x010e;
const EXIF_DIRECTORY: u16 = 0x8769;
const USER_COMMENT: u16 = 0x9286;
const ASCII: u16 = 2;
const LONG: u16 = 4;
const UNDEFINED: u16 = 7;
/// How a comment in UTF-16 begins.
const UNICODE: &[u8; 8] = b"UNICODE\0";

/// A block with a text in `UserComment` and another in `ImageDescription`.
pub fn block(comment: &str, description: &str) -> Vec<u8> {
    let mut text = description.as_bytes().to_vec();
    text.push(0);
    let units = comment.encode_utf16().flat_map(u16::to_be_bytes);
    let comment: Vec<u8> = UNICODE.iter().copied().chain(units).collect();
    // Two directories: of the image with two entries, then of EXIF with one; then the texts.
    let second = HEADER.len() + directory_bytes(2);
    let texts = second + directory_bytes(1);
    let mut block = HEADER.to_vec();
    directory(
        &mut block,
        &[(IMAGE_DESCRIPTION, ASCII, text.len(), texts), (EXIF_DIRECTORY, LONG, 1, second)],
    );
    directory(&mut block, &[(USER_COMMENT, UNDEFINED, comment.len(), texts + text.len())]);
    block.extend(text);
    block.extend(comment);
    block
}

fn directory_bytes(n_entries: usize) -> usize {
    2 + n_entries * ENTRY_BYTES + 4
}

/// Entries of tag, type, count, and the value or where it is.
fn directory(block: &mut Vec<u8>, entries: &[(u16, u16, usize, usize)]) {
    block.extend((entries.len() as u16).to_be_bytes());
    for (tag, kind, count, value) in entries {
        block.extend(tag.to_be_bytes());
        block.extend(kind.to_be_bytes());
        block.extend((*count as u32).to_be_bytes());
        block.extend((*value as u32).to_be_bytes());
    }
    // There is no next one.
    block.extend(0_u32.to_be_bytes());
}
