//! Root-mean-square norm on a GPU.

use super::{Rows, Wanted};
use crate::Tensor;
use crate::backward::Slot;
use crate::gpu::columns::{Sum, statistics};
use crate::gpu::{Gpu, Source, THREADS, Variant, arguments, is_wide};

const KERNELS: Source = Source { name: "rms_norm", text: include_str!("kernel.wgsl") };

pub fn forward(gpu: &Gpu, x: &Tensor, weight: Option<&Tensor>, epsilon: f32, y: &mut Tensor) {
    let (rows, width) = (x.shape().rows(), x.shape().width());
    let variant =
        Variant::of(&[x.dtype()]).with("WIDE", is_wide(width, &[Some(x), weight, Some(y)]).into());
    let arguments = arguments![x, weight, y, rows, width, epsilon];
    gpu.launch(&KERNELS, "rms_norm", &variant, gpu.row_groups(rows, THREADS), &arguments);
}

pub fn backward(gpu: &Gpu, rows: Rows<'_>, wanted: Wanted<'_>, room: &mut Tensor) {
    if let Some(slot) = wanted.weight {
        weight_gradient(gpu, rows, room, slot);
    }
    if let Some(slot) = wanted.x {
        x_gradient(gpu, rows, slot);
    }
}

fn x_gradient(gpu: &Gpu, rows: Rows<'_>, slot: &mut Slot) {
    let Rows { x, weight, gradient, epsilon } = rows;
    let (rows, width, out) = (x.shape().rows(), x.shape().width(), &mut slot.tensor);
    let tensors = [Some(x), weight, Some(gradient), Some(&*out)];
    let variant =
        Variant::of(&[x.dtype(), out.dtype()]).with("WIDE", is_wide(width, &tensors).into());
    let arguments = arguments![x, weight, gradient, out, rows, width, epsilon, slot.add];
    gpu.launch(&KERNELS, "rms_norm_backward", &variant, gpu.row_groups(rows, THREADS), &arguments);
}

/// Σ gradient · x̂ over all rows.
fn weight_gradient(gpu: &Gpu, rows: Rows<'_>, room: &mut Tensor, slot: &mut Slot) {
    let Rows { x, gradient, epsilon, .. } = rows;
    statistics(gpu, x, epsilon, false, room);
    let rows_per_vector = x.shape().rows();
    let sum = Sum { a: gradient, b: Some(x), statistics: Some(room), rows_per_vector };
    sum.run(gpu, &mut slot.tensor, 0, slot.add);
}
