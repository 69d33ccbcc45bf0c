//! Random choices against their formula, with the same random numbers.

use crate::random::RandomSequence;
use crate::testing::{Dual, Input, check, device, recomputed, upload};
use crate::{Device, Dtype, Gradients, Params, Tape, Tensor, Var};

/// softmax((logits + g) / τ) with the first stream of the tape that `check` makes.
fn exact(logits: &[Dual], width: usize, temperature: f64) -> Vec<Dual> {
    let random = RandomSequence::new(7, 0);
    let noise = |index: usize| -(-f64::from(random.uniform(index)).ln()).ln();
    let scores = logits.iter().enumerate();
    let scores: Vec<Dual> = scores
        .map(|(index, logit)| (*logit + Dual::from(noise(index))) * (1.0 / temperature))
        .collect();
    let rows = scores.chunks(width);
    rows.flat_map(|row| {
        let largest = row.iter().map(|score| score.value).fold(f64::MIN, f64::max);
        let powers: Vec<Dual> =
            row.iter().map(|score| (*score - Dual::from(largest)).exp()).collect();
        let sum: Dual = powers.iter().copied().sum();
        powers.into_iter().map(move |power| power / sum)
    })
    .collect()
}

#[test]
fn soft_choices() {
    for (rows, width, temperature) in [(3, 7, 1.0f32), (2, 1, 0.5), (1, 33, 2.0), (4, 5, 0.3)] {
        let logits = Input::normal([rows, width], 1);
        let reference = |v: &[Vec<Dual>]| exact(&v[0], width, f64::from(temperature));
        check(
            std::slice::from_ref(&logits),
            4.0,
            &|tape, v| tape.gumbel_softmax(v[0].clone(), temperature, false),
            &reference,
        );
        // Nobody holds what `scale` gives, so that this one is in place.
        check(
            &[logits],
            4.0,
            &|tape, v| tape.gumbel_softmax(tape.scale(&v[0], 1.0)?, temperature, false),
            &reference,
        );
    }
}

/// The first of a pair is an ordinary choice, and the second has 1 - u for each u.
#[test]
fn a_pair_has_opposite_noise() {
    let (device, params) = (device(), Params::default());
    let logits = upload(&device, &Input::normal([3, 9], 1), Dtype::F32);
    let tape = Tape::inference(&device, &params, 7);
    let [first, second] = tape.gumbel_softmax_pair(&logits, 1.0).unwrap();
    let tape = Tape::inference(&device, &params, 7);
    let alone = tape.gumbel_softmax(Var::from(logits.clone()), 1.0, false).unwrap();
    assert_eq!(first.to_vec::<f32>(), alone.tensor().to_vec::<f32>());
    let (random, logits) = (RandomSequence::new(7, 0), logits.to_vec::<f32>());
    for (row, found) in second.to_vec::<f32>().chunks(9).enumerate() {
        let weight = |column: usize| {
            let at = row * 9 + column;
            let noise = -(-(1.0 - f64::from(random.uniform(at))).ln()).ln();
            (f64::from(logits[at]) + noise).exp()
        };
        let sum: f64 = (0..9).map(weight).sum();
        for (column, found) in found.iter().enumerate() {
            let exact = weight(column) / sum;
            assert!((f64::from(*found) - exact).abs() < 1e-5, "{row} {column}: {found} {exact}");
        }
    }
}

/// What a choice from normal logits gives, and its gradient for normal cotangents.
fn run(device: &Device, dtype: Dtype, hard: bool, in_place: bool) -> (Vec<f32>, Vec<f32>) {
    let params = Params::default();
    let tape = Tape::training(device, &params, 7);
    let logits = tape.leaf(upload(device, &Input::normal([40, 9], 1), dtype));
    let given = if in_place { tape.scale(&logits, 1.0).unwrap() } else { logits.clone() };
    let choice = tape.gumbel_softmax(given, 0.7, hard).unwrap();
    let numbers = choice.tensor().to_f32_vec();
    let cotangent = upload(device, &Input::normal([40, 9], 2), dtype);
    let mut leaves = tape.backward_from(choice, cotangent, &mut Gradients::default()).unwrap();
    (numbers, leaves.take(&logits).unwrap().to_f32_vec())
}

