//! What the policy learns from: the gradient of the expected loss with respect to its logits, estimated from one draw.
//! On the host and in f64: a few thousand numbers per sequence.
//!
//! The draw is Gumbel-top-k: the K largest of logits with Gumbel noise are K draws without replacement, by softmax, in
//! the order of their keys (Kool, van Hoof and Welling, "Stochastic Beams and Where to Find Them", arXiv 1903.06059,
//! section 2.3). The probability of a draw in its order is known, and REINFORCE (Williams, 1992) needs only the gradient
//! of its logarithm, which for the logit of position t is
//!
//! kept(t) - Σᵢ qᵢ(t)
//!
//! where qᵢ(t) is the probability that the i-th draw takes t, given those before it. Its mean is zero, so anything that
//! does not depend on the draw may be subtracted from the reward.

use compute::ops::IGNORE_INDEX;

/// What the least likely position weighs, beside the likeliest.
const LEAST_WEIGHT: f64 = 1e-200;

/// The gradient of the log probability of `picks`, in their order, with respect to each logit.
pub fn score(logits: &[f32], picks: &[u32]) -> Vec<f64> {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    // Above zero, so that a sum of such weights can be divided by.
    let weight = |logit: &f32| f64::from(logit - largest).exp().max(LEAST_WEIGHT);
    let weights: Vec<f64> = logits.iter().map(weight).collect();
    let mut rank = vec![picks.len(); logits.len()];
    for (index, pick) in picks.iter().enumerate() {
        rank[*pick as usize] = index;
    }
    // Sums from the end, since subtracting the weights of earlier picks would cancel.
    let rest: f64 = weights
        .iter()
        .zip(&rank)
        .filter(|(_, rank)| **rank == picks.len())
        .map(|(weight, _)| weight)
        .sum();
    let mut totals = vec![rest; picks.len()];
    for index in (0..picks.len()).rev() {
        let after = if index + 1 < picks.len() { totals[index + 1] } else { rest };
        totals[index] = after + weights[picks[index] as usize];
    }
    // Σ 1/Z up to each draw: a position takes part until it is drawn.
    let mut sums = Vec::with_capacity(picks.len());
    let mut sum = 0.0;
    for total in totals {
        sum += 1.0 / total;
        sums.push(sum);
    }
    weights
        .iter()
        .zip(&rank)
        .map(|(weight, rank)| {
            let is_kept = *rank < picks.len();
            let expected = sums
                .get((*rank).min(picks.len().saturating_sub(1)))
                .map_or(0.0, |sum| weight * sum);
            f64::from(u8::from(is_kept)) - expected
        })
        .collect()
}

/// What each position brought: the rewards from it on to the end of its document, each step discounted. A discount of 1
/// gives all positions the whole sequence's reward, which makes the estimate unbiased, and noisier.
pub fn returns(rewards: &[f64], first_keys: &[u32], discount: f64) -> Vec<f64> {
    if discount >= 1.0 {
        return vec![rewards.iter().sum(); rewards.len()];
    }
    let mut all = vec![0.0; rewards.len()];
    let mut sum = 0.0;
    for at in (0..rewards.len()).rev() {
        let is_last = at + 1 == rewards.len() || first_keys[at + 1] != first_keys[at];
        sum = rewards[at] + if is_last { 0.0 } else { discount * sum };
        all[at] = sum;
    }
    all
}

/// How much less each position's loss is with the trunk than without it; zero where no target counts.
pub fn rewards(without: &[f64], with: &[f64], targets: &[u32]) -> Vec<f64> {
    let reward = |((without, with), target): ((&f64, &f64), &u32)| {
        if *target == IGNORE_INDEX { 0.0 } else { without - with }
    };
    without.iter().zip(with).zip(targets).map(reward).collect()
}

