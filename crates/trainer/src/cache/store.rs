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
use weights::load::{Cache, Options, Wanted, load};
use weights::safetensors::{self, Entering};
use weights::write::{sweep, write_file};
use weights::{Catalog, Dtype, Encoding, Tick, WeightsError};

use crate::data::{Problem, ProblemKind};
use crate::error::{Result, TrainerError};
use crate::hashes::{Hashes, field};

/// Chosen: large enough that a big cache is few files, small enough to hold until it is written.
const SHARD_BYTES: usize = 64 << 20;

/// Chosen: what a killed program loses at most, and long enough that slow encoders do not leave a
/// file for each picture.
const FLUSH_EVERY: Duration = Duration::from_secs(20);

const SUFFIX: &str = ".safetensors";

/// What a damaged shard's name ends with from then on.
const DAMAGED_SUFFIX: &str = ".damaged";

/// Where an encoded thing is found: the checksum of everything it was made from.
pub(super) type Address = Hash;

/// One tensor of an entry.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Part {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<u64>,
    pub bytes: Vec<u8>,
}

impl Part {
    /// Numbers in a format of files.
    pub fn new(name: &str, dtype: Dtype, shape: &[usize], numbers: &[f32]) -> Self {
        let mut bytes = vec![0; numbers.len() * dtype.bytes() as usize];
        encode(numbers, dtype, &mut bytes);
        Self {
            name: name.into(),
            dtype,
            shape: shape.iter().map(|size| *size as u64).collect(),
            bytes,
        }
    }

    /// Its numbers.
    pub fn numbers(&self) -> Vec<f32> {
        let mut bytes = vec![0; self.bytes.len() / self.dtype.bytes() as usize * size_of::<f32>()];
        convert(self.dtype, &self.bytes, Dtype::F32, &mut bytes);
        let (chunks, _) = bytes.as_chunks::<4>();
        chunks.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    }
}

/// An encoded thing: tensors by name.
pub(super) type Entry = Vec<Part>;

/// A folder of shards.
pub(super) struct Store {
    folder: PathBuf,
    shards: Vec<Catalog>,
    /// In which shard an entry is.
    places: HashMap<Address, usize>,
    /// What is not written yet.
    pending: BTreeMap<String, Entry>,
    pending_bytes: usize,
    flushed: Instant,
}

impl Store {
    /// Opens a folder, or makes it. Damaged shards are put aside and listed.
    pub fn open(
        folder: &Path,
        hashes: &mut Hashes,
        tick: Tick<'_>,
    ) -> Result<(Self, Vec<Problem>)> {
        let io = |what, source| TrainerError::Io { what, path: folder.into(), source };
        fs::create_dir_all(folder).map_err(|source| io("create", source))?;
        sweep(folder);
        let mut store = Self {
            folder: folder.into(),
            shards: Vec::new(),
            places: HashMap::new(),
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
                Err(error @ TrainerError::Weights(WeightsError::Cancelled)) => return Err(error),
                Err(error) => problems.push(put_aside(&path, &error)),
            }
        }
        Ok((store, problems))
    }

    /// Whether there is an entry, written or not.
    pub fn has(&self, address: &Address) -> bool {
        self.places.contains_key(address) || self.pending.contains_key(address.to_hex().as_str())
    }

    /// Bytes on disk.
    pub fn bytes(&self) -> u64 {
        self.shards.iter().map(Catalog::bytes).sum()
    }

    /// Adds an entry, and writes a shard if there is enough for one or the last one was long ago.
    pub fn put(&mut self, address: Address, entry: Entry) -> Result<()> {
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
    pub fn get(&self, address: &Address) -> Result<Option<Entry>> {
        let Some(shard) = self.places.get(address) else { return Ok(None) };
        let shard = &self.shards[*shard];
        let problem = match read_entry(shard, address) {
            Ok(entry) => {
                let (expected, _) = sealed(shard, address);
                let found = seal(address, &entry);
                if expected == found.to_string() {
                    return Ok(Some(entry));
                }
                format!("checksum of entry {address} is {found}, expected {expected}")
            }
            Err(error) => error.to_string(),
        };
        let error = TrainerError::Cache { problem, path: shard.path.clone() };
        // The next start finds it gone, and encodes again what it held.
        put_aside(&shard.path, &error);
        Err(error)
    }

    /// Entries that two programs made at once are in two shards; either will do.
    fn add(&mut self, shard: Catalog) {
        let index = self.shards.len();
        let addresses = shard.metadata.keys().filter_map(|key| Hash::from_hex(key).ok());
        self.places.extend(addresses.map(|address| (address, index)));
        self.shards.push(shard);
    }
}

