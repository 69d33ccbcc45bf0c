//! Gradients of every estimator through the whole model, against finite differences. A draw does not move with the
//! parameters, and advantages are plain numbers: both are held, as the estimators define it.

use compute::{Device, DeviceKind, Dtype, Gradients, Params, RandomSequence, Tape};

use super::draw::Anchored;
use super::forward::{Compressor, CompressorInputs};
use super::policy_loss::{advantages, policy_weights, ratio_weights, weighted_sum};
use super::{
    CompressedModel, CompressorConfig, CompressorMode, CompressorTraining, CompressorType,
    Estimator, Selector,
};
use crate::cost::UNLIMITED;
use crate::model::adapter::Adapters;
use crate::model::build::Precision;
use crate::model::llama::preset::LlamaPreset;
use crate::model::recompute::Recompute;

const SEED: u64 = 11;
/// Of finite differences.
const STEP: f32 = 5e-4;
/// Two sequences of 24 tokens.
const SIZES: [usize; 2] = [2, 24];

struct GradientCase {
    device: Device,
    model: Compressor,
    params: Params,
    /// The policy's among the parameters.
    policy: Vec<usize>,
    training: CompressorTraining,
    ids: Vec<u32>,
    targets: Vec<u32>,
    first_keys: Vec<u32>,
}

/// What is held while parameters move.
struct Held {
    kept: Vec<Vec<u32>>,
    logit_values: Vec<f32>,
    /// Values of soft choices or logits.
    anchor: Option<Vec<f32>>,
    /// Of the logits.
    weights: Option<Vec<f32>>,
}

/// A very small model.
fn config(estimator: Estimator) -> CompressorConfig {
    let mut trunk = LlamaPreset::Tiny.config(64);
    (trunk.hidden_size, trunk.intermediate_size, trunk.num_hidden_layers) = (16, 32, 1);
    (trunk.num_attention_heads, trunk.num_key_value_heads, trunk.head_dim) = (2, 2, 8);
    trunk.rotary_dim = 8;
    CompressorConfig {
        model_type: CompressorType::Compressor,
        trunk,
        width: 8,
        layers: 1,
        window: 8,
        keep_one_in: 4,
        select: Selector::Policy,
        mode: CompressorMode::Next,
        is_smoothed: estimator == Estimator::Ratio,
    }
}

impl GradientCase {
    fn new(estimator: Estimator) -> Self {
        let config = config(estimator);
        let training = CompressorTraining { estimator, ..CompressorTraining::default() };
        let base = CompressedModel::random_init("none".as_ref(), config, training, 3);
        let device = Device::cpu(1, 64 << 20).unwrap();
        let mut adapters = Adapters::full_in(Dtype::F32);
        let precision = Precision::plain(Dtype::F32);
        let model = base.load(&device, precision, &mut adapters, &|_| true).unwrap();
        let names: Vec<String> =
            base.tensor_specs().unwrap().into_iter().map(|spec| spec.name).collect();
        assert_eq!(names.len(), adapters.params.values().len());
        let is_policy = |(_, name): &(usize, String)| name.starts_with("policy");
        let policy = names.into_iter().enumerate().filter(is_policy).map(|(at, _)| at).collect();
        let n = SIZES[0] * SIZES[1];
        let ids = (0..n).map(|at| (at * at * 7 % 61) as u32).collect();
        let targets = (0..n).map(|at| ((at + 1) * (at + 1) * 7 % 61) as u32).collect();
        // The second sequence has two documents.
        let first_keys = (0..n).map(|at| if at >= 33 { 9 } else { 0 }).collect();
        let mut case = Self {
            device,
            model,
            params: adapters.params,
            policy,
            training,
            ids,
            targets,
            first_keys,
        };
        // Far from the small numbers of an init, where most of a gradient is that of the last layer.
        case.params = case.moved(&case.direction(1, &|_| true), 0.3);
        case
    }

