//! Training a language model on texts: the cross entropy of the next token, texts generated during training, and
//! what comes before and after the loop.
//!
//! Shapes: S sequences of N tokens.

mod base;
mod loader;
mod samples;

use std::fmt;
use std::path::Path;

use compute::ops::IGNORE_INDEX;
use compute::{Device, DeviceKind, Dtype, Tape, Var};
use weights::{BytesDoneFn, Catalog};

pub use self::base::TextBase;
use self::loader::TextLoader;
pub use self::loader::open_texts;
pub(super) use self::samples::SampleTextWriter;
use super::data_parallel::{first_rank_first, is_first};
use super::device::{DeviceSetup, MeteredDevice, PlannedRun};
use super::folder::RunOutput;
use super::preparation::{emit_findings, emit_progress};
use super::run_training;
use crate::config::RunConfig;
use crate::config::generate::GenerationConfig;
use crate::config::text::TextConfig;
use crate::cost::Cost;
use crate::data::{DecodingNeed, SizeCounts};
use crate::error::{Result, TrainerError};
use crate::event::{Event, EventSink, PolicyMetrics, RunEnd, Warning, WarningKind};
use crate::fingerprint::Fingerprint;
use crate::model::adapter::Adapters;
use crate::model::adapter::read::Component;
use crate::model::build::{Precision, TensorSpec};
use crate::model::hub;
use crate::model::llama::language_model::LanguageModel;
use crate::model::llama::preset::LlamaPreset;
use crate::model::llama::published::PublishedLlama;
use crate::model::recompute::Recompute;
use crate::model::vae::Tiling;
use crate::plan::{PlanRequest, choose, memory_levels};
use crate::task::prefetch::PREFETCH_BATCHES;
use crate::task::seed::{Purpose, seed};
use crate::task::traits::{
    DatasetSummary, Preparation, PreparationLimits, SmallerTask, Task, TrainableModel,
};
use crate::text::{HeldOut, Sequence, TextDataset, Tokenizer};

/// A language model and its dataset.
pub struct LanguageTask<'a, B = LanguageModel> {
    /// The model.
    pub base: &'a B,
    /// Between texts and tokens.
    pub tokenizer: &'a Tokenizer,
    /// The texts.
    pub text: &'a TextConfig,
    /// Texts generated during training.
    pub generate: &'a GenerationConfig,
    /// Tokens that each of them may have.
    pub max_tokens: usize,
}

// Derived impls would require `B: Clone`.
impl<B> Clone for LanguageTask<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B> Copy for LanguageTask<'_, B> {}

/// How long sequences are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SequenceLength(pub usize);

impl fmt::Display for SequenceLength {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} tokens", self.0)
    }
}

/// A micro-batch of sequences, concatenated.
pub struct TextMicroBatch {
    /// S and N.
    pub(super) sizes: [usize; 2],
    pub(super) ids: Vec<u32>,
    pub(super) targets: Vec<u32>,
    pub(super) first_keys: Vec<u32>,
}

impl TextMicroBatch {
    /// Sequences of one length, and how many of their tokens count.
    pub(crate) fn from_sequences(sequences: &[Sequence]) -> (f64, Self) {
        let joined = |part: fn(&Sequence) -> &[u32]| {
            sequences.iter().flat_map(|sequence| part(sequence).iter().copied()).collect::<Vec<_>>()
        };
        let targets = joined(|sequence| &sequence.targets);
        let counted = targets.iter().filter(|target| **target != IGNORE_INDEX).count();
        let micro_batch = Self {
            sizes: [sequences.len(), sequences[0].ids.len()],
            ids: joined(|sequence| &sequence.ids),
            targets,
            first_keys: joined(|sequence| &sequence.first_keys),
        };
        (counted as f64, micro_batch)
    }
}

/// Batches of an epoch where the sequences were not counted. Chosen: enough that batches are full.
const NOMINAL_BATCHES: usize = 16;

/// Bytes of a token on the host: its id, its target, and where its document begins.
const TOKEN_BYTES: usize = 3 * size_of::<u32>();

/// The shortest sequences that a hint proposes, and the fewest tokens of a sample.
const MIN_LENGTH: usize = 128;
const MIN_SAMPLE_TOKENS: usize = 16;

