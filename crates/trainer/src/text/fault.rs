//! What can be wrong with a text or with a line of records: one variant per cause, with the facts. It
//! is kept beside the tokens, since a file that was read once is not read again.

use serde::{Deserialize, Serialize};

/// Why something in a file of texts is left out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Fault {
    /// No text at all.
    #[error("is not text: byte {at} is 0x{byte:02x}")]
    Binary {
        /// Where the first byte is that no text has.
        at: usize,
        /// The byte.
        byte: u8,
    },
    /// Text in another encoding; guessing it would put wrong letters into the training.
    #[error("is not UTF-8: byte {at} of the line is 0x{byte:02x}")]
    NotUtf8 {
        /// Where the first wrong byte is in its line.
        at: usize,
        /// The byte.
        byte: u8,
    },
    /// Nothing but space.
    #[error("is empty")]
    Empty,
    /// A longer line than we are ready to hold.
    #[error("is too long: {bytes} bytes, most is {most}")]
    TooLong {
        /// Its length.
        bytes: u64,
        /// The most of that.
        most: u64,
    },
    /// A line that is no JSON.
    #[error("is not JSON: {why} at column {column}")]
    NotJson {
        /// Where the parser stopped, from 1.
        column: usize,
        /// What it said.
        why: String,
    },
    /// A file that is one JSON value.
    #[error("begins with {found:?}: a record has to be a line of its own, in braces")]
    NotLines {
        /// The first letter.
        found: char,
    },
    /// A record that is none of ours.
    #[error(
        "has {}, expected text, prompt with completion, or messages",
        if keys.is_empty() { "no keys".into() } else { format!("the keys {}", keys.join(", ")) }
    )]
    Keys {
        /// What it has.
        keys: Vec<String>,
    },
    /// A value of another kind.
    #[error("has {key} that is {found}, expected {expected}")]
    Value {
        /// Whose.
        key: String,
        /// What it is.
        found: String,
        /// What it should be.
        expected: String,
    },
    /// A message of nobody.
    #[error("message {message} is of role {role:?}, expected system, user, assistant or tool")]
    Role {
        /// Which, from 1.
        message: usize,
        /// Whose.
        role: String,
    },
    /// Messages that are no conversation.
    #[error("message {message} of the {role} comes {}", match after {
        Some(after) => format!("after the {after}"),
        None => "first".into(),
    })]
    Turn {
        /// Which, from 1.
        message: usize,
        /// Whose.
        role: String,
        /// Who spoke before.
        after: Option<String>,
    },
    /// A conversation without an answer at its end.
    #[error("ends with the {role}, expected the assistant's answer")]
    Unanswered {
        /// Who spoke last.
        role: String,
    },
    /// The template or the tokenizer refused.
    #[error("cannot be written as the model reads it: {why}")]
    Refused {
        /// What it said.
        why: String,
    },
    /// Tokens of which nobody knows how wide they are.
    #[error("has no header that says how many bytes a token takes")]
    NoWidth,
    /// A file of tokens that is cut off, or of something else.
    #[error("has {bytes} bytes, expected {expected}")]
    Length {
        /// As many as there are.
        bytes: u64,
        /// As many as there should be.
        expected: String,
    },
    /// A header of another version.
    #[error("has a header of version {version}, known are 1 and 7")]
    Version {
        /// The version.
        version: u32,
    },
    /// Tokens of another vocabulary.
    #[error("has token {id} at byte {at}, the vocabulary has {vocabulary}")]
    Vocabulary {
        /// The token.
        id: u32,
        /// Where in the file, after its header.
        at: u64,
        /// Tokens there are.
        vocabulary: usize,
    },
    /// More than are listed.
    #[error("and {n} more like these")]
    More {
        /// How many.
        n: u64,
    },
}
