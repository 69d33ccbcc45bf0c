//! The linear layer against its formula, in every combination of its parts.

use super::{Linear, Lora, Weight};
use crate::ops::Activation;
use crate::ops::activation::tests::{ALL, exact};
use crate::testing::{
    Dual, Input, check, check_gpu, device, expect_not_hidden, for_random_sizes, on_gpu, upload,
};
use crate::{
    Device, Dtype, Gradients, Params, Quantisation, Quantised, RandomSequence, Tape, Tensor, Var,
};

/// Rows of x times rows of a matrix.
fn matmul(x: &[Dual], matrix: &[Dual], inner: usize) -> Vec<Dual> {
    let dot = |a: &[Dual], b: &[Dual]| a.iter().zip(b).map(|(a, b)| *a * *b).sum();
    x.chunks(inner).flat_map(|x| matrix.chunks(inner).map(move |row| dot(x, row))).collect()
}

/// x, weight, bias, and the two halves of an adapter.
fn parts(rows: usize, [inputs, outputs, rank]: [usize; 3]) -> [Input; 5] {
    [
        Input::normal([rows, inputs], 1),
        Input::normal([outputs, inputs], 2).scaled(0.5),
        Input::normal([outputs], 3).f32(),
        Input::normal([rank, inputs], 4).f32().scaled(0.5),
        Input::normal([outputs, rank], 5).f32(),
    ]
}

fn layer(tape: &Tape<'_>, v: &[Var], activation: Activation) -> crate::Result<Var> {
    let lora = Some(Lora { down: &v[3], up: &v[4], scale: 0.7, dropout: 0.0 });
    tape.linear(&v[0], Linear { bias: Some(&v[2]), activation, lora, ..Linear::new(&v[1]) })
}

/// A layer whose result is recomputed for the norm that would save it.
fn remade(tape: &Tape<'_>, v: &[Var], is_remat: bool) -> crate::Result<Var> {
    let lora = Some(Lora { down: &v[3], up: &v[4], scale: 0.7, dropout: 0.0 });
    let layer = Linear { bias: Some(&v[2]), lora, is_remat, ..Linear::new(&v[1]) };
    tape.layer_norm(&tape.linear(&v[0], layer)?, None, None, 1e-6)
}

#[test]
fn a_recomputed_result_has_the_same_bits_and_is_not_held() {
    let device = device();
    let train = |is_remat: bool| {
        let mut params = Params::default();
        let v = parts(40, [48, 64, 3]).map(|part| params.add(upload(&device, &part, Dtype::F32)));
        let before = device.work().flops;
        let mut gradients = Gradients::default();
        let tape = Tape::training(&device, &params, 0);
        let v = v.map(|key| tape.param(key));
        let y = remade(&tape, &v, is_remat).unwrap();
        let gradient = upload(&device, &Input::normal([40, 64], 6), Dtype::F32);
        drop(v);
        let held = device.usage().in_use;
        tape.backward_from(y, gradient, &mut gradients).unwrap();
        let bits = |gradient: &Tensor| {
            gradient.to_vec::<f32>().iter().map(|value| value.to_bits()).collect::<Vec<_>>()
        };
        let bits: Vec<_> = gradients.all(5).into_iter().flatten().map(bits).collect();
        (bits, held, device.work().flops - before)
    };
    let ((once, held, flops), (twice, less, more)) = (train(false), train(true));
    assert_eq!((once.len(), &once), (5, &twice));
    // The result is not held; the matmul with the weight and with B is computed once more.
    assert_eq!(held - less, 40 * 64 * 4);
    assert_eq!(more - flops, 2 * 40 * (48 + 3) * 64);
}

fn check_layer(rows: usize, [inputs, outputs, rank]: [usize; 3], activation: Activation) {
    check(
        &parts(rows, [inputs, outputs, rank]),
        8.0,
        &|tape, v| layer(tape, v, activation),
        &|v| {
            let low = matmul(&matmul(&v[0], &v[3], inputs), &v[4], rank);
            let sums = matmul(&v[0], &v[1], inputs).into_iter().zip(low);
            let biased = sums.zip(v[2].iter().cycle());
            biased.map(|((y, low), bias)| exact(activation, y + low * 0.7 + *bias)).collect()
        },
    );
}

