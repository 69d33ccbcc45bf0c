//! The shards of a cache: encoded things under their addresses, many to a file.
//!
//! A shard's name is the checksum of its bytes, so that two programs may write into one folder at
//! once: neither takes the other's name unless both wrote the same. Whether a shard is whole is
//! checked when the folder is opened, by its name; whether an entry is what was put there is checked
//! once more when it is read, since disks lose bits without touching a file's time.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use weights::checksum::{Hash, Hasher};
use weights::convert::{convert, encode};
use weights::load::{LoadOptions, LoadRequest, PageCache, load};
use weights::safetensors::{self, OutputTensor};
use weights::write::{remove_partial_files, write_file};
use weights::{BytesDoneFn, Catalog, FileDtype, TensorEncoding, WeightsError};

use crate::data::{Problem, ProblemKind};
use crate::error::{Result, TrainerError};
use crate::hashes::{HashCache, field};

/// Chosen: large enough that a big cache is few files, small enough to hold until it is written.
const SHARD_BYTES: usize = 64 << 20;

/// Chosen: what a killed program loses at most, and long enough that slow encoders do not leave a
/// file for each image.
const FLUSH_EVERY: Duration = Duration::from_secs(20);

const SUFFIX: &str = ".safetensors";

/// What a damaged shard's name ends with from then on.
const DAMAGED_SUFFIX: &str = ".damaged";

/// Where an encoded thing is found: the checksum of everything it was made from.
pub(super) type CacheKey = Hash;

/// One tensor of an entry.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct StoredTensor {
    pub name: String,
    pub dtype: FileDtype,
    pub shape: Vec<u64>,
    pub bytes: Vec<u8>,
}

impl StoredTensor {
    /// Numbers in a format of files.
    pub fn new(name: &str, dtype: FileDtype, shape: &[usize], values: &[f32]) -> Self {
        let mut bytes = vec![0; values.len() * dtype.bytes() as usize];
        encode(values, dtype, &mut bytes);
        Self {
            name: name.into(),
            dtype,
            shape: shape.iter().map(|size| *size as u64).collect(),
            bytes,
        }
    }

    /// Its numbers.
    pub fn values(&self) -> Vec<f32> {
        let mut bytes = vec![0; self.bytes.len() / self.dtype.bytes() as usize * size_of::<f32>()];
        convert(self.dtype, &self.bytes, FileDtype::F32, &mut bytes);
        let (chunks, _) = bytes.as_chunks::<4>();
        chunks.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    }
}

/// An encoded thing: tensors by name.
pub(super) type CacheEntry = Vec<StoredTensor>;

/// A folder of shards.
pub(super) struct CacheStore {
    folder: PathBuf,
    shards: Vec<Catalog>,
    /// In which shard an entry is.
    shard_of: HashMap<CacheKey, usize>,
    /// What is not written yet.
    pending: BTreeMap<String, CacheEntry>,
    pending_bytes: usize,
    flushed: Instant,
}

impl CacheStore {
    /// Opens a folder, or makes it. Damaged shards are put aside and listed.
    pub fn open(
        folder: &Path,
        hashes: &mut HashCache,
        tick: BytesDoneFn<'_>,
    ) -> Result<(Self, Vec<Problem>)> {
        let io = |what, source| TrainerError::Io { what, path: folder.into(), source };
        fs::create_dir_all(folder).map_err(|source| io("create", source))?;
        remove_partial_files(folder);
        let mut store = Self {
            folder: folder.into(),
            shards: Vec::new(),
            shard_of: HashMap::new(),
            pending: BTreeMap::new(),
            pending_bytes: 0,
            flushed: Instant::now(),
        };
        let mut problems = Vec::new();
        for entry in fs::read_dir(folder).map_err(|source| io("read", source))? {
            let path = entry.map_err(|source| io("read", source))?.path();
            let Some(name) = name_of(&path) else { continue };
            match open_shard(&path, name, hashes, tick) {
                Ok(catalog) => store.add(catalog),
                Err(error) if error.is_cancelled() || error.is_refusal() => return Err(error),
                Err(error) => problems.push(quarantine(&path, &error)),
            }
        }
        Ok((store, problems))
    }

