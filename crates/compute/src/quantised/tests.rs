//! What comes back, and how far off it is.

use super::cpu::nearest_e4m3;
use super::*;
use crate::device::Backend;
use crate::ops::{Activation, Linear, Lora, Weight};
use crate::testing::on_gpu;
use crate::{Device, DeviceKind, Gradients, Params, RandomSequence, Tape, Var};

fn quantised(numbers: &[f32], width: usize, how: Quantisation) -> Quantised {
    let device = Device::cpu(2, 1 << 24).unwrap();
    let matrix = device.upload([numbers.len() / width, width], numbers).unwrap();
    Quantised::new(&matrix, how).unwrap()
}

#[test]
fn values_come_back_within_half_a_step() {
    let device = Device::cpu(2, 1 << 24).unwrap();
    let matrix = device.normal([37, 192], Dtype::F32, 0.02, RandomSequence::new(1, 1)).unwrap();
    let exact = matrix.to_f32_vec();
    for how in [Quantisation::Int8, Quantisation::Nf4, Quantisation::Fp8] {
        let back = Quantised::new(&matrix, how).unwrap().to_f32_vec().unwrap();
        for (index, (exact, back)) in exact.iter().zip(&back).enumerate() {
            let row = &matrix.to_f32_vec()[index / 192 * 192..][..192];
            let most = row.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
            let step = match how {
                Quantisation::Int8 => most / 127.0,
                Quantisation::Fp8 => (exact.abs() / 8.0).max(most / 448.0 / 512.0),
                // The widest step, of the largest scale with its own error.
                Quantisation::Nf4 => most * 0.31,
            };
            assert!((exact - back).abs() <= 0.501 * step, "{how}: {exact} {back}");
        }
    }
}

#[test]
fn sizes_are_as_small_as_they_should_be() {
    let numbers = vec![1.0; 256 * 1024];
    let bytes = |how| quantised(&numbers, 1024, how).bytes();
    assert_eq!(bytes(Quantisation::Int8), 256 * 1024 + 256 * 4);
    assert_eq!(bytes(Quantisation::Fp8), 256 * 1024 + 256 * 4);
    assert_eq!(bytes(Quantisation::Nf4), 128 * 1024 + 4096 + 16 * 4 + 4);
}

#[test]
fn zeros_and_the_largest_are_exact() {
    for how in [Quantisation::Int8, Quantisation::Nf4, Quantisation::Fp8] {
        let mut numbers = vec![0.0; 128];
        assert_eq!(quantised(&numbers, 64, how).to_f32_vec().unwrap(), numbers);
        numbers[70] = -3.0;
        let back = quantised(&numbers, 64, how).to_f32_vec().unwrap();
        assert!((back[70] + 3.0).abs() < 1e-6 && back[..70].iter().all(|x| *x == 0.0), "{how}");
    }
}

#[test]
fn e4m3_rounds_to_nearest_and_even() {
    for code in 0..=255u8 {
        let number = e4m3(code);
        assert_eq!(number.is_nan(), code & 0x7f == 0x7f);
        if !number.is_nan() {
            assert_eq!(nearest_e4m3(number), code, "{number}");
        }
    }
    assert_eq!((e4m3(0x7e), e4m3(0x08), e4m3(0x01)), (448.0, 0.015_625, 0.001_953_125));
    let middle = |low: u8| f32::midpoint(e4m3(low), e4m3(low + 1));
    for low in 0..0x7e {
        let even = low + low % 2;
        assert_eq!(nearest_e4m3(middle(low)), even, "{low}");
        assert_eq!(nearest_e4m3(middle(low) * 1.001), low + 1);
    }
    assert_eq!((nearest_e4m3(1e9), nearest_e4m3(f32::NEG_INFINITY)), (0x7e, 0xfe));
}

#[test]
fn the_meta_device_takes_the_same_memory() {
    let real = Device::cpu(2, 1 << 24).unwrap();
    let meta = Device::meta(DeviceKind::cpu(2), 1 << 24);
    for how in [Quantisation::Int8, Quantisation::Nf4, Quantisation::Fp8] {
        let usage = |device: &Device| {
            let matrix =
                device.normal([37, 192], Dtype::Bf16, 0.02, RandomSequence::new(1, 1)).unwrap();
            let made = Quantised::new(&matrix, how).unwrap();
            drop(matrix);
            (device.usage(), made.bytes())
        };
        assert_eq!(usage(&real), usage(&meta), "{how}");
    }
}

#[test]
fn a_width_that_blocks_do_not_fill_is_refused() {
    let device = Device::cpu(1, 1 << 20).unwrap();
    let matrix = device.zeros([4, 96], Dtype::F32).unwrap();
    let error = Quantised::new(&matrix, Quantisation::Nf4).unwrap_err().to_string();
    assert_eq!(error, "quantise: width of the matrix 96 is not a multiple of 64");
    let ids = device.zeros([4, 64], Dtype::U32).unwrap();
    let error = Quantised::new(&ids, Quantisation::Int8).unwrap_err().to_string();
    assert_eq!(error, "quantise: matrix is u32, expected f32, bf16 or f16");
}

