//! Attention on the CPU. Forward: a block of queries of one head is a task. Backward: a head
//! of keys and values of one sample is a task, since its gradients gather from all queries; where
//! there are few heads, several tasks share the queries of one, and their sums are added up after.
#![allow(unsafe_code)]

use std::ops::Range;

use super::{AttentionInputs, AttentionMask, AttentionSizes};
use crate::backward::GradientSlot;
use crate::cpu::gemm::{self, Floats, GemmBackend, GemmOut, GemmSize, MatrixView};
use crate::cpu::math::exp;
use crate::cpu::rows::{dot, exp_sum, max, multiply, store};
use crate::cpu::simd::simd;
use crate::cpu::{CpuBackend, SharedSlice, ThreadScratch};
use crate::dtype::{Real, with_real};
use crate::{Dtype, Tensor};

/// Queries and keys of a block, at most: a block of scores, 512 KiB, stays in the L2
/// cache. Measured with `bench ops` on 2 cores of a Xeon with AVX-512, 2026-11-15: with 64 queries
/// packing the keys again for each block took a quarter longer at 1024 tokens. In tests small shapes
/// must have several blocks too.
const QUERIES: usize = if cfg!(test) { 8 } else { 256 };
const KEYS: usize = if cfg!(test) { 16 } else { 512 };

/// Floats of workspace per thread.
pub fn forward_floats(sizes: AttentionSizes) -> usize {
    gemm::SCRATCH_FLOATS + QUERIES * (KEYS + sizes.d + 2)
}

/// Enough tasks for the threads to share.
const ENOUGH_TASKS: usize = 16;

/// How backward is split into tasks; it depends on shapes alone.
#[derive(Clone, Copy)]
pub struct BackwardSplit {
    /// Heads of keys and values, of all samples.
    pairs: usize,
    /// Tasks for each of them.
    per_pair: usize,
    /// Floats of the sums of dk and dv of one task.
    sums: usize,
    /// Floats of scratch memory per thread besides.
    own: usize,
}

impl BackwardSplit {
    pub fn new(sizes: AttentionSizes) -> Self {
        let pairs = sizes.samples * sizes.kv_heads;
        let blocks = sizes.group() * sizes.queries.div_ceil(QUERIES);
        let per_pair = ENOUGH_TASKS.div_ceil(pairs.max(1)).clamp(1, blocks.max(1));
        let own = gemm::SCRATCH_FLOATS + QUERIES * (2 * KEYS + sizes.d + 1);
        Self { pairs, per_pair, sums: 2 * sizes.keys * sizes.d, own }
    }

    /// Floats of workspace: sums stay with the thread if no other task adds to them.
    pub fn floats(self, threads: usize) -> usize {
        let sums = if self.per_pair == 1 { threads } else { self.pairs * self.per_pair };
        threads * self.own + sums * self.sums
    }
}

pub fn forward(
    cpu: &CpuBackend,
    sizes: AttentionSizes,
    seen: &AttentionMask<'_>,
    inputs: [&Tensor; 3],
    out: &mut Tensor,
    denominators: &mut Tensor,
    workspace: &mut [f32],
) {
    let AttentionSizes { samples, queries, heads, d, .. } = sizes;
    let blocks = queries.div_ceil(QUERIES);
    let [q, k, v] = inputs.map(Floats::from);
    with_real!(sizes.dtype, T => {
        let out = SharedSlice::new(out.data_mut::<T>());
        let denominators = SharedSlice::new(denominators.data_mut::<f32>());
        cpu.with_scratch(workspace, forward_floats(sizes), samples * blocks * heads, |task, scratch| {
            let (block, index) = (task / heads, task % heads);
            let (sample, first) = (block / blocks, block % blocks * QUERIES);
            let count = QUERIES.min(queries - first);
            let head = AttentionHead { backend: gemm_backend(cpu, sizes), sizes, sample, index, mask: seen, q, k, v };
            let mut sums = head.forward(TokenBlock { first, count }, scratch);
            for row in 0..count {
                let at = (sample * queries + first + row) * heads + head.index;
                // SAFETY: the values of one query and one head, which are this task's alone.
                let (out, denominator) =
                    unsafe { (out.slice(at * d, d), denominators.slice(at, 1)) };
                denominator[0] = sums.finish(row);
                store(sums.row(row), out, false);
            }
        });
    });
}

/// Some queries or keys in a row.
#[derive(Clone, Copy)]
struct TokenBlock {
    first: usize,
    count: usize,
}

