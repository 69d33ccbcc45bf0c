//! GGUF, the model files of llama.cpp: header, metadata, and tensors in plain or quantised blocks.
//!
//! ```text
//! "GGUF"  version u32  n_tensors u64  n_pairs u64
//! n_pairs   x  key string, kind u32, value
//! n_tensors x  name string, n_dims u32, n_dims x size u64 (innermost first), type u32, offset u64
//! padding up to a multiple of the alignment: here the data starts, and offsets count from here
//! the tensors, each at a multiple of the alignment
//!
//! string: length u64, UTF-8      array: kind u32, length u64, values      all little-endian
//! ```
//!
//! `write` makes such files. Left out on purpose: the data, which `blocks` turns into values; the
//! entries of long arrays (vocabularies), which are counted here and read by `lists`; version 1, whose counts have 32 bits;
//! files for big-endian machines; models split over several files, of which each is read alone.

mod arrays;
pub mod blocks;
mod quantise;
mod quantise_k;
mod types;
pub mod write;

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::Path;

pub use self::arrays::{GgufArray, read_arrays};
pub use self::types::GgufBlockFormat;
use self::types::{GgufValueType, OTHER_TYPES, VALUE_TYPES, from_ggml_type};
use crate::catalog::FileContents;
use crate::error::{Result, WeightsError};
use crate::tensor::{TensorEncoding, TensorInfo, numel_of};

/// Taken, like all numbers here that do not say otherwise: ggml's `docs/gguf.md`.
const MAGIC: [u8; 4] = *b"GGUF";
const VERSIONS: [u32; 2] = [2, 3];
const ALIGNMENT_KEY: &str = "general.alignment";
const DEFAULT_ALIGNMENT: u64 = 32;

/// An empty key, a kind, and a value of one byte.
const LEAST_PAIR_BYTES: u64 = 8 + 4 + 1;
/// An empty name, no sizes, a type and an offset.
const LEAST_TENSOR_BYTES: u64 = 8 + 4 + 4 + 8;

/// Chosen: twice what ggml has, so that files of other programs pass.
const MAX_DIMS: u32 = 8;
/// Chosen: we know of no file with arrays in arrays, though the Python package can write them.
/// Bounds our recursion.
const MAX_DEPTH: usize = 4;
/// Chosen: 150 times the header of `SmolLM2`, most of which is its vocabulary of 49152. Without a
/// bound, a sparse file that costs its maker nothing would take all memory; raise it when a real
/// model needs more.
const MAX_HEADER_BYTES: u64 = 256 << 20;
/// Chosen: arrays up to this length are listed, longer ones counted.
const MAX_LISTED: u64 = 8;
/// Chosen: names are cut to this many characters in messages.
const MAX_SHOWN: usize = 80;

/// Reads what a GGUF file holds, without its data. The tensors belong to the catalog's file of
/// that index.
pub(crate) fn read(path: &Path, file: usize) -> Result<FileContents> {
    let opened = File::open(path).map_err(|source| WeightsError::io("open", path, source))?;
    let about = opened.metadata().map_err(|source| WeightsError::io("read", path, source))?;
    parse(opened, about.len(), path, file)
}

/// Reads what a GGUF file holds from any source of its bytes; `path` only stands in errors.
pub fn parse(reader: impl Read, file_len: u64, path: &Path, file: usize) -> Result<FileContents> {
    let reader = BufReader::new(reader);
    let mut header = GgufReader { reader, position: 0, file_len, path, what: "GGUF header".into() };
    header.check_magic()?;
    header.check_version()?;
    let (n_tensors, n_pairs) = (header.u64()?, header.u64()?);
    let (metadata, alignment) = header.metadata(n_pairs)?;
    let mut tensors = header.tensors(n_tensors, file)?;
    header.place(&mut tensors, alignment)?;
    // An empty tensor has the offset of the one after it.
    tensors.sort_by_key(|tensor| (tensor.offset, tensor.bytes));
    header.check_apart(&tensors)?;
    header.check_names(&tensors)?;
    Ok(FileContents { metadata, tensors })
}

/// A header being read, and what is needed to say where it went wrong.
struct GgufReader<'a, R> {
    reader: BufReader<R>,
    position: u64,
    file_len: u64,
    path: &'a Path,
    /// What is being read, for errors.
    what: String,
}

