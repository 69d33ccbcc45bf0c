//! Any bytes as a safetensors file: no panic, and nothing accepted that the reference refuses.

#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use safetensors::SafeTensors;

fuzz_target!(|bytes: &[u8]| {
    let ours = weights::safetensors::parse(bytes, bytes.len() as u64, Path::new("x"), 0);
    let theirs = SafeTensors::deserialize(bytes);
    let Ok(ours) = ours else { return };
    let theirs = theirs.expect("the reference reads what we read");
    assert_eq!(ours.tensors.len(), theirs.len());
    for tensor in &ours.tensors {
        let view = theirs.tensor(&tensor.name).expect("the same names");
        let at = tensor.offset as usize;
        assert_eq!(&bytes[at..at + tensor.bytes as usize], view.data());
        assert!(tensor.shape.iter().map(|size| *size as usize).eq(view.shape().iter().copied()));
    }
});
