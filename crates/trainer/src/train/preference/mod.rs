//! Training a language model on preferences, DPO, ORPO and KTO, or on rewards of its own completions, GRPO. The reference is the base itself: its log-probabilities
//! are those of the model with its adapters left out, in a second forward pass of every step, so that nothing has to be
//! kept between steps.

mod batch;
mod loader;
mod reward;
mod reward_program;
mod rollout;
#[cfg(test)]
mod rollout_tests;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::Path;

use compute::{Device, DeviceKind, Dtype, Tape, Var, WorkStats};
use weights::BytesDoneFn;

use self::batch::{PreferenceMicroBatch, RewardLog};
use self::loader::PreferenceLoader;
pub use self::loader::open_preferences;
use self::reward::Rewarder;
use super::data_parallel::{first_rank_first, is_first};
use super::device::{DeviceSetup, MeteredDevice, PlannedRun};
use super::folder::RunOutput;
use super::language::{LanguagePipeline, LanguageTask, SequenceLength, TextBase, warn_of_length};
use super::preparation::{emit_findings, emit_progress};
use super::run_training;
use crate::config::RunConfig;
use crate::config::adapter::AdapterKind;
use crate::config::preference::PreferenceConfig;
use crate::cost::Cost;
use crate::error::{Result, TrainerError};
use crate::event::{Event, EventSink, RunEnd};
use crate::fingerprint::Fingerprint;
use crate::model::adapter::Adapters;
use crate::model::adapter::read::Component;
use crate::model::build::{Precision, TensorSpec};
use crate::model::llama::language_model::LanguageModel;
use crate::model::llama::{Llama, TokenTargets};
use crate::model::recompute::Recompute;
use crate::model::vae::Tiling;
use crate::objective::grpo::GrpoObjective;
use crate::objective::preference::PreferenceObjective;
use crate::plan::{PlanRequest, choose, memory_levels};
use crate::task::prefetch::PREFETCH_BATCHES;
use crate::task::traits::{
    DatasetSummary, Preparation, PreparationLimits, SmallerTask, Task, TrainableModel,
};
use crate::text::preference::PreferenceDataset;

/// A language model and its preferences.
#[derive(Clone, Copy)]
pub struct PreferenceTask<'a> {
    /// The model and the settings of its texts.
    pub language: LanguageTask<'a, LanguageModel>,
    /// What is learnt.
    pub preference: &'a PreferenceConfig,
    objective: PreferenceObjective,
    log: &'a RewardLog,
    rewarder: &'a Rewarder,
}

/// A model with its tokenizer, open, to learn from preferences.
pub struct PreferencePipeline {
    language: LanguagePipeline,
    log: RewardLog,
    rewarder: Rewarder,
}

impl PreferencePipeline {
    /// The model and the tokenizer of a job. To plan, neither need exist on disk.
    pub fn open(config: &RunConfig, is_planned: bool) -> Result<Self> {
        let language = LanguagePipeline::open(config, is_planned)?;
        Ok(Self { language, log: RewardLog::default(), rewarder: Rewarder::default() })
    }

    /// The model.
    pub fn base(&self) -> &LanguageModel {
        &self.language.base
    }

    /// The task of a job.
    pub fn task<'a>(
        &'a self,
        config: &'a RunConfig,
        preference: &'a PreferenceConfig,
    ) -> Result<PreferenceTask<'a>> {
        let objective = preference.objective();
        if objective.has_reference() && config.adapter.kind == AdapterKind::Full {
            return Err(TrainerError::Request {
                problem: "the model is compared with its base, which a full fine-tune changes: adapter.kind is \"full\""
                    .into(),
                hint: "leave adapter.kind out for a LoRA, or set preference.method = \"orpo\", which needs no base",
            });
        }
        if objective.needs_kl() && config.train.batch_size < 2 {
            return Err(TrainerError::Request {
                problem: format!(
                    "kto compares the answers of a batch with each other, and train.batch_size is {}",
                    config.train.batch_size
                ),
                hint: "set train.batch_size to 2 or more, or preference.loss_type = \"apo_zero_unpaired\"",
            });
        }
        if let Some(grpo) = objective.grpo() {
            check_completions(config, grpo)?;
        }
        let language = self.language.task(config)?;
        let (log, rewarder) = (&self.log, &self.rewarder);
        Ok(PreferenceTask { language, preference, objective, log, rewarder })
    }
}

