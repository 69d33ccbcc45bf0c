//! Means over squares against their formula.

use crate::testing::{Dual, Input, check_forward, device};
use crate::{Dtype, Params, Tape, Var};

#[test]
fn every_square_becomes_its_mean() {
    for (shape, size) in [([2, 3, 4, 6], 2), ([1, 2, 6, 3], 3), ([1, 1, 5, 3], 1)] {
        let [samples, channels, height, width] = shape;
        check_forward(
            &[Input::normal(shape, 1)],
            4.0,
            &|tape, v| tape.avg_pool(&v[0], size),
            &|v| {
                let mut y = Vec::new();
                for plane in 0..samples * channels {
                    for (row, column) in
                        (0..height / size).flat_map(|i| (0..width / size).map(move |j| (i, j)))
                    {
                        let mut sum = Dual::default();
                        for (i, j) in (0..size).flat_map(|i| (0..size).map(move |j| (i, j))) {
                            let at = (plane * height + row * size + i) * width + column * size + j;
                            sum = sum + v[0][at];
                        }
                        y.push(sum * (1.0 / (size * size) as f64));
                    }
                }
                y
            },
        );
    }
}

#[test]
fn nan_reaches_its_square_only() {
    let (device, params) = (device(), Params::default());
    let tape = Tape::inference(&device, &params, 0);
    let mut numbers = [1.0f32; 16];
    (numbers[5], numbers[11]) = (f32::NAN, f32::INFINITY);
    let x = Var::from(device.upload([1, 1, 4, 4], &numbers).unwrap());
    let y = tape.avg_pool(&x, 2).unwrap().tensor().to_vec::<f32>();
    assert!(y[0].is_nan() && y[1..] == [1.0, 1.0, f32::INFINITY], "{y:?}");
    let none = Var::from(device.zeros([0, 3, 4, 4], Dtype::Bf16).unwrap());
    assert_eq!(tape.avg_pool(&none, 2).unwrap().shape(), [0, 3, 2, 2].into());
}

#[test]
fn what_cannot_be_shrunk_is_said() {
    let (device, params) = (device(), Params::default());
    let tape = Tape::training(&device, &params, 0);
    let message = |x: &Var, size| tape.avg_pool(x, size).err().unwrap().to_string();
    let x = Var::from(device.zeros([1, 1, 4, 6], Dtype::F32).unwrap());
    assert_eq!(message(&x, 3), "avg_pool: height 4 is not a multiple of 3");
    assert_eq!(message(&x, 4), "avg_pool: width 6 is not a multiple of 4");
    assert_eq!(message(&x, 0), "avg_pool: height 4 is not a multiple of 0");
    let trained = tape.leaf(x.into_tensor());
    assert_eq!(
        message(&trained, 2),
        "avg_pool: has no backward, but its input requires a gradient"
    );
}