/// Sums of dk and dv of one head.
struct KeyGradientSums<'a> {
    k: &'a mut [f32],
    v: &'a mut [f32],
}

/// One query head of one sample.
#[derive(Clone, Copy)]
struct AttentionHead<'a> {
    backend: GemmBackend,
    sizes: AttentionSizes,
    sample: usize,
    index: usize,
    mask: &'a AttentionMask<'a>,
    q: Floats<'a>,
    k: Floats<'a>,
    v: Floats<'a>,
}

/// What multiplies. AMX splits each f32 into three bf16, which does not pay for few tokens.
fn gemm_backend(cpu: &CpuBackend, sizes: AttentionSizes) -> GemmBackend {
    let is_few = sizes.queries.min(sizes.keys) < ENOUGH_FOR_AMX_F32;
    if sizes.dtype == Dtype::F32 && is_few { GemmBackend::Simd } else { cpu.gemm_backend }
}

/// Measured on 2 cores of a Xeon, 2026-11-15, programs in turn: with 397 tokens a training step took
/// 0.8 of its time by SIMD (`bench train`), with 320 tokens 0.9, with 1024 tokens 1.2
/// (`bench step`).
const ENOUGH_FOR_AMX_F32: usize = if cfg!(test) { 24 } else { 512 };

/// A block of queries on its way through the keys.
struct OnlineSoftmax<'a> {
    /// Σ weight·v so far, [queries, d]
    out: &'a mut [f32],
    /// The largest score so far.
    max: &'a mut [f32],
    /// Σ weight so far.
    total: &'a mut [f32],
}

impl<'a> OnlineSoftmax<'a> {
    fn within(scratch: &mut ThreadScratch<'a>, count: usize, d: usize) -> Self {
        let sums = Self {
            out: scratch.take(count * d),
            max: scratch.take(count),
            total: scratch.take(count),
        };
        sums.out.fill(0.0);
        sums.max.fill(f32::NEG_INFINITY);
        sums.total.fill(0.0);
        sums
    }

    /// Turns a row's scores into weights relative to the largest so far, and rescales what was summed
    /// before.
    fn weigh(&mut self, row: usize, seen: &mut [f32], scale: f32) {
        if seen.is_empty() {
            return;
        }
        let before = self.max[row];
        let block = scale * max(seen);
        let most = if block > before || block.is_nan() { block } else { before };
        let old = exp(before - most);
        self.max[row] = most;
        self.total[row] = self.total[row] * old + exp_sum(seen, scale, most);
        if old != 1.0 {
            multiply(self.row(row), old);
        }
    }

    /// Divides a row by its total; returns the logarithm of the softmax's denominator.
    fn finish(&mut self, row: usize) -> f32 {
        let total = self.total[row];
        let inverse = if total == 0.0 { 0.0 } else { 1.0 / total };
        multiply(self.row(row), inverse);
        self.max[row] + total.ln()
    }

    fn row(&mut self, row: usize) -> &mut [f32] {
        let d = self.out.len() / self.total.len();
        &mut self.out[row * d..][..d]
    }
}

impl<'a> AttentionHead<'a> {
    /// The matrix of one head's rows within a tensor of tokens.
    fn grid(&self, data: Floats<'a>, tokens: usize, heads: usize, head: usize) -> MatrixView<'a> {
        let width = heads * self.sizes.d;
        let start = self.sample * tokens * width + head * self.sizes.d;
        MatrixView { start, ..MatrixView::rows(data, width) }
    }

    fn of_queries(&self, data: Floats<'a>) -> MatrixView<'a> {
        self.grid(data, self.sizes.queries, self.sizes.heads, self.index)
    }

    fn of_keys(&self, data: Floats<'a>) -> MatrixView<'a> {
        let kv_head = self.index / self.sizes.group();
        self.grid(data, self.sizes.keys, self.sizes.kv_heads, kv_head)
    }

    /// From the first to the last key that any query of a block sees, in blocks.
    fn key_blocks(&self, block: TokenBlock) -> impl Iterator<Item = TokenBlock> {
        let each = (block.first..block.first + block.count)
            .map(|query| self.mask.keys(self.sample, query));
        let all = each.filter(|keys| !keys.is_empty());
        let all = all.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0);
        let starts = all.clone().step_by(KEYS);
        let count = move |first| KEYS.min(all.end - first);
        starts.map(move |first| TokenBlock { first, count: count(first) })
    }

    /// Which keys of a block a query sees, counted from the block's first.
    fn visible_keys(&self, query: usize, block: TokenBlock) -> Range<usize> {
        let keys = self.mask.keys(self.sample, query);
        let within = |key: usize| key.saturating_sub(block.first).min(block.count);
        let [start, end] = [keys.start, keys.end].map(within);
        start..end
    }

    /// Scales q·k and adds the relative position bias, if there is one; returns the factor that the
    /// scores still lack.
    fn add_relative_bias(&self, query: usize, from: usize, scores: &mut [f32]) -> f32 {
        let scale = self.sizes.scale;
        let Some(relative) = self.mask.relative_bias(self.index, query, from, scores.len()) else {
            return scale;
        };
        scale_and_add(scores, scale, relative);
        1.0
    }

    /// Values of our own as a matmul operand, rounded as q, k and v are.
    fn operand<'b>(&self, values: &'b [f32], width: usize) -> MatrixView<'b> {
        let grid = MatrixView::rows(Floats::F32(values), width);
        if self.sizes.dtype == Dtype::Bf16 { grid.as_bf16() } else { grid }
    }

