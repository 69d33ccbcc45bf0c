//! Khatri-Rao products against their formula, and as factors of a layer.

use super::SharedAxis;
use crate::ops::{Linear, Lora};
use crate::testing::{Dual, Input, check, check_f32, device, for_random_sizes, recomputed, upload};
use crate::{Dtype, Params, Tape, Var};

/// y(i·s + j, c) = a(i, c)·b(j, c).
fn exact(axis: SharedAxis, [shared, r, s]: [usize; 3], v: &[Vec<Dual>]) -> Vec<Dual> {
    let mut y = vec![Dual::default(); shared * r * s];
    for (pair, c) in (0..r * s).flat_map(|pair| (0..shared).map(move |c| (pair, c))) {
        let (i, j) = (pair / s, pair % s);
        match axis {
            SharedAxis::Rows => y[c * r * s + pair] = v[0][c * r + i] * v[1][c * s + j],
            SharedAxis::Columns => {
                y[pair * shared + c] = v[0][i * shared + c] * v[1][j * shared + c];
            }
        }
    }
    y
}

fn inputs(axis: SharedAxis, [shared, r, s]: [usize; 3]) -> [Input; 2] {
    let input = |own, seed| Input::normal(axis.shape(shared, own), seed).f32();
    [input(r, 1), input(s, 2)]
}

#[test]
fn all_pairs_of_each_row_or_column() {
    for axis in [SharedAxis::Rows, SharedAxis::Columns] {
        let op = move |tape: &Tape<'_>, v: &[Var]| tape.khatri_rao(&v[0], &v[1], axis);
        let check = |sizes: [usize; 3]| {
            check_f32(&inputs(axis, sizes), 4.0, &op, &|v| exact(axis, sizes, v));
            check_f32(&inputs(axis, sizes), 4.0, &recomputed(op), &|v| exact(axis, sizes, v));
        };
        for sizes in [[1, 1, 1], [5, 2, 3], [70, 2, 2], [3, 1, 33], [40, 3, 2]] {
            check(sizes);
        }
        for_random_sizes(3, [20, 4, 4], check);
    }
}

/// x·((B·A) ⊙ (D·C))ᵀ, by matrices that exist.
#[test]
fn a_layer_with_the_elementwise_product_of_two_low_rank_matrices() {
    let (rank, outputs, width) = (3, 6, 8);
    let f32 = |shape: [usize; 2], seed| Input::normal(shape, seed).f32();
    let given = [
        Input::normal([5, width], 1),
        Input::normal([outputs, width], 2).frozen(),
        f32([outputs, rank], 3),
        f32([rank, width], 4),
        f32([outputs, rank], 5),
        f32([rank, width], 6),
    ];
    check(
        &given,
        16.0,
        &|tape, v| {
            let up = tape.khatri_rao(&v[2], &v[4], SharedAxis::Rows)?;
            let down = tape.khatri_rao(&v[3], &v[5], SharedAxis::Columns)?;
            let lora = Some(Lora { down: &down, up: &up, scale: 0.7, dropout: 0.0 });
            tape.linear(&v[0], Linear { lora, ..Linear::new(&v[1]) })
        },
        &|v| {
            let low = |up: &[Dual], down: &[Dual], o: usize, i: usize| -> Dual {
                (0..rank).map(|k| up[o * rank + k] * down[k * width + i]).sum()
            };
            let weight = |o: usize, i: usize| {
                v[1][o * width + i]
                    + low(&v[2], &v[3], o, i) * low(&v[4], &v[5], o, i) * f64::from(0.7f32)
            };
            let row = |x: &[Dual]| -> Vec<Dual> {
                (0..outputs).map(|o| (0..width).map(|i| x[i] * weight(o, i)).sum()).collect()
            };
            v[0].chunks(width).flat_map(row).collect()
        },
    );
}

#[test]
fn nan_and_nothing_are_passed_on() {
    let (device, params) = (device(), Params::default());
    let tape = Tape::inference(&device, &params, 0);
    let axis = SharedAxis::Rows;
    let [mut a, b] = inputs(axis, [2, 2, 2]);
    a.values[0] = f32::NAN;
    let vars = [&a, &b].map(|input| Var::from(upload(&device, input, Dtype::F32)));
    let y = tape.khatri_rao(&vars[0], &vars[1], axis).unwrap().tensor().to_vec::<f32>();
    let is_nan: Vec<bool> = y.iter().map(|y| y.is_nan()).collect();
    assert_eq!(is_nan, [true, true, false, false, false, false, false, false]);
    for sizes in [[0, 2, 3], [2, 0, 3], [2, 3, 0]] {
        let tape = Tape::training(&device, &params, 0);
        let [a, b] =
            inputs(axis, sizes).map(|input| tape.leaf(upload(&device, &input, Dtype::F32)));
        assert_eq!(tape.khatri_rao(&a, &b, axis).unwrap().shape().elements(), 0);
    }
}

#[test]
fn what_does_not_fit_is_said() {
    let (device, params) = (device(), Params::default());
    let tape = Tape::inference(&device, &params, 0);
    let zeros = |shape: [usize; 2]| Var::from(device.zeros(shape, Dtype::F32).unwrap());
    let message = |a: [usize; 2], b: [usize; 2], axis| {
        tape.khatri_rao(&zeros(a), &zeros(b), axis).err().unwrap().to_string()
    };
    let expected = "khatri_rao: b has shape [5, 3], expected [4, 3]";
    assert_eq!(message([4, 2], [5, 3], SharedAxis::Rows), expected);
    let expected = "khatri_rao: b has shape [3, 5], expected [3, 4]";
    assert_eq!(message([2, 4], [3, 5], SharedAxis::Columns), expected);
}