#[test]
fn all_parts_together() {
    check_layer(5, [7, 9, 3], Activation::GeluTanh);
    check_layer(1, [1, 1, 1], Activation::Silu);
    check_layer(33, [17, 18, 2], Activation::None);
}

#[test]
fn all_parts_at_random_sizes() {
    for_random_sizes(8, [9, 11, 13, 4], |[rows, inputs, outputs, rank]| {
        check_layer(rows, [inputs, outputs, rank], ALL[(rows + outputs) % ALL.len()]);
    });
}

#[test]
fn a_gpu_agrees_with_the_cpu_on_a_large_layer() {
    for activation in ALL {
        // Sums of about one, so that their rounding is not large beside what the hyperbolic tangent leaves of them.
        let parts = parts(200, [192, 256, 16]).map(|part| part.scaled(0.2));
        check_gpu(&parts, 8.0, &|tape, v| layer(tape, v, activation));
    }
}

#[test]
fn the_result_is_added_to_a_residual() {
    for (rows, inputs, outputs, rank) in [(5, 7, 9, 3), (33, 16, 40, 2), (1, 1, 1, 1)] {
        let mut inputs_of = parts(rows, [inputs, outputs, rank]).to_vec();
        inputs_of.push(Input::normal([rows, outputs], 6));
        let run = |tape: &Tape<'_>, v: &[Var]| {
            let lora = Some(Lora { down: &v[3], up: &v[4], scale: 0.7, dropout: 0.0 });
            let (bias, onto) = (Some(&v[2]), Some(&v[5]));
            tape.linear(&v[0], Linear { bias, lora, onto, ..Linear::new(&v[1]) })
        };
        check(&inputs_of, 8.0, &run, &|v| {
            let low = matmul(&matmul(&v[0], &v[3], inputs), &v[4], rank);
            let sums = matmul(&v[0], &v[1], inputs).into_iter().zip(low);
            let biased = sums.zip(v[2].iter().cycle()).zip(&v[5]);
            biased.map(|(((y, low), bias), onto)| y + low * 0.7 + *bias + *onto).collect()
        });
    }
}

#[test]
fn a_residual_goes_through_a_layer_and_past_it() {
    // x is the layer's input and what its result is added to, and its gradient comes both ways.
    let weight = Input::normal([9, 9], 2).scaled(0.5);
    check(
        &[Input::normal([5, 9], 1), weight],
        8.0,
        &|tape, v| tape.linear(&v[0], Linear { onto: Some(&v[0]), ..Linear::new(&v[1]) }),
        &|v| matmul(&v[0], &v[1], 9).into_iter().zip(&v[0]).map(|(y, x)| y + *x).collect(),
    );
}

#[test]
fn a_frozen_layer_takes_inputs_where_they_lie() {
    for (rows, [first, inputs, inner, outputs]) in
        [(5, [3, 7, 6, 9]), (1, [1, 1, 1, 1]), (34, [16, 8, 24, 40])]
    {
        let all = [
            Input::normal([rows, first], 1),
            Input::normal([rows, inputs], 2),
            Input::normal([inner, inputs], 3).scaled(0.5),
            Input::normal([outputs, first + inner], 4).scaled(0.2).frozen(),
            Input::normal([outputs], 5).f32().frozen(),
        ];
        let run = |tape: &Tape<'_>, v: &[Var]| {
            let up = Linear { activation: Activation::GeluTanh, ..Linear::new(&v[2]) };
            let inner = tape.linear(&v[1], up)?;
            tape.linear_of_parts(&[&v[0], &inner], &v[3], Some(&v[4]))
        };
        check(&all, 8.0, &run, &|v| {
            let sums = matmul(&v[1], &v[2], inputs).into_iter();
            let active: Vec<Dual> = sums.map(|x| exact(Activation::GeluTanh, x)).collect();
            let rows = v[0].chunks(first).zip(active.chunks(inner));
            let both: Vec<Dual> = rows.flat_map(|(a, b)| [a, b].concat()).collect();
            let y = matmul(&both, &v[3], first + inner).into_iter();
            y.zip(v[4].iter().cycle()).map(|(y, bias)| y + *bias).collect()
        });
    }
}

