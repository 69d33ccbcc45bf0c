//! Steps against PyTorch's numbers, and what must hold for all of them: independence of threads,
//! nothing changed by what is not finite, no memory of their own.

use super::{
    AdamW, GradClip, Moments, Moments8bit, adamw, adamw_8bit, count_not_finite, ema, global_norm,
    stochastic_round,
};
use crate::random::{RandomSequence, TestRng};
use crate::testing::{Input, compare, device, upload};
use crate::{Device, DeviceKind, Dtype, Shape, Tag, Tensor};

const STEP: AdamW = AdamW {
    learning_rate: 0.01,
    betas: (0.9, 0.99),
    epsilon: 1e-8,
    weight_decay: 0.1,
    step: 1,
    scale: 1.0,
};

#[test]
fn a_scaled_loss_changes_nothing() {
    let device = device();
    // Long enough to be clipped, which must happen after the scale is taken off.
    let after = |times: f32, max: f32| {
        let mut params = [vector(&device, &[1.0, -0.5])];
        let mut state = [Moments::new(&params[0]).unwrap()];
        let gradients = [vector(&device, &[3.0 * times, -4.0 * times])];
        let found = [Some(&gradients[0])];
        let clip = GradClip { norm: global_norm(&found, &device).unwrap(), max_norm: max };
        let how = AdamW { scale: 1.0 / times, ..STEP };
        adamw(&mut params, &found, &mut state, how, Some(&clip)).unwrap();
        (params[0].to_vec::<f32>(), state[0].first.to_vec::<f32>())
    };
    for max in [1.0, 100.0] {
        assert_eq!(after(1.0, max), after(65536.0, max));
    }
    assert_ne!(after(1.0, 1.0), after(1.0, 100.0));
}

fn vector(device: &Device, numbers: &[f32]) -> Tensor {
    device.upload([numbers.len()], numbers).unwrap()
}

#[test]
fn five_steps_of_torch() {
    // import torch
    // p = torch.nn.Parameter(torch.tensor([1.0, -0.5, 0.25, 2.0, 0.0]))
    // opt = torch.optim.AdamW([p], lr=0.01, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    // for step in range(1, 6):
    //     p.grad = torch.tensor([0.1, -0.2, 0.3, 1e-3, 4.0]) * step
    //     p.grad -= torch.tensor([0.0, 0.1, 0.6, 0.002, 8.0])
    //     opt.step()
    //     print(p.data.tolist())
    // print(opt.state[p]["exp_avg"].tolist(), opt.state[p]["exp_avg_sq"].tolist())
    let torch = [
        [0.989_000_022, -0.489_500_016, 0.259_750_009, 2.007_999_9, 0.010_000_000_7],
        [0.978_372_335, -0.479_193_032, 0.266_206_056, 2.012_707_71, 0.016_705_803_6],
        [0.967_838_645, -0.468_964_994, 0.265_081_197, 2.009_836_44, 0.015_830_427_4],
        [0.957_302_749, -0.458_751_321, 0.259_683_192, 2.002_693_65, 0.010_681_686],
        [0.946_720_481, -0.448_513_508, 0.252_485_722, 1.993_753_19, 0.003_733_207_47],
    ];
    let first = [0.131_440_997, -0.303_833_008, 0.148_616_999, 0.000_495_390_035, 1.981_559_99];
    let second = [0.005_450_269_21, 0.028_211_774_3, 0.013_410_626, 1.490_069_79e-7, 2.384_111_4];
    let device = device();
    let mut params = [vector(&device, &[1.0, -0.5, 0.25, 2.0, 0.0])];
    let mut state = [Moments::new(&params[0]).unwrap()];
    for (step, torch) in (1..).zip(torch) {
        let slopes = [0.1, -0.2, 0.3, 1e-3, 4.0].into_iter().zip([0.0, 0.1, 0.6, 0.002, 8.0]);
        let gradient: Vec<f32> = slopes.map(|(a, b)| a * step as f32 - b).collect();
        let gradient = vector(&device, &gradient);
        adamw(&mut params, &[Some(&gradient)], &mut state, AdamW { step, ..STEP }, None).unwrap();
        for (ours, torch) in params[0].to_vec::<f32>().into_iter().zip(torch) {
            assert!((f64::from(ours) - torch).abs() < 3e-7, "step {step}: {ours} {torch}");
        }
    }
    let all = state[0].first.to_vec::<f32>().into_iter().zip(first);
    for (ours, torch) in all.chain(state[0].second.to_vec::<f32>().into_iter().zip(second)) {
        compare("moments", &[ours], &[torch], 2e-6);
    }
}

