//! What a policy does while it is trained, in a few numbers per step: whether it still explores, whether it looks at the
//! text, and what its choices bring. A loss alone shows none of these until it is too late.

use super::selection::is_word_end;

/// What a policy did in a step; the event of the same figures explains them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PolicyFigures {
    /// Entropy of its choices, as a share of the largest.
    pub entropy: f64,
    /// The share of kept positions that were kept in the sequence before.
    pub same_places: f64,
    /// The share of kept positions that are the first after a word.
    pub word_ends: f64,
    /// How much less the loss is with the trunk, in nats per token.
    pub reward: f64,
    /// Standard deviation of the advantages.
    pub advantage_spread: Option<f64>,
}

/// Sums over the micro-batches of a step.
#[derive(Clone, Debug, Default)]
pub struct PolicySums {
    n_micro_batches: usize,
    entropy: f64,
    reward: f64,
    advantages: AdvantageMoments,
    n_kept: usize,
    n_word_ends: usize,
    /// Kept at the same place as in the mask before, of how many that could be.
    n_same: usize,
    n_compared: usize,
    /// The mask before, ascending.
    before: Vec<u32>,
}

/// Count, sum and sum of squares.
#[derive(Clone, Copy, Debug, Default)]
struct AdvantageMoments {
    n: usize,
    sum: f64,
    squares: f64,
}

impl AdvantageMoments {
    fn deviation(self) -> Option<f64> {
        let n = self.n as f64;
        (self.n > 0).then(|| (self.squares / n - (self.sum / n).powi(2)).max(0.0).sqrt())
    }
}

/// A micro-batch as a policy saw and treated it.
#[derive(Clone, Copy)]
pub struct PolicyBatch<'a> {
    /// Tokens of a sequence.
    pub n: usize,
    /// Tokens, of each sequence once.
    pub ids: &'a [u32],
    /// Logits, of each sequence once.
    pub logits: &'a [f32],
    /// Kept positions of each mask; the masks of a sequence lie beside each other.
    pub kept: &'a [Vec<u32>],
    /// How much less the loss is with the trunk, in nats per token.
    pub reward: f64,
    /// Of each mask and position; none for estimators without.
    pub advantages: &'a [Vec<f64>],
}

impl PolicySums {
    /// Takes in a micro-batch.
    pub fn add(&mut self, batch: PolicyBatch<'_>) {
        let PolicyBatch { n, ids, logits, kept, reward, advantages } = batch;
        self.n_micro_batches += 1;
        self.reward += reward;
        // Of one sequence: it takes a while, and they are alike.
        self.entropy += relative_entropy(&logits[..n], kept[0].len());
        for advantage in advantages.iter().flatten() {
            self.advantages.n += 1;
            self.advantages.sum += advantage;
            self.advantages.squares += advantage * advantage;
        }
        let n_masks = (kept.len() * n / ids.len()).max(1);
        for (mask, kept) in kept.iter().enumerate() {
            let ids = &ids[mask / n_masks * n..][..n];
            self.n_kept += kept.len();
            self.n_word_ends += kept.iter().filter(|at| is_word_end(ids, **at as usize)).count();
            // Two masks of one sequence are opposite by design: only the first is compared.
            if mask % n_masks == 0 {
                self.compare(kept);
            }
        }
    }

    fn compare(&mut self, kept: &[u32]) {
        let mut kept = kept.to_vec();
        kept.sort_unstable();
        if !self.before.is_empty() {
            let is_same = |at: &&u32| self.before.binary_search(at).is_ok();
            self.n_same += kept.iter().filter(is_same).count();
            self.n_compared += kept.len();
        }
        self.before = kept;
    }

    /// The figures of a step; begins a new one.
    pub fn take(&mut self) -> Option<PolicyFigures> {
        // The next step's first mask is compared with this step's last.
        let next = Self { before: self.before.clone(), ..Self::default() };
        let sums = std::mem::replace(self, next);
        let share = |n: usize, of: usize| n as f64 / of.max(1) as f64;
        let n = sums.n_micro_batches;
        (n > 0).then(|| PolicyFigures {
            entropy: sums.entropy / n as f64,
            same_places: share(sums.n_same, sums.n_compared),
            word_ends: share(sums.n_word_ends, sums.n_kept),
            reward: sums.reward / n as f64,
            advantage_spread: sums.advantages.deviation(),
        })
    }
}

