//! PyTorch archives: what `torch.save` has written since version 1.6. Reads where every tensor
//! lies, and none of their data.
//!
//! ```text
//! a zip file; every entry is stored as it is, and `name` is mostly the file's own:
//!     name/data.pkl     a pickle: nested dicts and lists, tensors as views of storages
//!     name/byteorder    "little" or "big"; absent in older files
//!     name/data/KEY     the bytes of one storage, one entry each
//! ```
//!
//! Tensors get the keys on their way joined by dots as their name: `state_dict.layer.weight`.
//! Left out on purpose: the older formats (a bare pickle, a tar file), `TorchScript`, and checksums.
//! PyTorch itself ignores those and can be told to write wrong ones.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::Path;

use zip::read::{ArchiveOffset, Config};
use zip::result::ZipError;
use zip::{CompressionMethod, ZipArchive};

use crate::catalog::FileContents;
use crate::dtype::FileDtype;
use crate::error::{Result, WeightsError};
use crate::pickle::{self, FORMAT, ObjectId, PickleObject, PickleTensor, PickleValue, Pickled};
use crate::tensor::{TensorEncoding, TensorInfo, is_dense, numel_of};

/// Chosen: a tensor takes about 100 bytes (`state_dict.pt` of the tests), so that this is far
/// beyond any model.
const MAX_PICKLE_BYTES: u64 = 64 << 20;

/// Chosen: more than any checkpoint holds. A pickle of a few hundred bytes can stand for 2^64
/// values by sharing, so the walk must end somewhere.
const MAX_VALUES: usize = 1_000_000;

/// Chosen: checkpoints nest fewer than ten levels; the walk recurses, so that the stack sets a limit.
const MAX_DEPTH: usize = 64;

/// Chosen: as much as the pickle itself may take. Names grow with every level, and shapes are
/// copied for every tensor that shares them.
const MAX_COPIED_BYTES: usize = 64 << 20;

/// Chosen: PyTorch operates on at most 64 dimensions.
const MAX_DIMENSIONS: usize = 64;

/// Chosen: an expanded tensor repeats values that stand in the file once, masks and positions for
/// example, and tied layers share theirs. Whoever loads a file makes room for all of them, so a few
/// bytes must not claim a disk: all tensors together take at most so much, and four times the file.
const MAX_REPEATED_BYTES: u64 = 1 << 30;

/// Taken: the zip specification, signature of a local file header.
const ZIP_START: &[u8] = b"PK\x03\x04";

/// Taken: the first opcode of any binary pickle.
const PICKLE_START: u8 = 0x80;

/// Taken: POSIX `ustar`, where its name stands in the first block.
const TAR_NAME: (usize, &[u8]) = (257, b"ustar");

/// Reads an archive's directory and pickle. `file` is its index in the catalog.
pub(crate) fn read(path: &Path, file: usize) -> Result<FileContents> {
    let opened = File::open(path).map_err(|source| WeightsError::io("open", path, source))?;
    let metadata = opened.metadata().map_err(|source| WeightsError::io("read", path, source))?;
    parse(BufReader::new(opened), metadata.len(), path, file)
}

/// Reads an archive from anywhere; `path` is for the errors.
pub fn parse<R: Read + Seek>(
    mut reader: R,
    file_len: u64,
    path: &Path,
    file: usize,
) -> Result<FileContents> {
    check_start(&mut reader, path)?;
    let mut archive = TorchArchive::open(reader, file_len, path)?;
    archive.check_kind()?;
    let bytes = archive.read("data.pkl", MAX_PICKLE_BYTES)?;
    let pickled = pickle::read(&bytes, path)?;
    let leaves = StateDictWalk::through(&pickled, path)?;

    let place = |(name, tensor)| archive.place(name, tensor, &pickled, file);
    let mut tensors = leaves.tensors.into_iter().map(place).collect::<Result<Vec<_>>>()?;
    // They came by name, and the sort keeps that order among equals.
    tensors.sort_by_key(|tensor| tensor.offset);
    Ok(FileContents { metadata: leaves.texts, tensors })
}

/// Tells the formats that are no zip files apart by their first bytes.
fn check_start(reader: &mut (impl Read + Seek), path: &Path) -> Result<()> {
    let failed = |source| WeightsError::io("read", path, source);
    let (tar_at, tar_name) = TAR_NAME;
    let mut start = Vec::new();
    reader.seek(SeekFrom::Start(0)).map_err(failed)?;
    reader.take((tar_at + tar_name.len()) as u64).read_to_end(&mut start).map_err(failed)?;
    if start.starts_with(ZIP_START) {
        return Ok(());
    }
    let older = "was written in the format before PyTorch 1.6; load it there and save it again";
    if start.first() == Some(&PICKLE_START) || start.get(tar_at..) == Some(tar_name) {
        return Err(unsupported(path, older));
    }
    if ZIP_START.starts_with(&start) {
        let (needed, has) = (ZIP_START.len() as u64, start.len() as u64);
        let what = "the archive's first entry".into();
        return Err(WeightsError::Truncated { what, needed, has, path: path.into() });
    }
    Err(WeightsError::UnknownFormat { path: path.into() })
}

