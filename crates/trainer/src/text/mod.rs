//! Text datasets: files of any size to packed sequences of tokens. Host only: knows nothing of models,
//! devices or training.
//!
//! ```text
//! path ─▶ source ─▶ read ─▶ encode ─▶ store ─▶ pack ─▶ Sequence
//!         files     blocks  tokens    on disk  which pieces each sequence is made of
//! ```
//!
//! Everything follows from the files, the tokenizer and the request: sequence n is always the same, so that
//! a run resumes with the next one. A problem with a file or a line is a value, and the rest is used.
//!
//! Memory: 16 bytes for each document, 8 for each piece of one in a sequence, and while files are read
//! some megabytes for each thread, however large the files are.

pub mod chat;
mod encode;
mod foreign;
mod pack;
pub mod preference;
mod read;
mod record;
mod source;
mod store;
mod table;
#[cfg(test)]
mod tests;
mod tokenise;
pub mod tokenizer;
mod values;

use std::path::{Path, PathBuf};

use compute::ops::IGNORE_INDEX;
use weights::checksum::Hasher;

pub use crate::data::fault::{FileSpan, TextFault};
pub use chat::{ChatTemplate, Message};
pub use tokenizer::Tokenizer;

use crate::data::findings::explained;
use crate::data::{Findings, Problem, ProblemKind};
use crate::error::{Result, TrainerError};
use crate::fingerprint::{Fingerprint, PartHashes, short};
use crate::hashes::{HashCache, field};
use crate::progress::{ProgressEvent, ProgressFn};
use pack::{HoldOutSplit, Packing, pack};
use source::{TextForm, TextSource, find};
use store::{LeftOutRecord, TokenStore};
use tokenise::tokenise;
use tokenizer::MaskedTokens;

/// The form of the files in the cache.
const VERSION: &str = "texts-v1";

/// Incremented when the same file would give other tokens.
const TOKENS_VERSION: u64 = 2;

/// The phase in which files are looked at.
pub const CHECKSUMS_PHASE: &str = "checksums";

/// The phase in which files become tokens.
pub const TOKENS_PHASE: &str = "texts";

/// What is to be read, and how.
#[derive(Clone, Debug)]
pub struct TextDataRequest {
    /// A file, or a folder of files.
    pub path: PathBuf,
    /// What records say.
    pub kind: RecordKind,
    /// Whether links in the folder may lead out of it.
    pub follow_links: bool,
    /// How wide tokens are in files of tokens that do not say so.
    pub width: Option<TokenWidth>,
    /// Tokens of a sequence.
    pub length: usize,
    /// The validation split.
    pub held_out: HeldOut,
    /// Seed of the order of documents and of the split.
    pub seed: u64,
    /// The cache.
    pub folder: PathBuf,
}

/// What the records of files say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordKind {
    /// Texts to learn, each a document.
    Texts,
    /// A prompt with a chosen and a rejected answer: two documents.
    Pairs,
    /// A prompt with an answer, and whether people liked it: a document, and one whose only token is 1 or 0.
    Labelled,
    /// A prompt that the model completes itself: a document, and one whose tokens are the bytes of the whole record, for
    /// whoever gives the reward.
    Prompts,
}

impl RecordKind {
    /// Documents of a record that have an answer.
    fn n_answers(self) -> usize {
        match self {
            Self::Texts | Self::Prompts => 0,
            Self::Pairs => 2,
            Self::Labelled => 1,
        }
    }

    /// Documents of a record that a model reads.
    fn n_read(self) -> usize {
        match self {
            Self::Texts | Self::Labelled | Self::Prompts => 1,
            Self::Pairs => 2,
        }
    }

    /// The keys of a preference.
    fn expected(self) -> &'static str {
        match self {
            Self::Prompts => "prompt",
            Self::Texts | Self::Pairs => "prompt, chosen and rejected",
            Self::Labelled => "prompt, completion and label",
        }
    }
}

/// The validation split.
#[derive(Clone, Debug, PartialEq)]
pub enum HeldOut {
    /// Nothing.
    None,
    /// This share of the documents, between 0 and 1, and at least one.
    Share(f64),
    /// Files of their own.
    Path(PathBuf),
}

/// Bytes that a token takes in a file of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenWidth {
    /// For vocabularies up to 65536.
    Two,
    /// For any.
    Four,
}

