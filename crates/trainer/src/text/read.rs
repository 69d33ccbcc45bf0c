//! Files of any size as blocks that can be turned into tokens apart from each other: a piece of a
//! text, some whole lines, rows or records, some tokens. Never holds more than a block and the start
//! of the next.
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
use weights::checksum::FileStamp;

use super::source::{TextForm, TextSource};
use super::table::TableColumns;
use super::{TokenWidth, foreign, values};
use crate::data::csv;
use crate::data::fault::{FileSpan, SpanUnit, TextFault};
use crate::error::{Result, TrainerError};

/// Chosen: small enough that a handful of threads share a megabyte evenly, large enough that cuts
/// are rare. In tests, small files have several.
pub(super) const BLOCK_BYTES: usize = if cfg!(test) { 4 << 10 } else { 256 << 10 };

/// Longest record. Chosen: two million words, more than any model reads at once;
/// its tokens take some hundred megabytes while they are made.
pub(super) const MOST_LINE_BYTES: usize = if cfg!(test) { 16 << 10 } else { 8 << 20 };

/// Taken from llm.c, `llmc/dataloader.h` and `dev/data/data_common.py`.
const HEADER_BYTES: u64 = 1024;
const HEADERS: [(u32, u32, TokenWidth); 2] =
    [(20_240_520, 1, TokenWidth::Two), (20_240_801, 7, TokenWidth::Four)];

/// Chosen: what `git` and `grep` look at to tell text from anything else.
const START_BYTES: u64 = 8 << 10;

/// Where reading goes on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct ReadPosition {
    /// Which file.
    pub source: usize,
    /// How many bytes are before, without a header.
    pub offset: u64,
    /// How many lines, rows or records are before.
    pub lines: u64,
}

/// A stretch of one file.
#[derive(Debug)]
pub(super) struct TextBlock {
    /// Where it begins.
    pub at: ReadPosition,
    pub form: TextForm,
    pub bytes: Vec<u8>,
    /// Of a file of tokens.
    pub width: TokenWidth,
    /// Of a table.
    pub columns: Option<TableColumns>,
    /// Whether its file ends with it.
    pub is_last: bool,
    /// What was wrong before anybody looked inside.
    pub faults: Vec<(Option<FileSpan>, TextFault)>,
}

impl TextForm {
    /// A line, row or record behind so many others. Tables are counted as spreadsheets do, where the
    /// first row has the names.
    pub fn at(self, n_before: u64) -> FileSpan {
        match self {
            Self::Table(_) => FileSpan::one(SpanUnit::Row, n_before + 2),
            Self::Values => FileSpan::one(SpanUnit::Record, n_before + 1),
            Self::Text | Self::Lines | Self::Tokens => FileSpan::one(SpanUnit::Line, n_before + 1),
        }
    }
}

/// Reads all files, one after the other.
pub(super) struct TextReader<'a> {
    sources: &'a [TextSource],
    /// How wide tokens are in files that do not say so.
    width: Option<TokenWidth>,
    at: ReadPosition,
    open: Option<OpenTextFile>,
}

impl<'a> TextReader<'a> {
    /// Goes on from a position that an earlier reader reached.
    pub fn new(sources: &'a [TextSource], width: Option<TokenWidth>, at: ReadPosition) -> Self {
        Self { sources, width, at, open: None }
    }

    /// Where the next block begins; behind the last file at the end.
    pub fn position(&self) -> ReadPosition {
        self.at
    }

    /// The next block; none at the end.
    pub fn next(&mut self) -> Result<Option<TextBlock>> {
        let Some(source) = self.sources.get(self.at.source) else { return Ok(None) };
        let io =
            |error| TrainerError::Io { what: "read", path: source.path.clone(), source: error };
        if self.open.is_none() {
            match OpenTextFile::new(source, self.width, self.at.offset).map_err(io)? {
                Ok(open) => self.open = Some(open),
                Err(fault) => return Ok(Some(self.given_up(source, fault))),
            }
        }
        let open = self.open.as_mut().expect("it was just opened");
        let taken = match open.form {
            TextForm::Text => open.piece(),
            TextForm::Lines => open.lines(),
            TextForm::Values => {
                open.records(|bytes, is_last| Some(values::value(bytes, is_last)?.end))
            }
            TextForm::Table(separator) => {
                open.records(|bytes, is_last| Some(csv::read_row(bytes, separator, is_last)?.bytes))
            }
            TextForm::Tokens => open.tokens(),
        };
        self.block(source, taken.map_err(io)?).map(Some)
    }