    /// Whether there is an entry, written or not.
    pub fn has(&self, address: &CacheKey) -> bool {
        self.shard_of.contains_key(address) || self.pending.contains_key(address.to_hex().as_str())
    }

    /// Bytes on disk.
    pub fn bytes(&self) -> u64 {
        self.shards.iter().map(Catalog::bytes).sum()
    }

    /// Adds an entry, and writes a shard if there is enough for one or the last one was long ago.
    pub fn put(&mut self, address: CacheKey, entry: CacheEntry) -> Result<()> {
        self.pending_bytes += entry.iter().map(|part| part.bytes.len()).sum::<usize>();
        self.pending.insert(address.to_string(), entry);
        if self.pending_bytes >= SHARD_BYTES || self.flushed.elapsed() >= FLUSH_EVERY {
            self.flush()?;
        }
        Ok(())
    }

    /// Writes what is not written yet.
    pub fn flush(&mut self) -> Result<()> {
        self.flushed = Instant::now();
        if self.pending.is_empty() {
            return Ok(());
        }
        let path = write_shard(&self.folder, &self.pending)?;
        (self.pending, self.pending_bytes) = (BTreeMap::new(), 0);
        self.add(Catalog::open(&path)?);
        Ok(())
    }

    /// An entry's tensors, checked.
    pub fn get(&self, address: &CacheKey) -> Result<Option<CacheEntry>> {
        let Some(shard) = self.shard_of.get(address) else { return Ok(None) };
        let shard = &self.shards[*shard];
        let problem = match read_entry(shard, address) {
            Ok(entry) => {
                let (expected, _) = recorded_entry(shard, address);
                let found = entry_checksum(address, &entry);
                if expected == found.to_string() {
                    return Ok(Some(entry));
                }
                format!("checksum of entry {address} is {found}, expected {expected}")
            }
            Err(error) if error.is_refusal() => return Err(error.into()),
            Err(error) => error.to_string(),
        };
        let error = TrainerError::Cache { problem, path: shard.path.clone() };
        // The next start finds it gone, and encodes again what it held.
        quarantine(&shard.path, &error);
        Err(error)
    }

    /// Entries that two programs made at once are in two shards; either will do.
    fn add(&mut self, shard: Catalog) {
        let index = self.shards.len();
        let addresses = shard.metadata.keys().filter_map(|key| Hash::from_hex(key).ok());
        self.shard_of.extend(addresses.map(|address| (address, index)));
        self.shards.push(shard);
    }
}

/// The checksum that a shard is named for; nothing for any other file.
fn name_of(path: &Path) -> Option<Hash> {
    Hash::from_hex(path.file_name()?.to_str()?.strip_suffix(SUFFIX)?).ok()
}

fn open_shard(
    path: &Path,
    name: Hash,
    hashes: &mut HashCache,
    tick: BytesDoneFn<'_>,
) -> Result<Catalog> {
    let (found, _) = hashes.hash_file(path, tick)?;
    if found == name {
        return Ok(Catalog::open(path)?);
    }
    let problem = format!("its checksum is {found}");
    Err(TrainerError::Cache { problem, path: path.into() })
}

/// Under another name it can still be looked at, and what it held is not found any more.
fn quarantine(path: &Path, error: &TrainerError) -> Problem {
    let mut name = path.as_os_str().to_owned();
    name.push(DAMAGED_SUFFIX);
    // Where that is not allowed it stays, and is not looked into all the same.
    _ = fs::rename(path, name);
    Problem::warning(path, ProblemKind::ShardDamaged { why: error.to_string() })
}

