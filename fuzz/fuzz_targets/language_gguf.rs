//! Any bytes as a language model in GGUF: its settings, tensors and vocabulary are refused, or make sense.

#![no_main]

use std::fs;

use libfuzzer_sys::fuzz_target;
use trainer::model::llama::language_model::LanguageModel;
use trainer::text::Tokenizer;

fuzz_target!(|bytes: &[u8]| {
    let path = std::env::temp_dir().join(format!("hearth-fuzz-{}.gguf", std::process::id()));
    fs::write(&path, bytes).expect("the temporary folder is there");
    _ = LanguageModel::open(&path);
    if let Ok(tokenizer) = Tokenizer::open(&path)
        && let Ok(ids) = tokenizer.encode(" aé  aa\n\0é")
    {
        _ = tokenizer.decode(&ids);
    }
});
