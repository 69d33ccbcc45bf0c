//! Why a job could not be done: one variant per cause, with the two values that disagree.

mod hint;
mod remedy;

use std::error::Error;
use std::io;
use std::path::PathBuf;

use cluster::ClusterError;
use compute::{ComputeError, Shape};
use weights::WeightsError;

use crate::config::ConfigError;
use crate::import::ImportError;
use crate::model::encoder::tokenizer::TokenizerError;
pub(crate) use remedy::typed_limit;
pub use remedy::{LimitRaise, Remedy};
use remedy::{above, bytes};

/// What every fallible function here returns.
pub type Result<T> = std::result::Result<T, TrainerError>;

/// Everything that can go wrong here.
#[derive(Debug, thiserror::Error)]
pub enum TrainerError {
    /// An op failed.
    #[error(transparent)]
    Compute(#[from] ComputeError),
    /// A model file could not be read.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// Ranks could not exchange what they have.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// Another rank failed.
    #[error("rank {rank} failed: {problem}")]
    OtherRank {
        /// Its number.
        rank: usize,
        /// What it said.
        problem: String,
    },
    /// Ranks were given different jobs.
    #[error("rank {rank} has another job than rank 0: {what} is {theirs}, rank 0 has {ours}")]
    RanksDiffer {
        /// Its number.
        rank: usize,
        /// What differs.
        what: String,
        /// There.
        theirs: String,
        /// At rank 0.
        ours: String,
    },
    /// The job is not valid.
    #[error(transparent)]
    Job(#[from] ConfigError),
    /// A config of another trainer cannot be imported.
    #[error(transparent)]
    Import(#[from] ImportError),
    /// A tokenizer could not be read.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// A model's chat template cannot be used.
    #[error("chat template {problem}: {}", path.display())]
    ChatTemplate {
        /// What is wrong with it, or the limit it reached.
        problem: String,
        /// The file it stands in.
        path: PathBuf,
    },
    /// A program that rewards completions cannot be used.
    #[error("the reward program {problem}{}", if said.is_empty() { String::new() } else { format!("; it said: {said}") })]
    Reward {
        /// What it did instead of giving rewards.
        problem: String,
        /// The end of what it printed of its errors.
        said: String,
    },
    /// A file beside the weights could not be read or written.
    #[error("cannot {what} {}", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A configuration file is not valid.
    #[error("{problem}: {}", path.display())]
    Config {
        /// What is wrong, with both values.
        problem: String,
        /// The file.
        path: PathBuf,
    },
    /// The folder is not a model that hearth knows.
    #[error("{what} {} {problem}", path.display())]
    Folder {
        /// What was looked for there.
        what: &'static str,
        /// What is wrong with it.
        problem: String,
        /// The folder.
        path: PathBuf,
    },
    /// A checkpoint without the other parts of its pipeline.
    #[error("parts of the model are missing: {}: {}", missing.join("; "), path.display())]
    MissingParts {
        /// Each part, and where it was looked for.
        missing: Vec<String>,
        /// The checkpoint.
        path: PathBuf,
    },
    /// A model that was named, and is not on this computer.
    #[error("no model {name}: there is no such path, and it is not in the Hugging Face cache {}", path.display())]
    NotFetched {
        /// As it is typed.
        name: String,
        /// The cache.
        path: PathBuf,
    },
    /// A model in the cache that lacks files.
    #[error("the download of {name} is not complete, {missing} missing: {}", path.display())]
    PartlyFetched {
        /// As it is typed.
        name: String,
        /// Names of files, and a verb.
        missing: String,
        /// The snapshot.
        path: PathBuf,
    },
    /// A model of another kind than is needed, or one that hearth does not know.
    #[error("this is {found}, expected {expected}: {}", path.display())]
    WrongModel {
        /// What it is.
        found: String,
        /// What is needed.
        expected: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The remedy.
        hint: &'static str,
    },
    /// A pattern that names no layer.
    #[error(
        "`{key}` names {target}, which {none} ends in{}; its layers end in {known}",
        near.as_ref().map_or_else(String::new, |near| format!(", did you mean `{near}`?"))
    )]
    NoTarget {
        /// `adapter.targets`, or `adapter.exclude`.
        key: &'static str,
        /// As it was typed.
        target: String,
        /// Among which layers it was looked for.
        none: &'static str,
        /// The nearest ending there is.
        near: Option<String>,
        /// The endings there are.
        known: String,
    },
    /// Settings of a model that nobody has.
    #[error("the model's settings ask for {problem}")]
    OversizedModel {
        /// How much.
        problem: String,
    },
    /// The weights are not those of the model.
    #[error("weights do not fit the model: {}: {}", keys(missing, extra), path.display())]
    TensorNames {
        /// Tensors that the model needs and the file lacks.
        missing: Vec<String>,
        /// Tensors of the file that the model does not have.
        extra: Vec<String>,
        /// The file or folder.
        path: PathBuf,
    },
    /// A tensor of the file has another shape than the settings say.
    #[error(
        "weights contradict config.json: {name} has shape {got:?}, expected {expected}: {}", path.display()
    )]
    ShapeMismatch {
        /// The tensor, as the file calls it.
        name: String,
        /// The shape that config.json asks for.
        expected: Shape,
        /// The shape it has.
        got: Vec<u64>,
        /// The file or folder.
        path: PathBuf,
    },
    /// An adapter that does not fit the base.
    #[error("adapter does not fit the base: {problem}: {}", path.display())]
    Adapter {
        /// What is wrong, with both values.
        problem: String,
        /// The adapter's file.
        path: PathBuf,
    },
    /// An adapter with values that are not finite.
    #[error("{n_lost} of {n} values of {tensor} are not finite: {}", path.display())]
    NotFinite {
        /// The tensor.
        tensor: String,
        /// Values that are not finite ...
        n_lost: usize,
        /// ... of so many.
        n: usize,
        /// The adapter's file.
        path: PathBuf,
    },
    /// A model whose output is not finite.
    #[error("{what} is lost: the model's output is NaN or infinite")]
    OutputLost {
        /// What it should have been.
        what: String,
    },
    /// A damaged checkpoint.
    #[error("checkpoint is broken: {problem}: {}", path.display())]
    Checkpoint {
        /// What is wrong, with both values.
        problem: String,
        /// The checkpoint.
        path: PathBuf,
    },
    /// A checkpoint of another job.
    #[error("checkpoint belongs to another job: {problem}: {}", path.display())]
    OtherJob {
        /// What differs, with both values.
        problem: String,
        /// The remedy.
        hint: &'static str,
        /// The checkpoint.
        path: PathBuf,
    },
    /// A run's folder that another run writes to.
    #[error("another run writes to {}", path.display())]
    FolderBusy {
        /// The folder.
        path: PathBuf,
    },
    /// A request to a run that no program works on.
    #[error("no program works on the run in {}", path.display())]
    RunNotActive {
        /// The folder.
        path: PathBuf,
    },
    /// A run's folder that has a run in it.
    #[error("there is a run already in {}", path.display())]
    FolderTaken {
        /// The folder.
        path: PathBuf,
    },
    /// A run's folder that was moved or removed while the run writes into it.
    #[error("the folder of the run is not there any more: {}", path.display())]
    FolderGone {
        /// Where it was.
        path: PathBuf,
    },
    /// A file or a folder where a run writes, and that hearth did not write.
    #[error("would overwrite a file that hearth did not write: {}", path.display())]
    ForeignFile {
        /// The file or folder.
        path: PathBuf,
    },
    /// No run to resume.
    #[error("there is no run to resume in {}", path.display())]
    NoRun {
        /// The folder.
        path: PathBuf,
    },
    /// A run that cannot be resumed.
    #[error("the run in {} has no checkpoint to resume from", path.display())]
    NoCheckpoint {
        /// Whether it had one.
        was_saved: bool,
        /// The folder.
        path: PathBuf,
    },
    /// A run that is longer than the job asks for.
    #[error("the run has taken {taken} steps, the job asks for {steps}: {}", path.display())]
    StepsBeyondJob {
        /// Steps taken.
        taken: u64,
        /// Steps asked for.
        steps: u64,
        /// The run's folder.
        path: PathBuf,
    },
    /// No trained layer gets a gradient.
    #[error("none of {layers} trained layers got a gradient in {steps} steps")]
    NoGradients {
        /// Layers that are trained.
        layers: usize,
        /// Steps that were taken.
        steps: u64,
    },
    /// A line of a run's history is not an event.
    #[error("line {line} is not an event of a run: {problem}: {}", path.display())]
    Event {
        /// Which, from 1.
        line: usize,
        /// The parser's error.
        problem: String,
        /// The file.
        path: PathBuf,
    },
    /// A file of the cache is not what was written, or cannot be.
    #[error("cache: {problem}: {}", path.display())]
    Cache {
        /// What is wrong, with both values.
        problem: String,
        /// The shard, or the folder.
        path: PathBuf,
    },
    /// A request that cannot be met.
    #[error("{problem}")]
    Request {
        /// What is wrong, with both values.
        problem: String,
        /// The remedy.
        hint: &'static str,
    },
    /// A step does not fit into memory at any level.
    #[error(
        "out of memory after step {step}, which was saved: asked {}, in use {} of {}",
        bytes(*asked), bytes(*in_use), bytes(*limit)
    )]
    OutOfMemory {
        /// Steps taken.
        step: u64,
        /// Bytes asked for.
        asked: usize,
        /// Bytes taken already.
        in_use: usize,
        /// The most that may be taken.
        limit: usize,
    },
    /// A fused backward pass that does not fit into memory, after parameters were updated.
    #[error(
        "out of memory within the fused backward pass after step {step}, which cannot be repeated: asked {}, in use {} \
         of {}",
        bytes(*asked), bytes(*in_use), bytes(*limit)
    )]
    HalfUpdated {
        /// Steps taken.
        step: u64,
        /// Bytes asked for.
        asked: usize,
        /// Bytes taken already.
        in_use: usize,
        /// The most that may be taken.
        limit: usize,
    },
    /// A GPU that computes something wrongly.
    #[error(
        "the self-test found {name} wrong: {first}{}: {}",
        if *others == 0 { String::new() } else { format!(", and {others} more") }, path.display()
    )]
    FailedSelfTest {
        /// The GPU.
        name: String,
        /// What is wrong.
        first: String,
        /// What else is.
        others: usize,
        /// The file with the results.
        path: PathBuf,
    },
    /// A GPU is lost again and again.
    #[error("the GPU was lost {times} times after step {step} without progress: {said}")]
    GpuLost {
        /// Steps taken.
        step: u64,
        /// How often.
        times: u32,
        /// The driver's message.
        said: String,
    },
    /// An image that cannot be decoded within the memory limit.
    #[error("decoding {} does not fit: needs {}", path.display(), above(*needed, *limit))]
    DecodingTooLarge {
        /// The image.
        path: PathBuf,
        /// Bytes at the peak, of images and of what is in memory beside them.
        needed: usize,
        /// Bytes we may take.
        limit: usize,
    },
    /// A phase does not fit into memory.
    #[error("{phase} does not fit: needs {}", above(*needed, *limit))]
    TooLarge {
        /// Which part of the work.
        phase: String,
        /// Its memory peak, for the whole program.
        needed: usize,
        /// Bytes we may take.
        limit: usize,
        /// A change that would fit, if one was looked for.
        remedy: Option<Remedy>,
    },
}