    /// Visits the keys that any query of the block sees.
    fn forward<'r>(&self, block: TokenBlock, mut scratch: ThreadScratch<'r>) -> OnlineSoftmax<'r> {
        let (d, TokenBlock { first, count }) = (self.sizes.d, block);
        let gemm_scratch = scratch.take(gemm::SCRATCH_FLOATS);
        let scores = scratch.take(QUERIES * KEYS);
        let mut sums = OnlineSoftmax::within(&mut scratch, count, d);
        let q = self.of_queries(self.q).offset_by(first, 0);
        for keys in self.key_blocks(block) {
            let width = keys.count;
            let scores = &mut scores[..count * width];
            let [k, v] = [self.k, self.v].map(|data| self.of_keys(data).offset_by(keys.first, 0));
            let size = GemmSize::new(count, width, d);
            let out = GemmOut { data: &mut *scores, stride: width, add: false };
            self.backend.gemm(size, out, q, k.t(), gemm_scratch);
            for (row, scores) in scores.chunks_exact_mut(width).enumerate() {
                let seen = self.visible_keys(first + row, keys);
                clear_but(scores, &seen);
                let (from, scores) = (keys.first + seen.start, &mut scores[seen]);
                let scale = self.add_relative_bias(first + row, from, scores);
                sums.weigh(row, scores, scale);
            }
            let (size, weights) = (GemmSize::new(count, d, width), self.operand(scores, width));
            let out = GemmOut { data: &mut *sums.out, stride: d, add: true };
            self.backend.gemm(size, out, weights, v, gemm_scratch);
        }
        sums
    }
}

pub fn backward(
    cpu: &CpuBackend,
    sizes: AttentionSizes,
    seen: &AttentionMask<'_>,
    inputs: AttentionInputs<'_>,
    slots: &mut [GradientSlot],
    workspace: &mut [f32],
) {
    let shares = BackwardSplit::new(sizes);
    let [q_slot, k_slot, v_slot] = slots else { unreachable!("three inputs have three slots") };
    with_real!(sizes.dtype, T => {
        let gradients = AttentionGradients {
            q: HeadGradient::<T>::new(q_slot, sizes.d),
            k: HeadGradient::<T>::new(k_slot, sizes.d),
            v: HeadGradient::<T>::new(v_slot, sizes.d),
        };
        let task = |task: usize, sums: &mut [f32], scratch: ThreadScratch<'_>| {
            let (pair, share) = (task / shares.per_pair, task % shares.per_pair);
            let (sample, kv_head) = (pair / sizes.kv_heads, pair % sizes.kv_heads);
            let [q, k, v] = [inputs.q, inputs.k, inputs.v].map(Floats::from);
            let head = AttentionHead { backend: gemm_backend(cpu, sizes), sizes, sample, index: 0, mask: seen, q, k, v };
            head.backward_share(kv_head, share, inputs, &gradients, sums, scratch);
        };
        if shares.per_pair == 1 {
            let own = shares.own + shares.sums;
            cpu.with_scratch(workspace, own, shares.pairs, |pair, mut scratch| {
                let sums = scratch.take(shares.sums);
                task(pair, sums, scratch);
                gradients.store_keys(sizes, pair, sums);
            });
        } else {
            let tasks = shares.pairs * shares.per_pair;
            let (sums, scratch) = workspace.split_at_mut(tasks * shares.sums);
            let each = SharedSlice::new(&mut *sums);
            cpu.with_scratch(scratch, shares.own, tasks, |index, scratch| {
                // SAFETY: the sums of this task alone.
                task(index, unsafe { each.slice(index * shares.sums, shares.sums) }, scratch);
            });
            cpu.par_chunks(sums, shares.per_pair * shares.sums, |pair, sums| {
                let (first, others) = sums.split_at_mut(shares.sums);
                others.chunks_exact(shares.sums.max(1)).for_each(|other| add(first, other));
                gradients.store_keys(sizes, pair, first);
            });
        }
    });
}

