//! Noise against its formulas: in f64 on every backend, and to the last bit on the CPU.

use super::{LatentScaling, LatentStd, NoisyLatents, add_noise, sample_latents};
use crate::testing::{Dual, Input, check_forward, device, upload};
use crate::{Device, Dtype, RandomSequence, Result, Shape, Tape, Tensor, Var};

/// Some with an odd count of numbers, one with frames.
const SHAPES: [&[usize]; 4] = [&[1, 1, 1], &[3, 2, 5, 3], &[2, 4, 8, 6], &[2, 3, 2, 3, 5]];

fn sequences(samples: usize) -> Vec<RandomSequence> {
    (0..samples as u64)
        .map(|sample| RandomSequence::new(0x1_0000_0005, 7 + (sample << 33)))
        .collect()
}

/// Mean, deviation, shift, scale, sigmas; and one number in the dtype of the noisy latents.
fn inputs(sizes: &[usize]) -> [Input; 6] {
    let shape = Shape::new(sizes);
    let mut sigmas = Input::normal([sizes[0]], 5).f32();
    sigmas.values = (0..sizes[0]).map(|sample| 1.0 / (1.0 + sample as f32)).collect();
    let vector = |seed| Input::normal([sizes[1]], seed).f32();
    [
        Input::normal(shape, 1).f32(),
        Input::normal(shape, 2).f32().scaled(0.3),
        vector(3),
        vector(4),
        sigmas,
        Input::normal([1], 6),
    ]
}

/// Everything with noise; without a spread, the mean.
fn mixed(v: &[Tensor], is_spread: bool, dtype: Dtype) -> Result<NoisyLatents> {
    let [mean, deviation, shift, scale, sigmas] = [0, 1, 2, 3, 4].map(|index| &v[index]);
    let samples = sigmas.shape().elements();
    let (of_latents, of_noise) = (sequences(2 * samples), sequences(samples));
    let spread = LatentStd { std: deviation, sequences: &of_latents[samples..] };
    let channels = LatentScaling { shift, scale };
    let latents = sample_latents(mean.clone(), is_spread.then_some(spread), channels)?;
    add_noise(latents, sigmas, &of_noise, dtype)
}

/// A number's sample, its place in that, and its channel.
fn places(sizes: &[usize]) -> impl Iterator<Item = (usize, usize, usize)> + use<> {
    let per_sample: usize = sizes[1..].iter().product();
    let (all, per_channel) = (sizes[0] * per_sample, per_sample / sizes[1]);
    (0..all).map(move |at| (at / per_sample, at % per_sample, at % per_sample / per_channel))
}

#[test]
fn noise_follows_its_formulas_on_every_engine() {
    for (sizes, is_spread) in SHAPES.into_iter().flat_map(|sizes| [(sizes, true), (sizes, false)]) {
        let run = |tape: &Tape<'_>, v: &[Var], is_velocity: bool| -> Result<Var> {
            let tensors: Vec<Tensor> = v.iter().map(|var| var.tensor().clone()).collect();
            let both = mixed(&tensors, is_spread, v[5].dtype())?;
            if is_velocity {
                return tape.convert(&both.velocity.into(), v[5].dtype());
            }
            Ok(both.noisy.into())
        };
        let exact = |v: &[Vec<Dual>], is_velocity: bool| -> Vec<Dual> {
            let (of_latents, of_noise) = (sequences(2 * sizes[0]), sequences(sizes[0]));
            let number = |at: usize, (sample, index, channel): (usize, usize, usize)| {
                let normal = |stream: &RandomSequence| Dual::from(f64::from(stream.normal(index)));
                let spread = v[1][at] * normal(&of_latents[sizes[0] + sample]);
                let drawn = if is_spread { v[0][at] + spread } else { v[0][at] };
                let x = (drawn - v[2][channel]) * v[3][channel];
                let (noise, sigma) = (normal(&of_noise[sample]), v[4][sample]);
                let noisy = (Dual::from(1.0) - sigma) * x + sigma * noise;
                if is_velocity { noise - x } else { noisy }
            };
            places(sizes).enumerate().map(|(at, place)| number(at, place)).collect()
        };
        for is_velocity in [false, true] {
            check_forward(&inputs(sizes), 4.0, &|tape, v| run(tape, v, is_velocity), &|v| {
                exact(v, is_velocity)
            });
        }
    }
}

/// A training run depends on these very bits: what was learnt before must be learnt again.
#[test]
fn the_cpu_adds_noise_elementwise_in_f32() {
    for sizes in SHAPES {
        let device = Device::cpu(2, 1 << 24).unwrap();
        let inputs = inputs(sizes);
        let tensors = || -> Vec<Tensor> {
            inputs.iter().map(|input| upload(&device, input, Dtype::F32)).collect()
        };
        let value = |input: usize, at: usize| inputs[input].values[at];
        let (of_latents, of_noise) = (sequences(2 * sizes[0]), sequences(sizes[0]));
        let (mut noisy, mut velocity) = (Vec::new(), Vec::new());
        for (at, (sample, index, channel)) in places(sizes).enumerate() {
            let spread = value(1, at) * of_latents[sizes[0] + sample].normal(index);
            let drawn = value(0, at) + spread;
            let x = (drawn - value(2, channel)) * value(3, channel);
            let (sigma, noise) = (value(4, sample), of_noise[sample].normal(index));
            let [kept, added] = [(1.0 - sigma) * x, sigma * noise];
            noisy.push(kept + added);
            velocity.push(noise - x);
        }
        let ours = mixed(&tensors(), true, Dtype::F32).unwrap();
        assert_eq!(ours.noisy.to_vec::<f32>(), noisy);
        assert_eq!(ours.velocity.to_vec::<f32>(), velocity);
        let rounded: Vec<f32> = noisy.iter().map(|x| half::bf16::from_f32(*x).to_f32()).collect();
        let ours = mixed(&tensors(), true, Dtype::Bf16).unwrap();
        assert_eq!(ours.noisy.to_f32_vec(), rounded);
        assert_eq!(ours.velocity.to_vec::<f32>(), velocity);
    }
}

