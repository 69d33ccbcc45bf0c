//! `Muon` for matrices (Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024):
//! a step goes along the mean of gradients with all of its singular values brought near 1, so that
//! rare directions move as far as common ones. As PyTorch has it, with Nesterov's momentum:
//!
//! m ← μ·m + (1 - μ)·g,  u = (1 - μ)·g + μ·m,  X = u / ‖u‖
//! five times: A = X·Xᵀ,  X ← a·X + (b·A + c·A²)·X
//! p ← p - rate·decay·p - rate·0.2·√max(rows, columns)·X
//!
//! The last factor makes a step about as long as one of `AdamW` (Liu et al., "Muon is Scalable for
//! LLM Training", arXiv 2502.16982, section 2.2), so that one learning rate serves both. Vectors,
//! embeddings and heads are not for it: their rows are no directions that mix.

use super::gradients::check_clip;
use super::{GradClip, cpu, cuda, expect_unshared, gpu};
use crate::device::{Backend, DeviceKind};
use crate::op::{Op, OpContext};
use crate::ops::elementwise::scale;
use crate::ops::matmul::{FusedMatmul, Matmul, Operand};
use crate::{Dtype, Result, Shape, Tag, Tensor};

/// One step's settings.
#[derive(Clone, Copy, Debug)]
pub struct Muon {
    /// Learning rate.
    pub learning_rate: f32,
    /// μ: decay of the mean of gradients.
    pub momentum: f32,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// Multiplies gradients before all else: one over the loss scale.
    pub scale: f32,
    /// The dtype that matmuls are computed in.
    pub dtype: Dtype,
}

impl Default for Muon {
    /// PyTorch's values.
    fn default() -> Self {
        let (momentum, weight_decay) = (0.95, 0.1);
        Self { learning_rate: 1e-3, momentum, weight_decay, scale: 1.0, dtype: Dtype::Bf16 }
    }
}

impl Muon {
    /// What is left of a parameter, and how far it goes along X.
    pub(super) fn lengths(&self, shape: Shape) -> (f32, f32) {
        let (rate, decay) = (f64::from(self.learning_rate), f64::from(self.weight_decay));
        let longest = shape.rows().max(shape.width()) as f64;
        ((1.0 - rate * decay) as f32, (rate * RMS_MATCH_ADAMW * longest.sqrt()) as f32)
    }
}

/// The size of a number of a usual step of `AdamW`, over the learning rate. Taken: `match_rms_adamw` of
/// PyTorch.
const RMS_MATCH_ADAMW: f64 = 0.2;

/// a, b and c. Taken: Jordan's, chosen there to lift small singular values fast; they end between 0.7
/// and 1.2, not at 1.
const NS_COEFFICIENTS: [f32; 3] = [3.4445, -4.7750, 2.0315];

/// How often they are applied. Taken: as above.
const NS_STEPS: usize = 5;

/// The least that a norm is taken for. Taken: PyTorch's.
pub(super) const MIN_NORM: f32 = 1e-7;

/// FLOPs per element beside those of matmuls, for the work counter.
const FLOPS: usize = 16;

/// The mean of a matrix's gradients before the first step.
pub fn momentum(param: &Tensor) -> Result<Tensor> {
    let device = param.device();
    device.with_tag(Tag::Optimizer, || device.zeros(param.shape(), Dtype::F32))
}

/// Updates every matrix that has a gradient and a mean of them; the others are left to another optimizer. With a `clip`, gradients are scaled down as it says, and a step with a gradient that is not
/// finite changes nothing. All memory is asked for before anything is changed.
pub fn muon(
    params: &mut [Tensor],
    gradients: &[Option<&Tensor>],
    means: &mut [Option<Tensor>],
    config: Muon,
    clip: Option<&GradClip>,
) -> Result<()> {
    let Some(device) = params.first().map(|param| param.device().clone()) else { return Ok(()) };
    let op = Op::standalone("muon", &device);
    check(&op, params, gradients, means, config, clip)?;
    let moved = gradients.iter().zip(&*means).map(|pair| matches!(pair, (Some(_), Some(_))));
    let shapes = params.iter().zip(moved).filter(|(_, is_moved)| *is_moved);
    for shape in distinct(shapes.map(|(param, _)| param.shape())) {
        NewtonSchulz::new(op.cx, shape, config.dtype)?.iterate(op.cx, true)?;
    }
    for ((param, gradient), mean) in params.iter_mut().zip(gradients).zip(means) {
        let (Some(gradient), Some(mean)) = (*gradient, mean) else { continue };
        let mut iteration = NewtonSchulz::new(op.cx, param.shape(), config.dtype)?;
        let touched =
            [gradient, &*mean, mean, gradient, mean, &iteration.x, &iteration.x, &*param, param];
        op.count(FLOPS * param.shape().elements(), &touched);
        iteration.begin(op.cx, gradient, mean, config, clip);
        for _ in 0..NS_STEPS {
            iteration.iterate(op.cx, false)?;
        }
        match op.backend() {
            Backend::Meta => {}
            Backend::Cpu(backend) => cpu::apply_update(backend, param, &iteration.x, config, clip),
            Backend::Cuda(backend) => {
                cuda::apply_update(backend, param, &iteration.x, config, clip);
            }
            Backend::Gpu(backend) => gpu::apply_update(backend, param, &iteration.x, config, clip),
        }
    }
    Ok(())
}

