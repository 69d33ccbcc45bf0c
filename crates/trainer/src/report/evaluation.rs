//! What `hearth evaluate` found of the base and of the run's adapter, side by side.

use std::fmt::Write;

use super::format::{count, escaped, plural};
use crate::event::evaluation::{EvaluationScores, RightShare, RunEvaluation};

/// As a table; nothing of a run that was not evaluated.
pub(super) fn evaluation(found: Option<&RunEvaluation>) -> String {
    let Some(RunEvaluation { texts, questions, base, adapter }) = found else {
        return String::new();
    };
    let mut rows = String::new();
    let mut row = |name: &str, of: &dyn Fn(&EvaluationScores) -> Option<String>| {
        if let (Some(before), Some(after)) = (of(base), of(adapter)) {
            _ = write!(
                rows,
                "<tr><td>{name}</td><td class=\"number\">{before}</td><td class=\"number\">{after}</td></tr>"
            );
        }
    };
    row("perplexity", &|scores| Some(format!("{:.3}", scores.texts?.perplexity)));
    row("loss per token", &|scores| Some(format!("{:.4}", scores.texts?.loss)));
    row("bits per byte", &|scores| Some(format!("{:.4}", scores.texts?.bits_per_byte)));
    row("right choices", &|scores| Some(share(scores.choices?.accuracy)));
    row("right choices, by length", &|scores| Some(share(scores.choices?.accuracy_by_length)));
    row("right answers", &|scores| Some(share(scores.exact_match?)));
    let of_texts = base.texts.zip(texts.as_ref()).map(|(score, path)| {
        format!("{} tokens of {}", count(score.n_tokens), escaped(&path.display().to_string()))
    });
    let n = [base.choices.map(|it| it.accuracy.n), base.exact_match.map(|it| it.n)];
    let n_questions = n.into_iter().flatten().sum();
    let of_questions = questions.as_ref().map(|path| {
        let path = escaped(&path.display().to_string());
        format!("{} of {path}", plural(n_questions, "question"))
    });
    let of: Vec<String> = of_texts.into_iter().chain(of_questions).collect();
    format!(
        "<h2>Evaluation</h2>\n<div class=\"card wide\"><table><tr><th></th><th class=\"number\">base</th><th \
         class=\"number\">with the adapter</th></tr>{rows}</table></div>\n<p class=\"note\">On {}.</p>\n",
        of.join(" and ")
    )
}

fn share(right: RightShare) -> String {
    format!("{:.1} ± {:.1} %", 100.0 * right.share, 100.0 * right.standard_error)
}
