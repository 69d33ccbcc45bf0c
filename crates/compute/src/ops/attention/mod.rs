//! Attention: out = softmax(scale·q·kᵀ)·v for each head, without the matrix of tokens by tokens ever
//! existing whole (Dao et al., "FlashAttention", arXiv 2205.14135): blocks of keys are visited in
//! turn, and a running maximum keeps the softmax exact.
//!
//! q is [samples, queries, heads·d], k and v are [samples, keys, kv heads·d] as they come out of
//! linear layers; several query heads may share one of k and v. A query sees the first keys of its
//! sample up to the sample's length and, if causal, up to its own place counted from the end; of
//! these, if documents are packed into one sample, those from its own document's first on. One
//! that sees no key gives zeros. A relative position bias per head and distance may be added to
//! scale·q·kᵀ (Raffel et al., "T5", arXiv 1910.10683, section 2.1).
//!
//! Saved for backward: q, k, v, the result, and the logsumexp per query and head.
//!
//! With CUDA and no gradient, one wide head is computed by matmuls, strip by strip (`matmuls.rs`).
//!
//! Blocks of keys that no query of a block sees are skipped. Work is counted as if none were, since
//! what is seen is data, and a plan has none; only a window is known to it.

mod cpu;
mod cuda;
mod fused;
mod gpu;
mod matmuls;
#[cfg(test)]
mod tests;

use std::ops::Range;

use crate::backward::BackwardPass;
use crate::device::{Backend, DeviceKind};
use crate::op::Op;
use crate::tape::Tape;
use crate::var::{GradTarget, SavedTensor, Var};
use crate::{Dtype, Result, Tensor};

/// How queries attend to keys.
#[derive(Clone, Copy)]
pub struct Attention<'a> {
    /// Heads of the queries.
    pub n_heads: usize,
    /// Heads of keys and values; divides `n_heads`.
    pub n_kv_heads: usize,
    /// Factor of q·k, usually 1/√d.
    pub scale: f32,
    /// Whether a query sees only the keys up to its own cx.
    pub is_causal: bool,
    /// How many keys of each sample count, u32 `[samples]`; all if not given.
    pub key_lengths: Option<&'a Tensor>,
    /// The first key that each query sees, u32 `[samples, queries]`; the sample's first if not given.
    pub first_keys: Option<&'a Tensor>,
    /// The most keys that a query sees, where `first_keys` leave all of them so few: sliding-window attention. Work
    /// is counted by it.
    pub window: Option<usize>,
    /// What is added to scale·q·k by the distance of key and query, f32
    /// [heads, queries + keys - 1]: the number at key - query + queries - 1. Frozen, and finite.
    pub relative_bias: Option<&'a Tensor>,
    /// Whether CUDA may round f32 factors of matmuls to TF32, where it computes by matmuls.
    pub allows_tf32: bool,
}

impl Attention<'_> {
    /// Every query sees every key, through `n_heads` heads of width `d`.
    pub fn full(n_heads: usize, d: usize) -> Self {
        let scale = 1.0 / (d as f32).sqrt();
        Self {
            n_heads,
            n_kv_heads: n_heads,
            scale,
            is_causal: false,
            key_lengths: None,
            first_keys: None,
            window: None,
            relative_bias: None,
            allows_tf32: false,
        }
    }
}

