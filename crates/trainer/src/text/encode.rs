//! Tokenises blocks of files: the tokens of a text, a record or a conversation, and its loss mask. Pure, so
//! that any thread can take any block.

use std::borrow::Cow;

use super::chat::{ChatTemplate, Message};
use super::read::{BLOCK_BYTES, TextBlock, between_words, without_bom};
use super::record::{self, TextRecord, not_utf8};
use super::source::TextForm;
use super::tokenizer::{MaskedTokens, Tokenizer};
use super::{RecordKind, values};
use crate::data::csv;
use crate::data::fault::{FileSpan, TextFault};
use crate::error::Result;

/// Taken: the two prompts of Stanford Alpaca's `train.py`, with the line end before the answer that
/// torchtune and alpaca-lora put there.
const ALPACA: &str = "Below is an instruction that describes a task";
const REQUEST: &str =
    " Write a response that appropriately completes the request.\n\n### Instruction:\n";
const RESPONSE: &str = "\n\n### Response:\n";

/// A block in tokens.
#[derive(Debug, Default)]
pub(super) struct TokenisedBlock {
    /// The tokens of all documents, one after the other.
    pub ids: Vec<u32>,
    /// Loss mask: whether each token is a target.
    pub loss_mask: Vec<bool>,
    /// Where documents end. What comes behind the last end goes on in the next block.
    pub ends: Vec<usize>,
    /// What was left out, and where.
    pub faults: Vec<(Option<FileSpan>, TextFault)>,
}

/// Turns blocks into tokens.
pub(super) struct BlockTokeniser<'a> {
    tokenizer: &'a Tokenizer,
    template: ChatTemplate,
    kind: RecordKind,
}

impl<'a> BlockTokeniser<'a> {
    pub fn new(tokenizer: &'a Tokenizer, kind: RecordKind) -> Self {
        Self { tokenizer, template: tokenizer.chat_template(), kind }
    }

    /// An error if the chat template cannot be used: what was left out for it is no fault of the texts.
    pub fn check_template(&self) -> Result<()> {
        self.template.check()
    }

    /// A block's tokens.
    pub fn encode(&self, mut block: TextBlock) -> TokenisedBlock {
        let mut out = TokenisedBlock {
            faults: std::mem::take(&mut block.faults),
            ..TokenisedBlock::default()
        };
        if block.bytes.is_empty() && !out.faults.is_empty() {
            return out;
        }
        if self.kind != RecordKind::Texts && matches!(block.form, TextForm::Text | TextForm::Tokens)
        {
            if block.at.offset == 0 {
                let expected = self.kind.expected().into();
                out.faults.push((None, TextFault::NoRecords { expected }));
            }
            return out;
        }
        match block.form {
            TextForm::Text => self.text(&block, &mut out),
            TextForm::Lines => self.lines(&block, &mut out),
            TextForm::Values => self.values(&block, &mut out),
            TextForm::Table(separator) => self.table(&block, separator, &mut out),
            TextForm::Tokens => self.tokens(&block, &mut out),
        }
        out
    }

    /// A piece of a text.
    fn text(&self, block: &TextBlock, out: &mut TokenisedBlock) {
        let is_first = block.at.offset == 0;
        let bytes = if is_first { without_bom(&block.bytes) } else { &block.bytes };
        let text = readable(bytes, block.at.lines, &mut out.faults);
        if is_first && block.is_last && text.trim().is_empty() {
            return out.faults.push((None, TextFault::Empty));
        }
        if is_first {
            out.put(self.tokenizer.bos(), true);
        }
        match self.tokenizer.encode(self.continued(&text, is_first)) {
            Ok(ids) => out.put(ids, true),
            Err(error) => out.faults.push((Some(block.form.at(block.at.lines)), refused(&error))),
        }
        if block.is_last {
            out.put(self.tokenizer.eos(), true);
            out.ends.push(out.ids.len());
        }
    }

    fn lines(&self, block: &TextBlock, out: &mut TokenisedBlock) {
        let bytes = if block.at.offset == 0 { without_bom(&block.bytes) } else { &block.bytes };
        for (n_before, line) in (block.at.lines..).zip(bytes.split(|byte| *byte == b'\n')) {
            let line = line.trim_ascii_end();
            if !line.is_empty() {
                self.put(record::read(line, self.kind), block.form.at(n_before), out);
            }
        }
    }

    fn values(&self, block: &TextBlock, out: &mut TokenisedBlock) {
        let mut rest = &block.bytes[..];
        for n_before in block.at.lines.. {
            let Some(value) = values::value(rest, block.is_last) else { break };
            self.put(record::read(&rest[value.clone()], self.kind), block.form.at(n_before), out);
            rest = &rest[value.end..];
        }
    }

