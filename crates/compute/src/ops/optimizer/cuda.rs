//! Steps on a GPU. Adapters are many and small, so one launch works on many of them.

use super::adamw::AdamWUpdate;
use super::eight_bit::BLOCK;
use super::lion::LionUpdate;
use super::muon::MIN_NORM;
use super::schedule_free::{ScheduleFreeStep, ScheduleFreeUpdate};
use super::{AdamW, GradClip, Moments, Moments8bit, Muon, ScheduleFreeState};
use crate::codebook::Codebook;
use crate::cuda::{
    CudaArg, CudaBackend, CudaSource, CudaVariant, LaunchConfig, THREADS, arguments,
};
use crate::random::RandomSequence;
use crate::{Dtype, Tensor};

const KERNELS: CudaSource = CudaSource {
    name: "optimizer",
    text: concat!(include_str!("tensors.cuh"), include_str!("kernel.cu")),
};

/// Tensors of a launch, as in the kernel source: with them its arguments stay below the 4 KB that every
/// GPU takes.
const MAX_TENSORS: usize = 48;
/// Elements of a block that makes a step or counts. Chosen: a few for each thread.
pub(super) const STEP_SHARE: usize = 8 * THREADS;
/// Elements of a partial sum of squares. Chosen: a few hundred for each thread.
pub(super) const SHARE: usize = 1 << 16;

/// What a kernel does to one tensor: where the tensor and what belongs to it lie, and its numbers.
pub(super) struct TensorArgs {
    pub at: Vec<CudaArg>,
    pub n: usize,
}

/// A kernel of a source.
pub(super) struct KernelName {
    pub source: &'static CudaSource,
    pub function: &'static str,
}

fn named(function: &'static str) -> KernelName {
    KernelName { source: &KERNELS, function }
}

/// Lets a kernel work on many tensors, a block for every `share` elements of each. `arguments` gives what
/// it is told besides, from the count of blocks in launches before.
pub(super) fn launch(
    cuda: &CudaBackend,
    KernelName { source, function }: KernelName,
    dtype: Dtype,
    all: &[TensorArgs],
    share: usize,
    threads: usize,
    arguments: impl Fn(usize) -> Vec<CudaArg>,
) {
    let mut before = 0;
    for some in all.chunks(MAX_TENSORS) {
        let (mut table, mut blocks) = (vec![CudaArg::from(some.len())], 0);
        for TensorArgs { at, n } in some {
            table.extend((0..6).map(|index| at.get(index).copied().unwrap_or(CudaArg::NONE)));
            table.extend(arguments![*n, blocks]);
            blocks += n.div_ceil(share);
        }
        table.resize(1 + 8 * MAX_TENSORS, CudaArg::NONE);
        let all = [arguments(before), table].concat();
        let grid = LaunchConfig { threads: threads as u32, ..LaunchConfig::blocks(blocks) };
        cuda.launch(source, function, CudaVariant::of(&[dtype]), grid, &all);
        before += blocks;
    }
}

pub fn adamw(
    cuda: &CudaBackend,
    params: &mut [Tensor],
    gradients: &[Option<&Tensor>],
    state: &mut [Moments],
    step: AdamW,
    clip: Option<&GradClip>,
) {
    let rest = step_arguments(step, clip);
    let all = params.iter_mut().zip(gradients).zip(state);
    let all = all.filter_map(|((param, gradient), Moments { first, second })| {
        let (n, gradient) = (param.shape().elements(), (*gradient)?);
        Some(TensorArgs { at: arguments![param, gradient, first, second].to_vec(), n })
    });
    let all: Vec<TensorArgs> = all.collect();
    let arguments = |_| [&arguments![STEP_SHARE][..], &rest].concat();
    launch(cuda, named("adamw"), Dtype::F32, &all, STEP_SHARE, THREADS, arguments);
}

pub fn lion(
    cuda: &CudaBackend,
    params: &mut [Tensor],
    gradients: &[Option<&Tensor>],
    means: &mut [Tensor],
    step: AdamW,
    clip: Option<&GradClip>,
) {
    let update = LionUpdate::new(step, step.scale).kernel_args();
    let state = means.iter_mut().map(|mean| [mean]);
    launch_step(cuda, "lion", &tensor_args(params, gradients, state), &update, clip);
}