impl<R: Read> GgufReader<'_, R> {
    fn check_magic(&mut self) -> Result<()> {
        let found = self.array()?;
        if found == MAGIC {
            return Ok(());
        }
        let (found, magic) = (found.escape_ascii(), MAGIC.escape_ascii());
        Err(self.malformed(format!("it starts with \"{found}\", not \"{magic}\"")))
    }

    fn check_version(&mut self) -> Result<()> {
        let version = self.u32()?;
        if VERSIONS.contains(&version) {
            return Ok(());
        }
        let [oldest, newest] = VERSIONS;
        let swapped = version.swap_bytes();
        if (1..=newest).contains(&swapped) {
            let problem = format!("version {swapped} for big-endian machines, not little-endian");
            return Err(self.unsupported(problem));
        }
        Err(self.unsupported(format!("version {version}, hearth reads {oldest} to {newest}")))
    }

    /// All pairs as text, and the alignment, the only one we act on.
    fn metadata(&mut self, n_pairs: u64) -> Result<(BTreeMap<String, String>, u64)> {
        self.what = format!("list of {n_pairs} metadata entries");
        self.check_room(n_pairs, LEAST_PAIR_BYTES)?;
        let mut metadata = BTreeMap::new();
        let mut alignment = DEFAULT_ALIGNMENT;
        for at in 0..n_pairs {
            self.what = format!("metadata entry {at} of {n_pairs}");
            let key = self.text()?;
            self.what = format!("metadata {}", shown(&key));
            let kind = self.value_type()?;
            let value = if key == ALIGNMENT_KEY {
                alignment = self.alignment(kind)?;
                alignment.to_string()
            } else {
                self.value(kind, 0)?
            };
            if metadata.insert(key, value).is_some() {
                return Err(self.malformed(format!("{} is there twice", self.what)));
            }
        }
        Ok((metadata, alignment))
    }

    fn alignment(&mut self, kind: GgufValueType) -> Result<u64> {
        if kind != GgufValueType::U32 {
            let problem = format!(
                "{} is of kind {}, not {}",
                self.what,
                kind.name(),
                GgufValueType::U32.name()
            );
            return Err(self.malformed(problem));
        }
        let alignment = self.u32()?;
        if !alignment.is_power_of_two() {
            let problem = format!("{} is {alignment}, not a power of two", self.what);
            return Err(self.malformed(problem));
        }
        Ok(alignment.into())
    }

    fn value_type(&mut self) -> Result<GgufValueType> {
        let number = self.u32()?;
        let row = VALUE_TYPES.get(number as usize).ok_or_else(|| {
            let last = VALUE_TYPES.len() - 1;
            self.malformed(format!("{} is of kind {number}, the last is {last}", self.what))
        })?;
        Ok(row.0)
    }

    /// One value as people read it; `depth` counts the arrays around it.
    fn value(&mut self, kind: GgufValueType, depth: usize) -> Result<String> {
        Ok(match kind {
            GgufValueType::U8 => u8::from_le_bytes(self.array()?).to_string(),
            GgufValueType::I8 => i8::from_le_bytes(self.array()?).to_string(),
            GgufValueType::U16 => u16::from_le_bytes(self.array()?).to_string(),
            GgufValueType::I16 => i16::from_le_bytes(self.array()?).to_string(),
            GgufValueType::U32 => self.u32()?.to_string(),
            GgufValueType::I32 => i32::from_le_bytes(self.array()?).to_string(),
            GgufValueType::U64 => self.u64()?.to_string(),
            GgufValueType::I64 => i64::from_le_bytes(self.array()?).to_string(),
            // `Debug` writes very large and small values with an exponent, `Display` with zeros.
            GgufValueType::F32 => format!("{:?}", f32::from_le_bytes(self.array()?)),
            GgufValueType::F64 => format!("{:?}", f64::from_le_bytes(self.array()?)),
            GgufValueType::Bool => self.boolean()?.to_string(),
            GgufValueType::Text => self.text()?,
            GgufValueType::Array => self.values(depth)?,
        })
    }

    fn boolean(&mut self) -> Result<bool> {
        match self.array()? {
            [0] => Ok(false),
            [1] => Ok(true),
            [other] => {
                Err(self.malformed(format!("{} is a bool of {other}, not 0 or 1", self.what)))
            }
        }
    }

    /// An array: its values where they are few, else their number.
    fn values(&mut self, depth: usize) -> Result<String> {
        if depth == MAX_DEPTH {
            let problem = format!("{} nests more than {MAX_DEPTH} arrays", self.what);
            return Err(self.malformed(problem));
        }
        let (kind, n_values) = (self.value_type()?, self.u64()?);
        self.check_room(n_values, kind.least_bytes())?;
        if n_values > MAX_LISTED {
            self.skip_values(kind, n_values, depth)?;
            return Ok(format!("[{n_values} {}]", kind.name()));
        }
        let values: Vec<String> =
            (0..n_values).map(|_| self.listed(kind, depth)).collect::<Result<_>>()?;
        Ok(format!("[{}]", values.join(", ")))
    }

    /// In a list, texts need quotes to be told apart.
    fn listed(&mut self, kind: GgufValueType, depth: usize) -> Result<String> {
        let value = self.value(kind, depth + 1)?;
        Ok(if kind == GgufValueType::Text { format!("{value:?}") } else { value })
    }

    /// What is not kept is not judged: stray bytes in a vocabulary do us no harm.
    fn skip_values(&mut self, kind: GgufValueType, n_values: u64, depth: usize) -> Result<()> {
        match kind {
            GgufValueType::Text => (0..n_values).try_for_each(|_| {
                let length = self.u64()?;
                self.skip(length)
            }),
            GgufValueType::Array => {
                (0..n_values).try_for_each(|_| self.values(depth + 1).map(drop))
            }
            _ => self.skip(n_values.saturating_mul(kind.least_bytes())),
        }
    }

    fn tensors(&mut self, n_tensors: u64, file: usize) -> Result<Vec<TensorInfo>> {
        self.what = format!("list of {n_tensors} tensors");
        self.check_room(n_tensors, LEAST_TENSOR_BYTES)?;
        let mut tensors = Vec::new();
        for at in 0..n_tensors {
            self.what = format!("tensor entry {at} of {n_tensors}");
            tensors.push(self.tensor(file)?);
        }
        Ok(tensors)
    }

    /// One tensor. Its offset counts from the data's start until [`Self::place`] knows where that
    /// is.
    fn tensor(&mut self, file: usize) -> Result<TensorInfo> {
        let name = self.text()?;
        self.what = quoted_tensor(&name);
        let shape = self.shape()?;
        let encoding = self.encoding()?;
        let offset = self.u64()?;
        let bytes = self.data_bytes(&shape, encoding)?;
        Ok(TensorInfo { name, shape, encoding, file, offset, bytes, strides: None })
    }

    fn shape(&mut self) -> Result<Vec<u64>> {
        let n_dims = self.u32()?;
        if n_dims > MAX_DIMS {
            let problem = format!("{} has {n_dims} dimensions, at most {MAX_DIMS}", self.what);
            return Err(self.malformed(problem));
        }
        let mut shape: Vec<u64> = (0..n_dims).map(|_| self.u64()).collect::<Result<_>>()?;
        shape.reverse();
        Ok(shape)
    }

    fn encoding(&mut self) -> Result<TensorEncoding> {
        let number = self.u32()?;
        from_ggml_type(number).ok_or_else(|| {
            let known = OTHER_TYPES.iter().find(|(other, _)| *other == number);
            let name = known.map_or_else(|| number.to_string(), |(_, name)| (*name).into());
            self.unsupported(format!("{} is of type {name}, which hearth does not read", self.what))
        })
    }

    fn data_bytes(&self, shape: &[u64], encoding: TensorEncoding) -> Result<u64> {
        let row = shape.last().copied().unwrap_or(1);
        if let TensorEncoding::Blocks(format) = encoding
            && !row.is_multiple_of(format.values_per_block())
        {
            let (what, block) = (&self.what, format.values_per_block());
            let problem = format!("{what} has rows of {row} numbers, {format} blocks have {block}");
            return Err(self.malformed(problem));
        }
        // `TensorInfo::count` multiplies plainly, so the sizes must fit even beside a zero.
        let sizes: Vec<u64> = shape.iter().copied().filter(|size| *size != 0).collect();
        let count = numel_of(&sizes).and(numel_of(shape));
        count.and_then(|count| encoding.bytes_for(count)).ok_or_else(|| {
            let (what, most) = (&self.what, u64::MAX);
            self.malformed(format!("{what} of {shape:?} {encoding} takes more than {most} bytes"))
        })
    }

    /// Turns offsets from the data's start into offsets from the file's.
    fn place(&self, tensors: &mut [TensorInfo], alignment: u64) -> Result<()> {
        let start = self.position.next_multiple_of(alignment);
        for tensor in tensors {
            let (what, offset) = (quoted_tensor(&tensor.name), tensor.offset);
            if !offset.is_multiple_of(alignment) {
                let problem = format!("{what} lies at {offset}, no multiple of {alignment}");
                return Err(self.malformed(problem));
            }
            tensor.offset = start.saturating_add(offset);
            let needed = tensor.offset.saturating_add(tensor.bytes);
            if needed > self.file_len {
                return Err(self.truncated(what, needed));
            }
        }
        Ok(())
    }

    /// The tensors are in the order of their data; two that share bytes are refused, since nobody
    /// who writes such a file means well.
    fn check_apart(&self, tensors: &[TensorInfo]) -> Result<()> {
        let mut filled = tensors.iter().filter(|tensor| tensor.bytes > 0);
        let Some(mut before) = filled.next() else { return Ok(()) };
        for tensor in filled {
            let end = before.offset + before.bytes;
            if tensor.offset < end {
                let (first, second) = (quoted_tensor(&before.name), quoted_tensor(&tensor.name));
                let start = tensor.offset;
                let problem = format!("{first} ends at {end}, but {second} starts at {start}");
                return Err(self.malformed(problem));
            }
            before = tensor;
        }
        Ok(())
    }

    fn check_names(&self, tensors: &[TensorInfo]) -> Result<()> {
        let mut names = HashSet::new();
        match tensors.iter().find(|tensor| !names.insert(tensor.name.as_str())) {
            Some(tensor) => {
                Err(self.malformed(format!("{} is there twice", quoted_tensor(&tensor.name))))
            }
            None => Ok(()),
        }
    }

    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn text(&mut self) -> Result<String> {
        let length = self.u64()?;
        self.check_room(length, 1)?;
        // Grows with what arrives; the length is only a promise, even where it fits the file.
        let mut bytes = Vec::new();
        let read = self.reader.by_ref().take(length).read_to_end(&mut bytes);
        self.advance(read.map(|n_bytes| n_bytes as u64), length)?;
        String::from_utf8(bytes).map_err(|error| {
            let (what, valid) = (&self.what, error.utf8_error().valid_up_to());
            self.malformed(format!(
                "{what} has a string of {length} bytes, UTF-8 only up to {valid}"
            ))
        })
    }

    fn skip(&mut self, length: u64) -> Result<()> {
        self.check_room(length, 1)?;
        let skipped = io::copy(&mut self.reader.by_ref().take(length), &mut io::sink());
        self.advance(skipped, length)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        self.check_room(N as u64, 1)?;
        let mut bytes = [0; N];
        let read = match self.reader.read_exact(&mut bytes) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(0),
            read => read.map(|()| N as u64),
        };
        self.advance(read, N as u64)?;
        Ok(bytes)
    }

    /// Whether so many things of at least so many bytes can still come, asked before anything is
    /// believed or kept.
    fn check_room(&self, count: u64, least_bytes: u64) -> Result<()> {
        let needed = self.position.saturating_add(count.saturating_mul(least_bytes));
        if needed > self.file_len {
            return Err(self.truncated(self.what.clone(), needed));
        }
        if needed > MAX_HEADER_BYTES {
            let problem =
                format!("its header has {needed} bytes or more, at most {MAX_HEADER_BYTES}");
            return Err(self.unsupported(problem));
        }
        Ok(())
    }

    fn advance(&mut self, read: io::Result<u64>, wanted: u64) -> Result<()> {
        let read = read.map_err(|source| WeightsError::io("read", self.path, source))?;
        // The length said there was more.
        if read < wanted {
            return Err(WeightsError::Changed { path: self.path.into() });
        }
        self.position += wanted;
        Ok(())
    }

    fn truncated(&self, what: String, needed: u64) -> WeightsError {
        WeightsError::Truncated { what, needed, has: self.file_len, path: self.path.into() }
    }

    fn malformed(&self, problem: String) -> WeightsError {
        WeightsError::Malformed { format: "GGUF", problem, path: self.path.into() }
    }

    fn unsupported(&self, problem: String) -> WeightsError {
        WeightsError::Unsupported { format: "GGUF", problem, path: self.path.into() }
    }
}

