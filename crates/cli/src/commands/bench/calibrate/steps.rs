//! Steps that are timed: training adapters on stacks of blocks (`trainer::bench::workload`), from a tiny
//! model's width to a large one's, in each format that a job can have.

use std::fmt;

use compute::{Device, Dtype, Quantisation, Result, WorkStats};
use trainer::bench::workload::{RandomWeightInit, Workload, WorkloadConfig, WorkloadJob};

/// A stack of blocks in one format.
pub struct CalibrationStack(WorkloadJob);

/// A stack in memory.
pub struct PreparedStack {
    device: Device,
    workload: Workload,
}

/// Width, blocks, tokens and samples. Chosen: what jobs on small and middling images have, so that
/// curves between them are straight; narrow blocks are many, since a model's do not fit a cache either.
const SIZES: [[usize; 4]; 6] = [
    [64, 8, 128, 1],
    [64, 8, 416, 4],
    [512, 6, 224, 1],
    [512, 6, 416, 2],
    [1024, 2, 768, 1],
    [1536, 1, 416, 1],
];
/// Sizes that tell how much longer other formats take.
const FEW_SIZES: [[usize; 4]; 3] = [SIZES[1], SIZES[3], SIZES[4]];
/// Further ones of a GPU: an image of 1024 pixels a side in a middling model, and half of one in a large.
const GPU_SIZES: [[usize; 4]; 2] = [[1536, 2, 4352, 1], [3072, 1, 2304, 1]];

const FEW_BITS: [Quantisation; 3] = [Quantisation::Int8, Quantisation::Nf4, Quantisation::Fp8];

/// All of them.
pub fn stacks(is_gpu: bool) -> Vec<CalibrationStack> {
    let further = if is_gpu { &GPU_SIZES[..] } else { &[] };
    let with = |sizes: &[[usize; 4]]| [sizes, further].concat();
    let of = |dtype, base| move |sizes| stack(sizes, dtype, base);
    let mut all = Vec::new();
    for dtype in [Dtype::F32, Dtype::Bf16] {
        all.extend(with(&SIZES).into_iter().map(of(dtype, None)));
    }
    all.extend(with(&FEW_SIZES).into_iter().map(of(Dtype::F16, None)));
    for how in FEW_BITS {
        all.extend(with(&FEW_SIZES).into_iter().map(of(Dtype::Bf16, Some(how))));
    }
    all
}

fn stack(sizes: [usize; 4], dtype: Dtype, base: Option<Quantisation>) -> CalibrationStack {
    let [width, n_blocks, tokens, samples] = sizes;
    let config = WorkloadConfig { name: "", width, n_blocks, tokens, samples };
    CalibrationStack(WorkloadJob { base, ..WorkloadJob::plain(config, dtype) })
}

impl CalibrationStack {
    /// The smallest, and the largest of those that a job would be.
    pub fn extremes(is_gpu: bool) -> [Self; 2] {
        let largest = if is_gpu { GPU_SIZES[0] } else { SIZES[4] };
        [SIZES[0], largest].map(|sizes| stack(sizes, Dtype::Bf16, None))
    }

    /// Whether no other in its format is smaller.
    pub fn is_smallest(&self) -> bool {
        self.0.config.width == SIZES[0][0]
    }

    /// Fills it with random numbers.
    pub fn prepare(&self, device: &Device) -> Result<PreparedStack> {
        let workload = Workload::new(device, self.0, &mut RandomWeightInit::new(device, 1))?;
        Ok(PreparedStack { device: device.clone(), workload })
    }
}

impl PreparedStack {
    /// Takes a step: what it called.
    pub fn run(&mut self) -> Result<WorkStats> {
        let before = self.device.work();
        self.workload.step()?;
        Ok(self.device.work().since(&before))
    }
}

impl fmt::Display for CalibrationStack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let WorkloadConfig { width, tokens, samples, .. } = self.0.config;
        write!(f, "a step, {samples} x {tokens} x {width}, {}", self.0.dtype)
    }
}
