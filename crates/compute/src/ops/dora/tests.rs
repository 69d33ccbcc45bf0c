//! Lengths of adapted rows against their formula, and whole layers with them.

use super::row_norms;
use crate::ops::activation::tests::exact as active;
use crate::ops::{Activation, Linear, Lora, Weight};
use crate::testing::{Dual, Input, check, compare, device, for_random_sizes, recomputed, upload};
use crate::{
    Device, Dtype, Gradients, Params, Quantisation, Quantised, RandomSequence, Result, Tape, Var,
};

const SCALE: f32 = 0.7;

fn lora<'a>(down: &'a Var, up: &'a Var) -> Lora<'a> {
    Lora { down, up, scale: SCALE, dropout: 0.0 }
}

/// Weight, A, B and magnitude.
fn inputs(outputs: usize, inputs: usize, rank: usize) -> [Input; 4] {
    [
        Input::normal([outputs, inputs], 1).frozen(),
        Input::normal([rank, inputs], 2).f32().scaled(0.5).frozen(),
        Input::normal([outputs, rank], 3).f32().frozen(),
        Input::normal([outputs], 4).f32(),
    ]
}

fn dora_scale(tape: &Tape<'_>, v: &[Var]) -> Result<Var> {
    let weight = Weight::from(&v[0]);
    tape.dora_scale(weight, &row_norms(weight)?, lora(&v[1], &v[2]), &v[3])
}

/// magnitude / ‖W + scale·B·A‖, by a matrix that exists.
fn exact(v: &[Vec<Dual>]) -> Vec<Dual> {
    let (outputs, rank) = (v[3].len(), v[2].len() / v[3].len());
    let width = v[0].len() / outputs;
    let at = |row: usize, column: usize| {
        let low = (0..rank).map(|r| v[2][row * rank + r] * v[1][r * width + column]);
        v[0][row * width + column] + low.sum::<Dual>() * f64::from(SCALE)
    };
    let norm =
        |row| (0..width).map(|column| at(row, column) * at(row, column)).sum::<Dual>().sqrt();
    v[3].iter().enumerate().map(|(row, magnitude)| *magnitude / norm(row)).collect()
}

#[test]
fn a_magnitude_is_divided_by_the_adapted_norm() {
    for [outputs, width, rank] in [[5, 7, 2], [1, 1, 1], [70, 40, 33], [3, 300, 4]] {
        check(&inputs(outputs, width, rank), 8.0, &dora_scale, &exact);
    }
    // The end of a block is not run again, unless its record keeps something of its own.
    check(&inputs(5, 7, 2), 8.0, &recomputed(dora_scale), &exact);
    for_random_sizes(6, [20, 30, 5], |[outputs, width, rank]| {
        check(&inputs(outputs, width, rank), 8.0, &dora_scale, &exact);
    });
}

#[test]
fn a_whole_layer() {
    // The norm is a constant in backward: the reference reads it from copies of A and B that are
    // not trained.
    let [weight, down, up, magnitude] = inputs(6, 8, 2);
    let trained = |input: &Input| Input { is_trained: true, ..input.clone() };
    let (a, b) = (trained(&down), trained(&up));
    let (x, bias) = (Input::normal([3, 8], 5), Input::normal([6], 6).f32());
    check(
        &[weight, down, up, magnitude, x, a, b, bias],
        16.0,
        &|tape, v| {
            let layer = Linear { lora: Some(lora(&v[5], &v[6])), ..Linear::new(&v[0]) };
            let y = tape.linear(&v[4], layer)?;
            tape.affine(&y, &dora_scale(tape, v)?, Some(&v[7]), Activation::Silu)
        },
        &|v| {
            let dot = |a: &[Dual], b: &[Dual]| a.iter().zip(b).map(|(a, b)| *a * *b).sum::<Dual>();
            let row = |x: &[Dual]| -> Vec<Dual> {
                let inner: Vec<Dual> = v[5].chunks(8).map(|a| dot(x, a)).collect();
                let rows = v[0].chunks(8).zip(v[6].chunks(2)).zip(exact(v)).zip(&v[7]);
                rows.map(|(((w, b), g), bias)| {
                    let sum = dot(x, w) + dot(&inner, b) * f64::from(SCALE);
                    active(Activation::Silu, sum * g + *bias)
                })
                .collect()
            };
            v[4].chunks(8).flat_map(row).collect()
        },
    );
}

