//! What `hearth verify` found, as a page.

use serde::Serialize;
use trainer::verify::Comparison;

use crate::text::{BAD, BOLD, DIM, GOOD, TextPage};

/// What was found.
#[derive(Serialize)]
pub struct Verified {
    pub class: String,
    pub n_weights: usize,
    pub dtype: String,
    pub device: String,
    pub is_fine: bool,
    pub tensors: Vec<ComparedRow>,
}

/// One tensor.
#[derive(Serialize)]
pub struct ComparedRow {
    pub name: String,
    pub difference: f64,
    pub tolerance: f64,
    pub cosine: f64,
    pub is_fine: bool,
    /// The reference's number, and ours.
    pub first: Vec<(f32, f32)>,
}

impl From<Comparison> for ComparedRow {
    fn from(comparison: Comparison) -> Self {
        let is_fine = comparison.is_within_tolerance();
        let Comparison { name, difference, tolerance, cosine, first } = comparison;
        Self { name, difference, tolerance, cosine, is_fine, first }
    }
}

/// Draws it: every output, the worst gradient, and all that is wrong.
pub fn page(findings: &Verified) -> String {
    let mut page = TextPage::new();
    let Verified { class, n_weights, dtype, device, is_fine, tensors } = findings;
    page.line(BOLD, &format!("{class}, {n_weights} parameters, {dtype} on {device}"));
    let is_gradient = |row: &&ComparedRow| row.name.starts_with("grad.");
    let worst = tensors
        .iter()
        .filter(is_gradient)
        .max_by(|a, b| a.difference.total_cmp(&b.difference))
        .map(|row| row.name.as_str());
    let is_shown =
        |row: &&ComparedRow| !is_gradient(row) || !row.is_fine || Some(row.name.as_str()) == worst;
    let mut rows = vec![["tensor", "difference", "tolerance", "cosine"].map(str::to_owned)];
    rows.extend(tensors.iter().filter(is_shown).map(|row| {
        let ComparedRow { name, difference, tolerance, cosine, .. } = row;
        [
            name.clone(),
            format!("{difference:.1e}"),
            format!("{tolerance:.0e}"),
            format!("{cosine:.5}"),
        ]
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
