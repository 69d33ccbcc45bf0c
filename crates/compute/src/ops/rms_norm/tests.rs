//! Root-mean-square norm against its formula.

use crate::ops::Activation;
use crate::ops::activation::tests::exact as active;
use crate::testing::{Dual, Input, check, device, recomputed};
use crate::{Dtype, Gradients, Params, Shape, Tape, Var};

/// So large that the gradient of a row of one number is no difference of nearly equal ones.
const EPSILON: f64 = 0.1;

/// Rows brought to mean square 1.
pub fn normalised(x: &[Dual], width: usize, epsilon: f64) -> Vec<Dual> {
    let root = |row: &[Dual]| {
        let squares: Dual = row.iter().map(|x| *x * *x).sum();
        (squares * (1.0 / width as f64) + Dual::from(epsilon)).sqrt()
    };
    x.chunks(width).flat_map(|row| row.iter().map(move |x| *x / root(row))).collect()
}

fn weighted(x: &[Dual], weight: &[Dual]) -> Vec<Dual> {
    let rows = normalised(x, weight.len(), EPSILON).into_iter();
    rows.zip(weight.iter().cycle()).map(|(x, weight)| x * *weight).collect()
}

#[test]
fn with_a_weight() {
    for sizes in [&[3, 7][..], &[1, 1], &[2, 2, 33], &[5]] {
        let shape = Shape::new(sizes);
        let x = Input::normal(shape, 1).scaled(2.0);
        let weight = Input::normal([shape.width()], 2).f32();
        for inputs in [[x.clone(), weight.clone()], [x.clone().frozen(), weight.clone()]] {
            check(
                &inputs,
                4.0,
                &|tape, v| tape.rms_norm(&v[0], Some(&v[1]), EPSILON as f32),
                &|v| weighted(&v[0], &v[1]),
            );
        }
        check(
            &[x, weight.frozen()],
            4.0,
            &|tape, v| tape.rms_norm(&v[0], Some(&v[1]), EPSILON as f32),
            &|v| weighted(&v[0], &v[1]),
        );
    }
}

#[test]
fn without_one() {
    check(
        &[Input::normal([4, 10], 1)],
        4.0,
        &|tape, v| tape.rms_norm(&v[0], None, EPSILON as f32),
        &|v| normalised(&v[0], 10, EPSILON),
    );
}

#[test]
fn the_weight_sees_every_block_of_rows() {
    let (x, weight) = (Input::normal([70, 3], 1), Input::normal([3], 2).f32());
    check(&[x, weight], 4.0, &|tape, v| tape.rms_norm(&v[0], Some(&v[1]), EPSILON as f32), &|v| {
        weighted(&v[0], &v[1])
    });
}

#[test]
fn gradients_add_to_what_is_there() {
    let (x, weight) = (Input::normal([3, 5], 1), Input::normal([5], 2).f32());
    check(
        &[x, weight],
        4.0,
        &|tape, v| {
            let once = tape.rms_norm(&v[0], Some(&v[1]), EPSILON as f32)?;
            let twice = tape.rms_norm(&once, Some(&v[1]), EPSILON as f32)?;
            tape.add(&tape.add(&v[0], &once)?, &twice)
        },
        &|v| {
            let once = weighted(&v[0], &v[1]);
            let twice = weighted(&once, &v[1]);
            v[0].iter().zip(once).zip(twice).map(|((x, once), twice)| *x + once + twice).collect()
        },
    );
}

#[test]
fn readers_recompute_the_result() {
    // The weight is made again too, and in a recomputed block it is not there at first.
    let block = |tape: &Tape<'_>, v: &[Var]| {
        let x = tape.scale(&v[0], 0.5)?;
        let weight = tape.activate(&tape.scale(&v[1], 2.0)?, Activation::Silu)?;
        let y = tape.rms_norm(&x, Some(&weight), EPSILON as f32)?;
        tape.glu(&y, &v[2], Activation::Silu)
    };
    let exact = |v: &[Vec<Dual>]| -> Vec<Dual> {
        let x: Vec<Dual> = v[0].iter().map(|x| *x * 0.5).collect();
        let weight: Vec<Dual> = v[1].iter().map(|x| active(Activation::Silu, *x * 2.0)).collect();
        let gates = weighted(&x, &weight).into_iter();
        gates.zip(&v[2]).map(|(gate, up)| active(Activation::Silu, gate) * *up).collect()
    };
    let (x, weight) = (Input::normal([3, 5], 1), Input::normal([5], 2).f32());
    let up = Input::normal([3, 5], 3);
    let frozen = [x.clone().frozen(), weight.clone().frozen(), up.clone()];
    for inputs in [[x, weight, up], frozen] {
        check(&inputs, 4.0, &block, &exact);
        check(&inputs, 4.0, &recomputed(block), &exact);
    }
}

#[test]
fn nan_spoils_its_row_alone() {
    let device = device();
    let mut params = Params::default();
    let width = 20;
    for bad in [f32::NAN, f32::INFINITY] {
        let mut numbers = vec![1.0f32; 3 * width];
        numbers[width + 17] = bad;
        let x = params.add(device.upload([3, width], &numbers).unwrap());
        let tape = Tape::training(&device, &params, 0);
        let y = tape.rms_norm(&tape.param(x), None, 1e-6).unwrap();
        let numbers = y.tensor().to_vec::<f32>();
        let one = device.upload([3, width], &vec![1.0f32; 3 * width]).unwrap();
        let mut gradients = Gradients::default();
        tape.backward_from(y, one, &mut gradients).unwrap();
        let slopes = gradients.get(x).unwrap().to_vec::<f32>();
        for (row, (y, slopes)) in numbers.chunks(width).zip(slopes.chunks(width)).enumerate() {
            assert_eq!(y[17].is_nan(), row == 1, "{bad}: {y:?}");
            assert_eq!(y[0].is_nan(), row == 1 && bad.is_nan(), "{bad}: {y:?}");
            let spoilt = slopes.iter().filter(|slope| slope.is_nan()).count();
            assert_eq!(spoilt, if row == 1 { width } else { 0 }, "{bad}: {slopes:?}");
        }
    }
}

#[test]
fn nothing_stays_nothing() {
    for shape in [[0, 5], [3, 0]] {
        check(
            &[Input::normal(shape, 1), Input::normal([shape[1]], 2).f32()],
            1.0,
            &|tape, v| tape.rms_norm(&v[0], Some(&v[1]), EPSILON as f32),
            &|_| vec![],
        );
    }
}

#[test]
fn what_does_not_fit_is_said_with_both_shapes() {
    let device = device();
    let params = Params::default();
    let tape = Tape::inference(&device, &params, 0);
    let zeros = |width: usize, dtype| Var::from(device.zeros([width], dtype).unwrap());
    let x = Var::from(device.zeros([2, 5], Dtype::Bf16).unwrap());
    let error =
        |x: &Var, weight: &Var| tape.rms_norm(x, Some(weight), 1e-6).err().unwrap().to_string();
    assert_eq!(error(&x, &zeros(4, Dtype::F32)), "rms_norm: weight has shape [4], expected [5]");
    assert_eq!(error(&x, &zeros(5, Dtype::Bf16)), "rms_norm: weight is bf16, expected f32");
    assert_eq!(
        error(&zeros(5, Dtype::U32), &zeros(5, Dtype::F32)),
        "rms_norm: x is u32, expected f32, bf16 or f16"
    );
}