struct AttentionGradients<'a, T> {
    q: HeadGradient<'a, T>,
    k: HeadGradient<'a, T>,
    v: HeadGradient<'a, T>,
}

impl<T: Real> AttentionGradients<'_, T> {
    /// dk and dv of one head of one sample, from their sums.
    fn store_keys(&self, sizes: AttentionSizes, pair: usize, sums: &mut [f32]) {
        let (sample, kv_head) = (pair / sizes.kv_heads, pair % sizes.kv_heads);
        let (k_sums, v_sums) = sums.split_at_mut(sizes.keys * sizes.d);
        multiply(k_sums, sizes.scale);
        self.k.store(sample, kv_head, 0, k_sums);
        self.v.store(sample, kv_head, 0, v_sums);
    }
}

/// A gradient [samples, tokens, heads·d] that tasks write to, each the columns of its own head.
struct HeadGradient<'a, T> {
    values: SharedSlice<'a, T>,
    tokens: usize,
    heads: usize,
    /// Width of a head.
    d: usize,
    add: bool,
}

impl<'a, T: Real> HeadGradient<'a, T> {
    fn new(slot: &'a mut GradientSlot, d: usize) -> Self {
        let shape = slot.tensor.shape();
        let (tokens, heads) = (shape.sizes()[1], shape.width() / d);
        let add = slot.add;
        Self { values: SharedSlice::new(slot.tensor.data_mut()), tokens, heads, d, add }
    }

    /// Stores rows of one head of one sample, from token `first` on.
    fn store(&self, sample: usize, head: usize, first: usize, rows: &[f32]) {
        let d = self.d;
        for (row, from) in rows.chunks_exact(d).enumerate() {
            let token = sample * self.tokens + first + row;
            // SAFETY: the values of one token and one head, which only the task of that head
            // touches.
            let to = unsafe { self.values.slice((token * self.heads + head) * d, d) };
            store(from, to, self.add);
        }
    }
}