fn check(
    op: &Op<'_>,
    params: &[Tensor],
    gradients: &[Option<&Tensor>],
    means: &[Option<Tensor>],
    config: Muon,
    clip: Option<&GradClip>,
) -> Result<()> {
    for (what, count) in [("count of gradients", gradients.len()), ("count of means", means.len())]
    {
        let is_fit = count == params.len();
        op.expect_range(what, &count, is_fit, "one for each parameter")?;
    }
    check_settings(op, config)?;
    check_clip(op, clip)?;
    for (index, (param, (gradient, mean))) in
        params.iter().zip(gradients.iter().zip(means)).enumerate()
    {
        let Some(mean) = mean else { continue };
        op.expect_rank::<2>("parameter", param)?;
        op.expect("parameter", param, Dtype::F32, param.shape())?;
        op.expect("mean", mean, Dtype::F32, param.shape())?;
        expect_unshared(index, param)?;
        expect_unshared(index, mean)?;
        if let Some(gradient) = gradient {
            op.expect("gradient", gradient, Dtype::F32, param.shape())?;
        }
    }
    Ok(())
}

fn check_settings(op: &Op<'_>, config: Muon) -> Result<()> {
    let Muon { learning_rate, momentum, weight_decay, scale, dtype } = config;
    for (what, value) in
        [("learning rate", learning_rate), ("weight decay", weight_decay), ("scale", scale)]
    {
        let is_fit = value >= 0.0 && value.is_finite();
        op.expect_range(what, &value, is_fit, "0 or more, and finite")?;
    }
    let is_fit = (0.0..1.0).contains(&momentum);
    op.expect_range("momentum", &momentum, is_fit, "0 or more and below 1")?;
    let is_fit = [Dtype::F32, Dtype::Bf16, Dtype::F16].contains(&dtype);
    op.expect_range("dtype of matmuls", &dtype, is_fit, "f32, bf16 or f16")
}

fn distinct(shapes: impl Iterator<Item = Shape>) -> Vec<Shape> {
    let mut found = Vec::new();
    for shape in shapes {
        if !found.contains(&shape) {
            found.push(shape);
        }
    }
    found
}

/// The Newton-Schulz iteration to singular values near 1. A and its polynomial are as wide as the shorter side
/// is long.
struct NewtonSchulz {
    x: Tensor,
    /// X of the next round, over c.
    next: Tensor,
    /// X·Xᵀ, or Xᵀ·X where there are more rows than columns.
    gram: Tensor,
    /// (b·A + c·A²) / c
    polynomial: Tensor,
    /// A GPU's partial sums of squares, and their root.
    squares: Tensor,
}

impl NewtonSchulz {
    fn new(cx: OpContext<'_>, shape: Shape, dtype: Dtype) -> Result<Self> {
        let (shorter, elements) = (shape.rows().min(shape.width()), shape.elements());
        let floats = match cx.device.kind() {
            DeviceKind::Cpu { .. } => 0,
            DeviceKind::Cuda { .. } => cuda::squares_floats(elements),
            DeviceKind::Gpu { .. } => gpu::squares_floats(elements),
        };
        Ok(Self {
            x: cx.workspace(shape, dtype)?,
            next: cx.workspace(shape, dtype)?,
            gram: cx.workspace([shorter, shorter], dtype)?,
            polynomial: cx.workspace([shorter, shorter], dtype)?,
            squares: cx.workspace([floats], Dtype::F32)?,
        })
    }

