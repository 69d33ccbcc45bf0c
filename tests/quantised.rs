//! Quantised matrices against those of bitsandbytes and PyTorch (`tests/golden/quantised`).

use std::path::Path;

use compute::{Device, Quantisation, Quantised};
use safetensors::SafeTensors;

/// Every recorded tensor as f32.
fn recorded(name: &str) -> Vec<f32> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/golden/quantised/golden.safetensors");
    let bytes = std::fs::read(file).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let numbers = tensors.tensor(name).unwrap();
    numbers.data().as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// How many numbers are off by more than `allowed`, given the largest of their row.
fn differing(how: Quantisation, name: &str, allowed: impl Fn(f32) -> f32) -> usize {
    let width = 192;
    let device = Device::cpu(2, 1 << 24).unwrap();
    let matrix = recorded("matrix");
    let matrix = device.upload([matrix.len() / width, width], &matrix).unwrap();
    let ours = Quantised::new(&matrix, how).unwrap().to_f32_vec().unwrap();
    let theirs = recorded(name);
    let rows = ours.chunks(width).zip(theirs.chunks(width));
    rows.map(|(ours, theirs)| {
        let allowed = allowed(theirs.iter().fold(0.0, |most: f32, x| most.max(x.abs())));
        ours.iter().zip(theirs).filter(|(a, b)| (*a - *b).abs() > allowed).count()
    })
    .sum()
}

/// All codes are equal but one: of a scale close to the mean bitsandbytes takes the second-nearest,
/// which moves its 64 numbers by 2e-4. And a scale is a mean and a distance from it, up to 30, which
/// both round.
#[test]
fn nf4_is_that_of_bitsandbytes() {
    let allowed = |most| 2e-4 * most + 30.0 * f32::EPSILON;
    assert_eq!(differing(Quantisation::Nf4, "nf4", allowed), 0);
    let exact = |most| 1e-6 * most + 30.0 * f32::EPSILON;
    assert!(differing(Quantisation::Nf4, "nf4", exact) <= 64);
}

#[test]
fn fp8_is_that_of_pytorch() {
    assert_eq!(differing(Quantisation::Fp8, "fp8", |most| 2.0 * f32::EPSILON * most), 0);
}

#[test]
fn int8_is_that_of_bitsandbytes() {
    assert_eq!(differing(Quantisation::Int8, "int8", |most| 2.0 * f32::EPSILON * most), 0);
}
