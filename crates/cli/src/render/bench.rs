//! Measured figures as a table.

use std::path::Path;

use crate::commands::bench::load::Figure;
use crate::text::{BOLD, DIM, Page};

/// Draws what `hearth bench load` measured.
pub fn loading(file: &Path, figures: &[Figure]) -> String {
    let mut page = Page::new();
    page.line(BOLD, &format!("loading {}", file.display()));
    let mut rows = vec![
        ["reader", "cache", "GiB/s", "of a memory copy", "peak memory of tensors"]
            .map(str::to_owned),
    ];
    for figure in figures {
        let peak = figure.rss_peak_bytes.map_or("unknown".into(), |peak| {
            format!("{:.2}", peak as f64 / figure.tensor_bytes.max(1) as f64)
        });
        rows.push([
            figure.reader.name(),
            format!("{:?}", figure.cache).to_lowercase(),
            format!("{:.2}", figure.gib_per_s),
            format!("{:.2}", figure.ratio_to_memcpy),
            peak,
        ]);
    }
    page.table(&rows);
    page.line(DIM, "the best of each; every measurement in a process of its own");
    page.finish()
}
