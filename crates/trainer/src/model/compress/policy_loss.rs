//! The one scalar that trains model and policy: the final loss, with the gradient of all parts.

use compute::ops::{IGNORE_INDEX, Linear};
use compute::{Tape, Var};

use super::draw::Drawn;
use super::forward::{CompressorInputs, ExitLoss, LossRows};
use super::gate::sigmoid;
use super::policy_gradient::{returns, rewards, score, subtract_mean};
use super::{CompressorTraining, Estimator};
use crate::error::Result;
use crate::model::host::to_vec;

/// The loss, and what the policy learns from.
pub(super) struct Combined {
    /// Its value is that of the final loss, its gradient that of all parts.
    pub loss: Var,
    /// How much less the final loss is than that of the narrow layers alone.
    pub reward: f64,
    /// Of each mask and position; none for estimators without.
    pub advantages: Vec<Vec<f64>>,
}

/// One scalar of all parts.
pub(super) fn combine(
    tape: &Tape<'_>,
    last: ExitLoss,
    early: &ExitLoss,
    drawn: &Drawn,
    inputs: CompressorInputs<'_>,
    training: &CompressorTraining,
) -> Result<Combined> {
    let mut parts = vec![tape.scale(&early.mean, training.early_weight as f32)?];
    let mut advantages = Vec::new();
    if let Some(logits) = &drawn.logits {
        let weights = if training.estimator == Estimator::Ratio {
            ratio_weights(drawn, inputs.sizes[1])
        } else {
            advantages = self::advantages(&last, early, drawn, inputs, training)?;
            policy_weights(drawn, &advantages, inputs.targets, training)
        };
        parts.push(weighted_sum(tape, &logits.var, &weights)?);
    }
    let reward = value(&early.mean)? - value(&last.mean)?;
    let mut loss = last.mean;
    for part in parts {
        let value = tape.scale(&Var::from(part.tensor().clone()), -1.0)?;
        loss = tape.add(&loss, &tape.add(&part, &value)?)?;
    }
    Ok(Combined { loss, reward, advantages })
}

/// A sum of logits, each times a number that no gradient leads through.
pub(super) fn weighted_sum(tape: &Tape<'_>, logits: &Var, weights: &[f32]) -> Result<Var> {
    let n = weights.len();
    let weight = Var::from(tape.device().upload([1, n], weights)?);
    Ok(tape.linear(&logits.reshape([1, n]), Linear::new(&weight))?.reshape([]))
}

fn value(scalar: &Var) -> Result<f64> {
    Ok(to_vec(scalar.tensor())?.first().copied().unwrap_or(0.0).into())
}

pub(super) fn advantages(
    last: &ExitLoss,
    early: &ExitLoss,
    drawn: &Drawn,
    inputs: CompressorInputs<'_>,
    training: &CompressorTraining,
) -> Result<Vec<Vec<f64>>> {
    let (losses, n) = (last.rows.read()?, inputs.sizes[1]);
    let (mut without, mut targets) = (early.rows.read()?, inputs.targets.to_vec());
    if let LossRows::OnHost(_) = last.rows {
        // A code has the loss of a token at the token's position, a prediction of the next one at the position before.
        (without, targets) = (later(&without, n, 0.0), later(&targets, n, IGNORE_INDEX));
    }
    let inputs = CompressorInputs { targets: &targets, ..inputs };
    Ok(match training.estimator {
        Estimator::Grpo => {
            advantages_in_group(&losses, drawn.logit_values.len() / n, inputs, training)
        }
        _ => advantages_over_early(&losses, &without, inputs, training),
    })
}

/// Each row of `n` values one position later.
pub(super) fn later<T: Copy>(values: &[T], n: usize, first: T) -> Vec<T> {
    let row = |row: &[T]| [&[first], &row[..n - 1]].concat();
    values.chunks(n).flat_map(row).collect()
}

/// Weight of the ratio loss. Taken: H-Net's α (Hwang, Wang and Gu, arXiv 2507.07955, section 2.3).
const RATIO_WEIGHT: f64 = 0.03;

