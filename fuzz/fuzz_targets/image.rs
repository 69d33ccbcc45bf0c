//! Headers of images are looked at, and images decoded that say they are small.

#![no_main]

use std::fs;

use libfuzzer_sys::fuzz_target;
use trainer::data::decode;
use trainer::data::decoding::decoding_bytes;

/// Most memory of an image that is decoded.
const MOST_BYTES: usize = 32 << 20;

fuzz_target!(|bytes: &[u8]| {
    let path = std::env::temp_dir().join(format!("hearth-fuzz-{}", std::process::id()));
    fs::write(&path, bytes).expect("the temporary folder can be written to");
    if decoding_bytes(&path, [64, 64]).is_ok_and(|bytes| bytes < MOST_BYTES) {
        _ = decode(&path);
    }
});
