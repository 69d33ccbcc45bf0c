//! The long lists in a GGUF file's metadata, entry by entry: vocabularies, which the catalog only
//! counts. Read when a tokenizer is wanted and not before, since they are most of a header.
//!
//! Left out on purpose: lists of lists, and lists of bools, which no file we know of has.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

use super::{Header, Kind, LEAST_PAIR_BYTES, shown};
use crate::error::{Result, WeightsError};

/// A list's entries.
#[derive(Clone, Debug, PartialEq)]
pub enum List {
    /// Texts.
    Texts(Vec<String>),
    /// Whole numbers of any size.
    Integers(Vec<i64>),
    /// Fractions of any precision.
    Numbers(Vec<f64>),
}

/// The lists of those names that are in the file's metadata.
pub fn lists(path: &Path, names: &[&str]) -> Result<BTreeMap<String, List>> {
    let file = File::open(path).map_err(|source| WeightsError::io("open", path, source))?;
    let about = file.metadata().map_err(|source| WeightsError::io("read", path, source))?;
    let (reader, what) = (BufReader::new(file), "GGUF header".into());
    let mut header = Header { reader, position: 0, file_len: about.len(), path, what };
    header.check_magic()?;
    header.check_version()?;
    let (_, n_pairs) = (header.u64()?, header.u64()?);
    header.lists(n_pairs, names)
}

impl<R: Read> Header<'_, R> {
    fn lists(&mut self, n_pairs: u64, names: &[&str]) -> Result<BTreeMap<String, List>> {
        self.check_room(n_pairs, LEAST_PAIR_BYTES)?;
        let mut lists = BTreeMap::new();
        for at in 0..n_pairs {
            self.what = format!("metadata entry {at} of {n_pairs}");
            let key = self.text()?;
            self.what = format!("metadata {}", shown(&key));
            let kind = self.kind()?;
            if kind == Kind::Array && names.contains(&key.as_str()) {
                let list = self.list()?;
                lists.insert(key, list);
            } else {
                self.value(kind, 0)?;
            }
        }
        Ok(lists)
    }

    fn list(&mut self) -> Result<List> {
        let (kind, n_values) = (self.kind()?, self.u64()?);
        self.check_room(n_values, kind.least_bytes())?;
        let each = 0..n_values;
        Ok(match kind {
            Kind::Text => List::Texts(each.map(|_| self.text()).collect::<Result<_>>()?),
            Kind::F32 => List::Numbers(
                each.map(|_| Ok(f32::from_le_bytes(self.array()?).into()))
                    .collect::<Result<_>>()?,
            ),
            Kind::F64 => List::Numbers(
                each.map(|_| Ok(f64::from_le_bytes(self.array()?))).collect::<Result<_>>()?,
            ),
            Kind::Array | Kind::Bool => {
                let problem = format!("{} is a list of {}", self.what, kind.name());
                return Err(self.unsupported(problem));
            }
            _ => List::Integers(each.map(|_| self.integer(kind)).collect::<Result<_>>()?),
        })
    }

    fn integer(&mut self, kind: Kind) -> Result<i64> {
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
        let found = lists(Path::new(FIXTURE), &names.each_ref().map(String::as_str)).unwrap();
        let [short, texts, integers, numbers, none] = names.each_ref().map(|name| found.get(name));
        assert_eq!(short, Some(&List::Texts(vec!["en".into(), "d\"e".into()])));
        let tokens = (0..9).map(|n| format!("token {n}")).collect();
        assert_eq!(texts, Some(&List::Texts(tokens)));
        assert_eq!(integers, Some(&List::Integers((0..100).collect())));
        assert_eq!(numbers, Some(&List::Numbers(vec![0.5; 8])));
        assert_eq!(none, None);
        let error = lists(Path::new(FIXTURE), &["arrays.nested"]).unwrap_err().to_string();
        assert!(error.contains("arrays.nested is a list of arrays"), "{error}");
    }
}
