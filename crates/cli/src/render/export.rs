//! What `hearth export` wrote, as a page.

use crate::commands::export::Row;
use crate::text::{DIM, Page};

/// Draws it.
pub fn page(all: &[Row]) -> String {
    let mut page = Page::new();
    let mut rows = vec![["for", "layers", "unmatched", "difference", "file"].map(str::to_owned)];
    rows.extend(all.iter().map(|row| {
        let difference = format!("{:.0e}", row.difference);
        let path = row.path.display().to_string();
        [row.format.clone(), row.layers.to_string(), row.unmatched.to_string(), difference, path]
    }));
    page.table(&rows);
    page.line(DIM, "each was read again by its reader's names, and compared");
    page.finish()
}