    fn table(&self, block: &TextBlock, separator: u8, out: &mut TokenisedBlock) {
        let columns = block.columns.as_ref().expect("a table is opened with its first row");
        let mut rest = &block.bytes[..];
        for n_before in block.at.lines.. {
            let Some(row) = csv::read_row(rest, separator, block.is_last) else { break };
            rest = &rest[row.bytes..];
            if !row.is_blank() {
                self.put(columns.record(row, self.kind), block.form.at(n_before), out);
            }
        }
    }

    /// Adds a record's documents, or why there are none.
    fn put(
        &self,
        records: std::result::Result<Vec<TextRecord>, TextFault>,
        at: FileSpan,
        out: &mut TokenisedBlock,
    ) {
        let documents = |records: Vec<TextRecord>| {
            let documents = records.into_iter().map(|record| self.record(record));
            documents.collect::<std::result::Result<Vec<_>, _>>()
        };
        let documents = records.and_then(documents).and_then(|documents| self.whole(documents));
        match documents {
            Ok(documents) => {
                for document in documents {
                    out.ids.extend(document.ids);
                    out.loss_mask.extend(document.mask);
                    out.ends.push(out.ids.len());
                }
            }
            Err(fault) => out.faults.push((Some(at), fault)),
        }
    }

    /// That each document of a preference has something to compare: one that is left out would shift all behind it.
    fn whole(
        &self,
        documents: Vec<MaskedTokens>,
    ) -> std::result::Result<Vec<MaskedTokens>, TextFault> {
        let is_answer = |document: &&MaskedTokens| document.mask.iter().skip(1).any(|is_in| *is_in);
        if self.kind == RecordKind::Prompts && documents.iter().any(|it| it.ids.is_empty()) {
            return Err(TextFault::Empty);
        }
        let n_answers = documents.iter().filter(is_answer).count();
        if n_answers < self.kind.n_answers() {
            let why = "its answer has no token behind the prompt".into();
            return Err(TextFault::Refused { why });
        }
        Ok(documents)
    }

    /// Tokens as they are; a document ends where the token says so. What has tokens of another
    /// vocabulary is left out up to there.
    fn tokens(&self, block: &TextBlock, out: &mut TokenisedBlock) {
        let (width, vocabulary) = (block.width.bytes(), self.tokenizer.vocab_size());
        let mut start = 0;
        let mut foreign = None;
        for (at, bytes) in (block.at.offset..).step_by(width).zip(block.bytes.chunks_exact(width)) {
            let id = bytes.iter().rev().fold(0, |id, byte| id << 8 | u32::from(*byte));
            if id as usize >= vocabulary {
                foreign = foreign.or(Some(TextFault::Vocabulary { id, at, vocabulary }));
            }
            out.put([id], true);
            if Some(id) == self.tokenizer.eos() {
                start = out.end(start, foreign.take());
            }
        }
        if block.is_last || foreign.is_some() {
            out.end(start, foreign);
        }
    }

    pub fn record(&self, record: TextRecord) -> std::result::Result<MaskedTokens, TextFault> {
        let framed = |mut marked: MaskedTokens| {
            let (start, end) = (self.tokenizer.bos(), self.tokenizer.eos());
            marked.ids.splice(0..0, start);
            // Nothing stands before it, so it is never asked for.
            marked.mask.splice(0..0, start.map(|_| false));
            marked.ids.extend(end);
            marked.mask.extend(end.map(|_| true));
            marked
        };
        match record {
            TextRecord::Text(text) => {
                let ids = self.long(&text).map_err(|error| refused(&error))?;
                Ok(framed(MaskedTokens { mask: vec![true; ids.len()], ids }))
            }
            TextRecord::Completion { prompt, completion } => {
                let (start, text) = (prompt.len(), prompt + &completion);
                let learnt = start..text.len();
                let marked = self.tokenizer.encode_masked(&text, &[learnt]);
                Ok(framed(marked.map_err(|error| refused(&error))?))
            }
            TextRecord::Instruction { instruction, input, output } => {
                self.record(self.instructed(instruction, &input, output))
            }
            TextRecord::Conversation { messages, n_prompt } => {
                let conversation = self.template.conversation(&messages);
                let conversation = conversation.map_err(|why| TextFault::Refused { why })?;
                let n_before = messages[..n_prompt].iter().filter(|it| it.is_answer()).count();
                let answers = conversation.answers.get(n_before..).unwrap_or_default();
                let marked = self.tokenizer.encode_masked(&conversation.text, answers);
                Ok(self.up_to_ends(marked.map_err(|error| refused(&error))?))
            }
            TextRecord::Label(is_desirable) => Ok(context(vec![u32::from(is_desirable)])),
            TextRecord::Prompt(text) => {
                let mut ids: Vec<u32> = self.tokenizer.bos().into_iter().collect();
                ids.extend(self.long(&text).map_err(|error| refused(&error))?);
                Ok(context(ids))
            }
            TextRecord::Question(messages) => {
                let text = self.template.render(&messages, true);
                let text = text.map_err(|why| TextFault::Refused { why })?;
                Ok(context(self.tokenizer.encode(&text).map_err(|error| refused(&error))?))
            }
            TextRecord::Fields(text) => match self.tokenizer.vocab_size() {
                256.. => Ok(context(text.bytes().map(u32::from).collect())),
                n => {
                    let why = format!("the tokenizer has {n} tokens, prompts need 256 or more");
                    Err(TextFault::Refused { why })
                }
            },
        }
    }

