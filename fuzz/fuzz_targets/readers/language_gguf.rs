//! Any bytes as a language model in GGUF: its settings, tensors and vocabulary are refused, or make sense.

use std::fs;

use trainer::model::llama::language_model::LanguageModel;
use trainer::text::Tokenizer;

pub fn read(bytes: &[u8]) {
    let path = crate::place("language_gguf.gguf");
    fs::write(&path, bytes).expect("the temporary folder is there");
    _ = LanguageModel::open(&path);
    if let Ok(tokenizer) = Tokenizer::open(&path)
        && let Ok(ids) = tokenizer.encode(" aé  aa\n\0é")
    {
        _ = tokenizer.decode(&ids);
    }
}
