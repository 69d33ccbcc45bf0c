//! Layer norm against its formula.

use crate::testing::{Dual, Input, check};

const EPSILON: f64 = 1e-5;

/// Rows brought to mean 0 and variance 1.
pub fn normalised(x: &[Dual], width: usize) -> Vec<Dual> {
    let mean = |row: &[Dual]| row.iter().copied().sum::<Dual>() * (1.0 / width as f64);
    x.chunks(width)
        .flat_map(|row| {
            let center = mean(row);
            let squares: Vec<Dual> = row.iter().map(|x| (*x - center) * (*x - center)).collect();
            let deviation = (mean(&squares) + Dual::from(EPSILON)).sqrt();
            row.iter().map(move |x| (*x - center) / deviation)
        })
        .collect()
}

#[test]
fn modulated_by_vectors_of_each_sample() {
    for (samples, tokens, width) in [(2, 3, 7), (1, 1, 4), (3, 2, 33)] {
        let x = Input::normal([samples, tokens, width], 1).scaled(2.0);
        let vectors = Input::normal([samples, 3 * width], 2).scaled(0.5);
        check(
            &[x, vectors],
            16.0,
            &|tape, v| tape.norm_modulate(&v[0], v[1].chunk(2), v[1].chunk(0), EPSILON as f32),
            &|v| {
                let of =
                    |sample: usize, index: usize| &v[1][(sample * 3 + index) * width..][..width];
                let rows = normalised(&v[0], width);
                let rows = rows.chunks(width).enumerate();
                rows.flat_map(|(row, x)| {
                    let (scale, shift) = (of(row / tokens, 2), of(row / tokens, 0));
                    x.iter()
                        .zip(scale)
                        .zip(shift)
                        .map(|((x, scale), shift)| *x * (Dual::from(1.0) + *scale) + *shift)
                })
                .collect()
            },
        );
    }
}

#[test]
fn with_weight_and_bias() {
    let x = Input::normal([4, 9], 1);
    let (weight, bias) = (Input::normal([9], 2).f32(), Input::normal([9], 3).f32());
    check(
        &[x, weight, bias],
        16.0,
        &|tape, v| tape.layer_norm(&v[0], Some(&v[1]), Some(&v[2]), EPSILON as f32),
        &|v| {
            let rows = normalised(&v[0], 9).into_iter();
            let rows = rows.zip(v[1].iter().cycle()).zip(v[2].iter().cycle());
            rows.map(|((x, weight), bias)| x * *weight + *bias).collect()
        },
    );
}

#[test]
fn with_neither() {
    check(
        &[Input::normal([4, 10], 1)],
        16.0,
        &|tape, v| tape.layer_norm(&v[0], None, None, EPSILON as f32),
        &|v| normalised(&v[0], 10),
    );
}
