//! Keys and values that had another name. In a job somebody typed, the old name is an error that tells the
//! new one; what hearth wrote itself (a run's `config.toml`, a checkpoint's settings) is read under both.

use super::error::ConfigError;
use super::source::ValueOrigin;

/// What was renamed: the old name, and the new one. A section stands for all of its keys, and a value
/// stands with its key.
pub(super) const RENAMED: [(&str, &str); 13] = [
    ("base.fresh", "base.random_init"),
    ("adapter.kind = \"none\"", "adapter.kind = \"full\""),
    ("train.batch", "train.batch_size"),
    ("train.accumulation", "train.gradient_accumulation"),
    ("train.scheme", "train.weighting_scheme"),
    ("train.logit_deviation", "train.logit_std"),
    ("train.clip", "train.max_grad_norm"),
    ("optimizer.schedule", "optimizer.lr_scheduler"),
    ("optimizer.warmup", "optimizer.warmup_steps"),
    ("sample.guidance", "sample.guidance_scale"),
    ("sample.negative", "sample.negative_prompt"),
    ("writing", "generate"),
    ("machine.stream", "machine.offload"),
];

/// The new name of a key with its section, or of a section.
pub(super) fn new_name(was: &str) -> Option<&'static str> {
    RENAMED.iter().find(|(old, _)| *old == was).map(|(_, now)| *now)
}

/// The new word for a value that is one word, with its key and without quotes.
pub(super) fn new_word(key: &str, word: &str) -> Option<&'static str> {
    let now = new_name(&format!("{key} = \"{word}\""))?;
    now.split('"').nth(1)
}

/// A setting as hearth wrote it, by key and as TOML, under today's names.
pub(crate) fn under_new_names(key: &str, value: &str) -> (String, String) {
    let key = match (new_name(key), key.split_once('.')) {
        (Some(now), _) => now.to_owned(),
        (None, Some((section, name))) => format!("{}.{name}", new_name(section).unwrap_or(section)),
        (None, None) => key.to_owned(),
    };
    let word = new_word(&key, value.trim_matches('"'));
    (key, word.map_or_else(|| value.to_owned(), |word| format!("\"{word}\"")))
}

/// That a name of before was typed, if it is one.
pub(super) fn refuse(what: &'static str, was: &str, origin: ValueOrigin) -> Option<ConfigError> {
    let now = new_name(was)?;
    Some(ConfigError::Renamed { what, was: was.into(), now, origin })
}
