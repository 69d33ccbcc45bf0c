//! Enlarged images against their formula.

use crate::testing::{Input, check_forward, device};
use crate::{Dtype, Params, Tape, Var};

#[test]
fn every_pixel_becomes_a_square() {
    for (shape, factor) in [([2, 3, 5, 7], 2), ([1, 2, 3, 1], 3), ([1, 1, 4, 3], 1)] {
        let [samples, channels, height, width] = shape;
        check_forward(
            &[Input::normal(shape, 1)],
            0.0,
            &|tape, v| tape.upsample(&v[0], factor),
            &|v| {
                let mut y = Vec::new();
                for plane in 0..samples * channels {
                    for row in 0..height * factor {
                        for column in 0..width * factor {
                            let at = (plane * height + row / factor) * width + column / factor;
                            y.push(v[0][at]);
                        }
                    }
                }
                y
            },
        );
    }
}

#[test]
fn every_frame_but_the_first_becomes_several() {
    for (shape, frames, factor) in [
        ([2, 2, 3, 4, 3], 2, 2),
        ([1, 3, 1, 2, 3], 2, 3),
        ([1, 1, 4, 3, 2], 3, 1),
        ([1, 2, 2, 1, 2], 1, 2),
    ] {
        let [samples, channels, n, height, width] = shape;
        check_forward(
            &[Input::normal(shape, 1)],
            0.0,
            &|tape, v| tape.upsample_clip(&v[0], frames, factor),
            &|v| {
                let mut y = Vec::new();
                for plane in 0..samples * channels {
                    let later = (1..n).flat_map(|frame| vec![frame; frames]);
                    for frame in std::iter::once(0).chain(later) {
                        for row in 0..height * factor {
                            for column in 0..width * factor {
                                let line = (plane * n + frame) * height + row / factor;
                                y.push(v[0][line * width + column / factor]);
                            }
                        }
                    }
                }
                y
            },
        );
    }
}

#[test]
fn the_result_has_its_shape_even_of_nothing() {
    let (device, params) = (device(), Params::default());
    let tape = Tape::inference(&device, &params, 0);
    for (shape, large) in [([2, 3, 4, 5], [2, 3, 12, 15]), ([0, 3, 4, 5], [0, 3, 12, 15])] {
        let x = Var::from(device.zeros(shape, Dtype::F32).unwrap());
        assert_eq!(tape.upsample(&x, 3).unwrap().shape(), large.into());
    }
    for (n, large) in [(0, 0), (1, 1), (3, 5)] {
        let x = Var::from(device.zeros([1, 1, n, 2, 1], Dtype::F32).unwrap());
        assert_eq!(tape.upsample_clip(&x, 2, 2).unwrap().shape(), [1, 1, large, 4, 2].into());
    }
}

#[test]
fn what_cannot_be_enlarged_is_said() {
    let (device, params) = (device(), Params::default());
    let tape = Tape::training(&device, &params, 0);
    let message = |x: &Var, factor| tape.upsample(x, factor).err().unwrap().to_string();
    let x = Var::from(device.zeros([1, 1, 2, 2], Dtype::F32).unwrap());
    assert_eq!(message(&x, 0), "upsample: factor is 0, expected 1 or more");
    assert_eq!(
        tape.upsample_clip(&x, 1, 1).err().unwrap().to_string(),
        "upsample_clip: x of shape [1, 1, 2, 2] has 4 dimensions, expected 5"
    );
    let clip = x.reshape([1, 1, 1, 2, 2]);
    assert_eq!(
        tape.upsample_clip(&clip, 0, 1).err().unwrap().to_string(),
        "upsample_clip: frames is 0, expected 1 or more"
    );
    let flat = Var::from(device.zeros([2, 2], Dtype::F32).unwrap());
    assert_eq!(message(&flat, 2), "upsample: x of shape [2, 2] has 2 dimensions, expected 4");
    let trained = tape.leaf(x.into_tensor());
    assert_eq!(
        message(&trained, 2),
        "upsample: has no backward, but its input requires a gradient"
    );
}
