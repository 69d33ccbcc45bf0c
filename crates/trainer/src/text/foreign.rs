//! Detects files of other formats among texts by their first bytes or, where those say nothing, by their
//! names; with the command that converts each. Taking one for text would silently train on noise.

use std::path::Path;

use crate::data::fault::TextFault;

/// A kind of file.
struct ForeignFormat {
    endings: &'static [&'static str],
    /// First bytes; empty if there are none of its own.
    magic: &'static [u8],
    what: &'static str,
    /// `FILE` stands for its name.
    remedy: &'static str,
}

/// Checked with pandas 2 and pyarrow: rows become lines, whatever their columns hold.
const PARQUET: &str = "python -c \"import pandas; pandas.read_parquet('FILE')\
                       .to_json('FILE.jsonl', orient='records', lines=True)\"";
const DOCUMENT: &str = "save it as plain text (.txt)";
const SHEET: &str = "save it as .csv";

/// Those whose first bytes are of an archive come before the archive.
const KNOWN: [ForeignFormat; 17] = [
    ForeignFormat { endings: &["parquet"], magic: b"PAR1", what: "Parquet", remedy: PARQUET },
    ForeignFormat {
        endings: &["arrow", "feather"],
        magic: b"ARROW1\0\0",
        what: "Arrow",
        remedy: "write it as .jsonl with the program that made it",
    },
    ForeignFormat { endings: &["pdf"], magic: b"%PDF", what: "PDF", remedy: "pdftotext FILE" },
    ForeignFormat {
        endings: &["docx", "doc", "odt"],
        magic: b"",
        what: "a Word document",
        remedy: DOCUMENT,
    },
    ForeignFormat { endings: &["rtf"], magic: b"{\\rtf", what: "RTF", remedy: DOCUMENT },
    ForeignFormat { endings: &["epub"], magic: b"", what: "an e-book", remedy: DOCUMENT },
    ForeignFormat {
        endings: &["xlsx", "xls", "ods"],
        magic: b"",
        what: "a spreadsheet",
        remedy: SHEET,
    },
    ForeignFormat {
        endings: &["gz", "tgz"],
        magic: b"\x1f\x8b",
        what: "compressed",
        remedy: "gunzip -k FILE",
    },
    ForeignFormat {
        endings: &["zst"],
        magic: b"\x28\xb5\x2f\xfd",
        what: "compressed",
        remedy: "zstd -d FILE",
    },
    ForeignFormat {
        endings: &["xz"],
        magic: b"\xfd7zXZ\0",
        what: "compressed",
        remedy: "xz -dk FILE",
    },
    ForeignFormat {
        endings: &["bz2"],
        magic: b"BZh",
        what: "compressed",
        remedy: "bunzip2 -k FILE",
    },
    ForeignFormat { endings: &["tar"], magic: b"", what: "an archive", remedy: "tar -xf FILE" },
    ForeignFormat {
        endings: &["zip"],
        magic: b"PK\x03\x04",
        what: "an archive",
        remedy: "unzip FILE",
    },
    ForeignFormat {
        endings: &["7z"],
        magic: b"7z\xbc\xaf\x27\x1c",
        what: "an archive",
        remedy: "7z x FILE",
    },
    ForeignFormat {
        endings: &["rar"],
        magic: b"Rar!\x1a\x07",
        what: "an archive",
        remedy: "unrar x FILE",
    },
    ForeignFormat {
        endings: &["db", "sqlite", "sqlite3"],
        magic: b"SQLite format 3\0",
        what: "a database",
        remedy: "sqlite3 -csv -header FILE 'select …' > FILE.csv",
    },
    ForeignFormat {
        endings: &["safetensors", "gguf", "pt", "pth", "ckpt"],
        magic: b"GGUF\x03\0",
        what: "a model",
        remedy: "give it as base.path",
    },
];

/// What a file is by its name, if that is none of ours.
pub(super) fn by_name(path: &Path) -> Option<TextFault> {
    let ending = path.extension()?;
    let is_it =
        |foreign: &&ForeignFormat| foreign.endings.iter().any(|it| ending.eq_ignore_ascii_case(it));
    KNOWN.iter().find(is_it).map(|foreign| foreign.fault(path))
}

/// What a file is by its first bytes, whatever it is called.
pub(super) fn by_start(path: &Path, start: &[u8]) -> Option<TextFault> {
    let is_it =
        |foreign: &&ForeignFormat| !foreign.magic.is_empty() && start.starts_with(foreign.magic);
    let found = KNOWN.iter().find(is_it)?;
    Some(by_name(path).unwrap_or_else(|| found.fault(path)))
}

impl ForeignFormat {
    fn fault(&self, path: &Path) -> TextFault {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        TextFault::Foreign { what: self.what.into(), remedy: self.remedy.replace("FILE", &name) }
    }
}

/// Names, without their endings, of files that are about a folder.
const ABOUT: [&str; 6] = ["readme", "license", "licence", "copying", "notice", "dataset_infos"];

/// Whether a file is about the folder it lies in, as a dataset card is.
pub(super) fn is_about(path: &Path) -> bool {
    let stem = path.file_stem().unwrap_or_default();
    ABOUT.iter().any(|name| stem.eq_ignore_ascii_case(name))
}

/// Whether it is UTF-16: by its byte order mark, or by every second byte being zero, as of Latin letters.
pub(super) fn is_utf16(start: &[u8]) -> bool {
    let zeros = |at: usize| start.chunks_exact(2).take(32).filter(|pair| pair[at] == 0).count();
    let n = start.len().min(64) / 2;
    let is_half = |at: usize| n > 0 && zeros(at) == n && zeros(1 - at) == 0;
    start.starts_with(b"\xff\xfe") || start.starts_with(b"\xfe\xff") || is_half(0) || is_half(1)
}
