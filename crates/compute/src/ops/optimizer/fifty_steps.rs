//! Lion, Adafactor, schedule-free `AdamW` and Prodigy against fifty steps of their authors' code (`tests/golden/optimizers`),
//! and what must hold for all of them: independence of threads, planned memory, nothing changed by what is not finite.

use super::{
    Adafactor, AdamW, FactoredMoments, GradClip, Prodigy, ProdigyState, ScheduleFreeState,
    adafactor, global_norm, lerp, lion, momentum, prodigy, prodigy_distance, schedule_free,
};
use crate::testing::{Input, compare, device, upload};
use crate::{Device, DeviceKind, Dtype, Result, Shape, Tensor};

const STEP: AdamW = AdamW {
    learning_rate: 0.01,
    betas: (0.9, 0.99),
    epsilon: 1e-8,
    weight_decay: 0.1,
    step: 1,
    scale: 1.0,
};

const PRODIGY: Prodigy = Prodigy {
    adamw: AdamW { learning_rate: 1.0, betas: (0.9, 0.999), weight_decay: 0.01, ..STEP },
    d0: 1e-6,
    d_coef: 1.0,
    use_bias_correction: false,
    safeguard_warmup: false,
};

/// Of one kind, with the state of each parameter.
enum Stepper {
    Lion(Vec<Tensor>),
    Adafactor(Vec<FactoredMoments>, bool),
    ScheduleFree(Vec<ScheduleFreeState>, f64),
    Prodigy(Vec<ProdigyState>, Tensor, Prodigy),
}

impl Stepper {
    fn all(params: &[Tensor]) -> [Self; 5] {
        let of = params;
        let device = of[0].device();
        let lion = of.iter().map(momentum).collect::<Result<_>>();
        let factored = || of.iter().map(FactoredMoments::new).collect::<Result<_>>().unwrap();
        let free = of.iter().map(ScheduleFreeState::new).collect::<Result<_>>();
        [
            Self::Lion(lion.unwrap()),
            Self::Adafactor(factored(), false),
            Self::Adafactor(factored(), true),
            Self::ScheduleFree(free.unwrap(), 0.0),
            Self::prodigy(of, device, PRODIGY),
        ]
    }

    fn prodigy(params: &[Tensor], device: &Device, how: Prodigy) -> Self {
        let state = params.iter().map(ProdigyState::new).collect::<Result<_>>();
        Self::Prodigy(state.unwrap(), prodigy_distance(device, how.d0).unwrap(), how)
    }

    fn step(
        &mut self,
        params: &mut [Tensor],
        gradients: &[Option<&Tensor>],
        how: AdamW,
        clip: Option<&GradClip>,
    ) -> Result<()> {
        match self {
            Self::Lion(means) => lion(params, gradients, means, how, clip),
            Self::Adafactor(state, scale_parameter) => {
                let how = Adafactor { adamw: how, scale_parameter: *scale_parameter };
                adafactor(params, gradients, state, how, clip)
            }
            Self::ScheduleFree(state, sum) => {
                // The learning rate never falls in these tests.
                let weight = f64::from(how.learning_rate).powi(2);
                *sum += weight;
                schedule_free(params, gradients, state, how, (weight / *sum) as f32, clip)
            }
            Self::Prodigy(state, distance, settings) => {
                let adamw = AdamW { betas: settings.adamw.betas, ..how };
                prodigy(params, gradients, state, distance, Prodigy { adamw, ..*settings }, clip)
            }
        }
    }

    /// All of the state.
    fn tensors(self) -> Vec<Tensor> {
        match self {
            Self::Lion(means) => means,
            Self::Adafactor(state, _) => {
                let both = |of: FactoredMoments| [Some(of.rows), of.columns];
                state.into_iter().flat_map(both).flatten().collect()
            }
            Self::ScheduleFree(state, _) => {
                state.into_iter().flat_map(|of| [of.z, of.second]).collect()
            }
            Self::Prodigy(state, distance, _) => {
                let of = |of: ProdigyState| [of.first, of.second, of.start, of.sum];
                state.into_iter().flat_map(of).chain([distance]).collect()
            }
        }
    }
}

fn golden(name: &str) -> Vec<f64> {
    let recorded = include_str!("../../../../../tests/golden/optimizers/steps.txt");
    let line = recorded.lines().find_map(|line| line.strip_prefix(&format!("{name} "))).unwrap();
    line.split(' ').map(|number| number.parse().unwrap()).collect()
}

