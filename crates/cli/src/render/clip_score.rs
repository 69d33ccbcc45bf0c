//! The page of `hearth clip-score`: a row for each step with samples.

use std::path::PathBuf;

use serde::Serialize;
use trainer::event::clip_scores::{ClipScores, ClipStepScore};

use crate::render::sample::memory;
use crate::text::{BOLD, DIM, PLAIN, TextPage, plural};

/// What was measured.
#[derive(Serialize)]
pub struct ClipScorePage {
    pub by_step: Vec<ClipStepScore>,
    #[serde(flatten)]
    pub scores: ClipScores,
    /// The file with them.
    pub path: PathBuf,
    pub report: PathBuf,
    pub peak_bytes: usize,
    pub limit_bytes: usize,
}

/// Draws the scores.
pub fn page(done: &ClipScorePage) -> String {
    let ClipScorePage { by_step, scores, path, report, peak_bytes, limit_bytes } = done;
    let mut page = TextPage::new();
    let compared = match scores.n_images {
        0 => String::new(),
        n => format!(", compared with {}", plural(n, "image")),
    };
    page.line(BOLD, &format!("{} scored{compared}", plural(scores.samples.len(), "sample")));
    let head = ["step", "samples", "to the prompt", "to the images"].map(str::to_owned);
    let row = |score: &ClipStepScore| {
        let to_images = score.to_images.map_or_else(|| "–".into(), |it| format!("{it:.4}"));
        [score.step.to_string(), score.n.to_string(), format!("{:.4}", score.to_prompt), to_images]
    };
    page.table(&std::iter::once(head).chain(by_step.iter().map(row)).collect::<Vec<_>>());
    page.line(PLAIN, "cosines of CLIP's embeddings: more is nearer; step 0 is the base alone");
    page.line(DIM, &format!("{} and {}", path.display(), report.display()));
    page.line(DIM, &memory(*peak_bytes, *limit_bytes));
    page.finish()
}