#[test]
fn gradients_are_clipped_as_torch_does() {
    // import torch
    // a, b = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2))
    // a.grad, b.grad = torch.tensor([3.0, -1.0, 2.0]), torch.tensor([0.5, -4.0])
    // print(torch.nn.utils.clip_grad_norm_([a, b], 1.0).item(), a.grad.tolist(), b.grad.tolist())
    let clipped = [0.545_454_502, -0.181_818_157, 0.363_636_315, 0.090_909_078_7, -0.727_272_63];
    let device = device();
    let gradients = [vector(&device, &[3.0, -1.0, 2.0]), vector(&device, &[0.5, -4.0])];
    let whole = [3.0, -1.0, 2.0, 0.5, -4.0];
    let gradients: Vec<Option<&Tensor>> = gradients.iter().map(Some).collect();
    for (max, torch) in [(1.0, clipped), (10.0, whole)] {
        let norm = global_norm(&gradients, &device).unwrap();
        assert_eq!((norm.shape(), norm.to_vec::<f32>()), ([].into(), vec![5.5]));
        let mut params = [vector(&device, &[0.0; 3]), vector(&device, &[0.0; 2])];
        let mut state = params.each_ref().map(|param| Moments::new(param).unwrap());
        // A mean that forgets at once is the gradient itself.
        let step = AdamW { betas: (0.0, 0.0), ..STEP };
        adamw(&mut params, &gradients, &mut state, step, Some(&GradClip { norm, max_norm: max }))
            .unwrap();
        let seen = state.iter().flat_map(|moments| moments.first.to_vec::<f32>());
        compare("clipped gradients", &seen.collect::<Vec<_>>(), &torch, 1e-7);
    }
}

/// Odd sizes around those of blocks and tasks, among them nothing.
const SIZES: [usize; 6] = [1, 257, 0, 16_384, 40_001, 33];

fn tensors(device: &Device, seed: u64) -> Vec<Tensor> {
    let inputs = SIZES.iter().map(|size| Input::normal([*size], seed + *size as u64));
    inputs.map(|input| upload(device, &input, Dtype::F32)).collect()
}

/// Parameters and all numbers of the state after two steps, of which the second is clipped.
fn two_steps<S>(
    device: &Device,
    new: fn(&Tensor) -> crate::Result<S>,
    go: Step<S>,
) -> (Vec<Tensor>, Vec<S>) {
    let (mut params, gradients) = (tensors(device, 1), tensors(device, 2));
    let mut state: Vec<S> = params.iter().map(|param| new(param).unwrap()).collect();
    let mut gradients: Vec<Option<&Tensor>> = gradients.iter().map(Some).collect();
    go(&mut params, &gradients, &mut state, STEP, None).unwrap();
    gradients[1] = None;
    let clip = GradClip { norm: global_norm(&gradients, device).unwrap(), max_norm: 0.5 };
    let step = AdamW { step: 2, ..STEP };
    go(&mut params, &gradients, &mut state, step, Some(&clip)).unwrap();
    (params, state)
}

type Step<S> =
    fn(&mut [Tensor], &[Option<&Tensor>], &mut [S], AdamW, Option<&GradClip>) -> crate::Result<()>;

fn bits(tensors: &[Tensor]) -> Vec<u32> {
    tensors.iter().flat_map(Tensor::to_vec::<f32>).map(f32::to_bits).collect()
}

