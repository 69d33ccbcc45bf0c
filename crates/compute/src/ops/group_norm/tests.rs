//! Group norm against its formula.

use crate::ops::Activation;
use crate::ops::activation::tests::{ALL, exact};
use crate::testing::{Dual, Input, check_forward, compare, device};
use crate::{Device, Dtype, Params, Tape, Var};

const EPSILON: f64 = 1e-6;

fn reference(
    v: &[Vec<Dual>],
    [_, channels, height, width]: [usize; 4],
    n_groups: usize,
    activation: Activation,
) -> Vec<Dual> {
    let n_pixels = height * width;
    let mut y = Vec::new();
    for (group, x) in v[0].chunks(channels / n_groups * n_pixels).enumerate() {
        let count = x.len() as f64;
        let mean = x.iter().map(|x| x.value).sum::<f64>() / count;
        let variance = x.iter().map(|x| (x.value - mean).powi(2)).sum::<f64>() / count;
        for (index, x) in x.iter().enumerate() {
            let channel = group % n_groups * (channels / n_groups) + index / n_pixels;
            let normal = (x.value - mean) / (variance + EPSILON).sqrt();
            let value = normal * v[1][channel].value + v[2][channel].value;
            y.push(exact(activation, Dual::from(value)));
        }
    }
    y
}

fn check_norm(x: Input, shape: [usize; 4], n_groups: usize, activation: Activation, slack: f64) {
    let (weight, bias) = (Input::normal([shape[1]], 2).f32(), Input::normal([shape[1]], 3).f32());
    check_forward(
        &[x, weight, bias],
        slack,
        &|tape, v| {
            let (weight, bias) = (v[1].tensor(), v[2].tensor());
            tape.group_norm(&v[0], n_groups, weight, bias, EPSILON as f32, activation)
        },
        &|v| reference(v, shape, n_groups, activation),
    );
}

#[test]
fn groups_of_any_size() {
    for (shape, n_groups) in
        [([2, 6, 3, 5], 3), ([1, 4, 1, 1], 1), ([3, 5, 2, 7], 5), ([1, 2, 33, 31], 2)]
    {
        check_norm(Input::normal(shape, 1).scaled(3.0), shape, n_groups, Activation::Silu, 8.0);
    }
    for activation in ALL {
        check_norm(Input::normal([1, 4, 3, 3], 1), [1, 4, 3, 3], 2, activation, 8.0);
    }
}

#[test]
fn a_large_group_is_shared_by_threads() {
    let shape = [1, 3, 150, 170];
    check_norm(Input::normal(shape, 1), shape, 1, Activation::None, 8.0);
}

#[test]
fn numbers_far_from_zero_keep_their_digits() {
    // Sums of squares in f32 would leave nothing of a deviation of 1 at 4096; what is left here is
    // the rounding of the numbers themselves, and f16 and bf16 have none left to compare.
    let device = device();
    let numbers: Vec<f32> = (0..600).map(|index| 4096.0 + (index % 3) as f32 - 1.0).collect();
    let y = norm(&device, &numbers, [1, 2, 15, 20], 1);
    let step = 1.5f64.sqrt();
    let exact: Vec<f64> = (0..600).map(|index| (f64::from(index % 3) - 1.0) * step).collect();
    compare("far from zero", &y, &exact, 2e-6);
}

/// With a weight of 1 and no bias.
fn norm(device: &Device, numbers: &[f32], shape: [usize; 4], n_groups: usize) -> Vec<f32> {
    let params = Params::default();
    let tape = Tape::inference(device, &params, 0);
    let x = Var::from(device.upload(shape, numbers).unwrap());
    let weight = device.upload([shape[1]], &vec![1.0f32; shape[1]]).unwrap();
    let bias = device.zeros([shape[1]], Dtype::F32).unwrap();
    let y = tape.group_norm(&x, n_groups, &weight, &bias, EPSILON as f32, Activation::None);
    y.unwrap().tensor().to_vec()
}