    /// Steps behind what was taken.
    fn block(&mut self, source: &TextSource, taken: ReadChunk) -> Result<TextBlock> {
        let at = self.at;
        let open = self.open.as_ref().expect("something was taken from it");
        let (form, width, columns) = (open.form, open.width, open.columns.clone());
        let ReadChunk { bytes, n_records, is_last, stepped_over } = taken;
        let n_stepped = stepped_over.as_ref().map_or(0, |(_, bytes)| *bytes);
        let fault = stepped_over.map(|(fault, _)| (Some(form.at(at.lines + n_records)), fault));
        if is_last {
            // What its tokens are kept under is the checksum of what it was.
            if FileStamp::read(&source.path)? != source.stamp {
                return Err(WeightsError::Changed { path: source.path.clone() }.into());
            }
            self.open = None;
            self.at = ReadPosition { source: at.source + 1, ..ReadPosition::default() };
        } else {
            self.at.offset += bytes.len() as u64 + n_stepped;
            self.at.lines += n_records + u64::from(fault.is_some());
        }
        let is_made_of_records = matches!(form, TextForm::Values | TextForm::Table(_));
        let is_empty = is_last && is_made_of_records && at.lines + n_records == 0;
        let empty = (is_empty && fault.is_none()).then_some((None, TextFault::Empty));
        let faults = fault.into_iter().chain(empty).collect();
        Ok(TextBlock { at, form, bytes, width, columns, is_last, faults })
    }

    /// A block that only says why there is nothing.
    fn given_up(&mut self, source: &TextSource, fault: TextFault) -> TextBlock {
        let (at, form) = (self.at, source.form);
        self.at = ReadPosition { source: at.source + 1, ..ReadPosition::default() };
        let (bytes, faults) = (Vec::new(), vec![(None, fault)]);
        TextBlock { at, form, bytes, width: TokenWidth::Two, columns: None, is_last: true, faults }
    }
}

/// The file being read.
struct OpenTextFile {
    file: File,
    /// By what it begins with.
    form: TextForm,
    /// Read, and not given yet.
    held: Vec<u8>,
    is_at_end: bool,
    width: TokenWidth,
    columns: Option<TableColumns>,
}

/// What was read.
struct ReadChunk {
    bytes: Vec<u8>,
    /// Lines, rows or records in them.
    n_records: u64,
    is_last: bool,
    /// What was left out behind them, and how many bytes of the file that are.
    stepped_over: Option<(TextFault, u64)>,
}

impl OpenTextFile {
    /// Opens a file where reading goes on, or says why there is nothing in it.
    fn new(
        source: &TextSource,
        width: Option<TokenWidth>,
        offset: u64,
    ) -> io::Result<std::result::Result<Self, TextFault>> {
        let mut file = File::open(&source.path)?;
        let bytes = file.metadata()?.len();
        let mut start = vec![0; bytes.min(START_BYTES) as usize];
        file.read_exact(&mut start)?;
        let FileStart { form, first, width, columns } =
            match FileStart::detect(source, &start, bytes, width) {
                Ok(start) => start,
                Err(fault) => return Ok(Err(fault)),
            };
        file.seek(SeekFrom::Start(first + offset))?;
        Ok(Ok(Self { file, form, held: Vec::new(), is_at_end: false, width, columns }))
    }

    /// Up to the last place between two words.
    fn piece(&mut self) -> io::Result<ReadChunk> {
        self.fill(BLOCK_BYTES)?;
        let at = if self.is_at_end { self.held.len() } else { between_words(&self.held) };
        Ok(self.take_lines(at))
    }

