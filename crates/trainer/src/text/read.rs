//! Files of any size as blocks that can be turned into tokens apart from each other: a piece of a
//! text, some whole lines, some tokens. Never holds more than a block and the start of the next.
//!
//! A text is cut between two words, where every tokenizer cuts too, so that its tokens are those of
//! the whole; only where there is no such place for a block's length does a cut show.
//!
//! Files of tokens, as other programs write them:
//!
//! ```text
//! i32 20240520  i32 1  i32 n  1012 bytes of nothing    n x u16     llm.c with GPT-2's vocabulary
//! i32 20240801  i32 7  i32 n  1012 bytes of nothing    n x u32     llm.c with Llama 3's
//!                                                      n x u16 or u32, to the end: nanoGPT
//! ```

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};

use serde::{Deserialize, Serialize};
use weights::WeightsError;
use weights::checksum::Stamp;

use super::Width;
use super::fault::Fault;
use super::source::{Form, Source};
use crate::error::{Result, TrainerError};

/// Chosen: small enough that a handful of threads share a megabyte evenly, large enough that cuts
/// are rare. In tests, small files have several.
pub(super) const BLOCK_BYTES: usize = if cfg!(test) { 4 << 10 } else { 256 << 10 };

/// Longest line of a file of records. Chosen: two million words, more than any model reads at once;
/// its tokens take some hundred megabytes while they are made.
const MOST_LINE_BYTES: usize = if cfg!(test) { 16 << 10 } else { 8 << 20 };

/// Taken from llm.c, `llmc/dataloader.h` and `dev/data/data_common.py`.
const HEADER_BYTES: u64 = 1024;
const HEADERS: [(u32, u32, Width); 2] = [(20_240_520, 1, Width::Two), (20_240_801, 7, Width::Four)];

/// Chosen: what `git` and `grep` look at to tell text from anything else.
const START_BYTES: u64 = 8 << 10;

/// Where reading goes on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Position {
    /// Which file.
    pub source: usize,
    /// How many bytes are before, without a header.
    pub offset: u64,
    /// How many lines are before.
    pub lines: u64,
}

/// A stretch of one file.
#[derive(Debug)]
pub(super) struct Block {
    /// Where it begins.
    pub at: Position,
    pub form: Form,
    pub bytes: Vec<u8>,
    /// Of a file of tokens.
    pub width: Width,
    /// Whether its file ends with it.
    pub is_last: bool,
    /// What was wrong before anybody looked inside, with the line from 1.
    pub faults: Vec<(Option<u64>, Fault)>,
}

/// Reads all files, one after the other.
pub(super) struct Reader<'a> {
    sources: &'a [Source],
    /// How wide tokens are in files that do not say so.
    width: Option<Width>,
    at: Position,
    open: Option<Open>,
}

impl<'a> Reader<'a> {
    /// Goes on from a position that an earlier reader reached.
    pub fn new(sources: &'a [Source], width: Option<Width>, at: Position) -> Self {
        Self { sources, width, at, open: None }
    }

    /// Where the next block begins; behind the last file at the end.
    pub fn position(&self) -> Position {
        self.at
    }

    /// The next block; none at the end.
    pub fn next(&mut self) -> Result<Option<Block>> {
        let Some(source) = self.sources.get(self.at.source) else { return Ok(None) };
        let io =
            |error| TrainerError::Io { what: "read", path: source.path.clone(), source: error };
        if self.open.is_none() {
            match Open::new(source, self.width, self.at.offset).map_err(io)? {
                Ok(open) => self.open = Some(open),
                Err(fault) => return Ok(Some(self.given_up(source, fault))),
            }
        }
        let open = self.open.as_mut().expect("it was just opened");
        let taken = match source.form {
            Form::Text => open.piece(),
            Form::Lines => open.lines(),
            Form::Tokens => open.tokens(),
        };
        self.block(source, taken.map_err(io)?).map(Some)
    }

