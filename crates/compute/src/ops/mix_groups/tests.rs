//! Groups mixed by a matrix against their formula, and layers whose weight is a Kronecker product.

use crate::ops::Linear;
use crate::testing::{Dual, Input, check, check_gpu, device, for_random_sizes, recomputed, upload};
use crate::{Dtype, Params, Tape, Var};

const SCALE: f32 = 0.7;

/// The sizes of a case: rows, groups before and after, and their width.
type Sizes = [usize; 4];

fn inputs([rows, from, to, width]: Sizes) -> [Input; 2] {
    [Input::normal([rows, from * width], 1), Input::normal([to, from], 2).f32()]
}

fn exact([rows, from, to, width]: Sizes, v: &[Vec<Dual>]) -> Vec<Dual> {
    let number = |t: usize, i: usize, q: usize| {
        let sum = (0..from).map(|p| v[1][i * from + p] * v[0][(t * from + p) * width + q]);
        sum.sum::<Dual>() * f64::from(SCALE)
    };
    let places = |t| (0..to).flat_map(move |i| (0..width).map(move |q| (t, i, q)));
    (0..rows).flat_map(places).map(|(t, i, q)| number(t, i, q)).collect()
}

#[test]
fn groups_are_mixed_by_a_matrix() {
    let mix = |sizes: Sizes| {
        let width = sizes[3];
        let op = move |tape: &Tape<'_>, v: &[Var]| tape.mix_groups(&v[0], &v[1], width, SCALE);
        check(&inputs(sizes), 8.0, &op, &|v| exact(sizes, v));
        check(&inputs(sizes), 8.0, &recomputed(op), &|v| exact(sizes, v));
    };
    for sizes in
        [[1, 1, 1, 1], [3, 2, 5, 4], [2, 5, 3, 16], [20, 2, 3, 5], [1, 6, 5, 35], [2, 17, 18, 1]]
    {
        mix(sizes);
    }
    for_random_sizes(3, [4, 4, 4, 20], mix);
}

/// Shapes at which a GPU's weight gradient is made of several sums and tiles.
#[test]
fn a_gpu_mixes_many_rows() {
    for sizes in [[70, 17, 18, 3], [130, 6, 33, 40]] {
        check_gpu(&inputs(sizes), 8.0, &move |tape, v| {
            tape.mix_groups(&v[0], &v[1], sizes[3], SCALE)
        });
    }
}

/// x·(w ⊗ v)ᵀ beside a frozen weight, by a matrix that exists.
#[test]
fn a_layer_with_a_kronecker_product() {
    let (rows, [l, k], [m, n]) = (5, [2, 3], [4, 6]);
    let given = [
        Input::normal([rows, m * n], 1),
        Input::normal([l * k, m * n], 2).frozen(),
        Input::normal([l, m], 3).f32(),
        Input::normal([k, n], 4).f32(),
    ];
    check(
        &given,
        16.0,
        &|tape, v| {
            let y = tape.linear(&v[0], Linear::new(&v[1]))?;
            let mixed = tape.mix_groups(&v[0], &v[2], n, SCALE)?;
            let onto = y.reshape([rows * l, k]);
            let y = tape.linear(&mixed, Linear { onto: Some(&onto), ..Linear::new(&v[3]) })?;
            Ok(y.reshape([rows, l * k]))
        },
        &|v| {
            let weight = |o: usize, i: usize| {
                let factor = v[2][o / k * m + i / n] * v[3][o % k * n + i % n];
                v[1][o * m * n + i] + factor * f64::from(SCALE)
            };
            let row = |x: &[Dual]| -> Vec<Dual> {
                (0..l * k).map(|o| (0..m * n).map(|i| x[i] * weight(o, i)).sum()).collect()
            };
            v[0].chunks(m * n).flat_map(row).collect()
        },
    );
}

/// Two mixed after each other: the rows between them are groups.
#[test]
fn a_low_rank_matrix_is_two() {
    let (rows, from, rank, to, width) = (3, 6, 2, 5, 4);
    let given = [
        Input::normal([rows, from * width], 1),
        Input::normal([to, rank], 2).f32(),
        Input::normal([rank, from], 3).f32(),
    ];
    check(
        &given,
        8.0,
        &|tape, v| {
            let inner = tape.mix_groups(&v[0], &v[2], width, SCALE)?;
            tape.mix_groups(&inner, &v[1], width, 1.0)
        },
        &|v| {
            let number = |i: usize, p: usize| -> Dual {
                (0..rank).map(|r| v[1][i * rank + r] * v[2][r * from + p]).sum()
            };
            let whole = (0..to).flat_map(|i| (0..from).map(move |p| (i, p)));
            let whole: Vec<Dual> = whole.map(|(i, p)| number(i, p)).collect();
            exact([rows, from, to, width], &[v[0].clone(), whole])
        },
    );
}

#[test]
fn nan_stays_in_its_row_and_nothing_gives_nothing() {
    let (device, params) = (device(), Params::default());
    let tape = Tape::inference(&device, &params, 0);
    let [mut x, w] = inputs([2, 2, 3, 2]);
    x.values[0] = f32::NAN;
    let vars = [&x, &w].map(|input| Var::from(upload(&device, input, Dtype::F32)));
    let y = tape.mix_groups(&vars[0], &vars[1], 2, SCALE).unwrap().tensor().to_vec::<f32>();
    let is_nan: Vec<bool> = y.iter().map(|y| y.is_nan()).collect();
    let row = [true, false, true, false, true, false];
    assert_eq!(is_nan, [row, [false; 6]].concat());
    for sizes in [[0, 2, 3, 4], [2, 0, 3, 4], [2, 3, 0, 4], [2, 3, 4, 0]] {
        let tape = Tape::training(&device, &params, 0);
        let [x, w] = inputs(sizes).map(|input| tape.leaf(upload(&device, &input, Dtype::F32)));
        let y = tape.mix_groups(&x, &w, sizes[3], SCALE).unwrap();
        assert_eq!(y.shape().elements(), 0, "{sizes:?}");
    }
}

#[test]
fn what_does_not_fit_is_said() {
    let (device, params) = (device(), Params::default());
    let tape = Tape::inference(&device, &params, 0);
    let zeros = |shape: [usize; 2]| Var::from(device.zeros(shape, Dtype::F32).unwrap());
    let error = tape.mix_groups(&zeros([3, 7]), &zeros([2, 2]), 4, 1.0).err().unwrap().to_string();
    assert!(error.starts_with("mix_groups: x"), "{error}");
}
