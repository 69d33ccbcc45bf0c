//! Every op on a device against the CPU, on small tensors: for GPUs that were not tested yet.
//! The CPU is right, as far as the ops' own tests show against exact references.
//!
//! Leaves out what needs those references: every shape, every error, and the CPU itself.

mod cases;

use cases::{SelfTestCase, cases};

use crate::gpu::GpuChoice;
use crate::random::RandomSequence;
use crate::{Device, Dtype, Gradients, Params, Result, Shape, Tape, Tensor, Var};

/// Bytes of the arenas of both. Chosen: several times what the largest case takes.
const ARENA_BYTES: usize = 64 << 20;

/// How far off may be, in units of the dtype's rounding, relative to the largest number. Chosen: several times
/// what any of them shows on a device that is right; a wrong kernel is off by thousands.
const UNITS: f64 = 64.0;

/// How far off f32 may be where factors are rounded to TF32, relative to the largest number. Chosen: four times what
/// rounding a factor to 11 bits changes it by.
const TF32_ALLOWED: f64 = 2e-3;

/// What is tested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TestTarget {
    /// An NVIDIA GPU.
    Cuda(usize),
    /// Another GPU.
    Gpu(GpuChoice),
}

/// What an op showed in one dtype.
#[derive(Clone, Debug)]
pub struct OpVerdict {
    /// The op, and what of it.
    pub name: &'static str,
    /// The dtype of its tensors.
    pub dtype: Dtype,
    /// The largest difference, relative to the largest number; infinite where one is NaN.
    pub error: f64,
    /// The largest that rounding explains.
    pub allowed: f64,
}

impl OpVerdict {
    /// Whether the op may be used.
    pub fn is_right(&self) -> bool {
        self.error <= self.allowed
    }
}

/// Runs every op in f32, bf16 and f16, and hands on each verdict as it comes.
pub fn self_test(tested: TestTarget, mut on_progress: impl FnMut(&OpVerdict)) -> Result<()> {
    let device = match tested {
        TestTarget::Cuda(index) => Device::cuda(index, ARENA_BYTES, true, None)?,
        TestTarget::Gpu(choice) => Device::gpu(choice, ARENA_BYTES)?,
    };
    let cpu = Device::cpu(1, ARENA_BYTES)?;
    for case in cases() {
        for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
            on_progress(&judge(&case, dtype, &device, &cpu)?);
        }
    }
    Ok(())
}

/// One op in one dtype. The CPU computes with the same numbers, rounded as on the device, in f32.
fn judge(case: &SelfTestCase, dtype: Dtype, device: &Device, cpu: &Device) -> Result<OpVerdict> {
    let inputs: Vec<Vec<f32>> = (0..)
        .zip(&case.inputs)
        .map(|(index, (shape, _))| random_values(*shape, index, dtype))
        .collect();
    let (ours, exact) =
        (run_case(case, dtype, &inputs, device)?, run_case(case, Dtype::F32, &inputs, cpu)?);
    let error =
        ours.iter().zip(&exact).map(|(ours, exact)| difference(ours, exact)).fold(0.0, f64::max);
    let rounding: f64 = match dtype {
        Dtype::Bf16 => 2f64.powi(-8),
        Dtype::F16 => 2f64.powi(-11),
        _ => 2f64.powi(-24),
    };
    let is_tf32 = dtype == Dtype::F32 && case.allows_tf32;
    let allowed = if is_tf32 { TF32_ALLOWED } else { UNITS * rounding * case.slack };
    Ok(OpVerdict { name: case.name, dtype, error, allowed })
}

/// Random numbers as a dtype holds them.
fn random_values(shape: Shape, index: u64, dtype: Dtype) -> Vec<f32> {
    let random = RandomSequence::new(0x5e1f, index);
    let numbers = (0..shape.elements()).map(|at| random.normal(at));
    match dtype {
        Dtype::Bf16 => numbers.map(|x| half::bf16::from_f32(x).to_f32()).collect(),
        Dtype::F16 => numbers.map(|x| half::f16::from_f32(x).to_f32()).collect(),
        _ => numbers.collect(),
    }
}

