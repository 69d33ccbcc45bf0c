//! Prodigy on the CPU: two loops over pieces of all parameters, and d between them.

use rayon::prelude::*;

use super::super::cpu::{ParamPiece, param_pieces, scale};
use super::{GradClip, ProdigyState, ProdigyUpdate};
use crate::Tensor;
use crate::cpu::CpuBackend;
use crate::cpu::rows::LANES;
use crate::cpu::simd::simd;

pub fn prodigy(
    cpu: &CpuBackend,
    params: &mut [Tensor],
    gradients: &[Option<&Tensor>],
    state: &mut [ProdigyState],
    distance: &mut Tensor,
    update: ProdigyUpdate,
    clip: Option<&GradClip>,
) {
    let Some(scale) = scale(update.scale, clip) else { return };
    let update = ProdigyUpdate { scale, ..update };
    let state = state
        .iter_mut()
        .map(|ProdigyState { first, second, start, sum }| [first, second, start, sum]);
    let mut pieces = param_pieces(params, gradients, state);
    let estimates = distance.data_mut::<f32>();
    let d = estimates[0];
    let sums: Vec<[f64; 2]> = cpu
        .install(|| pieces.par_iter_mut().map(|piece| update_moments(update, d, piece)).collect());
    let [dot, denominator] =
        sums.iter().fold([0.0; 2], |all, sums| [all[0] + sums[0], all[1] + sums[1]]);
    if !update.grow(estimates, dot, denominator) {
        return;
    }
    let next = estimates[0];
    cpu.install(|| {
        pieces.into_par_iter().for_each(
            |ParamPiece { param, state: [first, second, ..], .. }| {
                update_params(update, d, next, param, first, second);
            },
        );
    });
}

impl ProdigyUpdate {
    /// The next d from the sums of all parameters; whether there was a gradient that is not zero.
    fn grow(&self, estimates: &mut [f32], dot: f64, denominator: f64) -> bool {
        let d = f64::from(estimates[0]);
        (estimates[2], estimates[3]) = (denominator as f32, estimates[0]);
        if denominator == 0.0 {
            return false;
        }
        let added = d / f64::from(self.d0) * d * f64::from(self.rate) * dot;
        let numerator = f64::from(self.keeps) * f64::from(estimates[1]) + added;
        estimates[1] = numerator as f32;
        estimates[0] = d.max(f64::from(self.d_coef) * numerator / denominator) as f32;
        true
    }
}

simd! {
    /// Updates all but the parameters; returns the sums of g·(p₀ - p) and of |s|.
    fn update_moments(update: ProdigyUpdate, d: f32, piece: &mut ParamPiece<'_, 4>) -> [f64; 2] {
        let ParamPiece { param, gradient, state: [first, second, start, sum] } = piece;
        let (news, squares) = (update.means[1] * d, update.squares[1] * d * d);
        let along = d / update.d0 * d * update.sum_rate;
        let moments = first.iter_mut().zip(&mut **second).zip(&mut **sum);
        for (gradient, ((first, second), sum)) in gradient.iter().zip(moments) {
            let gradient = gradient * update.scale;
            *first = *first * update.means[0] + gradient * news;
            *second = *second * update.squares[0] + gradient * gradient * squares;
            *sum = *sum * update.keeps + gradient * along;
        }
        let (mut dots, mut sizes) = ([0.0f64; LANES], [0.0f64; LANES]);
        let moved = start.chunks(LANES).zip(param.chunks(LANES)).zip(gradient.chunks(LANES));
        for (((start, param), gradient), sum) in moved.zip(sum.chunks(LANES)) {
            let lanes = start.iter().zip(param).zip(gradient).zip(sum);
            for ((((start, param), gradient), sum), (dot, size)) in
                lanes.zip(dots.iter_mut().zip(&mut sizes))
            {
                *dot += f64::from(gradient * update.scale) * f64::from(start - param);
                *size += f64::from(sum.abs());
            }
        }
        [dots.iter().sum(), sizes.iter().sum()]
    }

    fn update_params(
        update: ProdigyUpdate,
        d: f32,
        next: f32,
        params: &mut [f32],
        first: &[f32],
        second: &[f32],
    ) {
        let (rate, epsilon) = (d * update.rate, next * update.epsilon);
        let shrinks = rate * update.decay;
        for ((param, first), second) in params.iter_mut().zip(first).zip(second) {
            *param -= *param * shrinks + rate * (first / (second.sqrt() + epsilon));
        }
    }
}
