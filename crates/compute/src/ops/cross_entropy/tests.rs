//! The cross entropy against its formula.

use super::{FEWEST_ROWS, IGNORE_INDEX, LOGITS, LOGITS_ON_GPU, LogitsChunkSize, RowWeights};
use crate::ops::gather::tests::gathered;
use crate::testing::{Dual, Input, check, compare, device, recomputed};
use crate::{
    Device, DeviceKind, Dtype, Gradients, Params, RandomSequence, Shape, Tape, Tensor, Var,
};

/// The definition, with the whole logits.
fn exact(x: &[Dual], weight: &[Dual], targets: &[u32], width: usize) -> Dual {
    let counted = targets.iter().filter(|target| **target != IGNORE_INDEX).count();
    let rows = x.chunks(width).zip(targets).filter(|(_, target)| **target != IGNORE_INDEX);
    let losses = rows.map(|(x, target)| {
        let dot = |row: &[Dual]| x.iter().zip(row).map(|(x, w)| *x * *w).sum::<Dual>();
        let logits: Vec<Dual> = weight.chunks(width).map(dot).collect();
        let largest = logits.iter().map(|logit| logit.value).fold(f64::MIN, f64::max);
        let sum: Dual = logits.iter().map(|logit| (*logit - Dual::from(largest)).exp()).sum();
        sum.ln() + Dual::from(largest) - logits[*target as usize]
    });
    losses.sum::<Dual>() * (1.0 / counted as f64)
}

const TARGETS: [u32; 6] = [8, 0, IGNORE_INDEX, 3, 4, 8];

fn cut(rows: usize, columns: usize) -> LogitsChunkSize {
    LogitsChunkSize { rows, columns }
}

fn check_loss(cut: LogitsChunkSize, width: usize, x: Input, weight: Input) {
    check(
        &[x, weight],
        4.0,
        &|tape, v| {
            let targets = tape.device().upload([2, 3], &TARGETS)?;
            tape.cross_entropy_by(cut, &v[0], &v[1], &targets)
        },
        &|v| vec![exact(&v[0], &v[1], &TARGETS, width)],
    );
}

#[test]
fn how_much_of_the_logits_exists_at_a_time_does_not_matter() {
    for (rows, columns, width) in [(64, 64, 5), (6, 9, 7), (4, 4, 7), (5, 9, 2), (1, 1, 3)] {
        let (x, weight) = (Input::normal([2, 3, width], 1), Input::normal([9, width], 2));
        check_loss(cut(rows, columns), width, x, weight);
    }
}

#[test]
fn what_is_frozen_has_no_gradient() {
    let (x, weight) = (Input::normal([2, 3, 4], 1), Input::normal([9, 4], 2));
    check_loss(cut(4, 4), 4, x.clone().frozen(), weight.clone());
    check_loss(cut(4, 4), 4, x.clone(), weight.clone().frozen());
    // As in a model of rounded weights whose adapters compute in f32, and the other way round.
    check_loss(cut(4, 4), 4, x.clone().f32(), weight.clone());
    check_loss(cut(4, 4), 4, x, weight.f32());
}

/// A loss that is no sum of the rows', so that a row's weight depends on all of them: the square of a weighted sum.
#[allow(clippy::unnecessary_wraps)] // As losses are that may fail.
fn squared(losses: &[f64]) -> crate::Result<RowWeights> {
    let counted = || losses.iter().zip(&TARGETS).zip(ROW_FACTORS);
    let sum: f64 = counted()
        .filter(|((_, target), _)| **target != IGNORE_INDEX)
        .map(|((row, _), factor)| factor * row)
        .sum();
    let weights = ROW_FACTORS.map(|factor| (2.0 * sum * factor) as f32);
    Ok(RowWeights { loss: sum * sum, weights: weights.into() })
}

const ROW_FACTORS: [f64; 6] = [0.5, -0.25, 1.0, 0.75, -0.5, 0.25];

