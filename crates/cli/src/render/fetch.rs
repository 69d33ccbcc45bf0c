//! What `hearth fetch` downloaded, or would, as a page.

use std::path::PathBuf;

use machine::Bytes;
use serde::Serialize;

use crate::text::{DIM, GOOD, PLAIN, TextPage, plural};

/// A download.
#[derive(Serialize)]
pub struct FetchReport {
    pub name: String,
    pub revision: String,
    pub commit: String,
    pub files: Vec<FetchedFile>,
    /// What was not there when it began.
    pub missing_bytes: u64,
    pub transferred_bytes: u64,
    /// Where the files are; nothing after a dry run.
    pub snapshot: Option<PathBuf>,
}

/// A file of it.
#[derive(Serialize)]
pub struct FetchedFile {
    pub path: String,
    pub bytes: u64,
    pub was_there: bool,
}

/// Draws it.
pub fn page(report: &FetchReport) -> String {
    let mut page = TextPage::new();
    let total: u64 = report.files.iter().map(|file| file.bytes).fold(0, u64::saturating_add);
    let files = plural(report.files.len(), "file");
    let Some(snapshot) = &report.snapshot else {
        let rows: Vec<_> = report.files.iter().map(row).collect();
        page.table(&rows);
        let missing = Bytes(report.missing_bytes);
        page.line(PLAIN, &format!("{files}, {}; to download: {missing}", Bytes(total)));
        return page.finish();
    };
    let came = match report.transferred_bytes {
        0 => "all of it was there".to_owned(),
        bytes => format!("{} downloaded", Bytes(bytes)),
    };
    page.item("✓", GOOD, &format!("{}: {files}, {}, {came}", report.name, Bytes(total)));
    page.row("commit", DIM, &report.commit);
    page.row("folder", DIM, &snapshot.display().to_string());
    page.row("use it as", PLAIN, &format!("--base {}", used_as(report)));
    page.finish()
}

fn used_as(report: &FetchReport) -> String {
    let FetchReport { name, revision, .. } = report;
    if revision == weights::hub::MAIN { name.clone() } else { format!("{name}@{revision}") }
}

fn row(file: &FetchedFile) -> [String; 3] {
    let state = if file.was_there { "in the cache" } else { "" };
    [Bytes(file.bytes).to_string(), file.path.clone(), state.to_owned()]
}
