//! What jobs differ in: the model, what it learns from and by which rule. The loop, the plan and the
//! checkpoints know these two traits; `pictures/` and `texts/` are who fills them.
//!
//! ```text
//! Lesson   a model and its loss; all that a plan has to know, so that it is rehearsed without data
//! Feed     what a run is fed with: batches in their order, what is held out
//! ```

use std::fmt;
use std::ops::Range;
use std::path::Path;

use compute::{Device, Dtype, Kind, Params, Tape, Var};
use weights::Tick;

use super::prefetch::Prefetch;
use crate::config::RunConfig;
use crate::cost::{Cost, Stage};
use crate::data::Counts;
use crate::error::Result;
use crate::event::Event;
use crate::fingerprint::Fingerprint;
use crate::model::adapter::Adapters;
use crate::model::adapter::read::Component;
use crate::model::build::{Precision, Want};
use crate::model::diffusion::text::T5Loading;
use crate::model::recompute::Recompute;
use crate::model::vae::Tiling;

/// What a run will be fed with, as far as its memory depends on it: sizes of samples and how many of
/// each, and what has to be encoded first. Each lesson knows how to find it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outlook<S> {
    /// What an epoch shows.
    pub train: Counts<S>,
    /// Samples that are measured on.
    pub held_out: Counts<S>,
    /// Latents that are not in the cache yet.
    pub to_encode: Counts<S>,
    /// Captions and prompts that are not in the cache yet.
    pub n_texts: usize,
    /// Whether there was nothing to look at, and samples are assumed.
    pub is_nominal: bool,
}

/// What comes before training, on the device.
#[derive(Clone, Debug, Default)]
pub struct Before {
    /// Its parts, in their order.
    pub stages: Vec<Stage>,
    /// How much of T5 is in memory at a time.
    pub t5: T5Loading,
}

/// A job that asks for less of each sample.
pub struct Smaller<L: Lesson> {
    /// What would be typed.
    pub change: String,
    /// What it would be about.
    pub lesson: L,
    /// What it would be fed with.
    pub outlook: Outlook<L::Size>,
}

/// A model and its loss.
pub trait Lesson: Copy {
    /// The model.
    type Model;
    /// What the work of a sample depends on: the size of a picture, the length of a text.
    type Size: Copy + fmt::Debug + fmt::Display + Ord + Send + 'static;
    /// Samples that go through the model at once, as it sees them.
    type Portion;

    /// The model's folder or file.
    fn path(&self) -> &Path;

    /// What tells the model from others.
    fn fingerprint(&self) -> Result<Fingerprint>;

    /// Which part of a model is trained.
    fn component(&self) -> Component;

    /// All tensors of that part.
    fn tensors(&self) -> Result<Vec<Want>>;

    /// Loads the model, with adapters beside its layers.
    fn load(
        &self,
        device: &Device,
        precision: Precision,
        adapters: &mut Adapters,
        tick: Tick<'_>,
    ) -> Result<Self::Model>;

    /// The mean loss of a portion, one number; in which format, and what is computed twice.
    fn loss<'m>(
        &self,
        model: &'m Self::Model,
        tape: &Tape<'m>,
        portion: &Self::Portion,
        how: (Dtype, Recompute),
    ) -> Result<Var>;

    /// A portion of so many samples of this size, made as a run makes one, of samples that say nothing.
    fn rehearsed(&self, size: Self::Size, n: usize) -> Result<Self::Portion>;

    /// What comes before training, on the device: in the fastest way if that takes no more than `limit` bytes, else
    /// in the one that takes the least.
    fn before(
        &self,
        config: &RunConfig,
        outlook: &Outlook<Self::Size>,
        kind: Kind,
        limit: usize,
    ) -> Result<Before>;

    /// Bytes of the model's files.
    fn file_bytes(&self) -> u64;

    /// Bytes beside the arena that a run's samples take while it trains.
    fn host_bytes(&self, config: &RunConfig, outlook: &Outlook<Self::Size>) -> usize;

    /// How much the arithmetic of a size is, to find the largest.
    fn weight(size: Self::Size) -> usize;

    /// Whether anything is shown along the way.
    fn shows(&self) -> bool;

    /// How often the loss of a held-out sample is measured in one validation.
    fn n_measured(&self) -> usize;

    /// Shows what the model does on a device without data; gives what that takes with data.
    fn rehearse_showing(
        &self,
        device: &Device,
        learner: Learner<'_, Self::Model>,
        tiling: Option<Tiling>,
    ) -> Result<Cost>;

    /// Jobs that ask for less of each sample: of one key after the other, each from the largest value on, then of
    /// all keys together. The last takes the least.
    fn smaller(&self, outlook: &Outlook<Self::Size>) -> Vec<Smaller<Self>>;
}

/// A model as it is shown: with the format it computes in.
pub struct Learner<'a, M> {
    /// The model.
    pub model: &'a M,
    /// What is trained of it.
    pub params: &'a Params,
    /// How it is held.
    pub precision: Precision,
}

// Derived ones would ask it of the model too.
impl<M> Clone for Learner<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M> Copy for Learner<'_, M> {}

/// A batch, read and ready to be trained on.
pub struct Ready<S, T> {
    /// Its number, counted over the whole run.
    pub number: u64,
    /// Its samples, at least one.
    pub samples: Vec<T>,
    /// Their size.
    pub size: S,
}

/// The batches of a feed, read ahead.
pub type Ahead<F> = Prefetch<Ready<<<F as Feed>::Lesson as Lesson>::Size, <F as Feed>::Sample>>;

/// What a run is fed with.
pub trait Feed {
    /// What it is for.
    type Lesson: Lesson;
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
    fn read_from(&self, number: u64) -> Ahead<Self>;

    /// What the samples of these batches count together, as far as that is known before they are read.
    fn expected(&mut self, numbers: Range<u64>) -> f64;

    /// Samples as the model sees them, and what they count.
    fn portion(&self, samples: &[Self::Sample])
    -> Result<(f64, <Self::Lesson as Lesson>::Portion)>;

    /// A sample that is not trained on: its size, and what is measured of it, each with what it counts.
    #[allow(clippy::type_complexity)] // Both halves are named where they are made.
    fn held_out(
        &self,
        index: usize,
    ) -> Result<(<Self::Lesson as Lesson>::Size, Vec<(f64, <Self::Lesson as Lesson>::Portion)>)>;

    /// Shows what the model does, in files of the run's folder.
    fn show(
        &self,
        device: &Device,
        learner: Learner<'_, <Self::Lesson as Lesson>::Model>,
        at: (&Path, u64),
        goes_on: &(dyn Fn() -> bool + Sync),
    ) -> Result<Vec<Event>>;
}