impl TokenWidth {
    fn bytes(self) -> usize {
        match self {
            Self::Two => 2,
            Self::Four => 4,
        }
    }
}

/// A packed training sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// The tokens of one or more documents, padded with the end-of-text token.
    pub ids: Vec<u32>,
    /// The next token of each; [`IGNORE_INDEX`] at a document's end, where the loss is masked, and in
    /// padding.
    pub targets: Vec<u32>,
    /// The index where each token's document begins: attention does not see what is before.
    pub first_keys: Vec<u32>,
}

/// The texts of a job, in tokens.
pub struct TextDataset {
    train: PackedSplit,
    held_out: PackedSplit,
    stores: Vec<TokenStore>,
    problems: Vec<Problem>,
    /// Of which there is something to read.
    n_files: usize,
    length: usize,
    /// The padding token.
    padding: u32,
    fingerprint: Fingerprint,
}

/// Some sequences of one of the stores.
struct PackedSplit {
    store: usize,
    packing: Packing,
}

impl TextDataset {
    /// Reads what was not read before, and says which sequences there are.
    pub fn open(
        request: &TextDataRequest,
        tokenizer: &Tokenizer,
        on_progress: ProgressFn<'_>,
    ) -> Result<Self> {
        let OpenedTexts { stores, fingerprint, problems, n_files } =
            OpenedTexts::open(request, tokenizer, on_progress)?;
        let (train, held_out) = divide(request, &stores, &problems)?;
        let (length, padding) = (request.length, tokenizer.eos().unwrap_or(0));
        Ok(Self { train, held_out, stores, problems, n_files, length, padding, fingerprint })
    }

    /// The summary of problems.
    pub fn findings(&self) -> Findings {
        Findings::of_texts(&self.problems, self.n_files, self.n_documents())
    }

    /// Files with something to read in them.
    pub fn n_files(&self) -> usize {
        self.n_files
    }

    /// Documents of all files.
    pub fn n_documents(&self) -> usize {
        self.stores.iter().map(|store| store.documents.len()).sum()
    }

    /// What was wrong with files and lines, and with the cache itself.
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }

    /// Sequences of an epoch.
    pub fn n_train(&self) -> usize {
        self.train.packing.len()
    }

    /// Sequences that the loss is measured on.
    pub fn n_held_out(&self) -> usize {
        self.held_out.packing.len()
    }

    /// Tokens of an epoch, without padding.
    pub fn n_tokens(&self) -> u64 {
        self.train.packing.n_tokens
    }

    /// A sequence to train on, by its number below [`Self::n_train`]. May be asked for by any thread.
    pub fn train(&self, index: usize) -> Result<Sequence> {
        self.sequence(&self.train, index)
    }

    /// A sequence to measure the loss on, by its number below [`Self::n_held_out`].
    pub fn held_out(&self, index: usize) -> Result<Sequence> {
        self.sequence(&self.held_out, index)
    }

    /// Identifies these sequences: a hash of the files, the tokenizer and the request.
    pub fn fingerprint(&self) -> Fingerprint {
        self.fingerprint.clone()
    }

    fn sequence(&self, part: &PackedSplit, index: usize) -> Result<Sequence> {
        if index >= part.packing.len() {
            return Err(TrainerError::Request {
                problem: format!("sequence {index} of {}", part.packing.len()),
                hint: "ask for an index below the number of sequences",
            });
        }
        let store = &self.stores[part.store];
        let mut sequence = Sequence::with_room(self.length);
        for piece in part.packing.pieces(index) {
            let document = &store.documents[piece.document as usize];
            let range = piece.range(document, self.length);
            // With the token behind it, if there is one: it is asked for too.
            let end = document.length.min(range.end + 1);
            let [first, last] = [range.start, end].map(|at| document.start + u64::from(at));
            sequence.put(&store.read(first..last)?, range.len());
        }
        sequence.fill_up(self.length, self.padding);
        Ok(sequence)
    }
}

impl Sequence {
    fn with_room(length: usize) -> Self {
        let [ids, targets, first_keys] = [(); 3].map(|()| Vec::with_capacity(length));
        Self { ids, targets, first_keys }
    }

