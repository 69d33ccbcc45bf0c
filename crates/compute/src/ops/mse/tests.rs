//! The mean cost of errors against its formula.

use super::{ErrorLoss, ErrorWeights};
use crate::testing::{Dual, Input, check, device, upload};
use crate::{Device, Dtype, Gradients, Params, Shape, Tape, Tensor, Var};

/// Numbers that every dtype holds exactly.
fn target(shape: impl Into<Shape>) -> Input {
    let mut target = Input::normal(shape, 2);
    target.values.iter_mut().for_each(|value| *value = (*value * 16.0).round() / 16.0);
    target
}

const WEIGHTS: [f32; 2] = [0.5, 3.0];
const MASK: [f32; 6] = [1.0, 0.0, 1.0, 0.25, 0.0, 1.0];

fn vectors(
    device: &Device,
    weighted: bool,
    masked: bool,
) -> crate::Result<(Option<Tensor>, Option<Tensor>)> {
    Ok((
        weighted.then(|| device.upload([2], &WEIGHTS)).transpose()?,
        masked.then(|| device.upload([2, 3], &MASK)).transpose()?,
    ))
}

#[test]
fn every_combination_of_weights_mask_and_formats() {
    let width = 5;
    let target = target([2, 3, width]);
    for (weighted, masked, format) in [
        (false, false, Dtype::F32),
        (true, false, Dtype::Bf16),
        (false, true, Dtype::F16),
        (true, true, Dtype::F32),
    ] {
        check(
            &[Input::normal([2, 3, width], 1)],
            2.0,
            &|tape, v| {
                let (weights, mask) = vectors(tape.device(), weighted, masked)?;
                let target = upload(tape.device(), &target, format);
                tape.mse(&v[0], &target, weights.as_ref(), mask.as_ref())
            },
            &|v| {
                let errors = v[0].iter().zip(&target.values).enumerate();
                let terms = errors.map(|(index, (prediction, target))| {
                    let error = *prediction - Dual::from(f64::from(*target));
                    let weight = if weighted { WEIGHTS[index / (3 * width)] } else { 1.0 };
                    let factor = if masked { MASK[index / width] } else { 1.0 };
                    error * error * f64::from(weight * factor)
                });
                let masked_rows = f64::from(MASK.iter().sum::<f32>());
                let rows = if masked { masked_rows } else { 6.0 };
                vec![terms.sum::<Dual>() * (1.0 / (rows * width as f64))]
            },
        );
    }
}

/// With weights of samples and a mask of tokens, and alone; some elements do not count.
#[test]
fn every_element_may_have_a_factor() {
    let (width, sizes) = (5, [2, 3, 5]);
    let (target, mut factors) = (target(sizes), Input::normal(sizes, 3));
    factors.values.iter_mut().for_each(|it| *it = (*it * 2.0).round().abs() / 2.0);
    assert!(factors.values.contains(&0.0) && factors.values.iter().any(|it| *it > 1.0));
    for (is_alone, format) in [(true, Dtype::F32), (false, Dtype::Bf16), (true, Dtype::F16)] {
        check(
            &[Input::normal(sizes, 1)],
            2.0,
            &|tape, v| {
                let (weights, mask) = vectors(tape.device(), !is_alone, !is_alone)?;
                let elements = upload(tape.device(), &factors, Dtype::F32);
                let target = upload(tape.device(), &target, format);
                let (weights, mask, elements) = (weights.as_ref(), mask.as_ref(), Some(&elements));
                tape.error_loss(
                    &v[0],
                    &target,
                    ErrorLoss::Squared,
                    ErrorWeights { weights, mask, elements },
                )
            },
            &|v| {
                let errors = v[0].iter().zip(&target.values).enumerate();
                let terms = errors.map(|(index, (prediction, target))| {
                    let error = *prediction - Dual::from(f64::from(*target));
                    let of_row = WEIGHTS[index / (3 * width)] * MASK[index / width];
                    let factor = if is_alone { 1.0 } else { of_row } * factors.values[index];
                    error * error * f64::from(factor)
                });
                let rows = if is_alone { 6.0 } else { f64::from(MASK.iter().sum::<f32>()) };
                vec![terms.sum::<Dual>() * (1.0 / (rows * width as f64))]
            },
        );
    }
}

/// What an error costs.
fn cost(kind: usize, error: Dual, c: f64) -> Dual {
    let size = if error.value < 0.0 { -error } else { error };
    match kind {
        0 => size,
        1 if size.value <= c => size * size * 0.5,
        1 => (size - Dual::from(0.5 * c)) * c,
        _ => ((error * error + Dual::from(c * c)).sqrt() - Dual::from(c)) * (2.0 * c),
    }
}

