//! Sums against their formulas.

use crate::testing::{Input, check};

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
