//! Preferences: pairs of answers, or answers with a label, each with its prompt; or prompts alone. They are tokenised and cached as texts
//! are, two documents to a record, and are not packed: each answer is a sequence of its own.

mod record;

use std::path::Path;

pub(super) use record::{labelled, pair, prompted};

use super::pack::{DocumentPiece, HoldOutSplit};
use super::store::{TokenDocument, TokenStore};
use super::{HeldOut, OpenedTexts, RecordKind, TextDataRequest, Tokenizer, nothing};
use crate::data::fault::TextFault;
use crate::data::{Findings, Problem, ProblemKind};
use crate::error::Result;
use crate::fingerprint::Fingerprint;
use crate::progress::ProgressFn;

/// Documents of a record.
const PER_RECORD: usize = 2;

/// The preferences of a job, in tokens.
pub struct PreferenceDataset {
    kind: RecordKind,
    train: RecordSplit,
    held_out: RecordSplit,
    stores: Vec<TokenStore>,
    problems: Vec<Problem>,
    n_files: usize,
    /// The most tokens of prompt and answer; of a prompt alone.
    length: usize,
    fingerprint: Fingerprint,
}

/// Some records of one of the stores.
#[derive(Default)]
struct RecordSplit {
    store: usize,
    records: Vec<u32>,
}

/// An answer with its prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AnswerTokens {
    /// All of its tokens.
    pub ids: Vec<u32>,
    /// Which of them are the answer.
    pub is_answer: Vec<bool>,
}

/// A record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Preference {
    /// Chosen and rejected, or one alone; or a prompt without one.
    pub answers: Vec<AnswerTokens>,
    /// Whether the one alone is liked.
    pub is_desirable: bool,
    /// The whole record as JSON, of a prompt alone.
    pub record: String,
}

impl PreferenceDataset {
    /// Reads what was not read before.
    pub fn open(
        request: &TextDataRequest,
        tokenizer: &Tokenizer,
        on_progress: ProgressFn<'_>,
    ) -> Result<Self> {
        let OpenedTexts { stores, fingerprint, mut problems, n_files } =
            OpenedTexts::open(request, tokenizer, on_progress)?;
        let TextDataRequest { kind, length, .. } = *request;
        let answered = |store: usize, path: &Path, problems: &mut Vec<Problem>| {
            answered(kind, &stores[store], length, path, problems)
        };
        let all = answered(0, &request.path, &mut problems)?;
        let (train, held_out) = match &request.held_out {
            HeldOut::None => (all, RecordSplit::default()),
            HeldOut::Path(path) => {
                let records = answered(1, path, &mut problems)?;
                (all, RecordSplit { store: 1, records })
            }
            HeldOut::Share(share) => {
                let (held, train) = divided(all, &stores[0].documents, request.seed, *share);
                (train, RecordSplit { store: 0, records: held })
            }
        };
        if train.is_empty() {
            return Err(nothing(
                &request.path,
                &stores[0],
                held_out.records.len().min(1),
                &problems,
            ));
        }
        let train = RecordSplit { store: 0, records: train };
        Ok(Self { kind, train, held_out, stores, problems, n_files, length, fingerprint })
    }

    /// The summary of problems.
    pub fn findings(&self) -> Findings {
        Findings::of_texts(&self.problems, self.n_files, self.n_train() + self.n_held_out())
    }