impl<B> LanguageTask<'_, B> {
    /// The nominal dataset, for a plan; reads nothing.
    pub fn dataset_summary(&self, batch: usize) -> DatasetSummary<SequenceLength> {
        let held_out = usize::from(self.text.validation != HeldOut::None);
        DatasetSummary { is_nominal: true, ..self.summary_of(NOMINAL_BATCHES * batch, held_out) }
    }

    fn summary_of(&self, n_train: usize, n_held_out: usize) -> DatasetSummary<SequenceLength> {
        let counts = |n| SizeCounts::from([(SequenceLength(self.text.length), n)]);
        DatasetSummary {
            train: counts(n_train),
            held_out: if n_held_out > 0 { counts(n_held_out) } else { SizeCounts::new() },
            to_encode: SizeCounts::new(),
            references_to_encode: SizeCounts::new(),
            decoding: DecodingNeed::default(),
            n_texts: 0,
            is_nominal: false,
        }
    }
}

impl<B: TextBase> Task for LanguageTask<'_, B> {
    type Model = B::Model;
    type Size = SequenceLength;
    type MicroBatch = TextMicroBatch;

    fn path(&self) -> &Path {
        self.base.path()
    }

    fn fingerprint(&self) -> Result<Fingerprint> {
        self.base.fingerprint()
    }

    fn component(&self) -> Component {
        Component::Language
    }

    fn tensors(&self) -> Result<Vec<TensorSpec>> {
        self.base.tensor_specs()
    }

    fn load(
        &self,
        device: &Device,
        precision: Precision,
        adapters: &mut Adapters,
        tick: BytesDoneFn<'_>,
    ) -> Result<B::Model> {
        self.base.load(device, precision, adapters, tick)
    }

    fn loss<'m>(
        &self,
        model: &'m B::Model,
        tape: &Tape<'m>,
        micro_batch: &TextMicroBatch,
        _: Dtype,
        recompute: Recompute,
    ) -> Result<Var> {
        self.base.loss(model, tape, micro_batch, recompute)
    }

    fn policy_metrics(&self, model: &B::Model, step: u64) -> Option<PolicyMetrics> {
        self.base.policy_metrics(model, step)
    }

    fn dummy_micro_batch(
        &self,
        SequenceLength(length): SequenceLength,
        n: usize,
    ) -> Result<TextMicroBatch> {
        let zeros = || vec![0; n * length];
        let (ids, targets, first_keys) = (zeros(), zeros(), zeros());
        Ok(TextMicroBatch { sizes: [n, length], ids, targets, first_keys })
    }

    /// None: a sequence has no prompt.
    fn shorter_micro_batches(&self, _: SequenceLength, _: usize) -> Result<Vec<TextMicroBatch>> {
        Ok(Vec::new())
    }

    /// Nothing: texts are tokenised on the host.
    fn preparation(
        &self,
        _: &RunConfig,
        _: &DatasetSummary<SequenceLength>,
        _: DeviceKind,
        _: PreparationLimits,
    ) -> Result<Preparation> {
        Ok(Preparation::default())
    }

    fn file_bytes(&self) -> u64 {
        self.base.catalog().map_or(0, Catalog::bytes)
    }

    fn host_bytes(&self, config: &RunConfig, dataset: &DatasetSummary<SequenceLength>) -> usize {
        let batch = config.train.batch_size * self.text.length * TOKEN_BYTES;
        // The place of each sequence in the order, which an epoch shuffles.
        let order: usize = dataset.train.values().map(|n| 2 * n * size_of::<usize>()).sum();
        (PREFETCH_BATCHES + 2) * batch + order
    }

    fn relative_cost(SequenceLength(length): SequenceLength) -> usize {
        length
    }

    fn makes_samples(&self) -> bool {
        !self.generate.prompts.is_empty()
    }

    fn n_validation_passes(&self) -> usize {
        1
    }

    fn sample_tilings(&self) -> Vec<Tiling> {
        Vec::new()
    }

    fn dry_run_samples(
        &self,
        _: &DatasetSummary<SequenceLength>,
        device: &Device,
        trainable: TrainableModel<'_, B::Model>,
        _: Option<Tiling>,
    ) -> Result<Cost> {
        SampleTextWriter::new(*self)?.dry_run(device, trainable)
    }

    fn smaller(&self, dataset: &DatasetSummary<SequenceLength>) -> Vec<SmallerTask<Self>> {
        let tokens = halves(self.max_tokens, MIN_SAMPLE_TOKENS);
        let tokens: Vec<usize> = tokens.filter(|_| self.makes_samples()).collect();
        let lengths: Vec<usize> = halves(self.text.length, MIN_LENGTH).collect();
        let of_samples = tokens.iter().map(|tokens| (None, Some(*tokens)));
        let of_lengths = lengths.iter().map(|length| (Some(*length), None));
        let least = (lengths.last().copied(), tokens.last().copied());
        let all = of_samples.chain(of_lengths).chain([least]);
        all.map(|(length, tokens)| self.with_sizes(length, tokens, dataset)).collect()
    }
}