    fn inputs(&self) -> CompressorInputs<'_> {
        let Self { ids, targets, first_keys, .. } = self;
        CompressorInputs { sizes: SIZES, ids, targets, first_keys }
    }

    /// Normal numbers for the parameters that take part, zeros for the others.
    fn direction(&self, seed: u64, takes_part: &dyn Fn(usize) -> bool) -> Vec<Vec<f32>> {
        let of = |(at, tensor): (usize, &compute::Tensor)| {
            let random = RandomSequence::new(seed, at as u64);
            let n = tensor.shape().elements();
            (0..n).map(|i| if takes_part(at) { random.normal(i) } else { 0.0 }).collect()
        };
        self.params.values().iter().enumerate().map(of).collect()
    }

    fn moved(&self, direction: &[Vec<f32>], by: f32) -> Params {
        let mut moved = Params::default();
        for (tensor, direction) in self.params.values().iter().zip(direction) {
            let values = tensor.read::<f32>().unwrap();
            let values: Vec<f32> = values.iter().zip(direction).map(|(x, d)| x + by * d).collect();
            moved.add(self.device.upload(tensor.shape(), &values).unwrap());
        }
        moved
    }

    fn gradients(&self) -> Vec<Vec<f32>> {
        let tape = Tape::training(&self.device, &self.params, SEED);
        let loss =
            self.model.loss(&tape, self.inputs(), &self.training, Recompute::None).unwrap().loss;
        let mut gradients = Gradients::default();
        tape.backward(&loss, &mut gradients).unwrap();
        let keys = self.params.keys();
        let sizes = self.params.values().iter().map(|of| of.shape().elements()).collect::<Vec<_>>();
        keys.zip(sizes)
            .map(|(key, n)| gradients.read(key).unwrap().unwrap_or_else(|| vec![0.0; n]))
            .collect()
    }

    /// The function whose gradient an estimator computes, and what has to be held; without `held` at this point.
    fn value(&self, params: &Params, held: Option<&Held>) -> (f64, Held) {
        let tape = Tape::training(&self.device, params, SEED);
        let (model, inputs, training) = (&self.model, self.inputs(), &self.training);
        let narrow = model
            .narrow_inputs(&self.device, inputs.first_keys, SIZES[1], Recompute::None)
            .unwrap();
        let ids = self.device.upload(SIZES, inputs.ids).unwrap();
        let states = model.encode(&tape, &ids, &narrow, Recompute::None).unwrap();
        let mut drawn = model.draw(&tape, &states, inputs, training).unwrap();
        if let Some(held) = held {
            drawn.kept.clone_from(&held.kept);
            drawn.logit_values.clone_from(&held.logit_values);
            for anchored in [&mut drawn.logits, &mut drawn.soft].into_iter().flatten() {
                let values = held.anchor.as_ref().unwrap();
                let values = self.device.upload(SIZES, values).unwrap();
                *anchored = Anchored { var: anchored.var.clone(), values };
            }
        }
        let repeated = inputs.repeated(drawn.kept.len() / SIZES[0]);
        let masks = repeated.as_inputs();
        let targets = self.device.upload(SIZES, inputs.targets).unwrap();
        let normed = model.normed(&tape, &states, &model.early_norm).unwrap();
        let early = model.exit_loss(&tape, &normed, &targets).unwrap();
        let hidden = model.decode(&tape, &states, &drawn, masks, &narrow, Recompute::None).unwrap();
        let targets = self.device.upload(masks.sizes, masks.targets).unwrap();
        let last = model.exit_loss(&tape, &hidden, &targets).unwrap();
        let mean = |losses: Vec<f64>| losses.iter().sum::<f64>() / losses.len() as f64;
        let mut value = mean(last.rows.read().unwrap())
            + training.early_weight * mean(early.rows.read().unwrap());
        let anchored = drawn.logits.as_ref().or(drawn.soft.as_ref());
        let anchor = anchored.map(|of| of.var.tensor().read::<f32>().unwrap());
        let weights = held.map_or_else(
            || match training.estimator {
                Estimator::Gumbel => None,
                Estimator::Ratio => Some(ratio_weights(&drawn, SIZES[1])),
                _ => {
                    let all = advantages(&last, &early, &drawn, masks, training).unwrap();
                    Some(policy_weights(&drawn, &all, masks.targets, training))
                }
            },
            |held| held.weights.clone(),
        );
        if let (Some(weights), Some(logits)) = (&weights, &anchor) {
            let terms = weights.iter().zip(logits).map(|(a, b)| f64::from(*a) * f64::from(*b));
            value += terms.sum::<f64>();
        }
        (value, Held { kept: drawn.kept, logit_values: drawn.logit_values, anchor, weights })
    }

    /// The slope along a direction, by the gradient and by differences.
    fn slopes(&self, direction: &[Vec<f32>]) -> [f64; 2] {
        let (_, held) = self.value(&self.params, None);
        let at = |by: f32| self.value(&self.moved(direction, by), Some(&held)).0;
        // Of fourth order, so that a step can be large beside what f32 rounds.
        let differences = (8.0 * (at(STEP) - at(-STEP)) - (at(2.0 * STEP) - at(-2.0 * STEP)))
            / (12.0 * f64::from(STEP));
        let gradients = self.gradients();
        let terms = gradients.iter().flatten().zip(direction.iter().flatten());
        [terms.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum(), differences]
    }
}