#[test]
fn equal_numbers_become_zero_and_bad_ones_spoil_their_group_only() {
    let device = device();
    assert_eq!(norm(&device, &[0.1; 12], [1, 2, 2, 3], 1), [0.0; 12]);
    for bad in [f32::NAN, f32::INFINITY] {
        let mut numbers = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];
        numbers[6] = bad;
        let y = norm(&device, &numbers, [1, 2, 2, 2], 2);
        assert!(y[..4].iter().all(|y| y.is_finite()) && y[4..].iter().all(|y| y.is_nan()), "{y:?}");
    }
    assert!(norm(&device, &[], [0, 4, 2, 2], 2).is_empty());
    assert!(norm(&device, &[], [2, 4, 0, 2], 2).is_empty());
}

#[test]
fn the_same_as_torch() {
    // import torch, torch.nn.functional as F
    // x = (torch.arange(24.) * 0.37).sin().reshape(2, 4, 1, 3)
    // weight, bias = torch.tensor([1.0, 0.5, -2.0, 1.5]), torch.tensor([0.0, 0.25, -0.5, 1.0])
    // print(F.silu(F.group_norm(x, 2, weight, bias, 1e-6)).flatten().tolist())
    let torch = [
        -0.255_795_568,
        -0.247_045_8,
        0.037_517_312_9,
        0.381_637_603,
        0.493_679_285,
        0.454_108_775,
        -0.114_160_009,
        -0.202_307_194,
        -0.276_620_597,
        0.317_119_747,
        -0.162_186_623,
        -0.275_817_722,
        -0.257_413_626,
        -0.266_056_836,
        -0.228_860_9,
        0.119_860_306,
        0.425_286_8,
        0.868_840_575,
        3.273_429_87,
        0.286_399_126,
        -0.269_297_928,
        2.315_968_04,
        2.029_190_78,
        0.797_348_32,
    ];
    let (device, params) = (device(), Params::default());
    let tape = Tape::inference(&device, &params, 0);
    let numbers: Vec<f32> = (0..24).map(|index| (index as f32 * 0.37).sin()).collect();
    let x = Var::from(device.upload([2, 4, 1, 3], &numbers).unwrap());
    let weight = device.upload([4], &[1.0f32, 0.5, -2.0, 1.5]).unwrap();
    let bias = device.upload([4], &[0.0f32, 0.25, -0.5, 1.0]).unwrap();
    let y = tape.group_norm(&x, 2, &weight, &bias, EPSILON as f32, Activation::Silu).unwrap();
    compare("group norm of torch", &y.tensor().to_vec::<f32>(), &torch, 1e-6);
}

#[test]
fn what_does_not_fit_is_said() {
    let (device, params) = (device(), Params::default());
    let tape = Tape::training(&device, &params, 0);
    let x = Var::from(device.zeros([1, 6, 2, 2], Dtype::F32).unwrap());
    let (six, five) =
        (device.zeros([6], Dtype::F32).unwrap(), device.zeros([5], Dtype::F32).unwrap());
    let message = |x: &Var, n_groups, weight, bias| {
        let y = tape.group_norm(x, n_groups, weight, bias, 1e-6, Activation::None);
        y.err().unwrap().to_string()
    };
    assert_eq!(message(&x, 4, &six, &six), "group_norm: channels 6 is not a multiple of 4");
    assert_eq!(message(&x, 0, &six, &six), "group_norm: channels 6 is not a multiple of 0");
    assert_eq!(message(&x, 3, &five, &six), "group_norm: weight has shape [5], expected [6]");
    assert_eq!(message(&x, 3, &six, &five), "group_norm: bias has shape [5], expected [6]");
    let half = device.zeros([6], Dtype::F16).unwrap();
    assert_eq!(message(&x, 3, &six, &half), "group_norm: bias is f16, expected f32");
    let trained = tape.leaf(x.into_tensor());
    assert_eq!(
        message(&trained, 3, &six, &six),
        "group_norm: has no backward, but its input requires a gradient"
    );
}
