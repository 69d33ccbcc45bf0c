//! Gather and scatter against their formulas.

use crate::testing::{Dual, Input, check, device};
use crate::{Dtype, Params, Shape, Tape, Tensor, Var};

/// y[s, i] = x[s, ids[s, i]]
pub fn gathered(x: &[Dual], ids: &[u32], [n, n_tokens, width]: [usize; 3]) -> Vec<Dual> {
    let row = |index: usize| (index / n * n_tokens + ids[index] as usize) * width;
    (0..ids.len()).flat_map(|index| x[row(index)..][..width].to_vec()).collect()
}

/// y[s, ids[s, i]] += x[s, i]
fn scattered(x: &[Dual], ids: &[u32], [n, n_tokens, width]: [usize; 3]) -> Vec<Dual> {
    let mut y = vec![Dual::default(); ids.len() / n * n_tokens * width];
    for (index, id) in ids.iter().enumerate() {
        for column in 0..width {
            let to = (index / n * n_tokens + *id as usize) * width + column;
            y[to] = y[to] + x[index * width + column];
        }
    }
    y
}

/// Two samples: twice the same, out of order, the first and the last.
const IDS: [u32; 8] = [3, 0, 3, 1, 4, 2, 0, 4];

fn ids(tape: &Tape<'_>, shape: [usize; 2], ids: &[u32]) -> Tensor {
    tape.device().upload(shape, ids).unwrap()
}

#[test]
fn tokens_are_gathered() {
    for width in [1, 7, 19] {
        let x = Input::normal([2, 5, width], 1);
        check(&[x], 2.0, &|tape, v| tape.gather_tokens(&v[0], &ids(tape, [2, 4], &IDS)), &|v| {
            gathered(&v[0], &IDS, [4, 5, width])
        });
    }
}

#[test]
fn tokens_are_scattered() {
    // Into more places than there are tokens, and into fewer.
    for (n, n_tokens) in [(4, 5), (4, 6), (8, 5)] {
        let x = Input::normal([8 / n, n, 3], 1);
        check(
            &[x],
            2.0,
            &|tape, v| tape.scatter_tokens(&v[0], &ids(tape, [8 / n, n], &IDS), n_tokens),
            &|v| scattered(&v[0], &IDS, [n, n_tokens, 3]),
        );
    }
}

#[test]
fn gradients_of_several_uses_add_up() {
    let x = Input::normal([2, 5, 3], 1);
    check(
        &[x],
        4.0,
        &|tape, v| {
            let taken = tape.gather_tokens(&v[0], &ids(tape, [2, 4], &IDS))?;
            tape.add(&tape.scatter_tokens(&taken, &ids(tape, [2, 4], &IDS), 5)?, &v[0])
        },
        &|v| {
            let taken = gathered(&v[0], &IDS, [4, 5, 3]);
            let back = scattered(&taken, &IDS, [4, 5, 3]).into_iter();
            back.zip(&v[0]).map(|(back, x)| back + *x).collect()
        },
    );
    let x = Input::normal([1, 4, 2], 1);
    let twice = |tape: &Tape<'_>, x: &Var| {
        let y = tape.scatter_tokens(x, &ids(tape, [1, 4], &[0, 2, 1, 2]), 5)?;
        tape.add(&y, &tape.scatter_tokens(x, &ids(tape, [1, 4], &[4, 4, 4, 0]), 5)?)
    };
    check(&[x], 4.0, &|tape, v| twice(tape, &v[0]), &|v| {
        let first = scattered(&v[0], &[0, 2, 1, 2], [4, 5, 2]).into_iter();
        first.zip(scattered(&v[0], &[4, 4, 4, 0], [4, 5, 2])).map(|(a, b)| a + b).collect()
    });
}

