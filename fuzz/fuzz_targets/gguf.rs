//! Any bytes as a GGUF file: no panic, every tensor inside the file, and its blocks dequantise.

#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use weights::TensorEncoding;

fuzz_target!(|bytes: &[u8]| {
    let length = bytes.len() as u64;
    let Ok(found) = weights::gguf::parse(bytes, length, Path::new("x"), 0) else { return };
    for tensor in &found.tensors {
        let end = tensor.offset.checked_add(tensor.bytes).filter(|end| *end <= length);
        let blocks = &bytes[tensor.offset as usize..end.expect("inside the file") as usize];
        if let TensorEncoding::Blocks(format) = tensor.encoding {
            let mut numbers = vec![0.0; tensor.numel() as usize];
            weights::gguf::blocks::dequantise(format, blocks, &mut numbers);
        }
    }
});