fn exact_squared(x: &[Dual], weight: &[Dual], width: usize) -> Dual {
    let rows = x.chunks(width).zip(TARGETS).zip(ROW_FACTORS);
    let rows = rows.filter(|((_, target), _)| *target != IGNORE_INDEX);
    let sum: Dual =
        rows.map(|((x, target), factor)| exact(x, weight, &[target], width) * factor).sum();
    sum * sum
}

#[test]
fn rows_are_weighed_by_what_all_of_them_came_to() {
    let inputs = || [Input::normal([2, 3, 7], 1), Input::normal([9, 7], 2)];
    let [x, weight] = inputs();
    let frozen = [[x.clone().frozen(), weight.clone()], [x, weight.frozen()]];
    for inputs in [inputs()].into_iter().chain(frozen) {
        for (rows, columns) in [(64, 64), (6, 9), (4, 4), (1, 1)] {
            check(
                &inputs,
                8.0,
                &|tape, v| {
                    let targets = tape.device().upload([2, 3], &TARGETS)?;
                    tape.weighted_by(cut(rows, columns), &v[0], &v[1], &targets, squared)
                },
                &|v| vec![exact_squared(&v[0], &v[1], 7)],
            );
        }
    }
}

#[test]
fn a_matrix_unit_finds_the_same() {
    let targets: Vec<u32> = (0..36).map(|row| row * 7 % 40).collect();
    for weight in [Input::normal([40, 2], 2), Input::normal([40, 2], 2).f32()] {
        check(
            &[Input::normal([36, 2], 1), weight],
            4.0,
            &|tape, v| {
                let targets = tape.device().upload([36], &targets)?;
                tape.cross_entropy_by(cut(36, 40), &v[0], &v[1], &targets)
            },
            &|v| vec![exact(&v[0], &v[1], &targets, 2)],
        );
    }
}

#[test]
fn large_logits_do_not_overflow() {
    // Each piece has a larger maximum than those before it, or a smaller one.
    for sign in [1.0, -1.0] {
        let x = Input { values: vec![sign; 6], ..Input::normal([2, 3, 1], 1) };
        let values = (0..9u8).map(|word| 64.0 * f32::from(word) - 256.0).collect();
        let weight = Input { values, ..Input::normal([9, 1], 2) };
        check_loss(cut(4, 2), 1, x, weight);
    }
}

#[test]
fn gradients_of_two_uses_add_up() {
    let (x, weight) = (Input::normal([6, 3], 1), Input::normal([9, 3], 2));
    check(
        &[x, weight],
        4.0,
        &|tape, v| {
            let targets = tape.device().upload([6], &TARGETS)?;
            let first = tape.cross_entropy_by(cut(4, 4), &v[0], &v[1], &targets)?;
            tape.add(&first, &tape.cross_entropy_by(cut(3, 5), &v[0], &v[1], &targets)?)
        },
        &|v| vec![exact(&v[0], &v[1], &TARGETS, 3) * 2.0],
    );
    // The words' own vectors as input: both gradients belong to one tensor.
    let targets = [8u32, 0, 1, 3, 4, 8, 2, 2, 2];
    check(
        &[Input::normal([9, 3], 1)],
        4.0,
        &|tape, v| {
            tape.cross_entropy_by(cut(4, 4), &v[0], &v[0], &tape.device().upload([9], &targets)?)
        },
        &|v| vec![exact(&v[0], &v[0], &targets, 3)],
    );
}

const IDS: [u32; 6] = [1, 8, 1, 0, 3, 1];

#[test]
fn a_tied_embedding_has_one_gradient() {
    check(
        &[Input::normal([9, 3], 1)],
        4.0,
        &|tape, v| {
            let ids = tape.device().upload([6], &IDS)?;
            let x = tape.embedding(&ids, &v[0])?;
            tape.cross_entropy_by(cut(4, 4), &x, &v[0], &tape.device().upload([6], &TARGETS)?)
        },
        &|v| vec![exact(&gathered(&v[0], &IDS, [6, 9, 3]), &v[0], &TARGETS, 3)],
    );
}

