//! Activations against their definitions.

use super::Activation;
use crate::testing::{Dual, Input, check};

/// The definition of each function.
pub fn exact(activation: Activation, x: Dual) -> Dual {
    let (half, one) = (Dual::from(0.5), Dual::from(1.0));
    let sigmoid = |z: Dual| one / (one + (-z).exp());
    match activation {
        Activation::None => x,
        Activation::GeluTanh => {
            let z = (x + x * x * x * 0.044_715) * (2.0 / std::f64::consts::PI).sqrt();
            half * x * (one + z.tanh())
        }
        Activation::GeluErf => half * x * (one + (x * std::f64::consts::FRAC_1_SQRT_2).erf()),
        Activation::QuickGelu => x * sigmoid(x * 1.702),
        Activation::Silu => x * sigmoid(x),
        Activation::Tanh => x.tanh(),
    }
}

pub const ALL: [Activation; 6] = [
    Activation::None,
    Activation::GeluTanh,
    Activation::GeluErf,
    Activation::QuickGelu,
    Activation::Silu,
    Activation::Tanh,
];

#[test]
fn values_and_slopes_are_exact() {
    for activation in ALL {
        for shape in [[1, 1], [3, 67]] {
            check(
                &[Input::normal(shape, 1).scaled(2.0)],
                4.0,
                &|tape, x| tape.activate(&x[0], activation),
                &|x| x[0].iter().map(|x| exact(activation, *x)).collect(),
            );
        }
    }
}

#[test]
fn extremes_stay_what_they_are() {
    for activation in ALL {
        assert!(
            activation.value(f32::NAN).is_nan() && activation.derivative(f32::NAN).is_nan()
                || activation == Activation::None
        );
        assert_eq!(activation.value(0.0), 0.0);
        if activation == Activation::Tanh {
            assert_eq!([50.0, -50.0].map(|x| activation.value(x)), [1.0, -1.0]);
            assert_eq!(activation.derivative(-50.0), 0.0);
            continue;
        }
        assert_eq!(activation.value(50.0), 50.0);
        assert!((activation.derivative(50.0) - 1.0).abs() < 1e-6);
        if activation != Activation::None {
            assert!(
                activation.value(-50.0).abs() < 1e-6 && activation.derivative(-50.0).abs() < 1e-6
            );
        }
    }
}
