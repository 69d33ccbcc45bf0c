//! Attention of one wide head without gradient, with CUDA: strips of queries meet all keys in a matmul, a kernel makes
//! weights of the scores, and a second matmul sums up values. The mid block of a VAE is such a head; kernels that hold
//! a block of queries, keys and values at a time have no shared memory for its width.

use std::ops::Range;

use super::{Attention, AttentionSizes};
use crate::cuda::{CudaBackend, CudaSource, CudaVariant, LaunchConfig, arguments, pack};
use crate::device::{Backend, DeviceKind};
use crate::op::OpContext;
use crate::ops::matmul::{FusedMatmul, Matmul, Operand};
use crate::{Dtype, Result, Tensor};

const KERNELS: CudaSource = CudaSource { name: "softmax", text: include_str!("softmax.cu") };

/// The widest head that other kernels compute well.
const NARROW: usize = 128;
/// Bytes of a strip's scores; tests cut a few queries into strips too. Chosen: as much as a convolution takes beside
/// larger activations, so that it is never a VAE's peak.
const STRIP_BYTES: usize = if cfg!(test) { 4 << 10 } else { 256 << 20 };
/// Queries of a strip at most. Chosen: its matmul with values of 512 numbers has a tile of 128 by 128 for each of the
/// 132 multiprocessors of an H200; more gain nothing.
const STRIP_QUERIES: usize = 4096;
/// FLOPs per score, for the work counter.
const FLOPS: usize = 20;

/// Whether it is computed so, where no gradient is wanted.
pub fn is_fit(kind: DeviceKind, sizes: AttentionSizes, how: Attention<'_>) -> bool {
    let sees_all = !how.is_causal
        && how.key_lengths.is_none()
        && how.first_keys.is_none()
        && how.relative_bias.is_none();
    let is_some = sizes.samples * sizes.queries * sizes.keys > 0;
    matches!(kind, DeviceKind::Cuda { .. })
        && (sees_all && is_some && sizes.heads == 1 && sizes.d > NARROW)
}

pub fn forward(
    cx: OpContext<'_>,
    sizes: AttentionSizes,
    how: Attention<'_>,
    inputs: [&Tensor; 3],
) -> Result<Tensor> {
    let AttentionSizes { samples, queries, keys, d, dtype, .. } = sizes;
    let [q, k, v] = inputs;
    let shape = q.shape();
    let q = q.reshape([samples * queries, d]);
    let mut out = cx.alloc([samples * queries, d], dtype)?;
    let most = (STRIP_BYTES / (keys * Dtype::F32.bytes())).clamp(1, STRIP_QUERIES);
    for sample in 0..samples {
        let [k, v] = [k, v].map(|all| all.narrow(sample..sample + 1).reshape([keys, d]));
        let first = sample * queries;
        for from in (first..first + queries).step_by(most) {
            let strip = from..(first + queries).min(from + most);
            attend(cx, how, &q.narrow(strip.clone()), [&k, &v], &mut out, strip)?;
        }
    }
    Ok(out.into_shape(shape))
}

/// A strip of queries, whose results are these rows of `out`.
fn attend(
    cx: OpContext<'_>,
    Attention { scale, allows_tf32, .. }: Attention<'_>,
    q: &Tensor,
    [k, v]: [&Tensor; 2],
    out: &mut Tensor,
    rows: Range<usize>,
) -> Result<()> {
    let mut scores = cx.workspace([rows.len(), k.shape().rows()], Dtype::F32)?;
    let by_keys = Matmul { scale, ..Matmul::new(q, Operand::from(k).t()) };
    FusedMatmul { allows_tf32, ..FusedMatmul::new(&[by_keys], &mut scores) }.run(cx)?;
    cx.count("row softmax", FLOPS * scores.shape().elements(), &[&scores, &scores]);
    if let Backend::Cuda(cuda) = cx.backend() {
        softmax(cuda, &mut scores);
    }
    let by_values = Matmul::new(&scores, v.into());
    out.with_range_mut(rows, |out| {
        FusedMatmul { allows_tf32, ..FusedMatmul::new(&[by_values], out) }.run(cx)
    })
}

/// Softmax of each row, in place.
fn softmax(cuda: &CudaBackend, scores: &mut Tensor) {
    let (rows, width) = (scores.shape().rows(), scores.shape().width());
    let variant = CudaVariant::of(&[Dtype::F32]).with_pack(pack(width, &[scores]));
    let arguments = arguments![scores, width];
    cuda.launch(&KERNELS, "softmax_rows", variant, LaunchConfig::blocks(rows), &arguments);
}
