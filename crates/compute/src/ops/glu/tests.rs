//! Gated linear units against their formula.

use crate::ops::Activation;
use crate::ops::activation::tests::{ALL, exact};
use crate::testing::{Dual, Input, check, device, recomputed};
use crate::{Dtype, Params, Shape, Tape, Var};

fn glu(activation: Activation, gate: &[Dual], up: &[Dual]) -> Vec<Dual> {
    gate.iter().zip(up).map(|(gate, up)| exact(activation, *gate) * *up).collect()
}

#[test]
fn with_every_activation() {
    for activation in ALL {
        for sizes in [&[1, 1][..], &[3, 37], &[2, 3, 5], &[0, 4]] {
            let gate = Input::normal(Shape::new(sizes), 1).scaled(2.0);
            let up = Input::normal(Shape::new(sizes), 2);
            check(&[gate, up], 4.0, &|tape, v| tape.glu(&v[0], &v[1], activation), &|v| {
                glu(activation, &v[0], &v[1])
            });
        }
    }
}

#[test]
fn with_one_side_frozen() {
    let (gate, up) = (Input::normal([2, 9], 1), Input::normal([2, 9], 2));
    for inputs in [[gate.clone().frozen(), up.clone()], [gate, up.frozen()]] {
        check(&inputs, 4.0, &|tape, v| tape.glu(&v[0], &v[1], Activation::Silu), &|v| {
            glu(Activation::Silu, &v[0], &v[1])
        });
    }
}

#[test]
fn the_same_tensor_on_both_sides() {
    check(
        &[Input::normal([2, 9], 1)],
        4.0,
        &|tape, v| tape.glu(&v[0], &v[0], Activation::GeluTanh),
        &|v| glu(Activation::GeluTanh, &v[0], &v[0]),
    );
}

#[test]
fn a_gradient_that_others_share_is_left_alone() {
    // The sum hands the same gradient to both of its terms.
    let (gate, up) = (Input::normal([2, 9], 1), Input::normal([2, 9], 2));
    check(
        &[gate, up],
        4.0,
        &|tape, v| tape.add(&v[1], &tape.glu(&v[0], &v[1], Activation::Silu)?),
        &|v| {
            let values = glu(Activation::Silu, &v[0], &v[1]).into_iter();
            values.zip(&v[1]).map(|(value, up)| value + *up).collect()
        },
    );
}

#[test]
fn readers_recompute_the_result() {
    let block = |tape: &Tape<'_>, v: &[Var]| {
        let (gate, up) = (tape.scale(&v[0], 0.5)?, tape.scale(&v[1], 2.0)?);
        let gate = tape.glu(&gate, &up, Activation::Silu)?;
        tape.glu(&gate, &v[2], Activation::GeluErf)
    };
    let exact = |v: &[Vec<Dual>]| -> Vec<Dual> {
        let scaled =
            |x: &[Dual], factor: f64| -> Vec<Dual> { x.iter().map(|x| *x * factor).collect() };
        let gates = glu(Activation::Silu, &scaled(&v[0], 0.5), &scaled(&v[1], 2.0));
        glu(Activation::GeluErf, &gates, &v[2])
    };
    let [gate, up, last] = [1, 2, 3].map(|seed| Input::normal([3, 5], seed));
    let frozen = [gate.clone().frozen(), up.clone().frozen(), last.clone()];
    for inputs in [[gate, up, last], frozen] {
        check(&inputs, 4.0, &block, &exact);
        check(&inputs, 4.0, &recomputed(block), &exact);
    }
}

#[test]
fn nan_stays_nan() {
    let device = device();
    let params = Params::default();
    let tape = Tape::inference(&device, &params, 0);
    let gate = Var::from(device.upload([3], &[f32::NAN, 1.0, 0.0]).unwrap());
    let up = Var::from(device.upload([3], &[0.0, f32::NAN, f32::INFINITY]).unwrap());
    for activation in ALL {
        let y = tape.glu(&gate, &up, activation).unwrap().tensor().to_vec::<f32>();
        assert!(y.iter().all(|y| y.is_nan()), "{activation:?}: {y:?}");
    }
}

#[test]
fn what_does_not_fit_is_said_with_both_shapes() {
    let device = device();
    let params = Params::default();
    let tape = Tape::inference(&device, &params, 0);
    let zeros = |width: usize, dtype| Var::from(device.zeros([2, width], dtype).unwrap());
    let error =
        |gate: &Var, up: &Var| tape.glu(gate, up, Activation::Silu).err().unwrap().to_string();
    let gate = zeros(5, Dtype::F32);
    assert_eq!(error(&gate, &zeros(4, Dtype::F32)), "glu: up has shape [2, 4], expected [2, 5]");
    assert_eq!(error(&gate, &zeros(5, Dtype::F16)), "glu: up is f16, expected f32");
    assert_eq!(error(&zeros(5, Dtype::U8), &gate), "glu: gate is u8, expected f32, bf16 or f16");
}