impl Tape<'_> {
    /// Attention; see the module's comment.
    pub fn attention(&self, q: &Var, k: &Var, v: &Var, how: Attention<'_>) -> Result<Var> {
        let op = self.begin_op("attention");
        let sizes = check(&op, [q, k, v], how)?;
        let is_trained = self.requires_grad(&[q, k, v]);
        let inputs = [q.tensor(), k.tensor(), v.tensor()];
        if !is_trained && matmuls::is_fit(op.device.kind(), sizes, how) {
            return Ok(op.result(matmuls::forward(op.cx, sizes, how, inputs)?));
        }
        let [out, logsumexp] = match self.kept_attention() {
            Some(kept) => kept,
            None => forward(&op, sizes, how, inputs)?,
        };
        let result = op.result(out);
        if !is_trained {
            return Ok(result);
        }
        self.keep_attention(&op, [result.tensor(), &logsumexp]);
        self.save_extra(&op);
        let record = AttentionBackward {
            inputs: [q, k, v].map(|input| (self.save_for_backward(input), input.grad_target())),
            out: self.save_for_backward(&result),
            logsumexp,
            key_lengths: how.key_lengths.cloned(),
            first_keys: how.first_keys.cloned(),
            relative_bias: how.relative_bias.cloned(),
            how: Attention { key_lengths: None, first_keys: None, relative_bias: None, ..how },
            sizes,
        };
        Ok(self.record(result, move |back, gradient| record.backward(back, &gradient)))
    }
}

/// The result, and the logsumexp per query and head.
fn forward(
    op: &Op<'_>,
    sizes: AttentionSizes,
    how: Attention<'_>,
    inputs: [&Tensor; 3],
) -> Result<[Tensor; 2]> {
    let [q, k, v] = inputs;
    let mut out = op.alloc(q.shape(), q.dtype())?;
    let mut logsumexp = op.alloc([sizes.samples, sizes.queries, sizes.heads], Dtype::F32)?;
    op.cx.count(sizes.kernels().0, 2 * sizes.matmul_flops(), &[q, k, v, &out]);
    let floats = match op.device.kind() {
        DeviceKind::Cpu { threads, .. } => threads * cpu::forward_floats(sizes),
        DeviceKind::Cuda { .. } => cuda::forward_floats(sizes, how),
        DeviceKind::Gpu { .. } => 0,
    };
    let mut workspace = op.workspace([floats], Dtype::F32)?;
    match op.backend() {
        Backend::Meta => {}
        Backend::Cpu(backend) => {
            let seen = AttentionMask::new(sizes, how);
            let scratch = workspace.data_mut();
            cpu::forward(backend, sizes, &seen, inputs, &mut out, &mut logsumexp, scratch);
        }
        Backend::Cuda(backend) => {
            let results = [&mut out, &mut logsumexp];
            cuda::forward(backend, sizes, how, inputs, results, &mut workspace);
        }
        Backend::Gpu(backend) => {
            gpu::forward(backend, sizes, how, inputs, [&mut out, &mut logsumexp]);
        }
    }
    Ok([out, logsumexp])
}

/// The sizes that the shapes of q, k and v amount to.
#[derive(Clone, Copy, Debug)]
struct AttentionSizes {
    samples: usize,
    queries: usize,
    keys: usize,
    heads: usize,
    kv_heads: usize,
    /// Width of a head.
    d: usize,
    /// The most keys that a query sees.
    seen: usize,
    scale: f32,
    dtype: Dtype,
}

impl AttentionSizes {
    /// Query heads that share keys and values.
    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Kernel classes of forward and backward: for narrow heads, exponentials take most of the
    /// time; for wide ones, matmuls.
    fn kernels(&self) -> (&'static str, &'static str) {
        match self.d {
            ..48 => ("attention of narrow heads", "attention of narrow heads backward"),
            48..96 => ("attention", "attention backward"),
            96.. => ("attention of wide heads", "attention of wide heads backward"),
        }
    }

    /// FLOPs of one matmul of queries and the keys they see, over all heads.
    fn matmul_flops(&self) -> usize {
        2 * self.samples * self.heads * self.queries * self.seen * self.d
    }
}