/// Half of it, a quarter, ..., down to `least`.
fn halves(of: usize, least: usize) -> impl Iterator<Item = usize> {
    let half = move |n: &usize| Some(n / 2).filter(|half| *half >= least);
    std::iter::successors(half(&of), half)
}

impl<B: TextBase> LanguageTask<'_, B> {
    /// The same with sequences of this length, and samples of at most so many tokens.
    fn with_sizes(
        &self,
        length: Option<usize>,
        max_tokens: Option<usize>,
        dataset: &DatasetSummary<SequenceLength>,
    ) -> SmallerTask<Self> {
        let sequences = length.map(|length| format!("text.length = {length}"));
        let samples = max_tokens.map(|tokens| format!("generate.max_tokens = {tokens}"));
        let changes: Vec<String> = sequences.into_iter().chain(samples).collect();
        let of = |counts: &SizeCounts<SequenceLength>| {
            let shorter = |size: &SequenceLength| {
                length.map_or(*size, |most| SequenceLength(size.0.min(most)))
            };
            let mut sizes = SizeCounts::new();
            for (size, n) in counts {
                *sizes.entry(shorter(size)).or_default() += n;
            }
            sizes
        };
        let (train, held_out) = (of(&dataset.train), of(&dataset.held_out));
        SmallerTask {
            change: changes.join(" and "),
            task: Self { max_tokens: max_tokens.unwrap_or(self.max_tokens), ..*self },
            dataset: DatasetSummary { train, held_out, ..dataset.clone() },
        }
    }
}

/// A model with its tokenizer, open.
pub struct LanguagePipeline<B = LanguageModel> {
    /// The model.
    pub base: B,
    /// Between texts and tokens.
    pub tokenizer: Tokenizer,
}

impl LanguagePipeline {
    /// The model and the tokenizer of a job. To plan, neither a published model nor its tokenizer need exist on
    /// disk.
    pub fn open(config: &RunConfig, is_planned: bool) -> Result<Self> {
        let (text, _) = config.data.texts()?;
        let path = &config.base.path;
        if let Some(preset) = LlamaPreset::by_path(path) {
            return Self::from_preset(config, preset, is_planned);
        }
        let mut base = if is_planned {
            LanguageModel::open_or_published(path)?
        } else {
            LanguageModel::open(path)?
        };
        let is_there = !base.catalog().is_some_and(Catalog::is_meta);
        let tokenizer = match text.tokenizer.as_deref().or(base.tokenizer()) {
            Some(path) if is_there => open_tokenizer(path)?,
            _ => Tokenizer::bytes(),
        };
        let (tokens, rows) = (tokenizer.vocab_size(), base.config.vocab_size);
        if tokens > rows {
            return Err(TrainerError::Request {
                problem: format!("the tokenizer has {tokens} tokens, the model {rows}"),
                hint: "give text.tokenizer the one that belongs to the model",
            });
        }
        if config.base.random_init {
            base = base.from_scratch(seed(config.train.seed, Purpose::Weights));
        }
        Ok(Self { base, tokenizer })
    }

    /// A preset with a vocabulary of this size, for benchmarks.
    pub(crate) fn random_init(preset: LlamaPreset, vocabulary: usize) -> Result<Self> {
        Ok(Self {
            base: LanguageModel::preset(preset, vocabulary, 0)?,
            tokenizer: Tokenizer::bytes(),
        })
    }

    /// A preset, which has no weights.
    fn from_preset(config: &RunConfig, preset: LlamaPreset, is_planned: bool) -> Result<Self> {
        if !config.base.random_init {
            return Err(TrainerError::Request {
                problem: format!("base.path {} is a shape without weights", preset.name()),
                hint: "set base.random_init = true and adapter.kind = \"full\" to train it from scratch",
            });
        }
        let (text, _) = config.data.texts()?;
        let (tokenizer, vocabulary) = own_vocabulary(text, is_planned)?;
        let from = seed(config.train.seed, Purpose::Weights);
        Ok(Self { base: LanguageModel::preset(preset, vocabulary, from)?, tokenizer })
    }
}

