//! What can be wrong with a text or a record: one variant per cause, with the facts. Faults are cached with
//! the tokens, since a file that was tokenised is not read again.

use std::fmt;

use machine::Bytes;
use serde::{Deserialize, Serialize};

/// Where in a file something is: a stretch of what it is made of, counted from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileSpan {
    /// What is counted.
    pub unit: SpanUnit,
    /// The first.
    pub first: u64,
    /// The last.
    pub last: u64,
}

/// What a file is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SpanUnit {
    /// Lines of text, or of JSON.
    Line,
    /// Rows of a table, the first of which has the names of the columns.
    Row,
    /// Records of one JSON value.
    Record,
}

impl FileSpan {
    /// One of them.
    pub fn one(unit: SpanUnit, number: u64) -> Self {
        Self { unit, first: number, last: number }
    }

    /// How many it is about.
    pub fn count(self) -> usize {
        (self.last - self.first + 1) as usize
    }
}

impl fmt::Display for FileSpan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.unit {
            SpanUnit::Line => "line",
            SpanUnit::Row => "row",
            SpanUnit::Record => "record",
        };
        let Self { first, last, .. } = self;
        if first == last {
            write!(f, "{name} {first}")
        } else {
            write!(f, "{name}s {first} to {last}")
        }
    }
}

/// Keys of a record, or columns of a table.
const EXPECTED: &str =
    "text, prompt with completion, instruction with output, messages, or conversations";

/// Why something in a file of texts is left out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum TextFault {
    /// A binary file.
    #[error("is not text: byte {at} is 0x{byte:02x}")]
    Binary {
        /// Where the first byte is that no text has.
        at: usize,
        /// The byte.
        byte: u8,
    },
    /// Text in another encoding; a wrong guess would train on wrong letters.
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
    /// A line above the size limit.
    #[error("is too long: {}, most is {}", Bytes(*bytes), Bytes(*most))]
    TooLong {
        /// Its length.
        bytes: u64,
        /// The limit.
        most: u64,
    },
    /// A line that is no JSON.
    #[error("is not JSON: {why} at column {column}")]
    NotJson {
        /// Where the parser stopped, from 1.
        column: usize,
        /// Its error.
        why: String,
    },
    /// A file of another program.
    #[error("is {what}, which is not read: {remedy}")]
    Foreign {
        /// What it is.
        what: String,
        /// What makes a text of it.
        remedy: String,
    },
    /// A file of a folder whose name does not say what it holds.
    #[error(
        "has {}, which does not say what it holds: rename it to .txt, .jsonl or .csv, or give the file itself as \
         text.path",
        ending.as_ref().map_or_else(|| "no ending".into(), |ending| format!("the ending .{ending}"))
    )]
    Ending {
        /// Behind the last dot of its name.
        ending: Option<String>,
    },
    /// A file about the dataset, such as a README.
    #[error(
        "is not trained on, since it is about the folder: give the file itself as text.path if you mean it"
    )]
    About,
    /// Text in two bytes per letter.
    #[error("is UTF-16, only UTF-8 is read: iconv -f UTF-16 -t UTF-8 OLD > NEW")]
    Utf16,
    /// A table without known columns.
    #[error("has the columns {}, expected {EXPECTED}", columns.join(", "))]
    Columns {
        /// What it has.
        columns: Vec<String>,
    },
    /// A row that is longer or shorter than the first.
    #[error("has {found} cells, the first row {expected}")]
    Cells {
        /// As many as there are.
        found: usize,
        /// As many as the first row has.
        expected: usize,
    },
    /// A quote or a brace without its other half.
    #[error(
        "is not closed, or longer than {}: what follows in this file is left out too",
        Bytes(*most)
    )]
    Unclosed {
        /// The longest record.
        most: u64,
    },
    /// Preference data: a chosen and a rejected answer.
    #[error(
        "is a preference ({keys}): learning from those takes preference.method, or keep the better answer, as \
         completion or messages"
    )]
    Preference {
        /// The keys that show it.
        keys: String,
    },
    /// A record of an unknown form.
    #[error(
        "has {}, expected {EXPECTED}",
        if keys.is_empty() { "no keys".into() } else { format!("the keys {}", keys.join(", ")) }
    )]
    Keys {
        /// What it has.
        keys: Vec<String>,
    },
    /// A record that is no preference, where those are learnt from.
    #[error(
        "has {}, expected {expected}",
        if keys.is_empty() { "no keys".into() } else { format!("the keys {}", keys.join(", ")) }
    )]
    NoPreference {
        /// What it has.
        keys: Vec<String>,
        /// What it should have.
        expected: String,
    },
    /// A file without records, where preferences are learnt from.
    #[error("has no records, expected JSON lines with {expected}")]
    NoRecords {
        /// What they should have.
        expected: String,
    },
    /// A preference of which nothing but the prompt is within a sequence.
    #[error("has {tokens} tokens, and its first {length} are all prompt: set text.length higher")]
    PromptTooLong {
        /// As many as there are.
        tokens: usize,
        /// Tokens of a sequence.
        length: usize,
    },
    /// A prompt after which no completion fits into a sequence.
    #[error(
        "has a prompt of {tokens} tokens, and {room} leave room for a completion: set text.length higher, or \
         preference.max_completion_length lower"
    )]
    PromptWithoutRoom {
        /// As many as there are.
        tokens: usize,
        /// As many as there may be.
        room: usize,
    },
    /// Two answers that are one and the same.
    #[error("has the same answer as chosen and as rejected")]
    SameAnswers,
    /// A value of the wrong type.
    #[error("has {key} that is {found}, expected {expected}")]
    Value {
        /// Whose.
        key: String,
        /// What it is.
        found: String,
        /// What it should be.
        expected: String,
    },
    /// A message of an unknown role.
    #[error("message {message} is of role {role:?}, expected system, user, assistant or tool")]
    Role {
        /// Which, from 1.
        message: usize,
        /// Whose.
        role: String,
    },
    /// Messages whose turns are out of order.
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
        /// Its error.
        why: String,
    },
    /// A token file of unknown token width.
    #[error("has no header that says how many bytes a token takes")]
    NoWidth,
    /// A truncated token file, or another file.
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

