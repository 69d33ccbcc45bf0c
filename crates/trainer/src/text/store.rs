//! The token cache on disk: made once for each set of files and tokenizer.
//!
//! ```text
//! cache/
//! └── texts-v1/                          another form of files would be another folder
//!     ├── hashes.json                    checksums of files by path, length, time and inode
//!     └── 5a0c…/                         checksum of the files, the tokenizer, and how they were read
//!         ├── 00000-91f3….safetensors    a shard; behind its number is its BLAKE3 checksum
//!         │     __metadata__               position: where reading went on; faults: what was left out
//!         │     tokens                     U16 or U32 [tokens]
//!         │     counts                     U8 [tokens / 8], a bit for each that is learnt; missing: all are
//!         │     lengths                    U32 [documents], in tokens
//!         │     draws                      U32 [documents], the start of each one's checksum
//!         └── 00001-…
//! ```
//!
//! A shard is written when it is full and has the place where the next one begins: a program that was
//! killed goes on from the last. Every shard follows from the files alone, so two programs that make
//! the same one write the same bytes. A text that is not at its end when a shard is full is cut there.
//!
//! In memory there are 16 bytes for each document, and no token but those asked for.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;
use weights::checksum::{Hash, Hasher};
use weights::load::{LoadOptions, LoadRequest, PageCache, load};
use weights::safetensors::{self, OutputTensor};
use weights::write::{remove_partial_files, write_file};
use weights::{BytesDoneFn, Catalog, FileDtype, WeightsError};

use super::encode::TokenisedBlock;
use super::read::ReadPosition;
use super::tokenizer::MaskedTokens;
use crate::data::fault::{FileSpan, TextFault};
use crate::data::{Problem, ProblemKind};
use crate::error::{Result, TrainerError};
use crate::hashes::HashCache;

/// Tokens of a shard. Chosen: what is lost when a program is killed is made again within a minute,
/// and a hundred gigabytes of text are some thousand files. In tests, small files make several.
const SHARD_TOKENS: usize = if cfg!(test) { 4 << 10 } else { 16 << 20 };

/// Stretches of faults that a shard lists; the others are counted. Chosen: a megabyte or two, and more
/// than anybody reads.
const MOST_FAULTS: usize = if cfg!(test) { 100 } else { 10_000 };

const SUFFIX: &str = ".safetensors";
const DAMAGED_SUFFIX: &str = ".damaged";

/// What was left out: of which file, where in it, and why.
pub(super) type LeftOutRecord = (usize, Option<FileSpan>, TextFault);

/// A text in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TokenDocument {
    /// The first of its tokens, counted over all shards.
    pub start: u64,
    /// How many there are.
    pub length: u32,
    /// A uniform number from the hash of its tokens.
    pub draw: u32,
}

/// All tokens of some files.
pub(super) struct TokenStore {
    folder: PathBuf,
    shards: Vec<TokenShard>,
    /// In the order of the files.
    pub documents: Vec<TokenDocument>,
    /// What was left out.
    pub left_out: Vec<LeftOutRecord>,
    /// Where reading goes on.
    pub at: ReadPosition,
    vocabulary: usize,
}

struct TokenShard {
    catalog: Catalog,
    /// Tokens before it.
    first: u64,
    n_tokens: u64,
}

impl TokenStore {
    /// Opens what there is; damaged shards, and what is behind them, are made again.
    pub fn open(
        folder: &Path,
        vocabulary: usize,
        hashes: &mut HashCache,
        tick: BytesDoneFn<'_>,
        problems: &mut Vec<Problem>,
    ) -> Result<Self> {
        let io = |source| TrainerError::Io { what: "create", path: folder.into(), source };
        fs::create_dir_all(folder).map_err(io)?;
        remove_partial_files(folder);
        let mut store = Self {
            folder: folder.into(),
            shards: Vec::new(),
            documents: Vec::new(),
            left_out: Vec::new(),
            at: ReadPosition::default(),
            vocabulary,
        };
        while let Some((path, name)) = shard_called(folder, store.shards.len())? {
            match store.take(&path, name, hashes, tick) {
                Ok(()) => {}
                Err(error) if error.is_cancelled() || error.is_refusal() => return Err(error),
                Err(error) => {
                    problems.push(quarantine(&path, &error));
                    break;
                }
            }
        }
        Ok(store)
    }

