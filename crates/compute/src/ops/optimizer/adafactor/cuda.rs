//! Adafactor on a GPU, a parameter at a time.

use super::super::cuda::{SHARE, clip_arguments};
use super::{
    AdafactorTensors, AdafactorUpdate, CLIP_THRESHOLD, EPSILON_PARAMETER, EPSILON_SQUARE,
    FactoredMoments, GradClip, Matrices, columns_per_block,
};
use crate::Dtype;
use crate::cuda::{CudaArg, CudaBackend, CudaSource, CudaVariant, LaunchConfig, arguments};

const KERNELS: CudaSource = CudaSource {
    name: "adafactor",
    text: concat!(include_str!("../tensors.cuh"), include_str!("../adafactor.cu")),
};

/// Floats of workspace: two sums in f64 of each share, two results, the mean of each matrix.
pub fn floats(of: Matrices) -> usize {
    4 * of.elements().div_ceil(SHARE) + 2 + of.n
}

pub fn adafactor(
    cuda: &CudaBackend,
    AdafactorTensors { of, param, gradient, moments }: AdafactorTensors<'_>,
    update: AdafactorUpdate,
    clip: Option<&GradClip>,
) {
    let (n, FactoredMoments { rows, columns, sums }) = (of.elements(), moments);
    let launch = |function, grid, arguments: &[&[CudaArg]]| {
        cuda.launch(&KERNELS, function, CudaVariant::of(&[Dtype::F32]), grid, &arguments.concat());
    };
    let blocks = n.div_ceil(SHARE);
    let partial = sums.address_mut();
    let length = partial + (2 * blocks * size_of::<f64>()) as u64;
    let mean = length + (2 * size_of::<f32>()) as u64;
    let AdafactorUpdate { scale, keeps, news, rate, decay, scale_parameter } = update;
    let clip = [&clip_arguments(clip)[..], &arguments![scale]].concat();
    let share = [&arguments![keeps, news, EPSILON_SQUARE][..], &clip].concat();
    if let Some(columns) = columns {
        let tile = columns_per_block(of);
        let grid = LaunchConfig::blocks(of.n * of.rows);
        launch("adafactor_rows", grid, &[&arguments![gradient, &mut *rows, of.columns], &share]);
        let grid = LaunchConfig::blocks(of.n * of.columns.div_ceil(tile));
        let sizes = arguments![gradient, &mut *columns, of.rows, of.columns, tile];
        launch("adafactor_columns", grid, &[&sizes, &share]);
        let arguments = arguments![&*rows, of.rows, mean];
        launch("adafactor_row_mean", LaunchConfig::blocks(of.n), &[&arguments]);
    } else {
        let arguments = arguments![gradient, &mut *rows, n];
        launch("adafactor_whole", LaunchConfig::per_element(n), &[&arguments, &share]);
    }
    let columns = columns.as_ref();
    let direction = arguments![gradient, &*rows, columns, mean, of.rows, of.columns];
    let rest = arguments![partial, n, SHARE];
    let param_read = arguments![&*param];
    let all = [&param_read[..], &direction, &rest, &clip];
    launch("adafactor_squares", LaunchConfig::blocks(blocks), &all);
    let numbers = arguments![rate, decay, EPSILON_PARAMETER, CLIP_THRESHOLD, scale_parameter];
    let arguments = arguments![partial, blocks, n, length];
    launch("adafactor_length", LaunchConfig::blocks(1), &[&arguments, &numbers]);
    let all = [&arguments![param][..], &direction, &arguments![length, n], &clip];
    launch("adafactor_apply", LaunchConfig::per_element(n), &all);
}
