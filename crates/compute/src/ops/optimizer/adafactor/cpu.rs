//! Adafactor on the CPU: parameters beside each other, and each in pieces of fixed size.

use rayon::prelude::*;

use super::super::cpu::{GRAIN, scale};
use super::{
    AdafactorUpdate, CLIP_THRESHOLD, EPSILON_PARAMETER, EPSILON_SQUARE, FactoredMoments, GradClip,
    Matrices,
};
use crate::Tensor;
use crate::cpu::CpuBackend;
use crate::cpu::simd::simd;
use crate::cpu::sums::squares;

/// Columns that a task sums up: as many as a few cache lines hold.
const COLUMNS: usize = 64;

pub fn adafactor(
    cpu: &CpuBackend,
    params: &mut [Tensor],
    gradients: &[Option<&Tensor>],
    state: &mut [FactoredMoments],
    update: AdafactorUpdate,
    clip: Option<&GradClip>,
) {
    let Some(scale) = scale(update.scale, clip) else { return };
    let update = AdafactorUpdate { scale, ..update };
    let all = params.iter_mut().zip(gradients).zip(state);
    let all = all.filter_map(|((param, gradient), FactoredMoments { rows, columns, .. })| {
        let of = Matrices::of(param.shape());
        let columns = columns.as_mut().map(Tensor::data_mut::<f32>);
        let (param, gradient) = (param.data_mut::<f32>(), (*gradient)?.data::<f32>());
        Some(AdafactorParam { of, param, gradient, rows: rows.data_mut::<f32>(), columns })
    });
    let all: Vec<_> = all.filter(|param| param.of.elements() > 0).collect();
    cpu.install(|| all.into_par_iter().for_each(|param| param.step(update)));
}

struct AdafactorParam<'a> {
    of: Matrices,
    param: &'a mut [f32],
    gradient: &'a [f32],
    rows: &'a mut [f32],
    columns: Option<&'a mut [f32]>,
}

impl AdafactorParam<'_> {
    fn step(self, update: AdafactorUpdate) {
        let Self { of, param, gradient, rows, columns } = self;
        let Some(columns) = columns else {
            let pieces = rows.par_chunks_mut(GRAIN).zip(gradient.par_chunks(GRAIN));
            pieces.for_each(|(second, gradient)| update_whole(update, second, gradient));
            let second = &*rows;
            let direction = |piece: usize, along: &mut [f32]| {
                let at = piece * GRAIN..piece * GRAIN + along.len();
                divide_whole(update.scale, &gradient[at.clone()], &second[at], along);
            };
            return apply(update, param, GRAIN, direction);
        };
        update_rows(update, of, gradient, rows);
        update_columns(update, of, gradient, columns);
        let mean = |rows: &[f32]| rows.iter().map(|row| f64::from(*row)).sum::<f64>();
        let means: Vec<f32> =
            rows.chunks(of.rows).map(|rows| (mean(rows) / of.rows as f64) as f32).collect();
        let (rows, columns) = (&*rows, &*columns);
        let direction = |row: usize, along: &mut [f32]| {
            let matrix = row / of.rows;
            let columns = &columns[matrix * of.columns..][..of.columns];
            let gradient = &gradient[row * of.columns..][..of.columns];
            let factor = update.scale / (rows[row] / means[matrix]).sqrt();
            divide_row(factor, gradient, columns, along);
        };
        apply(update, param, of.columns, direction);
    }
}

fn update_rows(update: AdafactorUpdate, of: Matrices, gradient: &[f32], rows: &mut [f32]) {
    let lines = rows.par_iter_mut().zip(gradient.par_chunks(of.columns));
    let lines = lines.with_min_len((GRAIN / of.columns).max(1));
    lines.for_each(|(mean, gradient)| {
        let scale = f64::from(update.scale);
        let square = scale * scale * squares(gradient) / of.columns as f64;
        *mean = update.mean(*mean, square as f32 + EPSILON_SQUARE);
    });
}

fn update_columns(update: AdafactorUpdate, of: Matrices, gradient: &[f32], columns: &mut [f32]) {
    let matrices = columns.par_chunks_mut(of.columns).enumerate();
    matrices.for_each(|(matrix, columns)| {
        let gradient = &gradient[matrix * of.rows * of.columns..][..of.rows * of.columns];
        columns.par_chunks_mut(COLUMNS).enumerate().for_each(|(block, columns)| {
            let mut sums = [0.0; COLUMNS];
            let sums = &mut sums[..columns.len()];
            for row in gradient.chunks(of.columns) {
                add_squares(&row[block * COLUMNS..][..sums.len()], sums);
            }
            let scale = f64::from(update.scale);
            for (mean, sum) in columns.iter_mut().zip(sums) {
                let square = scale * scale * *sum / of.rows as f64;
                *mean = update.mean(*mean, square as f32 + EPSILON_SQUARE);
            }
        });
    });
}

/// Steps along a direction, of which `direction` gives the piece of a number. It is found twice: its size comes first, and
/// storing it would take as much memory as the parameter.
fn apply(
    update: AdafactorUpdate,
    param: &mut [f32],
    piece: usize,
    direction: impl Fn(usize, &mut [f32]) + Sync,
) {
    let n = param.len() as f64;
    let at_once = (GRAIN / piece).max(1);
    let sums = param.par_chunks(piece).enumerate().with_min_len(at_once).map_init(
        || vec![0.0; piece],
        |along, (index, param)| {
            let along = &mut along[..param.len()];
            direction(index, along);
            [squares(along), if update.scale_parameter { squares(param) } else { 0.0 }]
        },
    );
    let sums: Vec<[f64; 2]> = sums.collect();
    let rms = |of: usize| (sums.iter().map(|sums| sums[of]).sum::<f64>() / n).sqrt() as f32;
    let rate =
        update.rate * if update.scale_parameter { rms(1).max(EPSILON_PARAMETER) } else { 1.0 };
    let (shrinks, rate) = (rate * update.decay, rate / (rms(0) / CLIP_THRESHOLD).max(1.0));
    param.par_chunks_mut(piece).enumerate().with_min_len(at_once).for_each_init(
        || vec![0.0; piece],
        |along, (index, param)| {
            let along = &mut along[..param.len()];
            direction(index, along);
            for (param, along) in param.iter_mut().zip(along) {
                *param -= *param * shrinks + rate * *along;
            }
        },
    );
}

impl AdafactorUpdate {
    #[inline(always)]
    fn mean(&self, before: f32, square: f32) -> f32 {
        before * self.keeps + square * self.news
    }
}

simd! {
    fn update_whole(update: AdafactorUpdate, second: &mut [f32], gradient: &[f32]) {
        for (second, gradient) in second.iter_mut().zip(gradient) {
            let gradient = gradient * update.scale;
            *second = update.mean(*second, gradient * gradient + EPSILON_SQUARE);
        }
    }

    fn divide_whole(scale: f32, gradient: &[f32], second: &[f32], along: &mut [f32]) {
        for ((along, gradient), second) in along.iter_mut().zip(gradient).zip(second) {
            *along = gradient * scale / second.sqrt();
        }
    }

    fn divide_row(factor: f32, gradient: &[f32], columns: &[f32], along: &mut [f32]) {
        for ((along, gradient), column) in along.iter_mut().zip(gradient).zip(columns) {
            *along = gradient * factor / column.sqrt();
        }
    }

    fn add_squares(row: &[f32], sums: &mut [f64]) {
        for (sum, value) in sums.iter_mut().zip(row) {
            *sum += f64::from(*value) * f64::from(*value);
        }
    }
}