/// Those of the reference: two matrices and a vector.
fn tensors(device: &Device, number: impl Fn(usize) -> f64) -> Vec<Tensor> {
    let shapes = [Shape::new(&[5, 8]), Shape::new(&[9, 4]), Shape::new(&[7])];
    let of = |shape: Shape| {
        let numbers: Vec<f32> = (0..shape.elements()).map(|i| number(i) as f32).collect();
        device.upload(shape, &numbers).unwrap()
    };
    shapes.map(of).into()
}

/// A gradient that does not depend on where the parameter is.
fn fixed(params: &[Tensor], step: u64) -> Vec<Tensor> {
    let n = step as f64;
    tensors(params[0].device(), |i| (0.7 * i as f64 * n + n).sin() * (0.5 + 0.01 * n))
}

/// That of a sum of squares around a target, with some noise.
fn bowl(params: &[Tensor], step: u64) -> Vec<Tensor> {
    let of = |param: &Tensor| {
        let away = |(i, value): (usize, f32)| {
            let (at, n) = (i as f64, step as f64);
            (f64::from(value) - (0.3 * (at + 1.0).sin() + 0.02 * (3.0 * at * n).sin())) as f32
        };
        let values: Vec<f32> = param.to_vec::<f32>().into_iter().enumerate().map(away).collect();
        param.device().upload(param.shape(), &values).unwrap()
    };
    params.iter().map(of).collect()
}

fn numbers(tensors: &[Tensor]) -> Vec<f32> {
    tensors.iter().flat_map(Tensor::to_vec::<f32>).collect()
}

type GradientFn = fn(&[Tensor], u64) -> Vec<Tensor>;

/// Fifty steps; returns what `seen` gives after each.
fn train<T>(
    params: &mut [Tensor],
    stepper: &mut Stepper,
    how: AdamW,
    warmup: u64,
    gradient: GradientFn,
    seen: impl Fn(&Stepper) -> T,
) -> Vec<T> {
    let one = |step| {
        let gradients = gradient(params, step);
        let gradients: Vec<_> = gradients.iter().map(Some).collect();
        let factor = if step < warmup { step as f64 / warmup as f64 } else { 1.0 };
        let learning_rate = (f64::from(how.learning_rate) * factor) as f32;
        stepper.step(params, &gradients, AdamW { learning_rate, step, ..how }, None).unwrap();
        seen(stepper)
    };
    (1..=50).map(one).collect()
}

#[test]
fn lion_and_adafactor_are_the_references() {
    let device = device();
    for (index, name, weight_decay) in
        [(0, "lion", 0.1), (1, "adafactor", 0.1), (2, "adafactor_scaled", 0.0)]
    {
        let mut params = tensors(&device, |i| (i as f64).cos());
        let mut stepper = Stepper::all(&params).into_iter().nth(index).unwrap();
        let how = AdamW { weight_decay, ..STEP };
        train(&mut params, &mut stepper, how, 0, fixed, |_| ());
        compare(name, &numbers(&params), &golden(name), 1e-6);
    }
}

#[test]
fn schedule_free_is_the_reference_where_it_trains_and_where_it_ends() {
    let device = device();
    let slow = AdamW { betas: (0.95, 0.999), weight_decay: 0.0, ..STEP };
    for (name, how, warmup) in [("schedule_free", STEP, 0), ("schedule_free_warmup", slow, 10)] {
        let mut params = tensors(&device, |i| (i as f64).cos());
        let [.., mut stepper, _] = Stepper::all(&params);
        train(&mut params, &mut stepper, how, warmup, fixed, |_| ());
        compare(name, &numbers(&params), &golden(name), 1e-6);
        let Stepper::ScheduleFree(state, _) = stepper else { unreachable!() };
        for (param, ScheduleFreeState { z, .. }) in params.iter_mut().zip(&state) {
            lerp(param, z, (1.0 - 1.0 / how.betas.0) as f32).unwrap();
        }
        compare("x", &numbers(&params), &golden(&format!("{name}_x")), 1e-6);
    }
}

