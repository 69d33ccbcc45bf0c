//! Adafactor on a GPU, a parameter at a time.

use super::super::gpu::{SHARE, clip_args};
use super::{
    AdafactorTensors, AdafactorUpdate, CLIP_THRESHOLD, EPSILON_PARAMETER, EPSILON_SQUARE,
    FactoredMoments, GradClip, Matrices, columns_per_block,
};
use crate::gpu::{GpuArg, GpuBackend, GpuVariant, WgslSource, arguments, singles};

const KERNELS: WgslSource =
    WgslSource { name: "adafactor", text: include_str!("../adafactor.wgsl") };

/// Floats of workspace: two results, the mean of each matrix, two sums of each share.
pub fn floats(of: Matrices) -> usize {
    2 + of.n + 2 * of.elements().div_ceil(SHARE)
}

pub fn adafactor(
    gpu: &GpuBackend,
    AdafactorTensors { of, param, gradient, moments }: AdafactorTensors<'_>,
    update: AdafactorUpdate,
    clip: Option<&GradClip>,
) {
    let (n, FactoredMoments { rows, columns, sums }) = (of.elements(), moments);
    let launch = |kernel, groups, arguments: &[&[GpuArg<'_>]]| {
        gpu.launch(&KERNELS, kernel, &GpuVariant::default(), groups, &arguments.concat());
    };
    let AdafactorUpdate { scale, keeps, news, rate, decay, scale_parameter } = update;
    let ((norm, most), groups, place) = (clip_args(clip), n.div_ceil(SHARE), 2 + of.n);
    let share = arguments![keeps, news, EPSILON_SQUARE, most, scale];
    if let Some(columns) = &mut *columns {
        let tile = columns_per_block(of);
        let tensors = arguments![gradient, &mut *rows, norm, of.columns];
        launch("adafactor_rows", of.n * of.rows, &[&tensors, &share]);
        let tensors = arguments![gradient, columns, norm, of.rows, of.columns, tile];
        launch("adafactor_columns", of.n * of.columns.div_ceil(tile), &[&tensors, &share]);
        launch("adafactor_row_mean", of.n, &[&arguments![&*rows, &mut *sums, of.rows]]);
    } else {
        let tensors = arguments![gradient, &mut *rows, norm, n];
        launch("adafactor_whole", singles(n), &[&tensors, &share]);
    }
    let columns = columns.as_ref();
    let tensors = arguments![&*param, gradient, &*rows, columns, &mut *sums, norm];
    let sizes = arguments![of.rows, of.columns, n, SHARE, place, most, scale];
    launch("adafactor_squares", groups, &[&tensors, &sizes]);
    let sizes = arguments![&mut *sums, place, groups, n, rate, decay];
    let numbers = arguments![EPSILON_PARAMETER, CLIP_THRESHOLD, usize::from(scale_parameter)];
    launch("adafactor_length", 1, &[&sizes, &numbers]);
    let tensors = arguments![param, gradient, &*rows, columns, &*sums, norm];
    let sizes = arguments![of.rows, of.columns, n, most, scale];
    launch("adafactor_apply", singles(n), &[&tensors, &sizes]);
}