    /// Up to the end of the last line, but at least one.
    fn lines(&mut self) -> io::Result<ReadChunk> {
        self.fill(BLOCK_BYTES)?;
        let end_of = |at: usize| at + 1;
        if let Some(at) = self.held.iter().rposition(|byte| *byte == b'\n').map(end_of) {
            return Ok(self.take_lines(at));
        }
        self.fill(MOST_LINE_BYTES)?;
        match self.held.iter().position(|byte| *byte == b'\n').map(end_of) {
            Some(at) => Ok(self.take_lines(at)),
            None if self.is_at_end => Ok(self.take_lines(self.held.len())),
            None => self.step_over(),
        }
    }

    /// As many whole records as there are in a block, but at least one. `end` says where the first one
    /// of some bytes ends, if it does.
    fn records(&mut self, end: impl Fn(&[u8], bool) -> Option<usize>) -> io::Result<ReadChunk> {
        for n in [BLOCK_BYTES, MOST_LINE_BYTES] {
            self.fill(n)?;
            let (mut at, mut n_records) = (0, 0);
            while let Some(bytes) = end(&self.held[at..], self.is_at_end) {
                at += bytes;
                n_records += 1;
            }
            if self.is_at_end {
                return Ok(self.take(self.held.len(), n_records));
            }
            if at > 0 {
                return Ok(self.take(at, n_records));
            }
        }
        // Nobody knows where the next one begins.
        self.held.clear();
        self.is_at_end = true;
        let fault = TextFault::Unclosed { most: MOST_LINE_BYTES as u64 };
        Ok(ReadChunk { stepped_over: Some((fault, 0)), ..self.take(0, 0) })
    }

    fn tokens(&mut self) -> io::Result<ReadChunk> {
        self.fill(BLOCK_BYTES)?;
        let at = self.held.len() / self.width.bytes() * self.width.bytes();
        Ok(self.take(at, 0))
    }

    /// Leaves out a line that is too long to hold.
    fn step_over(&mut self) -> io::Result<ReadChunk> {
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
        let fault = TextFault::TooLong { bytes, most: MOST_LINE_BYTES as u64 };
        Ok(ReadChunk { stepped_over: Some((fault, bytes)), ..self.take(0, 0) })
    }

    /// Reads until so many bytes are held, or the file is at its end.
    fn fill(&mut self, n: usize) -> io::Result<()> {
        let missing = n.saturating_sub(self.held.len()) as u64;
        let read = self.file.by_ref().take(missing).read_to_end(&mut self.held)? as u64;
        self.is_at_end |= read < missing;
        Ok(())
    }

    fn take_lines(&mut self, n: usize) -> ReadChunk {
        let n_lines = self.held[..n].split(|byte| *byte == b'\n').count() as u64 - 1;
        self.take(n, n_lines)
    }

    fn take(&mut self, n: usize, n_records: u64) -> ReadChunk {
        let rest = self.held.split_off(n);
        let bytes = std::mem::replace(&mut self.held, rest);
        let is_last = self.is_at_end && self.held.is_empty();
        ReadChunk { bytes, n_records, is_last, stepped_over: None }
    }
}

/// What the first bytes of a file say.
struct FileStart {
    form: TextForm,
    /// Where what is to be read begins.
    first: u64,
    width: TokenWidth,
    columns: Option<TableColumns>,
}

impl FileStart {
    fn detect(
        source: &TextSource,
        start: &[u8],
        bytes: u64,
        width: Option<TokenWidth>,
    ) -> std::result::Result<Self, TextFault> {
        if source.form == TextForm::Tokens {
            let (first, width) = layout(start, bytes, width)?;
            return Ok(Self { form: TextForm::Tokens, first, width, columns: None });
        }
        check_text(source, start)?;
        let at_start = Self { form: source.form, first: 0, width: TokenWidth::Two, columns: None };
        let has_record = || has_record(start, bytes);
        Ok(match source.form {
            // Whatever it is called, nobody wants to learn to write it.
            TextForm::Text if has_record() => Self { form: TextForm::Lines, ..at_start },
            TextForm::Lines if without_bom(start).trim_ascii().starts_with(b"[") => {
                let bracket = start.iter().position(|byte| *byte == b'[').unwrap_or(0);
                Self { form: TextForm::Values, first: bracket as u64 + 1, ..at_start }
            }
            TextForm::Lines if !has_record() && spans_lines(start) => {
                let mark = start.len() - without_bom(start).len();
                Self { form: TextForm::Values, first: mark as u64, ..at_start }
            }
            TextForm::Table(separator) => {
                let columns = TableColumns::read(start, separator)?;
                let (form, first) = (TextForm::Table(columns.separator), columns.bytes as u64);
                Self { form, first, columns: Some(columns), ..at_start }
            }
            _ => at_start,
        })
    }
}