#[test]
fn threads_make_no_difference() {
    let results = [1, 2, 3].map(|threads| {
        let device = Device::cpu(threads, 1 << 24).unwrap();
        let (params, state) = two_steps(&device, Moments::new, adamw);
        let moments = state.into_iter().flat_map(|moments| [moments.first, moments.second]);
        let (params8, state8) = two_steps(&device, Moments8bit::new, adamw_8bit);
        let state8 = state8.into_iter().flat_map(|moments| [moments.first, moments.second]);
        let (codes, scales): (Vec<_>, Vec<_>) =
            state8.map(|codes| (codes.codes.to_vec::<u8>(), codes.scales)).unzip();
        let mut average = tensors(&device, 3).remove(4);
        ema(&mut average, &params[4], 0.9).unwrap();
        let all = [params, moments.collect(), params8, scales, vec![average]];
        (all.map(|tensors| bits(&tensors)), codes)
    });
    assert!(results.iter().all(|result| *result == results[0]));
}

#[test]
fn the_meta_device_takes_the_same_memory() {
    let usage = |device: &Device| {
        let before = device.usage();
        let steps = (
            two_steps(device, Moments::new, adamw),
            two_steps(device, Moments8bit::new, adamw_8bit),
        );
        count_not_finite(&steps.0.0.iter().collect::<Vec<_>>()).unwrap();
        let usage = (device.usage(), device.work());
        drop(steps);
        assert_eq!(device.usage().in_use, before.in_use);
        usage
    };
    let limit = 1 << 24;
    let cpu = usage(&Device::cpu(2, limit).unwrap());
    assert_eq!(cpu, usage(&Device::meta(DeviceKind::cpu(2), limit)));
}

#[test]
fn without_a_gradient_nothing_changes() {
    let device = device();
    let mut params = [vector(&device, &[1.0, 2.0]), vector(&device, &[3.0])];
    let mut state = params.each_ref().map(|param| Moments::new(param).unwrap());
    let gradient = vector(&device, &[1.0]);
    adamw(&mut params, &[None, Some(&gradient)], &mut state, STEP, None).unwrap();
    assert_eq!(params[0].to_vec::<f32>(), [1.0, 2.0]);
    assert_eq!(state[0].first.to_vec::<f32>(), [0.0, 0.0]);
    assert!(params[1].to_vec::<f32>()[0] < 3.0);
    adamw(&mut [], &[], &mut [], STEP, None).unwrap();
}

#[test]
fn a_gradient_that_is_not_finite_changes_nothing() {
    let device = device();
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let gradients = [vector(&device, &[1.0, bad]), vector(&device, &[0.5])];
        let gradients: Vec<Option<&Tensor>> = gradients.iter().map(Some).collect();
        let clip = GradClip { norm: global_norm(&gradients, &device).unwrap(), max_norm: 1.0 };
        assert!(!clip.norm.to_vec::<f32>()[0].is_finite());
        let mut params = [vector(&device, &[1.0, 2.0]), vector(&device, &[3.0])];
        let mut state = params.each_ref().map(|param| Moments::new(param).unwrap());
        adamw(&mut params, &gradients, &mut state, STEP, Some(&clip)).unwrap();
        let mut state8 = params.each_ref().map(|param| Moments8bit::new(param).unwrap());
        adamw_8bit(&mut params, &gradients, &mut state8, STEP, Some(&clip)).unwrap();
        assert_eq!(bits(&params), [1.0f32, 2.0, 3.0].map(f32::to_bits));
        assert_eq!(state[1].first.to_vec::<f32>(), [0.0]);
        assert_eq!(state8[1].first.scales.to_vec::<f32>(), [0.0]);
        // Without a clip nobody looks, and what is not finite stays visible.
        adamw(&mut params, &gradients, &mut state, STEP, None).unwrap();
        adamw_8bit(&mut params, &gradients, &mut state8, STEP, None).unwrap();
        assert!(params[0].to_vec::<f32>()[1].is_nan() && params[1].to_vec::<f32>()[0].is_finite());
        assert!(!state8[0].second.scales.to_vec::<f32>()[0].is_finite());
    }
}

