//! The safetensors format: eight bytes of header length, a JSON header, the values.
//!
//! ```text
//! u64 little-endian   length n of the header
//! n bytes             {"__metadata__": {"format": "pt"},
//!                      "name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, …}
//!                     padded with spaces
//! the rest            the tensors' bytes, one after the other, without holes
//! ```
//!
//! The rules are those of the safetensors crate, checked before anything is believed; a name that
//! stands twice is refused as well.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::io::Read;
use std::path::Path;

use serde::de::{self, Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize as DeriveDeserialize, Serialize};

use crate::catalog::FileContents;
use crate::dtype::FileDtype;
use crate::error::{Result, WeightsError};
use crate::tensor::{TensorEncoding, TensorInfo, numel_of};

const FORMAT: &str = "safetensors";

/// Taken from `MAX_HEADER_SIZE` of the safetensors crate.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;

const METADATA: &str = "__metadata__";

/// Bytes of the header's length, before the header.
const LENGTH_BYTES: u64 = 8;

/// Reads the header of a file of that length; the data is not touched.
pub fn parse(
    mut reader: impl Read,
    file_len: u64,
    path: &Path,
    file: usize,
) -> Result<FileContents> {
    let malformed =
        |problem: String| WeightsError::Malformed { format: FORMAT, problem, path: path.into() };
    let truncated = |what: &str, needed: u64| WeightsError::Truncated {
        what: what.into(),
        needed,
        has: file_len,
        path: path.into(),
    };
    if file_len < LENGTH_BYTES {
        return Err(truncated("the length of the header", LENGTH_BYTES));
    }
    let io = |source| WeightsError::io("read", path, source);
    let mut length = [0; LENGTH_BYTES as usize];
    reader.read_exact(&mut length).map_err(io)?;
    let header_bytes = u64::from_le_bytes(length);
    if header_bytes > MAX_HEADER_BYTES {
        return Err(malformed(format!(
            "header of {header_bytes} bytes, at most {MAX_HEADER_BYTES} are allowed"
        )));
    }
    let data_start = LENGTH_BYTES + header_bytes;
    if data_start > file_len {
        return Err(truncated("the header", data_start));
    }
    let mut header = Vec::new();
    reader.take(header_bytes).read_to_end(&mut header).map_err(io)?;
    if header.len() as u64 != header_bytes {
        return Err(WeightsError::Changed { path: path.into() });
    }
    if header.first() != Some(&b'{') {
        return Err(malformed("the header does not start with {".into()));
    }
    let header: SafetensorsHeader =
        serde_json::from_slice(&header).map_err(|error| malformed(error.to_string()))?;
    let tensors = header.place(file, data_start).map_err(malformed)?;
    let data_end = tensors.last().map_or(data_start, |last| last.offset + last.bytes);
    match data_end.cmp(&file_len) {
        std::cmp::Ordering::Greater => Err(truncated("the last tensor", data_end)),
        std::cmp::Ordering::Less => {
            Err(malformed(format!("tensors end at byte {data_end}, the file at {file_len}")))
        }
        std::cmp::Ordering::Equal => Ok(FileContents { metadata: header.metadata, tensors }),
    }
}

/// The header as JSON gives it, in the order of the file.
struct SafetensorsHeader {
    metadata: BTreeMap<String, String>,
    tensors: Vec<(String, HeaderEntry)>,
}

#[derive(DeriveDeserialize, Serialize)]
struct HeaderEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

impl SafetensorsHeader {
    /// Tensors in the order of their data, each checked against its neighbours.
    fn place(&self, file: usize, data_start: u64) -> std::result::Result<Vec<TensorInfo>, String> {
        let mut sorted: Vec<_> = self.tensors.iter().collect();
        sorted.sort_by_key(|(_, entry)| entry.data_offsets);
        let mut tensors = Vec::with_capacity(sorted.len());
        let mut expected = 0;
        for (name, entry) in sorted {
            let (start, end) = entry.data_offsets;
            if start != expected {
                let what =
                    if start < expected { "overlaps its neighbour" } else { "leaves a hole" };
                return Err(format!(
                    "tensor {name} {what}: starts at {start}, expected {expected}"
                ));
            }
            let bytes = end
                .checked_sub(start)
                .ok_or(format!("tensor {name} ends at {end}, before {start}"))?;
            let encoding = entry.encoding(name, bytes)?;
            let offset =
                data_start.checked_add(start).ok_or(format!("tensor {name} starts at {start}"))?;
            offset.checked_add(bytes).ok_or(format!("tensor {name} ends at {end}"))?;
            let (name, shape) = (name.clone(), entry.shape.clone());
            tensors.push(TensorInfo { name, shape, encoding, file, offset, bytes, strides: None });
            expected = end;
        }
        Ok(tensors)
    }
}

