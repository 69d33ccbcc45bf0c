//! The router of a mixture of experts (Shazeer et al., "Outrageously Large Neural Networks", arXiv 1701.06538): each token
//! goes to the k experts with the largest p = softmax(logits), and counts there with the weight p, or p divided by the sum
//! of the k. Rows, one for each token and expert, are sorted by expert, since an expert takes its rows together.
//!
//! Computed on the host on every backend: which rows an expert has must be known there, and there are few numbers. So a
//! GPU waits once for each router. Saved for backward, on the host: p, and which rows a token has.

#[cfg(test)]
mod tests;

use std::rc::Rc;

use crate::tape::Tape;
use crate::var::Var;
use crate::{Device, Dtype, Result, Tensor};

/// Which experts tokens go to.
pub struct Routing {
    /// The token of each row, u32 [1, rows].
    pub tokens: Tensor,
    /// The weight of each row, f32 [rows, 1].
    pub weights: Var,
    /// The rows of each expert.
    pub groups: RowGroups,
}

/// Rows in groups, one after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowGroups {
    /// Where each group ends.
    ends: Rc<[usize]>,
}

impl RowGroups {
    /// Groups of these sizes.
    pub fn new(sizes: impl IntoIterator<Item = usize>) -> Self {
        let ends = sizes.into_iter().scan(0, |end, size| {
            *end += size;
            Some(*end)
        });
        Self { ends: ends.collect() }
    }

    /// As even as can be, where no data says otherwise.
    fn even(rows: usize, n: usize) -> Self {
        Self::new((0..n).map(|group| (group + 1) * rows / n - group * rows / n))
    }

    /// How many groups there are.
    pub fn n_groups(&self) -> usize {
        self.ends.len()
    }

    /// How many rows there are.
    pub fn n_rows(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// The rows of each group.
    pub fn ranges(&self) -> impl Iterator<Item = std::ops::Range<usize>> + '_ {
        let starts = [0].into_iter().chain(self.ends.iter().copied());
        starts.zip(self.ends.iter()).map(|(start, end)| start..*end)
    }
}

impl Tape<'_> {
    /// Routes tokens by their logits [.., experts] to `k` experts each; see the module's comment.
    pub fn route(&self, logits: &Var, k: usize, is_normalised: bool) -> Result<Routing> {
        let op = self.begin_op("route");
        op.expect_real("logits", logits.tensor())?;
        let (tokens, experts) = (logits.shape().rows(), logits.shape().width());
        op.expect_range("k", &k, (1..=experts).contains(&k), &format!("1 to {experts}"))?;
        let rows = tokens * k;
        op.count(10 * tokens * experts, &[logits.tensor()]);
        let chosen = if op.has_data() {
            ChosenExperts::of(&logits.tensor().read_f32()?, experts, k, is_normalised)
        } else {
            ChosenExperts::unknown(tokens, experts, k)
        };
        let ids = upload(op.device, op.is_run, [1, rows], &chosen.tokens(k))?;
        let mut weights = op.alloc([rows, 1], Dtype::F32)?;
        if op.has_data() {
            weights.write(&chosen.weights);
        }
        let groups = chosen.groups.clone();
        let result = op.result(weights);
        if !self.requires_grad(&[logits]) {
            return Ok(Routing { tokens: ids, weights: result, groups });
        }
        let (source, shape, dtype) = (logits.grad_target(), logits.shape(), logits.dtype());
        let weights = self.record(result, move |back, gradient| {
            back.cx.count("route backward", 10 * shape.elements(), &[&gradient]);
            let of_logits = if back.cx.has_data() {
                chosen.gradient(&gradient.read_f32()?, experts, is_normalised)
            } else {
                vec![0.0; shape.elements()]
            };
            back.pass(source, back.cx.device.upload_as(shape, &of_logits, dtype)?)
        });
        Ok(Routing { tokens: ids, weights, groups })
    }
}

/// Indices on the device, where an op is run.
fn upload(device: &Device, is_run: bool, shape: [usize; 2], ids: &[u32]) -> Result<Tensor> {
    if is_run {
        device.upload(shape, ids)
    } else {
        Ok(device.meta_tensor(shape.into(), Dtype::U32))
    }
}

