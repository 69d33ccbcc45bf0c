//! Which layers get an adapter, and which: patterns of their names.

use super::factors::LokrShape;
use crate::error::TrainerError;
use crate::suggest::nearest;

/// Pattern for `exclude`: layers that nothing depends on, which the model marks as unused.
pub const UNUSED: &str = "unused";

/// LoRA targets that a word stands for, in the models of one family.
#[derive(Clone, Copy, Debug)]
pub struct TargetPreset {
    /// One of [`PRESET_NAMES`].
    pub name: &'static str,
    /// Lists of patterns, as in [`AdapterTarget`]; each names a layer of every model of the family.
    pub patterns: &'static [&'static [&'static str]],
}

/// The words that stand for targets, in any family.
pub const PRESET_NAMES: [&str; 4] = ["attention", "all", "kohya", "ai-toolkit"];

/// New adapters for the layers that a pattern names.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterTarget {
    /// The end of a layer's name, from a dot on (`to_q`, `attn.to_out.0`), or the whole name with
    /// `*` for anything.
    pub pattern: String,
    /// LoRA rank.
    pub rank: usize,
    /// LoRA alpha; the scale is alpha / rank.
    pub alpha: f32,
    /// LoRA dropout: the share of a layer's input that the adapter does not see in training.
    pub dropout: f32,
    /// Of what matrices it is made.
    pub form: AdapterForm,
    /// What its learning rate is multiplied by, and for B in addition (`LoRA`+).
    pub rate_factors: [f32; 2],
}

/// Forms of new adapters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdapterForm {
    /// Two low-rank matrices.
    Lora,
    /// The same with magnitudes trained apart from directions (Liu et al., arXiv 2402.09353).
    Dora,
    /// The elementwise product of two low-rank matrices.
    Loha,
    /// A Kronecker product.
    Lokr(LokrShape),
}

/// Layer names that an error lists. Chosen: all of one block of every known model.
const SHOWN: usize = 24;

/// The error for a pattern that matches none of some layers, with the nearest name.
pub(super) fn no_layer(
    pattern: &str,
    key: &'static str,
    none: &'static str,
    modules: &[&String],
) -> TrainerError {
    let mut endings: Vec<&str> = Vec::new();
    for module in modules {
        let ending = ending(module);
        if !endings.contains(&ending) {
            endings.push(ending);
        }
    }
    let words: Vec<&str> = endings.iter().filter_map(|ending| last_word(ending)).collect();
    let known = endings.iter().chain(&words).chain(&PRESET_NAMES).copied();
    let near = nearest(pattern, known).map(str::to_owned);
    let more = endings.len().saturating_sub(SHOWN);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let known = endings.iter().take(SHOWN).copied().collect::<Vec<_>>().join(", ") + &more;
    TrainerError::NoTarget { key, target: pattern.into(), none, near, known }
}

/// A layer's name within its block, without the block's index.
fn ending(module: &str) -> &str {
    let mut rest = module;
    while let Some((before, after)) = rest.split_once('.') {
        rest = after;
        if before.parse::<u32>().is_ok() {
            return rest;
        }
    }
    module
}

/// What people call a layer: the last component of its name that is no number.
fn last_word(ending: &str) -> Option<&str> {
    ending.rsplit('.').find(|word| word.parse::<u32>().is_err())
}

impl AdapterTarget {
    /// Whether it names a layer.
    pub(super) fn matches_module(&self, module: &str) -> bool {
        name_matches(&self.pattern, module)
    }
}

/// Whether a pattern names a layer.
pub(crate) fn name_matches(pattern: &str, module: &str) -> bool {
    if pattern.contains('*') {
        return glob_matches(pattern, module);
    }
    module.strip_suffix(pattern).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

/// Whether a pattern with `*` wildcards matches a whole text.
fn glob_matches(pattern: &str, text: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == text,
        Some((start, rest)) => text.strip_prefix(start).is_some_and(|text| {
            (0..=text.len()).any(|at| text.is_char_boundary(at) && glob_matches(rest, &text[at..]))
        }),
    }
}
