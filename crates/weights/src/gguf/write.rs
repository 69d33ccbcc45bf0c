//! GGUF files onto the disk, in the layout that `mod.rs` draws. Tensors are asked for piece by piece
//! and turned into their format on the way, so that no tensor is in memory whole, let alone a model.
//!
//! `quantise` makes blocks. Left out on purpose: blocks below four bits, which need an importance matrix to be of use.

use std::io::Write;
use std::num::NonZero;
use std::ops::Range;
use std::path::Path;
use std::sync::Mutex;
use std::thread::{Builder, available_parallelism, scope};

use super::quantise::{largest, quantise};
use super::types::{GgufValueType, ggml_type};
use super::{DEFAULT_ALIGNMENT, GgufBlockFormat, MAGIC, VERSIONS};
use crate::convert;
use crate::dtype::FileDtype;
use crate::error::{Result, WeightsError};
use crate::tensor::{TensorEncoding, numel_of};
use crate::write::AtomicFile;

/// A value of the metadata.
#[derive(Clone, Debug, PartialEq)]
pub enum GgufValue {
    /// A count, a size, or the number of a token.
    U32(u32),
    /// A real number.
    F32(f32),
    /// Yes or no.
    Bool(bool),
    /// A text.
    Text(String),
    /// Integers.
    I32s(Vec<i32>),
    /// Floats.
    F32s(Vec<f32>),
    /// Texts, such as a vocabulary.
    Texts(Vec<String>),
}

/// How a tensor is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GgufFormat {
    /// As it is.
    F32,
    /// Half precision.
    F16,
    /// The upper half of f32.
    Bf16,
    /// 32 values as integers of 8 bits with a scale.
    Q8_0,
    /// 32 values as integers of 5 bits with a scale.
    Q5_0,
    /// 32 values as integers of 5 bits with a scale and an offset.
    Q5_1,
    /// 256 values as integers of 4 bits; each 32 have a scale and an offset.
    Q4K,
    /// 256 values as integers of 5 bits; each 32 have a scale and an offset.
    Q5K,
    /// 256 values as integers of 6 bits; each 16 have a scale.
    Q6K,
}

impl GgufFormat {
    /// Whether its blocks have 256 values.
    pub fn is_k(self) -> bool {
        matches!(self, Self::Q4K | Self::Q5K | Self::Q6K)
    }

    /// The same as it is read.
    pub fn encoding(self) -> TensorEncoding {
        match self {
            Self::F32 => TensorEncoding::Plain(FileDtype::F32),
            Self::F16 => TensorEncoding::Plain(FileDtype::F16),
            Self::Bf16 => TensorEncoding::Plain(FileDtype::Bf16),
            Self::Q8_0 => TensorEncoding::Blocks(GgufBlockFormat::Q8_0),
            Self::Q5_0 => TensorEncoding::Blocks(GgufBlockFormat::Q5_0),
            Self::Q5_1 => TensorEncoding::Blocks(GgufBlockFormat::Q5_1),
            Self::Q4K => TensorEncoding::Blocks(GgufBlockFormat::Q4K),
            Self::Q5K => TensorEncoding::Blocks(GgufBlockFormat::Q5K),
            Self::Q6K => TensorEncoding::Blocks(GgufBlockFormat::Q6K),
        }
    }
}

/// A tensor to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufTensor {
    /// Its name in the file.
    pub name: String,
    /// Sizes, outermost first. Rows are whole blocks.
    pub shape: Vec<u64>,
    /// How it is written.
    pub format: GgufFormat,
}

impl GgufTensor {
    /// Nothing if they do not fit, or if rows are no whole blocks.
    fn encoded_size(&self) -> Option<EncodedSize> {
        let (count, row) = (numel_of(&self.shape)?, self.shape.last().copied().unwrap_or(1));
        self.format.encoding().bytes_for(row)?;
        Some(EncodedSize { numel: count, bytes: self.format.encoding().bytes_for(count)? })
    }

    /// Whole rows, which are whole blocks.
    fn values_per_read(&self) -> u64 {
        let row = self.shape.last().map_or(1, |row| (*row).max(1));
        (CHUNK / row).max(1) * row
    }
}

/// How many values a tensor has, and the bytes they take in the file.
struct EncodedSize {
    numel: u64,
    bytes: u64,
}

/// Gives some values of the tensor of that place in the list: whole rows of it.
pub type ReadValuesFn<'a> = &'a mut dyn FnMut(usize, Range<u64>) -> Result<Vec<f32>>;

/// Values that are asked for at a time, or a row if it has more. Chosen: 16 MiB in f32, enough for a disk to keep
/// streaming and for starting threads not to matter.
const CHUNK: u64 = if cfg!(test) { 64 } else { 4 << 20 };

/// Values that a thread encodes at a time: whole blocks of every format. Chosen: a few milliseconds of the slowest format.
const PIECE: usize = if cfg!(test) { 256 } else { 1 << 16 };

