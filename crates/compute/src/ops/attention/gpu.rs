//! Attention on a GPU, in f32 whatever the dtype.

use super::{Attention, AttentionInputs, AttentionSizes};
use crate::Tensor;
use crate::backward::GradientSlot;
use crate::gpu::{GpuArg, GpuBackend, GpuVariant, WgslSource, arguments, is_wide};

const KERNELS: WgslSource = WgslSource {
    name: "attention",
    text: concat!(include_str!("shared.wgsli"), include_str!("kernel.wgsl")),
};
const BACKWARD: WgslSource = WgslSource {
    name: "attention backward",
    text: concat!(include_str!("shared.wgsli"), include_str!("backward.wgsl")),
};

/// Threads of a workgroup, and its queries or keys; as in the kernel source.
const THREADS: usize = 64;
const ROWS: usize = 64;
/// Columns of a workgroup's result: of forward and of the gradients of queries, and of those of keys and values.
const WIDEST: usize = 128;
const WIDEST_OF_KEYS: usize = 64;

pub fn forward(
    gpu: &GpuBackend,
    sizes: AttentionSizes,
    how: Attention<'_>,
    [q, k, v]: [&Tensor; 3],
    [out, statistics]: [&mut Tensor; 2],
) {
    let variant = variant(sizes, &[q, k, v, out], &[statistics]);
    let tensors =
        arguments![q, k, v, out, statistics, how.key_lengths, how.first_keys, how.relative_bias];
    let arguments = [&tensors[..], &shape(sizes, how)].concat();
    let groups = sizes.samples * sizes.heads * groups_of(sizes, sizes.queries, WIDEST);
    gpu.launch(&KERNELS, "attention", &variant, groups, &arguments);
}

pub fn backward(
    gpu: &GpuBackend,
    sizes: AttentionSizes,
    how: Attention<'_>,
    inputs: AttentionInputs<'_>,
    slots: &mut [GradientSlot],
) {
    let AttentionInputs { q, k, v, out, gradient, logsumexp: denominators } = inputs;
    let [dq, dk, dv] = slots else { unreachable!("one for each of q, k and v") };
    let tensors = [q, k, v, out, gradient, &dq.tensor, &dk.tensor, &dv.tensor];
    let variant = variant(sizes, &tensors, &[denominators]);
    let given = arguments![q, k, v, gradient, out, denominators];
    let results = arguments![&mut dq.tensor, &mut dk.tensor, &mut dv.tensor];
    let seen = arguments![how.key_lengths, how.first_keys, how.relative_bias];
    let adds = arguments![dq.add, dk.add, dv.add];
    let arguments = [&given[..], &results, &seen, &adds, &shape(sizes, how)].concat();
    let of_keys = sizes.kv_heads * groups_of(sizes, sizes.keys, WIDEST_OF_KEYS);
    let of_queries = sizes.heads * groups_of(sizes, sizes.queries, WIDEST);
    let groups = sizes.samples * (of_keys + of_queries);
    gpu.launch(&BACKWARD, "attention_backward", &variant, groups, &arguments);
}

/// How many workgroups have the rows of a head, of which each has so many columns.
fn groups_of(sizes: AttentionSizes, rows: usize, widest: usize) -> usize {
    rows.div_ceil(ROWS) * sizes.d.div_ceil(widest)
}

/// What all kernels are told last.
fn shape(sizes: AttentionSizes, how: Attention<'_>) -> [GpuArg<'static>; 6] {
    let AttentionSizes { queries, keys, heads, kv_heads, scale, .. } = sizes;
    arguments![queries, keys, heads, kv_heads, scale, how.is_causal]
}

/// For heads of these sizes, and what is known of queries.
fn variant(sizes: AttentionSizes, tensors: &[&Tensor], known: &[&Tensor]) -> GpuVariant {
    let is_wide = |width, tensors: &[&Tensor]| {
        is_wide(width, &tensors.iter().map(|tensor| Some(*tensor)).collect::<Vec<_>>())
    };
    let variant = GpuVariant::of(&[sizes.dtype]).with("THREADS", THREADS).with("D", sizes.d);
    let variant = variant.with("WIDE", is_wide(sizes.d, tensors).into());
    variant.with("KNOWN_WIDE", is_wide(sizes.queries, known).into())
}