    /// Steps behind what was taken.
    fn block(&mut self, source: &Source, taken: Taken) -> Result<Block> {
        let (at, width) = (self.at, self.open.as_ref().map_or(Width::Two, |open| open.width));
        let faults = taken.too_long.map(|bytes| {
            (Some(at.lines + 1), Fault::TooLong { bytes, most: MOST_LINE_BYTES as u64 })
        });
        if taken.is_last {
            // What its tokens are kept under is the checksum of what it was.
            if Stamp::of(&source.path)? != source.stamp {
                return Err(WeightsError::Changed { path: source.path.clone() }.into());
            }
            self.open = None;
            self.at = Position { source: at.source + 1, ..Position::default() };
        } else {
            let n_lines = taken.bytes.split(|byte| *byte == b'\n').count() as u64 - 1;
            self.at.offset += taken.bytes.len() as u64 + taken.too_long.unwrap_or(0);
            self.at.lines += n_lines + u64::from(taken.too_long.is_some());
        }
        let Taken { bytes, is_last, .. } = taken;
        Ok(Block {
            at,
            form: source.form,
            bytes,
            width,
            is_last,
            faults: faults.into_iter().collect(),
        })
    }

    /// A block that only says why there is nothing.
    fn given_up(&mut self, source: &Source, fault: Fault) -> Block {
        let at = self.at;
        self.at = Position { source: at.source + 1, ..Position::default() };
        let faults = vec![(None, fault)];
        Block { at, form: source.form, bytes: Vec::new(), width: Width::Two, is_last: true, faults }
    }
}

/// The file being read.
struct Open {
    file: File,
    /// Read, and not given yet.
    held: Vec<u8>,
    is_at_end: bool,
    width: Width,
}

/// What comes next of a file.
struct Taken {
    bytes: Vec<u8>,
    is_last: bool,
    /// Bytes of a line that was stepped over instead, with its end.
    too_long: Option<u64>,
}

impl Open {
    /// Opens a file where reading goes on, or says why there is nothing in it.
    fn new(
        source: &Source,
        width: Option<Width>,
        offset: u64,
    ) -> io::Result<std::result::Result<Self, Fault>> {
        let mut file = File::open(&source.path)?;
        let bytes = file.metadata()?.len();
        let mut start = vec![0; bytes.min(START_BYTES) as usize];
        file.read_exact(&mut start)?;
        let found = match source.form {
            Form::Text | Form::Lines => check_start(source.form, &start).map(|()| (0, Width::Two)),
            Form::Tokens => layout(&start, bytes, width),
        };
        let (first, width) = match found {
            Ok(found) => found,
            Err(fault) => return Ok(Err(fault)),
        };
        file.seek(SeekFrom::Start(first + offset))?;
        Ok(Ok(Self { file, held: Vec::new(), is_at_end: false, width }))
    }

    /// Up to the last place between two words.
    fn piece(&mut self) -> io::Result<Taken> {
        self.fill(BLOCK_BYTES)?;
        let at = if self.is_at_end { self.held.len() } else { between_words(&self.held) };
        Ok(self.take(at))
    }

    /// Up to the end of the last line, but at least one.
    fn lines(&mut self) -> io::Result<Taken> {
        self.fill(BLOCK_BYTES)?;
        let end_of = |at: usize| at + 1;
        if let Some(at) = self.held.iter().rposition(|byte| *byte == b'\n').map(end_of) {
            return Ok(self.take(at));
        }
        self.fill(MOST_LINE_BYTES)?;
        match self.held.iter().position(|byte| *byte == b'\n').map(end_of) {
            Some(at) => Ok(self.take(at)),
            None if self.is_at_end => Ok(self.take(self.held.len())),
            None => self.step_over(),
        }
    }

    fn tokens(&mut self) -> io::Result<Taken> {
        self.fill(BLOCK_BYTES)?;
        let at = self.held.len() / self.width.bytes() * self.width.bytes();
        Ok(self.take(at))
    }