/// Writes a file, its metadata and tensors in their order.
pub fn write(
    path: &Path,
    metadata: &[(String, GgufValue)],
    tensors: &[GgufTensor],
    read: ReadValuesFn<'_>,
) -> Result<()> {
    let io = |source| WeightsError::io("write", path, source);
    let (header, sizes) = header(path, metadata, tensors)?;
    let mut file = AtomicFile::create(path)?;
    file.write_all(&header).map_err(io)?;
    for ((index, tensor), EncodedSize { numel: count, bytes }) in
        tensors.iter().enumerate().zip(sizes)
    {
        let (mut first, step) = (0, tensor.values_per_read());
        while first < count {
            let range = first..count.min(first + step);
            let numbers = read(index, range.clone())?;
            check(tensor, range.clone(), &numbers)?;
            file.write_all(&encode(tensor.format, &numbers)).map_err(io)?;
            first = range.end;
        }
        file.write_all(&padding(bytes)).map_err(io)?;
    }
    file.commit().map(drop)
}

/// All that comes before the data, and the tensors' sizes.
fn header(
    path: &Path,
    metadata: &[(String, GgufValue)],
    tensors: &[GgufTensor],
) -> Result<(Vec<u8>, Vec<EncodedSize>)> {
    let mut out = MAGIC.to_vec();
    out.extend(VERSIONS[1].to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        put_text(&mut out, key);
        put_value(&mut out, value);
    }
    let (mut offset, mut all_sizes) = (0, Vec::with_capacity(tensors.len()));
    for tensor in tensors {
        let sizes = tensor.encoded_size().ok_or_else(|| {
            let GgufTensor { name, shape, format } = tensor;
            let problem = format!("tensor {name} of {shape:?} cannot be {}", format.encoding());
            WeightsError::Malformed { format: "GGUF", problem, path: path.into() }
        })?;
        put_text(&mut out, &tensor.name);
        out.extend((tensor.shape.len() as u32).to_le_bytes());
        out.extend(tensor.shape.iter().rev().flat_map(|size| size.to_le_bytes()));
        out.extend(ggml_type(tensor.format.encoding()).to_le_bytes());
        out.extend(u64::to_le_bytes(offset));
        offset += sizes.bytes.next_multiple_of(DEFAULT_ALIGNMENT);
        all_sizes.push(sizes);
    }
    out.extend(padding(out.len() as u64));
    Ok((out, all_sizes))
}

/// Zeros up to where the next may begin.
fn padding(bytes: u64) -> Vec<u8> {
    vec![0; (bytes.next_multiple_of(DEFAULT_ALIGNMENT) - bytes) as usize]
}

