//! Attention by cuDNN, where it is and has a plan: every query sees every key or those up to its own
//! place, heads of 64 or 128 numbers of 16 bits. Its gradients of keys and values have the same bits from
//! run to run, that of queries does not, since it is summed up as blocks finish.

use super::{Attention, Inputs, Sizes};
use crate::backward::Slot;
use crate::cuda::cudnn::{Cudnn, Graph, Layout, Plan, Pointwise, Reduction, TRUTH, Value};
use crate::{Dtype, Result, Tensor};

/// Bytes of workspace that a plan may ask for. Measured on an H200 with cuDNN 9: 256 for all that were
/// tried, and backward what [`workspace`] adds.
pub const WORKSPACE: usize = 1 << 16;

/// The same of backward: where heads share keys, the gradients of keys and values exist for each.
pub fn workspace(sizes: Sizes) -> usize {
    let Sizes { samples, keys, heads, kv_heads, d, dtype, .. } = sizes;
    let each = if heads == kv_heads { 0 } else { samples * heads * keys * d * dtype.bytes() };
    WORKSPACE + 2 * each
}

/// Whether the library could do it, were it there. What documents a sample is packed from is data, and
/// not asked here.
pub fn may_fit(sizes: Sizes, how: Attention<'_>) -> bool {
    let is_plain = how.key_lengths.is_none() && how.relative.is_none();
    // The library counts places from the first key, we from the last.
    let is_even = !how.is_causal || sizes.queries == sizes.keys;
    let is_some = sizes.samples * sizes.queries * sizes.keys > 0;
    let is_wide = sizes.dtype != Dtype::F32 && [64, 128].contains(&sizes.d);
    is_plain && is_even && is_some && is_wide
}

/// Whether the library can do it: every sample is one document.
pub fn is_fit(sizes: Sizes, how: Attention<'_>) -> bool {
    let is_first = |first: &Tensor| first.indices().iter().all(|key| *key == 0);
    may_fit(sizes, how) && how.first_keys.is_none_or(is_first)
}