    /// Adds the first `n` tokens of a piece, which may know one more.
    fn put(&mut self, piece: &MaskedTokens, n: usize) {
        let start = self.ids.len() as u32;
        self.ids.extend(&piece.ids[..n]);
        self.first_keys.resize(self.ids.len(), start);
        let next = |at: usize| match piece.mask.get(at + 1) {
            Some(true) => piece.ids[at + 1],
            _ => IGNORE_INDEX,
        };
        self.targets.extend((0..n).map(next));
    }

    fn fill_up(&mut self, length: usize, padding: u32) {
        let start = self.ids.len() as u32;
        self.ids.resize(length, padding);
        self.targets.resize(length, IGNORE_INDEX);
        self.first_keys.resize(length, start);
    }
}

/// The tokens of a request, and what was wrong with its files.
struct OpenedTexts {
    stores: Vec<TokenStore>,
    fingerprint: Fingerprint,
    problems: Vec<Problem>,
    n_files: usize,
}

impl OpenedTexts {
    /// Reads what was not read before.
    fn open(
        request: &TextDataRequest,
        tokenizer: &Tokenizer,
        on_progress: ProgressFn<'_>,
    ) -> Result<Self> {
        check(request)?;
        let folder = request.folder.join(VERSION);
        let mut hashes = HashCache::open(folder.join("hashes.json"));
        let parts = PartHashes::from([("the tokenizer".into(), tokenizer.fingerprint())]);
        let mut opening = TextDatasetBuilder {
            request,
            tokenizer,
            folder: &folder,
            problems: Vec::new(),
            n_files: 0,
            parts,
            on_progress,
        };
        let opened = opening.stores(&mut hashes);
        hashes.save();
        let (stores, whole) = opened?;
        let fingerprint = Fingerprint { whole, parts: opening.parts };
        let TextDatasetBuilder { problems, n_files, .. } = opening;
        Ok(Self { stores, fingerprint, problems, n_files })
    }
}

/// A request being met.
struct TextDatasetBuilder<'a> {
    request: &'a TextDataRequest,
    tokenizer: &'a Tokenizer,
    folder: &'a Path,
    problems: Vec<Problem>,
    n_files: usize,
    /// The files that were found, and the tokenizer.
    parts: PartHashes,
    on_progress: ProgressFn<'a>,
}

impl TextDatasetBuilder<'_> {
    /// One store, or two where files of their own are held out; and what all follows from.
    fn stores(&mut self, hashes: &mut HashCache) -> Result<(Vec<TokenStore>, String)> {
        let TextDataRequest { path, length, held_out, seed, .. } = self.request;
        let mut hasher = Hasher::new();
        let mut stores = vec![self.store(path, hashes, &mut hasher)?];
        match held_out {
            HeldOut::None => field(&mut hasher, b"none"),
            HeldOut::Share(share) => field(&mut hasher, &share.to_le_bytes()),
            HeldOut::Path(path) => stores.push(self.store(path, hashes, &mut hasher)?),
        }
        field(&mut hasher, &(*length as u64).to_le_bytes());
        field(&mut hasher, &seed.to_le_bytes());
        Ok((stores, hasher.finalize().to_hex().to_string()))
    }

    /// The tokens of a path, made if they are not there.
    fn store(
        &mut self,
        path: &Path,
        hashes: &mut HashCache,
        all: &mut Hasher,
    ) -> Result<TokenStore> {
        let Self { tokenizer, on_progress: tell, .. } = *self;
        tell(ProgressEvent::Phase { name: CHECKSUMS_PHASE, total: 0 });
        let tick = |bytes| tell(ProgressEvent::Loaded(bytes));
        let follow_links = self.request.follow_links;
        let sources = find(path, follow_links, hashes, &tick, &mut self.problems)?;
        for TextSource { path: file, hash, .. } in &sources {
            let below = file.strip_prefix(path).ok().filter(|below| *below != Path::new(""));
            let name = below.map_or_else(|| file.file_name().map(Path::new), Some);
            self.parts.insert(name.unwrap_or(file).display().to_string(), short(hash));
        }
        let address = self.address(&sources);
        field(all, address.as_bytes());
        let folder = self.folder.join(address);
        let vocabulary = tokenizer.vocab_size();
        let mut store = TokenStore::open(&folder, vocabulary, hashes, &tick, &mut self.problems)?;
        if store.at.source < sources.len() {
            let TextDataRequest { width, kind, .. } = self.request;
            tokenise(&sources, *width, *kind, tokenizer, &mut store, tell)?;
        }
        let problem = |(source, at, fault): &LeftOutRecord| {
            let kind = ProblemKind::Text { at: *at, fault: fault.clone() };
            Problem::skipped(sources[*source].path.clone(), kind)
        };
        let left: Vec<Problem> = store.left_out.iter().map(problem).collect();
        self.n_files += sources.len();
        self.n_files -= left.iter().filter(|problem| !problem.kind.is_of_record()).count();
        self.problems.extend(left);
        Ok(store)
    }

    /// The checksum of all that tokens follow from.
    fn address(&self, sources: &[TextSource]) -> String {
        let mut hasher = Hasher::new();
        field(&mut hasher, &TOKENS_VERSION.to_le_bytes());
        field(&mut hasher, self.tokenizer.fingerprint().as_bytes());
        match self.request.kind {
            RecordKind::Texts => {}
            RecordKind::Pairs => field(&mut hasher, b"pairs"),
            RecordKind::Labelled => field(&mut hasher, b"labelled"),
            RecordKind::Prompts => field(&mut hasher, b"prompts"),
        }
        for source in sources {
            let form: &[u8] = match (source.form, self.request.width) {
                (TextForm::Text, _) => b"text",
                // Both are what a name says, and what is inside decides.
                (TextForm::Lines | TextForm::Values, _) => b"lines",
                (TextForm::Table(b'\t'), _) => b"table with tabs",
                (TextForm::Table(_), _) => b"table",
                (TextForm::Tokens, None) => b"tokens",
                (TextForm::Tokens, Some(TokenWidth::Two)) => b"tokens of 2 bytes",
                (TextForm::Tokens, Some(TokenWidth::Four)) => b"tokens of 4 bytes",
            };
            field(&mut hasher, form);
            field(&mut hasher, source.hash.as_bytes());
        }
        hasher.finalize().to_hex().to_string()
    }
}

