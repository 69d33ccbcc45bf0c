//! Which positions of a sequence the trunk sees, on the host: a few thousand integers per sequence, which every device
//! then uses alike.
//!
//! In training the policy keeps exactly K positions, the largest of all keys of a sequence. That looks ahead: whether a
//! position is kept depends on keys after it. Where a text is measured or written nothing may look ahead, so
//! [`CausalRule`] decides position by position and holds the rate by a moving threshold.

use std::collections::HashMap;

use compute::RandomSequence;
use serde::{Deserialize, Serialize};

/// Kept positions of some sequences of one length, ready for the device.
///
/// Documents are packed into sequences and do not see each other, so a position before its document's first kept one
/// gets nothing from the trunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selection {
    /// Kept positions of each sequence, ascending: [S, K]. Where fewer were kept, the rest repeats the last position;
    /// nobody reads what the trunk makes of it.
    pub positions: Vec<u32>,
    /// For each position the slot of the last kept one at or before it, counted from 1; 0 for none: [S, N].
    pub slots: Vec<u32>,
    /// The first slot that each slot attends to: [S, K].
    pub first_slots: Vec<u32>,
    /// Positions that were really kept.
    pub n_kept: usize,
}

impl Selection {
    /// Of the kept positions of each sequence, in any order and at most `k`; `first_keys` say where each position's
    /// document begins.
    pub fn new(kept: &[Vec<u32>], first_keys: &[u32], k: usize) -> Self {
        let n = first_keys.len() / kept.len().max(1);
        let mut all = Self {
            positions: Vec::with_capacity(kept.len() * k),
            slots: Vec::with_capacity(first_keys.len()),
            first_slots: Vec::with_capacity(kept.len() * k),
            n_kept: kept.iter().map(Vec::len).sum(),
        };
        for (kept, first_keys) in kept.iter().zip(first_keys.chunks(n.max(1))) {
            let mut positions = kept.clone();
            positions.sort_unstable();
            all.push_slots(&positions, first_keys);
            positions.resize(k, n as u32 - 1);
            all.push_first_slots(&positions, first_keys);
            all.positions.extend(positions);
        }
        all
    }

    fn push_slots(&mut self, positions: &[u32], first_keys: &[u32]) {
        let mut n_before = 0;
        for (position, first) in (0u32..).zip(first_keys) {
            n_before += usize::from(positions.get(n_before) == Some(&position));
            let is_own = n_before > 0 && positions[n_before - 1] >= *first;
            self.slots.push(if is_own { n_before as u32 } else { 0 });
        }
    }

    fn push_first_slots(&mut self, positions: &[u32], first_keys: &[u32]) {
        let first = |position: &u32| {
            let begins = first_keys[*position as usize];
            positions.partition_point(|other| *other < begins) as u32
        };
        self.first_slots.extend(positions.iter().map(first));
    }
}

/// Positions over which a rate that is off is brought back. Chosen: a few words; shorter would be a stride, longer would
/// leave slots unused at the end of a sequence.
const RATE_HORIZON: f64 = 32.0;

/// Decides position by position whether to keep it: if its key is among the largest share of those so far. The share is
/// one in N, corrected by how far the number of kept positions is off.
pub struct CausalRule {
    keep_one_in: f64,
    /// Keys so far, ascending.
    seen: Vec<f32>,
    n_kept: usize,
}

impl CausalRule {
    /// Keeps one position in so many.
    pub fn new(keep_one_in: usize) -> Self {
        Self { keep_one_in: keep_one_in as f64, seen: Vec::new(), n_kept: 0 }
    }

    /// Whether the next position is kept, by its key.
    pub fn keeps(&mut self, key: f32) -> bool {
        let n_above = self.seen.len() - self.seen.partition_point(|other| *other <= key);
        let at = self.seen.partition_point(|other| *other < key);
        self.seen.insert(at, key);
        let due = self.seen.len() as f64 / self.keep_one_in;
        let share = 1.0 / self.keep_one_in + (due - self.n_kept as f64) / RATE_HORIZON;
        let is_kept = (n_above as f64 + 0.5) / (self.seen.len() as f64) < share;
        self.n_kept += usize::from(is_kept);
        is_kept
    }

    /// The most that are kept of so many positions: above the rate by a share of the horizon, no key is large enough.
    pub fn max_kept(keep_one_in: usize, n: usize) -> usize {
        ((n as f64 + RATE_HORIZON) / keep_one_in as f64) as usize + 1
    }

    /// Kept positions of a sequence with these keys, at most `k`.
    pub fn select(keys: &[f32], keep_one_in: usize, k: usize) -> Vec<u32> {
        let mut rule = Self::new(keep_one_in);
        (0..).zip(keys).filter(|(_, key)| rule.keeps(**key)).map(|(at, _)| at).take(k).collect()
    }
}

/// How positions are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Selector {
    /// By a policy that is trained.
    Policy,
    /// All of them: no compression.
    All,
    /// Every N-th.
    Stride,
    /// At random.
    Random,
    /// Where a word ends.
    Spaces,
    /// Where the token is rare in its sequence.
    Rarest,
}

impl Selector {
    /// Kept positions of a sequence, ascending and at most `k`, where no policy chooses. None looks ahead.
    pub fn select(self, ids: &[u32], keep_one_in: usize, k: usize) -> Vec<u32> {
        match self {
            Self::All | Self::Policy => (0..ids.len() as u32).take(k).collect(),
            Self::Stride => {
                let all = (keep_one_in as u32 - 1..ids.len() as u32).step_by(keep_one_in);
                all.take(k).collect()
            }
            Self::Random => CausalRule::select(&random_keys(ids), keep_one_in, k),
            Self::Spaces => CausalRule::select(&word_ends(ids), keep_one_in, k),
            Self::Rarest => CausalRule::select(&rarities(ids), keep_one_in, k),
        }
    }
}

