//! Attention on a GPU, in f32 whatever the format.

use super::{Attention, Inputs, Sizes};
use crate::Tensor;
use crate::backward::Slot;
use crate::device::Kind;
use crate::gpu::{Argument, Gpu, Source, Variant, arguments, is_wide};

const KERNELS: Source = Source {
    name: "attention",
    text: concat!(include_str!("shared.wgsli"), include_str!("kernel.wgsl")),
};
const BACKWARD: Source = Source {
    name: "attention backward",
    text: concat!(include_str!("shared.wgsli"), include_str!("backward.wgsl")),
};

/// Threads of a group, and its queries or keys; as in the texts.
const THREADS: usize = 64;
const ROWS: usize = 64;
/// Columns of a group's result: of forward and of the gradients of queries, and of those of keys and values.
const WIDEST: usize = 128;
const WIDEST_OF_KEYS: usize = 64;

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
    let variant = variant(sizes, &[q, k, v, out], &[statistics]);
    let tensors =
        arguments![q, k, v, out, statistics, how.key_lengths, how.first_keys, how.relative];
    let arguments = [&tensors[..], &shape(sizes, how)].concat();
    gpu.launch(&KERNELS, "attention", &variant, query_groups(sizes), &arguments);
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
    let [dq, dk, dv] = slots else { unreachable!("one for each of q, k and v") };
    let tensors = [q, k, v, out, gradient, &dq.tensor, &dk.tensor, &dv.tensor];
    let variant = variant(sizes, &tensors, &[denominators, delta]);
    let seen = arguments![how.key_lengths, how.first_keys, how.relative];
    let shape = shape(sizes, how);
    let tensors = arguments![q, k, v, gradient, denominators, &mut *delta, &mut dq.tensor, out];
    let arguments = [&tensors[..], &seen, &arguments![dq.add], &shape].concat();
    gpu.launch(&BACKWARD, "attention_dq", &variant, query_groups(sizes), &arguments);
    let tensors =
        arguments![q, k, v, gradient, denominators, &*delta, &mut dk.tensor, &mut dv.tensor];
    let arguments = [&tensors[..], &seen, &arguments![dk.add, dv.add], &shape].concat();
    let across = sizes.d.div_ceil(WIDEST_OF_KEYS);
    let groups = sizes.keys.div_ceil(ROWS) * sizes.kv_heads * sizes.samples * across;
    gpu.launch(&BACKWARD, "attention_dkv", &variant, groups, &arguments);
}

fn query_groups(sizes: Sizes) -> usize {
    let across = sizes.d.div_ceil(WIDEST);
    sizes.queries.div_ceil(ROWS) * sizes.heads * sizes.samples * across
}

/// What all kernels are told last.
fn shape(sizes: Sizes, how: Attention<'_>) -> [Argument<'static>; 6] {
    let Sizes { queries, keys, heads, kv_heads, scale, .. } = sizes;
    arguments![queries, keys, heads, kv_heads, scale, how.is_causal]
}

/// For heads of these sizes, and what is known of queries.
fn variant(sizes: Sizes, tensors: &[&Tensor], known: &[&Tensor]) -> Variant {
    let is_wide = |width, tensors: &[&Tensor]| {
        is_wide(width, &tensors.iter().map(|tensor| Some(*tensor)).collect::<Vec<_>>())
    };
    let variant = Variant::of(&[sizes.dtype]).with("THREADS", THREADS).with("D", sizes.d);
    let variant = variant.with("WIDE", is_wide(sizes.d, tensors).into());
    variant.with("KNOWN_WIDE", is_wide(sizes.queries, known).into())
}