#[test]
fn a_tied_parameter_has_the_sum_of_what_two_would_have() {
    let device = device();
    let table = || device.normal([9, 3], Dtype::Bf16, 1.0, RandomSequence::new(1, 0)).unwrap();
    let mut params = Params::default();
    let [tied, embedding, head] = [(); 3].map(|()| params.add(table()));
    let mut gradients = Gradients::default();
    for _ in 0..2 {
        for [from, to] in [[tied, tied], [embedding, head]] {
            let tape = Tape::training(&device, &params, 0);
            let ids = device.upload([6], &IDS).unwrap();
            let targets = device.upload([6], &TARGETS).unwrap();
            let x = tape.embedding(&ids, &tape.param(from)).unwrap();
            let loss = tape.cross_entropy_by(cut(4, 4), &x, &tape.param(to), &targets).unwrap();
            drop(x);
            tape.backward(&loss, &mut gradients).unwrap();
        }
    }
    let of = |key| gradients.get(key).unwrap().to_vec::<f32>();
    let sums = of(embedding).into_iter().zip(of(head));
    let sums: Vec<f64> = sums.map(|(a, b)| f64::from(a) + f64::from(b)).collect();
    assert!(sums.iter().any(|sum| sum.abs() > 0.1));
    compare("gradient of a tied parameter", &of(tied), &sums, 1e-6);
    params.values_mut().unwrap();
}

#[test]
fn recomputed_it_gives_the_same() {
    let device = device();
    let mut params = Params::default();
    let x = params.add(device.normal([6, 5], Dtype::F32, 1.0, RandomSequence::new(1, 0)).unwrap());
    let weight =
        params.add(device.normal([9, 5], Dtype::F32, 1.0, RandomSequence::new(1, 1)).unwrap());
    let targets = device.upload([6], &TARGETS).unwrap();
    let run = |recompute: bool| {
        let mut gradients = Gradients::default();
        let tape = Tape::training(&device, &params, 0);
        let (targets, vars) = (targets.clone(), [tape.param(x), tape.param(weight)]);
        // The end of a block is not run again, unless its record keeps something of its own.
        let block = move |tape: &Tape<'_>, v: &[Var]| {
            tape.cross_entropy_by(cut(4, 4), &v[0], &v[1], &targets)
        };
        let loss = if recompute {
            recomputed(block)(&tape, &vars).unwrap()
        } else {
            block(&tape, &vars).unwrap()
        };
        tape.backward(&loss, &mut gradients).unwrap();
        [x, weight].map(|key| gradients.get(key).unwrap().to_vec::<f32>())
    };
    assert_eq!(run(true), run(false));
}

#[test]
fn the_whole_logits_never_exist() {
    let (rows, vocabulary, width) = (3000, 50_000, 8);
    for (dtype, is_trained) in [(Dtype::F32, true), (Dtype::Bf16, true), (Dtype::F32, false)] {
        let device = Device::meta(DeviceKind::cpu(2), 1 << 40);
        let mut params = Params::default();
        let x = params.add(device.zeros([rows, width], dtype).unwrap());
        let weight = device.zeros([vocabulary, width], dtype).unwrap();
        let targets = device.zeros([rows], Dtype::U32).unwrap();
        let weight = is_trained.then(|| params.add(weight.clone())).ok_or(weight);
        let mut gradients = Gradients::default();
        let before = device.usage().in_use;
        let tape = Tape::training(&device, &params, 0);
        let weight = weight.map_or_else(Var::from, |key| tape.param(key));
        let loss = tape.cross_entropy(&tape.param(x), &weight, &targets).unwrap();
        let megabyte = 1 << 20;
        let kept = (rows + if is_trained { vocabulary } else { 0 }) * width * 4;
        let (forward, held) = (device.usage().peak - before, device.usage().in_use - before);
        assert!(held <= kept + 1024, "{dtype}: {held} of {kept}");
        // Logits, and what matmuls take besides.
        assert!(forward > kept + 32 * megabyte, "{dtype}: {forward}");
        assert!(forward <= kept + (64 + 9) * megabyte, "{dtype}: {forward}");
        assert!(forward < rows * vocabulary * 4 / 8);
        device.reset_peak();
        tape.backward(&loss, &mut gradients).unwrap();
        let backward = device.usage().peak - before;
        assert!(backward <= 2 * kept + 1024, "{dtype}: {backward}");
    }
}