/// Least squares for 600 weights, of which each row sees a few: the loss after some steps.
fn regression<S>(device: &Device, new: fn(&Tensor) -> crate::Result<S>, go: Step<S>) -> f64 {
    const WEIGHTS: usize = 600;
    let mut random = TestRng::new(5);
    let truth: Vec<f32> = (0..WEIGHTS).map(|_| random.normal()).collect();
    let rows: Vec<Vec<(usize, f32)>> = (0..2000)
        .map(|_| (0..4).map(|_| (random.below(WEIGHTS), random.normal())).collect())
        .collect();
    let dot = |weights: &[f32], row: &[(usize, f32)]| -> f32 {
        row.iter().map(|(at, x)| weights[*at] * x).sum()
    };
    let mut params = [vector(device, &[0.0; WEIGHTS])];
    let mut state = [new(&params[0]).unwrap()];
    let mut loss = 0.0;
    for step in 1..=50 {
        let weights = params[0].to_vec::<f32>();
        let mut gradient = vec![0.0; WEIGHTS];
        loss = 0.0;
        for row in &rows {
            let error = dot(&weights, row) - dot(&truth, row);
            loss += f64::from(error * error) / rows.len() as f64;
            for (at, x) in row {
                gradient[*at] += 2.0 * error * x / rows.len() as f32;
            }
        }
        let gradient = vector(device, &gradient);
        let step = AdamW { learning_rate: 0.03, weight_decay: 0.0, step, ..STEP };
        go(&mut params, &[Some(&gradient)], &mut state, step, None).unwrap();
    }
    loss
}

#[test]
fn eight_bits_learn_nearly_as_well() {
    let device = device();
    let whole = regression(&device, Moments::new, adamw);
    let coded = regression(&device, Moments8bit::new, adamw_8bit);
    assert!(whole < 0.5 && (coded / whole - 1.0).abs() < 0.05, "{whole} {coded}");
}

#[test]
fn eight_bits_take_a_quarter_of_the_memory() {
    let device = device();
    let param = device.zeros([100, 1000], Dtype::F32).unwrap();
    let in_use = || device.usage().by_tag[Tag::Optimizer as usize];
    let whole = Moments::new(&param).unwrap();
    let bytes = in_use();
    drop(whole);
    let _coded = Moments8bit::new(&param).unwrap();
    assert!(in_use() > 0 && in_use() * 100 < bytes * 26, "{bytes} {}", in_use());
}

#[test]
fn the_norm_is_summed_in_f64() {
    let device = device();
    let gradients = [vector(&device, &vec![1e25; 40_000]), vector(&device, &[3e27])];
    let gradients = [Some(&gradients[0]), None, Some(&gradients[1])];
    let exact = (40_000.0 * 1e25f64.powi(2) + 3e27f64.powi(2)).sqrt();
    let norm = global_norm(&gradients, &device).unwrap();
    compare("norm", &norm.to_vec::<f32>(), &[exact], 1e-7);
    assert_eq!(global_norm(&[None], &device).unwrap().to_vec::<f32>(), [0.0]);
}

#[test]
fn what_is_not_finite_is_counted_in_every_format() {
    let device = device();
    for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
        let mut input = Input::normal([20_000], 1);
        for (at, bad) in [(3, f32::NAN), (17_000, f32::INFINITY), (19_999, f32::NEG_INFINITY)] {
            input.values[at] = bad;
        }
        let tensor = upload(&device, &input, dtype);
        let finite = upload(&device, &Input::normal([5], 2), Dtype::F32);
        let count = count_not_finite(&[&tensor, &finite, &tensor]).unwrap();
        assert_eq!((count.shape(), count.to_vec::<u32>()), ([1].into(), vec![6]));
    }
    let error = count_not_finite(&[]).unwrap_err().to_string();
    assert_eq!(error, "count_not_finite: count of tensors is 0, expected 1 or more");
    let ids = device.zeros([3], Dtype::U32).unwrap();
    let error = count_not_finite(&[&ids]).unwrap_err().to_string();
    assert_eq!(error, "count_not_finite: tensor is u32, expected f32, bf16 or f16");
}

