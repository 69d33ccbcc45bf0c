//! Adafactor: Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", arXiv 1804.04235,
//! algorithms 4 and 5, without its relative step size. Of the second moments of a matrix only the means of rows and of
//! columns are stored. As in transformers, with w = g² + ε₁ and β = 1 - t⁻⁰·⁸:
//!
//! R ← β·R + (1 - β)·mean of w by row,  C ← β·C + (1 - β)·mean of w by column
//! u = g / √(R / mean(R) · C), divided by max(1, rms(u))
//! a = rate, times max(ε₂, rms(p)) where the step is scaled by the parameter
//! p ← p - a·decay·p - a·u
//!
//! A vector has its second moments whole. A tensor of more dimensions is many matrices, of its last two.

mod cpu;
mod cuda;
mod gpu;

use super::adamw::{AdamW, check};
use super::{GradClip, expect_unshared};
use crate::device::{Backend, DeviceKind};
use crate::op::Op;
use crate::{Dtype, Result, Shape, Tag, Tensor};

/// One step's settings.
#[derive(Clone, Copy, Debug)]
pub struct Adafactor {
    /// Those that it shares with `AdamW`; betas and epsilon have no effect.
    pub adamw: AdamW,
    /// Multiplies the learning rate by the size of the parameter.
    pub scale_parameter: bool,
}

/// The second moments of a parameter.
#[derive(Debug)]
pub struct FactoredMoments {
    /// Means of rows, f32; of a vector each element's.
    pub rows: Tensor,
    /// Means of columns, where they are factored.
    pub columns: Option<Tensor>,
    /// A GPU's sums within a step. They live as long as the rest, so that no step asks for memory.
    sums: Tensor,
}

impl FactoredMoments {
    /// Those before the first step.
    pub fn new(param: &Tensor) -> Result<Self> {
        let (device, of) = (param.device(), Matrices::of(param.shape()));
        let zeros = |n: usize| device.zeros([n], Dtype::F32);
        device.with_tag(Tag::Optimizer, || {
            let columns = of.is_factored.then(|| zeros(of.n * of.columns)).transpose()?;
            let sums = zeros(workspace_floats(device.kind(), of))?;
            Ok(Self { rows: zeros(of.n_row_means())?, columns, sums })
        })
    }
}

/// Of which matrices a parameter consists.
#[derive(Clone, Copy)]
struct Matrices {
    n: usize,
    rows: usize,
    columns: usize,
    is_factored: bool,
}

impl Matrices {
    fn of(shape: Shape) -> Self {
        match *shape.sizes() {
            [.., rows, columns] => {
                let n = shape.elements() / (rows * columns).max(1);
                Self { n, rows, columns, is_factored: true }
            }
            _ => Self { n: 1, rows: 1, columns: shape.elements(), is_factored: false },
        }
    }

    fn n_row_means(self) -> usize {
        if self.is_factored { self.n * self.rows } else { self.columns }
    }

    fn elements(self) -> usize {
        self.n * self.rows * self.columns
    }
}

/// Taken: transformers' defaults, which are the paper's.
const DECAY_RATE: f64 = 0.8;
const EPSILON_SQUARE: f32 = 1e-30;
const EPSILON_PARAMETER: f32 = 1e-3;
const CLIP_THRESHOLD: f32 = 1.0;

/// FLOPs per element, for the work counter.
const FLOPS: usize = 24;

/// Changes every parameter that has a gradient. A `clip` is as in [`adamw`](super::adamw()).
pub fn adafactor(
    params: &mut [Tensor],
    gradients: &[Option<&Tensor>],
    state: &mut [FactoredMoments],
    step: Adafactor,
    clip: Option<&GradClip>,
) -> Result<()> {
    let Some(device) = params.first().map(|param| param.device().clone()) else { return Ok(()) };
    let op = Op::standalone("adafactor", &device);
    check(&op, params, gradients, state.len(), step.adamw, clip)?;
    let (mut numbers, mut touched) = (0, Vec::new());
    for (index, (param, moments)) in params.iter().zip(&*state).enumerate() {
        check_state(&op, index, Matrices::of(param.shape()), moments)?;
        if let Some(gradient) = gradients[index] {
            numbers += param.shape().elements();
            touched.extend([gradient, gradient, gradient, gradient, param, param, param]);
        }
    }
    op.count(FLOPS * numbers, &touched);
    let update = AdafactorUpdate::new(step);
    if let Backend::Cpu(cpu) = device.backend() {
        cpu::adafactor(cpu, params, gradients, state, update, clip);
        return Ok(());
    }
    for ((param, gradient), moments) in params.iter_mut().zip(gradients).zip(state) {
        let Some(gradient) = *gradient else { continue };
        let of = Matrices::of(param.shape());
        let tensors = AdafactorTensors { of, param, gradient, moments };
        match device.backend() {
            Backend::Cuda(cuda) => cuda::adafactor(cuda, tensors, update, clip),
            Backend::Gpu(gpu) => gpu::adafactor(gpu, tensors, update, clip),
            Backend::Meta | Backend::Cpu(_) => {}
        }
    }
    Ok(())
}

fn check_state(
    op: &Op<'_>,
    index: usize,
    of: Matrices,
    FactoredMoments { rows, columns, sums }: &FactoredMoments,
) -> Result<()> {
    let floats = workspace_floats(op.cx.device.kind(), of);
    op.expect("sums", sums, Dtype::F32, [floats].into())?;
    expect_unshared(index, sums)?;
    op.expect("means of rows", rows, Dtype::F32, [of.n_row_means()].into())?;
    expect_unshared(index, rows)?;
    let is_fit = columns.is_some() == of.is_factored;
    op.expect_range("means of columns", &columns.is_some(), is_fit, "there for matrices only")?;
    let Some(columns) = columns else { return Ok(()) };
    op.expect("means of columns", columns, Dtype::F32, [of.n * of.columns].into())?;
    expect_unshared(index, columns)
}

fn workspace_floats(kind: DeviceKind, of: Matrices) -> usize {
    match kind {
        DeviceKind::Cpu { .. } => 0,
        DeviceKind::Cuda { .. } => cuda::floats(of),
        DeviceKind::Gpu { .. } => gpu::floats(of),
    }
}

/// What a GPU's kernels work on for one parameter.
struct AdafactorTensors<'a> {
    of: Matrices,
    param: &'a mut Tensor,
    gradient: &'a Tensor,
    moments: &'a mut FactoredMoments,
}

/// Columns whose sums a GPU's block finds together. Few and tall columns are found one by one, so that all threads have
/// rows; many side by side, so that neighbouring threads read neighbouring numbers.
fn columns_per_block(of: Matrices) -> usize {
    if of.columns <= 128 { 1 } else { 32 }
}

/// The arithmetic of a step.
#[derive(Clone, Copy, Debug)]
struct AdafactorUpdate {
    /// What gradients are multiplied by.
    scale: f32,
    /// β and 1 - β
    keeps: f32,
    news: f32,
    rate: f32,
    decay: f32,
    scale_parameter: bool,
}

impl AdafactorUpdate {
    fn new(Adafactor { adamw, scale_parameter }: Adafactor) -> Self {
        let news = (adamw.step as f64).powf(-DECAY_RATE);
        Self {
            scale: adamw.scale,
            keeps: (1.0 - news) as f32,
            news: news as f32,
            rate: adamw.learning_rate,
            decay: adamw.weight_decay,
            scale_parameter,
        }
    }
}