/// What the router found, on the host.
struct ChosenExperts {
    /// p of every token and expert.
    shares: Vec<f32>,
    /// Token and expert of each row.
    rows: Vec<(u32, u32)>,
    /// The weight of each row.
    weights: Vec<f32>,
    groups: RowGroups,
}

impl ChosenExperts {
    fn of(logits: &[f32], experts: usize, k: usize, is_normalised: bool) -> Self {
        let mut shares = logits.to_vec();
        let mut rows = Vec::with_capacity(logits.len() / experts * k);
        let mut order: Vec<u32> = Vec::with_capacity(experts);
        for (token, shares) in shares.chunks_exact_mut(experts).enumerate() {
            softmax(shares);
            order.clear();
            order.extend(0..experts as u32);
            // Of equal ones the first.
            order.sort_by(|a, b| shares[*b as usize].total_cmp(&shares[*a as usize]));
            rows.extend(order[..k].iter().map(|expert| (token as u32, *expert)));
        }
        rows.sort_by_key(|(token, expert)| (*expert, *token));
        let mut sizes = vec![0; experts];
        for (_, expert) in &rows {
            sizes[*expert as usize] += 1;
        }
        let mut found = Self { shares, rows, weights: Vec::new(), groups: RowGroups::new(sizes) };
        let sums = found.sums(experts, is_normalised);
        let weight = |(token, expert): &(u32, u32)| {
            found.share(experts, *token, *expert) / sums[*token as usize]
        };
        found.weights = found.rows.iter().map(weight).collect();
        found
    }

    /// Where there is no data to look at.
    fn unknown(tokens: usize, experts: usize, k: usize) -> Self {
        let groups = RowGroups::even(tokens * k, experts);
        Self { shares: Vec::new(), rows: Vec::new(), weights: vec![0.0; tokens * k], groups }
    }

    /// The token of each row.
    fn tokens(&self, k: usize) -> Vec<u32> {
        if self.rows.is_empty() {
            return (0..self.weights.len()).map(|row| (row / k) as u32).collect();
        }
        self.rows.iter().map(|(token, _)| *token).collect()
    }

    fn share(&self, experts: usize, token: u32, expert: u32) -> f32 {
        self.shares[token as usize * experts + expert as usize]
    }

    /// What the shares of each token are divided by.
    fn sums(&self, experts: usize, is_normalised: bool) -> Vec<f32> {
        let n_tokens = self.shares.len() / experts;
        if !is_normalised {
            return vec![1.0; n_tokens];
        }
        let mut sums = vec![0.0; n_tokens];
        for (token, expert) in &self.rows {
            sums[*token as usize] += self.share(experts, *token, *expert);
        }
        sums
    }

    /// The gradient of logits, from that of each row's weight.
    fn gradient(&self, of_weights: &[f32], experts: usize, is_normalised: bool) -> Vec<f32> {
        let sums = self.sums(experts, is_normalised);
        // Through the division: what a weight gains, the others of its token lose.
        let mut along = vec![0.0; sums.len()];
        if is_normalised {
            for ((gradient, weight), (token, _)) in
                of_weights.iter().zip(&self.weights).zip(&self.rows)
            {
                along[*token as usize] += gradient * weight;
            }
        }
        let mut of_shares = vec![0.0; self.shares.len()];
        for (gradient, (token, expert)) in of_weights.iter().zip(&self.rows) {
            let token = *token as usize;
            of_shares[token * experts + *expert as usize] = (gradient - along[token]) / sums[token];
        }
        // Through the softmax.
        let tokens = of_shares.chunks_exact_mut(experts).zip(self.shares.chunks_exact(experts));
        for (gradient, shares) in tokens {
            let mean: f32 = gradient.iter().zip(shares).map(|(g, p)| g * p).sum();
            gradient.iter_mut().zip(shares).for_each(|(g, p)| *g = p * (*g - mean));
        }
        of_shares
    }
}

fn softmax(logits: &mut [f32]) {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    for logit in logits.iter_mut() {
        *logit = (*logit - most).exp();
    }
    let sum: f32 = logits.iter().sum();
    for logit in logits.iter_mut() {
        *logit /= sum;
    }
}
