//! What each `hearth bench` measures: the rows of its table, and its JSON.

use clap::ValueEnum;
use serde::Serialize;
use trainer::event::RankShare;

/// Who computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum BenchProgram {
    Hearth,
    PytorchEager,
    PytorchCompiled,
}

/// One program's figures over all rounds, and hearth's relative to them.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct ProgramFigures {
    pub program: BenchProgram,
    pub ms_median: f64,
    pub cpu_ms_median: f64,
    /// Peak of the process, less what it had before the job began.
    pub memory_bytes: Option<u64>,
    /// The longest time that steps waited for their data, where that was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wait_ms: Option<f64>,
    /// Hearth's figure over this one.
    pub hearth_time_ratio: f64,
    pub hearth_cpu_ratio: f64,
    pub hearth_memory_ratio: Option<f64>,
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum LoadMethod {
    /// A plain parallel copy between two buffers, the yardstick.
    Memcpy,
    /// Raw reads of the whole file, nothing kept.
    Raw,
    /// Our loader into fresh memory, whose pages the system must still provide, as Python's are.
    Hearth,
    /// Our loader into memory the process already holds, as a run's arena is.
    HearthHeld,
    /// Our loader into the memory of the device that was asked for.
    HearthDevice,
    /// Our mapping, every byte copied out of it.
    HearthMmap,
    /// Python's safetensors into torch.
    PythonSafetensors,
    /// fastsafetensors without GPU direct storage.
    Fastsafetensors,
    /// Raw sequential writes with sync.
    RawWrite,
    /// Our writer.
    HearthWrite,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CacheState {
    Warm,
    Cold,
}

/// One line of the result.
#[derive(Debug, Serialize)]
pub struct LoadFigure {
    pub reader: LoadMethod,
    pub cache: CacheState,
    pub gib_per_s: f64,
    pub rss_peak_bytes: Option<u64>,
    pub tensor_bytes: u64,
    pub ratio_to_memcpy: f64,
}

/// What was measured.
#[derive(Debug, Serialize)]
pub struct StepFigures {
    pub config: &'static str,
    pub dtype: String,
    pub base: Option<String>,
    pub recompute: String,
    /// Bytes of weights that stay in main memory.
    pub offloaded_bytes: usize,
    pub device: String,
    pub threads: usize,
    pub ms_median: f64,
    pub ms_min: f64,
    /// As the rates that were measured on this machine foretell it.
    pub predicted_ms: Option<f64>,
    /// CPU time over threads.
    pub cpu_ms_median: f64,
    pub gflop_per_s: f64,
    /// Kernels that a GPU is given in a step.
    pub launches: Option<u64>,
    /// What the arena reached up to.
    pub peak_bytes: usize,
    /// The same as planned on the meta device.
    pub plan_bytes: usize,
    /// Of the planned bytes, how many hold tensors at the worst moment; the rest are holes.
    pub peak_in_use_bytes: usize,
    pub peak_by_use: Vec<(String, usize)>,
    pub rss_peak_bytes: Option<u64>,
    /// What the process had taken before the arena was touched.
    pub rss_before_bytes: Option<u64>,
    pub loss_first: f32,
    pub loss_last: f32,
}

/// What one op took.
#[derive(Debug, Serialize)]
pub struct OpFigures {
    pub op: &'static str,
    pub shape: String,
    pub dtype: String,
    pub threads: usize,
    pub forward: OpTimes,
    /// None for ops that are never trained through.
    pub backward: Option<OpTimes>,
}

/// Time and rates in one direction.
#[derive(Debug, Serialize)]
pub struct OpTimes {
    pub ms_median: f64,
    pub cpu_ms_median: f64,
    pub gflop_per_s: f64,
    pub gb_per_s: f64,
}

/// One program on one variant.
#[derive(Debug, Serialize)]
pub struct PeerFigures {
    pub config: &'static str,
    pub dtype: String,
    pub recompute: String,
    #[serde(flatten)]
    pub figures: ProgramFigures,
}

/// What one model took.
#[derive(Debug, Serialize)]
pub struct ModelFigures {
    pub model: &'static str,
    pub dtype: String,
    pub ms_median: f64,
    pub ms_min: f64,
    /// As the rates that were measured on this machine foretell it.
    pub predicted_ms: Option<f64>,
    pub cpu_ms_median: f64,
    pub gflop_per_s: f64,
    /// Kernels that a GPU is given in a run.
    pub launches: Option<u64>,
    /// The arena's reach, and what it was planned to be.
    pub peak_bytes: usize,
    pub plan_bytes: usize,
    /// Of weights that stay in main memory.
    pub offloaded_bytes: usize,
    pub rss_peak_bytes: Option<u64>,
    pub rss_before_bytes: Option<u64>,
}

/// One program on one model.
#[derive(Debug, Serialize)]
pub struct ModelRow {
    pub model: &'static str,
    pub dtype: String,
    #[serde(flatten)]
    pub figures: ProgramFigures,
}

/// What was measured.
#[derive(Debug, Serialize)]
pub struct TextFigures {
    pub preset: &'static str,
    pub dtype: String,
    pub ms_median: f64,
    pub ms_min: f64,
    pub cpu_ms_median: f64,
    pub tokens_per_s: f64,
    pub gflop_per_s: f64,
    /// The arena's reach, and what it was planned to be.
    pub peak_bytes: usize,
    pub plan_bytes: usize,
    pub loss_first: f64,
    pub loss_last: f64,
    pub rss_peak_bytes: Option<u64>,
    pub rss_before_bytes: Option<u64>,
}

/// A part of the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum JobPart {
    /// Time is per image.
    Encode,
    /// Time is per step.
    Train,
}

