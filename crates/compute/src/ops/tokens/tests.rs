//! Tokens put together and taken apart.

use crate::ops::Activation;
use crate::ops::activation::tests::exact as active;
use crate::testing::{Dual, Input, check, device, recomputed};
use crate::{Dtype, Gradients, Params, Shape, Tape, Var};

/// Of each sample of a tensor, the tokens in a range.
fn tokens(x: &[Dual], [_, n, width]: [usize; 3], range: std::ops::Range<usize>) -> Vec<Vec<Dual>> {
    x.chunks(n * width)
        .map(|sample| sample[range.start * width..range.end * width].to_vec())
        .collect()
}

#[test]
fn concat_puts_the_tokens_of_a_sample_together() {
    for (samples, counts, width) in [
        (2, &[3, 1, 2][..], 5),
        (3, &[2, 4], 1),
        (1, &[1, 1], 33),
        (2, &[3], 2),
        (2, &[2, 0, 1], 3),
    ] {
        let shape = |count: usize| [samples, count, width];
        let seeds = counts.iter().zip(1..);
        let parts: Vec<Input> =
            seeds.map(|(count, seed)| Input::normal(shape(*count), seed)).collect();
        check(&parts, 1.0, &|tape, v| tape.concat_tokens(&v.iter().collect::<Vec<_>>()), &|v| {
            let of = |sample: usize| {
                let parts = v.iter().zip(counts).filter(|(_, count)| **count > 0);
                parts.flat_map(move |(part, count)| {
                    tokens(part, shape(*count), 0..*count)[sample].clone()
                })
            };
            (0..samples).flat_map(of).collect()
        });
    }
}

#[test]
fn split_takes_some_of_the_tokens_of_each_sample() {
    let ranges = [0..5, 0..2, 1..4, 4..5, 2..2];
    for (shape, range) in
        [1, 2].into_iter().flat_map(|n| ranges.clone().map(|range| ([n, 5, 3], range)))
    {
        check(
            &[Input::normal(shape, 1)],
            1.0,
            &|tape, v| tape.split_tokens(&v[0], range.clone()),
            &|v| tokens(&v[0], shape, range.clone()).concat(),
        );
    }
}

#[test]
fn gradients_of_all_uses_meet() {
    // Both halves of the tokens, the middle of them twice, and the whole of them.
    let shape = [2, 4, 3];
    check(
        &[Input::normal(shape, 1), Input::normal([2, 3, 3], 2).frozen()],
        4.0,
        &|tape, v| {
            let (first, last) = (tape.split_tokens(&v[0], 0..3)?, tape.split_tokens(&v[0], 1..4)?);
            tape.concat_tokens(&[&first, &v[1], &last, &v[0], &last])
        },
        &|v| {
            let of = |x: &[Dual], n: usize, range| tokens(x, [2, n, 3], range);
            let parts = [
                of(&v[0], 4, 0..3),
                of(&v[1], 3, 0..3),
                of(&v[0], 4, 1..4),
                of(&v[0], 4, 0..4),
                of(&v[0], 4, 1..4),
            ];
            (0..2).flat_map(|sample| parts.iter().flat_map(move |p| p[sample].clone())).collect()
        },
    );
}

#[test]
fn a_whole_of_parts_that_are_made_again_is_made_again() {
    let block = |tape: &Tape<'_>, v: &[Var]| {
        let part = tape.activate(&tape.scale(&v[0], 0.5)?, Activation::Silu)?;
        let gate = tape.concat_tokens(&[&part, &tape.scale(&v[1], 2.0)?])?;
        tape.glu(&gate, &v[2], Activation::Silu)
    };
    let exact = |v: &[Vec<Dual>]| -> Vec<Dual> {
        let part: Vec<Dual> = v[0].iter().map(|x| active(Activation::Silu, *x * 0.5)).collect();
        let other: Vec<Dual> = v[1].iter().map(|x| *x * 2.0).collect();
        let samples = part.chunks(6).zip(other.chunks(3));
        let gates = samples.flat_map(|(first, last)| [first, last].concat());
        gates.zip(&v[2]).map(|(gate, up)| active(Activation::Silu, gate) * *up).collect()
    };
    let (part, other) = (Input::normal([2, 2, 3], 1), Input::normal([2, 1, 3], 2));
    let up = Input::normal([2, 3, 3], 3);
    let frozen = [part.clone().frozen(), other.clone().frozen(), up.clone()];
    for inputs in [[part, other, up], frozen] {
        check(&inputs, 4.0, &block, &exact);
        check(&inputs, 4.0, &recomputed(block), &exact);
    }
}

