//! Layer norm against its formula.

use crate::testing::{Dual, Input, check, check_gpu, device, expect_not_hidden, for_random_sizes};
use crate::{Dtype, Params, Tape, Var};

const EPSILON: f64 = 1e-5;

/// Rows brought to mean 0 and variance 1.
pub fn normalised(x: &[Dual], width: usize, epsilon: f64) -> Vec<Dual> {
    let mean = |row: &[Dual]| row.iter().copied().sum::<Dual>() * (1.0 / width as f64);
    x.chunks(width)
        .flat_map(|row| {
            let center = mean(row);
            let squares: Vec<Dual> = row.iter().map(|x| (*x - center) * (*x - center)).collect();
            let deviation = (mean(&squares) + Dual::from(epsilon)).sqrt();
            row.iter().map(move |x| (*x - center) / deviation)
        })
        .collect()
}

#[test]
fn modulated_by_vectors_of_each_sample() {
    check_modulated([2, 3, 7]);
    check_modulated([3, 2, 33]);
    // More rows than one sum is made of.
    check_modulated([2, 70, 2]);
    for_random_sizes(6, [3, 4, 20], |[samples, tokens, width]| {
        check_modulated([samples, tokens, width + 3]);
    });
}

fn check_modulated([samples, tokens, width]: [usize; 3]) {
    let x = Input::normal([samples, tokens, width], 1).scaled(2.0);
    let vectors = Input::normal([samples, 3 * width], 2).scaled(0.5);
    check(
        &[x, vectors],
        16.0,
        &|tape, v| tape.norm_modulate(&v[0], v[1].chunk(2), v[1].chunk(0), EPSILON as f32),
        &|v| {
            let of = |sample: usize, index: usize| &v[1][(sample * 3 + index) * width..][..width];
            let rows = normalised(&v[0], width, EPSILON);
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

#[test]
fn with_weight_and_bias() {
    let x = Input::normal([4, 9], 1);
    let (weight, bias) = (Input::normal([9], 2).f32(), Input::normal([9], 3).f32());
    check(
        &[x, weight, bias],
        16.0,
        &|tape, v| tape.layer_norm(&v[0], Some(&v[1]), Some(&v[2]), EPSILON as f32),
        &|v| {
            let rows = normalised(&v[0], 9, EPSILON).into_iter();
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
        &|v| normalised(&v[0], 10, EPSILON),
    );
}

#[test]
fn nan_is_not_hidden() {
    expect_not_hidden([3, 8], |tape, x| tape.layer_norm(x, None, None, 1e-6));
}

#[test]
fn nothing_gives_nothing() {
    let (device, params) = (device(), Params::default());
    let tape = Tape::inference(&device, &params, 0);
    let zeros = |sizes: &[usize]| -> Var {
        device.zeros(crate::Shape::new(sizes), Dtype::F32).unwrap().into()
    };
    let (x, vectors) = (zeros(&[2, 0, 4]), zeros(&[2, 8]));
    let y = tape.norm_modulate(&x, vectors.chunk(0), vectors.chunk(1), 1e-6).unwrap();
    assert_eq!(y.shape(), x.shape());
    let y = tape.gated_add(&x, vectors.chunk(1), &x).unwrap();
    assert_eq!(y.shape(), x.shape());
}

#[test]
fn what_does_not_fit_is_said() {
    let (device, params) = (device(), Params::default());
    let tape = Tape::inference(&device, &params, 0);
    let zeros = |sizes: &[usize]| -> Var {
        device.zeros(crate::Shape::new(sizes), Dtype::F32).unwrap().into()
    };
    let (x, vectors) = (zeros(&[2, 3, 4]), zeros(&[2, 8]));
    let message =
        |scale, shift| tape.norm_modulate(&x, scale, shift, 1e-6).err().unwrap().to_string();
    let error = message(vectors.chunk(0), vectors.chunk(2));
    assert_eq!(error, "norm_modulate: index 2 is out of range, there are 2 chunks");
    let short = zeros(&[1, 8]);
    let error = message(short.chunk(0), vectors.chunk(1));
    assert_eq!(error, "norm_modulate: scale has shape [1, 8], expected [2, 8]");
    let odd = zeros(&[2, 6]);
    let error = message(odd.chunk(0), vectors.chunk(1));
    assert_eq!(error, "norm_modulate: scale 6 is not a multiple of 4");
}

#[test]
fn a_gpu_agrees_with_the_cpu_on_wide_rows() {
    for width in [512, 1000, 1536, 8200] {
        let x = Input::normal([2, 3, width], 1).scaled(2.0);
        let vectors = Input::normal([2, 2 * width], 2).scaled(0.5);
        check_gpu(&[x.clone(), vectors], 16.0, &|tape, v| {
            tape.norm_modulate(&v[0], v[1].chunk(1), v[1].chunk(0), EPSILON as f32)
        });
        let [weight, bias] = [3, 4].map(|seed| Input::normal([width], seed).f32());
        check_gpu(&[x, weight, bias], 16.0, &|tape, v| {
            tape.layer_norm(&v[0], Some(&v[1]), Some(&v[2]), EPSILON as f32)
        });
    }
}

#[test]
fn a_gpu_agrees_with_the_cpu_on_many_rows() {
    let (x, vectors) = (Input::normal([2, 8300, 9], 1), Input::normal([2, 18], 2));
    check_gpu(&[x, vectors], 16.0, &|tape, v| {
        tape.norm_modulate(&v[0], v[1].chunk(1), v[1].chunk(0), EPSILON as f32)
    });
    let (x, weight) = (Input::normal([16_500, 8], 1), Input::normal([8], 2).f32());
    check_gpu(&[x, weight], 16.0, &|tape, v| tape.rms_norm(&v[0], Some(&v[1]), EPSILON as f32));
}