/// The result, and the gradients of what is trained if the op has any.
fn run_case(
    case: &SelfTestCase,
    dtype: Dtype,
    inputs: &[Vec<f32>],
    device: &Device,
) -> Result<Vec<Vec<f32>>> {
    let params = Params::default();
    let tape = Tape::training(device, &params, 7);
    let mut vars = Vec::new();
    for ((shape, role), numbers) in case.inputs.iter().zip(inputs) {
        let tensor = device.upload_as(*shape, numbers, role.dtype(dtype))?;
        vars.push(if role.is_trained() { tape.leaf(tensor) } else { Var::from(tensor) });
    }
    let result = (case.run)(&tape, &vars)?;
    let mut all = vec![result.tensor().to_f32_vec()];
    if result.grad_target().is_some() {
        let ones = vec![1.0; result.shape().elements()];
        let gradient = device.upload_as(result.shape(), &ramp(ones), result.dtype())?;
        let mut leaves = tape.backward_from(result, gradient, &mut Gradients::default())?;
        let gradients = vars.iter().filter_map(|var| leaves.take(var));
        all.extend(gradients.map(|gradient: Tensor| gradient.to_f32_vec()));
    }
    device.synchronise()?;
    Ok(all)
}

/// Numbers that differ from place to place and that every dtype holds exactly.
fn ramp(mut ones: Vec<f32>) -> Vec<f32> {
    for (index, one) in ones.iter_mut().enumerate() {
        *one += (index % 5) as f32 / 4.0 - 0.5;
    }
    ones
}

/// The largest distance, relative to the largest number.
fn difference(ours: &[f32], exact: &[f32]) -> f64 {
    if ours.len() != exact.len() || ours.iter().any(|x| !x.is_finite()) {
        return f64::INFINITY;
    }
    let largest = exact.iter().fold(0.0f64, |most, x| most.max(f64::from(x.abs()))).max(1e-30);
    let far = ours.iter().zip(exact).map(|(a, b)| (f64::from(*a) - f64::from(*b)).abs());
    far.fold(0.0, f64::max) / largest
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::{GpuAdapterKind, adapters};

    #[test]
    fn the_cpu_agrees_with_itself_and_a_wrong_op_is_named() {
        let cpu = Device::cpu(2, ARENA_BYTES).unwrap();
        let other = Device::cpu_without_amx(1, ARENA_BYTES);
        for case in cases() {
            let verdict = judge(&case, Dtype::F32, &cpu, &other).unwrap();
            assert!(verdict.is_right(), "{verdict:?}");
        }
        let case = SelfTestCase::new("scale", &[[2, 3].into()], |tape, v| tape.scale(&v[0], 2.0));
        let inputs = [vec![1.0; 6]];
        let right = run_case(&case, Dtype::F32, &inputs, &cpu).unwrap();
        let mut wrong = right.clone();
        wrong[0][4] += 1e-3;
        assert!(difference(&right[0], &right[0]) == 0.0 && difference(&wrong[0], &right[0]) > 1e-4);
        wrong[1][0] = f32::NAN;
        assert_eq!(difference(&wrong[1], &right[1]), f64::INFINITY);
    }

    #[test]
    #[allow(clippy::print_stderr)] // Says why nothing is shown.
    fn a_software_gpu_passes() {
        if !adapters().iter().any(|adapter| adapter.kind == GpuAdapterKind::Software) {
            return eprintln!("no software driver for Vulkan here");
        }
        let mut wrong = Vec::new();
        let tell = |verdict: &OpVerdict| {
            if !verdict.is_right() {
                wrong.push(verdict.clone());
            }
        };
        self_test(TestTarget::Gpu(GpuChoice::Software), tell).unwrap();
        assert!(wrong.is_empty(), "{wrong:?}");
    }
}
