//! The built-in tokenizer: a token for every byte, and one that ends a text. It knows every language
//! alike and none well; it is there so that a model can be trained from scratch with no file but a
//! text. Written as byte pairs without pairs, so that transformers loads it too.

use tokenizers::AddedToken;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

use super::settings::TokenizerSettings;
use crate::error::Result;
use crate::model::encoder::tokenizer::TokenizerError;

/// Ends a text.
pub(super) const END: &str = "<|endoftext|>";
const END_ID: u32 = 256;

pub(super) fn build() -> Result<(tokenizers::Tokenizer, TokenizerSettings)> {
    let mut vocab: Vocab =
        (0..=u8::MAX).map(|byte| (letter(byte).to_string(), u32::from(byte))).collect();
    vocab.insert(END.into(), END_ID);
    let malformed = |error: tokenizers::Error| TokenizerError::Text { problem: error.to_string() };
    let model = BPE::builder().vocab_and_merges(vocab, Vec::new()).build().map_err(malformed)?;
    let mut inner = tokenizers::Tokenizer::new(model);
    let plain = ByteLevel::default().add_prefix_space(false).use_regex(false);
    inner.with_pre_tokenizer(Some(plain));
    inner.with_decoder(Some(plain));
    inner.add_special_tokens([AddedToken::from(END, true)]).map_err(malformed)?;
    Ok((inner, TokenizerSettings::new(None, vec![(END_ID, END.into())], None)))
}

/// The letter that stands for a byte in vocabularies of bytes. Taken: GPT-2's `bytes_to_unicode`, by
/// which printable bytes stand for themselves and the others follow from U+0100 on.
fn letter(byte: u8) -> char {
    let is_printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if is_printable(byte) {
        return byte.into();
    }
    let before = (0..byte).filter(|other| !is_printable(*other)).count() as u32;
    char::from_u32(0x100 + before).expect("they are letters: Latin Extended-A")
}