fn quoted_tensor(name: &str) -> String {
    format!("tensor {}", shown(name))
}

/// A name that is safe in a message: short, and without the power to move a cursor.
fn shown(name: &str) -> String {
    name.chars().take(MAX_SHOWN).flat_map(char::escape_debug).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIXTURE: &str =
        concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/weights/mixed.gguf");

    fn parsed(bytes: &[u8]) -> Result<FileContents> {
        parse(bytes, bytes.len() as u64, Path::new("model.gguf"), 0)
    }

    /// Refused with that variant, and both values in the text.
    fn refused(bytes: &[u8], variant: &str, says: &str) {
        let error = parsed(bytes).unwrap_err();
        assert!(format!("{error:?}").starts_with(variant), "{error:?} is no {variant}");
        assert!(error.to_string().contains(says), "{error} does not say {says:?}");
    }

    /// A file put together by hand, so that each part can be wrong.
    #[derive(Default)]
    struct Forged {
        pairs: Vec<Vec<u8>>,
        tensors: Vec<Vec<u8>>,
        n_data_bytes: usize,
    }

    impl Forged {
        fn pair(mut self, key: &str, kind: GgufValueType, value: &[u8]) -> Self {
            self.pairs.push([string(key.as_bytes()), number(kind as u32), value.into()].concat());
            self
        }

        /// Sizes innermost first, as in the file.
        fn tensor(mut self, name: &str, sizes: &[u64], kind: u32, offset: u64) -> Self {
            let mut entry = string(name.as_bytes());
            entry.extend(number(sizes.len() as u32));
            entry.extend(sizes.iter().flat_map(|size| size.to_le_bytes()));
            entry.extend(number(kind));
            entry.extend(offset.to_le_bytes());
            self.tensors.push(entry);
            self
        }

        fn data(mut self, n_bytes: usize) -> Self {
            self.n_data_bytes = n_bytes;
            self
        }

        fn bytes(&self) -> Vec<u8> {
            let counts = [self.tensors.len(), self.pairs.len()];
            let mut bytes = [MAGIC.to_vec(), number(3)].concat();
            bytes.extend(counts.iter().flat_map(|count| (*count as u64).to_le_bytes()));
            bytes.extend(self.pairs.concat());
            bytes.extend(self.tensors.concat());
            bytes.resize(bytes.len().next_multiple_of(32) + self.n_data_bytes, 0);
            bytes
        }
    }

    fn number(number: u32) -> Vec<u8> {
        number.to_le_bytes().into()
    }

    fn string(bytes: &[u8]) -> Vec<u8> {
        [&(bytes.len() as u64).to_le_bytes(), bytes].concat()
    }

    fn list(kind: GgufValueType, length: u64, values: &[u8]) -> Vec<u8> {
        [&number(kind as u32), &length.to_le_bytes()[..], values].concat()
    }

    fn nested(depth: usize) -> Vec<u8> {
        (1..depth).fold(list(GgufValueType::U8, 1, &[7]), |inner, _| {
            list(GgufValueType::Array, 1, &inner)
        })
    }

    fn patched(mut bytes: Vec<u8>, at: usize, with: &[u8]) -> Vec<u8> {
        bytes[at..at + with.len()].copy_from_slice(with);
        bytes
    }

    #[test]
    fn the_fixture_is_read_as_its_maker_reads_it() {
        let contents = read(Path::new(FIXTURE), 7).unwrap();
        let json = std::fs::read_to_string(format!("{FIXTURE}.json")).unwrap();
        let expected: serde_json::Value = serde_json::from_str(&json).unwrap();
        let expected = expected["tensors"].as_array().unwrap();
        assert_eq!(contents.tensors.len(), expected.len());
        for (tensor, expected) in contents.tensors.iter().zip(expected) {
            let sizes = expected["shape"].as_array().unwrap();
            let shape: Vec<_> = sizes.iter().map(|size| size.as_u64().unwrap()).collect();
            assert_eq!(tensor.name, expected["name"].as_str().unwrap());
            assert_eq!(tensor.encoding.to_string(), expected["type"].as_str().unwrap());
            assert_eq!(tensor.shape, shape, "{}", tensor.name);
            assert_eq!(tensor.offset, expected["offset"].as_u64().unwrap(), "{}", tensor.name);
            assert_eq!(tensor.bytes, expected["bytes"].as_u64().unwrap(), "{}", tensor.name);
            assert_eq!((tensor.file, &tensor.strides), (7, &None));
        }
    }

    #[test]
    fn metadata_becomes_short_text() {
        let expected = [
            ("arrays.eight", "[0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]"),
            ("arrays.integers", "[1, -2, 3]"),
            ("arrays.long_integers", "[100 i32]"),
            ("arrays.long_strings", "[9 strings]"),
            ("arrays.nested", "[[1, 2], [3]]"),
            ("arrays.strings", r#"["en", "d\"e"]"#),
            ("general.alignment", "256"),
            ("general.architecture", "mixed"),
            ("kinds.bool", "true"),
            ("kinds.f32", "1e-5"),
            ("kinds.f64", "0.1"),
            ("kinds.i16", "-30000"),
            ("kinds.i32", "-2000000000"),
            ("kinds.i64", "-9223372036854775808"),
            ("kinds.i8", "-100"),
            ("kinds.string", "zwölf Ämter\n"),
            ("kinds.u16", "60000"),
            ("kinds.u32", "4000000000"),
            ("kinds.u64", "18446744073709551615"),
            ("kinds.u8", "200"),
        ];
        let metadata = read(Path::new(FIXTURE), 0).unwrap().metadata;
        let found: Vec<_> = metadata.iter().map(|(key, text)| (&**key, &**text)).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn data_is_not_read() {
        let bytes = std::fs::read(FIXTURE).unwrap();
        let whole = parsed(&bytes).unwrap();
        let header = &bytes[..whole.tensors[0].offset as usize];
        let contents = parse(header, bytes.len() as u64, Path::new("model.gguf"), 0).unwrap();
        assert_eq!(contents, whole);
    }

    #[test]
    fn cut_anywhere_is_cut_short() {
        let bytes = std::fs::read(FIXTURE).unwrap();
        let last = parsed(&bytes).unwrap().tensors.pop().unwrap();
        for length in 0..(last.offset + last.bytes) as usize {
            refused(&bytes[..length], "Truncated", &format!("the file has {length}"));
        }
    }

    #[test]
    fn a_file_that_shrinks_meanwhile_has_changed() {
        let bytes = std::fs::read(FIXTURE).unwrap();
        let n_header_bytes = parsed(&bytes).unwrap().tensors[0].offset as usize;
        // Its last bytes are padding, which nobody reads.
        for length in 0..n_header_bytes - 256 {
            let cut = parse(&bytes[..length], bytes.len() as u64, Path::new("model.gguf"), 0);
            assert!(matches!(cut, Err(WeightsError::Changed { .. })), "{length}: {cut:?}");
        }
    }

    #[test]
    fn no_wrong_byte_leads_outside_the_file() {
        let bytes = std::fs::read(FIXTURE).unwrap();
        let n_header_bytes = parsed(&bytes).unwrap().tensors[0].offset as usize;
        for at in 0..n_header_bytes {
            let byte = bytes[at];
            for wrong in [0, 0xff, byte.wrapping_add(1), byte.wrapping_sub(1)] {
                let Ok(contents) = parsed(&patched(bytes.clone(), at, &[wrong])) else { continue };
                for tensor in contents.tensors {
                    let within = tensor.offset + tensor.bytes <= bytes.len() as u64;
                    assert!(within, "byte {at} as {wrong}: {tensor:?}");
                    assert_eq!(tensor.encoding.bytes_for(tensor.numel()), Some(tensor.bytes));
                }
            }
        }
    }

    #[test]
    fn a_foreign_magic() {
        let bytes = patched(Forged::default().bytes(), 0, b"GGJT");
        refused(&bytes, "Malformed", r#"starts with "GGJT", not "GGUF""#);
    }

    #[test]
    fn other_versions_and_byte_orders() {
        let with = |version: [u8; 4]| patched(Forged::default().bytes(), 4, &version);
        refused(&with([1, 0, 0, 0]), "Unsupported", "version 1, hearth reads 2 to 3");
        refused(&with([4, 0, 0, 0]), "Unsupported", "version 4, hearth reads 2 to 3");
        refused(&with([0, 0, 0, 3]), "Unsupported", "version 3 for big-endian machines");
        assert!(parsed(&with([2, 0, 0, 0])).is_ok());
    }

    #[test]
    fn counts_beyond_the_file() {
        let with = |at, count: u64| patched(Forged::default().bytes(), at, &count.to_le_bytes());
        refused(&with(8, 2), "Truncated", "list of 2 tensors needs 72 bytes, the file has 32");
        refused(&with(8, u64::MAX), "Truncated", "needs 18446744073709551615 bytes");
        refused(&with(16, 1), "Truncated", "list of 1 metadata entries needs 37 bytes");
        refused(&with(16, u64::MAX), "Truncated", "needs 18446744073709551615 bytes");
    }

    #[test]
    fn strings_beyond_the_file() {
        let with = |length: u64| {
            let bytes =
                Forged::default().pair("key", GgufValueType::Text, &string(b"value")).bytes();
            patched(bytes, 24 + 8 + 3 + 4, &length.to_le_bytes())
        };
        refused(&with(1000), "Truncated", "metadata key needs 1047 bytes, the file has 64");
        refused(&with(u64::MAX), "Truncated", "needs 18446744073709551615 bytes");
    }

    #[test]
    fn arrays_beyond_the_file() {
        for (kind, length) in [
            (GgufValueType::U8, 1 << 40),
            (GgufValueType::Text, u64::MAX),
            (GgufValueType::U64, 1 << 61),
        ] {
            let bytes = Forged::default()
                .pair("key", GgufValueType::Array, &list(kind, length, &[]))
                .bytes();
            refused(&bytes, "Truncated", "metadata key needs");
        }
    }

    #[test]
    fn a_string_beyond_the_file_in_a_long_array() {
        let mut values = string(b"token").repeat(9);
        values[8 + 5] = 200;
        let bytes = Forged::default()
            .pair("key", GgufValueType::Array, &list(GgufValueType::Text, 9, &values))
            .bytes();
        refused(&bytes, "Truncated", "metadata key needs");
    }

    #[test]
    fn headers_without_end() {
        // As in a sparse file: the length is there, the bytes are not.
        let length = 1_u64 << 40;
        let bytes =
            Forged::default().pair("key", GgufValueType::Text, &length.to_le_bytes()).bytes();
        let error = parse(&bytes[..], length * 2, Path::new("model.gguf"), 0).unwrap_err();
        assert!(matches!(error, WeightsError::Unsupported { .. }), "{error:?}");
        assert!(error.to_string().contains("at most 268435456"), "{error}");
    }

    #[test]
    fn arrays_in_arrays() {
        let with =
            |depth| Forged::default().pair("key", GgufValueType::Array, &nested(depth)).bytes();
        assert_eq!(parsed(&with(4)).unwrap().metadata["key"], "[[[[7]]]]");
        refused(&with(5), "Malformed", "metadata key nests more than 4 arrays");
        refused(&with(10_000), "Malformed", "metadata key nests more than 4 arrays");
        let many = list(GgufValueType::Array, 9, &nested(1).repeat(9));
        let many = Forged::default().pair("key", GgufValueType::Array, &many).bytes();
        assert_eq!(parsed(&many).unwrap().metadata["key"], "[9 arrays]");
        let deep = list(GgufValueType::Array, 9, &nested(4).repeat(9));
        let deep = Forged::default().pair("key", GgufValueType::Array, &deep).bytes();
        refused(&deep, "Malformed", "metadata key nests more than 4 arrays");
    }

    #[test]
    fn a_kind_nobody_knows() {
        let bytes = Forged::default().pair("key", GgufValueType::U8, &[1]).bytes();
        let bytes = patched(bytes, 24 + 8 + 3, &number(13));
        refused(&bytes, "Malformed", "metadata key is of kind 13, the last is 12");
    }

    #[test]
    fn a_bool_that_is_neither() {
        let bytes = Forged::default().pair("key", GgufValueType::Bool, &[2]).bytes();
        refused(&bytes, "Malformed", "metadata key is a bool of 2, not 0 or 1");
    }

    #[test]
    fn an_alignment_that_aligns_nothing() {
        for wrong in [0, 33, 48] {
            let bytes =
                Forged::default().pair(ALIGNMENT_KEY, GgufValueType::U32, &number(wrong)).bytes();
            refused(&bytes, "Malformed", &format!("alignment is {wrong}, not a power of two"));
        }
        let bytes =
            Forged::default().pair(ALIGNMENT_KEY, GgufValueType::Text, &string(b"32")).bytes();
        refused(&bytes, "Malformed", "alignment is of kind strings, not u32");
    }

    #[test]
    fn an_alignment_larger_than_the_file() {
        let forged = Forged::default().pair(ALIGNMENT_KEY, GgufValueType::U32, &number(1 << 31));
        let bytes = forged.tensor("a", &[1], 0, 0).data(64).bytes();
        refused(&bytes, "Truncated", "tensor a needs 2147483652 bytes");
    }

    #[test]
    fn too_many_dimensions() {
        let bytes = Forged::default().tensor("a", &[1; 9], 0, 0).data(64).bytes();
        refused(&bytes, "Malformed", "tensor a has 9 dimensions, at most 8");
        let bytes = Forged::default().tensor("a", &[1; 8], 0, 0).data(64).bytes();
        assert_eq!(parsed(&bytes).unwrap().tensors[0].shape, [1; 8]);
    }

    #[test]
    fn sizes_that_overflow() {
        let huge = 1 << 40;
        for sizes in [&[huge, huge][..], &[u64::MAX], &[huge, huge, 0], &[0, huge, huge]] {
            let bytes = Forged::default().tensor("a", sizes, 0, 0).data(64).bytes();
            refused(&bytes, "Malformed", "takes more than 18446744073709551615 bytes");
        }
    }

    #[test]
    fn rows_that_are_no_whole_blocks() {
        for sizes in [&[16, 2][..], &[33], &[]] {
            let bytes = Forged::default().tensor("a", sizes, 2, 0).data(64).bytes();
            refused(&bytes, "Malformed", "numbers, Q4_0 blocks have 32");
        }
    }

    #[test]
    fn types_hearth_does_not_read() {
        for (kind, name) in [(15, "Q8_K"), (39, "MXFP4"), (4711, "4711")] {
            let bytes = Forged::default().tensor("a", &[256], kind, 0).data(256).bytes();
            refused(&bytes, "Unsupported", &format!("tensor a is of type {name}, "));
        }
    }

    #[test]
    fn offsets_beyond_the_file() {
        let with = |offset| Forged::default().tensor("a", &[8], 0, offset).data(64).bytes();
        assert!(parsed(&with(32)).is_ok());
        refused(&with(64), "Truncated", "tensor a needs 160 bytes, the file has 128");
        refused(&with(u64::MAX - 31), "Truncated", "tensor a needs 18446744073709551615 bytes");
    }

    #[test]
    fn offsets_that_are_not_aligned() {
        let bytes = Forged::default().tensor("a", &[1], 0, 4).data(64).bytes();
        refused(&bytes, "Malformed", "tensor a lies at 4, no multiple of 32");
    }

    #[test]
    fn tensors_that_share_bytes() {
        let with = |offset| {
            let forged = Forged::default().tensor("b", &[9], 0, offset).tensor("a", &[9], 0, 0);
            forged.data(128).bytes()
        };
        refused(&with(32), "Malformed", "tensor a ends at 132, but tensor b starts at 128");
        refused(&with(0), "Malformed", "ends at 132, but");
        let tensors = parsed(&with(64)).unwrap().tensors;
        assert_eq!([&tensors[0].name, &tensors[1].name], ["a", "b"]);
    }

    #[test]
    fn empty_tensors_share_nothing() {
        let forged = Forged::default().tensor("a", &[16], 0, 0).tensor("b", &[3, 0], 0, 0);
        let forged = forged.tensor("c", &[0], 0, 32).tensor("d", &[8], 0, 64);
        let tensors = parsed(&forged.data(96).bytes()).unwrap().tensors;
        let names: String = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
        assert_eq!(names, "bacd");
        assert_eq!((tensors[0].shape.as_slice(), tensors[0].bytes), (&[0, 3][..], 0));
    }

    #[test]
    fn names_and_keys_that_are_there_twice() {
        let forged = Forged::default().tensor("a", &[1], 0, 0).tensor("a", &[1], 0, 32);
        refused(&forged.data(64).bytes(), "Malformed", "tensor a is there twice");
        let forged =
            Forged::default().pair("k", GgufValueType::U8, &[1]).pair("k", GgufValueType::U8, &[2]);
        refused(&forged.bytes(), "Malformed", "metadata k is there twice");
    }

    #[test]
    fn strings_that_are_not_utf_8() {
        let bytes = Forged::default().pair("key", GgufValueType::Text, &string(b"ab\xff")).bytes();
        refused(&bytes, "Malformed", "metadata key has a string of 3 bytes, UTF-8 only up to 2");
        let bytes = Forged::default().tensor("a", &[1], 0, 0).data(64).bytes();
        let bytes = patched(bytes, 24 + 8, b"\xff");
        refused(&bytes, "Malformed", "tensor entry 0 of 1 has a string of 1 bytes, UTF-8 only up");
        let many = list(GgufValueType::Text, 9, &string(b"\xff").repeat(9));
        let bytes = Forged::default().pair("tokens", GgufValueType::Array, &many).bytes();
        assert_eq!(parsed(&bytes).unwrap().metadata["tokens"], "[9 strings]");
    }

    #[test]
    fn names_cannot_play_with_the_terminal() {
        let name = format!("\u{1b}[2J{}", "x".repeat(1000));
        let bytes = Forged::default().tensor(&name, &[1], 4711, 0).data(64).bytes();
        let text = parsed(&bytes).unwrap_err().to_string();
        assert!(text.contains(r"tensor \u{1b}[2Jxxx") && text.len() < 250, "{text}");
    }
}
