//! Root-mean-square norm over channels against its formula.

use crate::ops::Activation;
use crate::ops::activation::tests::{ALL, exact};
use crate::testing::{Dual, Input, check_forward, compare, device};
use crate::{Device, Dtype, Params, Tape, Var};

fn reference(
    v: &[Vec<Dual>],
    [_, channels, height, width]: [usize; 4],
    activation: Activation,
) -> Vec<Dual> {
    let plane = height * width;
    let mut y = Vec::new();
    for x in v[0].chunks(channels * plane) {
        for at in 0..x.len() {
            let pixel = x.iter().skip(at % plane).step_by(plane);
            let norm = pixel.map(|x| x.value * x.value).sum::<f64>().sqrt();
            let factor = (channels as f64).sqrt() / norm.max(1e-12);
            let value = x[at].value * factor * v[1][at / plane].value;
            y.push(exact(activation, Dual::from(value)));
        }
    }
    y
}

fn check_norm(shape: [usize; 4], activation: Activation) {
    check_forward(
        &[Input::normal(shape, 1).scaled(3.0), Input::normal([shape[1]], 2).f32()],
        8.0,
        &|tape, v| tape.channel_rms_norm(&v[0], v[1].tensor(), activation),
        &|v| reference(v, shape, activation),
    );
}

#[test]
fn images_of_any_size() {
    for shape in [[2, 6, 3, 5], [1, 1, 1, 1], [3, 5, 2, 7], [2, 37, 5, 9], [1, 2, 33, 31]] {
        check_norm(shape, Activation::Silu);
    }
    for activation in ALL {
        check_norm([1, 4, 3, 3], activation);
    }
}

/// With a weight of 1.
fn norm(device: &Device, numbers: &[f32], shape: [usize; 4]) -> Vec<f32> {
    let params = Params::default();
    let tape = Tape::inference(device, &params, 0);
    let x = Var::from(device.upload(shape, numbers).unwrap());
    let weight = device.upload([shape[1]], &vec![1.0f32; shape[1]]).unwrap();
    let y = tape.channel_rms_norm(&x, &weight, Activation::None);
    y.unwrap().tensor().to_vec()
}

#[test]
fn zeros_stay_zero_and_bad_numbers_spoil_their_pixel_only() {
    let device = device();
    assert_eq!(norm(&device, &[0.0; 12], [1, 2, 2, 3]), [0.0; 12]);
    let mut numbers = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];
    numbers[6] = f32::NAN;
    let y = norm(&device, &numbers, [1, 2, 2, 2]);
    let is_bad = |(at, y): (usize, &f32)| y.is_nan() == (at % 4 == 2);
    assert!(y.iter().enumerate().all(is_bad), "{y:?}");
    assert!(norm(&device, &[], [0, 4, 2, 2]).is_empty());
    assert!(norm(&device, &[], [2, 4, 0, 2]).is_empty());
    assert!(norm(&device, &[], [2, 0, 3, 2]).is_empty());
}

#[test]
fn the_same_as_torch() {
    // import torch, torch.nn.functional as F
    // x = (torch.arange(24.) * 0.37).sin().reshape(2, 4, 1, 3)
    // x[0, :, 0, 1] *= 1e-13
    // weight = torch.tensor([1.0, 0.5, -2.0, 1.5]).reshape(4, 1, 1)
    // print(F.silu(F.normalize(x, dim=1) * 2 * weight).flatten().tolist())
    let torch = [
        0.0,
        0.037_468_630_8,
        0.677_168_489,
        0.499_543_011,
        0.052_271_436_9,
        0.444_012_076,
        -0.177_181_691,
        -0.093_863_993_9,
        -0.189_869_165,
        -0.178_883_508,
        -0.073_172_353_2,
        -0.264_138_699,
        -0.278_046_34,
        -0.278_423_995,
        -0.277_674_496,
        -0.167_404_696,
        -0.099_798_448_4,
        0.002_285_628_58,
        -0.263_134_718,
        -0.261_287_034,
        -0.199_021_533,
        1.641_103_39,
        1.567_103_39,
        1.321_796_89,
    ];
    let (device, params) = (device(), Params::default());
    let tape = Tape::inference(&device, &params, 0);
    let mut numbers: Vec<f32> = (0..24).map(|index| (index as f32 * 0.37).sin()).collect();
    // Shorter than what norms are at the least.
    for at in [1, 4, 7, 10] {
        numbers[at] *= 1e-13;
    }
    let x = Var::from(device.upload([2, 4, 1, 3], &numbers).unwrap());
    let weight = device.upload([4], &[1.0f32, 0.5, -2.0, 1.5]).unwrap();
    let y = tape.channel_rms_norm(&x, &weight, Activation::Silu).unwrap();
    compare("norm of torch", &y.tensor().to_vec::<f32>(), &torch, 1e-6);
}

#[test]
fn what_does_not_fit_is_said() {
    let (device, params) = (device(), Params::default());
    let tape = Tape::training(&device, &params, 0);
    let x = Var::from(device.zeros([1, 6, 2, 2], Dtype::F32).unwrap());
    let (six, five) =
        (device.zeros([6], Dtype::F32).unwrap(), device.zeros([5], Dtype::F32).unwrap());
    let message = |x: &Var, weight| {
        tape.channel_rms_norm(x, weight, Activation::None).err().unwrap().to_string()
    };
    assert_eq!(message(&x, &five), "channel_rms_norm: weight has shape [5], expected [6]");
    let half = device.zeros([6], Dtype::F16).unwrap();
    assert_eq!(message(&x, &half), "channel_rms_norm: weight is f16, expected f32");
    let trained = tape.leaf(x.into_tensor());
    assert_eq!(
        message(&trained, &six),
        "channel_rms_norm: has no backward, but its input requires a gradient"
    );
}