/// A GPU that multiplies in fp8, if there is one: as it is, and as one whose library takes no scales of rows.
fn on_fp8_units() -> Vec<Device> {
    let [device, plain, tried] = [(); 3].map(|()| on_gpu(1 << 28));
    if tried.is_none_or(|tried| check_fp8_matmuls(&tried).is_err()) {
        return Vec::new();
    }
    if let Some(Backend::Cuda(backend)) = plain.as_ref().map(Device::backend) {
        backend.scale_no_fp8_rows();
    }
    [device, plain].into_iter().flatten().collect()
}

/// Rows of a matrix as they are rounded to fp8, in f64.
fn rounded_rows(matrix: &[f64], width: usize) -> Vec<f64> {
    let row = |row: &[f64]| -> Vec<f64> {
        let most = row.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
        let code = |x: &f64| nearest_e4m3((x * 448.0 / most) as f32);
        row.iter().map(|x| f64::from(e4m3(code(x))) * most / 448.0).collect()
    };
    matrix.chunks(width).flat_map(row).collect()
}

fn wide(tensor: &Tensor) -> Vec<f64> {
    tensor.to_f32_vec().into_iter().map(f64::from).collect()
}

/// Rows of one matrix times rows of another.
fn sums_of_rows(a: &[f64], b: &[f64], inner: usize) -> Vec<f64> {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum();
    a.chunks(inner).flat_map(|a| b.chunks(inner).map(move |b| dot(a, b))).collect()
}

/// The size of a difference relative to that of what is expected.
fn distance(ours: &[f64], expected: &[f64]) -> f64 {
    let norm = |numbers: &mut dyn Iterator<Item = f64>| numbers.map(|x| x * x).sum::<f64>().sqrt();
    let off = norm(&mut ours.iter().zip(expected).map(|(ours, expected)| ours - expected));
    off / norm(&mut expected.iter().copied())
}

/// y and the gradient of x, against sums in f64 over operands that are rounded in the same way. By scales of rows
/// that differ much, a wrong one would show.
#[test]
fn a_matmul_in_fp8_sums_rounded_operands() {
    on_fp8_units().iter().for_each(check_rounded_operands);
}

fn check_rounded_operands(device: &Device) {
    for (rows, inputs, outputs) in [
        (333, 256, 64),
        (70, 128, 96),
        (1, 16, 32),
        (300, 1552, 48),
        (129, 48, 2064),
        (4200, 32, 2064),
    ] {
        for dtype in [Dtype::Bf16, Dtype::F16] {
            let normal = |shape: [usize; 2], stream| {
                let numbers = device.normal(shape, Dtype::F32, 1.0, RandomSequence::new(3, stream));
                let mut numbers = numbers.unwrap().to_f32_vec();
                for (row, numbers) in numbers.chunks_mut(shape[1]).enumerate() {
                    for x in numbers {
                        *x *= [0.02, 1.0, 4.0][row % 3];
                    }
                }
                device.upload_as(shape, &numbers, dtype).unwrap()
            };
            let weight = normal([outputs, inputs], 1);
            let weight =
                Quantised::new(&weight, Quantisation::Fp8).unwrap().multiplied_in_fp8("layer");
            let (mut params, mut gradients) = (Params::default(), Gradients::default());
            let key = params.add(normal([rows, inputs], 2));
            let tape = Tape::training(device, &params, 0);
            // A node's gradient has the dtype of x, a parameter's has more.
            let zeros = Var::from(device.zeros([rows, inputs], dtype).unwrap());
            let x = tape.add(&tape.param(key), &zeros).unwrap();
            let y = tape.linear(&x, Linear::new(&weight)).unwrap();
            let (ours, gradient) = (wide(y.tensor()), normal([rows, outputs], 4));
            tape.backward_from(y, gradient.clone(), &mut gradients).unwrap();

            let scales: Vec<f64> = wide(weight.multiplied_scales().unwrap());
            let codes = weight.codes().to_vec::<u8>();
            let codes: Vec<f64> = codes.into_iter().map(|code| f64::from(e4m3(code))).collect();
            let expected: Vec<f64> =
                sums_of_rows(&rounded_rows(&wide(&params.values()[0]), inputs), &codes, inputs)
                    .into_iter()
                    .zip(scales.iter().cycle())
                    .map(|(sum, scale)| sum * scale)
                    .collect();
            assert!(distance(&ours, &expected) < 4e-3, "{}", distance(&ours, &expected));
            let scaled = wide(&gradient).into_iter().zip(scales.iter().cycle());
            let scaled: Vec<f64> = scaled.map(|(x, scale)| x * scale).collect();
            let columns: Vec<f64> = (0..inputs * outputs)
                .map(|at| codes[at % outputs * inputs + at / outputs])
                .collect();
            let expected = sums_of_rows(&rounded_rows(&scaled, outputs), &columns, outputs);
            let ours = wide(gradients.get(key).unwrap());
            assert!(distance(&ours, &expected) < 4e-3, "{}", distance(&ours, &expected));
        }
    }
}