/// The gradient of H-Net's ratio loss with respect to each logit. With p = sigmoid(logit), F the share of positions with
/// p above a half and G the mean of p,
///
/// N / (N - 1) · ((N - 1) · F · G + (1 - F) · (1 - G))
///
/// is least where one position in N is above a half. F counts what a threshold would keep: of the K that are kept it
/// would be 1/N always, and the loss a constant.
pub(super) fn ratio_weights(drawn: &Drawn, n: usize) -> Vec<f32> {
    let n_rows = drawn.kept.len();
    let rows = drawn.logit_values.chunks(n).zip(&drawn.kept);
    let of = |(logits, kept): (&[f32], &Vec<u32>)| {
        let one_in = n as f64 / kept.len().max(1) as f64;
        let above = logits.iter().filter(|logit| **logit > 0.0).count() as f64 / n as f64;
        let slope = one_in / (one_in - 1.0).max(f64::MIN_POSITIVE)
            * ((one_in - 1.0) * above - (1.0 - above));
        let scale = RATIO_WEIGHT * slope / (n * n_rows) as f64;
        let weight = move |logit: &f32| {
            let p = sigmoid(*logit);
            (scale * p * (1.0 - p)) as f32
        };
        logits.iter().map(weight).collect::<Vec<_>>()
    };
    rows.flat_map(of).collect()
}

/// What each position brought by the trunk, relative to the narrow layers alone and to its sequence's mean.
fn advantages_over_early(
    losses: &[f64],
    early: &[f64],
    CompressorInputs { sizes: [_, n], targets, first_keys, .. }: CompressorInputs<'_>,
    training: &CompressorTraining,
) -> Vec<Vec<f64>> {
    let rewards = rewards(early, losses, targets);
    let of = |(rewards, first_keys): (&[f64], &[u32])| {
        let mut all = returns(rewards, first_keys, training.discount);
        // Of a reward that all positions share nothing would be left.
        if training.discount < 1.0 {
            subtract_mean(&mut all);
        }
        all
    };
    rewards.chunks(n).zip(first_keys.chunks(n)).map(of).collect()
}

/// What each position of each mask brought, relative to the mean of its sequence's masks.
fn advantages_in_group(
    losses: &[f64],
    s: usize,
    CompressorInputs { sizes: [m, n], targets, first_keys, .. }: CompressorInputs<'_>,
    training: &CompressorTraining,
) -> Vec<Vec<f64>> {
    let n_masks = m / s;
    let group_mean = |at: usize| {
        let (first, position) = (at / (n * n_masks) * n_masks, at % n);
        let of_group = (first..first + n_masks).map(|mask| losses[mask * n + position]);
        of_group.sum::<f64>() / n_masks as f64
    };
    let means: Vec<f64> = (0..m * n).map(group_mean).collect();
    let rewards = rewards(&means, losses, targets);
    let rows = rewards.chunks(n).zip(first_keys.chunks(n));
    rows.map(|(rewards, first_keys)| returns(rewards, first_keys, training.discount)).collect()
}

/// What each logit's gradient is, [S, N]. Half the square of each logit, times `exploration`, is part of the loss: else
/// logits of positions that are never kept would fall for ever, since Adam makes a small gradient as large as any, and
/// nothing would be left to try.
pub(super) fn policy_weights(
    drawn: &Drawn,
    advantages: &[Vec<f64>],
    targets: &[u32],
    training: &CompressorTraining,
) -> Vec<f32> {
    let n_counted = targets.iter().filter(|target| **target != IGNORE_INDEX).count();
    let scale = training.policy_weight / n_counted.max(1) as f64;
    let Drawn { kept, logit_values: logits, .. } = drawn;
    let n = advantages[0].len();
    let n_masks = kept.len() * n / logits.len();
    let mut weights = vec![0.0f64; logits.len()];
    for (mask, (kept, advantages)) in kept.iter().zip(advantages).enumerate() {
        let row = mask / n_masks * n..(mask / n_masks + 1) * n;
        let scores = score(&logits[row.clone()], kept);
        for (weight, (advantage, score)) in
            weights[row].iter_mut().zip(advantages.iter().zip(scores))
        {
            *weight -= scale * advantage * score;
        }
    }
    for (weight, logit) in weights.iter_mut().zip(logits) {
        *weight += scale * training.exploration * f64::from(*logit);
    }
    weights.into_iter().map(|weight| weight as f32).collect()
}