/// The zip file.
struct TorchArchive<'p, R> {
    zip: ZipArchive<R>,
    /// What all names start with, slash included. Bytes: nobody promises an encoding.
    prefix: Vec<u8>,
    file_len: u64,
    path: &'p Path,
    /// The storages seen so far; thousands of tensors may share one.
    storages: HashMap<String, ZipEntry>,
    /// What the tensors seen so far take, each by itself.
    dense_bytes: u64,
}

/// Where an entry's bytes lie in the file.
#[derive(Clone, Copy)]
struct ZipEntry {
    start: u64,
    bytes: u64,
}

impl<'p, R: Read + Seek> TorchArchive<'p, R> {
    fn open(reader: R, file_len: u64, path: &'p Path) -> Result<Self> {
        // Offsets in the directory count from the file's start, as PyTorch takes them. The crate
        // would otherwise guess how much somebody put before the archive.
        let config = Config { archive_offset: ArchiveOffset::Known(0) };
        let zip = ZipArchive::with_config(config, reader).map_err(|error| unzipped(path, error))?;
        if zip.has_duplicate_names() {
            // Readers differ in which of the two they take.
            return Err(malformed(path, "two entries have the same name"));
        }
        let prefix = prefix_of(zip.file_names_raw(), path)?;
        Ok(Self { zip, prefix, file_len, path, storages: HashMap::new(), dense_bytes: 0 })
    }

    /// Refuses what has the same container but other contents.
    fn check_kind(&mut self) -> Result<()> {
        if self.entry("constants.pkl")?.is_some() {
            return Err(unsupported(self.path, "is a TorchScript program, not a checkpoint"));
        }
        if self.entry("byteorder")?.is_none() {
            return Ok(());
        }
        match &self.read("byteorder", 16)?[..] {
            b"little" => Ok(()),
            other => {
                let problem = format!("byte order {}, only little is read", other.escape_ascii());
                Err(unsupported(self.path, &problem))
            }
        }
    }

    /// An entry's bytes.
    fn read(&mut self, name: &str, limit: u64) -> Result<Vec<u8>> {
        let Some(entry) = self.entry(name)? else {
            return Err(malformed(self.path, &format!("no entry {name}")));
        };
        if entry.bytes > limit {
            let problem = format!("{name} has {} bytes, at most {limit} are read", entry.bytes);
            return Err(unsupported(self.path, &problem));
        }
        let index = self.index(name).ok_or(ZipError::FileNotFound);
        let opened = index.and_then(|index| self.zip.by_index_raw(index));
        let mut opened = opened.map_err(|error| unzipped(self.path, error))?;
        let mut bytes = vec![0; entry.bytes as usize];
        opened.read_exact(&mut bytes).map_err(|source| unzipped(self.path, source.into()))?;
        Ok(bytes)
    }

    fn index(&self, name: &str) -> Option<usize> {
        self.zip.index_for_name_raw(&[&self.prefix, name.as_bytes()].concat())
    }

    /// Where an entry lies, if there is one of that name.
    fn entry(&mut self, name: &str) -> Result<Option<ZipEntry>> {
        let Some(index) = self.index(name) else { return Ok(None) };
        // Keys come from the pickle and are printed.
        let (path, shown) = (self.path, name.escape_debug());
        let entry = self.zip.by_index_raw(index).map_err(|error| unzipped(path, error))?;
        if entry.compression() != CompressionMethod::Stored || entry.encrypted() {
            return Err(unsupported(path, &format!("entry {shown} is compressed or encrypted")));
        }
        let (bytes, packed) = (entry.size(), entry.compressed_size());
        if bytes != packed {
            let problem = format!("entry {shown} takes {packed} bytes for {bytes}, uncompressed");
            return Err(malformed(path, &problem));
        }
        let beyond = || malformed(path, &format!("entry {shown} lies beyond 2^64 bytes"));
        let start = entry.data_start().ok_or_else(beyond)?;
        let needed = start.checked_add(bytes).ok_or_else(beyond)?;
        if needed > self.file_len {
            let (what, has) = (format!("entry {shown}"), self.file_len);
            return Err(WeightsError::Truncated { what, needed, has, path: path.into() });
        }
        Ok(Some(ZipEntry { start, bytes }))
    }