/// Two layers with an activation between them, and perhaps others who read what lies there.
#[test]
fn gradients_go_through_the_activation_before_a_layer() {
    let [x, up, bias, low_down, low_up] = parts(6, [7, 16, 2]);
    let down = Input::normal([5, 16], 6).scaled(0.5);
    let lora = [Input::normal([2, 16], 7).f32().scaled(0.5), Input::normal([5, 2], 8).f32()];
    let inputs = [vec![x, up, bias, low_down, low_up, down], lora.to_vec()].concat();
    for (activation, n_readers) in ALL.into_iter().flat_map(|f| [(f, 1), (f, 3)]) {
        let run = |tape: &Tape<'_>, v: &[Var]| {
            let h = layer(tape, v, activation)?;
            let before = tape.scale(&h, 0.5)?;
            let lora = Some(Lora { down: &v[6], up: &v[7], scale: 0.7, dropout: 0.0 });
            let down = |h: &Var| tape.linear(h, Linear { lora, ..Linear::new(&v[5]) });
            let y = down(&h)?;
            if n_readers == 1 {
                return Ok(y);
            }
            let after = tape.scale(&h, -0.25)?;
            tape.add(&tape.add(&y, &down(&before)?)?, &down(&after)?)
        };
        check(&inputs, 12.0, &run, &|v| {
            let low = matmul(&matmul(&v[0], &v[3], 7), &v[4], 2);
            let sums = matmul(&v[0], &v[1], 7).into_iter().zip(low);
            let biased = sums.zip(v[2].iter().cycle());
            let h: Vec<_> =
                biased.map(|((y, low), bias)| exact(activation, y + low * 0.7 + *bias)).collect();
            let low = matmul(&matmul(&h, &v[6], 16), &v[7], 2);
            let factor = if n_readers == 1 { 1.0 } else { 1.25 };
            let sums = matmul(&h, &v[5], 16).into_iter().zip(low);
            sums.map(|(y, low)| (y + low * 0.7) * factor).collect()
        });
    }
}

#[test]
fn a_gpu_agrees_with_the_cpu_on_two_large_layers() {
    for activation in ALL {
        let [x, up, ..] = parts(200, [64, 256, 16]);
        let down = Input::normal([72, 256], 6).scaled(0.1);
        check_gpu(&[x, up, down], 8.0, &|tape, v| {
            let h = tape.linear(&v[0], Linear { activation, ..Linear::new(&v[1]) })?;
            tape.linear(&h, Linear::new(&v[2]))
        });
    }
}

#[test]
fn a_weight_of_f32_meets_rounded_numbers() {
    // Large enough for a matrix unit, in tests too.
    let x = Input::normal([40, 3], 1);
    let weight = Input::normal([36, 3], 2).f32();
    check(&[x, weight], 8.0, &|tape, v| tape.linear(&v[0], Linear::new(&v[1])), &|v| {
        matmul(&v[0], &v[1], 3)
    });
}

#[test]
fn nan_is_not_hidden() {
    expect_not_hidden([3, 5], |tape, x| tape.linear(x, Linear::new(x)));
}

#[test]
fn a_plain_matmul_of_several_tiles() {
    // More rows and columns than a tile, and odd rests on both sides; only x is trained, so that
    // the reference is not asked for thousands of slopes.
    let x = Input::normal([70, 3], 1);
    let weight = Input::normal([290, 3], 2).frozen();
    check(&[x, weight], 8.0, &|tape, v| tape.linear(&v[0], Linear::new(&v[1])), &|v| {
        matmul(&v[0], &v[1], 3)
    });
}

#[test]
fn a_long_inner_length_is_summed_in_blocks() {
    let x = Input::normal([2, 1200], 1).scaled(0.1).frozen();
    let weight = Input::normal([3, 1200], 2).scaled(0.1).frozen();
    let bias = Input::normal([3], 3).f32();
    check(
        &[x, weight, bias],
        8.0,
        &|tape, v| tape.linear(&v[0], Linear { bias: Some(&v[2]), ..Linear::new(&v[1]) }),
        &|v| {
            let sums = matmul(&v[0], &v[1], 1200).into_iter();
            sums.zip(v[2].iter().cycle()).map(|(y, bias)| y + *bias).collect()
        },
    );
}