#[test]
fn averages_move_as_far_as_they_are_told() {
    let device = device();
    for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
        for decay in [0.0f32, 0.75, 1.0] {
            let value = upload(&device, &Input::normal([3, 7], 1), dtype);
            let start = Input::normal([3, 7], 2);
            let mut average = upload(&device, &start, Dtype::F32);
            ema(&mut average, &value, decay).unwrap();
            let exact: Vec<f64> = start
                .values
                .iter()
                .zip(value.to_f32_vec())
                .map(|(average, value)| {
                    let decay = f64::from(decay);
                    decay * f64::from(*average) + (1.0 - decay) * f64::from(value)
                })
                .collect();
            compare("average", &average.to_vec::<f32>(), &exact, 1e-6);
        }
    }
    let mut average = vector(&device, &[1.0; 3]);
    let value = vector(&device, &[1.0; 2]);
    let message = |error: crate::Result<()>| error.unwrap_err().to_string();
    assert_eq!(message(ema(&mut average, &value, 0.5)), "ema: value has shape [2], expected [3]");
    let value = vector(&device, &[1.0; 3]);
    assert_eq!(message(ema(&mut average, &value, 1.5)), "ema: decay is 1.5, expected 0 to 1");
    let _reader = average.clone();
    assert_eq!(message(ema(&mut average, &value, 0.5)), "parameter 0 is still held by 1 other(s)");
}

/// What a step says to a parameter of shape [3] with this gradient and these settings.
fn message(gradient: &Tensor, step: AdamW, clip: Option<&GradClip>) -> String {
    let mut params = [gradient.device().zeros([3], Dtype::F32).unwrap()];
    let mut state = [Moments::new(&params[0]).unwrap()];
    adamw(&mut params, &[Some(gradient)], &mut state, step, clip).unwrap_err().to_string()
}

#[test]
fn what_makes_no_sense_is_said() {
    let device = device();
    let gradient = vector(&device, &[1.0; 3]);
    let wrong = vector(&device, &[1.0; 2]);
    assert_eq!(message(&wrong, STEP, None), "adamw: gradient has shape [2], expected [3]");
    let half = device.zeros([3], Dtype::F16).unwrap();
    assert_eq!(message(&half, STEP, None), "adamw: gradient is f16, expected f32");
    for (step, error) in [
        (AdamW { step: 0, ..STEP }, "step is 0, expected 1 or more"),
        (AdamW { betas: (0.9, 1.0), ..STEP }, "second beta is 1, expected 0 or more and below 1"),
        (
            AdamW { betas: (-0.1, 0.9), ..STEP },
            "first beta is -0.1, expected 0 or more and below 1",
        ),
        (
            AdamW { learning_rate: f32::NAN, ..STEP },
            "learning rate is NaN, expected 0 or more, and finite",
        ),
        (AdamW { epsilon: -1.0, ..STEP }, "epsilon is -1, expected 0 or more, and finite"),
    ] {
        assert_eq!(message(&gradient, step, None), format!("adamw: {error}"));
    }
    let norm = vector(&device, &[1.0]);
    let clip = GradClip { norm, max_norm: 1.0 };
    assert_eq!(message(&gradient, STEP, Some(&clip)), "adamw: norm has shape [1], expected []");
    let clip = GradClip { norm: clip.norm.reshape(Shape::new(&[])), max_norm: f32::NAN };
    assert_eq!(message(&gradient, STEP, Some(&clip)), "adamw: max_norm is NaN, expected 0 or more");
}