    fn storage(&mut self, key: &str) -> Result<ZipEntry> {
        if let Some(entry) = self.storages.get(key) {
            return Ok(*entry);
        }
        let Some(entry) = self.entry(&format!("data/{key}"))? else {
            let problem = format!("no entry data/{} for a storage", key.escape_debug());
            return Err(malformed(self.path, &problem));
        };
        self.storages.insert(key.into(), entry);
        Ok(entry)
    }

    /// Finds a tensor in the file, and checks that all of it is there.
    fn place(
        &mut self,
        name: String,
        tensor: &PickleTensor,
        pickled: &Pickled,
        file: usize,
    ) -> Result<TensorInfo> {
        let path = self.path;
        let entry = self.storage(tensor.storage.key)?;
        let wrong = |problem: String| {
            malformed(path, &format!("tensor {}: {problem}", name.escape_debug()))
        };
        let view = StorageView::of(tensor, pickled).map_err(wrong)?;
        let (from, to) = view.range().map_err(wrong)?;
        let held = storage_bytes(tensor, entry.bytes).map_err(wrong)?;
        if to > held {
            return Err(wrong(format!("ends at byte {to} of a storage of {held} bytes")));
        }
        self.dense_bytes = self.dense_bytes.saturating_add(view.dense_bytes().map_err(wrong)?);
        let (all, held) = (self.dense_bytes, self.file_len);
        if all > held.saturating_mul(4).saturating_add(MAX_REPEATED_BYTES) {
            return Err(wrong(format!(
                "takes {all} bytes with those before it, the file has {held}"
            )));
        }
        let strides = (!is_dense(&view.shape, &view.strides)).then_some(view.strides);
        let (offset, bytes) = (entry.start + from, to - from);
        let encoding = TensorEncoding::Plain(tensor.dtype);
        Ok(TensorInfo { name, shape: view.shape, encoding, file, offset, bytes, strides })
    }
}

/// The folder in the archive that holds the pickle; PyTorch looks nowhere else for the rest.
fn prefix_of<'n>(names: impl Iterator<Item = &'n [u8]>, path: &Path) -> Result<Vec<u8>> {
    let folder = |name: &'n [u8]| {
        let prefix = name.strip_suffix(b"data.pkl")?;
        let first_slash = prefix.iter().position(|byte| *byte == b'/')?;
        (first_slash + 1 == prefix.len()).then_some(prefix)
    };
    let folders: Vec<_> = names.filter_map(folder).collect();
    match folders[..] {
        [only] => Ok(only.into()),
        [] => Err(malformed(path, "no data.pkl in a folder of the archive")),
        _ => Err(malformed(path, &format!("{} entries named data.pkl", folders.len()))),
    }
}

/// The bytes a tensor's storage claims, which its entry must have.
fn storage_bytes(tensor: &PickleTensor, entry_bytes: u64) -> std::result::Result<u64, String> {
    let (count, dtype) = (tensor.storage.numel, tensor.storage.dtype);
    let claimed = u64::try_from(count).ok().and_then(|count| count.checked_mul(dtype.bytes()));
    match claimed {
        Some(claimed) if claimed <= entry_bytes => Ok(claimed),
        _ => Err(format!(
            "its storage claims {count} numbers of {dtype}, the entry has {entry_bytes} bytes"
        )),
    }
}

/// How a tensor lies in its storage, in values.
struct StorageView {
    shape: Vec<u64>,
    strides: Vec<u64>,
    offset: u64,
    dtype: FileDtype,
}

impl StorageView {
    fn of(tensor: &PickleTensor, pickled: &Pickled) -> std::result::Result<Self, String> {
        let (shape, strides) = (sizes(pickled, tensor.shape)?, sizes(pickled, tensor.strides)?);
        if shape.len() != strides.len() {
            return Err(format!("{} sizes but {} strides", shape.len(), strides.len()));
        }
        let offset =
            u64::try_from(tensor.offset).map_err(|_| format!("offset {}", tensor.offset))?;
        Ok(Self { shape, strides, offset, dtype: tensor.dtype })
    }

    /// Bytes of all its values one after the other, also those that an expanded tensor repeats.
    fn dense_bytes(&self) -> std::result::Result<u64, String> {
        let bytes = numel_of(&self.shape).and_then(|count| count.checked_mul(self.dtype.bytes()));
        bytes.ok_or_else(|| format!("sizes {:?} are beyond 2^64 bytes", self.shape))
    }