fn check(op: &Op<'_>, [q, k, v]: [&Var; 3], how: Attention<'_>) -> Result<AttentionSizes> {
    let dtype = op.expect_real("q", q.tensor())?;
    let [samples, queries, width] = op.expect_rank("q", q.tensor())?;
    let [_, keys, _] = op.expect_rank("k", k.tensor())?;
    let d = op.expect_multiple("width of q", width, how.n_heads)?;
    op.expect_multiple("number of heads", how.n_heads, how.n_kv_heads)?;
    for (what, var) in [("k", k), ("v", v)] {
        op.expect_dtype(what, var.tensor(), dtype)?;
        op.expect_shape(what, var.tensor(), [samples, keys, how.n_kv_heads * d])?;
    }
    let is_fit = how.scale >= 0.0 && how.scale.is_finite();
    op.expect_range("scale", &how.scale, is_fit, "0 or more")?;
    let is_fit = !how.is_causal || queries <= keys;
    let expected = format!("at most the number of keys, {keys}, when causal");
    op.expect_range("number of queries", &queries, is_fit, &expected)?;
    if let Some(lengths) = how.key_lengths {
        op.expect_shape("key lengths", lengths, [samples])?;
        check_bounds(op, ["key lengths", "key length"], lengths, keys)?;
    }
    if let Some(first) = how.first_keys {
        op.expect_shape("first keys", first, [samples, queries])?;
        check_bounds(op, ["first keys", "first key"], first, keys)?;
    }
    if let Some(relative) = how.relative_bias {
        let distances = (queries + keys).saturating_sub(1);
        op.expect_dtype("relative", relative, Dtype::F32)?;
        op.expect_shape("relative", relative, [how.n_heads, distances])?;
    }
    let (heads, kv_heads, scale) = (how.n_heads, how.n_kv_heads, how.scale);
    let seen = how.window.map_or(keys, |window| window.min(keys));
    let sizes = AttentionSizes { samples, queries, keys, heads, kv_heads, d, seen, scale, dtype };
    check_window(op, sizes, how)?;
    Ok(sizes)
}

/// First keys that leave each query so many keys as its window has, at most.
fn check_window(op: &Op<'_>, sizes: AttentionSizes, how: Attention<'_>) -> Result<()> {
    let Some(window) = how.window.filter(|window| *window < sizes.keys && op.has_data()) else {
        return Ok(());
    };
    let AttentionSizes { samples, queries, keys, .. } = sizes;
    let first_keys = how.first_keys.map(Tensor::indices);
    let seen = |index: usize| {
        let end = if how.is_causal { keys - queries + index % queries + 1 } else { keys };
        let first = first_keys.as_ref().map_or(0, |all| all[index] as usize);
        end.saturating_sub(first)
    };
    let most = (0..samples * queries).map(seen).max().unwrap_or(0);
    let expected = format!("at most the window, {window}");
    op.expect_range("number of keys that a query sees", &most, most <= window, &expected)
}

/// Numbers of keys, none of which is more than there are.
fn check_bounds(
    op: &Op<'_>,
    [all, one]: [&'static str; 2],
    bounds: &Tensor,
    keys: usize,
) -> Result<()> {
    op.expect_dtype(all, bounds, Dtype::U32)?;
    if !op.has_data() {
        return Ok(());
    }
    let most = bounds.indices().iter().copied().max().unwrap_or(0);
    let expected = format!("at most the number of keys, {keys}");
    op.expect_range(one, &most, most as usize <= keys, &expected)
}

/// Which keys a query sees, always some in a row, and what is added to its scores with them.
struct AttentionMask<'a> {
    sizes: AttentionSizes,
    is_causal: bool,
    key_lengths: Option<&'a [u32]>,
    first_keys: Option<&'a [u32]>,
    relative_bias: Option<&'a [f32]>,
}

impl<'a> AttentionMask<'a> {
    fn new(sizes: AttentionSizes, how: Attention<'a>) -> Self {
        let [key_lengths, first_keys] =
            [how.key_lengths, how.first_keys].map(|bounds| bounds.map(Tensor::data::<u32>));
        let relative = how.relative_bias.map(Tensor::data::<f32>);
        Self { sizes, is_causal: how.is_causal, key_lengths, first_keys, relative_bias: relative }
    }

