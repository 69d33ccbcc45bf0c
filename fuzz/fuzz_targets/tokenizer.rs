//! Any bytes as a `tokenizer.json`: it is refused, or texts become tokens and come back.

#![no_main]

use std::fs;

use libfuzzer_sys::fuzz_target;
use trainer::text::Tokenizer;

fuzz_target!(|bytes: &[u8]| {
    let path = std::env::temp_dir().join(format!("hearth-fuzz-{}.json", std::process::id()));
    fs::write(&path, bytes).expect("the temporary folder is there");
    let Ok(tokenizer) = Tokenizer::open(&path) else { return };
    for text in ["", "a", " aé  aa\n\0é", "ﷺ𝔾<|endoftext|>aaaaaaaaaaaaaaab"] {
        if let Ok(ids) = tokenizer.encode(text) {
            _ = tokenizer.decode(&ids);
            assert_eq!(tokenizer.encode(text).expect("as before"), ids, "drawn at random");
        }
        _ = tokenizer.encode_masked(text, &[0..1, 2..3]);
    }
});