    /// First byte and end of what it covers in its storage.
    fn range(&self) -> std::result::Result<(u64, u64), String> {
        let too_large = || {
            format!(
                "sizes {:?}, strides {:?} and offset {} are beyond 2^64 bytes",
                self.shape, self.strides, self.offset
            )
        };
        let count = self.dense_bytes()? / self.dtype.bytes();
        let last = self.offset_of_last().ok_or_else(too_large)?;
        let end = if count == 0 { Some(self.offset) } else { last.checked_add(1) };
        let bytes = |numbers: u64| numbers.checked_mul(self.dtype.bytes()).ok_or_else(too_large);
        Ok((bytes(self.offset)?, bytes(end.ok_or_else(too_large)?)?))
    }

    fn offset_of_last(&self) -> Option<u64> {
        let steps = self.shape.iter().zip(&self.strides);
        steps.filter(|(size, _)| **size > 0).try_fold(self.offset, |offset, (size, stride)| {
            offset.checked_add((size - 1).checked_mul(*stride)?)
        })
    }
}

fn sizes(pickled: &Pickled, id: ObjectId) -> std::result::Result<Vec<u64>, String> {
    let PickleObject::Tuple(items) = pickled.object(id) else {
        return Err("sizes that are no tuple".into());
    };
    if items.len() > MAX_DIMENSIONS {
        return Err(format!("{} dimensions, {MAX_DIMENSIONS} are the most", items.len()));
    }
    let size = |item: &PickleValue| match item {
        PickleValue::Int(size) => {
            u64::try_from(*size).map_err(|_| format!("a size or stride of {size}"))
        }
        _ => Err("a size or stride that is no integer".into()),
    };
    items.iter().map(size).collect()
}

/// The tensors and words of a pickle, by their names.
struct StateDictWalk<'p, 'a> {
    pickled: &'p Pickled<'a>,
    path: &'p Path,
    /// Of the value being visited.
    name: String,
    n_values: usize,
    copied_bytes: usize,
    tensors: BTreeMap<String, &'p PickleTensor<'a>>,
    texts: BTreeMap<String, String>,
}

impl<'p, 'a> StateDictWalk<'p, 'a> {
    fn through(pickled: &'p Pickled<'a>, path: &'p Path) -> Result<Self> {
        let (tensors, texts) = (BTreeMap::new(), BTreeMap::new());
        let mut walk = Self {
            pickled,
            path,
            name: String::new(),
            n_values: 0,
            copied_bytes: 0,
            tensors,
            texts,
        };
        walk.visit(pickled.root, 0)?;
        Ok(walk)
    }

    fn visit(&mut self, value: PickleValue<'a>, depth: usize) -> Result<()> {
        self.n_values += 1;
        if self.n_values > MAX_VALUES {
            return Err(
                self.malformed(&format!("data.pkl stands for more than {MAX_VALUES} values"))
            );
        }
        if depth > MAX_DEPTH {
            return Err(self.malformed(&format!("data.pkl nests more than {MAX_DEPTH} levels")));
        }
        let PickleValue::Object(id) = value else { return self.add_text(value, depth) };
        match self.pickled.object(id) {
            PickleObject::Tuple(items) | PickleObject::List(items) => {
                let mut items = items.iter().enumerate();
                items.try_for_each(|(index, item)| self.descend(&index.to_string(), *item, depth))
            }
            PickleObject::Dict(items) => items.iter().try_for_each(|(key, item)| {
                let key = text_of(*key).ok_or_else(|| self.malformed("a dict's key is no word"))?;
                self.descend(&key, *item, depth)
            }),
            PickleObject::Tensor(tensor) => self.add_tensor(tensor, depth),
            PickleObject::Storage(_) => {
                Err(unsupported(self.path, "holds a storage outside of any tensor"))
            }
        }
    }

    fn descend(&mut self, key: &str, item: PickleValue<'a>, depth: usize) -> Result<()> {
        self.copy(key.len() + 1)?;
        let parent = self.name.len();
        if depth > 0 {
            self.name.push('.');
        }
        self.name.push_str(key);
        self.visit(item, depth + 1)?;
        self.name.truncate(parent);
        Ok(())
    }

    fn add_tensor(&mut self, tensor: &'p PickleTensor<'a>, depth: usize) -> Result<()> {
        let name = if depth == 0 { "tensor".into() } else { self.name.clone() };
        let n_sizes = match self.pickled.object(tensor.shape) {
            PickleObject::Tuple(items) => items.len().min(MAX_DIMENSIONS),
            _ => 0,
        };
        self.copy(name.len() + 2 * n_sizes * size_of::<u64>())?;
        match self.tensors.insert(name, tensor) {
            None => Ok(()),
            Some(_) => {
                Err(self.malformed(&format!("two tensors are named {}", self.name.escape_debug())))
            }
        }
    }

