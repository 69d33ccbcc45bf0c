//! Channels scaled and shifted against the formula.

use crate::ops::Activation;
use crate::ops::activation::tests::{ALL, exact as active};
use crate::testing::{Dual, Input, check, device, expect_not_hidden, for_random_sizes, recomputed};
use crate::{Dtype, Gradients, Params, Tape, Var};

fn exact(v: &[Vec<Dual>], activation: Activation) -> Vec<Dual> {
    let (scale, bias) = (v[1].iter().cycle(), v[2].iter().cycle());
    let rows = v[0].iter().zip(scale).zip(bias);
    rows.map(|((x, scale), bias)| active(activation, *x * *scale + *bias)).collect()
}

fn inputs(shape: [usize; 2]) -> [Input; 3] {
    let vector = |seed| Input::normal([shape[1]], seed).f32();
    [Input::normal(shape, 1), vector(2), vector(3)]
}

fn check_affine(inputs: &[Input; 3], activation: Activation) {
    check(inputs, 8.0, &|tape, v| tape.affine(&v[0], &v[1], Some(&v[2]), activation), &|v| {
        exact(v, activation)
    });
}

#[test]
fn channels_are_scaled_and_shifted() {
    for activation in ALL {
        check_affine(&inputs([4, 9]), activation);
    }
    check_affine(&inputs([1, 1]), Activation::None);
    // Rows of several partial sums.
    check_affine(&inputs([40, 3]), Activation::None);
    for_random_sizes(6, [20, 40], |[rows, width]| {
        check_affine(&inputs([rows, width]), ALL[(rows + width) % ALL.len()]);
    });
}

#[test]
fn only_what_is_trained_gets_a_gradient() {
    for activation in [Activation::None, Activation::Silu] {
        for trained in 0..3 {
            let mut index = 0;
            let inputs = inputs([4, 5]).map(|input| {
                index += 1;
                if index == trained + 1 { input } else { input.frozen() }
            });
            check_affine(&inputs, activation);
        }
    }
}

#[test]
fn without_a_bias() {
    let [x, scale, _] = inputs([2, 7]);
    for activation in [Activation::None, Activation::GeluTanh] {
        check(
            &[x.clone(), scale.clone()],
            8.0,
            &|tape, v| tape.affine(&v[0], &v[1], None, activation),
            &|v| exact(&[v[0].clone(), v[1].clone(), vec![Dual::default(); 7]], activation),
        );
    }
}

#[test]
fn readers_recompute_the_result() {
    // The scale is not there at first in a recomputed block either.
    let block = |tape: &Tape<'_>, v: &[Var]| {
        let (x, scale) = (tape.scale(&v[0], 0.5)?, tape.scale(&v[1], 2.0)?);
        let gate = tape.affine(&x, &scale, Some(&v[2]), Activation::Silu)?;
        tape.glu(&gate, &v[3], Activation::GeluErf)
    };
    let exact = |v: &[Vec<Dual>]| -> Vec<Dual> {
        let scaled = |x: &[Dual], factor: f64| x.iter().map(|x| *x * factor).collect();
        let gates = [scaled(&v[0], 0.5), scaled(&v[1], 2.0), v[2].clone()];
        let gates = exact(&gates, Activation::Silu).into_iter();
        gates.zip(&v[3]).map(|(gate, up)| active(Activation::GeluErf, gate) * *up).collect()
    };
    let ([x, scale, bias], up) = (inputs([3, 5]), Input::normal([3, 5], 4));
    let frozen = [x.clone().frozen(), scale.clone(), bias.clone().frozen(), up.clone()];
    for inputs in [[x, scale, bias, up], frozen] {
        check(&inputs, 8.0, &block, &exact);
        check(&inputs, 8.0, &recomputed(block), &exact);
    }
}

#[test]
fn x_is_kept_only_where_it_is_needed() {
    let (device, mut params) = (device(), Params::default());
    let [x, scale] = [[8, 16].into(), crate::Shape::from([16])]
        .map(|shape| params.add(device.zeros(shape, Dtype::F32).unwrap()));
    let held = |trains_scale: bool| {
        let tape = Tape::training(&device, &params, 0);
        let frozen = Var::from(params.get(scale).clone());
        let scale = if trains_scale { tape.param(scale) } else { frozen };
        let before = device.usage().in_use;
        let x = tape.scale(&tape.param(x), 2.0).unwrap();
        let y = tape.affine(&x, &scale, None, Activation::None).unwrap();
        drop((x, y));
        device.usage().in_use - before
    };
    assert_eq!([held(false), held(true)], [0, 8 * 16 * 4]);
}

#[test]
fn nan_is_not_hidden() {
    let scale = |tape: &Tape<'_>| Var::from(tape.device().zeros([5], Dtype::F32).unwrap());
    expect_not_hidden([3, 5], |tape, x| tape.affine(x, &scale(tape), None, Activation::None));
}

#[test]
fn nothing_gives_nothing() {
    let (device, params) = (device(), Params::default());
    let tape = Tape::training(&device, &params, 0);
    for sizes in [[0, 4], [2, 0]] {
        let x = tape.leaf(device.zeros(sizes, Dtype::F32).unwrap());
        let scale = tape.leaf(device.zeros([sizes[1]], Dtype::F32).unwrap());
        let y = tape.affine(&x, &scale, Some(&scale), Activation::Silu).unwrap();
        assert_eq!(y.shape(), x.shape());
    }
    let x = tape.leaf(device.zeros([0, 4], Dtype::F32).unwrap());
    let scale = tape.leaf(device.upload([4], &[1.0f32; 4]).unwrap());
    let y = tape.affine(&x, &scale, Some(&scale), Activation::Silu).unwrap();
    let gradient = device.zeros([0, 4], Dtype::F32).unwrap();
    let mut leaves = tape.backward_from(y, gradient, &mut Gradients::default()).unwrap();
    assert_eq!(leaves.take(&scale).unwrap().to_vec::<f32>(), [0.0; 4]);
}

#[test]
fn what_does_not_fit_is_said() {
    let (device, params) = (device(), Params::default());
    let tape = Tape::inference(&device, &params, 0);
    let x = Var::from(device.zeros([3, 4], Dtype::F32).unwrap());
    let zeros = |width: usize, dtype| Var::from(device.zeros([width], dtype).unwrap());
    let message = |scale: &Var, bias: &Var| {
        tape.affine(&x, scale, Some(bias), Activation::None).err().unwrap().to_string()
    };
    let (four, five) = (zeros(4, Dtype::F32), zeros(5, Dtype::F32));
    assert_eq!(message(&five, &four), "affine: scale has shape [5], expected [4]");
    assert_eq!(message(&four, &five), "affine: bias has shape [5], expected [4]");
    assert_eq!(message(&zeros(4, Dtype::Bf16), &four), "affine: scale is bf16, expected f32");
}
