//! Caption augmentation: lines and wildcards, trigger word, tag shuffling, caption dropout. Functions of the caption, the
//! settings and three random numbers, so that a resumed run sees the same texts, and so that all texts of a
//! run are known beforehand: `variants` are encoded before the text encoders are unloaded.

use std::collections::HashSet;
use std::num::NonZeroU16;

use super::caption_choice::CaptionChoice;

/// The augmentations.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CaptionSettings {
    /// What of a caption is taken.
    pub choice: CaptionChoice,
    /// Trigger word: put in front of every caption that does not have it.
    pub trigger: Option<String>,
    /// Tag shuffling.
    pub shuffle: Option<Shuffle>,
    /// Caption dropout: the probability of an empty caption, which classifier-free guidance needs.
    pub dropout: f32,
}

/// Shuffling of comma-separated tags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shuffle {
    /// Tags in front that keep their places.
    pub n_kept: usize,
    /// The number of orders of a caption, with the original one. Few enough that all can be encoded
    /// beforehand.
    pub n_orders: NonZeroU16,
}

/// The random numbers of one step, each uniform over all 64 bits. Always all of them, so that a setting
/// that is switched on does not change what the others do.
#[derive(Clone, Copy, Debug)]
pub struct CaptionDraws {
    /// Decides on dropout.
    pub dropout: u64,
    /// Decides on the order of tags.
    pub order: u64,
    /// Decides what of the caption is taken.
    pub choice: u64,
}

impl CaptionDraws {
    /// Nothing is left to chance: the first line as written.
    pub const PLAIN: Self = Self { dropout: u64::MAX, order: 0, choice: 0 };
}

/// The text of one step.
pub fn for_step(caption: &str, settings: &CaptionSettings, draws: CaptionDraws) -> String {
    // The upper 24 bits are a number below 1 without rounding.
    let uniform = (draws.dropout >> 40) as f32 / (1 << 24) as f32;
    if uniform < settings.dropout {
        return String::new();
    }
    let order = match settings.shuffle {
        Some(Shuffle { n_orders, .. }) => draws.order % u64::from(n_orders.get()),
        None => 0,
    };
    in_order(&settings.choice.text(caption, draws.choice), settings, order)
}

/// Every text that `for_step` can give for a caption, each once.
pub fn variants(caption: &str, settings: &CaptionSettings) -> Vec<String> {
    let mut seen = HashSet::new();
    let mut texts = Vec::new();
    let mut add = |text: String| {
        if seen.insert(text.clone()) {
            texts.push(text);
        }
    };
    if settings.dropout < 1.0 {
        let n_orders = settings.shuffle.map_or(1, |shuffle| shuffle.n_orders.get());
        for text in settings.choice.all_texts(caption) {
            (0..n_orders.into()).for_each(|order| add(in_order(&text, settings, order)));
        }
    }
    if settings.dropout > 0.0 {
        add(String::new());
    }
    texts
}

fn in_order(caption: &str, settings: &CaptionSettings, order: u64) -> String {
    let shuffled = match settings.shuffle {
        Some(Shuffle { n_kept, .. }) if order > 0 => shuffled(caption, n_kept, order),
        _ => caption.to_owned(),
    };
    // Last, so that the word stays in front.
    match settings.trigger.as_deref().map(str::trim) {
        Some(trigger) if !trigger.is_empty() => triggered(&shuffled, trigger),
        _ => shuffled,
    }
}

/// With the order's index as the seed.
fn shuffled(caption: &str, n_kept: usize, order: u64) -> String {
    let mut tags: Vec<&str> =
        caption.split(',').map(str::trim).filter(|tag| !tag.is_empty()).collect();
    let n_kept = n_kept.min(tags.len());
    shuffle(&mut tags[n_kept..], order);
    tags.join(", ")
}

/// Fisher-Yates.
pub(super) fn shuffle<T>(moving: &mut [T], seed: u64) {
    let mut state = seed;
    for last in (1..moving.len()).rev() {
        let other = mixed(&mut state) % (last as u64 + 1);
        moving.swap(last, other as usize);
    }
}

