//! Activations on the CPU.

use super::Activation;
use crate::Tensor;
use crate::cpu::CpuBackend;
use crate::cpu::math::{erfc, exp, sigmoid};
use crate::cpu::rows::{load, store};
use crate::cpu::simd::simd;
use crate::dtype::{Real, with_real};

pub fn forward(cpu: &CpuBackend, activation: Activation, x: &Tensor, y: &mut Tensor) {
    with_real!(x.dtype(), T => {
        let x = x.data::<T>();
        cpu.par_rows(y.data_mut::<T>(), 1, |first, y| {
            let mut numbers = vec![0.0; y.len()];
            load(&x[first..], &mut numbers);
            activation.apply(&mut numbers);
            store(&numbers, y, false);
        });
    });
}

pub fn backward(cpu: &CpuBackend, activation: Activation, x: &Tensor, gradient: &mut Tensor) {
    with_real!(x.dtype(), T => {
        let x = x.data::<T>();
        cpu.par_rows(gradient.data_mut::<T>(), 1, |first, gradient| {
            let mut slopes = vec![0.0; gradient.len()];
            load(&x[first..], &mut slopes);
            activation.apply_derivative(&mut slopes);
            for (gradient, slope) in gradient.iter_mut().zip(&slopes) {
                *gradient = T::from_f32(gradient.to_f32() * slope);
            }
        });
    });
}

/// √(2/π) and the cubic term of the approximation: Hendrycks and Gimpel, "Gaussian Error Linear
/// Units", arXiv 1606.08415, section 2.
const GELU_SCALE: f32 = 0.797_884_6;
const GELU_CUBIC: f32 = 0.044_715;
/// The same paper's x · sigmoid(1.702 x).
const QUICK: f32 = 1.702;
const INVERSE_SQRT_2: f32 = std::f32::consts::FRAC_1_SQRT_2;
const INVERSE_SQRT_2_PI: f32 = 0.398_942_3;

simd! {
    fn values(activation: Activation, numbers: &mut [f32]) {
        activation.map(numbers, Activation::value);
    }

    fn slopes(activation: Activation, numbers: &mut [f32]) {
        activation.map(numbers, Activation::derivative);
    }
}

impl Activation {
    /// Applies it to each element.
    pub(crate) fn apply(self, numbers: &mut [f32]) {
        if self != Self::None {
            values(self, numbers);
        }
    }

    /// Replaces each element by the derivative there.
    pub(crate) fn apply_derivative(self, numbers: &mut [f32]) {
        slopes(self, numbers);
    }

    /// A loop for each activation: a choice inside the loop would keep the compiler from using
    /// vectors.
    #[inline(always)]
    fn map(self, numbers: &mut [f32], f: impl Fn(Self, f32) -> f32) {
        macro_rules! loops {
            ($($name:ident),*) => {
                match self {
                    $(Self::$name => {
                        for x in numbers {
                            *x = f(Self::$name, *x);
                        }
                    })*
                }
            };
        }
        loops!(None, GeluTanh, GeluErf, QuickGelu, Silu, Tanh);
    }

    #[inline(always)]
    pub(crate) fn value(self, x: f32) -> f32 {
        match self {
            Self::None => x,
            // 1 + tanh(z) = 2 · sigmoid(2z)
            Self::GeluTanh => x * sigmoid(2.0 * GELU_SCALE * (x + GELU_CUBIC * x * x * x)),
            Self::GeluErf => 0.5 * x * erfc(-x * INVERSE_SQRT_2),
            Self::QuickGelu => x * sigmoid(QUICK * x),
            Self::Silu => x * sigmoid(x),
            // Not by the sigmoid, which loses the digits of small numbers.
            Self::Tanh => x.tanh(),
        }
    }

    #[inline(always)]
    pub(crate) fn derivative(self, x: f32) -> f32 {
        let gate = |z: f32, dz: f32| {
            let s = sigmoid(z);
            s + x * s * (1.0 - s) * dz
        };
        match self {
            Self::None => 1.0,
            Self::GeluTanh => {
                let z = 2.0 * GELU_SCALE * (x + GELU_CUBIC * x * x * x);
                gate(z, 2.0 * GELU_SCALE * (1.0 + 3.0 * GELU_CUBIC * x * x))
            }
            Self::GeluErf => {
                0.5 * erfc(-x * INVERSE_SQRT_2) + x * INVERSE_SQRT_2_PI * exp(-0.5 * x * x)
            }
            Self::QuickGelu => gate(QUICK * x, QUICK),
            Self::Silu => gate(x, 1.0),
            Self::Tanh => {
                let y = x.tanh();
                1.0 - y * y
            }
        }
    }
}
