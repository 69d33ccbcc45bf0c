//! Tensor values on the host.

use compute::{Result, Tensor};

/// A tensor's values; zeros on the meta device, so that a dry run takes the same path.
pub fn to_vec(tensor: &Tensor) -> Result<Vec<f32>> {
    if tensor.device().is_meta() {
        return Ok(vec![0.0; tensor.shape().elements()]);
    }
    tensor.read_f32()
}

/// The largest difference relative to the largest expected value; NaN if any value is NaN.
pub fn relative_error(expected: &[f32], got: &[f32]) -> f64 {
    if expected.len() != got.len() {
        return f64::NAN;
    }
    let (mut most, mut largest) = (0.0f64, 0.0f64);
    for (expected, got) in expected.iter().zip(got) {
        let (expected, got) = (f64::from(*expected), f64::from(*got));
        let apart = (expected - got).abs();
        if apart.is_nan() {
            return f64::NAN;
        }
        (most, largest) = (most.max(apart), largest.max(expected.abs()));
    }
    if largest == 0.0 { most } else { most / largest }
}

/// The cosine of the angle between two vectors; 1 for two of zeros.
pub fn cosine(expected: &[f32], got: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| -> f64 {
        a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
    };
    let lengths = (dot(expected, expected) * dot(got, got)).sqrt();
    let is_nothing = [expected, got].iter().all(|all| all.iter().all(|x| *x == 0.0));
    if is_nothing { 1.0 } else { dot(expected, got) / lengths }
}