/// With all weights, and thresholds below and above most errors.
#[test]
fn errors_may_cost_something_else_than_their_square() {
    const THRESHOLDS: [f32; 2] = [0.25, 2.0];
    let (width, sizes) = (5, [2, 3, 5]);
    let (target, mut factors) = (target(sizes), Input::normal(sizes, 3));
    factors.values.iter_mut().for_each(|it| *it = it.abs());
    let formats = [Dtype::F32, Dtype::Bf16, Dtype::F16];
    for (kind, is_weighted) in [(0, true), (0, false), (1, true), (1, false), (2, true), (2, false)]
    {
        check(
            &[Input::normal(sizes, 1)],
            2.0,
            &|tape, v| {
                let device = tape.device();
                let (weights, mask) = vectors(device, is_weighted, is_weighted)?;
                let elements = upload(device, &factors, Dtype::F32);
                let target = upload(device, &target, formats[kind]);
                let thresholds = device.upload([2], &THRESHOLDS)?;
                let loss = [
                    ErrorLoss::Absolute,
                    ErrorLoss::Huber(&thresholds),
                    ErrorLoss::PseudoHuber(&thresholds),
                ];
                let elements = is_weighted.then_some(&elements);
                let (weights, mask) = (weights.as_ref(), mask.as_ref());
                let weights = ErrorWeights { weights, mask, elements };
                tape.error_loss(&v[0], &target, loss[kind], weights)
            },
            &|v| {
                let errors = v[0].iter().zip(&target.values).enumerate();
                let terms = errors.map(|(index, (prediction, target))| {
                    let (sample, row) = (index / (3 * width), index / width);
                    let error = *prediction - Dual::from(f64::from(*target));
                    let own = cost(kind, error, f64::from(THRESHOLDS[sample]));
                    let factor = WEIGHTS[sample] * MASK[row] * factors.values[index];
                    own * if is_weighted { f64::from(factor) } else { 1.0 }
                });
                let rows = if is_weighted { f64::from(MASK.iter().sum::<f32>()) } else { 6.0 };
                vec![terms.sum::<Dual>() * (1.0 / (rows * width as f64))]
            },
        );
    }
}

#[test]
fn any_number_of_dimensions() {
    for sizes in [&[7][..], &[2, 70], &[2, 3, 2, 2, 3], &[]] {
        let shape = Shape::new(sizes);
        let (weighted, target) = (sizes.len() > 1, target(shape));
        check(
            &[Input::normal(shape, 1)],
            2.0,
            &|tape, v| {
                let (weights, _) = vectors(tape.device(), weighted, false)?;
                tape.mse(&v[0], &upload(tape.device(), &target, Dtype::F32), weights.as_ref(), None)
            },
            &|v| {
                let count = v[0].len();
                let terms = v[0].iter().zip(&target.values).enumerate().map(|(index, (x, t))| {
                    let error = *x - Dual::from(f64::from(*t));
                    let weight = if weighted { WEIGHTS[index / (count / 2)] } else { 1.0 };
                    error * error * f64::from(weight)
                });
                vec![terms.sum::<Dual>() * (1.0 / count as f64)]
            },
        );
    }
}

#[test]
fn gradients_of_two_uses_add_up() {
    let target = target([4, 3]);
    check(
        &[Input::normal([4, 3], 1)],
        4.0,
        &|tape, v| {
            let target = upload(tape.device(), &target, Dtype::F32);
            let first = tape.mse(&v[0], &target, None, None)?;
            tape.add(&first, &tape.mse(&v[0], &target, None, None)?)
        },
        &|v| {
            let errors = v[0].iter().zip(&target.values);
            let errors = errors.map(|(x, t)| *x - Dual::from(f64::from(*t)));
            vec![errors.map(|error| error * error).sum::<Dual>() * (2.0 / 12.0)]
        },
    );
}

#[test]
fn large_sums_are_accurate_and_the_same_on_any_number_of_threads() {
    // A few large errors among very many small ones, which a sum in f32 would lose.
    let (rows, width) = (300, 4099);
    let numbers: Vec<f32> =
        (0..rows * width).map(|i| if i % 1000 == 0 { 300.0 } else { 0.1 }).collect();
    let exact: f64 = numbers.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
    let exact = exact / numbers.len() as f64;
    let params = Params::default();
    for (shape, threads) in [([rows, width], 1), ([rows, width], 3), ([1, rows * width], 2)] {
        let device = Device::cpu(threads, 1 << 26).unwrap();
        let tape = Tape::inference(&device, &params, 0);
        let prediction = Var::from(device.upload(shape, &numbers).unwrap());
        let target = device.zeros(shape, Dtype::Bf16).unwrap();
        let mean = tape.mse(&prediction, &target, None, None).unwrap();
        let mean = f64::from(mean.tensor().to_vec::<f32>()[0]);
        assert!((mean - exact).abs() < 2e-6 * exact, "{mean} {exact}");
    }
}

#[test]
fn a_mask_of_zeros_gives_zero() {
    check(
        &[Input::normal([2, 3, 4], 1)],
        0.0,
        &|tape, v| {
            let (target, mask) = (
                tape.device().zeros([2, 3, 4], Dtype::F32)?,
                tape.device().zeros([2, 3], Dtype::F32)?,
            );
            tape.mse(&v[0], &target, None, Some(&mask))
        },
        &|_| vec![Dual::from(0.0)],
    );
}