#[test]
fn what_a_sample_gets_does_not_depend_on_those_beside_it() {
    let (device, sizes) = (device(), [3, 2, 5, 3]);
    let tensors: Vec<Tensor> =
        inputs(&sizes).iter().map(|input| upload(&device, input, Dtype::F32)).collect();
    let channels = LatentScaling { shift: &tensors[2], scale: &tensors[3] };
    let streams = sequences(3);
    let run = |range: std::ops::Range<usize>| {
        let [mean, deviation, sigmas] = [0, 1, 4].map(|index| tensors[index].narrow(range.clone()));
        let spread = LatentStd { std: &deviation, sequences: &streams[range.clone()] };
        let latents = sample_latents(mean, Some(spread), channels).unwrap();
        let both = add_noise(latents, &sigmas, &streams[range.clone()], Dtype::F32).unwrap();
        [both.noisy, both.velocity].map(|tensor| tensor.to_vec::<f32>())
    };
    let whole = run(0..3);
    let parts = [run(0..1), run(1..3)];
    for of in 0..2 {
        assert_eq!(whole[of], [&parts[0][of][..], &parts[1][of]].concat());
    }
}

#[test]
fn memory_is_that_of_the_mean_and_of_the_noisy_latents() {
    let device = device();
    let sizes = [2, 4, 32, 32];
    let zeros = |sizes: &[usize]| device.zeros(Shape::new(sizes), Dtype::F32).unwrap();
    let (shift, scale, sigmas) = (zeros(&[4]), zeros(&[4]), zeros(&[2]));
    let before = device.usage().in_use;
    let latents = sample_latents(
        zeros(&sizes),
        Some(LatentStd { std: &zeros(&sizes), sequences: &sequences(2) }),
        LatentScaling { shift: &shift, scale: &scale },
    );
    let both = add_noise(latents.unwrap(), &sigmas, &sequences(2), Dtype::Bf16).unwrap();
    assert_eq!(device.usage().in_use - before, 2 * 4 * 32 * 32 * (4 + 2));
    drop(both);
}

#[test]
fn nan_is_not_hidden() {
    let device = device();
    let mut all = inputs(&[1, 2, 3]);
    all[0].values[4] = f32::NAN;
    let tensors: Vec<Tensor> = all.iter().map(|input| upload(&device, input, Dtype::F32)).collect();
    let both = mixed(&tensors, true, Dtype::F32).unwrap();
    for tensor in [both.noisy, both.velocity] {
        let found: Vec<bool> = tensor.to_vec::<f32>().iter().map(|x| x.is_nan()).collect();
        assert_eq!(found, [false, false, false, false, true, false]);
    }
}

#[test]
fn nothing_gives_nothing() {
    let device = device();
    for sizes in [[0, 2, 3], [2, 2, 0]] {
        let zeros = |sizes: &[usize]| device.zeros(Shape::new(sizes), Dtype::F32).unwrap();
        let tensors = [zeros(&sizes), zeros(&sizes), zeros(&[2]), zeros(&[2]), zeros(&[sizes[0]])];
        let both = mixed(&tensors, true, Dtype::Bf16).unwrap();
        assert_eq!((both.noisy.shape(), both.velocity.shape()), (sizes.into(), sizes.into()));
    }
}

#[test]
fn what_does_not_fit_is_said() {
    let device = device();
    let zeros = |sizes: &[usize], dtype| device.zeros(Shape::new(sizes), dtype).unwrap();
    let f32s = |sizes: &[usize]| zeros(sizes, Dtype::F32);
    let (latents, two, three) = (f32s(&[2, 3, 4]), f32s(&[2]), f32s(&[3]));
    let sample = |mean: &Tensor, spread, shift, scale| {
        let channels = LatentScaling { shift, scale };
        sample_latents(mean.clone(), spread, channels).unwrap_err().to_string()
    };
    let add = |latents: &Tensor, sigmas, n, dtype| {
        add_noise(latents.clone(), sigmas, &sequences(n), dtype).unwrap_err().to_string()
    };
    assert_eq!(
        sample(&latents, None, &two, &three),
        "sample_latents: shift has shape [2], expected [3]"
    );
    let spread = Some(LatentStd { std: &two, sequences: &[] });
    assert_eq!(
        sample(&latents, spread, &three, &three),
        "sample_latents: std has shape [2], expected [2, 3, 4]"
    );
    let spread = Some(LatentStd { std: &latents, sequences: &[] });
    assert_eq!(
        sample(&latents, spread, &three, &three),
        "sample_latents: the list of random sequences has shape [0], expected [2]"
    );
    let rounded = zeros(&[2, 3, 4], Dtype::Bf16);
    assert_eq!(add(&rounded, &two, 2, Dtype::F32), "add_noise: latents is bf16, expected f32");
    assert_eq!(
        add(&latents, &three, 2, Dtype::F32),
        "add_noise: sigmas has shape [3], expected [2]"
    );
    assert_eq!(
        add(&latents, &two, 2, Dtype::U32),
        "add_noise: the noisy latents is u32, expected f32, bf16 or f16"
    );
    assert_eq!(
        add(&two, &two, 2, Dtype::F32),
        "add_noise: latents of shape [2] has 1 dimensions, expected 2"
    );
}
