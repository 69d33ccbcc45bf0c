//! Headers of images are looked at, and images decoded that say they are small.

use std::fs;

use trainer::data::decode;
use trainer::data::decoding::decoding_bytes;

/// Most memory of an image that is decoded.
const MOST_BYTES: usize = 32 << 20;

pub fn read(bytes: &[u8]) {
    let path = crate::place("image");
    fs::write(&path, bytes).expect("the temporary folder can be written to");
    if decoding_bytes(&path, [64, 64]).is_ok_and(|bytes| bytes < MOST_BYTES) {
        _ = decode(&path);
    }
}
