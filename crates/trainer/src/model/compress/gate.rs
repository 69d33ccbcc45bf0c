//! How gradients reach the policy where no reward does: by numbers that the trunk's results are multiplied with. In the
//! forward pass those are one (straight-through), or smooth the results of neighbours.
//!
//! A number f(logit) enters the tape as f(anchor) + f'(anchor) · (logit - anchor), with values of the host: the same value
//! and the same gradient, without a kernel for every f.
//!
//! Shapes: S sequences of N tokens, K kept positions, D narrow width.

use compute::ops::{Attention, Linear};
use compute::{Dtype, Tape, Tensor, Var};

use super::draw::{Anchored, Drawn};
use super::selection::Selection;
use crate::error::Result;

/// x [S, K, D] as it is, with the gradient of x times K times the soft choice of each position.
pub(super) fn straight_through(
    tape: &Tape<'_>,
    x: &Var,
    soft: &Anchored,
    positions: &Tensor,
) -> Result<Var> {
    let [s, k, _] = x.shape().sizes().try_into().expect("states have three dimensions");
    let n = soft.var.shape().width();
    let difference = soft.difference(tape)?.reshape([s, n, 1]);
    let difference = tape.gather_tokens(&difference, positions)?;
    let share = tape.scale(&difference, k as f32)?;
    scaled_rows(tape, x, &plus_one(tape, &share.reshape([s, k]))?)
}

/// x [S, N, D] as it is, with the gradient of x times the confidence of each choice: p where a position is kept, 1 - p
/// elsewhere, of p = sigmoid(logit) (H-Net, section 2.2.2).
pub(super) fn confidence(tape: &Tape<'_>, x: &Var, drawn: &Drawn) -> Result<Var> {
    let Some(logits) = &drawn.logits else { return Ok(x.clone()) };
    let [_, n, _] = x.shape().sizes().try_into().expect("states have three dimensions");
    let mut slopes: Vec<f32> = drawn.logit_values.iter().map(|logit| -slope(*logit)).collect();
    for (row, kept) in slopes.chunks_mut(n).zip(&drawn.kept) {
        for at in kept {
            row[*at as usize] *= -1.0;
        }
    }
    let change = times(tape, &logits.difference(tape)?, &slopes)?;
    scaled_rows(tape, x, &plus_one(tape, &change)?)
}

/// Probabilities are kept this far from 0 and 1. Taken: H-Net's smoothing, `DeChunkLayer` of its code.
const LEAST: f64 = 1e-4;

/// x [S, K, D] as exponential moving averages: P times itself and 1 - P times the average before it, within a document,
/// whose first position is taken whole. P is sigmoid(logit) of the kept position (H-Net, section 2.2.2).
///
/// That is an attention whose scores depend on the key alone: with C the sum of ln(1 - P) so far, the weight of j in the
/// average of i is exp(ln P(j) - C(j)), over the sum of the same up to i.
pub(super) fn smoothed(
    tape: &Tape<'_>,
    x: &Var,
    drawn: &Drawn,
    selection: &Selection,
    head_dim: usize,
) -> Result<Var> {
    let [s, k, d] = x.shape().sizes().try_into().expect("states have three dimensions");
    let device = tape.device();
    let EmaScores { values, own, sums } = EmaScores::new(drawn, selection, k);
    let mut scores = Var::from(device.upload([s, k], &values)?);
    if let Some(logits) = &drawn.logits {
        let n = logits.var.shape().width();
        let positions = device.upload([s, k], &selection.positions)?;
        let difference = logits.difference(tape)?.reshape([s, n, 1]);
        let difference = tape.gather_tokens(&difference, &positions)?.reshape([s, k]);
        let until = |to: usize| (0..k).map(move |from| if from <= to { 1.0f32 } else { 0.0 });
        let triangle =
            Var::from(device.upload([k, k], &(0..k).flat_map(until).collect::<Vec<_>>())?);
        let sum = tape.linear(&times(tape, &difference, &sums)?, Linear::new(&triangle))?;
        scores = tape.add(&scores, &tape.add(&sum, &times(tape, &difference, &own)?)?)?;
    }
    // One head for each of the narrow layers' heads, of whose width only the first number counts.
    let first = |at: usize| if at.is_multiple_of(head_dim) { 1.0f32 } else { 0.0 };
    let firsts = Var::from(device.upload([d, 1], &(0..d).map(first).collect::<Vec<_>>())?);
    let wide = |column: &Var| -> Result<Var> {
        let wide = tape.linear(&column.reshape([s * k, 1]), Linear::new(&firsts))?;
        Ok(wide.reshape([s, k, d]))
    };
    let ones = Var::from(device.upload([s, k], &vec![1.0f32; s * k])?);
    let first_slots = device.upload([s, k], &selection.first_slots)?;
    let how = Attention {
        scale: 1.0,
        is_causal: true,
        first_keys: Some(&first_slots),
        ..Attention::full(d / head_dim, head_dim)
    };
    // Scores are sums over the whole text, and their differences matter: bf16 has too few digits.
    let value = tape.convert(x, Dtype::F32)?;
    let averages = tape.attention(&wide(&ones)?, &wide(&scores)?, &value, how)?;
    Ok(tape.convert(&averages, x.dtype())?)
}