    /// Updates the mean and sets X.
    fn begin(
        &mut self,
        cx: OpContext<'_>,
        gradient: &Tensor,
        mean: &mut Tensor,
        config: Muon,
        clip: Option<&GradClip>,
    ) {
        let x = &mut self.x;
        match cx.backend() {
            Backend::Meta => {}
            Backend::Cpu(backend) => cpu::direction(backend, gradient, mean, config, clip, x),
            Backend::Cuda(backend) => {
                cuda::direction(backend, gradient, mean, config, clip, &mut self.squares, x);
            }
            Backend::Gpu(backend) => {
                gpu::direction(backend, gradient, mean, config, clip, &mut self.squares, x);
            }
        }
    }

    /// X ← a·X + (b·A + c·A²)·X, or in a dry run only the memory that this takes. Matmuls have no scale, for
    /// which AMX would need two more splits: c comes last.
    fn iterate(&mut self, cx: OpContext<'_>, is_dry_run: bool) -> Result<()> {
        let [a, b, c] = NS_COEFFICIENTS;
        let Self { x, next, gram, polynomial, .. } = self;
        let multiply = |left: Operand<'_>, right, out: &mut Tensor, add| {
            let matmuls = [Matmul::new(left, right)];
            let work = FusedMatmul { add, ..FusedMatmul::new(&matmuls, out) };
            if is_dry_run { work.reserve(cx) } else { work.run(cx) }
        };
        let scale = |from: &Tensor, factor, to: &mut Tensor| {
            if !is_dry_run {
                scale(cx, from, factor, to);
            }
        };
        let is_tall = x.shape().rows() > x.shape().width();
        let of_x = Operand::from(&*x);
        let [left, right] = if is_tall { [of_x.t(), of_x] } else { [of_x, of_x.t()] };
        multiply(left, right, gram, false)?;
        scale(gram, b / c, polynomial);
        multiply((&*gram).into(), (&*gram).into(), polynomial, true)?;
        scale(x, a / c, next);
        let polynomial = Operand::from(&*polynomial);
        let [left, right] = if is_tall { [of_x, polynomial] } else { [polynomial, of_x] };
        multiply(left, right, next, true)?;
        scale(next, c, x);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Device;
    use crate::ops::global_norm;
    use crate::testing::{compare, device};

    const HOW: Muon = Muon {
        learning_rate: 0.1,
        momentum: 0.95,
        weight_decay: 0.1,
        scale: 1.0,
        dtype: Dtype::F32,
    };

    /// The shapes of `tests/golden/muon`: more columns than rows, and the reverse.
    const SHAPES: [[usize; 2]; 2] = [[5, 8], [9, 4]];

    fn matrices(device: &Device, number: impl Fn(f64) -> f64) -> Vec<Tensor> {
        let of = |[rows, columns]: [usize; 2]| {
            let numbers: Vec<f32> = (0..rows * columns).map(|i| number(i as f64) as f32).collect();
            device.upload([rows, columns], &numbers).unwrap()
        };
        SHAPES.map(of).into()
    }

    fn gradients(device: &Device, step: u32) -> Vec<Tensor> {
        let step = f64::from(step);
        matrices(device, |i| (0.7 * i * step + step).sin())
    }

    /// Where the matrices are after so many steps.
    fn trained(device: &Device, steps: u32, how: Muon) -> Vec<Tensor> {
        let mut params = matrices(device, f64::cos);
        let mut means: Vec<_> = params.iter().map(|param| momentum(param).ok()).collect();
        for step in 1..=steps {
            let gradients = gradients(device, step);
            let gradients: Vec<_> = gradients.iter().map(Some).collect();
            muon(&mut params, &gradients, &mut means, how, None).unwrap();
        }
        params
    }

    fn numbers(tensors: &[Tensor]) -> Vec<f32> {
        tensors.iter().flat_map(Tensor::to_vec::<f32>).collect()
    }

    #[test]
    fn ten_steps_of_torch() {
        let recorded = include_str!("../../../../../tests/golden/muon/steps.txt");
        let column = |index: usize| -> Vec<f64> {
            let of = |line: &str| line.split(' ').nth(index).unwrap().parse().unwrap();
            recorded.lines().map(of).collect()
        };
        // PyTorch's own two columns differ by 0.02.
        for (dtype, index, allowed) in
            [(Dtype::F32, 0, 1e-5), (Dtype::Bf16, 1, 0.03), (Dtype::F16, 0, 0.004)]
        {
            let ours = numbers(&trained(&device(), 10, Muon { dtype, ..HOW }));
            compare(&format!("{dtype}"), &ours, &column(index), allowed);
        }
    }