/// `SplitMix64`. Taken: Steele, Lea and Flood, "Fast splittable pseudorandom number generators".
fn mixed(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut number = *state;
    number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

/// With the trigger word in front, unless it stands in the caption.
pub fn triggered(caption: &str, trigger: &str) -> String {
    if has_words(caption, trigger) {
        return caption.to_owned();
    }
    if caption.is_empty() { trigger.to_owned() } else { format!("{trigger}, {caption}") }
}

/// Whether the trigger stands in it as words: `sks` is not in `asks`, `SKS` is one.
fn has_words(caption: &str, trigger: &str) -> bool {
    let [caption, trigger] = [caption, trigger].map(str::to_lowercase);
    let is_part = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    caption.match_indices(&trigger).any(|(at, _)| {
        let (before, after) = (&caption[..at], &caption[at + trigger.len()..]);
        !is_part(before.chars().next_back()) && !is_part(after.chars().next())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(trigger: &str, shuffle: Option<(usize, u16)>, dropout: f32) -> CaptionSettings {
        let shuffle =
            shuffle.map(|(n_kept, n)| Shuffle { n_kept, n_orders: NonZeroU16::new(n).unwrap() });
        let trigger = (!trigger.is_empty()).then(|| trigger.to_owned());
        CaptionSettings { trigger, shuffle, dropout, ..CaptionSettings::default() }
    }

    #[test]
    fn a_trigger_is_put_in_front_once() {
        for (caption, trigger, expected) in [
            ("a dog", "sks", "sks, a dog"),
            ("a sks dog", "sks", "a sks dog"),
            ("SKS dog", "sks", "SKS dog"),
            ("she asks a dog", "sks", "sks, she asks a dog"),
            ("sks_2 dog", "sks", "sks, sks_2 dog"),
            ("", "sks", "sks"),
            ("a dog", " ", "a dog"),
            ("ein Hündchen", "ünd", "ünd, ein Hündchen"),
            ("in the style of İrem, a cat", "irem", "irem, in the style of İrem, a cat"),
        ] {
            let settings = settings(trigger, None, 0.5);
            assert_eq!(for_step(caption, &settings, CaptionDraws::PLAIN), expected);
        }
    }

    #[test]
    fn tags_are_shuffled_behind_those_that_are_kept() {
        let settings = settings("sks", Some((1, 500)), 0.0);
        let mut seen = std::collections::BTreeSet::new();
        for order in 0..2000 {
            let draws = CaptionDraws { order, ..CaptionDraws::PLAIN };
            let text = for_step("one, a, b,,c ", &settings, draws);
            let mut tags: Vec<_> =
                text.split(',').map(str::trim).filter(|t| !t.is_empty()).collect();
            assert_eq!(tags[..2], ["sks", "one"]);
            seen.insert(tags[2..].concat());
            tags.sort_unstable();
            assert_eq!(tags, ["a", "b", "c", "one", "sks"]);
        }
        assert_eq!(seen.len(), 6, "all orders of three tags");
    }

    #[test]
    fn captions_drop_out_as_often_as_asked() {
        let settings = settings("sks", None, 0.25);
        let n_dropped = (0..1000)
            .map(|n| CaptionDraws { dropout: n << 54, order: n, choice: n })
            .map(|draws| for_step("a dog", &settings, draws))
            .filter(String::is_empty)
            .count();
        // 1000 of the 1024 evenly spaced numbers were drawn, all of the small ones among them.
        assert_eq!(n_dropped, 256);
        let never = CaptionSettings { dropout: 0.0, ..settings.clone() };
        let least = CaptionDraws { dropout: 0, ..CaptionDraws::PLAIN };
        assert_eq!(for_step("a dog", &never, least), "sks, a dog");
        let always = CaptionSettings { dropout: 1.0, ..settings };
        assert_eq!(for_step("a dog", &always, CaptionDraws::PLAIN), "");
    }

    #[test]
    fn variants_are_exactly_the_texts_of_all_steps() {
        for settings in [
            settings("", None, 0.0),
            settings("sks", None, 0.1),
            settings("sks", Some((1, 4)), 0.1),
            settings("", Some((0, 300)), 0.0),
            settings("sks", Some((0, 3)), 1.0),
            CaptionSettings {
                choice: CaptionChoice::Wildcards,
                ..settings("sks", Some((1, 4)), 0.1)
            },
        ] {
            for caption in ["", "a dog", "a, b, c, d", "a {sks|red}, b\nc, {x|y|z}"] {
                let mut expected = variants(caption, &settings);
                let mut state = 1;
                let mut draw = || mixed(&mut state);
                let mut seen: Vec<_> = (0..20_000)
                    .map(|_| CaptionDraws { dropout: draw(), order: draw(), choice: draw() })
                    .map(|draws| for_step(caption, &settings, draws))
                    .collect();
                seen.sort();
                seen.dedup();
                expected.sort();
                assert_eq!(seen, expected, "{settings:?}");
            }
        }
    }
}
