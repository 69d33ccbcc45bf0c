//! Norm and rotation on a GPU.

use super::{QkNormRopeConfig, RopePairs};
use crate::backward::GradientSlot;
use crate::cuda::columns::CudaColumnSum;
use crate::cuda::{CudaArg, CudaBackend, CudaSource, CudaVariant, LaunchConfig, arguments, pack};
use crate::{Dtype, Tensor};

const KERNELS: CudaSource = CudaSource { name: "qk_norm_rope", text: include_str!("kernel.cu") };
/// The same two kernels for heads that several threads share.
const PACKED: CudaSource =
    CudaSource { name: "qk_norm_rope packed", text: include_str!("packed.cu") };

pub fn forward(
    cuda: &CudaBackend,
    x: &Tensor,
    weight: Option<&Tensor>,
    form: &QkNormRopeConfig,
    y: &mut Tensor,
) {
    let CudaHeadArgs { n, rest } = CudaHeadArgs::new(x, form);
    let table = form.rope.as_ref().map(|(table, _)| table);
    let way = QkNormRopeLaunch::new(form, [Some(x), weight, table, Some(y)], n);
    let arguments = [&arguments![x, weight, table, y][..], &rest].concat();
    way.launch(cuda, "qk_norm_rope", x.dtype(), &arguments);
}

/// Turns the gradient of the result into that of x, in place; the norm needs x and its weight.
pub fn backward(
    cuda: &CudaBackend,
    norm: Option<&(Tensor, Tensor)>,
    form: &QkNormRopeConfig,
    gradient: &mut Tensor,
) {
    let CudaHeadArgs { n, rest } = CudaHeadArgs::new(gradient, form);
    let dtype = gradient.dtype();
    let (x, weight) = norm.map(|(x, weight)| (x, weight)).unzip();
    let table = form.rope.as_ref().map(|(table, _)| table);
    let way = QkNormRopeLaunch::new(form, [x, weight, table, Some(gradient)], n);
    let arguments = [&arguments![x, weight, table, gradient][..], &rest].concat();
    way.launch(cuda, "qk_norm_rope_backward", dtype, &arguments);
}

/// Which kernels, and how many threads.
struct QkNormRopeLaunch {
    source: &'static CudaSource,
    pack: usize,
    size: usize,
    grid: LaunchConfig,
}

impl QkNormRopeLaunch {
    fn new(form: &QkNormRopeConfig, tensors: [Option<&Tensor>; 4], n: usize) -> Self {
        let d = form.head_width;
        let tensors: Vec<&Tensor> = tensors.into_iter().flatten().collect();
        let is_whole = form.rope.is_none() || form.rotary_width() == d;
        let is_fit = is_whole && d.is_power_of_two() && (16..=256).contains(&d);
        let pack = pack(d, &tensors);
        let is_counted = u32::try_from(n * d).is_ok();
        if pack > 1 && is_fit && is_counted && n > 0 {
            return Self {
                source: &PACKED,
                pack,
                size: d,
                grid: LaunchConfig::per_element(n * d / pack),
            };
        }
        Self { source: &KERNELS, pack: 1, size: 0, grid: LaunchConfig::per_row(n) }
    }

    fn launch(&self, cuda: &CudaBackend, name: &'static str, dtype: Dtype, arguments: &[CudaArg]) {
        let variant =
            CudaVariant { size: self.size, ..CudaVariant::of(&[dtype]).with_pack(self.pack) };
        cuda.launch(self.source, name, variant, self.grid, arguments);
    }
}

/// Σ gradient · x̂ over the heads of all rows, the gradient turned back.
pub fn weight_gradient(
    cuda: &CudaBackend,
    x: &Tensor,
    gradient: &Tensor,
    form: &QkNormRopeConfig,
    partial: &mut Tensor,
    slot: &mut GradientSlot,
) {
    let rest = CudaHeadArgs::new(x, form).rest;
    let blocks = partial.shape().rows();
    let table = form.rope.as_ref().map(|(table, _)| table);
    let arguments = [&arguments![x, gradient, table, &mut *partial][..], &rest].concat();
    let variant = CudaVariant::of(&[x.dtype()]);
    let grid = LaunchConfig { threads: 32, ..LaunchConfig::blocks(blocks) };
    cuda.launch(&KERNELS, "qk_weight_backward", variant, grid, &arguments);
    let sum = CudaColumnSum { a: partial, b: None, statistics: None, rows_per_vector: blocks };
    sum.run(cuda, &mut slot.tensor, 0, slot.add);
}

/// How many heads there are, and what all kernels are told last.
struct CudaHeadArgs {
    n: usize,
    rest: [CudaArg; 7],
}

impl CudaHeadArgs {
    fn new(x: &Tensor, form: &QkNormRopeConfig) -> Self {
        let d = form.head_width;
        let (n, per_row) = (x.shape().elements() / d.max(1), x.shape().width() / d.max(1));
        let (table_rows, pairs) = match &form.rope {
            Some((table, pairs)) => (table.shape().rows(), *pairs),
            None => (1, RopePairs::Interleaved),
        };
        let half_split = pairs == RopePairs::HalfSplit;
        let rotary = form.rotary_width();
        Self { n, rest: arguments![n, d, per_row, table_rows, rotary, half_split, form.epsilon] }
    }
}