/// Two layers with an activation between them, with all that a layer may have, against the same in bf16.
#[test]
fn layers_in_fp8_are_near_those_in_bf16() {
    on_fp8_units().iter().for_each(check_layers);
}

fn check_layers(device: &Device) {
    let normal = |shape: &[usize], dtype, stream| {
        device.normal(Shape::new(shape), dtype, 0.3, RandomSequence::new(5, stream)).unwrap()
    };
    let [up, down] = [[256, 128], [128, 256]]
        .map(|shape| Quantised::new(&normal(&shape, Dtype::Bf16, 1), Quantisation::Fp8).unwrap());
    for activation in [Activation::GeluTanh, Activation::Silu, Activation::None] {
        let run = |weights: [Weight<'_>; 2]| {
            let (mut params, mut gradients) = (Params::default(), Gradients::default());
            let x = params.add(normal(&[333, 128], Dtype::Bf16, 2));
            let vectors = [256, 128].map(|n| params.add(normal(&[n], Dtype::F32, 3)));
            let lora = [[8, 128], [256, 8], [8, 256], [128, 8]]
                .map(|shape| params.add(normal(&shape, Dtype::F32, 4)));
            let tape = Tape::training(device, &params, 0);
            let [lora, bias] = [
                lora.map(|key| tape.param(key)).to_vec(),
                vectors.map(|key| tape.param(key)).to_vec(),
            ];
            let layer = |at: usize, activation, onto| {
                let low =
                    Lora { down: &lora[2 * at], up: &lora[2 * at + 1], scale: 0.5, dropout: 0.0 };
                let plain = Linear::new(weights[at]);
                Linear { bias: Some(&bias[at]), lora: Some(low), activation, onto, ..plain }
            };
            let x: Var = tape.param(x);
            let inner = tape.linear(&x, layer(0, activation, None)).unwrap();
            let y = tape.linear(&inner, layer(1, Activation::None, Some(&x))).unwrap();
            let y_is = wide(y.tensor());
            drop(inner);
            tape.backward_from(y, normal(&[333, 128], Dtype::Bf16, 6), &mut gradients).unwrap();
            let mut all = vec![y_is];
            all.extend(gradients.all(params.values().len()).into_iter().flatten().map(wide));
            all
        };
        let plain = run([(&up).into(), (&down).into()]);
        let [up, down] = [&up, &down].map(|weight| weight.clone().multiplied_in_fp8("layer"));
        let ours = run([(&up).into(), (&down).into()]);
        assert_eq!(ours.len(), 8);
        assert!(ours[0] != plain[0]);
        for (ours, plain) in ours.iter().zip(&plain) {
            let off = distance(ours, plain);
            assert!(off < 6e-2, "{activation:?}: {off}");
        }
    }
}

/// Beside a number that is 10^6 times as large, all others of a row are rounded to zero. The weight does not see the
/// large one.
#[test]
fn a_layer_that_loses_too_much_is_found() {
    for device in on_fp8_units() {
        let numbers = |shape: [usize; 2], first: f32| {
            let normal =
                device.normal(shape, Dtype::F32, 1.0, RandomSequence::new(7, shape[0] as u64));
            let mut numbers = normal.unwrap().to_f32_vec();
            numbers.iter_mut().step_by(shape[1]).for_each(|x| *x *= first);
            device.upload_as(shape, &numbers, Dtype::Bf16).unwrap()
        };
        let weight = Quantised::new(&numbers([64, 128], 0.0), Quantisation::Fp8).unwrap();
        let params = Params::default();
        let multiply = |tape: &Tape<'_>, x: &Tensor, weight: &Quantised| {
            wide(tape.linear(&x.clone().into(), Linear::new(weight)).unwrap().tensor())
        };
        for (first, is_in_fp8) in [(1.0, true), (1e6, false)] {
            let (x, ours) = (numbers([40, 128], first), weight.clone().multiplied_in_fp8("up"));
            let tape = Tape::inference(&device, &params, 0).checking_fp8(0.1);
            let looked = multiply(&tape, &x, &ours);
            let [found] = &tape.into_fp8_checks()[..] else { panic!("one layer was asked") };
            assert_eq!((found.layer.as_str(), found.is_in_fp8), ("up", is_in_fp8), "{found:?}");
            assert_eq!(found.error > 0.1, !is_in_fp8, "{found:?}");
            let tape = Tape::inference(&device, &params, 0);
            let exact = multiply(&tape, &x, &weight);
            let after = multiply(&tape, &x, &ours);
            assert_eq!(after == exact, !is_in_fp8);
            assert_eq!(looked == exact, !is_in_fp8);
        }
    }
}