#[test]
fn nothing_times_anything_is_nothing() {
    let device = device();
    let params = Params::default();
    let tape = Tape::inference(&device, &params, 0);
    for (rows, inputs) in [(0, 4), (3, 0)] {
        let x = Var::from(device.zeros([rows, inputs], Dtype::F32).unwrap());
        let weight = Var::from(device.zeros([2, inputs], Dtype::F32).unwrap());
        let y = tape.linear(&x, Linear::new(&weight)).unwrap();
        assert_eq!(y.tensor().to_vec::<f32>(), vec![0.0; rows * 2]);
    }
}

#[test]
fn what_does_not_fit_is_said_with_both_shapes() {
    let device = device();
    let params = Params::default();
    let tape = Tape::inference(&device, &params, 0);
    let zeros =
        |sizes: &[usize]| Var::from(device.zeros(crate::Shape::new(sizes), Dtype::F32).unwrap());
    let (x, weight) = (zeros(&[2, 5]), zeros(&[3, 4]));
    let error = tape.linear(&x, Linear::new(&weight)).err().unwrap().to_string();
    assert_eq!(error, "linear: weight has shape [3, 4], expected [3, 5]");
    let (weight, bias) = (zeros(&[3, 5]), zeros(&[5]));
    let layer = Linear { bias: Some(&bias), ..Linear::new(&weight) };
    let error = tape.linear(&x, layer).err().unwrap().to_string();
    assert_eq!(error, "linear: bias has shape [5], expected [3]");
    let (down, up) = (zeros(&[2, 5]), zeros(&[3, 2]));
    let lora = Lora { down: &down, up: &up, scale: 1.0, dropout: 1.0 };
    let error = tape.linear(&x, Linear { lora: Some(lora), ..Linear::new(&weight) });
    assert_eq!(
        error.err().unwrap().to_string(),
        "linear: lora dropout is 1, expected 0 or more and below 1"
    );
    let ids = Var::from(device.zeros([2, 5], Dtype::U32).unwrap());
    let error = tape.linear(&ids, Linear::new(&weight)).err().unwrap().to_string();
    assert_eq!(error, "linear: x is u32, expected f32, bf16 or f16");
}

#[test]
fn dropout_hides_its_share_and_keeps_the_mean() {
    let device = device();
    let mut params = Params::default();
    let width = 4000;
    let down = params.add(device.upload([1, width], &vec![1.0f32; width]).unwrap());
    let up = params.add(device.upload([1, 1], &[1.0f32]).unwrap());
    let weight = Var::from(device.zeros([1, width], Dtype::F32).unwrap());
    let x = Var::from(device.upload([1, width], &vec![1.0f32; width]).unwrap());
    let mut gradients = Gradients::default();
    let tape = Tape::training(&device, &params, 3);
    let (a, b) = (tape.param(down), tape.param(up));
    let lora = Lora { down: &a, up: &b, scale: 1.0, dropout: 0.25 };
    let y = tape.linear(&x, Linear { lora: Some(lora), ..Linear::new(&weight) }).unwrap();
    let mean = y.tensor().to_vec::<f32>()[0] / width as f32;
    assert!((mean - 1.0).abs() < 0.05, "{mean}");
    drop((a, b));
    tape.backward(&y, &mut gradients).unwrap();
    // The gradient of A sees the very numbers that forward saw.
    let gradient = gradients.get(down).unwrap().to_vec::<f32>();
    assert!(gradient.iter().all(|value| *value == 0.0 || (value - 4.0 / 3.0).abs() < 1e-6));
    let sum: f64 = gradient.iter().map(|value| f64::from(*value)).sum();
    assert!((sum / width as f64 - f64::from(mean)).abs() < 1e-5);
    // Inference has no dropout.
    let tape = Tape::inference(&device, &params, 3);
    let (a, b) = (tape.param(down), tape.param(up));
    let lora = Lora { down: &a, up: &b, scale: 1.0, dropout: 0.25 };
    let y = tape.linear(&x, Linear { lora: Some(lora), ..Linear::new(&weight) }).unwrap();
    assert_eq!(y.tensor().to_vec::<f32>(), [width as f32]);
}