/// That a file looks like text, by its first bytes.
fn check_text(source: &TextSource, start: &[u8]) -> std::result::Result<(), TextFault> {
    if foreign::is_utf16(start) {
        return Err(TextFault::Utf16);
    }
    if let Some(fault) = foreign::by_start(&source.path, start) {
        return Err(fault);
    }
    // Tabs, line ends, form feeds and what terminals are told colours by do stand in texts.
    let is_strange = |byte: &u8| matches!(byte, 0..=8 | 14..=26 | 28..=31);
    if let Some(at) = start.iter().position(is_strange) {
        return Err(TextFault::Binary { at, byte: start[at] });
    }
    let is_blank = without_bom(start).trim_ascii().is_empty();
    if is_blank && start.len() < START_BYTES as usize { Err(TextFault::Empty) } else { Ok(()) }
}

/// Whether the first line is a whole object of JSON.
fn has_record(start: &[u8], bytes: u64) -> bool {
    let text = without_bom(start).trim_ascii_start();
    let is_whole = start.len() as u64 == bytes;
    let end = text.iter().position(|byte| *byte == b'\n').or(is_whole.then_some(text.len()));
    let line = end.map_or(&b""[..], |end| &text[..end]);
    line.starts_with(b"{") && serde_json::from_slice::<serde::de::IgnoredAny>(line).is_ok()
}

/// Whether a record that begins on the first line goes on on the second, and does not begin anew there.
fn spans_lines(start: &[u8]) -> bool {
    let lines = without_bom(start).split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii);
    let mut lines = lines.filter(|line| !line.is_empty());
    let (first, second) = (lines.next().unwrap_or_default(), lines.next());
    first.starts_with(b"{") && second.is_some_and(|second| !second.starts_with(b"{"))
}

/// Without the mark of byte order that some editors begin a file with.
pub(super) fn without_bom(bytes: &[u8]) -> &[u8] {
    bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes)
}

/// Where the tokens of a file begin, and how wide they are.
fn layout(
    start: &[u8],
    bytes: u64,
    width: Option<TokenWidth>,
) -> std::result::Result<(u64, TokenWidth), TextFault> {
    let word = |at: usize| {
        let word = start.get(at * 4..at * 4 + 4).and_then(|word| word.try_into().ok());
        word.map(u32::from_le_bytes)
    };
    let header = HEADERS.iter().find(|(magic, _, _)| word(0) == Some(*magic));
    let (first, width, expected) = match (header, word(1), word(2)) {
        (Some((_, known, _)), Some(version), Some(_)) if version != *known => {
            return Err(TextFault::Version { version });
        }
        (Some((_, _, width)), Some(_), Some(n)) => {
            let all = HEADER_BYTES + u64::from(n) * width.bytes() as u64;
            (HEADER_BYTES, *width, Some(all))
        }
        _ => (0, width.ok_or(TextFault::NoWidth)?, None),
    };
    if let Some(all) = expected.filter(|all| *all != bytes) {
        return Err(TextFault::Length { bytes, expected: format!("{all} by its header") });
    }
    if !bytes.is_multiple_of(width.bytes() as u64) {
        return Err(TextFault::Length {
            bytes,
            expected: format!("a multiple of {}", width.bytes()),
        });
    }
    if bytes == first { Err(TextFault::Empty) } else { Ok((first, width)) }
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