    /// Writes a shard behind the others; reading goes on at `next`.
    pub fn push(&mut self, growing: ShardBuilder, next: ReadPosition) -> Result<()> {
        let path = growing.write(&self.folder, self.shards.len(), next)?;
        self.add(Catalog::open(&path)?)
    }

    /// Tokens of all documents.
    pub fn n_tokens(&self) -> u64 {
        self.shards.last().map_or(0, |shard| shard.first + shard.n_tokens)
    }

    /// Some neighbouring tokens of one document.
    pub fn read(&self, range: Range<u64>) -> Result<MaskedTokens> {
        let n = (range.end - range.start) as usize;
        let after = self.shards.partition_point(|shard| shard.first <= range.start);
        let shard = &self.shards[after - 1];
        let first = range.start - shard.first;
        let (tokens, dtype) = (shard.catalog.find("tokens")?, dtype(self.vocabulary));
        let mut bytes = vec![0; n * dtype.bytes() as usize];
        let (first_byte, end_byte) = (first / 8, (first + n as u64).div_ceil(8));
        let mut bits = vec![u8::MAX; (end_byte - first_byte) as usize];
        let mut wanted =
            vec![LoadRequest { tensor: tokens, dtype, first, scales: &[], into: &mut bytes[..] }];
        if let Ok(tensor) = shard.catalog.find("counts") {
            let into = &mut bits[..];
            let (dtype, first) = (FileDtype::U8, first_byte);
            wanted.push(LoadRequest { tensor, dtype, first, scales: &[], into });
        }
        // Small reads that come again in the next epoch.
        load(&shard.catalog, wanted, LoadOptions { threads: 1, cache: PageCache::Fill }, &|_| {
            true
        })?;
        let ids = ids(&bytes, dtype);
        if let Some(id) = ids.iter().find(|id| **id as usize >= self.vocabulary) {
            let problem = format!("token {id} of a vocabulary of {}", self.vocabulary);
            return Err(TrainerError::Cache { problem, path: shard.catalog.path.clone() });
        }
        let is_in = |at: u64| bits[(at / 8 - first_byte) as usize] >> (at % 8) & 1 == 1;
        Ok(MaskedTokens { ids, mask: (first..first + n as u64).map(is_in).collect() })
    }

    fn take(
        &mut self,
        path: &Path,
        name: Hash,
        hashes: &mut HashCache,
        tick: BytesDoneFn<'_>,
    ) -> Result<()> {
        let (found, _) = hashes.hash_file(path, tick)?;
        if found != name {
            let problem = format!("its checksum is {found}");
            return Err(TrainerError::Cache { problem, path: path.into() });
        }
        self.add(Catalog::open(path)?)
    }

    fn add(&mut self, catalog: Catalog) -> Result<()> {
        let [lengths, draws] = [read_u32(&catalog, "lengths")?, read_u32(&catalog, "draws")?];
        let (at, left) =
            (noted(&catalog, "position")?, noted::<Vec<LeftOutRecord>>(&catalog, "faults")?);
        let (first, n_tokens) = (self.n_tokens(), catalog.find("tokens")?.numel());
        self.at = at;
        self.left_out.extend(left);
        let mut start = first;
        for (length, draw) in lengths.into_iter().zip(draws) {
            self.documents.push(TokenDocument { start, length, draw });
            start += u64::from(length);
        }
        self.shards.push(TokenShard { catalog, first, n_tokens });
        Ok(())
    }
}