/// A quantised weight against the same numbers dense, forward and backward, on both kinds of CPU and
/// on a GPU, if there is one.
#[test]
fn a_quantised_weight_is_its_numbers() {
    let mut devices = vec![device(), Device::cpu_without_amx(2, 1 << 26)];
    devices.extend(on_gpu(1 << 26));
    let cases = [Quantisation::Int8, Quantisation::Nf4, Quantisation::Fp8];
    for (device, how) in devices.iter().flat_map(|device| cases.map(|how| (device, how))) {
        for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
            let weight = device.normal(WEIGHT, dtype, 0.5, RandomSequence::new(3, 1)).unwrap();
            let quantised = Quantised::new(&weight, how).unwrap();
            let same = device.upload(WEIGHT, &quantised.to_f32_vec().unwrap()).unwrap();
            let (same, what) = (Var::from(same), format!("{how} {dtype}"));
            assert_same(device, dtype, [(&quantised).into(), (&same).into()], &what);
        }
    }
}

/// A frozen weight of 16 bits beside activations in f32 on both kinds of CPU, against the same numbers in f32.
#[test]
fn a_weight_of_16_bits_is_its_numbers_in_f32() {
    for device in [Device::cpu(2, 1 << 26).unwrap(), Device::cpu_without_amx(2, 1 << 26)] {
        for dtype in [Dtype::Bf16, Dtype::F16] {
            let weight = device.normal(WEIGHT, dtype, 0.5, RandomSequence::new(3, 1)).unwrap();
            let same = Var::from(device.upload(WEIGHT, &weight.to_f32_vec()).unwrap());
            let weight = Var::from(weight);
            let what = format!("{dtype} beside f32");
            assert_same(&device, Dtype::F32, [(&weight).into(), (&same).into()], &what);
        }
    }
}

/// Outputs and inputs.
const WEIGHT: [usize; 2] = [100, 128];
/// Enough rows for a matrix unit, and a size at which its tiles have edges.
const ROWS: usize = 70;

/// Checks that a layer has the same output and gradient with either weight, as exactly as a dtype allows.
fn assert_same(device: &Device, dtype: Dtype, weights: [Weight<'_>; 2], what: &str) {
    let [outputs, inputs] = WEIGHT;
    let normal =
        |shape, stream| device.normal(shape, dtype, 0.5, RandomSequence::new(3, stream)).unwrap();
    let run = |weight: Weight<'_>| {
        let mut params = Params::default();
        let key = params.add(normal([ROWS, inputs], 2));
        let tape = Tape::training(device, &params, 0);
        let y = tape.linear(&tape.param(key), Linear::new(weight)).unwrap();
        let out = y.tensor().to_f32_vec();
        let loss = tape.mse(&y, &normal([ROWS, outputs], 3), None, None).unwrap();
        drop(y);
        let mut gradients = Gradients::default();
        tape.backward(&loss, &mut gradients).unwrap();
        [out, gradients.get(key).unwrap().to_f32_vec()]
    };
    let unit = if dtype == Dtype::F32 { 2e-6 } else { 2f32.powi(-7) };
    let [ours, same] = weights.map(run);
    for (ours, same) in ours.iter().zip(same) {
        let most = same.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
        for (ours, same) in ours.iter().zip(same) {
            assert!((ours - same).abs() < unit * most, "{what}: {ours} {same}");
        }
    }
}

#[test]
fn a_quantised_weight_of_another_width_is_refused() {
    let device = device();
    let weight = device.normal([8, 64], Dtype::F32, 1.0, RandomSequence::new(0, 0)).unwrap();
    let weight = Quantised::new(&weight, Quantisation::Int8).unwrap();
    let params = Params::default();
    let tape = Tape::inference(&device, &params, 0);
    let x = Var::from(device.zeros([4, 32], Dtype::F32).unwrap());
    let error = tape.linear(&x, Linear::new(&weight)).err().unwrap().to_string();
    assert_eq!(error, "linear: weight has shape [8, 64], expected [8, 32]");
}
