//! Attention by cuDNN, where it is and has a plan: every query sees every key or those up to its own
//! place, heads of 64 or 128 numbers of 16 bits. Its gradients of keys and values have the same bits from
//! run to run, that of queries does not, since it is summed up as blocks finish.

use super::{Attention, AttentionInputs, AttentionSizes};
use crate::backward::GradientSlot;
use crate::cuda::cudnn::{
    BOOL_DTYPE, Cudnn, CudnnPlan, Graph, GraphTensor, Pointwise, Reduction, TensorLayout,
};
use crate::{Dtype, Result, Tensor};

/// Bytes of workspace that a plan may ask for. Measured on an H200 with cuDNN 9: 256 for all that were
/// tried, and backward what [`workspace`] adds.
pub const WORKSPACE: usize = 1 << 16;

/// The same of backward: where heads share keys, the gradients of keys and values exist for each.
pub fn workspace(sizes: AttentionSizes) -> usize {
    let AttentionSizes { samples, keys, heads, kv_heads, d, dtype, .. } = sizes;
    let each = if heads == kv_heads { 0 } else { samples * heads * keys * d * dtype.bytes() };
    WORKSPACE + 2 * each
}

/// Whether the library could do it, were it there. How long samples are and what documents they are packed
/// from is data, and not asked here.
pub fn may_fit(sizes: AttentionSizes, how: Attention<'_>) -> bool {
    let is_plain = how.relative_bias.is_none();
    // The library counts places from the first key, we from the last.
    let is_even = !how.is_causal || sizes.queries == sizes.keys;
    let is_some = sizes.samples * sizes.queries * sizes.keys > 0;
    let is_wide = sizes.dtype != Dtype::F32 && [64, 128].contains(&sizes.d);
    is_plain && is_even && is_some && is_wide
}

/// Whether the library can do it: every sample is one document, and as long as the others.
pub fn is_fit(sizes: AttentionSizes, how: Attention<'_>) -> bool {
    let is_first = |first: &Tensor| first.indices().iter().all(|key| *key == 0);
    let is_full = |lengths: &Tensor| lengths.indices().iter().all(|n| *n as usize == sizes.keys);
    may_fit(sizes, how)
        && how.first_keys.is_none_or(is_first)
        && how.key_lengths.is_none_or(is_full)
}

/// Names of tensors and numbers in the graphs.
#[derive(Clone, Copy)]
enum AttentionTensor {
    Q = 1,
    K,
    V,
    Out,
    Statistics,
    Scale,
    One,
    /// The score of a key that is not seen.
    Least,
    Gradient,
    Dq,
    Dk,
    Dv,
    /// The gradient of queries in f32.
    DqSum,
    /// Σ out·gradient
    Delta,
}

/// The layouts of a graph's tensors.
struct AttentionLayouts {
    dtype: Dtype,
    is_causal: bool,
    /// Heads of queries, and of keys.
    n_heads: [usize; 2],
    queries: TensorLayout,
    keys: TensorLayout,
    /// Of queries by keys.
    scores: TensorLayout,
    /// A number for each query.
    rows: TensorLayout,
}

impl AttentionLayouts {
    fn new(sizes: AttentionSizes, is_causal: bool) -> Self {
        let AttentionSizes { samples, queries, keys, heads, kv_heads, d, dtype, .. } = sizes;
        let of = |tokens: usize, heads: usize| TensorLayout {
            sizes: [samples, heads, tokens, d],
            strides: [tokens * heads * d, d, heads * d, 1],
        };
        Self {
            dtype,
            is_causal,
            n_heads: [heads, kv_heads],
            queries: of(queries, heads),
            keys: of(keys, kv_heads),
            scores: TensorLayout::dense([samples, heads, queries, keys]),
            rows: TensorLayout::dense([samples, heads, queries, 1]),
        }
    }
}

pub fn plan_forward(cudnn: &Cudnn, sizes: AttentionSizes, is_causal: bool) -> Result<CudnnPlan> {
    let of = AttentionLayouts::new(sizes, is_causal);
    let mut graph = cudnn.graph();
    let g = &mut graph;
    let q = g.tensor(AttentionTensor::Q as i64, of.queries, of.dtype)?;
    let k = g.tensor(AttentionTensor::K as i64, of.keys.t(), of.dtype)?;
    let v = g.tensor(AttentionTensor::V as i64, of.keys, of.dtype)?;
    let out = g.tensor(AttentionTensor::Out as i64, of.queries, of.dtype)?;
    let statistics = g.tensor(AttentionTensor::Statistics as i64, of.rows, Dtype::F32)?;
    let scale = g.number(AttentionTensor::Scale as i64)?;
    let scores = scaled_scores(g, &of, [q, k, scale])?;
    let scores = masked(g, &of, scores)?;
    let most = g.temporary(of.rows, Dtype::F32)?;
    g.reduce(Reduction::Max, scores, most)?;
    let distances = subtract_rows(g, &of, scores, most)?;
    let weights = exp(g, &of, distances)?;
    let total = g.temporary(of.rows, Dtype::F32)?;
    g.reduce(Reduction::Sum, weights, total)?;
    let logarithm = g.temporary(of.rows, Dtype::F32)?;
    g.pointwise(Pointwise::Log, total, None, logarithm)?;
    g.pointwise(Pointwise::Add, most, Some(logarithm), statistics)?;
    let shares = g.temporary(of.scores, of.dtype)?;
    g.pointwise(Pointwise::Divide, weights, Some(total), shares)?;
    g.matmul(shares, v, out)?;
    graph.plan()
}