    /// Leaves out a line that is too long to hold.
    fn step_over(&mut self) -> io::Result<Taken> {
        let mut bytes = 0;
        loop {
            if let Some(at) = self.held.iter().position(|byte| *byte == b'\n') {
                self.held.drain(..=at);
                bytes += at as u64 + 1;
                break;
            }
            bytes += self.held.len() as u64;
            self.held.clear();
            if self.is_at_end {
                break;
            }
            self.fill(BLOCK_BYTES)?;
        }
        let taken = self.take(0);
        Ok(Taken { too_long: Some(bytes), ..taken })
    }

    /// Reads until so many bytes are held, or the file is at its end.
    fn fill(&mut self, n: usize) -> io::Result<()> {
        let missing = n.saturating_sub(self.held.len()) as u64;
        let read = self.file.by_ref().take(missing).read_to_end(&mut self.held)? as u64;
        self.is_at_end |= read < missing;
        Ok(())
    }

    fn take(&mut self, n: usize) -> Taken {
        let rest = self.held.split_off(n);
        let bytes = std::mem::replace(&mut self.held, rest);
        Taken { bytes, is_last: self.is_at_end && self.held.is_empty(), too_long: None }
    }
}

/// That a file looks like text, by its first bytes.
fn check_start(form: Form, start: &[u8]) -> std::result::Result<(), Fault> {
    // Tabs, line ends, form feeds and what terminals are told colours by do stand in texts.
    let is_strange = |byte: &u8| matches!(byte, 0..=8 | 14..=26 | 28..=31);
    if let Some(at) = start.iter().position(is_strange) {
        return Err(Fault::Binary { at, byte: start[at] });
    }
    match without_mark(start).trim_ascii().first() {
        None if start.len() < START_BYTES as usize => Err(Fault::Empty),
        Some(b'[') if form == Form::Lines => Err(Fault::NotLines { found: '[' }),
        _ => Ok(()),
    }
}

/// Without the mark of byte order that some editors begin a file with.
pub(super) fn without_mark(bytes: &[u8]) -> &[u8] {
    bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes)
}

/// Where the tokens of a file begin, and how wide they are.
fn layout(
    start: &[u8],
    bytes: u64,
    width: Option<Width>,
) -> std::result::Result<(u64, Width), Fault> {
    let word = |at: usize| {
        let word = start.get(at * 4..at * 4 + 4).and_then(|word| word.try_into().ok());
        word.map(u32::from_le_bytes)
    };
    let header = HEADERS.iter().find(|(magic, _, _)| word(0) == Some(*magic));
    let (first, width, expected) = match (header, word(1), word(2)) {
        (Some((_, known, _)), Some(version), Some(_)) if version != *known => {
            return Err(Fault::Version { version });
        }
        (Some((_, _, width)), Some(_), Some(n)) => {
            let all = HEADER_BYTES + u64::from(n) * width.bytes() as u64;
            (HEADER_BYTES, *width, Some(all))
        }
        _ => (0, width.ok_or(Fault::NoWidth)?, None),
    };
    if let Some(all) = expected.filter(|all| *all != bytes) {
        return Err(Fault::Length { bytes, expected: format!("{all} by its header") });
    }
    if !bytes.is_multiple_of(width.bytes() as u64) {
        return Err(Fault::Length { bytes, expected: format!("a multiple of {}", width.bytes()) });
    }
    if bytes == first { Err(Fault::Empty) } else { Ok((first, width)) }
}

/// The last place between a word and the space before the next one, where every tokenizer cuts too;
/// where there is none, the last line's end, or else wherever a letter ends.
pub(super) fn between_words(bytes: &[u8]) -> usize {
    let is_between = |window: &[u8]| {
        window[0].is_ascii_alphanumeric() && window[1] == b' ' && window[2].is_ascii_alphanumeric()
    };
    let space = bytes.windows(3).rposition(is_between).map(|at| at + 1);
    let line = || bytes.iter().rposition(|byte| *byte == b'\n').map(|at| at + 1);
    let letter = || bytes.iter().rposition(|byte| !(0x80..0xc0).contains(byte));
    space.or_else(line).or_else(letter).filter(|at| *at > 0).unwrap_or(bytes.len())
}