#[test]
fn gradients_of_every_estimator_are_those_of_finite_differences() {
    for estimator in [Estimator::Reinforce, Estimator::Grpo, Estimator::Gumbel, Estimator::Ratio] {
        let case = GradientCase::new(estimator);
        let is_policy = |at: usize| case.policy.contains(&at);
        for seed in 20..24 {
            for (part, takes_part) in
                [("all", &(|_| true) as &dyn Fn(usize) -> bool), ("policy", &is_policy)]
            {
                let [gradient, differences] = case.slopes(&case.direction(seed, takes_part));
                let error = (gradient - differences).abs();
                assert!(
                    error < 1e-2 * differences.abs() + 2e-4,
                    "{estimator:?}, {part}, seed {seed}: {gradient} {differences}"
                );
            }
        }
        let of_policy: f32 =
            case.policy.iter().flat_map(|at| case.gradients()[*at].clone()).map(f32::abs).sum();
        assert!(of_policy > 1e-3, "{estimator:?}: no gradient reaches the policy");
    }
}

/// Peak bytes of a step's forward and backward, by a dry run: of the one scalar, or of two losses with a graph each, as a
/// policy that is trained apart from its model has them.
fn peak_bytes(estimator: Estimator, is_combined: bool) -> usize {
    const SIZES: [usize; 2] = [4, 512];
    let trunk = LlamaPreset::Tiny.config(320);
    let config = CompressorConfig { trunk, width: 96, layers: 2, window: 64, ..config(estimator) };
    let training = CompressorTraining { estimator, ..CompressorTraining::default() };
    let base = CompressedModel::random_init("none".as_ref(), config, training, 3);
    let device = Device::meta(DeviceKind::cpu(1), UNLIMITED);
    let mut adapters = Adapters::full_in(Dtype::F32);
    let model = base.load(&device, Precision::plain(Dtype::F32), &mut adapters, &|_| true).unwrap();
    let params = &adapters.params;
    let mut gradients = Gradients::reserved(&device, params).unwrap();
    let zeros = vec![0; SIZES[0] * SIZES[1]];
    let inputs =
        CompressorInputs { sizes: SIZES, ids: &zeros, targets: &zeros, first_keys: &zeros };
    let held = device.usage().extent;
    let none = Recompute::None;
    let tape = Tape::training(&device, params, SEED);
    if is_combined {
        let loss = model.loss(&tape, inputs, &training, none).unwrap().loss;
        tape.backward(&loss, &mut gradients).unwrap();
    } else {
        let policy_tape = Tape::training(&device, params, SEED);
        let narrow = model.narrow_inputs(&device, &zeros, SIZES[1], none).unwrap();
        let ids = device.upload(SIZES, &zeros).unwrap();
        let states = model.encode(&policy_tape, &ids, &narrow, none).unwrap();
        let policy = model.policy.as_ref().unwrap();
        let logits = policy.logits(&policy_tape, &states).unwrap();
        drop(states);
        let weights = vec![0.0; zeros.len()];
        let policy_loss = weighted_sum(&policy_tape, &logits, &weights).unwrap();
        let model_only = CompressorTraining { estimator: Estimator::Gumbel, ..training };
        let loss = model.loss(&tape, inputs, &model_only, none).unwrap().loss;
        tape.backward(&loss, &mut gradients).unwrap();
        policy_tape.backward(&policy_loss, &mut gradients).unwrap();
    }
    device.usage().extent - held
}

#[test]
fn one_backward_pass_takes_less_memory_than_two_graphs() {
    let [one, two] = [true, false].map(|is_one| peak_bytes(Estimator::Reinforce, is_one));
    assert!(one < two, "{one} {two}");
}