#[test]
fn a_hard_choice_is_the_largest_with_the_gradient_of_the_soft_one() {
    for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
        let (soft, soft_gradient) = run(&Device::cpu(2, 1 << 24).unwrap(), dtype, false, false);
        for (threads, in_place) in [(1, false), (2, true), (3, false)] {
            let device = Device::cpu(threads, 1 << 24).unwrap();
            let (hard, hard_gradient) = run(&device, dtype, true, in_place);
            assert_eq!(soft_gradient, hard_gradient, "{dtype}");
            for (soft, hard) in soft.chunks(9).zip(hard.chunks(9)) {
                let largest = soft.iter().copied().fold(0.0, f32::max);
                let chosen = hard.iter().position(|number| *number == 1.0).unwrap();
                assert_eq!(soft[chosen], largest, "{dtype}");
                assert_eq!(hard.iter().sum::<f32>(), 1.0);
                assert!(hard.iter().all(|number| [0.0, 1.0].contains(number)));
            }
        }
    }
}

#[test]
fn without_a_record_a_hard_choice_is_the_same() {
    let device = device();
    let params = Params::default();
    let (recorded, _) = run(&device, Dtype::Bf16, true, false);
    let tape = Tape::inference(&device, &params, 7);
    let logits = Var::from(upload(&device, &Input::normal([40, 9], 1), Dtype::Bf16));
    let choice = tape.gumbel_softmax(logits, 0.7, true).unwrap();
    assert_eq!(choice.tensor().to_f32_vec(), recorded);
}

#[test]
fn logits_are_written_over_only_if_nobody_else_holds_them() {
    let device = device();
    let params = Params::default();
    for (hard, is_tracked, extra) in
        [(false, false, 0), (true, false, 0), (false, true, 0), (true, true, 1)]
    {
        let tape = Tape::training(&device, &params, 7);
        let numbers = [0.5f32; 64];
        let var = |tensor: Tensor| if is_tracked { tape.leaf(tensor) } else { Var::from(tensor) };
        let choose = |logits: Var| {
            let before = device.usage().in_use;
            device.reset_peak();
            let choice = tape.gumbel_softmax(logits, 1.0, hard).unwrap();
            (choice, device.usage().peak - before)
        };
        let (alone, bytes) = choose(var(device.upload([16, 4], &numbers).unwrap()));
        assert_eq!(bytes, extra * 256, "{hard} {is_tracked}");

        let logits = var(device.upload([16, 4], &numbers).unwrap());
        let (beside, bytes) = choose(logits.clone());
        assert_eq!(bytes, (extra + 1) * 256, "{hard} {is_tracked}");
        assert_eq!(logits.tensor().to_vec::<f32>(), numbers);
        // Each choice has random numbers of its own.
        assert_ne!(alone.tensor().to_vec::<f32>(), beside.tensor().to_vec::<f32>());
    }
}

#[test]
fn recomputed_choices_are_the_same() {
    let device = device();
    let mut params = Params::default();
    let key =
        params.add(device.normal([6, 5], Dtype::F32, 1.0, RandomSequence::new(1, 0)).unwrap());
    for hard in [false, true] {
        let run = |recompute: bool| {
            let mut gradients = Gradients::default();
            let tape = Tape::training(&device, &params, 3);
            // Streams that come before the block's own.
            tape.random_sequence([6, 5].into());
            let block = move |tape: &Tape<'_>, v: &[Var]| {
                let first = tape.gumbel_softmax(tape.scale(&v[0], 2.0)?, 0.7, hard)?;
                tape.gumbel_softmax(tape.add(&first, &v[0])?, 0.5, hard)
            };
            let logits = tape.param(key);
            let choice = if recompute {
                recomputed(block)(&tape, &[logits]).unwrap()
            } else {
                block(&tape, &[logits]).unwrap()
            };
            let numbers = choice.tensor().to_vec::<f32>();
            let target = device.normal([6, 5], Dtype::F32, 1.0, RandomSequence::new(1, 1)).unwrap();
            let loss = tape.mse(&choice, &target, None, None).unwrap();
            tape.backward(&loss, &mut gradients).unwrap();
            (numbers, gradients.get(key).unwrap().to_vec::<f32>())
        };
        let once = run(false);
        assert!(once.1.iter().any(|gradient| *gradient != 0.0));
        assert_eq!(run(true), once);
    }
}