pub fn schedule_free(
    cuda: &CudaBackend,
    params: &mut [Tensor],
    gradients: &[Option<&Tensor>],
    state: &mut [ScheduleFreeState],
    how: ScheduleFreeStep,
    clip: Option<&GradClip>,
) {
    let update = ScheduleFreeUpdate::new(how, how.step.scale).kernel_args();
    let state = state.iter_mut().map(|ScheduleFreeState { z, second }| [z, second]);
    launch_step(cuda, "schedule_free", &tensor_args(params, gradients, state), &update, clip);
}

/// Every parameter with a gradient, beside that and its state.
pub(super) fn tensor_args<'a, const N: usize>(
    params: &mut [Tensor],
    gradients: &[Option<&Tensor>],
    state: impl Iterator<Item = [&'a mut Tensor; N]>,
) -> Vec<TensorArgs> {
    let all = params.iter_mut().zip(gradients).zip(state);
    let all = all.filter_map(|((param, gradient), state)| {
        let (n, gradient) = (param.shape().elements(), (*gradient)?);
        let mut at = arguments![param, gradient].to_vec();
        at.extend(state.map(CudaArg::from));
        Some(TensorArgs { at, n })
    });
    all.collect()
}

/// A kernel that changes each element by itself.
fn launch_step(
    cuda: &CudaBackend,
    function: &'static str,
    all: &[TensorArgs],
    update: &[f32],
    clip: Option<&GradClip>,
) {
    let update: Vec<CudaArg> = update.iter().map(|number| CudaArg::from(*number)).collect();
    let arguments = |_| [&arguments![STEP_SHARE][..], &clip_arguments(clip), &update[..]].concat();
    launch(cuda, named(function), Dtype::F32, all, STEP_SHARE, THREADS, arguments);
}

pub fn adamw_8bit(
    cuda: &CudaBackend,
    params: &mut [Tensor],
    gradients: &[Option<&Tensor>],
    state: &mut [Moments8bit],
    step: AdamW,
    clip: Option<&GradClip>,
) {
    let rest = step_arguments(step, clip);
    let (signed, unsigned) = (Codebook::signed(), Codebook::unsigned());
    let books = arguments![
        cuda.table("signed codebook", || signed.table()),
        cuda.table("unsigned codebook", || unsigned.table()),
        signed.zero(),
        unsigned.zero(),
    ];
    let all = params.iter_mut().zip(gradients).zip(state);
    let all = all.filter_map(|((param, gradient), Moments8bit { first, second })| {
        let (n, gradient) = (param.shape().elements(), (*gradient)?);
        let (codes, scales) = (&mut first.codes, &mut first.scales);
        let mut at = arguments![param, gradient, codes, scales].to_vec();
        at.extend(arguments![&mut second.codes, &mut second.scales]);
        Some(TensorArgs { at, n })
    });
    let all: Vec<TensorArgs> = all.collect();
    let arguments = |_| [&books[..], &rest].concat();
    launch(cuda, named("adamw_8bit"), Dtype::F32, &all, BLOCK, BLOCK, arguments);
}

/// Floats of workspace of [`direction`]: partial sums in f64, then the norm.
pub fn squares_floats(n: usize) -> usize {
    2 * n.div_ceil(SHARE) + 1
}

/// Updates the mean of gradients; X is the Nesterov direction, normalised.
pub fn direction(
    cuda: &CudaBackend,
    gradient: &Tensor,
    mean: &mut Tensor,
    config: Muon,
    clip: Option<&GradClip>,
    squares: &mut Tensor,
    x: &mut Tensor,
) {
    let n = gradient.shape().elements();
    let (blocks, partial) = (n.div_ceil(SHARE), squares.address_mut());
    let norm = partial + (blocks * size_of::<f64>()) as u64;
    let rest = [&clip_arguments(clip)[..], &arguments![config.scale, config.momentum]].concat();
    let arguments = [&arguments![gradient, &mut *mean, partial, n, SHARE][..], &rest].concat();
    cuda.launch(
        &KERNELS,
        "update_momentum",
        CudaVariant::of(&[]),
        LaunchConfig::blocks(blocks),
        &arguments,
    );
    let arguments = arguments![partial, blocks, norm];
    cuda.launch(&KERNELS, "root", CudaVariant::of(&[]), LaunchConfig::blocks(1), &arguments);
    let variant = CudaVariant::of(&[x.dtype()]);
    let arguments = [&arguments![gradient, &*mean, norm, x, n, MIN_NORM][..], &rest].concat();
    cuda.launch(&KERNELS, "direction", variant, LaunchConfig::per_element(n), &arguments);
}

