//! What jobs differ in: the model, what it learns from and by which rule. The loop, the plan and the
//! checkpoints know these two traits; `images/` and `texts/` are who fills them.
//!
//! ```text
//! Lesson   a model and its loss; all that a plan has to know, so that it is rehearsed without data
//! Feed     what a run is fed with: batches in their order, what is held out
//! ```

use std::fmt;
use std::ops::Range;
use std::path::Path;

use compute::{Device, DeviceKind, Dtype, Params, Tape, Var};
use weights::BytesDoneFn;

use super::prefetch::Prefetch;
use crate::config::RunConfig;
use crate::cost::{Cost, Stage};
use crate::data::SizeCounts;
use crate::error::Result;
use crate::event::Event;
use crate::fingerprint::Fingerprint;
use crate::model::adapter::Adapters;
use crate::model::adapter::read::Component;
use crate::model::build::{Precision, TensorSpec};
use crate::model::diffusion::text::T5Loading;
use crate::model::recompute::Recompute;
use crate::model::vae::Tiling;

/// What a run will be fed with, as far as its memory depends on it: sizes of samples and how many of
/// each, and what has to be encoded first. Each task knows how to find it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DatasetSummary<S> {
    /// What an epoch shows.
    pub train: SizeCounts<S>,
    /// Samples that are measured on.
    pub held_out: SizeCounts<S>,
    /// Latents that are not in the cache yet.
    pub to_encode: SizeCounts<S>,
    /// Captions and prompts that are not in the cache yet.
    pub n_texts: usize,
    /// Whether there was nothing to look at, and samples are assumed.
    pub is_nominal: bool,
}

/// What comes before training, on the device.
#[derive(Clone, Debug, Default)]
pub struct Preparation {
    /// Its parts, in their order.
    pub stages: Vec<Stage>,
    /// How much of T5 is in memory at a time.
    pub t5: T5Loading,
}

/// A job that asks for less of each sample.
pub struct SmallerTask<L: Task> {
    /// What would be typed.
    pub change: String,
    /// What it would be about.
    pub task: L,
    /// What it would be fed with.
    pub dataset: DatasetSummary<L::Size>,
}

/// A model and its loss.
pub trait Task: Copy {
    /// The model.
    type Model;
    /// What the work of a sample depends on: the size of an image, the length of a text.
    type Size: Copy + fmt::Debug + fmt::Display + Ord + Send + 'static;
    /// Samples that go through the model at once, as it sees them.
    type MicroBatch;

    /// The model's folder or file.
    fn path(&self) -> &Path;

    /// What tells the model from others.
    fn fingerprint(&self) -> Result<Fingerprint>;

    /// Which part of a model is trained.
    fn component(&self) -> Component;

    /// All tensors of that part.
    fn tensors(&self) -> Result<Vec<TensorSpec>>;

    /// Loads the model, with adapters beside its layers.
    fn load(
        &self,
        device: &Device,
        precision: Precision,
        adapters: &mut Adapters,
        tick: BytesDoneFn<'_>,
    ) -> Result<Self::Model>;

    /// The mean loss of a micro-batch, one number; in which format, and what is recomputed.
    fn loss<'m>(
        &self,
        model: &'m Self::Model,
        tape: &Tape<'m>,
        micro_batch: &Self::MicroBatch,
        how: (Dtype, Recompute),
    ) -> Result<Var>;

    /// A micro-batch of so many samples of this size, made as a run makes one, of samples that say nothing.
    fn dummy_micro_batch(&self, size: Self::Size, n: usize) -> Result<Self::MicroBatch>;

    /// What comes before training, on the device: in the fastest way if that takes no more than `limit` bytes, else
    /// in the one that takes the least.
    fn preparation(
        &self,
        config: &RunConfig,
        dataset: &DatasetSummary<Self::Size>,
        kind: DeviceKind,
        limit: usize,
    ) -> Result<Preparation>;

    /// Bytes of the model's files.
    fn file_bytes(&self) -> u64;

    /// Bytes beside the arena that a run's samples take while it trains.
    fn host_bytes(&self, config: &RunConfig, dataset: &DatasetSummary<Self::Size>) -> usize;

    /// How much the arithmetic of a size is, to find the largest.
    fn relative_cost(size: Self::Size) -> usize;

    /// Whether anything is shown along the way.
    fn makes_samples(&self) -> bool;

    /// How often the loss of a held-out sample is measured in one validation.
    fn n_validation_passes(&self) -> usize;

    /// Shows what the model does on a device without data; gives what that takes with data.
    fn dry_run_samples(
        &self,
        device: &Device,
        trainable: TrainableModel<'_, Self::Model>,
        tiling: Option<Tiling>,
    ) -> Result<Cost>;

    /// Jobs that ask for less of each sample: of one key after the other, each from the largest value on, then of
    /// all keys together. The last takes the least.
    fn smaller(&self, dataset: &DatasetSummary<Self::Size>) -> Vec<SmallerTask<Self>>;
}

/// A model as it is shown: with the format it computes in.
pub struct TrainableModel<'a, M> {
    /// The model.
    pub model: &'a M,
    /// What is trained of it.
    pub params: &'a Params,
    /// How it is held.
    pub precision: Precision,
}

// Derived ones would ask it of the model too.
impl<M> Clone for TrainableModel<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M> Copy for TrainableModel<'_, M> {}

/// A batch, read and ready to be trained on.
pub struct TrainBatch<S, T> {
    /// Its number, counted over the whole run.
    pub number: u64,
    /// Its samples, at least one.
    pub samples: Vec<T>,
    /// Their size.
    pub size: S,
}

/// The batches of a feed, read ahead.
pub type PrefetchedBatches<F> =
    Prefetch<TrainBatch<<<F as DataLoader>::Task as Task>::Size, <F as DataLoader>::Sample>>;

/// What a run is fed with.
pub trait DataLoader {
    /// What it is for.
    type Task: Task;
    /// A sample as it is read.
    type Sample: Send + 'static;

    /// What tells it from others.
    fn fingerprint(&self) -> Fingerprint;

    /// Samples that an epoch shows, each once.
    fn n_train(&self) -> usize;

    /// Samples that are measured on.
    fn n_held_out(&self) -> usize;

    /// Batches that show every sample as often as it should be.
    fn batches_per_epoch(&self) -> u64;

    /// Batches from this one on, read ahead.
    fn read_from(&self, number: u64) -> PrefetchedBatches<Self>;

    /// What the samples of these batches count together, as far as that is known before they are read.
    fn expected_weight(&mut self, numbers: Range<u64>) -> f64;

    /// Samples as the model sees them, and what they count.
    fn micro_batch(
        &self,
        samples: &[Self::Sample],
    ) -> Result<(f64, <Self::Task as Task>::MicroBatch)>;

    /// A sample that is not trained on: its size, and what is measured of it, each with what it counts.
    #[allow(clippy::type_complexity)] // Both halves are named where they are made.
    fn held_out(
        &self,
        index: usize,
    ) -> Result<(<Self::Task as Task>::Size, Vec<(f64, <Self::Task as Task>::MicroBatch)>)>;

    /// Shows what the model does, in files of the run's folder.
    fn write_samples(
        &self,
        device: &Device,
        trainable: TrainableModel<'_, <Self::Task as Task>::Model>,
        at: (&Path, u64),
        goes_on: &(dyn Fn() -> bool + Sync),
    ) -> Result<Vec<Event>>;
}