#[test]
fn choices_fall_as_often_as_softmax_says() {
    let device = device();
    let params = Params::default();
    let tape = Tape::inference(&device, &params, 11);
    let draws = 40_000;
    let logits = [0.0f32, 1.0, -1.0, 2.0, f32::NEG_INFINITY];
    let powers = logits.map(f32::exp);
    // What is chosen does not depend on the temperature.
    for temperature in [0.1, 1.0, 5.0] {
        let rows = device.upload([draws, 5], &logits.repeat(draws)).unwrap();
        let choices = tape.gumbel_softmax(Var::from(rows), temperature, true).unwrap();
        let choices = choices.tensor().to_vec::<f32>();
        for (place, power) in powers.iter().enumerate() {
            let count: f32 = choices.iter().skip(place).step_by(5).sum();
            let (share, expected) = (count / draws as f32, power / powers.iter().sum::<f32>());
            // Four deviations of a share of 0.5 are 0.01.
            assert!((share - expected).abs() < 0.01, "{place}: {share} {expected}");
        }
    }
}

#[test]
fn nan_is_not_hidden() {
    let device = device();
    let params = Params::default();
    let tape = Tape::inference(&device, &params, 0);
    for (hard, odd) in
        [(false, f32::NAN), (true, f32::NAN), (false, f32::INFINITY), (true, f32::INFINITY)]
    {
        let logits = device.upload([2, 3], &[0.0, odd, 1.0, 0.0, 1.0, 2.0]).unwrap();
        let choice = tape.gumbel_softmax(Var::from(logits), 1.0, hard).unwrap();
        let choice = choice.tensor().to_vec::<f32>();
        assert!(choice[..3].iter().any(|number| number.is_nan()), "{hard} {odd} {choice:?}");
        assert!((choice[3..].iter().sum::<f32>() - 1.0).abs() < 1e-6);
    }
}

#[test]
fn extreme_temperatures_and_empty_rows() {
    let device = device();
    let params = Params::default();
    let tape = Tape::inference(&device, &params, 0);
    let logits = || Var::from(device.upload([1, 3], &[0.0f32, 1.0, 2.0]).unwrap());
    let sharp = tape.gumbel_softmax(logits(), 1e-40, false).unwrap().tensor().to_vec::<f32>();
    assert_eq!(sharp.iter().filter(|number| **number == 1.0).count(), 1);
    let even = tape.gumbel_softmax(logits(), 1e30, false).unwrap().tensor().to_vec::<f32>();
    assert!(even.iter().all(|number| (number - 1.0 / 3.0).abs() < 1e-6));
    for (shape, hard) in [([0, 3], true), ([3, 0], false), ([3, 0], true)] {
        let none = tape.leaf(device.zeros(shape, Dtype::F32).unwrap());
        assert_eq!(tape.gumbel_softmax(none, 1.0, hard).unwrap().shape(), shape.into());
    }
}

#[test]
fn what_does_not_fit_is_said_with_both_values() {
    let device = device();
    let params = Params::default();
    let tape = Tape::inference(&device, &params, 0);
    let zeros = |dtype| Var::from(device.zeros([2, 3], dtype).unwrap());
    for temperature in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let error = tape.gumbel_softmax(zeros(Dtype::F32), temperature, false).err().unwrap();
        assert_eq!(
            error.to_string(),
            format!("gumbel_softmax: temperature is {temperature}, expected above 0 and finite")
        );
    }
    let error = tape.gumbel_softmax(zeros(Dtype::U32), 1.0, false).err().unwrap();
    assert_eq!(error.to_string(), "gumbel_softmax: logits is u32, expected f32, bf16 or f16");
}