/// That a batch holds whole groups, and a sequence a prompt with a completion.
fn check_completions(config: &RunConfig, grpo: &GrpoObjective) -> Result<()> {
    let refuse = |problem, hint| Err(TrainerError::Request { problem, hint });
    let (batch, n) = (config.train.batch_size, grpo.num_generations);
    if !batch.is_multiple_of(n) {
        return refuse(
            format!(
                "train.batch_size is {batch} completions, and preference.num_generations makes {n} of each prompt"
            ),
            "set train.batch_size to a multiple of preference.num_generations",
        );
    }
    let (text, _) = config.data.texts()?;
    let length = text.length;
    let most = grpo.max_completion_length;
    if length <= most {
        return refuse(
            format!(
                "text.length is {length} tokens, and a completion may have preference.max_completion_length = {most}: \
                 no prompt fits before it"
            ),
            "set text.length to the tokens of a prompt with its completion, or preference.max_completion_length lower",
        );
    }
    if config.part.size > 1 {
        return refuse(
            format!("grpo trains on one machine, and the run has {} ranks", config.part.size),
            "start it without mpirun",
        );
    }
    Ok(())
}

/// Bytes of a token of an answer on the host: its id, its target, whether it is part of the answer, twice.
const TOKEN_BYTES: usize = 2 * size_of::<u32>() + 2 * size_of::<bool>();

impl PreferenceTask<'_> {
    /// The nominal dataset, for a plan; reads nothing.
    pub fn dataset_summary(&self, batch: usize) -> DatasetSummary<SequenceLength> {
        self.language.dataset_summary(batch)
    }

    fn summary_of(&self, preferences: &PreferenceDataset) -> DatasetSummary<SequenceLength> {
        let nominal = DatasetSummary { is_nominal: false, ..self.dataset_summary(1) };
        loader::summary(self, preferences, &nominal)
    }

    /// Samples that are made of a record.
    fn per_record(&self) -> usize {
        self.objective.grpo().map_or(1, |grpo| grpo.num_generations)
    }

    /// The most tokens that the model adds to a record.
    fn n_generated(&self) -> usize {
        self.objective.grpo().map_or(0, |grpo| grpo.max_completion_length)
    }

    /// What logits are divided by where they are learnt: as where tokens are drawn.
    fn temperature(&self) -> f64 {
        self.objective.grpo().map_or(1.0, |_| self.preference.temperature)
    }
}

impl Task for PreferenceTask<'_> {
    type Model = Llama;
    type Size = SequenceLength;
    type MicroBatch = PreferenceMicroBatch;

    fn path(&self) -> &Path {
        self.language.path()
    }

    fn fingerprint(&self) -> Result<Fingerprint> {
        self.language.fingerprint()
    }

    fn component(&self) -> Component {
        self.language.component()
    }

    fn tensors(&self) -> Result<Vec<TensorSpec>> {
        self.language.tensors()
    }

    fn load(
        &self,
        device: &Device,
        precision: Precision,
        adapters: &mut Adapters,
        tick: BytesDoneFn<'_>,
    ) -> Result<Llama> {
        self.language.load(device, precision, adapters, tick)
    }

    fn loss<'m>(
        &self,
        model: &'m Llama,
        tape: &Tape<'m>,
        micro_batch: &PreferenceMicroBatch,
        _: Dtype,
        recompute: Recompute,
    ) -> Result<Var> {
        let Self { objective, log, .. } = self;
        let ids = tape.device().upload(micro_batch.sizes, &micro_batch.ids)?;
        let targets = tape.device().upload(micro_batch.sizes, &micro_batch.targets)?;
        let tokens = TokenTargets { ids: &ids, targets: &targets, temperature: self.temperature() };
        let reference = objective
            .has_reference()
            .then(|| model.token_losses(&tape.without_adapters(), tokens))
            .transpose()?;
        model.weighted_loss(tape, tokens, recompute, |losses| {
            Ok(micro_batch.weigh(objective, losses, reference.as_deref(), log))
        })
    }

    fn reward_metrics(&self) -> Option<BTreeMap<String, f64>> {
        self.log.means()
    }

    fn reset_metrics(&self) {
        self.log.reset();
    }

    fn is_policy_gradient(&self) -> bool {
        self.objective.grpo().is_some()
    }

    /// Of GRPO, completions of every prompt.
    fn dry_run_batches(
        &self,
        device: &Device,
        trainable: TrainableModel<'_, Llama>,
        SequenceLength(length): SequenceLength,
        n: usize,
    ) -> Result<Vec<(usize, WorkStats)>> {
        let Some(grpo) = self.objective.grpo() else { return Ok(Vec::new()) };
        let works = rollout::dry_run(device, trainable, grpo, length, grpo.num_generations)?;
        let prompts = n.div_ceil(grpo.num_generations);
        Ok(works.map(|(times, work)| (times * prompts, work)).into())
    }

    /// Of GRPO, one completion of every prompt.
    fn dry_run_validation(
        &self,
        device: &Device,
        trainable: TrainableModel<'_, Llama>,
        SequenceLength(length): SequenceLength,
        n: usize,
    ) -> Result<Option<Vec<(usize, WorkStats)>>> {
        let Some(grpo) = self.objective.grpo() else { return Ok(None) };
        let works = rollout::dry_run(device, trainable, grpo, length, 1)?;
        Ok(Some(works.map(|(times, work)| (times * n, work)).into()))
    }

    fn dummy_micro_batch(
        &self,
        SequenceLength(length): SequenceLength,
        n: usize,
    ) -> Result<PreferenceMicroBatch> {
        Ok(PreferenceMicroBatch::zeros(n, length, &self.objective))
    }

    /// None: prompts are part of their answers.
    fn shorter_micro_batches(
        &self,
        _: SequenceLength,
        _: usize,
    ) -> Result<Vec<PreferenceMicroBatch>> {
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
        self.language.file_bytes()
    }

    fn host_bytes(&self, config: &RunConfig, dataset: &DatasetSummary<SequenceLength>) -> usize {
        let answers = if self.objective.is_unpaired() { 1 } else { 2 };
        let length = dataset.train.keys().next_back().map_or(0, |SequenceLength(length)| *length);
        let batch = config.train.batch_size * answers * length * TOKEN_BYTES;
        let logits = self.per_record() * self.language.base.config.vocab_size * size_of::<f64>();
        let logits = if self.objective.grpo().is_some() { logits } else { 0 };
        let order: usize = dataset.train.values().map(|n| 4 * n * size_of::<usize>()).sum();
        (PREFETCH_BATCHES + 2) * batch + order + logits
    }

    fn relative_cost(size: SequenceLength) -> usize {
        LanguageTask::<LanguageModel>::relative_cost(size)
    }

    fn makes_samples(&self) -> bool {
        self.language.makes_samples()
    }

    fn n_validation_passes(&self) -> usize {
        1
    }

    fn sample_tilings(&self) -> Vec<Tiling> {
        Vec::new()
    }

    fn dry_run_samples(
        &self,
        dataset: &DatasetSummary<SequenceLength>,
        device: &Device,
        trainable: TrainableModel<'_, Llama>,
        tiling: Option<Tiling>,
    ) -> Result<Cost> {
        self.language.dry_run_samples(dataset, device, trainable, tiling)
    }

    fn smaller(&self, dataset: &DatasetSummary<SequenceLength>) -> Vec<SmallerTask<Self>> {
        let smaller = self.language.smaller(dataset).into_iter();
        let of = |SmallerTask { change, task, dataset }| SmallerTask {
            change,
            task: Self { language: task, ..*self },
            dataset,
        };
        // A sequence has to hold more than a completion.
        let has_room = |it: &SmallerTask<Self>| {
            let sizes = it.dataset.train.keys().next_back();
            sizes.is_none_or(|SequenceLength(length)| *length > self.n_generated())
        };
        smaller.map(of).filter(has_room).collect()
    }
}

