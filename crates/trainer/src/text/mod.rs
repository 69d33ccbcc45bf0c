//! Texts for language models: files of any size to sequences of tokens. Host only: knows nothing of
//! models, devices or training.

pub mod chat;
pub mod tokenizer;

pub use chat::{Message, Template};
pub use tokenizer::Tokenizer;
