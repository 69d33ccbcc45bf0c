//! Norm and rotation on a GPU.

use super::{QkNormRopeConfig, RopePairs};
use crate::backward::GradientSlot;
use crate::gpu::columns::GpuColumnSum;
use crate::gpu::{GpuArg, GpuBackend, GpuVariant, WgslSource, arguments};

use crate::{Dtype, Tensor};

/// Threads of a workgroup: heads of its rows of threads lie in its memory, one for each thread on a CPU.
fn threads(gpu: &GpuBackend) -> usize {
    if gpu.is_software() { 16 } else { crate::gpu::THREADS }
}

const KERNELS: WgslSource = WgslSource { name: "qk_norm_rope", text: include_str!("kernel.wgsl") };

pub fn forward(
    gpu: &GpuBackend,
    x: &Tensor,
    weight: Option<&Tensor>,
    form: &QkNormRopeConfig,
    y: &mut Tensor,
) {
    let GpuHeadArgs { n, rest } = GpuHeadArgs::new(x, form);
    let table = form.rope.as_ref().map(|(table, _)| table);
    let arguments = [&arguments![x, weight, table, y, n][..], &rest].concat();
    let variant = variant(gpu, x.dtype(), form);
    gpu.launch(&KERNELS, "qk_norm_rope", &variant, gpu.row_groups(n, threads(gpu)), &arguments);
}

/// Turns the gradient of the result into that of x, in place; the norm needs x and its weight, whose gradient is
/// found on the way if it is wanted: sums over shares of the heads, and then over all.
pub fn backward(
    gpu: &GpuBackend,
    norm: Option<&(Tensor, Tensor)>,
    form: &QkNormRopeConfig,
    gradient: &mut Tensor,
    of_weight: Option<(&mut Tensor, &mut GradientSlot)>,
) {
    // Heads without numbers have no weights.
    if form.head_width == 0 {
        return;
    }
    let GpuHeadArgs { n, rest } = GpuHeadArgs::new(gradient, form);
    let (x, weight) = norm.map(|(x, weight)| (x, weight)).unzip();
    let table = form.rope.as_ref().map(|(table, _)| table);
    let variant = variant(gpu, gradient.dtype(), form);
    let (mut partial, slot) = of_weight.unzip();
    let groups = match &partial {
        Some(partial) => partial.shape().rows(),
        None => gpu.row_groups(n, threads(gpu)),
    };
    let share = n.div_ceil(groups.max(1));
    let tensors = arguments![x, weight, table, gradient, partial.as_deref_mut()];
    let arguments = [&tensors[..], &arguments![n, share], &rest].concat();
    gpu.launch(&KERNELS, "qk_norm_rope_backward", &variant, groups, &arguments);
    if let (Some(partial), Some(slot)) = (partial, slot) {
        let sum = GpuColumnSum { a: partial, b: None, rows_per_vector: partial.shape().rows() };
        sum.run(gpu, &mut slot.tensor, 0, slot.add);
    }
}

fn variant(gpu: &GpuBackend, dtype: Dtype, form: &QkNormRopeConfig) -> GpuVariant {
    GpuVariant::of(&[dtype]).with("D", form.head_width).with("THREADS", threads(gpu))
}

/// How many heads there are, and what all kernels are told last.
struct GpuHeadArgs {
    n: usize,
    rest: [GpuArg<'static>; 5],
}

impl GpuHeadArgs {
    fn new(x: &Tensor, form: &QkNormRopeConfig) -> Self {
        let d = form.head_width.max(1);
        let (n, per_row) = (x.shape().elements() / d, x.shape().width() / d);
        let (table_rows, pairs) = match &form.rope {
            Some((table, pairs)) => (table.shape().rows(), *pairs),
            None => (1, RopePairs::Interleaved),
        };
        let half_split = pairs == RopePairs::HalfSplit;
        let rotary = form.rotary_width();
        Self { n, rest: arguments![per_row, table_rows, rotary, half_split, form.epsilon] }
    }
}