/// Trains a model on preferences: the stages that come before and after the loop.
pub(super) fn train(
    config: &RunConfig,
    preference: &PreferenceConfig,
    device_setup: &DeviceSetup<'_>,
    output: RunOutput<'_>,
) -> Result<RunEnd> {
    let RunOutput { folder, events } = output;
    let pipeline = PreferencePipeline::open(config, false)?;
    let task = pipeline.task(config, preference)?;
    let prepare = || prepare(config, &task, device_setup, events);
    let (planned, preferences) = first_rank_first(device_setup.world, prepare)?;
    let task = pipeline.task(&planned.config, preference)?;
    let loader = PreferenceLoader::new(task, &planned.config, preferences)?;
    let setup = planned.setup(device_setup);
    let device = MeteredDevice::open(config, device_setup, &planned.plan)?;
    let end = run_training(&planned.config, &task, loader, setup, device, output)?;
    if end.reason.is_done() && is_first(device_setup.world) {
        let language = pipeline.language;
        LanguageModel::write_result(language, &planned.config, end.step, folder, events)?;
    }
    Ok(end)
}

/// Tokenises the preferences, and plans the run.
fn prepare(
    config: &RunConfig,
    task: &PreferenceTask<'_>,
    device_setup: &DeviceSetup<'_>,
    events: &EventSink<'_>,
) -> Result<(PlannedRun, PreferenceDataset)> {
    warn_of_length(&task.language, events)?;
    let preferences = open_preferences(task, config, &|event| emit_progress(events, event))?;
    emit_findings(events, preferences.findings())?;
    if let n @ 1.. = preferences.n_cut() {
        let length = task.language.text.length;
        let text = format!(
            "{n} of {} are longer than text.length = {length} tokens, and end there",
            preferences.n_train() + preferences.n_held_out()
        );
        events.emit(Event::Note { text })?;
    }
    let budget = device_setup.budget();
    let dataset = &task.summary_of(&preferences);
    let plan = choose(PlanRequest { task, config, dataset }, budget)?;
    let config = config.with_choice(&plan.choice);
    let levels = memory_levels(PlanRequest { task, config: &config, dataset }, budget)?;
    Ok((PlannedRun { config, plan, levels }, preferences))
}