    fn add_text(&mut self, value: PickleValue<'a>, depth: usize) -> Result<()> {
        let name = if depth == 0 { "value".into() } else { self.name.clone() };
        let text = text_of(value).unwrap_or_default();
        self.copy(name.len() + text.len())?;
        match self.texts.insert(name, text) {
            None => Ok(()),
            Some(_) => {
                Err(self.malformed(&format!("two values are named {}", self.name.escape_debug())))
            }
        }
    }

    fn copy(&mut self, bytes: usize) -> Result<()> {
        self.copied_bytes += bytes;
        if self.copied_bytes > MAX_COPIED_BYTES {
            let problem = format!("names and shapes take more than {MAX_COPIED_BYTES} bytes");
            return Err(self.malformed(&problem));
        }
        Ok(())
    }

    fn malformed(&self, problem: &str) -> WeightsError {
        malformed(self.path, problem)
    }
}

/// A plain value as Python prints it; nothing for those that hold others.
fn text_of(value: PickleValue) -> Option<String> {
    Some(match value {
        PickleValue::None => "None".into(),
        PickleValue::Bool(true) => "True".into(),
        PickleValue::Bool(false) => "False".into(),
        PickleValue::Int(number) => number.to_string(),
        PickleValue::Float(number) => format!("{number:?}"),
        PickleValue::Text(text) => text.into(),
        PickleValue::Bytes(bytes) => bytes.escape_ascii().to_string(),
        PickleValue::Global(global) => global.full_name(),
        PickleValue::Object(_) => return None,
    })
}

fn malformed(path: &Path, problem: &str) -> WeightsError {
    WeightsError::Malformed { format: FORMAT, problem: problem.into(), path: path.into() }
}

fn unsupported(path: &Path, problem: &str) -> WeightsError {
    WeightsError::Unsupported { format: FORMAT, problem: problem.into(), path: path.into() }
}