/// The checksum that a shard is named for; nothing for any other file.
fn name_of(path: &Path) -> Option<Hash> {
    Hash::from_hex(path.file_name()?.to_str()?.strip_suffix(SUFFIX)?).ok()
}

fn open_shard(path: &Path, name: Hash, hashes: &mut Hashes, tick: Tick<'_>) -> Result<Catalog> {
    let (found, _) = hashes.of(path, tick)?;
    if found == name {
        return Ok(Catalog::open(path)?);
    }
    let problem = format!("its checksum is {found}");
    Err(TrainerError::Cache { problem, path: path.into() })
}

/// Under another name it can still be looked at, and what it held is not found any more.
fn put_aside(path: &Path, error: &TrainerError) -> Problem {
    let mut name = path.as_os_str().to_owned();
    name.push(DAMAGED_SUFFIX);
    // Where that is not allowed it stays, and is not looked into all the same.
    _ = fs::rename(path, name);
    Problem::warning(path, ProblemKind::ShardDamaged { why: error.to_string() })
}

/// Gives the shard's path.
fn write_shard(folder: &Path, entries: &BTreeMap<String, Entry>) -> Result<PathBuf> {
    let mut parts: HashMap<String, &Part> = HashMap::new();
    for (address, entry) in entries {
        parts.extend(entry.iter().map(|part| (format!("{address}.{}", part.name), part)));
    }
    let entering = |(name, part): (&String, &&Part)| Entering {
        name: name.clone(),
        dtype: part.dtype,
        shape: part.shape.clone(),
    };
    let mut tensors: Vec<Entering> = parts.iter().map(entering).collect();
    safetensors::order(&mut tensors);
    let sealed = |(address, entry): (&String, &Entry)| {
        let hash = Hash::from_hex(address).expect("it was made from one");
        let names: Vec<&str> = entry.iter().map(|part| part.name.as_str()).collect();
        (address.clone(), format!("{} {}", seal(&hash, entry), names.join(" ")))
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
    tensors: &[Entering],
    parts: &HashMap<String, &Part>,
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
fn seal(address: &Address, entry: &Entry) -> Hash {
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
fn sealed<'a>(shard: &'a Catalog, address: &Address) -> (&'a str, impl Iterator<Item = &'a str>) {
    let mut words = shard.metadata[&address.to_string()].split(' ');
    (words.next().unwrap_or_default(), words)
}

fn read_entry(shard: &Catalog, address: &Address) -> std::result::Result<Entry, WeightsError> {
    let (_, names) = sealed(shard, address);
    names.map(|name| read_part(shard, address, name)).collect()
}

fn read_part(
    shard: &Catalog,
    address: &Address,
    name: &str,
) -> std::result::Result<Part, WeightsError> {
    let tensor = shard.find(&format!("{address}.{name}"))?;
    let Encoding::Plain(dtype) = tensor.encoding else { unreachable!("safetensors has no other") };
    let mut bytes = vec![0; tensor.bytes as usize];
    let wanted = vec![Wanted::whole(tensor, dtype, &mut bytes[..])];
    // One thread for a megabyte or two; the next epoch reads the same again.
    load(shard, wanted, Options { threads: 1, cache: Cache::Fill }, &|_| true)?;
    Ok(Part { name: name.into(), dtype, shape: tensor.shape.clone(), bytes })
}