    #[test]
    fn threads_make_no_difference_and_no_memory_is_unknown() {
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let how = Muon { dtype, ..HOW };
            let [ours, others @ ..] = [1, 2, 3].map(|threads| {
                let device = Device::cpu(threads, 1 << 24).unwrap();
                numbers(&trained(&device, 2, how))
            });
            assert!(others.iter().all(|other| *other == ours));
            let usage = |device: &Device| {
                drop(trained(device, 2, how));
                (device.usage(), device.work())
            };
            let device = Device::cpu(2, 1 << 24).unwrap();
            assert_eq!(usage(&Device::meta(device.kind(), 1 << 24)), usage(&device));
            assert_eq!(device.usage().in_use, 0);
        }
    }

    #[test]
    fn lengths_are_taken_off_before_clipping() {
        let device = device();
        let after = |times: f64| {
            let mut params = matrices(&device, f64::cos);
            let mut means: Vec<_> = params.iter().map(|param| momentum(param).ok()).collect();
            let gradients = matrices(&device, |i| times * (0.3 * i).sin());
            let gradients: Vec<_> = gradients.iter().map(Some).collect();
            let clip = GradClip { norm: global_norm(&gradients, &device).unwrap(), max_norm: 1.0 };
            let how = Muon { scale: 1.0 / times as f32, ..HOW };
            muon(&mut params, &gradients, &mut means, how, Some(&clip)).unwrap();
            let means: Vec<Tensor> = means.into_iter().flatten().collect();
            (numbers(&params), numbers(&means))
        };
        let (params, means) = after(1.0);
        assert_eq!((params, means.clone()), after(1024.0));
        // Of a gradient that is 1 long, a twentieth.
        let norm = means.iter().map(|mean| mean * mean).sum::<f32>().sqrt();
        assert!((norm - 0.05).abs() < 1e-5, "{norm}");
    }

    #[test]
    fn what_is_not_finite_or_not_asked_for_changes_nothing() {
        let device = device();
        let mut params = matrices(&device, f64::cos);
        let before = numbers(&params);
        let mut means = vec![momentum(&params[0]).ok(), None];
        let gradients = matrices(&device, |i| if i > 3.0 { f64::NAN } else { 1.0 });
        let gradients: Vec<_> = gradients.iter().map(Some).collect();
        let clip = GradClip { norm: global_norm(&gradients, &device).unwrap(), max_norm: 1.0 };
        muon(&mut params, &gradients, &mut means, HOW, Some(&clip)).unwrap();
        assert_eq!(numbers(&params), before);
        assert_eq!(means[0].as_ref().unwrap().to_vec::<f32>(), [0.0; 40]);
        muon(&mut params, &[None, gradients[1]], &mut means, HOW, None).unwrap();
        assert_eq!(numbers(&params), before);
        muon(&mut [], &[], &mut [], HOW, None).unwrap();
    }

    #[test]
    fn without_room_nothing_changes() {
        // Room for both matrices, their means and gradients, and for the matmuls of one alone.
        let peak = {
            let device = Device::meta(DeviceKind::cpu(1), usize::MAX);
            trained(&device, 1, HOW);
            device.usage().peak
        };
        let device = Device::cpu(1, peak - 64).unwrap();
        let mut params = matrices(&device, f64::cos);
        let before = numbers(&params);
        let mut means: Vec<_> = params.iter().map(|param| momentum(param).ok()).collect();
        let gradients = gradients(&device, 1);
        let gradients: Vec<_> = gradients.iter().map(Some).collect();
        let error = muon(&mut params, &gradients, &mut means, HOW, None).unwrap_err();
        assert!(matches!(error, crate::ComputeError::OutOfMemory { .. }), "{error}");
        assert_eq!(numbers(&params), before);
    }

    #[test]
    fn what_makes_no_sense_is_said() {
        let device = device();
        let message = |param: Tensor, how: Muon| {
            let (mut means, gradient) = ([momentum(&param).ok()], momentum(&param).unwrap());
            let gradients = [Some(&gradient)];
            muon(&mut [param], &gradients, &mut means, how, None).unwrap_err().to_string()
        };
        let vector = || device.zeros([3], Dtype::F32).unwrap();
        let matrix = || device.zeros([3, 2], Dtype::F32).unwrap();
        assert_eq!(
            message(vector(), HOW),
            "muon: parameter of shape [3] has 1 dimensions, expected 2"
        );
        for (how, error) in [
            (Muon { momentum: 1.0, ..HOW }, "momentum is 1, expected 0 or more and below 1"),
            (Muon { scale: f32::NAN, ..HOW }, "scale is NaN, expected 0 or more, and finite"),
            (Muon { dtype: Dtype::U8, ..HOW }, "dtype of matmuls is u8, expected f32, bf16 or f16"),
        ] {
            assert_eq!(message(matrix(), how), format!("muon: {error}"));
        }
    }
}
