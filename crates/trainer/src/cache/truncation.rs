//! Captions that text encoders truncate. Found with tokenizers alone, before any weight is read: a user
//! should know which part of a caption is not trained on.

use super::select::CachedSample;
use crate::data::caption::{CaptionSettings, variants};
use crate::data::{Problem, ProblemKind};
use crate::model::diffusion::text::{EncoderKind, TextEncoders};

/// Letters of a cut that are shown. Chosen: enough to find the place.
const SHOWN: usize = 60;

/// What is to be said of the captions of samples, as they are without shuffling.
pub(super) fn truncated_captions<'a>(
    encoders: &TextEncoders,
    settings: &[CaptionSettings],
    samples: impl Iterator<Item = &'a CachedSample>,
) -> Vec<Problem> {
    let problem = |sample: &CachedSample| {
        let as_written =
            CaptionSettings { shuffle: None, dropout: 0.0, ..settings[sample.set].clone() };
        let texts = variants(&sample.caption, &as_written);
        let lost = texts.iter().find_map(|text| lost(encoders, text))?;
        Some(Problem::warning(&sample.path, lost))
    };
    samples.filter_map(problem).collect()
}

/// The last encoder sees the most: what it sees is not lost.
fn lost(encoders: &TextEncoders, text: &str) -> Option<ProblemKind> {
    let cuts = encoders.truncations(text);
    let (spec, cut) = *cuts.last()?;
    let (tokens, most) = (cut.n_tokens, cut.max_tokens);
    let encoder = match spec.kind {
        EncoderKind::T5 => "T5",
        EncoderKind::Clip => "CLIP",
        EncoderKind::Qwen25Vl => "Qwen2.5-VL",
        EncoderKind::Qwen3 | EncoderKind::Qwen3Layers => "Qwen3",
    };
    let is_seen = encoders.last().is_some_and(|last| last.name != spec.name);
    if is_seen {
        return Some(ProblemKind::CaptionBeyondClip { tokens, most });
    }
    let mut lost: String = cut.lost.chars().take(SHOWN).collect();
    if lost.len() < cut.lost.len() {
        lost.push('…');
    }
    Some(ProblemKind::CaptionCut { encoder, tokens, most, lost })
}