#[test]
fn without_gradients_a_piece_of_the_logits_is_enough() {
    let (rows, vocabulary, width) = (3000, 50_000, 8);
    let device = Device::meta(DeviceKind::cpu(2), 1 << 40);
    let params = Params::default();
    let [x, weight] =
        [rows, vocabulary].map(|rows| Var::from(device.zeros([rows, width], Dtype::F32).unwrap()));
    let targets = device.zeros([rows], Dtype::U32).unwrap();
    let before = device.usage().in_use;
    let tape = Tape::inference(&device, &params, 0);
    tape.cross_entropy(&x, &weight, &targets).unwrap();
    let taken = device.usage().peak - before;
    assert!(taken <= 4 << 20, "{taken}");
}

#[test]
fn rows_fill_their_room() {
    let (cpu, gpu) = (DeviceKind::cpu(1), DeviceKind::Cuda { is_deterministic: false });
    for vocabulary in [1, 3, 49_152, 32_000, 65_536] {
        for (kind, dtype, workspace) in [
            (cpu, Dtype::F32, LOGITS),
            (gpu, Dtype::F32, LOGITS_ON_GPU),
            (gpu, Dtype::Bf16, LOGITS_ON_GPU),
        ] {
            let LogitsChunkSize { rows, .. } =
                LogitsChunkSize::of([vocabulary, 8].into(), true, dtype, kind);
            let bytes = vocabulary * dtype.bytes();
            assert!(rows * bytes <= workspace, "{vocabulary}");
            assert!((rows + FEWEST_ROWS) * bytes > workspace, "{vocabulary}");
        }
    }
    let rows = |table: [usize; 2], dtype, kind| {
        [false, true]
            .map(|is_trained| LogitsChunkSize::of(table.into(), is_trained, dtype, kind).rows)
    };
    assert_eq!(rows([256_000, 2048], Dtype::F32, cpu), [FEWEST_ROWS; 2]);
    assert_eq!(rows([128_256, 2048], Dtype::F32, gpu), [512, 2048]);
    assert_eq!(rows([128_256, 2048], Dtype::Bf16, gpu), [1024, 4096]);
}

fn loss_of(x: &[f32], weight: &[f32], targets: &[u32]) -> f32 {
    let device = device();
    let params = Params::default();
    let tape = Tape::inference(&device, &params, 0);
    let x = Var::from(device.upload([x.len(), 1], x).unwrap());
    let weight = Var::from(device.upload([weight.len(), 1], weight).unwrap());
    let targets = device.upload([targets.len()], targets).unwrap();
    tape.cross_entropy_by(cut(1, 1), &x, &weight, &targets).unwrap().tensor().to_vec::<f32>()[0]
}

