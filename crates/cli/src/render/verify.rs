//! What `hearth verify` found, as a page.

use crate::commands::verify::{Findings, Row};
use crate::text::{BAD, BOLD, DIM, GOOD, Page};

/// Draws it: every output, the worst gradient, and all that is wrong.
pub fn page(findings: &Findings) -> String {
    let mut page = Page::new();
    let Findings { class, n_weights, dtype, device, is_fine, tensors } = findings;
    page.line(BOLD, &format!("{class}, {n_weights} weights, {dtype} on {device}"));
    let is_gradient = |row: &&Row| row.name.starts_with("grad.");
    let worst = tensors
        .iter()
        .filter(is_gradient)
        .max_by(|a, b| a.difference.total_cmp(&b.difference))
        .map(|row| row.name.as_str());
    let is_shown =
        |row: &&Row| !is_gradient(row) || !row.is_fine || Some(row.name.as_str()) == worst;
    let mut rows = vec![["tensor", "difference", "tolerance"].map(str::to_owned)];
    rows.extend(tensors.iter().filter(is_shown).map(|row| {
        [row.name.clone(), format!("{:.1e}", row.difference), format!("{:.0e}", row.tolerance)]
    }));
    page.table(&rows);
    for row in tensors.iter().filter(|row| !row.is_fine) {
        let numbers = row.first.iter().map(|(theirs, ours)| format!("{theirs} / {ours}"));
        let numbers = numbers.collect::<Vec<_>>().join(", ");
        page.line(DIM, &format!("{}: reference / here: {numbers}", row.name));
    }
    let n_gradients = tensors.iter().filter(is_gradient).count();
    if n_gradients > 0 {
        page.line(DIM, &format!("of {n_gradients} gradients the worst is shown"));
    }
    let n_wrong = tensors.iter().filter(|row| !row.is_fine).count();
    if *is_fine {
        page.line(GOOD, &format!("all {} tensors are within tolerance", tensors.len()));
    } else {
        page.line(BAD, &format!("{n_wrong} of {} tensors differ", tensors.len()));
    }
    page.finish()
}
