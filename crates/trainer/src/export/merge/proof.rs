//! Checks a merged file: changed values are those of base plus adapter, rounded to the format; all others are
//! unchanged.

use weights::load::{LoadOptions, LoadRequest, load, load_f32};
use weights::{BytesDoneFn, Catalog, FileDtype, TensorInfo, WeightsError};

use super::patch::MatrixPatch;
use super::{BLOCK, MatrixPatches, dtype, each_rows, patch};
use crate::error::{Result, TrainerError};

/// The largest error in ULP. Chosen: rounding to the nearest costs half; the rest is for the second rounding, by way
/// of f32.
const MAX_STEPS: f64 = 0.501;

/// The result of the check.
pub struct MergeProof {
    pub n_changed: usize,
    pub n_unchanged: usize,
    pub worst_steps: f64,
}

/// Compares a file with the base it was made of.
pub fn prove(
    base: &Catalog,
    merged: &Catalog,
    patches: &MatrixPatches<'_>,
    tick: BytesDoneFn<'_>,
) -> Result<MergeProof> {
    let mut proof = MergeProof { n_changed: 0, n_unchanged: 0, worst_steps: 0.0 };
    if base.tensors.len() != merged.tensors.len() {
        let counts = (merged.tensors.len(), base.tensors.len());
        return Err(wrong(
            merged,
            format!("{} tensors were written, expected {}", counts.0, counts.1),
        ));
    }
    for tensor in &base.tensors {
        let again = merged.find(&tensor.name)?;
        if (&tensor.shape, tensor.encoding) != (&again.shape, again.encoding) {
            return Err(wrong(merged, format!("{} has another shape or format", tensor.name)));
        }
        let Some(patches) = patches.get(&tensor.name) else {
            same(base, tensor, merged, again, tick)?;
            proof.n_unchanged += 1;
            continue;
        };
        let worst = worst_steps([base, merged], [tensor, again], patches, tick)?;
        if worst > MAX_STEPS {
            let problem = format!("{} is off by {worst:.2} ULP of {}", tensor.name, dtype(tensor));
            return Err(wrong(merged, problem));
        }
        proof.worst_steps = proof.worst_steps.max(worst);
        proof.n_changed += 1;
    }
    Ok(proof)
}

fn wrong(merged: &Catalog, problem: String) -> TrainerError {
    TrainerError::Adapter { problem, path: merged.path.clone() }
}

/// The largest error of a merged tensor, in ULP.
fn worst_steps(
    [base, merged]: [&Catalog; 2],
    [tensor, again]: [&TensorInfo; 2],
    patches: &[MatrixPatch<'_>],
    tick: BytesDoneFn<'_>,
) -> Result<f64> {
    let mut worst = 0.0_f64;
    each_rows(base, tensor, tick, &mut |first, width, values| {
        let exact = patch::apply_patches(patches, first, width, values);
        let start = (first * width) as u64;
        let got = load_f32(merged, again, start..start + exact.len() as u64)?;
        let all = exact.iter().zip(&got).map(|(exact, got)| steps(dtype(tensor), *exact, *got));
        worst = all.fold(worst, f64::max);
        Ok(())
    })?;
    Ok(worst)
}

/// Fails unless two tensors have the same bytes.
fn same(
    base: &Catalog,
    tensor: &TensorInfo,
    merged: &Catalog,
    again: &TensorInfo,
    tick: BytesDoneFn<'_>,
) -> Result<()> {
    let dtype = dtype(tensor);
    let bytes = |catalog: &Catalog, tensor: &TensorInfo, first: u64, count: u64| {
        let mut bytes = vec![0; (count * dtype.bytes()) as usize];
        let wanted = LoadRequest { tensor, dtype, first, scales: &[], into: &mut bytes[..] };
        load(catalog, vec![wanted], LoadOptions::default(), &|_| true).map(|()| bytes)
    };
    for first in (0..tensor.numel()).step_by(BLOCK as usize) {
        let count = BLOCK.min(tensor.numel() - first);
        if bytes(base, tensor, first, count)? != bytes(merged, again, first, count)? {
            return Err(wrong(merged, format!("{} should not have changed", tensor.name)));
        }
        if !tick(count * dtype.bytes()) {
            return Err(WeightsError::Cancelled.into());
        }
    }
    Ok(())
}

/// The error of a stored value, in ULP of its format.
fn steps(dtype: FileDtype, exact: f64, got: f32) -> f64 {
    // Mantissa bits, and the smallest normal exponent.
    let (digits, lowest) = match dtype {
        FileDtype::F16 => (10, -14),
        FileDtype::Bf16 => (7, -126),
        _ => (23, -126),
    };
    let exponent = ((exact.to_bits() >> 52) & 0x7ff) as i32 - 1023;
    let step = 2.0_f64.powi(exponent.max(lowest) - digits);
    let apart = (exact - f64::from(got)).abs() / step;
    // NaN is never right.
    if apart.is_nan() { f64::INFINITY } else { apart }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_in_ulp() {
        let cases = [
            (FileDtype::F32, 1.0, 1.0 + f32::EPSILON, 1.0),
            (FileDtype::Bf16, 1.0, 1.007_812_5, 1.0),
            (FileDtype::Bf16, -3.0, -3.015_625, 1.0),
            (FileDtype::F16, 1024.5, 1024.0, 0.5),
            // Below the smallest normal number the ULP is constant.
            (FileDtype::F16, 0.0, 2.0_f32.powi(-24), 1.0),
        ];
        for (dtype, exact, got, expected) in cases {
            assert_eq!(steps(dtype, exact, got), expected, "{dtype} {exact} {got}");
        }
        assert_eq!(steps(FileDtype::F16, 70_000.0, f32::INFINITY), f64::INFINITY);
        assert_eq!(steps(FileDtype::F32, f64::NAN, f32::NAN), f64::INFINITY);
    }
}