/// No error has no slope, and NaN stays NaN, in value and gradient.
#[test]
fn other_costs_of_no_error_and_of_nan() {
    let device = device();
    for kind in 0..3 {
        let mut params = Params::default();
        let key = params.add(device.upload([1, 3], &[0.5f32, f32::NAN, 3.0]).unwrap());
        let tape = Tape::training(&device, &params, 0);
        let target = device.upload([1, 3], &[0.5f32, 0.0, 0.0]).unwrap();
        let c = device.upload([1], &[0.1f32]).unwrap();
        let loss = [ErrorLoss::Absolute, ErrorLoss::Huber(&c), ErrorLoss::PseudoHuber(&c)];
        let (prediction, weights) = (tape.param(key), ErrorWeights::default());
        let loss = tape.error_loss(&prediction, &target, loss[kind], weights).unwrap();
        assert!(loss.tensor().to_vec::<f32>()[0].is_nan(), "{kind}");
        let mut gradients = Gradients::default();
        tape.backward(&loss, &mut gradients).unwrap();
        let gradient = gradients.get(key).unwrap().to_f32_vec();
        assert!(gradient[0] == 0.0 && gradient[1].is_nan() && gradient[2] > 0.0, "{gradient:?}");
    }
}

fn mean_of(numbers: &[f32], mask: Option<[f32; 2]>) -> f32 {
    let device = device();
    let params = Params::default();
    let tape = Tape::inference(&device, &params, 0);
    let prediction = Var::from(device.upload([1, 2, 1], numbers).unwrap());
    let target = device.zeros([1, 2, 1], Dtype::F32).unwrap();
    let mask = mask.map(|mask| device.upload([1, 2], &mask).unwrap());
    tape.mse(&prediction, &target, None, mask.as_ref()).unwrap().tensor().to_vec::<f32>()[0]
}

#[test]
fn nan_is_not_hidden() {
    assert!(mean_of(&[1.0, f32::NAN], None).is_nan());
    assert!(mean_of(&[1.0, f32::NAN], Some([1.0, 0.0])).is_nan());
    assert!(mean_of(&[1.0, f32::NAN], Some([0.0, 0.0])).is_nan());
    assert!(mean_of(&[1.0, 2.0], Some([1.0, f32::NAN])).is_nan());
    assert_eq!(mean_of(&[1.0, f32::INFINITY], None), f32::INFINITY);
    assert_eq!(mean_of(&[1.0, 3.0], Some([0.0, 2.0])), 9.0);
}

#[test]
fn what_does_not_fit_is_said_with_both_values() {
    let device = device();
    let params = Params::default();
    let tape = Tape::inference(&device, &params, 0);
    let zeros = |sizes: &[usize]| device.zeros(Shape::new(sizes), Dtype::F32).unwrap();
    let x = Var::from(zeros(&[2, 3, 4]));
    let fails = |x: &Var, target: &Tensor, weights: Option<&Tensor>, mask: Option<&Tensor>| {
        tape.mse(x, target, weights, mask).err().unwrap().to_string()
    };
    assert_eq!(
        fails(&x, &zeros(&[2, 4, 3]), None, None),
        "mse: target has shape [2, 4, 3], expected [2, 3, 4]"
    );
    let target = zeros(&[2, 3, 4]);
    assert_eq!(
        fails(&x, &target, Some(&zeros(&[3])), None),
        "mse: weights has shape [3], expected [2]"
    );
    assert_eq!(
        fails(&x, &target, None, Some(&zeros(&[2, 4]))),
        "mse: mask has shape [2, 4], expected [2, 3]"
    );
    let bytes = device.zeros([2, 3], Dtype::U8).unwrap();
    assert_eq!(fails(&x, &target, None, Some(&bytes)), "mse: mask is u8, expected f32");
    let (flat, mask) = (x.reshape([24]), zeros(&[2, 3]));
    assert_eq!(
        fails(&flat, &zeros(&[24]), None, Some(&mask)),
        "mse: prediction of shape [24] has 1 dimensions, expected 3"
    );
    assert_eq!(
        fails(&flat, &zeros(&[24]), Some(&zeros(&[24])), None),
        "mse: prediction of shape [24] has 1 dimensions, expected 2"
    );
    let (weights, mask) = (None, None);
    let elements = ErrorWeights { weights, mask, elements: Some(&zeros(&[2, 3])) };
    assert_eq!(
        tape.error_loss(&x, &target, ErrorLoss::Squared, elements).err().unwrap().to_string(),
        "mse: elements has shape [2, 3], expected [2, 3, 4]"
    );
    let few = ErrorLoss::Huber(&zeros(&[3]));
    assert_eq!(
        tape.error_loss(&x, &target, few, ErrorWeights::default()).err().unwrap().to_string(),
        "mse: thresholds has shape [3], expected [2]"
    );
    let none = zeros(&[2, 0, 4]);
    assert_eq!(
        fails(&Var::from(none.clone()), &none, None, None),
        "mse: prediction is empty, its shape is [2, 0, 4]"
    );
}
