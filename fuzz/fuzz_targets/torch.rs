//! Any bytes as a PyTorch archive, and as the pickle inside one: no panic, and every tensor inside
//! the file.

#![no_main]

use std::io::Cursor;
use std::path::Path;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let length = bytes.len() as u64;
    if let Ok(found) = weights::torch::parse(Cursor::new(bytes), length, Path::new("x"), 0) {
        for tensor in &found.tensors {
            assert!(tensor.offset.checked_add(tensor.bytes).is_some_and(|end| end <= length));
            _ = tensor.numel();
        }
    }
});