    /// The keys that a query sees; empty if there are none.
    fn keys(&self, sample: usize, query: usize) -> Range<usize> {
        let AttentionSizes { queries, keys, .. } = self.sizes;
        let length = self.key_lengths.map_or(keys, |all| all[sample] as usize);
        let before = keys - queries.min(keys);
        let end = if self.is_causal { length.min(before + query + 1) } else { length };
        let first = self.first_keys.map_or(0, |all| all[sample * queries + query] as usize);
        first.min(end)..end
    }

    /// What is added to a query's scores with `count` keys from `from` on.
    fn relative_bias(
        &self,
        head: usize,
        query: usize,
        from: usize,
        count: usize,
    ) -> Option<&'a [f32]> {
        let all = self.relative_bias?;
        let AttentionSizes { queries, keys, .. } = self.sizes;
        let start = head * (queries + keys - 1) + queries - 1 - query + from;
        Some(&all[start..start + count])
    }
}

/// What backward reads.
#[derive(Clone, Copy)]
struct AttentionInputs<'a> {
    q: &'a Tensor,
    k: &'a Tensor,
    v: &'a Tensor,
    out: &'a Tensor,
    gradient: &'a Tensor,
    logsumexp: &'a Tensor,
}

struct AttentionBackward {
    inputs: [(SavedTensor, Option<GradTarget>); 3],
    out: SavedTensor,
    logsumexp: Tensor,
    key_lengths: Option<Tensor>,
    first_keys: Option<Tensor>,
    relative_bias: Option<Tensor>,
    how: Attention<'static>,
    sizes: AttentionSizes,
}

impl AttentionBackward {
    fn how(&self) -> Attention<'_> {
        Attention {
            key_lengths: self.key_lengths.as_ref(),
            first_keys: self.first_keys.as_ref(),
            relative_bias: self.relative_bias.as_ref(),
            ..self.how
        }
    }

    fn backward(self, back: &mut BackwardPass<'_>, gradient: &Tensor) -> Result<()> {
        let (cx, sizes) = (back.cx, self.sizes);
        let [(q, q_source), (k, k_source), (v, v_source)] = &self.inputs;
        let (q, k, v) = (q.get(cx)?, k.get(cx)?, v.get(cx)?);
        let out = self.out.get(cx)?;
        let all = [&q, &k, &v, &out, gradient, &q, &k, &v];
        cx.count(sizes.kernels().1, 5 * sizes.matmul_flops(), &all);
        // One kernel finds all three gradients; one that is not wanted is written and dropped.
        let mut slots = Vec::new();
        for (source, of) in [(q_source, &q), (k_source, &k), (v_source, &v)] {
            slots.push(match source {
                Some(source) => back.slot(*source, of.shape(), of.dtype())?,
                None => back.scratch_slot(of.shape(), of.dtype())?,
            });
        }
        let floats = match cx.device.kind() {
            DeviceKind::Cpu { threads, .. } => cpu::BackwardSplit::new(sizes).floats(threads),
            DeviceKind::Cuda { .. } => cuda::backward_floats(sizes, self.how()),
            DeviceKind::Gpu { .. } => 0,
        };
        let mut workspace = cx.workspace([floats], Dtype::F32)?;
        let how = self.how();
        let logsumexp = &self.logsumexp;
        let inputs = AttentionInputs { q: &q, k: &k, v: &v, out: &out, gradient, logsumexp };
        match cx.backend() {
            Backend::Meta => {}
            Backend::Cpu(backend) => {
                let scratch = workspace.data_mut();
                cpu::backward(
                    backend,
                    sizes,
                    &AttentionMask::new(sizes, how),
                    inputs,
                    &mut slots,
                    scratch,
                );
            }
            Backend::Cuda(backend) => {
                let kind = cx.device.kind();
                cuda::backward(backend, sizes, how, kind, inputs, &mut slots, &mut workspace);
            }
            Backend::Gpu(backend) => gpu::backward(backend, sizes, how, inputs, &mut slots),
        }
        for slot in slots {
            back.put(slot);
        }
        Ok(())
    }
}