/// Scores of keys, and their slopes.
struct EmaScores {
    /// ln P - C
    values: Vec<f32>,
    /// The slope of ln P by its own logit.
    own: Vec<f32>,
    /// The slope of -C by the logit of each position up to it.
    sums: Vec<f32>,
}

impl EmaScores {
    fn new(drawn: &Drawn, selection: &Selection, k: usize) -> Self {
        let n_rows = selection.positions.len() / k;
        let n = drawn.logit_values.len() / n_rows;
        let mut all = Self { values: Vec::new(), own: Vec::new(), sums: Vec::new() };
        for row in 0..n_rows {
            let mut sum = 0.0;
            for slot in 0..k {
                let at = row * k + slot;
                let logit = drawn.logit_values[row * n + selection.positions[at] as usize];
                let exact = sigmoid(logit);
                let p = exact.clamp(LEAST, 1.0 - LEAST);
                let slope = |slope: f64| if p == exact { slope as f32 } else { 0.0 };
                let is_first = selection.first_slots[at] as usize == slot;
                sum += (1.0 - p).ln();
                all.values.push((if is_first { 0.0 } else { p.ln() } - sum) as f32);
                all.own.push(if is_first { 0.0 } else { slope(1.0 - p) });
                all.sums.push(slope(p));
            }
        }
        all
    }
}

pub(super) fn sigmoid(logit: f32) -> f64 {
    1.0 / (1.0 + (-f64::from(logit)).exp())
}

/// Of the sigmoid.
fn slope(logit: f32) -> f32 {
    let p = sigmoid(logit);
    (p * (1.0 - p)) as f32
}

/// x [S, N], each number times one of the host.
fn times(tape: &Tape<'_>, x: &Var, factors: &[f32]) -> Result<Var> {
    let [s, n] = x.shape().sizes().try_into().expect("a row for each sequence");
    let factors = Var::from(tape.device().upload([s, n], factors)?);
    let zeros = Var::from(tape.device().zeros([s, 1, n], Dtype::F32)?);
    Ok(tape.gated_add(&zeros, factors.chunk(0), &x.reshape([s, 1, n]))?.reshape([s, n]))
}

fn plus_one(tape: &Tape<'_>, x: &Var) -> Result<Var> {
    let ones = tape.device().upload(x.shape(), &vec![1.0f32; x.shape().elements()])?;
    Ok(tape.add(x, &Var::from(ones))?)
}

/// x [S, N, D], each row times a number of [S, N].
fn scaled_rows(tape: &Tape<'_>, x: &Var, factors: &Var) -> Result<Var> {
    let [s, n, d] = x.shape().sizes().try_into().expect("states have three dimensions");
    // One number for a row becomes as many as it is wide.
    let wide = Var::from(tape.device().upload([d, 1], &vec![1.0f32; d])?);
    let factors = tape.linear(&factors.reshape([s * n, 1]), Linear::new(&wide))?;
    let factors = tape.convert(&factors, x.dtype())?;
    let zeros = Var::from(tape.device().zeros([s * n, 1, d], x.dtype())?);
    let rows = tape.gated_add(&zeros, factors.chunk(0), &x.reshape([s * n, 1, d]))?;
    Ok(rows.reshape([s, n, d]))
}

#[cfg(test)]
mod tests {
    use compute::{Device, Gradients, Params, RandomSequence};

    use super::*;

    /// Sequences, tokens, kept ones and width.
    const SIZES: [usize; 4] = [2, 12, 4, 8];

    fn normals(n: usize, seed: u64) -> Vec<f32> {
        let random = RandomSequence::new(seed, 0);
        (0..n).map(|at| random.normal(at)).collect()
    }