#[test]
fn parameters_that_do_not_fit_are_said() {
    let device = device();
    let mut params = [vector(&device, &[1.0; 3])];
    let gradient = vector(&device, &[1.0; 3]);
    let mut state = [Moments::new(&params[0]).unwrap()];
    let error = adamw(&mut params, &[], &mut state, STEP, None).unwrap_err().to_string();
    assert_eq!(error, "adamw: count of gradients is 0, expected one for each parameter");
    let error = adamw(&mut params, &[None], &mut [], STEP, None).unwrap_err().to_string();
    assert_eq!(error, "adamw: count of moments is 0, expected one for each parameter");
    let reader = params[0].clone();
    let error = adamw(&mut params, &[Some(&gradient)], &mut state, STEP, None).unwrap_err();
    assert_eq!(error.to_string(), "parameter 0 is still held by 1 other(s)");
    drop(reader);
    let mut half = [device.zeros([3], Dtype::Bf16).unwrap()];
    let error = adamw(&mut half, &[Some(&gradient)], &mut state, STEP, None).unwrap_err();
    assert_eq!(error.to_string(), "adamw: parameter is bf16, expected f32");
    let mut other = [Moments8bit::new(&vector(&device, &[1.0; 300])).unwrap()];
    let error = adamw_8bit(&mut params, &[Some(&gradient)], &mut other, STEP, None).unwrap_err();
    assert_eq!(error.to_string(), "adamw_8bit: first moment has shape [300], expected [3]");
    let elsewhere = Device::cpu(1, 1 << 20).unwrap();
    let gradient = vector(&elsewhere, &[1.0; 3]);
    let error = adamw(&mut params, &[Some(&gradient)], &mut state, STEP, None).unwrap_err();
    assert_eq!(error.to_string(), "adamw: gradient is on another device");
}

/// Values in f32, rounded at random.
fn rounded(device: &Device, values: &[f32], sequence: RandomSequence) -> Vec<f32> {
    let mut rounded = device.zeros([values.len()], Dtype::Bf16).unwrap();
    stochastic_round(&vector(device, values), &mut rounded, sequence).unwrap();
    rounded.to_f32_vec()
}

#[test]
fn stochastic_rounding_is_exact_on_average() {
    let (device, n) = (device(), 1 << 14);
    // bf16 has 7 bits behind the point: from 1 to 2 it goes by 1/128.
    let step = 1.0f64 / 128.0;
    for (at, share) in [0.01, 0.25, 0.5, 0.9, 0.999].into_iter().enumerate() {
        for sign in [1.0, -1.0] {
            let value = (sign * (1.0 + step * (at as f64 + share))) as f32;
            let found = rounded(&device, &vec![value; n], RandomSequence::new(7, at as u64));
            let [down, up] = [0, 1].map(|more| (sign * (1.0 + step * (at + more) as f64)) as f32);
            assert!(found.iter().all(|found| [down, up].contains(found)), "{value}");
            let mean = found.iter().map(|found| f64::from(*found)).sum::<f64>() / n as f64;
            // Five standard deviations.
            let bound = 5.0 * step * (share * (1.0 - share) / n as f64).sqrt() + 1e-7;
            assert!((mean - f64::from(value)).abs() < bound, "{value}: {mean}, within {bound}");
        }
    }
}

#[test]
fn stochastic_rounding_follows_from_sequence_and_index_alone() {
    let (device, values) = (device(), Input::normal([1001], 3).values);
    let sequence = RandomSequence::new(5, 6);
    let expected: Vec<f32> = values
        .iter()
        .enumerate()
        .map(|(index, value)| {
            let carried = value.to_bits() + (sequence.word(index) & 0xffff);
            f32::from_bits(carried & 0xffff_0000)
        })
        .collect();
    let found = rounded(&device, &values, sequence);
    assert_eq!(found, expected);
    assert_ne!(found, rounded(&device, &values, RandomSequence::new(5, 7)));
    // What needs no rounding, and what is no number.
    assert_eq!(rounded(&device, &found, RandomSequence::new(8, 9)), found);
    let odd = rounded(&device, &[f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 0.0], sequence);
    assert!(odd[..2] == [f32::INFINITY, f32::NEG_INFINITY] && odd[2].is_nan() && odd[3] == 0.0);
}