fn put_value(out: &mut Vec<u8>, value: &GgufValue) {
    let kinds = match value {
        GgufValue::U32(_) => &[GgufValueType::U32][..],
        GgufValue::F32(_) => &[GgufValueType::F32],
        GgufValue::Bool(_) => &[GgufValueType::Bool],
        GgufValue::Text(_) => &[GgufValueType::Text],
        GgufValue::I32s(_) => &[GgufValueType::Array, GgufValueType::I32],
        GgufValue::F32s(_) => &[GgufValueType::Array, GgufValueType::F32],
        GgufValue::Texts(_) => &[GgufValueType::Array, GgufValueType::Text],
    };
    out.extend(kinds.iter().flat_map(|kind| (*kind as u32).to_le_bytes()));
    match value {
        GgufValue::U32(number) => out.extend(number.to_le_bytes()),
        GgufValue::F32(number) => out.extend(number.to_le_bytes()),
        GgufValue::Bool(is_so) => out.push((*is_so).into()),
        GgufValue::Text(text) => put_text(out, text),
        GgufValue::I32s(numbers) => {
            out.extend((numbers.len() as u64).to_le_bytes());
            out.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
        }
        GgufValue::F32s(numbers) => {
            out.extend((numbers.len() as u64).to_le_bytes());
            out.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
        }
        GgufValue::Texts(texts) => {
            out.extend((texts.len() as u64).to_le_bytes());
            for text in texts {
                put_text(out, text);
            }
        }
    }
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// That as many values came as were asked for, and that the format can hold them: a model that became
/// infinite on its way would be noticed late.
fn check(tensor: &GgufTensor, range: Range<u64>, numbers: &[f32]) -> Result<()> {
    let (needed, got) = (range.end - range.start, numbers.len() as u64);
    let name = || tensor.name.clone();
    if needed != got {
        let [needed, got] = [needed, got].map(|count| count * size_of::<f32>() as u64);
        return Err(WeightsError::BufferSize { name: name(), needed, got });
    }
    let most = largest(tensor.format);
    match numbers.iter().find(|number| number.is_nan() || number.abs() > most) {
        Some(number) => Err(WeightsError::OutOfRange {
            name: name(),
            number: *number,
            encoding: tensor.format.encoding(),
        }),
        None => Ok(()),
    }
}

/// By as many threads as there are cores, or as the system gives.
fn encode(format: GgufFormat, numbers: &[f32]) -> Vec<u8> {
    let bytes_for = |count: usize| {
        let bytes = format.encoding().bytes_for(count as u64).expect("rows are whole blocks");
        bytes as usize
    };
    let mut out = vec![0; bytes_for(numbers.len())];
    let pieces = Mutex::new(numbers.chunks(PIECE).zip(out.chunks_mut(bytes_for(PIECE))));
    let next = || pieces.lock().expect("no thread panics while it takes a piece").next();
    let work = || {
        while let Some((numbers, out)) = next() {
            encode_piece(format, numbers, out);
        }
    };
    let n_threads = available_parallelism().map_or(1, NonZero::get).min(numbers.len() / PIECE);
    scope(|scope| {
        for _ in 1..n_threads {
            // One thread fewer is only slower.
            _ = Builder::new().spawn_scoped(scope, work);
        }
        work();
    });
    out
}

fn encode_piece(format: GgufFormat, numbers: &[f32], out: &mut [u8]) {
    match format {
        GgufFormat::F32 => convert::encode(numbers, FileDtype::F32, out),
        GgufFormat::F16 => convert::encode(numbers, FileDtype::F16, out),
        GgufFormat::Bf16 => convert::encode(numbers, FileDtype::Bf16, out),
        _ => quantise(format, numbers, out),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As in `tests/golden/weights/generate_written.py`.
    fn number(index: u64) -> f32 {
        ((index * 37 % 101) as f32 - 50.0) / 3.0
    }

    fn tensor(name: &str, shape: &[u64], format: GgufFormat) -> GgufTensor {
        GgufTensor { name: name.into(), shape: shape.into(), format }
    }

    /// The file's bytes, or what went wrong, and what is left in the folder.
    fn written(
        metadata: &[(String, GgufValue)],
        tensors: &[GgufTensor],
        read: ReadValuesFn<'_>,
    ) -> (Result<Vec<u8>>, usize) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.gguf");
        let done = write(&path, metadata, tensors, read);
        let left = std::fs::read_dir(folder.path()).unwrap().count();
        (done.map(|()| std::fs::read(&path).unwrap()), left)
    }

    #[test]
    fn bytes_are_those_of_the_python_package() {
        let metadata = [
            ("general.architecture", GgufValue::Text("llama".into())),
            ("llama.block_count", GgufValue::U32(12)),
            ("llama.rope.freq_base", GgufValue::F32(10000.0)),
            ("tokenizer.ggml.add_bos_token", GgufValue::Bool(true)),
            ("general.name", GgufValue::Text("zwölf Ämter".into())),
            ("tokenizer.ggml.tokens", GgufValue::Texts(["a", "Ġb", ""].map(Into::into).into())),
            ("tokenizer.ggml.token_type", GgufValue::I32s(vec![1, -1, 3])),
            ("tokenizer.ggml.scores", GgufValue::F32s(vec![-0.5, 1e9])),
        ];
        let metadata = metadata.map(|(key, value)| (key.to_owned(), value));
        let tensors = [
            tensor("matrix.f32", &[3, 5], GgufFormat::F32),
            tensor("matrix.f16", &[7, 9], GgufFormat::F16),
            tensor("matrix.bf16", &[3, 33], GgufFormat::Bf16),
            tensor("matrix.q8_0", &[5, 96], GgufFormat::Q8_0),
            tensor("zeros.q8_0", &[1, 32], GgufFormat::Q8_0),
            tensor("vector.f32", &[3], GgufFormat::F32),
        ];
        let mut read = |index: usize, range: Range<u64>| {
            let is_zero = tensors[index].name.starts_with("zeros");
            Ok(range.map(|at| if is_zero { 0.0 } else { number(at) }).collect())
        };
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/weights/written.gguf");
        let ours = written(&metadata, &tensors, &mut read).0.unwrap();
        assert!(ours == std::fs::read(path).unwrap());
        let read = super::super::parse(&*ours, ours.len() as u64, Path::new("x"), 0).unwrap();
        assert_eq!(read.tensors.len(), tensors.len());
    }

    #[test]
    fn what_cannot_be_written_leaves_nothing_behind() {
        let said = |shape: &[u64], format, numbers: &[f32]| {
            let tensors = [tensor("a", shape, format)];
            let (done, left) = written(&[], &tensors, &mut |_, _| Ok(numbers.to_vec()));
            assert_eq!(left, 0);
            done.unwrap_err().to_string()
        };
        let narrow = said(&[2, 33], GgufFormat::Q8_0, &[]);
        let expected = "GGUF file is malformed: tensor a of [2, 33] cannot be Q8_0: ";
        assert!(narrow.starts_with(expected), "{narrow}");
        let short = said(&[3], GgufFormat::F32, &[1.0; 2]);
        assert_eq!(short, "tensor a needs a buffer of 12 bytes, got 8");
        let large = said(&[1], GgufFormat::F16, &[1e6]);
        assert_eq!(large, "tensor a holds 1000000, which F16 does not");
        let lost = said(&[1], GgufFormat::F32, &[f32::NAN]);
        assert_eq!(lost, "tensor a holds NaN, which F32 does not");
    }
}
