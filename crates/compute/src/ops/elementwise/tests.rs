//! Sums against their formulas.

use crate::testing::{Input, check};
use crate::{Device, Dtype, Params, Tape, Var};

#[test]
fn add_and_scale() {
    let (x, y) = (Input::normal([3, 21], 1), Input::normal([3, 21], 2));
    check(&[x.clone(), y], 2.0, &|tape, v| tape.add(&v[0], &v[1]), &|v| {
        v[0].iter().zip(&v[1]).map(|(x, y)| *x + *y).collect()
    });
    check(std::slice::from_ref(&x), 2.0, &|tape, v| tape.scale(&v[0], -1.5), &|v| {
        v[0].iter().map(|x| *x * -1.5).collect()
    });
    // The same tensor twice: its two gradients meet in one place.
    check(&[x], 4.0, &|tape, v| tape.add(&v[0], &v[0]), &|v| {
        v[0].iter().map(|x| *x + *x).collect()
    });
}

#[test]
fn convert_there_and_back_changes_nothing() {
    let there_and_back =
        |tape: &Tape<'_>, v: &[Var]| tape.convert(&tape.convert(&v[0], Dtype::F32)?, v[0].dtype());
    check(&[Input::normal([3, 21], 1)], 2.0, &there_and_back, &|v| v[0].clone());
    let device = Device::cpu(1, 1 << 16).unwrap();
    let params = Params::default();
    let tape = Tape::inference(&device, &params, 0);
    let x = Var::from(device.upload([3], &[1.0f32, 1.0 + 1.0 / 256.0, -65536.0]).unwrap());
    let rounded = tape.convert(&x, Dtype::Bf16).unwrap();
    assert_eq!(rounded.tensor().to_f32_vec(), [1.0, 1.0, -65536.0]);
    assert!(tape.convert(&x, Dtype::U32).is_err());
}

#[test]
fn gated_add_uses_its_samples_gate() {
    let (samples, tokens, width) = (2, 3, 5);
    let x = Input::normal([samples, tokens, width], 1);
    let y = Input::normal([samples, tokens, width], 2);
    let gates = Input::normal([samples, 2 * width], 3);
    check(&[x, y, gates], 4.0, &|tape, v| tape.gated_add(&v[0], v[2].chunk(1), &v[1]), &|v| {
        let at = |index: usize| {
            let (sample, column) = (index / (tokens * width), index % width);
            v[0][index] + v[2][sample * 2 * width + width + column] * v[1][index]
        };
        (0..samples * tokens * width).map(at).collect()
    });
}