/// Updates a matrix along X.
pub fn apply_update(
    cuda: &CudaBackend,
    param: &mut Tensor,
    x: &Tensor,
    config: Muon,
    clip: Option<&GradClip>,
) {
    let (n, (remains, rate)) = (param.shape().elements(), config.lengths(param.shape()));
    let numbers = arguments![config.scale, remains, rate];
    let arguments = [&arguments![param, x, n][..], &clip_arguments(clip), &numbers].concat();
    cuda.launch(
        &KERNELS,
        "apply_update",
        CudaVariant::of(&[x.dtype()]),
        LaunchConfig::per_element(n),
        &arguments,
    );
}

/// The norm of all gradients, and the maximum norm.
pub(super) fn clip_arguments(clip: Option<&GradClip>) -> [CudaArg; 2] {
    let (norm, most) = clip.map(|clip| (&clip.norm, clip.max_norm)).unzip();
    arguments![norm, most.unwrap_or(0.0)]
}

/// What kernels that make a step of `AdamW` are told last.
fn step_arguments(step: AdamW, clip: Option<&GradClip>) -> Vec<CudaArg> {
    let update = AdamWUpdate::new(step, step.scale);
    let mut all = clip_arguments(clip).to_vec();
    all.extend(update.kernel_args().map(CudaArg::from));
    all
}

/// Floats of workspace of [`global_norm`]: partial sums in f64.
pub fn norm_floats(gradients: &[&Tensor]) -> usize {
    2 * gradients.iter().map(|gradient| n_shares(gradient)).sum::<usize>()
}

fn n_shares(gradient: &Tensor) -> usize {
    gradient.shape().elements().div_ceil(SHARE)
}

pub fn global_norm(
    cuda: &CudaBackend,
    gradients: &[&Tensor],
    workspace: &mut Tensor,
    norm: &mut Tensor,
) {
    let partial = workspace.address_mut();
    let arguments =
        |before| arguments![partial + (before * size_of::<f64>()) as u64, SHARE].to_vec();
    launch(cuda, named("squares"), Dtype::F32, &read_only(gradients), SHARE, THREADS, arguments);
    let count: usize = gradients.iter().map(|gradient| n_shares(gradient)).sum();
    let arguments = arguments![partial, count, norm];
    cuda.launch(&KERNELS, "root", CudaVariant::of(&[]), LaunchConfig::blocks(1), &arguments);
}

fn read_only(tensors: &[&Tensor]) -> Vec<TensorArgs> {
    let one = |tensor: &&Tensor| TensorArgs {
        at: vec![CudaArg::from(*tensor)],
        n: tensor.shape().elements(),
    };
    tensors.iter().map(one).collect()
}

pub fn count_not_finite(cuda: &CudaBackend, tensors: &[&Tensor], count: &mut Tensor) {
    count.fill_zeros();
    let count = count.address_mut();
    for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
        let some = tensors.iter().copied().filter(|tensor| tensor.dtype() == dtype);
        let all = read_only(&some.collect::<Vec<_>>());
        let arguments = |_| arguments![count, STEP_SHARE].to_vec();
        launch(cuda, named("count_not_finite"), dtype, &all, STEP_SHARE, THREADS, arguments);
    }
}

pub fn ema(cuda: &CudaBackend, ema: &mut Tensor, value: &Tensor, decay: f32) {
    let n = value.shape().elements();
    let arguments = arguments![ema, value, n, decay];
    let variant = CudaVariant::of(&[value.dtype()]);
    cuda.launch(&KERNELS, "ema", variant, LaunchConfig::per_element(n), &arguments);
}

pub fn stochastic_round(
    cuda: &CudaBackend,
    values: &Tensor,
    rounded: &mut Tensor,
    sequence: RandomSequence,
) {
    let (n, [seed, stream, first]) = (values.shape().elements(), sequence.parts());
    let arguments = arguments![values, rounded, n, seed, stream, first];
    let variant = CudaVariant::of(&[]);
    cuda.launch(&KERNELS, "stochastic_round", variant, LaunchConfig::per_element(n), &arguments);
}
