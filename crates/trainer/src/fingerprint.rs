//! Fingerprints of a model or a dataset: one checksum of all of it, and one of each part by name, so that a run
//! that cannot be resumed can name the part that changed.

use std::collections::BTreeMap;

use weights::checksum::Hash;

/// Checksums of what a whole consists of: a model's tensors, images and captions, files of texts.
pub type PartHashes = BTreeMap<String, String>;

/// Of a model, or of a set of samples.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fingerprint {
    /// Of all.
    pub whole: String,
    /// Of each part.
    pub parts: PartHashes,
}

impl Fingerprint {
    /// Of this and another, whose parts are called so.
    #[must_use]
    pub fn with(mut self, name: &str, other: &Self) -> Self {
        self.whole = blake3::hash(format!("{} {}", self.whole, other.whole).as_bytes()).to_string();
        let named = other.parts.iter().map(|(part, hash)| (format!("{name} {part}"), hash.clone()));
        self.parts.extend(named);
        self
    }
}

/// As much of a checksum as tells two versions of a part from each other.
pub fn short(hash: &Hash) -> String {
    hash.to_hex()[..16].into()
}

/// Prefix of captions among the parts, before the name of their image. An image that was added or removed is
/// named once, without its caption.
pub const CAPTION: &str = "caption of ";

/// Names shown of each kind; the rest is counted.
const SHOWN: usize = 8;

/// What was changed, added and removed, by name; none if every part is the same.
pub fn difference(before: &PartHashes, now: &PartHashes) -> Option<String> {
    let missing_in =
        |other: &PartHashes, part: &str| !other.contains_key(part) && !part.starts_with(CAPTION);
    let keys = |parts: &PartHashes| parts.keys().cloned().collect::<Vec<_>>();
    let kept = |all: Vec<String>, is_kept: &dyn Fn(&String) -> bool| {
        all.into_iter().filter(|part| is_kept(part)).collect::<Vec<_>>()
    };
    let changed = kept(keys(now), &|part| before.get(part).is_some_and(|was| *was != now[part]));
    let added = kept(keys(now), &|part| missing_in(before, part));
    let removed = kept(keys(before), &|part| missing_in(now, part));
    let named = [("changed", changed), ("added", added), ("removed", removed)]
        .into_iter()
        .filter(|(_, parts)| !parts.is_empty())
        .map(|(what, parts)| format!("{} {what} ({})", parts.len(), some(&parts)))
        .collect::<Vec<_>>();
    (!named.is_empty()).then(|| named.join(", "))
}

fn some(names: &[String]) -> String {
    let shown = names.iter().take(SHOWN).map(String::as_str).collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(all: &[(&str, &str)]) -> PartHashes {
        all.iter().map(|(name, sum)| ((*name).into(), (*sum).into())).collect()
    }

    #[test]
    fn every_part_that_differs_is_named_once() {
        let before = parts(&[("a.png", "1"), ("b.png", "2"), ("caption of a.png", "3")]);
        assert_eq!(difference(&before, &before), None);
        let now = parts(&[("a.png", "1"), ("c.png", "2"), ("caption of a.png", "4")]);
        let mut with_caption = now.clone();
        with_caption.insert("caption of c.png".into(), "5".into());
        let text = "1 changed (caption of a.png), 1 added (c.png), 1 removed (b.png)";
        assert_eq!(difference(&before, &with_caption).as_deref(), Some(text));
        let many: PartHashes = (0..20).map(|n| (format!("{n:02}.png"), String::new())).collect();
        let text = difference(&PartHashes::new(), &many).unwrap();
        assert!(text.starts_with("20 added (00.png, 01.png") && text.ends_with("and 12 more)"));
    }
}
