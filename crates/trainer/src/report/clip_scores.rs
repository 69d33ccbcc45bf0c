//! CLIP scores of samples over steps, where they were measured.

use super::format::{escaped, plural};
use super::plot::{PlotSeries, SeriesStyle, plot};
use crate::event::clip_scores::{ClipScores, ClipStepScore};
use crate::event::history::SampleImage;

/// Two plots: how near samples are to their prompts, and to the training images. Nothing of a run without scores.
pub(super) fn clip_scores(scores: Option<&ClipScores>, samples: &[SampleImage]) -> String {
    let Some(scores) = scores else { return String::new() };
    let steps = scores.by_step(samples);
    let of = |get: fn(&ClipStepScore) -> Option<f64>| {
        steps.iter().filter_map(move |step| Some((step.step as f64, get(step)?)))
    };
    let drawn = |title, name, colour, get| {
        plot(title, false, &[PlotSeries::new(name, colour, SeriesStyle::Beads, of(get))])
    };
    let plots = [
        drawn("Samples and their prompts", "cosine", 1, |step| Some(step.to_prompt)),
        drawn("Samples and training images", "cosine", 2, |step| step.to_images),
    ]
    .concat();
    if plots.is_empty() {
        return String::new();
    }
    let compared = match scores.n_images {
        0 => String::new(),
        n => format!(", and of {}", plural(n, "training image")),
    };
    format!(
        "<h2>CLIP scores</h2>\n<div class=\"plots\">{plots}</div>\n<p class=\"note\">Mean cosines of embeddings of the \
         samples of a step{compared}, by {}. Compare them within a model: more is nearer.</p>\n",
        escaped(&scores.model)
    )
}