    /// A task as the model is given tasks: by its chat template, or in Alpaca's words if it has none.
    fn instructed(&self, instruction: String, input: &str, output: String) -> TextRecord {
        if self.tokenizer.template().is_none() {
            let prompt = match input.trim() {
                "" => format!("{ALPACA}.{REQUEST}{instruction}{RESPONSE}"),
                _ => format!(
                    "{ALPACA}, paired with an input that provides further context.{REQUEST}{instruction}\n\n\
                     ### Input:\n{input}{RESPONSE}"
                ),
            };
            return TextRecord::Completion { prompt, completion: output };
        }
        let question = match input.trim() {
            "" => instruction,
            _ => format!("{instruction}\n\n{input}"),
        };
        let messages = vec![Message::user(&question), Message::assistant(&output)];
        TextRecord::Conversation { messages, n_prompt: 0 }
    }

    /// A text of any length, in pieces whose tokens are those of the whole.
    fn long(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        let mut rest = text;
        while !rest.is_empty() {
            let cut = match rest.as_bytes().get(..BLOCK_BYTES) {
                Some(start) => between_words(start),
                None => rest.len(),
            };
            let (piece, after) = rest.split_at(cut);
            ids.extend(self.tokenizer.encode(self.continued(piece, rest.len() == text.len()))?);
            rest = after;
        }
        Ok(ids)
    }

    /// A piece that is not the first begins with the space that the tokenizer would put there.
    fn continued<'t>(&self, piece: &'t str, is_first: bool) -> &'t str {
        let has_space = !is_first && self.tokenizer.puts_space();
        piece.strip_prefix(' ').filter(|_| has_space).unwrap_or(piece)
    }

    /// Ends the loss mask at the end-of-turn token: the line end that many templates put behind it is never
    /// generated.
    fn up_to_ends(&self, mut marked: MaskedTokens) -> MaskedTokens {
        let mut at = marked.ids.len();
        while at > 0 {
            let is_in = marked.mask[at - 1];
            let start =
                marked.mask[..at].iter().rposition(|other| *other != is_in).map_or(0, |p| p + 1);
            let end = marked.ids[start..at].iter().rposition(|id| self.tokenizer.is_eos(*id));
            if let Some(end) = end.filter(|_| is_in) {
                marked.mask[start + end + 1..at].fill(false);
            }
            at = start;
        }
        marked
    }
}

impl TokenisedBlock {
    fn put(&mut self, ids: impl IntoIterator<Item = u32>, counts: bool) {
        self.ids.extend(ids);
        self.loss_mask.resize(self.ids.len(), counts);
    }

    /// Ends the document that began at `start`, or leaves it out; gives where the next one begins.
    fn end(&mut self, start: usize, foreign: Option<TextFault>) -> usize {
        match foreign {
            Some(fault) => {
                self.faults.push((None, fault));
                self.ids.truncate(start);
                self.loss_mask.truncate(start);
            }
            None => self.ends.push(self.ids.len()),
        }
        self.ids.len()
    }
}

/// The lines of a piece of text that are UTF-8; the others are faults.
fn readable<'b>(
    bytes: &'b [u8],
    lines_before: u64,
    faults: &mut Vec<(Option<FileSpan>, TextFault)>,
) -> Cow<'b, str> {
    if let Ok(text) = std::str::from_utf8(bytes) {
        return text.into();
    }
    let mut kept = String::with_capacity(bytes.len());
    for (n_before, line) in (lines_before..).zip(bytes.split_inclusive(|byte| *byte == b'\n')) {
        match std::str::from_utf8(line) {
            Ok(line) => kept.push_str(line),
            Err(error) => faults.push((Some(TextForm::Text.at(n_before)), not_utf8(line, error))),
        }
    }
    kept.into()
}

/// Tokens that are not learnt.
fn context(ids: Vec<u32>) -> MaskedTokens {
    MaskedTokens { mask: vec![false; ids.len()], ids }
}

fn refused(error: &crate::TrainerError) -> TextFault {
    TextFault::Refused { why: error.to_string() }
}