/// Halvings of the interval that holds a threshold. Chosen: logits of trained policies lie within ±50.
const HALVINGS: usize = 24;

/// The entropy of keeping a position or not, summed over a sequence, as a share of that of a policy without preference.
///
/// Gumbel-top-k keeps a position if its logit with Gumbel noise is above a threshold. For that of which `k` are expected
/// to be above, the probability is 1 - exp(-exp(logit - threshold)).
fn relative_entropy(logits: &[f32], k: usize) -> f64 {
    let (n, wanted) = (logits.len() as f64, k as f64);
    if k == 0 || k >= logits.len() {
        return 0.0;
    }
    let probability =
        |logit: &f32, threshold: f64| -(-(f64::from(*logit) - threshold).exp()).exp_m1();
    let bounds = logits.iter().fold([f64::INFINITY, f64::NEG_INFINITY], |[low, high], logit| {
        [low.min(f64::from(*logit)), high.max(f64::from(*logit))]
    });
    // Below the lowest by this much, all would be kept; above the highest by that much, none.
    let [mut low, mut high] = [bounds[0] - 4.0, bounds[1] + (n / wanted).ln() + 1.0];
    for _ in 0..HALVINGS {
        let middle = f64::midpoint(low, high);
        let expected: f64 = logits.iter().map(|logit| probability(logit, middle)).sum();
        if expected > wanted { low = middle } else { high = middle }
    }
    let entropy: f64 = logits.iter().map(|logit| binary_entropy(probability(logit, low))).sum();
    entropy / (n * binary_entropy(wanted / n))
}

/// In nats.
fn binary_entropy(p: f64) -> f64 {
    let of = |p: f64| if p > 0.0 { -p * p.ln() } else { 0.0 };
    of(p) + of(1.0 - p)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entropy_is_one_without_preference_and_zero_when_certain() {
        assert!((relative_entropy(&[0.7; 40], 10) - 1.0).abs() < 1e-3);
        let sharp = |scale: f32| -> Vec<f32> {
            (0..40).map(|at| if at % 4 == 0 { scale } else { -scale }).collect()
        };
        assert!(relative_entropy(&sharp(12.0), 10) < 1e-3);
        let [soft, firm] = [0.5, 1.5].map(|scale| relative_entropy(&sharp(scale), 10));
        assert!(1.0 > soft && soft > firm && firm > 0.1, "{soft} {firm}");
        // One position is certain, the others are as open as before.
        let mut one = [0.0; 40];
        one[3] = 60.0;
        let rest = relative_entropy(&one, 10);
        assert!(rest > 0.9 && rest < 1.0, "{rest}");
        assert_eq!(relative_entropy(&[1.0, 2.0], 2), 0.0);
    }

    fn batch<'a>(ids: &'a [u32], logits: &'a [f32], kept: &'a [Vec<u32>]) -> PolicyBatch<'a> {
        PolicyBatch { n: 8, ids, logits, kept, reward: 0.5, advantages: &[] }
    }

    #[test]
    fn the_same_places_are_found_over_micro_batches_and_steps() {
        let ids: Vec<u32> = b"ab cd ef".iter().map(|byte| u32::from(*byte)).collect();
        let mut sums = PolicySums::default();
        assert_eq!(sums.take(), None);
        sums.add(batch(&ids, &[0.0; 8], &[vec![5, 2]]));
        sums.add(batch(&ids, &[0.0; 8], &[vec![5, 7]]));
        let metrics = sums.take().unwrap();
        assert_eq!((metrics.same_places, metrics.word_ends), (0.5, 0.75));
        assert_eq!((metrics.reward, metrics.advantage_spread), (0.5, None));
        sums.add(batch(&ids, &[0.0; 8], &[vec![7, 5]]));
        assert_eq!(sums.take().unwrap().same_places, 1.0);
        // Two masks of each of two sequences.
        let kept = [vec![0], vec![1], vec![0], vec![2]];
        let advantages = [vec![1.0; 8], vec![-1.0; 8], vec![1.0; 8], vec![-1.0; 8]];
        let mut sums = PolicySums::default();
        let two = [ids.clone(), ids].concat();
        sums.add(PolicyBatch { advantages: &advantages, ..batch(&two, &[0.0; 16], &kept) });
        let metrics = sums.take().unwrap();
        assert_eq!((metrics.same_places, metrics.advantage_spread), (1.0, Some(1.0)));
    }
}