fn unzipped(path: &Path, error: ZipError) -> WeightsError {
    match error {
        // The directory is at the end of the file: whatever cuts it short takes it away first.
        ZipError::Io(source) if source.kind() == io::ErrorKind::UnexpectedEof => {
            malformed(path, "the archive ends too early")
        }
        ZipError::Io(source) => WeightsError::io("read", path, source),
        ZipError::UnsupportedArchive(problem) => unsupported(path, problem),
        other => malformed(path, &other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;
    use std::io::{Cursor, Write as _};

    use zip::ZipWriter;
    use zip::write::SimpleFileOptions;

    use super::*;

    /// Numbers as Python writes those that need eight bytes.
    fn ints(numbers: &[i64]) -> Vec<u8> {
        let long = |number: &i64| [b"\x8a\x08".as_slice(), &number.to_le_bytes()].concat();
        numbers.iter().flat_map(long).collect()
    }

    fn tuple(items: &[Vec<u8>]) -> Vec<u8> {
        [b"(".to_vec(), items.concat(), b"t".to_vec()].concat()
    }

    /// A tensor in storage 0 of `count` values of f32.
    fn tensor(count: i64, offset: i64, shape: &[i64], strides: &[i64]) -> Vec<u8> {
        let class =
            b"X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpu".to_vec();
        let storage = [tuple(&[class, ints(&[count])]), b"Q".to_vec()].concat();
        let (shape, strides) = (tuple(&[ints(shape)]), tuple(&[ints(strides)]));
        let arguments = tuple(&[storage, ints(&[offset]), shape, strides, b"\x89N".to_vec()]);
        [b"ctorch._utils\n_rebuild_tensor_v2\n".to_vec(), arguments, b"R".to_vec()].concat()
    }

    fn ended(pickle: &[u8]) -> Vec<u8> {
        [pickle, b"."].concat()
    }

    fn archive(entries: &[(&str, &[u8])]) -> Vec<u8> {
        let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
        let stored = SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
        for (name, bytes) in entries {
            zip.start_file(*name, stored).unwrap();
            zip.write_all(bytes).unwrap();
        }
        zip.finish().unwrap().into_inner()
    }

    /// This pickle, and a storage of six values.
    fn model(pickle: &[u8]) -> Vec<u8> {
        archive(&[("m/data.pkl", pickle), ("m/data/0", &[7; 24])])
    }

    /// Replaces bytes everywhere.
    fn patched(mut bytes: Vec<u8>, from: &[u8], to: &[u8]) -> Vec<u8> {
        let found = |bytes: &[u8]| bytes.windows(from.len()).position(|window| window == from);
        assert!(found(&bytes).is_some(), "nothing to patch");
        while let Some(at) = found(&bytes) {
            bytes[at..at + to.len()].copy_from_slice(to);
        }
        bytes
    }

    fn parsed(bytes: &[u8]) -> Result<FileContents> {
        parse(Cursor::new(bytes), bytes.len() as u64, Path::new("model.pt"), 0)
    }

    fn check_refused(case: &str, bytes: &[u8], variant: &str, says: &str) {
        let error = parsed(bytes).expect_err(case);
        assert!(format!("{error:?}").starts_with(variant), "{case}: {error:?}");
        assert!(error.to_string().contains(says), "{case}: {error}");
    }

    fn fixture_path(name: &str) -> String {
        format!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/weights/{}"), name)
    }

    fn fixture(name: &str) -> Vec<u8> {
        std::fs::read(fixture_path(name)).unwrap()
    }

    /// A tensor's bytes in row-major order, picked from the file one number at a time.
    fn gathered(bytes: &[u8], tensor: &TensorInfo) -> Vec<u8> {
        let TensorEncoding::Plain(dtype) = tensor.encoding else { panic!("{tensor:?}") };
        let covered = &bytes[tensor.offset as usize..(tensor.offset + tensor.bytes) as usize];
        let Some(strides) = &tensor.strides else { return covered.into() };
        let number = |index: u64| {
            let (mut rest, mut at) = (index, 0);
            for (size, stride) in tensor.shape.iter().zip(strides).rev() {
                at += rest % size * stride;
                rest /= size;
            }
            let at = (at * dtype.bytes()) as usize;
            &covered[at..at + dtype.bytes() as usize]
        };
        (0..tensor.numel()).flat_map(number).copied().collect()
    }

    fn check_fixture(name: &str, expected: &serde_json::Value) {
        let bytes = fixture(name);
        let contents = read(Path::new(&fixture_path(name)), 3).unwrap();
        assert_eq!(contents.tensors.len(), expected.as_object().unwrap().len(), "{name}");
        assert!(contents.tensors.is_sorted_by_key(|tensor| (tensor.offset, tensor.name.clone())));
        for tensor in &contents.tensors {
            let hex = gathered(&bytes, tensor).iter().fold(String::new(), |mut hex, byte| {
                write!(hex, "{byte:02x}").unwrap();
                hex
            });
            let got = serde_json::json!({
                "dtype": tensor.encoding.to_string(),
                "shape": tensor.shape,
                "hex": hex,
            });
            assert_eq!(got, expected[&tensor.name], "{name}: {}", tensor.name);
            assert_eq!(tensor.file, 3);
        }
    }

    #[test]
    fn pytorch_and_we_read_the_same() {
        let expected = std::fs::read_to_string(fixture_path("torch.expected.json")).unwrap();
        let expected: serde_json::Value = serde_json::from_str(&expected).unwrap();
        for (name, tensors) in expected.as_object().unwrap() {
            check_fixture(name, tensors);
        }
    }

    #[test]
    fn views_say_how_they_lie() {
        let contents = parsed(&fixture("state_dict.pt")).unwrap();
        let named =
            |name: &str| contents.tensors.iter().find(|tensor| tensor.name == name).unwrap();
        let base = named("base").offset;
        for (name, offset, bytes, strides) in [
            ("base", base, 96, None),
            ("transposed", base, 96, Some(vec![1, 6])),
            ("slice", base + 32, 36, Some(vec![6, 1])),
            ("columns", base, 92, Some(vec![6, 2])),
            ("expanded", named("expanded").offset, 12, Some(vec![0, 1])),
            ("one_row", named("one_row").offset, 40, None),
            ("empty", named("empty").offset, 0, None),
            ("scalar", named("scalar").offset, 4, None),
            ("tied", named("parameter").offset, 16, None),
        ] {
            let tensor = named(name);
            assert_eq!((tensor.offset, tensor.bytes), (offset, bytes), "{name}");
            assert_eq!(tensor.strides, strides, "{name}");
        }
    }

    #[test]
    fn plain_values_become_metadata() {
        let metadata = parsed(&fixture("checkpoint.pt")).unwrap().metadata;
        for (name, text) in [
            ("epoch", "3"),
            ("seen", "5000000000"),
            ("loss", "0.125"),
            ("note", "größer"),
            ("best", "True"),
            ("scheduler", "None"),
            ("dtype", "torch.bfloat16"),
            ("device", "cpu"),
            ("size.1", "3"),
            ("history.1", "-1"),
            ("history.2.step", "7"),
            ("optimizer.param_groups.0.lr", "0.0001"),
            ("optimizer.param_groups.0.params.3", "3"),
        ] {
            assert_eq!(metadata.get(name).map(String::as_str), Some(text), "{name}");
        }
        assert_eq!(parsed(&model(b"K\x05.")).unwrap().metadata["value"], "5");
    }

    #[test]
    fn hostile_archives_are_refused_by_what_they_ask_for() {
        check_refused("system", &fixture("hostile_system.pt"), "Hostile", "os.system");
        check_refused("eval", &fixture("hostile_eval.pt"), "Hostile", "builtins.eval");
    }

    #[test]
    fn other_formats_are_told_apart() {
        check_refused("legacy", &fixture("legacy.pt"), "Unsupported", "before PyTorch 1.6");
        let tar = [&[b'x'; 257], b"ustar\x0000".as_slice(), &[0; 250]].concat();
        check_refused("tar", &tar, "Unsupported", "before PyTorch 1.6");
        check_refused("text", b"hello, world", "UnknownFormat", "not a model file");
        check_refused("nothing", b"", "Truncated", "needs 4 bytes, the file has 0");
        check_refused("only a start", ZIP_START, "Malformed", "");
        let script = archive(&[("m/data.pkl", b"N."), ("m/constants.pkl", b"N.")]);
        check_refused("TorchScript", &script, "Unsupported", "TorchScript");
        let big = archive(&[("m/data.pkl", b"N."), ("m/byteorder", b"big")]);
        check_refused("big endian", &big, "Unsupported", "byte order big");
        let conjugated = fixture("conjugated.pt");
        check_refused("lazy conjugate", &conjugated, "Unsupported", "yet to be conjugated");
    }

    #[test]
    fn a_compressed_entry_is_unsupported() {
        // The method stands 8 bytes into a local header and 10 into a directory entry.
        let mut bytes = model(&ended(&tensor(6, 0, &[6], &[1])));
        for (signature, at) in [(b"PK\x03\x04", 8), (b"PK\x01\x02", 10)] {
            let headers: Vec<_> = (0..bytes.len() - 4)
                .filter(|start| bytes[*start..].starts_with(signature))
                .collect();
            for start in headers {
                bytes[start + at] = 8;
            }
        }
        check_refused("deflate", &bytes, "Unsupported", "compressed");
    }

    #[test]
    fn archives_that_lack_or_repeat_entries_are_malformed() {
        let pickle = ended(&tensor(6, 0, &[6], &[1]));
        let twice =
            archive(&[("m/data.pkl", &pickle), ("m/data/0", &[7; 24]), ("m/data/1", &[8; 24])]);
        let twice = patched(twice, b"data/1", b"data/0");
        check_refused("duplicate names", &twice, "Malformed", "same name");
        check_refused("no pickle", &archive(&[("m/other", b"")]), "Malformed", "no data.pkl");
        check_refused(
            "pickle outside",
            &archive(&[("data.pkl", b"N.")]),
            "Malformed",
            "no data.pkl",
        );
        let pair = archive(&[("a/data.pkl", b"N."), ("b/data.pkl", b"N.")]);
        check_refused("two pickles", &pair, "Malformed", "2 entries");
        check_refused(
            "no storage",
            &archive(&[("m/data.pkl", &pickle)]),
            "Malformed",
            "no entry data/0",
        );
    }

    #[test]
    fn tensors_beyond_their_storage_are_malformed() {
        let (huge, most) = (1 << 62, i64::MAX);
        for (case, pickle, says) in [
            (
                "storage shorter than tensor",
                tensor(6, 0, &[7], &[1]),
                "byte 28 of a storage of 24 bytes",
            ),
            (
                "entry shorter than storage",
                tensor(7, 0, &[7], &[1]),
                "claims 7 numbers of F32, the entry has 24 bytes",
            ),
            (
                "claim shorter than entry",
                tensor(5, 0, &[6], &[1]),
                "byte 24 of a storage of 20 bytes",
            ),
            ("offset", tensor(6, 1, &[6], &[1]), "byte 28 of"),
            ("offset of nothing", tensor(6, 7, &[0], &[1]), "byte 28 of"),
            ("stride", tensor(6, 0, &[2, 2], &[5, 1]), "byte 28 of"),
            ("negative size", tensor(6, 0, &[-1], &[1]), "a size or stride of -1"),
            ("negative stride", tensor(6, 5, &[2], &[-1]), "a size or stride of -1"),
            ("negative offset", tensor(6, -1, &[1], &[1]), "offset -1"),
            ("negative storage", tensor(-1, 0, &[1], &[1]), "claims -1 numbers"),
            ("overflowing storage", tensor(huge, 0, &[1], &[1]), "claims 4611686018427387904"),
            ("overflowing sizes", tensor(6, 0, &[huge, 8], &[0, 0]), "beyond 2^64"),
            ("overflowing bytes", tensor(6, 0, &[huge], &[0]), "beyond 2^64"),
            (
                "a disk out of four bytes",
                tensor(6, 5, &[1 << 40, 1], &[0, 9]),
                "takes 4398046511104 bytes with those before it, the file has",
            ),
            ("overflowing strides", tensor(6, 0, &[4, 4], &[most, 1]), "beyond 2^64"),
            ("overflowing offset", tensor(6, most, &[1], &[1]), "beyond 2^64"),
            ("strides amiss", tensor(6, 0, &[2, 3], &[1]), "2 sizes but 1 strides"),
            ("dimensions", tensor(6, 0, &[1; 65], &[1; 65]), "65 dimensions"),
        ] {
            check_refused(case, &model(&ended(&pickle)), "Malformed", says);
        }
        let expanded = parsed(&model(&ended(&tensor(6, 5, &[1 << 20, 1], &[0, 9])))).unwrap();
        assert_eq!(expanded.tensors[0].bytes, 4);
        assert_eq!(expanded.tensors[0].name, "tensor");
    }

    /// `levels` lists, each of which holds the one before twice.
    fn laughs(levels: u8) -> Vec<u8> {
        let mut pickle = b"]q\x00".to_vec();
        for level in 1..=levels {
            pickle.extend([b']', b'(', b'h', level - 1, b'h', level - 1, b'e', b'q', level]);
        }
        ended(&pickle)
    }

    #[test]
    fn bombs_are_stopped() {
        check_refused(
            "billion laughs",
            &model(&laughs(40)),
            "Malformed",
            "more than 1000000 values",
        );
        check_refused(
            "self reference",
            &model(b"]q\x00h\x00a."),
            "Malformed",
            "more than 64 levels",
        );
        check_refused(
            "self in a dict",
            &model(b"}q\x00K\x01h\x00s."),
            "Malformed",
            "more than 64 levels",
        );
        // Each of them alone would do.
        let some = tensor(6, 5, &[1 << 27, 1], &[0, 9]);
        let disk = [b"](".to_vec(), some.repeat(2000), b"e".to_vec()].concat();
        let says = "takes 1610612736 bytes with those before it";
        check_refused("a disk of many tensors", &model(&ended(&disk)), "Malformed", says);
        let deep = [b"]".repeat(100_000), b"a".repeat(99_999)].concat();
        check_refused("deep nesting", &model(&ended(&deep)), "Malformed", "more than 64 levels");
        // 100 times a dict with a name of 1 MiB.
        let name = [b"}X\0\0\x10\0".to_vec(), vec![b'n'; 1 << 20], b"Nsq\x000](".to_vec()].concat();
        let names = [name, b"h\x00".repeat(100), b"e".to_vec()].concat();
        check_refused(
            "long names",
            &model(&ended(&names)),
            "Malformed",
            "take more than 67108864 bytes",
        );
    }

    #[test]
    fn names_that_meet_are_malformed() {
        let tensor = tensor(6, 0, &[6], &[1]);
        let nested = [b"U\x01a}U\x01b".to_vec(), tensor.clone(), b"s".to_vec()].concat();
        let flat = [b"U\x03a.b".to_vec(), tensor].concat();
        let pickle = [b"}(".to_vec(), nested, flat, b"u".to_vec()].concat();
        check_refused("tensors", &model(&ended(&pickle)), "Malformed", "two tensors are named a.b");
        check_refused("words", &model(b"}(K\x01NU\x011Nu."), "Malformed", "two values are named 1");
        check_refused("key without words", &model(b"}]Ns."), "Malformed", "key is no word");
    }

    #[test]
    fn cut_files_are_refused() {
        let bytes = fixture("state_dict.pt");
        for len in (0..bytes.len()).step_by(7) {
            assert!(parsed(&bytes[..len]).is_err(), "{len} of {} bytes", bytes.len());
        }
    }

    #[test]
    fn flipped_bytes_never_lead_outside_the_file() {
        let bytes = fixture("state_dict.pt");
        let mut whole =
            TorchArchive::open(Cursor::new(&bytes), bytes.len() as u64, Path::new("")).unwrap();
        let pickle = whole.entry("data.pkl").unwrap().unwrap();
        for at in pickle.start..pickle.start + pickle.bytes {
            for flip in [0x01, 0x80] {
                let mut broken = bytes.clone();
                broken[at as usize] ^= flip;
                for tensor in parsed(&broken).map_or(Vec::new(), |contents| contents.tensors) {
                    assert!(tensor.offset + tensor.bytes <= bytes.len() as u64, "{at}: {tensor:?}");
                }
            }
        }
    }
}