impl AttentionHead<'_> {
    /// Every so many-th block of queries of the heads that share these keys and values: stores dq,
    /// and sums dk and dv.
    fn backward_share<T: Real>(
        self,
        kv_head: usize,
        share: usize,
        inputs: AttentionInputs<'_>,
        gradients: &AttentionGradients<'_, T>,
        sums: &mut [f32],
        mut scratch: ThreadScratch<'_>,
    ) {
        let shares = BackwardSplit::new(self.sizes).per_pair;
        let AttentionSizes { queries, keys, d, scale, .. } = self.sizes;
        let (group, blocks) = (self.sizes.group(), queries.div_ceil(QUERIES));
        let gemm_scratch = scratch.take(gemm::SCRATCH_FLOATS);
        sums.fill(0.0);
        let (k, v) = sums.split_at_mut(keys * d);
        let mut sums = KeyGradientSums { k, v };
        for item in (share..group * blocks).step_by(shares) {
            let (index, first) = (kv_head * group + item / blocks, item % blocks * QUERIES);
            let head = Self { index, ..self };
            let block = TokenBlock { first, count: QUERIES.min(queries - first) };
            let mut scratch = ThreadScratch(scratch.0);
            let corrections = head.corrections::<T>(block, inputs, &mut scratch);
            let q_sums =
                head.backward(block, inputs, corrections, &mut sums, gemm_scratch, scratch);
            multiply(q_sums, scale);
            gradients.q.store(self.sample, index, first, q_sums);
        }
    }

    /// D = Σ gradient·out for each query of a block.
    fn corrections<'r, T: Real>(
        &self,
        TokenBlock { first, count }: TokenBlock,
        inputs: AttentionInputs<'_>,
        scratch: &mut ThreadScratch<'r>,
    ) -> &'r [f32] {
        let AttentionSizes { queries, heads, d, .. } = self.sizes;
        let (gradient, out) = (inputs.gradient.data::<T>(), inputs.out.data::<T>());
        let corrections = scratch.take(count);
        for (query, correction) in (first..).zip(corrections.iter_mut()) {
            let at = ((self.sample * queries + query) * heads + self.index) * d;
            *correction = dot(&gradient[at..at + d], &out[at..at + d]);
        }
        corrections
    }

    /// With P the weights and D the corrections: dv = Pᵀ·gradient, S = P ∘ (gradient·vᵀ - D),
    /// dq = S·k and dk = Sᵀ·q but for the scale. Returns dq of the block.
    fn backward<'r>(
        &self,
        block: TokenBlock,
        inputs: AttentionInputs<'_>,
        corrections: &[f32],
        sums: &mut KeyGradientSums<'_>,
        gemm_scratch: &mut [f32],
        mut scratch: ThreadScratch<'r>,
    ) -> &'r mut [f32] {
        let (d, TokenBlock { first, count }) = (self.sizes.d, block);
        let [weights, scores] = [QUERIES * KEYS; 2].map(|floats| scratch.take(floats));
        let q_sums = scratch.take(count * d);
        q_sums.fill(0.0);
        let [q, gradient] =
            [self.q, inputs.gradient.into()].map(|data| self.of_queries(data).offset_by(first, 0));
        for keys in self.key_blocks(block) {
            let width = keys.count;
            let [weights, scores] =
                [&mut *weights, &mut *scores].map(|all| &mut all[..count * width]);
            let [k, v] = [self.k, self.v].map(|data| self.of_keys(data).offset_by(keys.first, 0));
            let mut gemm = |[rows, columns, inner]: [usize; 3],
                            data: &mut [f32],
                            add,
                            left,
                            right| {
                let (size, stride) = (GemmSize::new(rows, columns, inner), columns);
                self.backend.gemm(size, GemmOut { data, stride, add }, left, right, gemm_scratch);
            };
            gemm([count, width, d], weights, false, q, k.t());
            gemm([count, width, d], scores, false, gradient, v.t());
            self.recompute_weights(first, keys, inputs, corrections, weights, scores);
            let [weights, scores] = [&*weights, &*scores].map(|values| self.operand(values, width));
            let range = keys.first * d..(keys.first + width) * d;
            gemm([width, d, count], &mut sums.v[range.clone()], true, weights.t(), gradient);
            gemm([width, d, count], &mut sums.k[range], true, scores.t(), q);
            gemm([count, d, width], q_sums, true, scores, k);
        }
        q_sums
    }

    /// Turns q·kᵀ into weights P, and gradient·vᵀ into the score gradients S, for queries from `first` on.
    fn recompute_weights(
        &self,
        first: usize,
        keys: TokenBlock,
        inputs: AttentionInputs<'_>,
        corrections: &[f32],
        weights: &mut [f32],
        scores: &mut [f32],
    ) {
        let (AttentionSizes { queries, heads, .. }, width) = (self.sizes, keys.count);
        let denominators = inputs.logsumexp.data::<f32>();
        let rows = weights.chunks_exact_mut(width).zip(scores.chunks_exact_mut(width));
        for (row, (weights, scores)) in rows.enumerate() {
            let token = self.sample * queries + first + row;
            let denominator = denominators[token * heads + self.index];
            let seen = self.visible_keys(first + row, keys);
            clear_but(weights, &seen);
            clear_but(scores, &seen);
            let (from, weights) = (keys.first + seen.start, &mut weights[seen.clone()]);
            let scores = &mut scores[seen];
            let scale = self.add_relative_bias(first + row, from, weights);
            weigh(weights, scores, scale, denominator, corrections[row]);
        }
    }
}

/// Keys that are not seen have no weight.
fn clear_but(row: &mut [f32], seen: &Range<usize>) {
    row[..seen.start].fill(0.0);
    row[seen.end..].fill(0.0);
}

simd! {
    fn add(sums: &mut [f32], others: &[f32]) {
        for (sum, other) in sums.iter_mut().zip(others) {
            *sum += other;
        }
    }

    fn scale_and_add(scores: &mut [f32], scale: f32, others: &[f32]) {
        for (score, other) in scores.iter_mut().zip(others) {
            *score = scale * *score + other;
        }
    }

    fn weigh(
        weights: &mut [f32],
        scores: &mut [f32],
        scale: f32,
        denominator: f32,
        correction: f32,
    ) {
        for (weight, score) in weights.iter_mut().zip(scores) {
            *weight = exp(scale * *weight - denominator);
            *score = *weight * (*score - correction);
        }
    }
}
