//! The long lists in a GGUF file's metadata, entry by entry: vocabularies, which the catalog only
//! counts. Read when a tokenizer is wanted and not before, since they are most of a header.
//!
//! Left out on purpose: lists of lists, and lists of bools, which no file we know of has.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

use super::{GgufReader, GgufValueType, LEAST_PAIR_BYTES, shown};
use crate::error::{Result, WeightsError};

/// A list's entries.
#[derive(Clone, Debug, PartialEq)]
pub enum GgufArray {
    /// Texts.
    Strings(Vec<String>),
    /// Integers of any size.
    Integers(Vec<i64>),
    /// Floats of any precision.
    Floats(Vec<f64>),
}

/// The lists of those names that are in the file's metadata.
pub fn read_arrays(path: &Path, names: &[&str]) -> Result<BTreeMap<String, GgufArray>> {
    let file = File::open(path).map_err(|source| WeightsError::io("open", path, source))?;
    let about = file.metadata().map_err(|source| WeightsError::io("read", path, source))?;
    let (reader, what) = (BufReader::new(file), "GGUF header".into());
    let mut header = GgufReader { reader, position: 0, file_len: about.len(), path, what };
    header.check_magic()?;
    header.check_version()?;
    let (_, n_pairs) = (header.u64()?, header.u64()?);
    header.arrays(n_pairs, names)
}

impl<R: Read> GgufReader<'_, R> {
    fn arrays(&mut self, n_pairs: u64, names: &[&str]) -> Result<BTreeMap<String, GgufArray>> {
        self.check_room(n_pairs, LEAST_PAIR_BYTES)?;
        let mut lists = BTreeMap::new();
        for at in 0..n_pairs {
            self.what = format!("metadata entry {at} of {n_pairs}");
            let key = self.text()?;
            self.what = format!("metadata {}", shown(&key));
            let kind = self.value_type()?;
            if kind == GgufValueType::Array && names.contains(&key.as_str()) {
                let list = self.array_values()?;
                lists.insert(key, list);
            } else {
                self.value(kind, 0)?;
            }
        }
        Ok(lists)
    }

    fn array_values(&mut self) -> Result<GgufArray> {
        let (kind, n_values) = (self.value_type()?, self.u64()?);
        self.check_room(n_values, kind.least_bytes())?;
        let each = 0..n_values;
        Ok(match kind {
            GgufValueType::Text => {
                GgufArray::Strings(each.map(|_| self.text()).collect::<Result<_>>()?)
            }
            GgufValueType::F32 => GgufArray::Floats(
                each.map(|_| Ok(f32::from_le_bytes(self.array()?).into()))
                    .collect::<Result<_>>()?,
            ),
            GgufValueType::F64 => GgufArray::Floats(
                each.map(|_| Ok(f64::from_le_bytes(self.array()?))).collect::<Result<_>>()?,
            ),
            GgufValueType::Array | GgufValueType::Bool => {
                let problem = format!("{} is a list of {}", self.what, kind.name());
                return Err(self.unsupported(problem));
            }
            _ => GgufArray::Integers(each.map(|_| self.integer(kind)).collect::<Result<_>>()?),
        })
    }

    fn integer(&mut self, kind: GgufValueType) -> Result<i64> {
        let text = self.value(kind, 0)?;
        text.parse().map_err(|_| {
            self.malformed(format!("{} has {text}, the largest can be {}", self.what, i64::MAX))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIXTURE: &str =
        concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/weights/mixed.gguf");

    #[test]
    fn long_lists_are_read_entry_by_entry() {
        let names = ["strings", "long_strings", "long_integers", "eight", "none"];
        let names = names.map(|name| format!("arrays.{name}"));
        let found = read_arrays(Path::new(FIXTURE), &names.each_ref().map(String::as_str)).unwrap();
        let [short, texts, integers, numbers, none] = names.each_ref().map(|name| found.get(name));
        assert_eq!(short, Some(&GgufArray::Strings(vec!["en".into(), "d\"e".into()])));
        let tokens = (0..9).map(|n| format!("token {n}")).collect();
        assert_eq!(texts, Some(&GgufArray::Strings(tokens)));
        assert_eq!(integers, Some(&GgufArray::Integers((0..100).collect())));
        assert_eq!(numbers, Some(&GgufArray::Floats(vec![0.5; 8])));
        assert_eq!(none, None);
        let error = read_arrays(Path::new(FIXTURE), &["arrays.nested"]).unwrap_err().to_string();
        assert!(error.contains("arrays.nested is a list of arrays"), "{error}");
    }
}