#[test]
fn the_mean_is_that_of_the_rows() {
    let (device, params) = (device(), Params::default());
    let tape = Tape::inference(&device, &params, 0);
    let x = Var::from(device.upload([3, 1], &[1.0f32, -2.0, 0.5]).unwrap());
    let weight = Var::from(device.upload([2, 1], &[1.0f32, 3.0]).unwrap());
    let targets = device.upload([3], &[0, IGNORE_INDEX, 1]).unwrap();
    let (mean, rows) = tape.cross_entropy_with_rows(&x, &weight, &targets).unwrap();
    let rows = rows.read().unwrap();
    // ln(e^a + e^b) - the target's
    let exact = |a: f64, b: f64, target: f64| (a.exp() + b.exp()).ln() - target;
    let (first, last) = (exact(1.0, 3.0, 1.0), exact(0.5, 1.5, 1.5));
    assert!((rows[0] - first).abs() < 1e-6 && (rows[2] - last).abs() < 1e-6, "{rows:?}");
    let mean = f64::from(mean.tensor().to_vec::<f32>()[0]);
    assert!((mean - f64::midpoint(first, last)).abs() < 1e-6, "{mean}");
    let meta = Device::meta(DeviceKind::cpu(1), 1 << 20);
    let tape = Tape::inference(&meta, &params, 0);
    let of = |sizes: [usize; 2]| Var::from(meta.zeros(sizes, Dtype::F32).unwrap());
    let targets = meta.upload([3], &[0u32; 3]).unwrap();
    let (_, rows) = tape.cross_entropy_with_rows(&of([3, 1]), &of([2, 1]), &targets).unwrap();
    assert_eq!(rows.read().unwrap(), [0.0; 3]);
}

#[test]
fn nan_is_not_hidden() {
    assert!(loss_of(&[1.0, f32::NAN], &[1.0, 2.0], &[0, 0]).is_nan());
    assert!(loss_of(&[1.0, 1.0], &[f32::NAN, 2.0], &[1, 1]).is_nan());
    assert!(loss_of(&[1.0, 1.0], &[2.0, f32::NAN], &[0, 0]).is_nan());
    // A row that does not count has no part in it, whatever it holds.
    let counted = loss_of(&[1.0, f32::NAN], &[1.0, 1.0], &[0, IGNORE_INDEX]);
    assert!((counted - 2f32.ln()).abs() < 1e-6, "{counted}");
    let nothing = f32::NEG_INFINITY;
    assert_eq!(loss_of(&[1.0], &[nothing, 3.0, nothing], &[1]), 0.0);
    assert_eq!(loss_of(&[1.0], &[nothing, 3.0, nothing], &[2]), f32::INFINITY);
}

#[test]
fn what_does_not_fit_is_said_with_both_values() {
    let device = device();
    let params = Params::default();
    let tape = Tape::inference(&device, &params, 0);
    let zeros = |sizes: &[usize]| Var::from(device.zeros(Shape::new(sizes), Dtype::F32).unwrap());
    let targets = |targets: &[u32]| device.upload([targets.len()], targets).unwrap();
    let fails = |x: &Var, weight: &Var, targets: &Tensor| {
        tape.cross_entropy(x, weight, targets).err().unwrap().to_string()
    };
    let (x, weight) = (zeros(&[2, 3]), zeros(&[5, 3]));
    assert_eq!(
        fails(&x, &weight, &targets(&[IGNORE_INDEX, 5])),
        "cross_entropy: index 5 is out of range, there are 5 words in the vocabulary"
    );
    assert_eq!(
        fails(&x, &weight, &targets(&[IGNORE_INDEX, IGNORE_INDEX])),
        "cross_entropy: the set of targets that count is empty, its shape is [2]"
    );
    assert_eq!(
        fails(&x, &weight, &targets(&[0, 1, 2])),
        "cross_entropy: targets has shape [3], expected [2]"
    );
    assert_eq!(
        fails(&x, &zeros(&[5, 4]), &targets(&[0, 1])),
        "cross_entropy: weight has shape [5, 4], expected [5, 3]"
    );
    assert_eq!(
        fails(&x, &weight, zeros(&[2]).tensor()),
        "cross_entropy: targets is f32, expected u32"
    );
    assert_eq!(
        fails(&zeros(&[0, 3]), &weight, &targets(&[])),
        "cross_entropy: x is empty, its shape is [0, 3]"
    );
}