    fn selection() -> (Vec<Vec<u32>>, Selection) {
        // The second sequence has two documents, the second of which begins at 6.
        let first_keys: Vec<u32> = (0..24).map(|at| if at >= 18 { 6 } else { 0 }).collect();
        let kept = vec![vec![1, 4, 5, 9], vec![0, 3, 8, 11]];
        let selection = Selection::new(&kept, &first_keys, 4);
        (kept, selection)
    }

    /// The sum of all results, each times a weight, in f64 as H-Net's paper has it: averages of kept positions, then each
    /// position's times its confidence, which is one where the logits are `anchor`.
    fn reference(x: &[f64], logits: &[f64], anchor: &[f64], weights: &[f32]) -> f64 {
        let [s, n, k, d] = SIZES;
        let (kept, selection) = selection();
        let sigmoid = |logit: f64| 1.0 / (1.0 + (-logit).exp());
        let mut sum = 0.0;
        for row in 0..s {
            let mut averages = vec![vec![0.0; d]; k];
            for slot in 0..k {
                let at = row * k + slot;
                let p = sigmoid(logits[row * n + selection.positions[at] as usize]);
                let is_first = selection.first_slots[at] as usize == slot;
                for i in 0..d {
                    let own = x[at * d + i];
                    averages[slot][i] =
                        if is_first { own } else { p * own + (1.0 - p) * averages[slot - 1][i] };
                }
            }
            for position in 0..n {
                let at = row * n + position;
                let Some(slot) = (selection.slots[at] as usize).checked_sub(1) else { continue };
                let is_kept = kept[row].contains(&(position as u32));
                let confidence = |logit: f64| {
                    let p = sigmoid(logit);
                    if is_kept { p } else { 1.0 - p }
                };
                let factor = 1.0 + confidence(logits[at]) - confidence(anchor[at]);
                for i in 0..d {
                    sum += factor * averages[slot][i] * f64::from(weights[at * d + i]);
                }
            }
        }
        sum
    }

    #[test]
    fn smoothing_and_confidence_are_those_of_a_plain_reference() {
        let [s, n, k, d] = SIZES;
        let device = Device::cpu(1, 16 << 20).unwrap();
        let (x, logits) = (normals(s * k * d, 1), normals(s * n, 2));
        let weights = normals(s * n * d, 3);
        let mut params = Params::default();
        let x_key = params.add(device.upload([s, k, d], &x).unwrap());
        let logits_key = params.add(device.upload([s, n], &logits).unwrap());
        let tape = Tape::training(&device, &params, 0);
        let (kept, selection) = selection();
        let drawn = Drawn {
            kept,
            logits: Some(Anchored::new(tape.param(logits_key))),
            logit_values: logits.clone(),
            soft: None,
        };
        let y = smoothed(&tape, &tape.param(x_key), &drawn, &selection, 4).unwrap();
        let shifted: Vec<u32> = (0..s).flat_map(|_| 1..=k as u32).collect();
        let y = tape.scatter_tokens(&y, &device.upload([s, k], &shifted).unwrap(), k + 1).unwrap();
        let slots = device.upload([s, n], &selection.slots).unwrap();
        let y = confidence(&tape, &tape.gather_tokens(&y, &slots).unwrap(), &drawn).unwrap();
        let weight = Var::from(device.upload([1, s * n * d], &weights).unwrap());
        let y = y.reshape([1, s * n * d]);
        let loss = tape.linear(&y, Linear::new(&weight)).unwrap().reshape([]);
        let value = f64::from(loss.tensor().read::<f32>().unwrap()[0]);
        let mut gradients = Gradients::default();
        tape.backward(&loss, &mut gradients).unwrap();

        let exact = |values: &[f32]| values.iter().map(|of| f64::from(*of)).collect::<Vec<_>>();
        let (x, logits) = (exact(&x), exact(&logits));
        let at = |x: &[f64], moved: &[f64]| reference(x, moved, &logits, &weights);
        assert!((value - at(&x, &logits)).abs() < 1e-4, "{value} {}", at(&x, &logits));
        for (key, of_logits) in [(x_key, false), (logits_key, true)] {
            let got = gradients.read(key).unwrap().unwrap();
            for (index, got) in got.iter().enumerate() {
                let moved = |by: f64| {
                    let (mut x, mut logits) = (x.clone(), logits.clone());
                    if of_logits {
                        logits[index] += by;
                    } else {
                        x[index] += by;
                    }
                    at(&x, &logits)
                };
                let slope = (moved(1e-5) - moved(-1e-5)) / 2e-5;
                assert!(
                    (f64::from(*got) - slope).abs() < 1e-4,
                    "{of_logits} {index}: {got} {slope}"
                );
            }
        }
    }
}