/// Gives the shard's path.
fn write_shard(folder: &Path, entries: &BTreeMap<String, CacheEntry>) -> Result<PathBuf> {
    let mut parts: HashMap<String, &StoredTensor> = HashMap::new();
    for (address, entry) in entries {
        parts.extend(entry.iter().map(|part| (format!("{address}.{}", part.name), part)));
    }
    let entering = |(name, part): (&String, &&StoredTensor)| OutputTensor {
        name: name.clone(),
        dtype: part.dtype,
        shape: part.shape.clone(),
    };
    let mut tensors: Vec<OutputTensor> = parts.iter().map(entering).collect();
    safetensors::order(&mut tensors);
    let sealed = |(address, entry): (&String, &CacheEntry)| {
        let hash = Hash::from_hex(address).expect("it was made from one");
        let names: Vec<&str> = entry.iter().map(|part| part.name.as_str()).collect();
        (address.clone(), format!("{} {}", entry_checksum(&hash, entry), names.join(" ")))
    };
    let metadata: BTreeMap<String, String> = entries.iter().map(sealed).collect();
    let name = checksum_of(folder, &metadata, &tensors, &parts)?;
    let path = folder.join(format!("{name}{SUFFIX}"));
    write_file(&path, &metadata, tensors, false, &mut |tensor, out| {
        let written = out.write_all(&parts[&tensor.name].bytes);
        written.map_err(|source| WeightsError::io("write", &path, source))
    })?;
    Ok(path)
}

/// What the file will have: its name must be known before it is written.
fn checksum_of(
    folder: &Path,
    metadata: &BTreeMap<String, String>,
    tensors: &[OutputTensor],
    parts: &HashMap<String, &StoredTensor>,
) -> Result<Hash> {
    let header = safetensors::header(metadata, tensors);
    let header = header.map_err(|problem| TrainerError::Cache { problem, path: folder.into() })?;
    let mut hasher = Hasher::new();
    hasher.update(&header);
    for tensor in tensors {
        hasher.update(&parts[&tensor.name].bytes);
    }
    Ok(hasher.finalize())
}

/// The checksum of an entry: what it is called, in which form it is, and its numbers.
fn entry_checksum(address: &CacheKey, entry: &CacheEntry) -> Hash {
    let mut hasher = Hasher::new();
    field(&mut hasher, address.as_bytes());
    for part in entry {
        field(&mut hasher, part.name.as_bytes());
        field(&mut hasher, part.dtype.name().as_bytes());
        let sizes: Vec<u8> = part.shape.iter().flat_map(|size| size.to_le_bytes()).collect();
        field(&mut hasher, &sizes);
        field(&mut hasher, &part.bytes);
    }
    hasher.finalize()
}

/// What a shard says of an entry: its checksum, and the names of its tensors in their order.
fn recorded_entry<'a>(
    shard: &'a Catalog,
    address: &CacheKey,
) -> (&'a str, impl Iterator<Item = &'a str>) {
    let mut words = shard.metadata[&address.to_string()].split(' ');
    (words.next().unwrap_or_default(), words)
}

fn read_entry(
    shard: &Catalog,
    address: &CacheKey,
) -> std::result::Result<CacheEntry, WeightsError> {
    let (_, names) = recorded_entry(shard, address);
    names.map(|name| read_part(shard, address, name)).collect()
}

fn read_part(
    shard: &Catalog,
    address: &CacheKey,
    name: &str,
) -> std::result::Result<StoredTensor, WeightsError> {
    let tensor = shard.find(&format!("{address}.{name}"))?;
    let TensorEncoding::Plain(dtype) = tensor.encoding else {
        unreachable!("safetensors has no other")
    };
    let mut bytes = vec![0; tensor.bytes as usize];
    let wanted = vec![LoadRequest::whole(tensor, dtype, &mut bytes[..])];
    // One thread for a megabyte or two; the next epoch reads the same again.
    load(shard, wanted, LoadOptions { threads: 1, cache: PageCache::Fill }, &|_| true)?;
    Ok(StoredTensor { name: name.into(), dtype, shape: tensor.shape.clone(), bytes })
}