/// Numbers of 1 where nothing was trained yet: B is zero and the magnitude the norm.
#[test]
fn it_starts_as_the_layer_itself() {
    let device = device();
    let params = Params::default();
    let tape = Tape::inference(&device, &params, 0);
    for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
        let weight =
            Var::from(device.normal([50, 300], dtype, 0.02, RandomSequence::new(1, 0)).unwrap());
        let down =
            Var::from(device.normal([4, 300], Dtype::F32, 0.1, RandomSequence::new(1, 1)).unwrap());
        let up = Var::from(device.zeros([50, 4], Dtype::F32).unwrap());
        let norms = row_norms((&weight).into()).unwrap();
        let magnitude = Var::from(norms.clone());
        let scales = tape.dora_scale((&weight).into(), &norms, lora(&down, &up), &magnitude);
        assert_eq!(scales.unwrap().tensor().to_vec::<f32>(), [1.0; 50], "{dtype}");
    }
}

/// A quantised weight against the same numbers dense, on both kinds of machine.
#[test]
fn a_quantised_weight_is_its_numbers() {
    let devices = [device(), Device::cpu_without_amx(2, 1 << 26)];
    let cases = [Quantisation::Int8, Quantisation::Nf4, Quantisation::Fp8];
    for (device, how) in devices.iter().flat_map(|device| cases.map(|how| (device, how))) {
        let [weight, down, up, magnitude] =
            inputs(70, 128, 33).map(|input| Var::from(upload(device, &input, Dtype::F32)));
        let quantised = Quantised::new(weight.tensor(), how).unwrap();
        let numbers = quantised.to_f32_vec().unwrap();
        let same = Var::from(device.upload([70, 128], &numbers).unwrap());
        let params = Params::default();
        let tape = Tape::inference(device, &params, 0);
        let run = |weight: Weight<'_>| {
            let norms = row_norms(weight).unwrap();
            let scales = tape.dora_scale(weight, &norms, lora(&down, &up), &magnitude).unwrap();
            (norms.to_vec::<f32>(), scales.tensor().to_vec::<f32>())
        };
        let (ours, dense) = (run((&quantised).into()), run((&same).into()));
        let norm = |row: &[f32]| row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
        let norms: Vec<f64> = numbers.chunks(128).map(norm).collect();
        compare(&format!("{how} norms"), &ours.0, &norms, 1e-6);
        let dense: Vec<f64> = dense.1.iter().map(|scale| f64::from(*scale)).collect();
        compare(&format!("{how} scales"), &ours.1, &dense, 2e-6);
    }
}

#[test]
fn nothing_reaches_the_factors() {
    let device = device();
    let params = Params::default();
    let tape = Tape::training(&device, &params, 0);
    let vars = inputs(5, 7, 2).map(|input| tape.leaf(upload(&device, &input, Dtype::F32)));
    let scales = dora_scale(&tape, &vars).unwrap();
    let one = device.upload([5], &[1.0f32; 5]).unwrap();
    let mut leaves = tape.backward_from(scales, one, &mut Gradients::default()).unwrap();
    assert_eq!(
        [0, 1, 2, 3].map(|index| leaves.take(&vars[index]).is_some()),
        [false, false, false, true]
    );
    // Nor is anything recorded for a magnitude that is frozen.
    let tape = Tape::training(&device, &params, 0);
    let [weight, down, up, magnitude] =
        inputs(5, 7, 2).map(|input| tape.leaf(upload(&device, &input, Dtype::F32)));
    let magnitude = Var::from(magnitude.into_tensor());
    let scales = dora_scale(&tape, &[weight, down, up, magnitude]).unwrap();
    assert!(scales.grad_target().is_none());
}