/// Subtracts the mean of a sequence. Not that of the micro-batch: a sample's gradient may not depend on who is beside
/// it. Among a thousand positions one has no part in it that matters.
pub fn subtract_mean(returns: &mut [f64]) {
    let mean = returns.iter().sum::<f64>() / returns.len().max(1) as f64;
    for of in returns {
        *of -= mean;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 6] = [0.3, -1.2, 0.9, 0.0, 2.1, -0.4];

    #[test]
    fn logits_of_any_size_have_a_score() {
        let logits = [5e3, -5e3, 0.0, -1e30, 2.0, 1.0];
        for picks in [&[0, 1, 2][..], &[1, 3], &[0, 1, 2, 3, 4, 5]] {
            let scores = score(&logits, picks);
            assert!(scores.iter().all(|score| score.is_finite()), "{picks:?}: {scores:?}");
        }
    }

    /// All draws of `k` of six in their order, with their probabilities.
    fn draws(logits: &[f32], k: usize) -> Vec<(Vec<u32>, f64)> {
        let mut all = vec![(Vec::new(), 1.0)];
        for _ in 0..k {
            let more = all.iter().flat_map(|(picks, probability): &(Vec<u32>, f64)| {
                let weight = |at: u32| f64::from(logits[at as usize]).exp();
                let left: Vec<u32> = (0..6).filter(|at| !picks.contains(at)).collect();
                let total: f64 = left.iter().map(|at| weight(*at)).sum();
                left.into_iter()
                    .map(|at| ([&picks[..], &[at]].concat(), probability * weight(at) / total))
                    .collect::<Vec<_>>()
            });
            all = more.collect();
        }
        all
    }

    /// The loss of each position under a mask: any function of the mask will do.
    fn losses(picks: &[u32]) -> Vec<f64> {
        let has = |at: u32| f64::from(u8::from(picks.contains(&at)));
        (0..6).map(|at| 1.0 - 0.7 * has(at) + 0.4 * has((at + 2) % 6) * has(at / 2)).collect()
    }

    fn expected_loss(logits: &[f32], k: usize) -> f64 {
        let loss = |picks: &[u32]| losses(picks).iter().sum::<f64>();
        draws(logits, k).iter().map(|(picks, probability)| probability * loss(picks)).sum()
    }

    /// Over all draws, the estimate is the gradient of the expected loss; with any baseline.
    #[test]
    fn the_expected_estimate_is_the_gradient_of_the_expected_loss() {
        for k in [1, 2, 3, 5] {
            let early = [0.9, 0.2, 1.4, 0.6, 0.1, 0.8];
            let mut estimate = [0.0; 6];
            for (picks, probability) in draws(&LOGITS, k) {
                let rewards = rewards(&early, &losses(&picks), &[0; 6]);
                let returns = returns(&rewards, &[0; 6], 1.0);
                for (sum, (of, score)) in
                    estimate.iter_mut().zip(returns.iter().zip(score(&LOGITS, &picks)))
                {
                    *sum -= probability * of * score;
                }
            }
            for at in 0..6 {
                let (mut up, mut down) = (LOGITS, LOGITS);
                (up[at], down[at]) = (up[at] + 1e-2, down[at] - 1e-2);
                let step = f64::from(up[at] - down[at]);
                let exact = (expected_loss(&up, k) - expected_loss(&down, k)) / step;
                assert!((estimate[at] - exact).abs() < 1e-4, "{k} {at}: {} {exact}", estimate[at]);
            }
        }
    }

    #[test]
    fn the_score_is_the_gradient_of_the_log_probability() {
        let probability = |logits: &[f32]| {
            let all = draws(logits, 3);
            all.into_iter().find(|(picks, _)| *picks == [4, 0, 3]).unwrap().1
        };
        let found = score(&LOGITS, &[4, 0, 3]);
        for at in 0..6 {
            let (mut up, mut down) = (LOGITS, LOGITS);
            (up[at], down[at]) = (up[at] + 1e-2, down[at] - 1e-2);
            let step = f64::from(up[at] - down[at]);
            let exact = (probability(&up).ln() - probability(&down).ln()) / step;
            assert!((found[at] - exact).abs() < 1e-4, "{at}: {} {exact}", found[at]);
        }
        assert!(found.iter().sum::<f64>().abs() < 1e-12);
        // Large logits neither overflow nor cancel.
        let far = score(&[80.0, -80.0, 60.0, 0.0], &[0, 2]);
        assert!(far.iter().all(|of| of.is_finite() && of.abs() < 1e-8), "{far:?}");
        assert_eq!(score(&[0.0, 0.0], &[]), [0.0, 0.0]);
    }

    #[test]
    fn returns_are_discounted_within_a_document() {
        let all = returns(&[1.0, 0.0, 4.0, 8.0], &[0, 0, 0, 3], 0.5);
        assert_eq!(all, [2.0, 2.0, 4.0, 8.0]);
        assert_eq!(returns(&[1.0, 2.0], &[0, 1], 1.0), [3.0, 3.0]);
        let mut all = all;
        subtract_mean(&mut all);
        assert_eq!(all, [-2.0, -2.0, 0.0, 4.0]);
        assert_eq!(rewards(&[3.0, 3.0], &[1.0, 1.0], &[7, IGNORE_INDEX]), [2.0, 0.0]);
    }
}