/// A shard that is not written yet.
pub(super) struct ShardBuilder {
    dtype: FileDtype,
    tokens: Vec<u8>,
    loss_mask: Vec<u8>,
    n_tokens: usize,
    is_all_loss: bool,
    lengths: Vec<u32>,
    draws: Vec<u32>,
    left_out: Vec<LeftOutRecord>,
    n_more: u64,
    /// The document that is not at its end: how long it is, and its checksum so far.
    n_open: u32,
    hasher: Hasher,
}

impl ShardBuilder {
    pub fn new(vocabulary: usize) -> Self {
        Self {
            dtype: dtype(vocabulary),
            tokens: Vec::new(),
            loss_mask: Vec::new(),
            n_tokens: 0,
            is_all_loss: true,
            lengths: Vec::new(),
            draws: Vec::new(),
            left_out: Vec::new(),
            n_more: 0,
            n_open: 0,
            hasher: Hasher::new(),
        }
    }

    /// Puts a block's tokens behind those of the block before it.
    pub fn add(&mut self, source: usize, encoded: TokenisedBlock) {
        let mut ends = encoded.ends.into_iter().peekable();
        for (at, (id, counts)) in encoded.ids.iter().zip(encoded.loss_mask).enumerate() {
            while ends.next_if_eq(&at).is_some() {
                self.end();
            }
            self.token(*id, counts);
        }
        ends.for_each(|_| self.end());
        for (at, fault) in encoded.faults {
            self.leave_out(source, at, fault);
        }
    }

    /// Neighbours with the same fault are one stretch.
    fn leave_out(&mut self, source: usize, at: Option<FileSpan>, fault: TextFault) {
        if let (Some((of, Some(before), same)), Some(at)) = (self.left_out.last_mut(), at)
            && (*of, &*same, before.last + 1) == (source, &fault, at.first)
        {
            before.last = at.last;
        } else if self.left_out.len() < MOST_FAULTS {
            self.left_out.push((source, at, fault));
        } else {
            self.n_more += at.map_or(1, FileSpan::count) as u64;
        }
    }

    pub fn is_full(&self) -> bool {
        self.n_tokens >= SHARD_TOKENS
    }

    fn token(&mut self, id: u32, counts: bool) {
        let bytes = id.to_le_bytes();
        self.tokens.extend(&bytes[..self.dtype.bytes() as usize]);
        self.hasher.update(&bytes);
        if self.n_tokens.is_multiple_of(8) {
            self.loss_mask.push(0);
        }
        self.loss_mask[self.n_tokens / 8] |= u8::from(counts) << (self.n_tokens % 8);
        self.is_all_loss &= counts;
        self.n_tokens += 1;
        self.n_open += 1;
    }

    fn end(&mut self) {
        if self.n_open > 0 {
            let hash = std::mem::replace(&mut self.hasher, Hasher::new()).finalize();
            let (start, _) = hash.as_bytes().split_first_chunk().expect("a hash has 32 bytes");
            self.draws.push(u32::from_le_bytes(*start));
            self.lengths.push(std::mem::take(&mut self.n_open));
        }
    }

    /// Gives the shard's path.
    fn write(mut self, folder: &Path, number: usize, next: ReadPosition) -> Result<PathBuf> {
        self.end();
        if let (n @ 1.., Some((source, _, _))) = (self.n_more, self.left_out.last()) {
            self.left_out.push((*source, None, TextFault::More { n }));
        }
        let noted = [("position".into(), json(&next)), ("faults".into(), json(&self.left_out))];
        let (metadata, parts) = (BTreeMap::from(noted), self.parts());
        let mut tensors: Vec<OutputTensor> =
            parts.iter().map(|(name, (dtype, bytes))| output_tensor(name, *dtype, bytes)).collect();
        safetensors::order(&mut tensors);
        let header = safetensors::header(&metadata, &tensors)
            .map_err(|problem| TrainerError::Cache { problem, path: folder.into() })?;
        // The name must be known before the file is written.
        let mut hasher = Hasher::new();
        hasher.update(&header);
        for tensor in &tensors {
            hasher.update(&parts[tensor.name.as_str()].1);
        }
        let path = folder.join(format!("{number:05}-{}{SUFFIX}", hasher.finalize()));
        write_file(&path, &metadata, tensors, false, &mut |tensor, out| {
            let written = out.write_all(&parts[tensor.name.as_str()].1);
            written.map_err(|source| WeightsError::io("write", &path, source))
        })?;
        Ok(path)
    }