fn check(request: &TextDataRequest) -> Result<()> {
    let refuse = |problem, hint| Err(TrainerError::Request { problem, hint });
    if request.length < 2 {
        let problem = format!("sequences of {} tokens, least is 2", request.length);
        return refuse(problem, "ask for longer ones: a token is predicted from those before it");
    }
    match request.held_out {
        HeldOut::Share(share) if !(share > 0.0 && share < 1.0) => {
            let problem = format!("a share of {share} is held out, it has to be between 0 and 1");
            refuse(problem, "hold out less than all, or nothing")
        }
        _ => Ok(()),
    }
}

/// Which sequences are trained on, and which are not.
fn divide(
    request: &TextDataRequest,
    stores: &[TokenStore],
    problems: &[Problem],
) -> Result<(PackedSplit, PackedSplit)> {
    let TextDataRequest { length, seed, .. } = *request;
    let documents = &stores[0].documents;
    let all = |store: usize| pack(&stores[store].documents, length, seed, |_| true);
    let (train, held_out) = match &request.held_out {
        HeldOut::None => (all(0), PackedSplit { store: 0, packing: Packing::default() }),
        HeldOut::Path(_) => (all(0), PackedSplit { store: 1, packing: all(1) }),
        HeldOut::Share(share) => {
            let split = HoldOutSplit::new(documents, length, seed, *share);
            let some = |is_held| {
                pack(documents, length, seed, |piece| split.is_held(documents, piece) == is_held)
            };
            (some(false), PackedSplit { store: 0, packing: some(true) })
        }
    };
    if train.len() == 0 {
        return Err(nothing(&request.path, &stores[0], held_out.packing.len(), problems));
    }
    if let (HeldOut::Path(path), 0) = (&request.held_out, held_out.packing.len()) {
        return Err(nothing(path, &stores[1], 0, problems));
    }
    Ok((PackedSplit { store: 0, packing: train }, held_out))
}

/// Why there is nothing to train on: what was found instead.
fn nothing(path: &Path, store: &TokenStore, n_held: usize, problems: &[Problem]) -> TrainerError {
    let why = match (n_held, store.documents.len()) {
        (1.., _) => "all of it is held out".into(),
        (0, 1..) => "none is two tokens long".into(),
        _ => explained(problems).unwrap_or_else(|| "there is none".into()),
    };
    TrainerError::Request {
        problem: format!("no text to train with in {}: {why}", path.display()),
        hint: "give .txt, .jsonl, .json or .csv files, or a folder of those: docs/texts.md lists what they \
               may hold",
    }
}