/// Names of tensors and numbers in the graphs.
#[derive(Clone, Copy)]
enum Name {
    Q = 1,
    K,
    V,
    Out,
    Statistics,
    Scale,
    One,
    /// What a key that is not seen has for a product.
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
struct Layouts {
    dtype: Dtype,
    is_causal: bool,
    /// Heads of queries, and of keys.
    n_heads: [usize; 2],
    queries: Layout,
    keys: Layout,
    /// Of queries by keys.
    products: Layout,
    /// A number for each query.
    rows: Layout,
}

impl Layouts {
    fn new(sizes: Sizes, is_causal: bool) -> Self {
        let Sizes { samples, queries, keys, heads, kv_heads, d, dtype, .. } = sizes;
        let of = |tokens: usize, heads: usize| Layout {
            sizes: [samples, heads, tokens, d],
            steps: [tokens * heads * d, d, heads * d, 1],
        };
        Self {
            dtype,
            is_causal,
            n_heads: [heads, kv_heads],
            queries: of(queries, heads),
            keys: of(keys, kv_heads),
            products: Layout::dense([samples, heads, queries, keys]),
            rows: Layout::dense([samples, heads, queries, 1]),
        }
    }
}

pub fn plan_forward(cudnn: &Cudnn, sizes: Sizes, is_causal: bool) -> Result<Plan> {
    let of = Layouts::new(sizes, is_causal);
    let mut graph = cudnn.graph();
    let g = &mut graph;
    let q = g.tensor(Name::Q as i64, of.queries, of.dtype)?;
    let k = g.tensor(Name::K as i64, of.keys.t(), of.dtype)?;
    let v = g.tensor(Name::V as i64, of.keys, of.dtype)?;
    let out = g.tensor(Name::Out as i64, of.queries, of.dtype)?;
    let statistics = g.tensor(Name::Statistics as i64, of.rows, Dtype::F32)?;
    let scale = g.number(Name::Scale as i64)?;
    let products = scaled_products(g, &of, [q, k, scale])?;
    let products = seen(g, &of, products)?;
    let most = g.temporary(of.rows, Dtype::F32)?;
    g.reduce(Reduction::Max, products, most)?;
    let distances = apart(g, &of, products, most)?;
    let weights = exponentials(g, &of, distances)?;
    let total = g.temporary(of.rows, Dtype::F32)?;
    g.reduce(Reduction::Sum, weights, total)?;
    let logarithm = g.temporary(of.rows, Dtype::F32)?;
    g.pointwise(Pointwise::Log, total, None, logarithm)?;
    g.pointwise(Pointwise::Add, most, Some(logarithm), statistics)?;
    let shares = g.temporary(of.products, of.dtype)?;
    g.pointwise(Pointwise::Divide, weights, Some(total), shares)?;
    g.multiply(shares, v, out)?;
    graph.plan()
}

pub fn plan_backward(cudnn: &Cudnn, sizes: Sizes, is_causal: bool) -> Result<Plan> {
    let of = Layouts::new(sizes, is_causal);
    let mut graph = cudnn.graph();
    let g = &mut graph;
    let q = g.tensor(Name::Q as i64, of.queries, of.dtype)?;
    let k = g.tensor(Name::K as i64, of.keys.t(), of.dtype)?;
    let v = g.tensor(Name::V as i64, of.keys.t(), of.dtype)?;
    let out = g.tensor(Name::Out as i64, of.queries, of.dtype)?;
    let gradient = g.tensor(Name::Gradient as i64, of.queries, of.dtype)?;
    let statistics = g.tensor(Name::Statistics as i64, of.rows, Dtype::F32)?;
    let delta = delta(g, &of, out, gradient)?;

    let scale = g.number(Name::Scale as i64)?;
    let products = scaled_products(g, &of, [q, k, scale])?;
    let distances = apart(g, &of, products, statistics)?;
    let distances = seen(g, &of, distances)?;
    let weights = exponentials(g, &of, distances)?;
    let weights_t = g.temporary(of.products.t(), of.dtype)?;
    g.view(weights, weights_t)?;
    let dv = g.tensor(Name::Dv as i64, of.keys, of.dtype)?;
    of_keys(g, &of, [weights_t, gradient], dv)?;

    let slopes = slopes(g, &of, [gradient, v, delta, weights, scale])?;
    let slopes_t = g.temporary(of.products.t(), of.dtype)?;
    g.view(slopes, slopes_t)?;
    let dk = g.tensor(Name::Dk as i64, of.keys, of.dtype)?;
    of_keys(g, &of, [slopes_t, q], dk)?;

    let rows_of_k = g.temporary(of.keys, of.dtype)?;
    g.view(k, rows_of_k)?;
    let sum = g.tensor(Name::DqSum as i64, Layout::dense(of.queries.sizes), Dtype::F32)?;
    g.multiply(slopes, rows_of_k, sum)?;
    let dq = g.tensor(Name::Dq as i64, of.queries, of.dtype)?;
    g.pointwise(Pointwise::Copy, sum, None, dq)?;
    graph.plan()
}

/// scale·q·kᵀ
fn scaled_products(g: &mut Graph<'_>, of: &Layouts, [q, k, scale]: [Value; 3]) -> Result<Value> {
    let products = g.temporary(of.products, Dtype::F32)?;
    g.multiply(q, k, products)?;
    let scaled = g.temporary(of.products, Dtype::F32)?;
    g.pointwise(Pointwise::Multiply, products, Some(scale), scaled)?;
    Ok(scaled)
}

/// The numbers of keys that are seen, and the least there is for all others.
fn seen(g: &mut Graph<'_>, of: &Layouts, numbers: Value) -> Result<Value> {
    if !of.is_causal {
        return Ok(numbers);
    }
    let [query, key] =
        [g.temporary(of.products, Dtype::I32)?, g.temporary(of.products, Dtype::I32)?];
    g.places(2, numbers, query)?;
    g.places(3, numbers, key)?;
    let is_seen = g.temporary(of.products, TRUTH)?;
    g.at_least(query, key, is_seen)?;
    let (least, all) = (g.number(Name::Least as i64)?, g.temporary(of.products, Dtype::F32)?);
    g.select(is_seen, numbers, least, all)?;
    Ok(all)
}

/// numbers - a number per row
fn apart(g: &mut Graph<'_>, of: &Layouts, numbers: Value, rows: Value) -> Result<Value> {
    let distances = g.temporary(of.products, Dtype::F32)?;
    g.pointwise(Pointwise::Subtract, numbers, Some(rows), distances)?;
    Ok(distances)
}

fn exponentials(g: &mut Graph<'_>, of: &Layouts, numbers: Value) -> Result<Value> {
    let weights = g.temporary(of.products, Dtype::F32)?;
    g.pointwise(Pointwise::Exp, numbers, None, weights)?;
    Ok(weights)
}

/// A product that is a gradient of keys or values, summed up over the heads that share them.
fn of_keys(g: &mut Graph<'_>, of: &Layouts, [a, b]: [Value; 2], to: Value) -> Result<()> {
    let [heads, kv_heads] = of.n_heads;
    if heads == kv_heads {
        return g.multiply(a, b, to);
    }
    let [samples, _, keys, d] = of.keys.sizes;
    let each = g.temporary(Layout::dense([samples, heads, keys, d]), of.dtype)?;
    g.multiply(a, b, each)?;
    g.reduce(Reduction::Sum, each, to)
}

/// Σ out·gradient. The factor of one makes it a result that the library knows to store.
fn delta(g: &mut Graph<'_>, of: &Layouts, out: Value, gradient: Value) -> Result<Value> {
    let all = g.temporary(Layout::dense(of.queries.sizes), Dtype::F32)?;
    g.pointwise(Pointwise::Multiply, gradient, Some(out), all)?;
    let sum = g.temporary(of.rows, Dtype::F32)?;
    g.reduce(Reduction::Sum, all, sum)?;
    let delta = g.tensor(Name::Delta as i64, of.rows, Dtype::F32)?;
    let one = g.number(Name::One as i64)?;
    g.pointwise(Pointwise::Multiply, sum, Some(one), delta)?;
    Ok(delta)
}

/// scale·weights·(gradient·vᵀ - delta)
fn slopes(
    g: &mut Graph<'_>,
    of: &Layouts,
    [gradient, v, delta, weights, scale]: [Value; 5],
) -> Result<Value> {
    let products = g.temporary(of.products, Dtype::F32)?;
    g.multiply(gradient, v, products)?;
    let distances = g.temporary(of.products, Dtype::F32)?;
    g.pointwise(Pointwise::Subtract, products, Some(delta), distances)?;
    let weighed = g.temporary(of.products, Dtype::F32)?;
    g.pointwise(Pointwise::Multiply, distances, Some(weights), weighed)?;
    let slopes = g.temporary(of.products, Dtype::F32)?;
    g.pointwise(Pointwise::Multiply, weighed, Some(scale), slopes)?;
    Ok(slopes)
}

pub fn forward(
    cudnn: &Cudnn,
    plan: &Plan,
    (sizes, is_causal): (Sizes, bool),
    [q, k, v]: [&Tensor; 3],
    [out, statistics]: [&mut Tensor; 2],
    workspace: u64,
) -> Result<()> {
    let tensors = [
        (Name::Q as i64, q.address()),
        (Name::K as i64, k.address()),
        (Name::V as i64, v.address()),
        (Name::Out as i64, out.address_mut()),
        (Name::Statistics as i64, statistics.address_mut()),
    ];
    let numbers = [(Name::Scale as i64, sizes.scale), LEAST];
    cudnn.run(plan, &tensors, &numbers[..if is_causal { 2 } else { 1 }], workspace)
}

/// Its exponential is zero.
const LEAST: (i64, f32) = (Name::Least as i64, f32::MIN);

/// Writes all three gradients, delta, and the sum that the gradient of queries is rounded from.
pub fn backward(
    cudnn: &Cudnn,
    plan: &Plan,
    (sizes, is_causal): (Sizes, bool),
    inputs: Inputs<'_>,
    slots: &mut [Slot],
    [delta, sum, workspace]: [u64; 3],
) -> Result<()> {
    let Inputs { q, k, v, out, gradient, denominators } = inputs;
    let [dq, dk, dv] = slots else { unreachable!("three gradients") };
    let tensors = [
        (Name::Q as i64, q.address()),
        (Name::K as i64, k.address()),
        (Name::V as i64, v.address()),
        (Name::Out as i64, out.address()),
        (Name::Statistics as i64, denominators.address()),
        (Name::Gradient as i64, gradient.address()),
        (Name::Dq as i64, dq.tensor.address_mut()),
        (Name::Dk as i64, dk.tensor.address_mut()),
        (Name::Dv as i64, dv.tensor.address_mut()),
        (Name::DqSum as i64, sum),
        (Name::Delta as i64, delta),
    ];
    let numbers = [(Name::Scale as i64, sizes.scale), (Name::One as i64, 1.0), LEAST];
    cudnn.run(plan, &tensors, &numbers[..if is_causal { 3 } else { 2 }], workspace)
}