#[test]
fn prodigy_is_the_reference_and_so_is_its_d() {
    let device = device();
    let options = Prodigy {
        adamw: AdamW { betas: (0.9, 0.99), weight_decay: 0.1, ..PRODIGY.adamw },
        d0: 1e-5,
        d_coef: 2.0,
        use_bias_correction: true,
        safeguard_warmup: true,
    };
    let coarse = Prodigy { d0: 1e-2, ..PRODIGY };
    // Parameters that have arrived have small gradients, the differences of numbers in f32, and move by these over their
    // size. From elsewhere than 0, the distance from the start loses digits in the same way.
    for (name, how, warmup, start, allowed) in [
        ("prodigy", PRODIGY, 0, 0.0, [1e-6, 2e-5]),
        ("prodigy_options", options, 20, 0.0, [2e-6, 2e-5]),
        ("prodigy_start", coarse, 0, 0.5, [5e-6, 2e-5]),
    ] {
        let mut params = tensors(&device, |i| start * (i as f64).cos());
        let mut stepper = Stepper::prodigy(&params, &device, how);
        let d = |stepper: &Stepper| {
            let Stepper::Prodigy(_, distance, _) = stepper else { unreachable!() };
            distance.to_vec::<f32>()[0]
        };
        let found = train(&mut params, &mut stepper, how.adamw, warmup, bowl, d);
        for (found, exact) in found.into_iter().zip(golden(&format!("{name}_d"))) {
            compare(&format!("{name}: d"), &[found], &[exact], allowed[0]);
        }
        compare(name, &numbers(&params), &golden(name), allowed[1]);
    }
}

/// Odd sizes around those of blocks and tasks, among them nothing, and a tensor of many matrices.
fn odd_tensors(device: &Device, seed: u64) -> Vec<Tensor> {
    let shapes: [&[usize]; 7] =
        [&[1], &[257], &[0], &[300, 70], &[3, 1000], &[5, 4, 3, 200], &[40_001]];
    let shapes = shapes.map(Shape::new);
    let inputs = shapes.map(|shape| Input::normal(shape, seed + shape.elements() as u64));
    inputs.iter().map(|input| upload(device, input, Dtype::F32)).collect()
}

/// Parameters and state after two steps, of which the second is clipped and lacks a gradient.
fn two_steps(device: &Device, index: usize) -> Vec<Tensor> {
    let (mut params, gradients) = (odd_tensors(device, 1), odd_tensors(device, 2));
    let mut stepper = Stepper::all(&params).into_iter().nth(index).unwrap();
    let mut gradients: Vec<Option<&Tensor>> = gradients.iter().map(Some).collect();
    stepper.step(&mut params, &gradients, STEP, None).unwrap();
    gradients[1] = None;
    let clip = GradClip { norm: global_norm(&gradients, device).unwrap(), max_norm: 0.5 };
    let how = AdamW { step: 2, ..STEP };
    stepper.step(&mut params, &gradients, how, Some(&clip)).unwrap();
    params.into_iter().chain(stepper.tensors()).collect()
}

#[test]
fn threads_make_no_difference_and_no_memory_is_unknown() {
    for index in 0..5 {
        let bits = [1, 2, 3].map(|threads| {
            let device = Device::cpu(threads, 1 << 24).unwrap();
            let numbers = numbers(&two_steps(&device, index)).into_iter();
            numbers.map(f32::to_bits).collect::<Vec<_>>()
        });
        assert!(bits.iter().all(|one| *one == bits[0]), "{index}");
        let usage = |device: &Device| {
            drop(two_steps(device, index));
            (device.usage(), device.work())
        };
        let cpu = Device::cpu(2, 1 << 24).unwrap();
        assert_eq!(usage(&Device::meta(DeviceKind::cpu(2), 1 << 24)), usage(&cpu), "{index}");
        assert_eq!(cpu.usage().in_use, 0);
    }
}

/// On a GPU if there is one: the same as on the CPU, in sizes that take many blocks.
#[test]
fn every_backend_agrees() {
    let (cpu, device) = (Device::cpu(2, 1 << 26).unwrap(), device());
    for index in 0..5 {
        let exact: Vec<Vec<f64>> = two_steps(&cpu, index)
            .iter()
            .map(|tensor| tensor.to_vec::<f32>().into_iter().map(f64::from).collect())
            .collect();
        for (at, (ours, exact)) in two_steps(&device, index).iter().zip(&exact).enumerate() {
            compare(&format!("{index}: tensor {at}"), &ours.to_vec::<f32>(), exact, 1e-5);
        }
    }
}

