//! Any bytes as a `tokenizer.json`: it is refused, or texts become tokens and come back.

use std::fs;

use trainer::text::Tokenizer;

pub fn read(bytes: &[u8]) {
    let path = crate::place("tokenizer.json");
    fs::write(&path, bytes).expect("the temporary folder is there");
    let Ok(tokenizer) = Tokenizer::open(&path) else { return };
    for text in ["", "a", " aé  aa\n\0é", "ﷺ𝔾<|endoftext|>aaaaaaaaaaaaaaab"] {
        if let Ok(ids) = tokenizer.encode(text) {
            _ = tokenizer.decode(&ids);
            assert_eq!(tokenizer.encode(text).expect("as before"), ids, "drawn at random");
        }
        _ = tokenizer.encode_masked(text, &[0..1, 2..3]);
    }
}
