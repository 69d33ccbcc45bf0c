//! What jobs differ in: the model, its loss and its data. The loop, the plan and the checkpoints know these two
//! traits; `train/diffusion/` and `train/language/` implement them.
//!
//! ```text
//! Task         a model and its loss, and all that a plan needs for a dry run
//! DataLoader   batches in their order, and the held-out samples
//! ```

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::Path;

use compute::{Device, DeviceKind, Dtype, Params, Tape, Var, WorkStats};
use weights::BytesDoneFn;

use super::prefetch::Prefetch;
use crate::config::RunConfig;
use crate::cost::{Cost, Stage};
use crate::data::{DecodingNeed, SampleSize, SizeCounts};
use crate::error::Result;
use crate::event::{Event, PolicyMetrics, TenthLoss};
use crate::fingerprint::Fingerprint;
use crate::model::adapter::Adapters;
use crate::model::adapter::read::Component;
use crate::model::build::{Precision, TensorSpec};
use crate::model::diffusion::text::EncoderLoading;
use crate::model::recompute::Recompute;
use crate::model::vae::Tiling;

/// The dataset as far as memory and time depend on it: sizes of samples and how many of each, and what has
/// to be encoded first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DatasetSummary<S> {
    /// Samples of an epoch.
    pub train: SizeCounts<S>,
    /// Held-out samples.
    pub held_out: SizeCounts<S>,
    /// Latents of images and clips that are not in the cache yet.
    pub to_encode: SizeCounts<SampleSize>,
    /// The same of reference images.
    pub references_to_encode: SizeCounts<SampleSize>,
    /// What decoding them takes in main memory.
    pub decoding: DecodingNeed,
    /// Captions and prompts that are not in the cache yet.
    pub n_texts: usize,
    /// Whether there was no dataset to read, so that sizes are assumed.
    pub is_nominal: bool,
}

/// What comes before training, on the device.
#[derive(Clone, Debug, Default)]
pub struct Preparation {
    /// Its parts, in their order.
    pub stages: Vec<Stage>,
    /// How much of a large text encoder is in memory at a time.
    pub encoder_loading: EncoderLoading,
    /// Main memory for decoding images; a plan decides.
    pub decoding_bytes: usize,
}

/// Bytes that may be taken on the device before training.
#[derive(Clone, Copy, Debug, Default)]
pub struct PreparationLimits {
    /// While images are encoded.
    pub images: usize,
    /// While texts are encoded.
    pub texts: usize,
}

/// The task with smaller samples.
pub struct SmallerTask<T: Task> {
    /// The keys that change, as they would be typed.
    pub change: String,
    /// The task then.
    pub task: T,
    /// Its dataset.
    pub dataset: DatasetSummary<T::Size>,
}

/// A model and its loss.
pub trait Task: Copy {
    /// The model.
    type Model;
    /// What the work of a sample depends on: the size of an image, the length of a text.
    type Size: Copy + fmt::Debug + fmt::Display + Ord + Send + 'static;
    /// A micro-batch: the model's inputs and targets.
    type MicroBatch;

    /// The model's folder or file.
    fn path(&self) -> &Path;

    /// Identifies the model.
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

    /// The mean loss of a micro-batch, computed in `dtype`.
    fn loss<'m>(
        &self,
        model: &'m Self::Model,
        tape: &Tape<'m>,
        micro_batch: &Self::MicroBatch,
        dtype: Dtype,
        recompute: Recompute,
    ) -> Result<Var>;

    /// What its policy did since it was last asked, if it has one.
    fn policy_metrics(&self, _: &Self::Model, _step: u64) -> Option<PolicyMetrics> {
        None
    }

    /// Means of what preferences or rewards came to since that was last asked or reset, if it has any.
    fn reward_metrics(&self) -> Option<BTreeMap<String, f64>> {
        None
    }

    /// Losses by timestep since that was last reset, if it has timesteps.
    fn timestep_losses(&self) -> Vec<TenthLoss> {
        Vec::new()
    }

    /// Drops what it has noted for those: an attempt that failed is repeated.
    fn reset_metrics(&self) {}

    /// Whether it learns by a policy gradient: its loss is about zero however well it does, and nothing is learnt from
    /// samples with the same reward.
    fn is_policy_gradient(&self) -> bool {
        false
    }

    /// Completes batches of `n` samples together on the meta device, as [`DataLoader::complete_batch`] does; returns the
    /// work, and how often it is done.
    fn dry_run_batches(
        &self,
        _: &Device,
        _: TrainableModel<'_, Self::Model>,
        _: Self::Size,
        _n: usize,
    ) -> Result<Vec<(usize, WorkStats)>> {
        Ok(Vec::new())
    }

    /// Validates on `n` samples on the meta device, where [`DataLoader::validate`] does it without micro-batches.
    fn dry_run_validation(
        &self,
        _: &Device,
        _: TrainableModel<'_, Self::Model>,
        _: Self::Size,
        _n: usize,
    ) -> Result<Option<Vec<(usize, WorkStats)>>> {
        Ok(None)
    }

    /// A micro-batch of `n` samples of zeros, made as a run makes one.
    fn dummy_micro_batch(&self, size: Self::Size, n: usize) -> Result<Self::MicroBatch>;

    /// The same with shorter prompts, where a model sees no padding: smaller blocks leave other gaps in memory, and may
    /// need more of it.
    fn shorter_micro_batches(&self, size: Self::Size, n: usize) -> Result<Vec<Self::MicroBatch>>;

    /// What comes before training, on the device: the fastest way within the limits, else the one that takes
    /// the least.
    fn preparation(
        &self,
        config: &RunConfig,
        dataset: &DatasetSummary<Self::Size>,
        kind: DeviceKind,
        limits: PreparationLimits,
    ) -> Result<Preparation>;

    /// Bytes of the model's files.
    fn file_bytes(&self) -> u64;

    /// Host memory outside the arena that samples take during training.
    fn host_bytes(&self, config: &RunConfig, dataset: &DatasetSummary<Self::Size>) -> usize;

    /// The work of a sample of this size, relative to others.
    fn relative_cost(size: Self::Size) -> usize;

    /// Whether samples are generated during training.
    fn makes_samples(&self) -> bool;

    /// How often the loss of a held-out sample is measured in one validation.
    fn n_validation_passes(&self) -> usize;

    /// How decoding samples may be tiled, from large tiles to small ones.
    fn sample_tilings(&self) -> Vec<Tiling>;

    /// Generates samples on the meta device; returns what that costs.
    fn dry_run_samples(
        &self,
        dataset: &DatasetSummary<Self::Size>,
        device: &Device,
        trainable: TrainableModel<'_, Self::Model>,
        tiling: Option<Tiling>,
    ) -> Result<Cost>;

    /// The task with smaller samples: one key after the other, each from the largest value down, then all keys
    /// together. The last takes the least.
    fn smaller(&self, dataset: &DatasetSummary<Self::Size>) -> Vec<SmallerTask<Self>>;
}

