//! The page of `hearth import`: what was written, and what is not the same.

use std::path::Path;

use trainer::import::{HEADINGS, ImportedJob, KeyNote, KeyVerdict};

use crate::text::{DIM, GOOD, PLAIN, TextPage, WARN};

/// What became of a config.
pub fn page(imported: &ImportedJob, file: &Path) -> String {
    let ImportedJob { trainer, source, lines, notes, .. } = imported;
    let mut page = TextPage::new();
    page.line(PLAIN, &format!("{}: a config of {trainer}", source.display()));
    let n_defaults = lines.iter().filter(|line| line.is_default).count();
    let written = format!(
        "{}: {} keys, {n_defaults} of them defaults of {trainer}",
        file.display(),
        lines.len()
    );
    page.item("✓", GOOD, &written);
    for (verdict, heading) in HEADINGS {
        let of: Vec<&KeyNote> = notes.iter().filter(|note| note.verdict == verdict).collect();
        if !of.is_empty() {
            page.heading(&heading.to_lowercase());
        }
        let (mark, style) = match verdict {
            KeyVerdict::Unknown => ("?", WARN),
            KeyVerdict::Differs | KeyVerdict::Needed => ("!", WARN),
            KeyVerdict::NoEffect | KeyVerdict::Refused | KeyVerdict::Used => ("·", DIM),
        };
        for note in of {
            page.item(mark, style, &note.to_string());
        }
    }
    page.heading("next");
    page.long_item("$", DIM, &format!("hearth plan {}", file.display()));
    page.finish()
}