#[test]
fn rows_without_length_stay_finite() {
    let device = device();
    let params = Params::default();
    let tape = Tape::inference(&device, &params, 0);
    let var =
        |shape: [usize; 2], numbers: &[f32]| Var::from(device.upload(shape, numbers).unwrap());
    // A row of zeros, and one that its adapter cancels, in thirds that do not cancel exactly.
    let third = 1.0 / 3.0;
    let weight = var([2, 2], &[0.0, 0.0, third, -third]);
    let (down, up) = (var([1, 2], &[third / SCALE, -third / SCALE]), var([2, 1], &[0.0, -1.0]));
    let norms = row_norms((&weight).into()).unwrap();
    let magnitude = Var::from(norms.clone());
    let scales = tape.dora_scale((&weight).into(), &norms, lora(&down, &up), &magnitude).unwrap();
    let scales = scales.tensor().to_vec::<f32>();
    assert_eq!(scales[0], 0.0);
    assert!(scales[1] > 100.0 && scales[1] < 1e4, "{scales:?}");
}

#[test]
fn nan_is_not_hidden() {
    let device = device();
    let params = Params::default();
    let tape = Tape::inference(&device, &params, 0);
    for (poisoned, value) in (0..4).flat_map(|index| [(index, f32::NAN), (index, f32::INFINITY)]) {
        let mut index = 0;
        let vars = inputs(5, 7, 2).map(|mut input| {
            if index == poisoned {
                input.values[0] = value;
            }
            index += 1;
            Var::from(upload(&device, &input, Dtype::F32))
        });
        let scales = dora_scale(&tape, &vars).unwrap().tensor().to_vec::<f32>();
        let is_spoiled = !scales[0].is_finite() || scales[0] == 0.0;
        assert!(is_spoiled, "{poisoned} {value}: {scales:?}");
    }
}

#[test]
fn nothing_gives_nothing() {
    let device = device();
    let params = Params::default();
    let tape = Tape::training(&device, &params, 0);
    for [outputs, width, rank] in [[0, 3, 2], [3, 0, 2], [3, 2, 0]] {
        let zeros = |shape: [usize; 2]| tape.leaf(device.zeros(shape, Dtype::F32).unwrap());
        let (weight, down, up) =
            (zeros([outputs, width]), zeros([rank, width]), zeros([outputs, rank]));
        let magnitude = tape.leaf(device.zeros([outputs], Dtype::F32).unwrap());
        let scales = dora_scale(&tape, &[weight, down, up, magnitude]).unwrap();
        assert_eq!(scales.tensor().to_vec::<f32>(), vec![0.0; outputs]);
    }
}

#[test]
fn what_does_not_fit_is_said() {
    let device = device();
    let params = Params::default();
    let tape = Tape::inference(&device, &params, 0);
    let zeros =
        |sizes: &[usize]| Var::from(device.zeros(crate::Shape::new(sizes), Dtype::F32).unwrap());
    let (weight, down, up) = (zeros(&[5, 7]), zeros(&[2, 7]), zeros(&[5, 2]));
    let (five, six) = (zeros(&[5]), zeros(&[6]));
    let message = |norms: &Var, down: &Var, magnitude: &Var| {
        let scales = tape.dora_scale((&weight).into(), norms.tensor(), lora(down, &up), magnitude);
        scales.err().unwrap().to_string()
    };
    assert_eq!(message(&six, &down, &five), "dora_scale: norms has shape [6], expected [5]");
    assert_eq!(message(&five, &down, &six), "dora_scale: magnitude has shape [6], expected [5]");
    let narrow = zeros(&[2, 6]);
    assert_eq!(
        message(&five, &narrow, &five),
        "dora_scale: lora down has shape [2, 6], expected [2, 7]"
    );
    let error = row_norms((&five).into()).unwrap_err().to_string();
    assert_eq!(error, "row_norms: weight of shape [5] has 1 dimensions, expected 2");
}