#[test]
fn a_rounded_gradient_is_added_to_that_of_a_parameter() {
    let device = device();
    let mut params = Params::default();
    let numbers = [half::bf16::ONE; 4];
    let x = params.add(device.upload([1, 2, 2], &numbers).unwrap());
    let tape = Tape::training(&device, &params, 0);
    let part = tape.split_tokens(&tape.param(x), 1..2).unwrap();
    let all = tape.concat_tokens(&[&part, &tape.param(x)]).unwrap();
    let mut gradients = Gradients::default();
    drop(part);
    let gradient = device.upload([1, 3, 2], &[half::bf16::ONE; 6]).unwrap();
    tape.backward_from(all, gradient, &mut gradients).unwrap();
    assert_eq!(gradients.get(x).unwrap().to_vec::<f32>(), [1.0, 1.0, 2.0, 2.0]);
}

#[test]
fn nan_stays_nan() {
    let device = device();
    let params = Params::default();
    let tape = Tape::inference(&device, &params, 0);
    let x = Var::from(device.upload([1, 3, 1], &[1.0, f32::NAN, f32::INFINITY]).unwrap());
    let all = tape.concat_tokens(&[&x, &tape.split_tokens(&x, 1..3).unwrap()]).unwrap();
    let all = all.tensor().to_vec::<f32>();
    assert!(all[1].is_nan() && all[3].is_nan(), "{all:?}");
    assert_eq!((all[0], all[2], all[4]), (1.0, f32::INFINITY, f32::INFINITY));
}

#[test]
fn what_does_not_fit_is_said_with_both_shapes() {
    let device = device();
    let params = Params::default();
    let tape = Tape::inference(&device, &params, 0);
    let zeros = |sizes: &[usize], dtype| Var::from(device.zeros(Shape::new(sizes), dtype).unwrap());
    let x = zeros(&[2, 3, 4], Dtype::F32);
    let concat = |parts: &[&Var]| tape.concat_tokens(parts).err().unwrap().to_string();
    assert_eq!(
        concat(&[&x, &zeros(&[2, 3, 5], Dtype::F32)]),
        "concat_tokens: part has shape [2, 3, 5], expected [2, 3, 4]"
    );
    assert_eq!(
        concat(&[&x, &zeros(&[1, 2, 4], Dtype::F32)]),
        "concat_tokens: part has shape [1, 2, 4], expected [2, 2, 4]"
    );
    assert_eq!(
        concat(&[&zeros(&[3, 4], Dtype::F32)]),
        "concat_tokens: part of shape [3, 4] has 2 dimensions, expected 3"
    );
    assert_eq!(
        concat(&[&x, &zeros(&[2, 3, 4], Dtype::F16)]),
        "concat_tokens: part is f16, expected f32"
    );
    assert_eq!(concat(&[]), "concat_tokens: number of parts is 0, expected 1 or more");
    let split =
        |first: usize, end: usize| tape.split_tokens(&x, first..end).err().unwrap().to_string();
    assert_eq!(split(1, 4), "split_tokens: range is 1..4, expected a part of 0..3");
    assert_eq!(split(2, 1), "split_tokens: range is 2..1, expected a part of 0..3");
    let ids = zeros(&[2, 3, 4], Dtype::U32);
    let error = tape.split_tokens(&ids, 0..1).err().unwrap().to_string();
    assert_eq!(error, "split_tokens: x is u32, expected f32, bf16 or f16");
}