/// Random numbers between 0 and 1, each a function of the tokens up to it: they do not look ahead, and are the same
/// whoever is beside the sequence.
fn random_keys(ids: &[u32]) -> Vec<f32> {
    let mut hash = FNV_OFFSET;
    let key = |id: &u32| {
        hash = (hash ^ u64::from(*id)).wrapping_mul(FNV_PRIME);
        RandomSequence::new(hash, 0).uniform(0)
    };
    ids.iter().map(key).collect()
}

/// Taken: FNV-1a with 64 bits.
const FNV_OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
const FNV_PRIME: u64 = 0x0100_0000_01b3;

/// One where a byte ends a word, and a random number below one elsewhere, so that the rest of the rate is spread.
fn word_ends(ids: &[u32]) -> Vec<f32> {
    let random = random_keys(ids);
    let key = |at: usize| if is_word_end(ids, at) { 1.0 } else { 0.5 * random[at] };
    (0..ids.len()).map(key).collect()
}

/// Whether the byte at a position is the first after a word: neither a letter nor a digit nor a part of a longer
/// character, after one that is. As `SpaceByte` cuts (Slagle, arXiv 2404.14408, section 2.1).
pub fn is_word_end(ids: &[u32], at: usize) -> bool {
    let is_inside =
        |id: u32| u8::try_from(id).is_ok_and(|byte| byte.is_ascii_alphanumeric() || byte >= 0x80);
    at > 0 && !is_inside(ids[at]) && is_inside(ids[at - 1])
}

/// Minus the share of a token among those of its sequence so far.
fn rarities(ids: &[u32]) -> Vec<f32> {
    let mut counts = HashMap::new();
    let rarity = |(at, id): (usize, &u32)| {
        let count: &mut u32 = counts.entry(*id).or_default();
        *count += 1;
        -(*count as f32) / (at + 1) as f32
    };
    ids.iter().enumerate().map(rarity).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_of_the_same_document_and_never_ahead() {
        // Two documents, of five and of four positions; the second begins before its first kept one.
        let first_keys = [0, 0, 0, 0, 0, 5, 5, 5, 5];
        let selection = Selection::new(&[vec![7, 1, 3]], &first_keys, 4);
        assert_eq!(selection.positions, [1, 3, 7, 8]);
        assert_eq!(selection.slots, [0, 1, 1, 2, 2, 0, 0, 3, 3]);
        assert_eq!(selection.first_slots, [0, 0, 2, 2]);
        assert_eq!(selection.n_kept, 3);
        for (position, slot) in selection.slots.iter().enumerate().filter(|(_, slot)| **slot > 0) {
            assert!(selection.positions[*slot as usize - 1] <= position as u32);
        }
    }

    #[test]
    fn the_causal_rule_keeps_the_rate_and_prefers_large_keys() {
        let random = RandomSequence::new(1, 2);
        // Every fifth key is large; one position in four is to be kept.
        let key = |at: usize| if at.is_multiple_of(5) { 9.0 } else { random.normal(at) };
        let keys: Vec<f32> = (0..1000).map(key).collect();
        let kept = CausalRule::select(&keys, 4, 1000);
        for n in [1, 2, 3, 10, 50, 400] {
            let most = CausalRule::max_kept(4, n);
            for keys in [&keys[..n], &vec![1.0; n], &(0..n).map(|at| at as f32).collect::<Vec<_>>()]
            {
                assert!(CausalRule::select(keys, 4, n).len() <= most.min(n), "{n}");
            }
        }
        assert!(kept.len().abs_diff(250) <= 8, "{}", kept.len());
        let n_large = kept.iter().filter(|at| at.is_multiple_of(5)).count();
        assert!(n_large >= 195, "{n_large} of 200");
        // What comes later changes nothing before it.
        let mut other = keys.clone();
        other[600..].fill(100.0);
        let before = |kept: &[u32]| kept.iter().copied().filter(|at| *at < 600).collect::<Vec<_>>();
        assert_eq!(before(&CausalRule::select(&other, 4, 1000)), before(&kept));
    }

    #[test]
    fn every_rule_keeps_its_share() {
        let text = "the first words of a text, and then some more words after them ".repeat(8);
        let ids: Vec<u32> = text.bytes().map(u32::from).collect();
        let k = ids.len() / 4;
        for selector in [Selector::Stride, Selector::Random, Selector::Spaces, Selector::Rarest] {
            let kept = selector.select(&ids, 4, k);
            assert!(kept.len() <= k && kept.len() + 8 >= k, "{selector:?}: {} of {k}", kept.len());
            assert!(kept.iter().all(|at| (*at as usize) < ids.len()), "{selector:?}");
        }
        let spaces = Selector::Spaces.select(&ids, 4, k);
        let n_ends = (0..ids.len()).filter(|at| is_word_end(&ids, *at)).count();
        let n_found = spaces.iter().filter(|at| is_word_end(&ids, **at as usize)).count();
        assert!(n_found * 100 >= n_ends * 95, "{n_found} of {n_ends}");
        for selector in [Selector::Random, Selector::Spaces, Selector::Rarest] {
            let mut other = ids.clone();
            other[300..].fill(b'x'.into());
            let before = |ids: &[u32]| {
                let kept = selector.select(ids, 4, k);
                kept.into_iter().filter(|at| *at < 300).collect::<Vec<_>>()
            };
            assert_eq!(before(&ids), before(&other), "{selector:?} looks ahead");
        }
        assert_eq!(Selector::All.select(&ids, 4, ids.len()).len(), ids.len());
        assert_eq!(Selector::Stride.select(&ids, 4, 3), [3, 7, 11]);
    }
}
