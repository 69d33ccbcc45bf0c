//! Attention on a GPU, in f32 whatever the format.

use super::{Attention, Inputs, Sizes};
use crate::Tensor;
use crate::backward::Slot;
use crate::device::Kind;
use crate::gpu::{Argument, Gpu, Source, Variant, arguments, singles};

const KERNELS: Source = Source {
    name: "attention",
    text: concat!(include_str!("seen.wgsli"), include_str!("kernel.wgsl")),
};
const BACKWARD: Source = Source {
    name: "attention backward",
    text: concat!(include_str!("seen.wgsli"), include_str!("backward.wgsl")),
};

/// Memory of a group that rows may take. Taken: what every GPU must offer that is used at all, less what
/// the prelude declares.
const GROUP_BYTES: usize = 30 << 10;

/// Floats of workspace of forward.
pub fn forward_floats(_: Sizes, _: Attention<'_>) -> usize {
    0
}

/// Floats of workspace of backward: a number for each query and head.
pub fn backward_floats(sizes: Sizes, _: Attention<'_>) -> usize {
    sizes.samples * sizes.queries * sizes.heads
}

pub fn forward(
    gpu: &Gpu,
    sizes: Sizes,
    how: Attention<'_>,
    [q, k, v]: [&Tensor; 3],
    [out, statistics]: [&mut Tensor; 2],
    _: &mut Tensor,
) {
    let rows = rows(sizes, 2, 1);
    let tensors =
        arguments![q, k, v, out, statistics, how.key_lengths, how.first_keys, how.relative];
    let arguments = [&tensors[..], &shape(sizes, how)].concat();
    let groups = sizes.queries.div_ceil(rows) * sizes.heads * sizes.samples;
    gpu.launch(&KERNELS, "attention", &variant(sizes, rows), groups, &arguments);
}

pub fn backward(
    gpu: &Gpu,
    sizes: Sizes,
    (how, _): (Attention<'_>, Kind),
    inputs: Inputs<'_>,
    slots: &mut [Slot],
    delta: &mut Tensor,
) {
    let Inputs { q, k, v, out, gradient, denominators } = inputs;
    let Sizes { samples, queries, keys, heads, kv_heads, .. } = sizes;
    let (n, rows) = (samples * queries * heads, rows(sizes, 4, 2));
    let variant = variant(sizes, rows);
    let arguments = arguments![
        out,
        gradient,
        &mut *delta,
        n,
        queries,
        heads,
        how.key_lengths,
        how.first_keys,
        how.relative,
        keys,
        how.is_causal
    ];
    gpu.launch(&KERNELS, "attention_delta", &variant, singles(n), &arguments);
    let [dq, dk, dv] = slots else { unreachable!("one for each of q, k and v") };
    let read = arguments![q, k, v, gradient, denominators, &*delta];
    let seen = arguments![how.key_lengths, how.first_keys, how.relative];
    let shape = shape(sizes, how);
    let written = arguments![&mut dk.tensor, &mut dv.tensor];
    let add = arguments![dk.add, dv.add];
    let groups = keys.div_ceil(rows) * kv_heads * samples;
    let arguments = [&read[..], &written, &seen, &add, &shape].concat();
    gpu.launch(&BACKWARD, "attention_dkv", &variant, groups, &arguments);
    let (written, add) = (arguments![&mut dq.tensor], arguments![dq.add]);
    let groups = queries.div_ceil(rows) * heads * samples;
    let arguments = [&read[..], &written, &seen, &add, &shape].concat();
    gpu.launch(&BACKWARD, "attention_dq", &variant, groups, &arguments);
}

/// What all kernels are told last.
fn shape(sizes: Sizes, how: Attention<'_>) -> [Argument<'static>; 6] {
    let Sizes { queries, keys, heads, kv_heads, scale, .. } = sizes;
    arguments![queries, keys, heads, kv_heads, scale, how.is_causal]
}

fn variant(sizes: Sizes, rows: usize) -> Variant {
    Variant::of(&[sizes.dtype]).with("D", sizes.d).with("T", rows)
}

/// Rows of a block, of which `blocks` lie in shared memory beside `squares` of their products.
fn rows(sizes: Sizes, blocks: usize, squares: usize) -> usize {
    let bytes = |rows: usize| {
        (blocks * rows * (sizes.d + 1) + squares * rows * (rows + 1)) * size_of::<f32>()
    };
    let fits = |rows: &usize| bytes(*rows) <= GROUP_BYTES;
    [32, 16, 8, 4, 2].into_iter().find(fits).unwrap_or(1)
}