    /// What was wrong with files and records.
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }

    /// Files with something to read in them.
    pub fn n_files(&self) -> usize {
        self.n_files
    }

    /// Records that are trained on.
    pub fn n_train(&self) -> usize {
        self.train.records.len()
    }

    /// Records that the loss is measured on.
    pub fn n_held_out(&self) -> usize {
        self.held_out.records.len()
    }

    /// Records whose end is cut off: they are longer than sequences may be.
    pub fn n_cut(&self) -> usize {
        let all = [&self.train, &self.held_out].into_iter();
        all.map(|split| {
            let documents = &self.stores[split.store].documents;
            let is_cut = |record: &&u32| longest(self.kind, documents, **record) > self.length;
            split.records.iter().filter(is_cut).count()
        })
        .sum()
    }

    /// Tokens of all answers with their prompts.
    pub fn n_tokens(&self) -> u64 {
        let documents = &self.stores[self.train.store].documents;
        let of = |record: &u32| {
            let first = *record as usize * PER_RECORD;
            documents[first..first + self.kind.n_read()].iter().map(|it| u64::from(it.length))
        };
        self.train.records.iter().flat_map(of).sum()
    }

    /// Tokens of the longer answer with its prompt, of each record that is trained on.
    pub fn train_lengths(&self) -> Vec<usize> {
        self.lengths(&self.train)
    }

    /// The same of held-out records.
    pub fn held_out_lengths(&self) -> Vec<usize> {
        self.lengths(&self.held_out)
    }

    fn lengths(&self, split: &RecordSplit) -> Vec<usize> {
        let documents = &self.stores[split.store].documents;
        let length = |record: &u32| longest(self.kind, documents, *record).min(self.length);
        split.records.iter().map(length).collect()
    }

    /// A record to train on, by its number below [`Self::n_train`]. May be asked for by any thread.
    pub fn train(&self, index: usize) -> Result<Preference> {
        self.preference(&self.train, index)
    }

    /// A record to measure the loss on, by its number below [`Self::n_held_out`].
    pub fn held_out(&self, index: usize) -> Result<Preference> {
        self.preference(&self.held_out, index)
    }

    /// Identifies these preferences: a hash of the files, the tokenizer and the request.
    pub fn fingerprint(&self) -> Fingerprint {
        self.fingerprint.clone()
    }

    fn preference(&self, split: &RecordSplit, index: usize) -> Result<Preference> {
        let store = &self.stores[split.store];
        let first = split.records[index] as usize * PER_RECORD;
        let read = |document| tokens(store, document, self.length);
        let answers = (first..first + self.kind.n_read()).map(read).collect::<Result<_>>()?;
        let is_desirable = self.kind != RecordKind::Labelled || read(first + 1)?.ids == [1];
        let record = match self.kind {
            RecordKind::Prompts => {
                let bytes = tokens(store, first + 1, usize::MAX)?.ids;
                let bytes: Vec<u8> = bytes.into_iter().map(|byte| byte as u8).collect();
                String::from_utf8_lossy(&bytes).into_owned()
            }
            RecordKind::Texts | RecordKind::Pairs | RecordKind::Labelled => String::new(),
        };
        Ok(Preference { answers, is_desirable, record })
    }
}

/// The start of a document.
fn tokens(store: &TokenStore, document: usize, most: usize) -> Result<AnswerTokens> {
    let TokenDocument { start, length, .. } = store.documents[document];
    let n = u64::from(length).min(most as u64);
    let read = store.read(start..start + n)?;
    Ok(AnswerTokens { ids: read.ids, is_answer: read.mask })
}

/// Tokens of the longer answer of a record, or of its prompt.
fn longest(kind: RecordKind, documents: &[TokenDocument], record: u32) -> usize {
    let first = record as usize * PER_RECORD;
    documents[first..first + kind.n_read()].iter().map(|it| it.length as usize).max().unwrap_or(0)
}

/// The records of which some of each answer is within the length, or all of the prompt.
fn answered(
    kind: RecordKind,
    store: &TokenStore,
    length: usize,
    path: &Path,
    problems: &mut Vec<Problem>,
) -> Result<Vec<u32>> {
    let mut records = Vec::new();
    for record in 0..(store.documents.len() / PER_RECORD) as u32 {
        let first = record as usize * PER_RECORD;
        let mut has_answers = true;
        let prompt_tokens = store.documents[first].length as usize;
        if kind == RecordKind::Prompts && prompt_tokens > length {
            let fault = TextFault::PromptWithoutRoom { tokens: prompt_tokens, room: length };
            problems.push(Problem::skipped(path, ProblemKind::Text { at: None, fault }));
            continue;
        }
        for document in first..first + kind.n_answers() {
            if store.documents[document].length as usize > length {
                let read = tokens(store, document, length)?;
                has_answers &= read.is_answer.iter().skip(1).any(|is_in| *is_in);
            }
        }
        if has_answers {
            records.push(record);
        } else {
            let tokens = longest(kind, &store.documents, record);
            let fault = TextFault::PromptTooLong { tokens, length };
            let kind = ProblemKind::Text { at: None, fault };
            problems.push(Problem::skipped(path, kind));
        }
    }
    Ok(records)
}

/// Records that are held out, and the others. Follows from what they say.
fn divided(
    all: Vec<u32>,
    documents: &[TokenDocument],
    seed: u64,
    share: f64,
) -> (Vec<u32>, Vec<u32>) {
    let firsts = all.iter().map(|record| documents[*record as usize * PER_RECORD]);
    let firsts: Vec<TokenDocument> = firsts.collect();
    let most = firsts.iter().map(|it| it.length as usize).max().unwrap_or(1).max(2);
    let split = HoldOutSplit::new(&firsts, most, seed, share);
    let is_held =
        |index: usize| split.is_held(&firsts, DocumentPiece { document: index as u32, part: 0 });
    let (held, train): (Vec<_>, Vec<_>) =
        all.into_iter().enumerate().partition(|(index, _)| is_held(*index));
    let records = |of: Vec<(usize, u32)>| of.into_iter().map(|(_, record)| record).collect();
    (records(held), records(train))
}
