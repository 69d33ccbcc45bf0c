//! Every loss with its gradient against PyTorch and kohya's sd-scripts (`tests/golden/losses`), as a step computes it.

use compute::ops::PatchOrder;
use compute::{Device, Gradients, Params, Tape};

use super::{BatchLoss, DenoiserOutput, LatentPatches, PatchedSize, VelocityLoss};
use crate::objective::velocity_loss::{HuberSchedule, HuberThreshold, LossKind};
use crate::objective::weighting::LossWeighting;
use crate::objective::weighting::tests::recorded;

const SHAPE: [usize; 4] = [3, 4, 6, 8];

fn check(name: &str, function: VelocityLoss, weighting: LossWeighting) {
    let device = Device::cpu(1, 1 << 22).unwrap();
    let (nothing, order) = (Params::default(), PatchOrder::ChannelsFirst);
    let look = Tape::inference(&device, &nothing, 0);
    let tokens = |values: &[f32]| {
        let latents = device.upload(SHAPE, values).unwrap();
        look.patchify(&latents.into(), 2, order).unwrap().into_tensor()
    };
    let mut params = Params::default();
    let key = params.add(tokens(&recorded("in.prediction")));
    let tape = Tape::training(&device, &params, 0);
    let output = DenoiserOutput {
        tokens: tape.param(key),
        size: PatchedSize::Image([3, 4]),
        patches: LatentPatches { size: 2, order },
    };
    let sigmas = recorded("in.sigmas");
    let weights = recorded("in.weights");
    let weights: Vec<f32> = weights
        .iter()
        .zip(&sigmas)
        .map(|(weight, sigma)| weight * weighting.weight(*sigma))
        .collect();
    let factors = tokens(&recorded("in.factors"));
    let how = BatchLoss { function, sigmas: &sigmas, weights: &weights, factors: Some(&factors) };
    let loss = output.loss(&tape, &tokens(&recorded("in.target")), &how).unwrap();
    let (found, expected) =
        (loss.tensor().to_f32_vec()[0], recorded(&format!("out.{name}.loss"))[0]);
    assert!((found - expected).abs() < 2e-6 * expected, "{name}: {found}, not {expected}");
    let mut gradients = Gradients::default();
    tape.backward(&loss, &mut gradients).unwrap();
    let found = gradients.get(key).unwrap().to_f32_vec();
    let expected = tokens(&recorded(&format!("out.{name}.gradient"))).to_f32_vec();
    let largest = expected.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
    for (found, expected) in found.iter().zip(&expected) {
        assert!((found - expected).abs() < 2e-6 * largest, "{name}: {found}, not {expected}");
    }
}

#[test]
fn losses_and_their_gradients_are_those_of_pytorch_and_kohya() {
    let of = |kind, schedule| VelocityLoss { kind, threshold: HuberThreshold { c: 0.3, schedule } };
    for (name, kind, schedule) in [
        ("mse", LossKind::Mse, HuberSchedule::Constant),
        ("l1", LossKind::L1, HuberSchedule::Constant),
        ("huber", LossKind::Huber, HuberSchedule::Constant),
        ("smooth_l1", LossKind::SmoothL1, HuberSchedule::Constant),
        ("pseudo_huber.constant", LossKind::PseudoHuber, HuberSchedule::Constant),
        ("pseudo_huber.exponential", LossKind::PseudoHuber, HuberSchedule::Exponential),
        ("pseudo_huber.snr", LossKind::PseudoHuber, HuberSchedule::Snr),
        ("pseudo_smooth_l1.constant", LossKind::PseudoSmoothL1, HuberSchedule::Constant),
        ("pseudo_smooth_l1.exponential", LossKind::PseudoSmoothL1, HuberSchedule::Exponential),
        ("pseudo_smooth_l1.snr", LossKind::PseudoSmoothL1, HuberSchedule::Snr),
    ] {
        check(name, of(kind, schedule), LossWeighting::None);
    }
}

/// Weights of the velocity are the losses of x that they stand for.
#[test]
fn weighted_losses_are_those_of_x() {
    let mse = VelocityLoss::default();
    check("min_snr", mse, LossWeighting::MinSnr { gamma: 5.0 });
    check("sigma_squared", mse, LossWeighting::SigmaSquared);
}
