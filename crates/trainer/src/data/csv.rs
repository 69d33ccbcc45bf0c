//! Rows of CSV and its kin, as RFC 4180 describes them and pandas, spreadsheets and databases write
//! them: cells in quotes may hold separators, line ends and doubled quotes. One row at a time and
//! without a copy of the whole, so that files larger than memory can be read in blocks.

/// One row.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct CsvRow {
    /// Its cells, without their quotes.
    pub cells: Vec<Vec<u8>>,
    /// Bytes that it takes, its line end included.
    pub bytes: usize,
    /// Whether every quote that was opened was closed.
    pub is_closed: bool,
}

impl CsvRow {
    /// Whether there is nothing in it, as on an empty line.
    pub fn is_blank(&self) -> bool {
        self.cells.iter().all(Vec::is_empty)
    }
}

/// The row that `bytes` begin with. None if there is nothing, or if it does not end within them and
/// more may come.
pub(crate) fn read_row(bytes: &[u8], separator: u8, is_last: bool) -> Option<CsvRow> {
    let (mut cells, mut cell) = (Vec::new(), Vec::new());
    let (mut is_quoted, mut is_start) = (false, true);
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        at += 1;
        match byte {
            b'"' if is_quoted && bytes.get(at) == Some(&b'"') => {
                cell.push(b'"');
                at += 1;
            }
            b'"' if is_quoted => is_quoted = false,
            _ if is_quoted => cell.push(byte),
            // Elsewhere it is a letter like any other, as in `5" nails`.
            b'"' if is_start => is_quoted = true,
            b'\n' => {
                cell.pop_if(|last| *last == b'\r');
                cells.push(cell);
                return Some(CsvRow { cells, bytes: at, is_closed: true });
            }
            _ if byte == separator => cells.push(std::mem::take(&mut cell)),
            _ => cell.push(byte),
        }
        is_start = byte == separator && !is_quoted;
    }
    // A quote at the very end may be the first of two.
    (is_last && at > 0).then(|| {
        cell.pop_if(|last| *last == b'\r' && !is_quoted);
        cells.push(cell);
        CsvRow { cells, bytes: at, is_closed: !is_quoted }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(text: &str, separator: u8) -> Vec<Vec<String>> {
        let mut rest = text.as_bytes();
        let mut rows = Vec::new();
        while let Some(found) = read_row(rest, separator, true) {
            assert!(found.is_closed, "{text:?}");
            rows.push(
                found.cells.into_iter().map(|cell| String::from_utf8(cell).unwrap()).collect(),
            );
            rest = &rest[found.bytes..];
        }
        rows
    }

    #[test]
    fn quotes_hide_separators_line_ends_and_quotes() {
        let text = "a,b\r\n\"x, y\",\"line 1\nline \"\"2\"\"\"\n,5\" nails\n\"\",last";
        let expected =
            [["a", "b"], ["x, y", "line 1\nline \"2\""], ["", "5\" nails"], ["", "last"]];
        assert_eq!(rows(text, b','), expected);
        assert_eq!(rows("a\tb,c\n", b'\t'), [["a", "b,c"]]);
    }

    /// However a file is cut into blocks, a row is whole or not there yet.
    #[test]
    fn a_row_that_goes_on_is_waited_for() {
        let text = b"\"a\nb\"\"c\",d\n";
        for at in 0..text.len() {
            assert_eq!(read_row(&text[..at], b',', false), None, "{at}");
        }
        let whole = read_row(text, b',', false).unwrap();
        assert_eq!(
            (whole.bytes, whole.cells),
            (text.len(), vec![b"a\nb\"c".to_vec(), b"d".to_vec()])
        );
        let open = read_row(b"\"a\nb,c\n", b',', true).unwrap();
        assert!(!open.is_closed);
    }
}