    /// The tensors by name.
    fn parts(self) -> BTreeMap<&'static str, (FileDtype, Vec<u8>)> {
        let numbers = |numbers: Vec<u32>| {
            (FileDtype::U32, numbers.into_iter().flat_map(u32::to_le_bytes).collect::<Vec<u8>>())
        };
        let mut parts = BTreeMap::from([
            ("tokens", (self.dtype, self.tokens)),
            ("lengths", numbers(self.lengths)),
            ("draws", numbers(self.draws)),
        ]);
        if !self.is_all_loss {
            parts.insert("counts", (FileDtype::U8, self.loss_mask));
        }
        parts
    }
}

/// As narrow as the vocabulary allows.
fn dtype(vocabulary: usize) -> FileDtype {
    if vocabulary <= 1 << 16 { FileDtype::U16 } else { FileDtype::U32 }
}

fn output_tensor(name: &str, dtype: FileDtype, bytes: &[u8]) -> OutputTensor {
    let n = bytes.len() as u64 / dtype.bytes();
    OutputTensor { name: name.into(), dtype, shape: vec![n] }
}

fn ids(bytes: &[u8], dtype: FileDtype) -> Vec<u32> {
    let id = |bytes: &[u8]| bytes.iter().rev().fold(0, |id, byte| id << 8 | u32::from(*byte));
    bytes.chunks_exact(dtype.bytes() as usize).map(id).collect()
}

/// The shard of a number, with the checksum in its name.
fn shard_called(folder: &Path, number: usize) -> Result<Option<(PathBuf, Hash)>> {
    let io = |source| TrainerError::Io { what: "read", path: folder.into(), source };
    for entry in fs::read_dir(folder).map_err(io)? {
        let path = entry.map_err(io)?.path();
        let name = path.file_name().and_then(|name| name.to_str());
        let name = name.and_then(|name| name.strip_suffix(SUFFIX)?.split_once('-'));
        if let Some((found, hash)) = name
            && found.parse() == Ok(number)
            && let Ok(hash) = Hash::from_hex(hash)
        {
            return Ok(Some((path, hash)));
        }
    }
    Ok(None)
}

/// Under another name it can still be looked at, and what it held is made again.
fn quarantine(path: &Path, error: &TrainerError) -> Problem {
    let mut name = path.as_os_str().to_owned();
    name.push(DAMAGED_SUFFIX);
    _ = fs::rename(path, name);
    Problem::warning(path, ProblemKind::ShardDamaged { why: error.to_string() })
}

fn read_u32(catalog: &Catalog, name: &str) -> Result<Vec<u32>> {
    let tensor = catalog.find(name)?;
    let mut bytes = vec![0; tensor.bytes as usize];
    let wanted = vec![LoadRequest::whole(tensor, FileDtype::U32, &mut bytes[..])];
    load(catalog, wanted, LoadOptions { threads: 1, cache: PageCache::Fill }, &|_| true)?;
    Ok(ids(&bytes, FileDtype::U32))
}

fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("it is plain data")
}

fn noted<T: DeserializeOwned>(catalog: &Catalog, key: &str) -> Result<T> {
    let text = catalog.metadata.get(key).map_or("", String::as_str);
    serde_json::from_str(text).map_err(|error| TrainerError::Cache {
        problem: format!("{key} in its metadata: {error}"),
        path: catalog.path.clone(),
    })
}
