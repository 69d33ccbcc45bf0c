//! What was written, read back: numbers that the adapter changed are the nearest that the format
//! has to base and adapter, all others are what they were.

use weights::load::{LoadOptions, LoadRequest, load, load_f32};
use weights::{BytesDoneFn, Catalog, FileDtype, TensorInfo, WeightsError};

use super::patch::MatrixPatch;
use super::{BLOCK, MatrixPatches, dtype, each_rows, patch};
use crate::error::{Result, TrainerError};

/// Steps of a format that a number may be off. Chosen: half a step is what rounding to the nearest
/// costs; the rest is room for the second rounding, by way of f32.
const MAX_STEPS: f64 = 0.501;

/// What was found.
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
    let mut proven = MergeProof { n_changed: 0, n_unchanged: 0, worst_steps: 0.0 };
    if base.tensors.len() != merged.tensors.len() {
        let counts = (merged.tensors.len(), base.tensors.len());
        return Err(wrong(merged, format!("{} tensors were written, of {}", counts.0, counts.1)));
    }
    for tensor in &base.tensors {
        let again = merged.find(&tensor.name)?;
        if (&tensor.shape, tensor.encoding) != (&again.shape, again.encoding) {
            return Err(wrong(merged, format!("{} has another shape or format", tensor.name)));
        }
        let Some(patches) = patches.get(&tensor.name) else {
            same(base, tensor, merged, again, tick)?;
            proven.n_unchanged += 1;
            continue;
        };
        let worst = worst_steps([base, merged], [tensor, again], patches, tick)?;
        if worst > MAX_STEPS {
            let problem =
                format!("{} is off by {worst:.2} steps of {}", tensor.name, dtype(tensor));
            return Err(wrong(merged, problem));
        }
        proven.worst_steps = proven.worst_steps.max(worst);
        proven.n_changed += 1;
    }
    Ok(proven)
}

fn wrong(merged: &Catalog, problem: String) -> TrainerError {
    TrainerError::Adapter { problem, path: merged.path.clone() }
}

/// How far the numbers of a changed tensor are from base and adapter.
fn worst_steps(
    [base, merged]: [&Catalog; 2],
    [tensor, again]: [&TensorInfo; 2],
    patches: &[MatrixPatch<'_>],
    tick: BytesDoneFn<'_>,
) -> Result<f64> {
    let mut worst = 0.0_f64;
    each_rows(base, tensor, tick, &mut |first, width, numbers| {
        let exact = patch::apply_patches(patches, first, width, numbers);
        let start = (first * width) as u64;
        let got = load_f32(merged, again, start..start + exact.len() as u64)?;
        let all = exact.iter().zip(&got).map(|(exact, got)| steps(dtype(tensor), *exact, *got));
        worst = all.fold(worst, f64::max);
        Ok(())
    })?;
    Ok(worst)
}

/// That two tensors have the same bytes.
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
        let wanted = LoadRequest { tensor, dtype, first, into: &mut bytes[..] };
        load(catalog, vec![wanted], LoadOptions::default(), &|_| true).map(|()| bytes)
    };
    for first in (0..tensor.numel()).step_by(BLOCK as usize) {
        let count = BLOCK.min(tensor.numel() - first);
        if bytes(base, tensor, first, count)? != bytes(merged, again, first, count)? {
            return Err(wrong(merged, format!("{} was not to change", tensor.name)));
        }
        if !tick(count * dtype.bytes()) {
            return Err(WeightsError::Cancelled.into());
        }
    }
    Ok(())
}

/// How far a stored number is from the exact one, in steps of its format there.
fn steps(dtype: FileDtype, exact: f64, got: f32) -> f64 {
    // Bits behind the point, and the exponent below which they get fewer.
    let (digits, lowest) = match dtype {
        FileDtype::F16 => (10, -14),
        FileDtype::Bf16 => (7, -126),
        _ => (23, -126),
    };
    let exponent = ((exact.to_bits() >> 52) & 0x7ff) as i32 - 1023;
    let step = 2.0_f64.powi(exponent.max(lowest) - digits);
    let apart = (exact - f64::from(got)).abs() / step;
    // What is not a number is off by any measure.
    if apart.is_nan() { f64::INFINITY } else { apart }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_the_distance_of_neighbours() {
        let cases = [
            (FileDtype::F32, 1.0, 1.0 + f32::EPSILON, 1.0),
            (FileDtype::Bf16, 1.0, 1.007_812_5, 1.0),
            (FileDtype::Bf16, -3.0, -3.015_625, 1.0),
            (FileDtype::F16, 1024.5, 1024.0, 0.5),
            // Below the smallest normal number steps stay as they are.
            (FileDtype::F16, 0.0, 2.0_f32.powi(-24), 1.0),
        ];
        for (dtype, exact, got, expected) in cases {
            assert_eq!(steps(dtype, exact, got), expected, "{dtype} {exact} {got}");
        }
        assert_eq!(steps(FileDtype::F16, 70_000.0, f32::INFINITY), f64::INFINITY);
        assert_eq!(steps(FileDtype::F32, f64::NAN, f32::NAN), f64::INFINITY);
    }
}