#[test]
fn what_is_not_finite_or_not_there_changes_nothing() {
    let device = device();
    for index in 0..5 {
        let mut params = tensors(&device, |i| (i as f64).cos());
        let before = numbers(&params);
        let mut stepper = Stepper::all(&params).into_iter().nth(index).unwrap();
        let bad = tensors(&device, |i| if i == 3 { f64::INFINITY } else { 1.0 });
        let bad: Vec<_> = bad.iter().map(Some).collect();
        let clip = GradClip { norm: global_norm(&bad, &device).unwrap(), max_norm: 1.0 };
        stepper.step(&mut params, &bad, STEP, Some(&clip)).unwrap();
        assert_eq!(numbers(&params), before, "{index}");
        stepper.step(&mut params, &[None, None, None], STEP, None).unwrap();
        assert_eq!(numbers(&params), before, "{index}");
        // Nothing of it is in the state: the next step is that of a new one.
        let mut others = tensors(&device, |i| (i as f64).cos());
        let mut new = Stepper::all(&others).into_iter().nth(index).unwrap();
        if let Stepper::ScheduleFree(_, sum) = &mut stepper {
            *sum = 0.0;
        }
        for (params, stepper) in [(&mut params, &mut stepper), (&mut others, &mut new)] {
            let gradients = fixed(params, 1);
            let gradients: Vec<_> = gradients.iter().map(Some).collect();
            stepper.step(params, &gradients, STEP, None).unwrap();
        }
        assert_eq!(numbers(&params), numbers(&others), "{index}");
        // Without a clip nobody looks, and what is not finite stays visible.
        stepper.step(&mut params, &bad, STEP, None).unwrap();
        assert!(numbers(&params).iter().any(|number| !number.is_finite()), "{index}");
    }
}

#[test]
fn gradients_are_scaled_before_they_are_clipped() {
    let device = device();
    for index in 0..5 {
        let after = |times: f64, max_norm: f32| {
            let mut params = tensors(&device, |i| (i as f64).cos());
            let mut stepper = Stepper::all(&params).into_iter().nth(index).unwrap();
            let gradients = tensors(&device, |i| times * (0.3 * i as f64).sin());
            let gradients: Vec<_> = gradients.iter().map(Some).collect();
            let clip = GradClip { norm: global_norm(&gradients, &device).unwrap(), max_norm };
            let how = AdamW { scale: 1.0 / times as f32, ..STEP };
            stepper.step(&mut params, &gradients, how, Some(&clip)).unwrap();
            (numbers(&params), numbers(&stepper.tensors()))
        };
        assert_eq!(after(1.0, 1.0), after(1024.0, 1.0), "{index}");
        assert_ne!(after(1.0, 1.0).1, after(1.0, 100.0).1, "{index}");
    }
}

#[test]
fn what_makes_no_sense_is_said() {
    let device = device();
    let step = |index: usize, how: AdamW| {
        let mut params = tensors(&device, |_| 0.0);
        let mut stepper = Stepper::all(&params).into_iter().nth(index).unwrap();
        let gradients = fixed(&params, 1);
        let gradients: Vec<_> = gradients.iter().map(Some).collect();
        stepper.step(&mut params, &gradients, how, None).unwrap_err().to_string()
    };
    for (index, name) in [(0, "lion"), (1, "adafactor"), (3, "schedule_free"), (4, "prodigy")] {
        let error = step(index, AdamW { step: 0, ..STEP });
        assert_eq!(error, format!("{name}: step is 0, expected 1 or more"));
    }
    let mut params = tensors(&device, |_| 0.0);
    let gradients = fixed(&params, 1);
    let gradients: Vec<_> = gradients.iter().map(Some).collect();
    let vectors: Vec<Tensor> =
        params.iter().map(|param| param.reshape([param.shape().elements()])).collect();
    let mut state: Vec<_> = vectors.iter().map(|it| FactoredMoments::new(it).unwrap()).collect();
    drop(vectors);
    let how = Adafactor { adamw: STEP, scale_parameter: false };
    let error = adafactor(&mut params, &gradients, &mut state, how, None).unwrap_err();
    assert_eq!(error.to_string(), "adafactor: means of rows has shape [40], expected [5]");
    let mut wrong = Stepper::prodigy(&params, &device, Prodigy { d0: 0.0, ..PRODIGY });
    let error = wrong.step(&mut params, &gradients, STEP, None).unwrap_err().to_string();
    assert_eq!(error, "prodigy: d0 is 0, expected above 0, and finite");
    let state = params.iter().map(|it| ScheduleFreeState::new(it).unwrap()).collect::<Vec<_>>();
    let mut state = state;
    let error = schedule_free(&mut params, &gradients, &mut state, STEP, 1.5, None).unwrap_err();
    assert_eq!(error.to_string(), "schedule_free: weight is 1.5, expected 0 to 1");
    let error = lerp(&mut params[2], gradients[2].unwrap(), f32::NAN).unwrap_err().to_string();
    assert_eq!(error, "lerp: weight is NaN, expected finite");
}
