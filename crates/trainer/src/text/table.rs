//! Tables of records, CSV and TSV: the first row has the names of the columns, and each other row is a
//! record with those keys.

use std::sync::Arc;

use serde_json::{Map, Value};

use super::RecordKind;
use super::record::{self, TextRecord, not_utf8};
use crate::data::csv::{CsvRow, read_row};
use crate::data::fault::TextFault;

/// The first row of a table.
#[derive(Clone, Debug)]
pub(super) struct TableColumns {
    names: Arc<[String]>,
    /// What is between cells.
    pub separator: u8,
    /// Bytes of the first row.
    pub bytes: usize,
}

/// Columns without which no row is a record.
const NEEDED: [&[&str]; 4] = [
    &["text"],
    // With a completion, or for a model that makes them.
    &["prompt"],
    &["instruction", "output"],
    &["instruction", "response"],
];

impl TableColumns {
    /// Of a file that begins so. What is between cells is what a name says, or else what
    /// spreadsheets of other languages write.
    pub fn read(start: &[u8], separator: u8) -> Result<Self, TextFault> {
        let mark = start.len() - super::read::without_bom(start).len();
        let found = [separator, b',', b';', b'\t'].map(|separator| {
            let row = read_row(&start[mark..], separator, true);
            let (cells, bytes) = row.map_or_else(Default::default, |row| (row.cells, row.bytes));
            let names = cells.iter().map(|cell| String::from_utf8_lossy(cell).trim().to_owned());
            Self { names: names.collect(), separator, bytes: mark + bytes }
        });
        match found.iter().find(|columns| columns.is_known()) {
            Some(columns) => Ok(columns.clone()),
            None => Err(TextFault::Columns { columns: found[0].names.to_vec() }),
        }
    }

    fn is_known(&self) -> bool {
        let has = |name: &&str| self.names.iter().any(|known| known == name);
        let is_preference = [["chosen", "rejected"], ["completion", "label"]]
            .iter()
            .any(|keys| keys.iter().all(has));
        is_preference || NEEDED.iter().any(|names| names.iter().all(has))
    }

    /// What a row says.
    pub fn record(&self, row: CsvRow, kind: RecordKind) -> Result<Vec<TextRecord>, TextFault> {
        let (found, expected) = (row.cells.len(), self.names.len());
        if !row.is_closed {
            return Err(TextFault::Unclosed { most: super::read::MOST_LINE_BYTES as u64 });
        }
        if found != expected {
            return Err(TextFault::Cells { found, expected });
        }
        let mut fields = Map::with_capacity(found);
        for (name, cell) in self.names.iter().zip(row.cells) {
            let text = String::from_utf8(cell)
                .map_err(|error| not_utf8(error.as_bytes(), error.utf8_error()))?;
            fields.insert(name.clone(), Value::String(text));
        }
        record::from_fields(&fields, kind)
    }
}