impl HeaderEntry {
    fn encoding(&self, name: &str, bytes: u64) -> std::result::Result<TensorEncoding, String> {
        let dtype = FileDtype::from_name(&self.dtype)
            .ok_or_else(|| format!("tensor {name} has the unknown number format {}", self.dtype))?;
        let encoding = TensorEncoding::Plain(dtype);
        let needed = numel_of(&self.shape).and_then(|count| encoding.bytes_for(count));
        let needed =
            needed.ok_or_else(|| format!("tensor {name} is too large: {:?}", self.shape))?;
        if needed != bytes {
            return Err(format!(
                "tensor {name} of shape {:?} needs {needed} bytes, has {bytes}",
                self.shape
            ));
        }
        Ok(encoding)
    }
}

/// Written out because a derived map would keep the last of two equal names without a word.
impl<'de> Deserialize<'de> for SafetensorsHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = SafetensorsHeader;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map of tensors")
            }

            fn visit_map<M: MapAccess<'de>>(
                self,
                mut map: M,
            ) -> std::result::Result<SafetensorsHeader, M::Error> {
                let mut header =
                    SafetensorsHeader { metadata: BTreeMap::new(), tensors: Vec::new() };
                let mut seen = HashSet::new();
                while let Some(name) = map.next_key::<String>()? {
                    if !seen.insert(name.clone()) {
                        _ = map.next_value::<IgnoredAny>()?;
                        return Err(de::Error::custom(format!("{name} stands twice")));
                    }
                    if name == METADATA {
                        header.metadata = map.next_value()?;
                    } else {
                        header.tensors.push((name, map.next_value()?));
                    }
                }
                Ok(header)
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// A tensor that is about to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputTensor {
    /// Its name.
    pub name: String,
    /// How its values will be stored.
    pub dtype: FileDtype,
    /// Sizes, outermost first.
    pub shape: Vec<u64>,
}

impl OutputTensor {
    /// Bytes it will take; nothing if that does not fit.
    pub fn bytes(&self) -> Option<u64> {
        TensorEncoding::Plain(self.dtype).bytes_for(numel_of(&self.shape)?)
    }
}

/// The order in which the reference writer lays tensors out: widest values first, so that each is
/// aligned to its size, then by name.
pub fn order(tensors: &mut [OutputTensor]) {
    tensors.sort_by(|a, b| (b.dtype.bytes(), &a.name).cmp(&(a.dtype.bytes(), &b.name)));
}