#[test]
fn what_keeps_a_scatter_keeps_the_way() {
    let x = Input::normal([1, 4, 2], 1);
    let silu = crate::ops::Activation::Silu;
    check(
        &[x],
        8.0,
        &|tape, v| {
            let y = tape.scatter_tokens(&v[0], &ids(tape, [1, 4], &[0, 2, 1, 2]), 5)?;
            tape.activate(&y, silu)
        },
        &|v| {
            let y = scattered(&v[0], &[0, 2, 1, 2], [4, 5, 2]).into_iter();
            y.map(|y| crate::ops::activation::tests::exact(silu, y)).collect()
        },
    );
}

#[test]
fn many_that_land_together_are_not_rounded_one_by_one() {
    let device = device();
    let params = Params::default();
    let tape = Tape::inference(&device, &params, 0);
    let ones = vec![half::bf16::from_f32(1.0); 1000];
    let x = Var::from(device.upload([1, 1000, 1], &ones).unwrap());
    let ids = device.zeros([1, 1000], Dtype::U32).unwrap();
    let y = tape.scatter_tokens(&x, &ids, 2).unwrap();
    assert_eq!(y.tensor().to_f32_vec(), [1000.0, 0.0]);
}

#[test]
fn nothing_and_nan_pass_through() {
    let device = device();
    let params = Params::default();
    let tape = Tape::inference(&device, &params, 0);
    let x = Var::from(device.upload([1, 2, 1], &[f32::NAN, f32::INFINITY]).unwrap());
    let y = tape.gather_tokens(&x, &ids(&tape, [1, 3], &[1, 0, 1])).unwrap();
    let numbers = y.tensor().to_vec::<f32>();
    assert!(numbers[0] == f32::INFINITY && numbers[1].is_nan());
    let y = tape.scatter_tokens(&x, &ids(&tape, [1, 2], &[0, 0]), 2).unwrap();
    let numbers = y.tensor().to_vec::<f32>();
    assert!(numbers[0].is_nan() && numbers[1] == 0.0);

    let zeros = |sizes: &[usize]| Var::from(device.zeros(Shape::new(sizes), Dtype::F32).unwrap());
    let none = ids(&tape, [2, 0], &[]);
    assert_eq!(tape.gather_tokens(&zeros(&[2, 0, 3]), &none).unwrap().shape(), [2, 0, 3].into());
    let y = tape.scatter_tokens(&zeros(&[2, 0, 3]), &none, 2).unwrap();
    assert_eq!(y.tensor().to_vec::<f32>(), [0.0; 12]);
    assert_eq!(tape.scatter_tokens(&zeros(&[2, 0, 3]), &none, 0).unwrap().shape().elements(), 0);
}

#[test]
fn what_does_not_fit_is_said_with_both_values() {
    let device = device();
    let params = Params::default();
    let tape = Tape::inference(&device, &params, 0);
    let x = Var::from(device.zeros([2, 3, 4], Dtype::F32).unwrap());
    let outside = ids(&tape, [2, 3], &[0, 1, 2, 2, 3, 0]);
    let error = tape.gather_tokens(&x, &outside).err().unwrap().to_string();
    assert_eq!(error, "gather_tokens: index 3 is out of range, there are 3 tokens");
    let error = tape.scatter_tokens(&x, &outside, 2).err().unwrap().to_string();
    assert_eq!(error, "scatter_tokens: index 2 is out of range, there are 2 tokens");
    let error = tape.gather_tokens(&x, &ids(&tape, [1, 2], &[0, 0])).err().unwrap().to_string();
    assert_eq!(error, "gather_tokens: ids has shape [1, 2], expected [2, 2]");
    let error = tape.scatter_tokens(&x, &ids(&tape, [2, 1], &[0, 0]), 3).err().unwrap();
    assert_eq!(error.to_string(), "scatter_tokens: ids has shape [2, 1], expected [2, 3]");
    let floats = device.zeros([2, 3], Dtype::F32).unwrap();
    let error = tape.gather_tokens(&x, &floats).err().unwrap().to_string();
    assert_eq!(error, "gather_tokens: ids is f32, expected u32");
    let flat = x.reshape([6, 4]);
    let error = tape.gather_tokens(&flat, &outside).err().unwrap().to_string();
    assert_eq!(error, "gather_tokens: x of shape [6, 4] has 2 dimensions, expected 3");
}