impl JobPart {
    /// What hearth's time over the peer's is to be at most. Chosen: one and a half times as many
    /// images, and a step in four fifths of the time, are worth a change of programs.
    pub fn mark(self) -> f64 {
        match self {
            Self::Encode => 1.0 / 1.5,
            Self::Train => 0.8,
        }
    }
}

/// One program on one part of the job.
#[derive(Debug, Serialize)]
pub struct JobRow {
    pub part: JobPart,
    pub dtype: String,
    pub mark: f64,
    #[serde(flatten)]
    pub figures: ProgramFigures,
}

/// What one run of `hearth bench compress` showed.
#[derive(Clone, Debug, Serialize)]
pub struct CompressFigures {
    /// How tokens were chosen.
    pub arm: &'static str,
    /// Seed of weights, order and draws.
    pub seed: u64,
    /// On held-out text.
    pub bits_per_byte: f64,
    /// The share of held-out bytes that the trunk saw; unknown for byte-pair encoding.
    pub kept_share: Option<f64>,
    /// The share of ends of words among held-out bytes that it saw.
    pub spaces_found: Option<f64>,
    /// In training: the median step.
    pub bytes_per_s: f64,
    /// Steps, as many as the budget of operations allows.
    pub steps: u64,
    /// Bytes of text trained on.
    pub bytes: f64,
    /// Floating-point operations of the whole training.
    pub flops: f64,
    /// Of the run as a whole.
    pub secs: f64,
}

/// What `hearth bench cluster` showed.
#[derive(Clone, Debug, Serialize)]
pub struct ClusterFigures {
    /// Seconds of a step of all ranks together.
    pub together_secs: f64,
    /// Their speed together over the sum of their speeds alone.
    pub of_the_sum: f64,
    /// By rank.
    pub ranks: Vec<RankFigures>,
}

/// One of the ranks.
#[derive(Clone, Debug, Serialize)]
pub struct RankFigures {
    /// Seconds of a whole step of the job by itself, while the others did the same.
    pub alone_secs: f64,
    /// Its part of the steps together.
    #[serde(flatten)]
    pub share: RankShare,
}
