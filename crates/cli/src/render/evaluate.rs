//! The page of `hearth evaluate`: a table of scores, before and after.

use serde::Serialize;
use trainer::event::evaluation::{EvaluationScores, RightShare};

use crate::text::{BOLD, TextPage, plural, thousands};

/// What was measured.
#[derive(Serialize)]
pub struct EvaluationReport {
    pub base: ModelScores,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adapter: Option<ModelScores>,
}

/// The scores of one model.
#[derive(Serialize)]
pub struct ModelScores {
    pub name: String,
    pub peak_bytes: usize,
    pub secs: f64,
    #[serde(flatten)]
    pub scores: EvaluationScores,
}

/// Draws the scores.
pub fn page(report: &EvaluationReport) -> String {
    let mut page = TextPage::new();
    let models: Vec<&ModelScores> = std::iter::once(&report.base).chain(&report.adapter).collect();
    let EvaluationScores { texts, choices, exact_match } = &report.base.scores;
    if let Some(texts) = texts {
        page.line(BOLD, &format!("texts, {} tokens", thousands(texts.n_tokens as usize)));
        let head = ["", "perplexity", "loss", "bits per byte"].map(str::to_owned);
        let rows = models.iter().filter_map(|model| {
            let score = model.scores.texts?;
            Some([
                model.name.clone(),
                format!("{:.3}", score.perplexity),
                format!("{:.4}", score.loss),
                format!("{:.4}", score.bits_per_byte),
            ])
        });
        page.table(&std::iter::once(head).chain(rows).collect::<Vec<_>>());
    }
    if let Some(choices) = choices {
        page.line(BOLD, &format!("{} with choices", plural(choices.accuracy.n, "question")));
        let head = ["", "accuracy", "by length"].map(str::to_owned);
        let rows = models.iter().filter_map(|model| {
            let score = model.scores.choices?;
            Some([model.name.clone(), share(score.accuracy), share(score.accuracy_by_length)])
        });
        page.table(&std::iter::once(head).chain(rows).collect::<Vec<_>>());
    }
    if let Some(exact) = exact_match {
        page.line(BOLD, &format!("{} with one answer", plural(exact.n, "question")));
        let head = ["", "exact match"].map(str::to_owned);
        let rows = models
            .iter()
            .filter_map(|model| Some([model.name.clone(), share(model.scores.exact_match?)]));
        page.table(&std::iter::once(head).chain(rows).collect::<Vec<_>>());
    }
    page.finish()
}

fn share(right: RightShare) -> String {
    format!("{:.1} ± {:.1} %", 100.0 * right.share, 100.0 * right.standard_error)
}