impl TrainerError {
    /// Whether it is no failure but a request to stop.
    pub fn is_cancelled(&self) -> bool {
        matches!(
            self,
            Self::Weights(WeightsError::Cancelled) | Self::Compute(ComputeError::Cancelled)
        )
    }

    /// Whether the system refused for a reason that says nothing about the file.
    pub(crate) fn is_refusal(&self) -> bool {
        matches!(self, Self::Weights(error) if error.is_refusal())
    }

    /// Whether a file could not be read or written, as on a full disk.
    pub fn is_of_files(&self) -> bool {
        matches!(self, Self::Io { .. } | Self::Weights(WeightsError::Io { .. }))
    }

    /// Whether completions could not be rewarded: the model is as it was before the step.
    pub fn is_of_rewards(&self) -> bool {
        matches!(self, Self::Reward { .. })
    }

    /// Whether another rank is gone: what this one has is as after the last whole step.
    pub fn is_rank_lost(&self) -> bool {
        matches!(self, Self::Cluster(ClusterError::RankLost { .. }))
    }

    /// Itself and what the system said of it, in one line.
    pub fn with_cause(&self) -> String {
        self.source().map_or_else(|| self.to_string(), |cause| format!("{self}: {cause}"))
    }
}

/// Names shown of each kind; the rest is counted.
const SHOWN: usize = 8;

fn keys(missing: &[String], extra: &[String]) -> String {
    let list = |what: &str, names: &[String]| {
        let shown = names.iter().take(SHOWN).map(String::as_str).collect::<Vec<_>>().join(", ");
        let rest = match names.len().saturating_sub(SHOWN) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        format!("{} {what} ({shown}{rest})", names.len())
    };
    match (missing.is_empty(), extra.is_empty()) {
        (false, true) => list("missing", missing),
        (true, false) => list("unknown", extra),
        _ => format!("{}, {}", list("missing", missing), list("unknown", extra)),
    }
}