impl TextFault {
    /// In a few words, as behind a number: `2 not JSON`.
    pub fn reason(&self) -> String {
        let words = match self {
            Self::Foreign { what, .. } => return what.clone(),
            Self::Role { role, .. } => return format!("with the unknown role {role:?}"),
            Self::Binary { .. } => "not text",
            Self::NotUtf8 { .. } => "not UTF-8",
            Self::Utf16 => "in UTF-16",
            Self::Empty => "empty",
            Self::TooLong { .. } => "too long",
            Self::NotJson { .. } => "not JSON",
            Self::Ending { .. } => "of unknown form",
            Self::About => "about the folder",
            Self::Columns { .. } => "with unknown columns",
            Self::Cells { .. } => "with more or fewer cells than columns",
            Self::Unclosed { .. } => "not closed",
            Self::Preference { .. } => "preferences",
            Self::Keys { .. } => "with unknown keys",
            Self::NoPreference { .. } | Self::NoRecords { .. } => "no preferences",
            Self::PromptTooLong { .. } => "with a prompt that fills the sequence",
            Self::PromptWithoutRoom { .. } => "with a prompt that leaves no room for a completion",
            Self::SameAnswers => "with two answers that are the same",
            Self::Value { .. } => "with a value of another kind",
            Self::Turn { .. } => "with turns out of order",
            Self::Unanswered { .. } => "without an answer",
            Self::Refused { .. } => "refused by the chat template",
            Self::NoWidth | Self::Length { .. } | Self::Version { .. } => "not tokens as expected",
            Self::Vocabulary { .. } => "with tokens of another vocabulary",
            Self::More { .. } => "not listed",
        };
        words.into()
    }

    /// How many it stands for, where it counts others.
    pub(crate) fn count(&self) -> Option<usize> {
        match self {
            Self::More { n } => Some(usize::try_from(*n).unwrap_or(usize::MAX)),
            _ => None,
        }
    }
}