impl<B: TextBase> LanguagePipeline<B> {
    /// The task of a job.
    pub fn task<'a>(&'a self, config: &'a RunConfig) -> Result<LanguageTask<'a, B>> {
        let (text, generate) = config.data.texts()?;
        self.base.check_length(text.length)?;
        let max_tokens = generate.max_tokens;
        Ok(LanguageTask {
            base: &self.base,
            tokenizer: &self.tokenizer,
            text,
            generate,
            max_tokens,
        })
    }
}

/// The tokenizer of a model that is trained from scratch, and the size of its vocabulary.
pub(super) fn own_vocabulary(text: &TextConfig, is_planned: bool) -> Result<(Tokenizer, usize)> {
    let (tokenizer, vocabulary) = match &text.tokenizer {
        Some(path) => vocabulary(path, is_planned)?,
        None => with_vocab_size(Tokenizer::bytes()),
    };
    // A matmul of whole tiles is faster, and the rows without a token cost little.
    Ok((tokenizer, vocabulary.next_multiple_of(VOCABULARY_STEP)))
}

/// A tokenizer and how many tokens it has. To plan, the folder's name will do if it is a published
/// model's.
fn vocabulary(path: &Path, is_planned: bool) -> Result<(Tokenizer, usize)> {
    let published =
        [Some(path), path.parent()].into_iter().flatten().find_map(PublishedLlama::by_path);
    match published.filter(|_| is_planned && !path.exists()) {
        Some(model) => Ok((Tokenizer::bytes(), model.config().vocab_size)),
        None => Ok(with_vocab_size(open_tokenizer(path)?)),
    }
}

fn open_tokenizer(path: &Path) -> Result<Tokenizer> {
    hub::check_exists(path)?;
    Tokenizer::open(path)
}

fn with_vocab_size(tokenizer: Tokenizer) -> (Tokenizer, usize) {
    let vocabulary = tokenizer.vocab_size();
    (tokenizer, vocabulary)
}

/// The vocabulary of a randomly initialised model is a multiple of this. Chosen: as others do.
const VOCABULARY_STEP: usize = 64;

/// Trains a model on texts: the stages that come before and after the loop.
pub(super) fn train<B: TextBase>(
    config: &RunConfig,
    pipeline: LanguagePipeline<B>,
    device_setup: &DeviceSetup<'_>,
    output: RunOutput<'_>,
) -> Result<RunEnd> {
    let RunOutput { folder, events } = output;
    let task = pipeline.task(config)?;
    let prepare = || prepare(config, &task, device_setup, events);
    let (planned, texts) = first_rank_first(device_setup.world, prepare)?;
    let task = pipeline.task(&planned.config)?;
    let loader = TextLoader::new(task, &planned.config, texts)?;
    let setup = planned.setup(device_setup);
    let device = MeteredDevice::open(config, device_setup, &planned.plan)?;
    let end = run_training(&planned.config, &task, loader, setup, device, output)?;
    if end.reason.is_done() && is_first(device_setup.world) {
        B::write_result(pipeline, &planned.config, end.step, folder, events)?;
    }
    Ok(end)
}

/// Tokenises the texts, and plans the run.
fn prepare<B: TextBase>(
    config: &RunConfig,
    task: &LanguageTask<'_, B>,
    device_setup: &DeviceSetup<'_>,
    events: &EventSink<'_>,
) -> Result<(PlannedRun, TextDataset)> {
    warn_of_length(task, events)?;
    let texts = open_texts(task, config, &|event| emit_progress(events, event))?;
    emit_findings(events, texts.findings())?;
    let budget = device_setup.budget();
    let dataset = &task.summary_of(texts.n_train(), texts.n_held_out());
    let plan = choose(PlanRequest { task, config, dataset }, budget)?;
    let config = config.with_choice(&plan.choice);
    let levels = memory_levels(PlanRequest { task, config: &config, dataset }, budget)?;
    Ok((PlannedRun { config, plan, levels }, texts))
}

/// Warns of sequences longer than the model was trained for.
pub(super) fn warn_of_length<B: TextBase>(
    task: &LanguageTask<'_, B>,
    events: &EventSink<'_>,
) -> Result<()> {
    let (length, longest) = (task.text.length, task.base.context_length());
    if length <= longest {
        return Ok(());
    }
    let kind = WarningKind::SequencesTooLong { tokens: length, made_for: longest };
    events.emit(Event::Warning(Warning { step: 0, kind }))
}