/// A model in training, with the precision it computes in.
pub struct TrainableModel<'a, M> {
    /// The model.
    pub model: &'a M,
    /// Its trained parameters.
    pub params: &'a Params,
    /// Its formats.
    pub precision: Precision,
}

// Derived impls would require `M: Clone`.
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

/// One of the times that the loss of a held-out sample is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldOutPass {
    /// Index of the sample.
    pub sample: usize,
    /// Which time, below [`Task::n_validation_passes`].
    pub pass: usize,
}

impl HeldOutPass {
    /// All of one sample.
    pub fn all(sample: usize, n_passes: usize) -> impl Iterator<Item = Self> {
        (0..n_passes).map(move |pass| Self { sample, pass })
    }
}

/// The batches of a data loader, read ahead.
pub type PrefetchedBatches<D> =
    Prefetch<TrainBatch<<<D as DataLoader>::Task as Task>::Size, <D as DataLoader>::Sample>>;

/// The batches that a run trains on, and the held-out samples.
pub trait DataLoader {
    /// The task it feeds.
    type Task: Task;
    /// A sample as it is read.
    type Sample: Send + 'static;

    /// Identifies the dataset.
    fn fingerprint(&self) -> Fingerprint;

    /// Training samples, each counted once.
    fn n_train(&self) -> usize;

    /// Held-out samples.
    fn n_held_out(&self) -> usize;

    /// Batches of an epoch, with repeats.
    fn batches_per_epoch(&self) -> u64;

    /// Batches from this one on, read ahead.
    fn read_from(&self, number: u64) -> PrefetchedBatches<Self>;

    /// The total loss weight of these batches, as far as it is known before they are read.
    fn expected_weight(&mut self, numbers: Range<u64>) -> f64;

    /// Completes a batch by what the model says of it as it is now; most batches are complete when they are read.
    fn complete_batch(
        &self,
        _: &Device,
        _: TrainableModel<'_, <Self::Task as Task>::Model>,
        _: &mut TrainBatch<<Self::Task as Task>::Size, Self::Sample>,
    ) -> Result<()> {
        Ok(())
    }

    /// Samples as a micro-batch, and their loss weight.
    fn micro_batch(
        &self,
        samples: &[Self::Sample],
    ) -> Result<(f64, <Self::Task as Task>::MicroBatch)>;

    /// The held-out samples of each size, each as often as its loss is measured.
    fn held_out_passes(&self) -> BTreeMap<<Self::Task as Task>::Size, Vec<HeldOutPass>>;

    /// Held-out samples of one size as a micro-batch, and their loss weight. The random numbers of a sample do not
    /// depend on who is beside it.
    fn held_out(&self, passes: &[HeldOutPass]) -> Result<(f64, <Self::Task as Task>::MicroBatch)>;

    /// The weight and the mean loss of held-out samples of one size, where that is not the loss of a micro-batch.
    fn validate(
        &self,
        _: &Device,
        _: TrainableModel<'_, <Self::Task as Task>::Model>,
        _: &[HeldOutPass],
    ) -> Result<Option<(f64, f64)>> {
        Ok(None)
    }

    /// Generates samples into the run's folder, as those of this step.
    fn write_samples(
        &self,
        device: &Device,
        trainable: TrainableModel<'_, <Self::Task as Task>::Model>,
        folder: &Path,
        step: u64,
        should_continue: &(dyn Fn() -> bool + Sync),
    ) -> Result<Vec<Event>>;
}