pub fn plan_backward(cudnn: &Cudnn, sizes: AttentionSizes, is_causal: bool) -> Result<CudnnPlan> {
    let of = AttentionLayouts::new(sizes, is_causal);
    let mut graph = cudnn.graph();
    let g = &mut graph;
    let q = g.tensor(AttentionTensor::Q as i64, of.queries, of.dtype)?;
    let k = g.tensor(AttentionTensor::K as i64, of.keys.t(), of.dtype)?;
    let v = g.tensor(AttentionTensor::V as i64, of.keys.t(), of.dtype)?;
    let out = g.tensor(AttentionTensor::Out as i64, of.queries, of.dtype)?;
    let gradient = g.tensor(AttentionTensor::Gradient as i64, of.queries, of.dtype)?;
    let statistics = g.tensor(AttentionTensor::Statistics as i64, of.rows, Dtype::F32)?;
    let delta = delta(g, &of, out, gradient)?;

    let scale = g.number(AttentionTensor::Scale as i64)?;
    let scores = scaled_scores(g, &of, [q, k, scale])?;
    let distances = subtract_rows(g, &of, scores, statistics)?;
    let distances = masked(g, &of, distances)?;
    let weights = exp(g, &of, distances)?;
    let weights_t = g.temporary(of.scores.t(), of.dtype)?;
    g.reshape(weights, weights_t)?;
    let dv = g.tensor(AttentionTensor::Dv as i64, of.keys, of.dtype)?;
    key_gradient(g, &of, [weights_t, gradient], dv)?;

    let of_scores = score_gradients(g, &of, [gradient, v, delta, weights, scale])?;
    let score_gradients_t = g.temporary(of.scores.t(), of.dtype)?;
    g.reshape(of_scores, score_gradients_t)?;
    let dk = g.tensor(AttentionTensor::Dk as i64, of.keys, of.dtype)?;
    key_gradient(g, &of, [score_gradients_t, q], dk)?;

    let rows_of_k = g.temporary(of.keys, of.dtype)?;
    g.reshape(k, rows_of_k)?;
    let sum =
        g.tensor(AttentionTensor::DqSum as i64, TensorLayout::dense(of.queries.sizes), Dtype::F32)?;
    g.matmul(of_scores, rows_of_k, sum)?;
    let dq = g.tensor(AttentionTensor::Dq as i64, of.queries, of.dtype)?;
    g.pointwise(Pointwise::Copy, sum, None, dq)?;
    graph.plan()
}

/// scale·q·kᵀ
fn scaled_scores(
    g: &mut Graph<'_>,
    of: &AttentionLayouts,
    [q, k, scale]: [GraphTensor; 3],
) -> Result<GraphTensor> {
    let scores = g.temporary(of.scores, Dtype::F32)?;
    g.matmul(q, k, scores)?;
    let scaled = g.temporary(of.scores, Dtype::F32)?;
    g.pointwise(Pointwise::Multiply, scores, Some(scale), scaled)?;
    Ok(scaled)
}

/// The scores of keys that are seen, and the lowest value for all others.
fn masked(g: &mut Graph<'_>, of: &AttentionLayouts, scores: GraphTensor) -> Result<GraphTensor> {
    if !of.is_causal {
        return Ok(scores);
    }
    let [query, key] = [g.temporary(of.scores, Dtype::I32)?, g.temporary(of.scores, Dtype::I32)?];
    g.gen_index(2, scores, query)?;
    g.gen_index(3, scores, key)?;
    let is_seen = g.temporary(of.scores, BOOL_DTYPE)?;
    g.at_least(query, key, is_seen)?;
    let (least, all) =
        (g.number(AttentionTensor::Least as i64)?, g.temporary(of.scores, Dtype::F32)?);
    g.select(is_seen, scores, least, all)?;
    Ok(all)
}

/// scores - a value per row
fn subtract_rows(
    g: &mut Graph<'_>,
    of: &AttentionLayouts,
    scores: GraphTensor,
    rows: GraphTensor,
) -> Result<GraphTensor> {
    let distances = g.temporary(of.scores, Dtype::F32)?;
    g.pointwise(Pointwise::Subtract, scores, Some(rows), distances)?;
    Ok(distances)
}

fn exp(g: &mut Graph<'_>, of: &AttentionLayouts, scores: GraphTensor) -> Result<GraphTensor> {
    let weights = g.temporary(of.scores, Dtype::F32)?;
    g.pointwise(Pointwise::Exp, scores, None, weights)?;
    Ok(weights)
}