/// Length and header for tensors in this order, padded so that the data starts at a multiple of 8.
pub fn header(
    metadata: &BTreeMap<String, String>,
    tensors: &[OutputTensor],
) -> std::result::Result<Vec<u8>, String> {
    let mut json = serde_json::Map::new();
    if !metadata.is_empty() {
        json.insert(METADATA.into(), serde_json::json!(metadata));
    }
    let mut start = 0_u64;
    for tensor in tensors {
        let end = tensor.bytes().and_then(|bytes| start.checked_add(bytes));
        let end =
            end.ok_or_else(|| format!("tensor {} is too large: {:?}", tensor.name, tensor.shape))?;
        let entry = HeaderEntry {
            dtype: tensor.dtype.name().into(),
            shape: tensor.shape.clone(),
            data_offsets: (start, end),
        };
        if tensor.name == METADATA
            || json.insert(tensor.name.clone(), serde_json::json!(entry)).is_some()
        {
            return Err(format!("tensor {} stands twice or has a reserved name", tensor.name));
        }
        start = end;
    }
    let mut text = serde_json::Value::Object(json).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(LENGTH_BYTES as usize), b' ');
    if text.len() as u64 > MAX_HEADER_BYTES {
        return Err(format!(
            "header of {} bytes, at most {MAX_HEADER_BYTES} are allowed",
            text.len()
        ));
    }
    let length = text.len() as u64;
    Ok([&length.to_le_bytes()[..], &text].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(bytes: &[u8]) -> Result<FileContents> {
        parse(bytes, bytes.len() as u64, Path::new("x.safetensors"), 0)
    }

    fn file(json: &str, data_bytes: usize) -> Vec<u8> {
        [&(json.len() as u64).to_le_bytes()[..], json.as_bytes(), &vec![0; data_bytes]].concat()
    }

    /// What is wrong with a file of this header and so many bytes of data.
    fn check(json: &str, data_bytes: usize, says: &str) {
        let bytes = file(json, data_bytes);
        let ours = parsed(&bytes).unwrap_err().to_string();
        assert!(ours.contains(says), "{ours:?} does not say {says:?}");
        let theirs = safetensors::SafeTensors::deserialize(&bytes);
        // The reference takes the last of two equal names, and white space where its rules want {.
        let stricter = json.contains("twice") || json.starts_with(' ');
        assert!(theirs.is_err() || stricter, "the reference reads {json}");
    }

    const ONE: &str = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;

    #[test]
    fn a_good_header_is_read_as_the_reference_reads_it() {
        let json = r#"{"__metadata__":{"format":"pt"},"b":{"dtype":"BF16","shape":[1,2],"data_offsets":[8,12]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"empty":{"dtype":"I64","shape":[0,9],"data_offsets":[12,12]}}   "#;
        let bytes = file(json, 12);
        let ours = parsed(&bytes).unwrap();
        let theirs = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(ours.metadata["format"], "pt");
        assert_eq!(
            ours.tensors.iter().map(|t| t.name.as_str()).collect::<Vec<_>>(),
            ["a", "b", "empty"]
        );
        for tensor in &ours.tensors {
            let view = theirs.tensor(&tensor.name).unwrap();
            assert_eq!(tensor.bytes as usize, view.data().len());
            let at = tensor.offset as usize;
            assert_eq!(bytes[at..].as_ptr(), view.data().as_ptr());
        }
        assert_eq!(parsed(&file("{}", 0)).unwrap(), FileContents::default());
    }

    #[test]
    fn files_that_end_too_early_are_cut_short() {
        let whole = file(ONE, 8);
        for length in 0..whole.len() {
            let error = parsed(&whole[..length]).unwrap_err();
            assert!(matches!(error, WeightsError::Truncated { .. }), "{length}: {error}");
        }
        assert!(parsed(&whole).is_ok());
    }

    #[test]
    fn hostile_headers_are_refused_with_both_values() {
        check(ONE, 9, "tensors end at byte 70, the file at 71");
        check(
            r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,7]}}"#,
            7,
            "needs 8 bytes, has 7",
        );
        check(r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}"#, 8, "leaves a hole");
        check(
            r#"{"a":{"dtype":"F7","shape":[2],"data_offsets":[0,8]}}"#,
            8,
            "unknown number format F7",
        );
        check(r#"{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}"#, 8, "invalid value");
        check(
            r#"{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,8]}}"#,
            8,
            "too large",
        );
        check(
            r#"{"a":{"dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,8]}}"#,
            8,
            "too large",
        );
        let two = |start, end| {
            format!(
                r#"{{"a":{{"dtype":"U8","shape":[4],"data_offsets":[0,4]}},"b":{{"dtype":"U8","shape":[4],"data_offsets":[{start},{end}]}}}}"#
            )
        };
        check(&two(2, 6), 8, "b overlaps its neighbour: starts at 2, expected 4");
        check(&two(5, 9), 9, "b leaves a hole: starts at 5, expected 4");
        check(&two(4, u64::MAX), 8, "needs 4 bytes");
        check(&format!("[{ONE}]"), 8, "does not start with {");
        check(&format!(" {ONE}"), 8, "does not start with {");
        check(&ONE[..30], 8, "EOF");
        check(r#"{"a":3}"#, 8, "invalid type");
        let twice = ONE.replace('}', "").replacen(
            '{',
            r#"{"twice":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"#,
            1,
        );
        let twice = twice.replace("\"a\":{", "\"twice\":{") + "}}";
        check(&twice, 8, "twice stands twice");
    }

    #[test]
    fn a_giant_header_is_refused_before_it_is_read() {
        let giant = (MAX_HEADER_BYTES + 1).to_le_bytes();
        let error = parse(&giant[..], u64::MAX, Path::new("x"), 0).unwrap_err();
        assert!(error.to_string().contains("at most 100000000 are allowed"), "{error}");
        let promised = 99_999_999_u64.to_le_bytes();
        assert!(matches!(parsed(&promised).unwrap_err(), WeightsError::Truncated { .. }));
    }

    #[test]
    fn what_we_write_the_reference_reads() {
        let entering = |name: &str, dtype, shape: &[u64]| OutputTensor {
            name: name.into(),
            dtype,
            shape: shape.into(),
        };
        let mut tensors = vec![
            entering("z \"quoted\" ünï", FileDtype::F32, &[2, 2]),
            entering("b", FileDtype::U8, &[3]),
            entering("a", FileDtype::F32, &[]),
            entering("none", FileDtype::Bf16, &[0]),
        ];
        order(&mut tensors);
        assert_eq!(
            tensors.iter().map(|t| t.name.as_str()).collect::<Vec<_>>(),
            ["a", "z \"quoted\" ünï", "none", "b"]
        );
        let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        let mut bytes = header(&metadata, &tensors).unwrap();
        assert_eq!(bytes.len() % 8, 0);
        bytes.extend((0..23).map(|byte| byte as u8));
        let theirs = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(theirs.tensor("b").unwrap().data(), [20, 21, 22]);
        assert_eq!(parsed(&bytes).unwrap().metadata, metadata);
    }

    #[test]
    fn a_name_cannot_be_written_twice() {
        let one = OutputTensor { name: "a".into(), dtype: FileDtype::U8, shape: vec![1] };
        let error = header(&BTreeMap::new(), &[one.clone(), one]).unwrap_err();
        assert!(error.contains("tensor a stands twice"), "{error}");
    }
}