/// A matmul that gives the gradient of keys or values, summed over the heads that share them.
fn key_gradient(
    g: &mut Graph<'_>,
    of: &AttentionLayouts,
    [a, b]: [GraphTensor; 2],
    to: GraphTensor,
) -> Result<()> {
    let [heads, kv_heads] = of.n_heads;
    if heads == kv_heads {
        return g.matmul(a, b, to);
    }
    let [samples, _, keys, d] = of.keys.sizes;
    let each = g.temporary(TensorLayout::dense([samples, heads, keys, d]), of.dtype)?;
    g.matmul(a, b, each)?;
    g.reduce(Reduction::Sum, each, to)
}

/// Σ out·gradient. The factor of one makes it a result that the library knows to store.
fn delta(
    g: &mut Graph<'_>,
    of: &AttentionLayouts,
    out: GraphTensor,
    gradient: GraphTensor,
) -> Result<GraphTensor> {
    let all = g.temporary(TensorLayout::dense(of.queries.sizes), Dtype::F32)?;
    g.pointwise(Pointwise::Multiply, gradient, Some(out), all)?;
    let sum = g.temporary(of.rows, Dtype::F32)?;
    g.reduce(Reduction::Sum, all, sum)?;
    let delta = g.tensor(AttentionTensor::Delta as i64, of.rows, Dtype::F32)?;
    let one = g.number(AttentionTensor::One as i64)?;
    g.pointwise(Pointwise::Multiply, sum, Some(one), delta)?;
    Ok(delta)
}

/// scale·weights·(gradient·vᵀ - delta)
fn score_gradients(
    g: &mut Graph<'_>,
    of: &AttentionLayouts,
    [gradient, v, delta, weights, scale]: [GraphTensor; 5],
) -> Result<GraphTensor> {
    let scores = g.temporary(of.scores, Dtype::F32)?;
    g.matmul(gradient, v, scores)?;
    let distances = g.temporary(of.scores, Dtype::F32)?;
    g.pointwise(Pointwise::Subtract, scores, Some(delta), distances)?;
    let weighed = g.temporary(of.scores, Dtype::F32)?;
    g.pointwise(Pointwise::Multiply, distances, Some(weights), weighed)?;
    let gradients = g.temporary(of.scores, Dtype::F32)?;
    g.pointwise(Pointwise::Multiply, weighed, Some(scale), gradients)?;
    Ok(gradients)
}

pub fn forward(
    cudnn: &Cudnn,
    plan: &CudnnPlan,
    sizes: AttentionSizes,
    is_causal: bool,
    [q, k, v]: [&Tensor; 3],
    [out, statistics]: [&mut Tensor; 2],
    workspace: u64,
) -> Result<()> {
    let tensors = [
        (AttentionTensor::Q as i64, q.address()),
        (AttentionTensor::K as i64, k.address()),
        (AttentionTensor::V as i64, v.address()),
        (AttentionTensor::Out as i64, out.address_mut()),
        (AttentionTensor::Statistics as i64, statistics.address_mut()),
    ];
    let numbers = [(AttentionTensor::Scale as i64, sizes.scale), LEAST];
    cudnn.run(plan, &tensors, &numbers[..if is_causal { 2 } else { 1 }], workspace)
}

/// Its exponential is zero.
const LEAST: (i64, f32) = (AttentionTensor::Least as i64, f32::MIN);

/// Writes all three gradients, delta, and the sum that the gradient of queries is rounded from.
pub fn backward(
    cudnn: &Cudnn,
    plan: &CudnnPlan,
    sizes: AttentionSizes,
    is_causal: bool,
    inputs: AttentionInputs<'_>,
    slots: &mut [GradientSlot],
    [delta, sum, workspace]: [u64; 3],
) -> Result<()> {
    let AttentionInputs { q, k, v, out, gradient, logsumexp } = inputs;
    let [dq, dk, dv] = slots else { unreachable!("three gradients") };
    let tensors = [
        (AttentionTensor::Q as i64, q.address()),
        (AttentionTensor::K as i64, k.address()),
        (AttentionTensor::V as i64, v.address()),
        (AttentionTensor::Out as i64, out.address()),
        (AttentionTensor::Statistics as i64, logsumexp.address()),
        (AttentionTensor::Gradient as i64, gradient.address()),
        (AttentionTensor::Dq as i64, dq.tensor.address_mut()),
        (AttentionTensor::Dk as i64, dk.tensor.address_mut()),
        (AttentionTensor::Dv as i64, dv.tensor.address_mut()),
        (AttentionTensor::DqSum as i64, sum),
        (AttentionTensor::Delta as i64, delta),
    ];
    let numbers =
        [(AttentionTensor::Scale as i64, sizes.scale), (AttentionTensor::One as i64, 1.0), LEAST];
    cudnn.run(plan, &tensors, &numbers[..if is_causal { 3 } else { 2 }], workspace)
}
