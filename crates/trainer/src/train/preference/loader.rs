//! The data loader of preferences: batches of pairs, of single answers, or of completions that the model makes, of about
//! one length.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use compute::{Device, Tape};

use super::PreferenceTask;
use super::batch::{PreferenceMicroBatch, PreferenceSample};
use super::rollout::Rollout;
use crate::config::RunConfig;
use crate::config::text::TextConfig;
use crate::data::{BatchSampler, SizeCounts};
use crate::error::Result;
use crate::event::Event;
use crate::fingerprint::Fingerprint;
use crate::model::llama::language_model::LanguageModel;
use crate::model::llama::{Llama, TokenTargets};
use crate::progress;
use crate::task::prefetch::Prefetch;
use crate::task::traits::{
    self, DatasetSummary, HeldOutPass, PrefetchedBatches, Task, TrainBatch, TrainableModel,
};
use crate::text::TextDataRequest;
use crate::text::preference::{AnswerTokens, Preference, PreferenceDataset};
use crate::train::language::{SampleTextWriter, SequenceLength};

/// Preferences and their order.
pub(crate) struct PreferenceLoader<'a> {
    task: PreferenceTask<'a>,
    preferences: Arc<PreferenceDataset>,
    order: BatchSampler,
    /// Of each record that is trained on.
    sizes: Arc<[SequenceLength]>,
    /// Of each that is held out.
    held_out_sizes: Vec<SequenceLength>,
    padding: u32,
    /// Where samples are completions that the model makes.
    rollout: Option<Rollout<'a>>,
    /// Samples of a batch.
    batch_size: usize,
    /// Texts generated during training.
    samples: Option<SampleTextWriter<'a, LanguageModel>>,
}

/// Tokenises the preferences of a job, or finds them in the cache.
pub fn open_preferences(
    task: &PreferenceTask<'_>,
    config: &RunConfig,
    on_progress: progress::ProgressFn<'_>,
) -> Result<PreferenceDataset> {
    let TextConfig { path, length, token_format: width, validation: held_out, .. } =
        task.language.text;
    let request = TextDataRequest {
        path: path.clone(),
        kind: task.preference.record_kind(),
        follow_links: task.language.text.follow_links,
        width: *width,
        // Of a prompt alone.
        length: *length + 1 - task.n_generated().max(1),
        held_out: held_out.clone(),
        seed: config.train.seed,
        folder: config.cache_folder(),
    };
    PreferenceDataset::open(&request, task.language.tokenizer, on_progress)
}

/// The lengths that answers are filled up to: two to each doubling. Chosen: at most a third is filling, a sixth on
/// average, and a plan has few sizes to try.
fn filled_length(tokens: usize, most: usize) -> SequenceLength {
    let predicted = tokens.saturating_sub(1).max(LEAST_LENGTH);
    let power = predicted.next_power_of_two();
    let between = power / 4 * 3;
    SequenceLength(if predicted <= between { between } else { power }.min(most))
}

const LEAST_LENGTH: usize = 32;

impl<'a> PreferenceLoader<'a> {
    /// Of tokenised preferences.
    pub fn new(
        task: PreferenceTask<'a>,
        config: &RunConfig,
        preferences: PreferenceDataset,
    ) -> Result<Self> {
        let (most, generated) = (task.language.text.length, task.n_generated());
        let sizes = |lengths: Vec<usize>| -> Vec<SequenceLength> {
            lengths.into_iter().map(|tokens| filled_length(tokens + generated, most)).collect()
        };
        let rollout = task.objective.grpo().map(|objective| Rollout {
            task,
            objective: *objective,
            seed: config.train.seed,
        });
        let train = sizes(preferences.train_lengths());
        let counted: Vec<_> = train.iter().map(|size| (*size, 1)).collect();
        let samples = task.makes_samples().then(|| SampleTextWriter::new(task.language));
        Ok(Self {
            order: BatchSampler::new(
                &counted,
                config.train.batch_size / task.per_record(),
                config.train.seed,
            ),
            batch_size: config.train.batch_size,
            rollout,
            held_out_sizes: sizes(preferences.held_out_lengths()),
            sizes: train.into(),
            preferences: Arc::new(preferences),
            padding: task.language.tokenizer.eos().unwrap_or(0),
            samples: samples.transpose()?,
            task,
        })
    }

    fn micro_batch_of(&self, samples: &[PreferenceSample]) -> (f64, PreferenceMicroBatch) {
        let batch = PreferenceMicroBatch::new(samples, &self.task.objective, self.padding);
        (samples.len() as f64, batch)
    }

    fn held_out_sample(&self, index: usize) -> Result<PreferenceSample> {
        Ok(sample(self.preferences.held_out(index)?, self.held_out_sizes[index]))
    }

    /// How much more likely the model takes an answer to be than its reference does.
    fn log_ratio(
        &self,
        device: &Device,
        TrainableModel { model, params, .. }: TrainableModel<'_, Llama>,
        answer: &AnswerTokens,
        length: usize,
    ) -> Result<f64> {
        let batch = PreferenceMicroBatch::alone(answer, length, self.padding);
        let ids = device.upload(batch.sizes, &batch.ids)?;
        let targets = device.upload(batch.sizes, &batch.targets)?;
        let tape = Tape::inference(device, params, 0);
        let tokens = TokenTargets { ids: &ids, targets: &targets, temperature: 1.0 };
        let reference = model.token_losses(&tape.without_adapters(), tokens)?;
        let losses = model.token_losses(&tape, tokens)?;
        let found = batch.log_probs(&losses, Some(&reference))[0];
        Ok(found.answer - found.reference)
    }
}

/// Sizes of preferences, for a plan.
pub(super) fn summary(
    task: &PreferenceTask<'_>,
    preferences: &PreferenceDataset,
    of: &DatasetSummary<SequenceLength>,
) -> DatasetSummary<SequenceLength> {
    let (most, generated) = (task.language.text.length, task.n_generated());
    let counts = |lengths: Vec<usize>, each: usize| {
        let mut counts = SizeCounts::new();
        for tokens in lengths {
            *counts.entry(filled_length(tokens + generated, most)).or_default() += each;
        }
        counts
    };
    let train = counts(preferences.train_lengths(), task.per_record());
    let held_out = counts(preferences.held_out_lengths(), 1);
    DatasetSummary { train, held_out, ..of.clone() }
}

/// The prompt of one record with the answer of another, as far as it fits.
fn mismatched(prompt: &AnswerTokens, answer: &AnswerTokens, length: usize) -> AnswerTokens {
    let of = |tokens: &AnswerTokens, wanted: bool| {
        let all = tokens.ids.clone().into_iter().zip(tokens.is_answer.clone());
        all.filter(move |(_, is_answer)| *is_answer == wanted).collect::<Vec<_>>()
    };
    let all = of(prompt, false).into_iter().chain(of(answer, true));
    let (ids, is_answer) = all.take(length + 1).unzip();
    AnswerTokens { ids, is_answer }
}

impl<'a> traits::DataLoader for PreferenceLoader<'a> {
    type Task = PreferenceTask<'a>;
    type Sample = PreferenceSample;

    fn fingerprint(&self) -> Fingerprint {
        self.preferences.fingerprint()
    }

    fn n_train(&self) -> usize {
        self.preferences.n_train() * self.task.per_record()
    }

    fn n_held_out(&self) -> usize {
        self.preferences.n_held_out()
    }

    fn batches_per_epoch(&self) -> u64 {
        self.order.batches_per_epoch()
    }

    fn read_from(&self, number: u64) -> PrefetchedBatches<Self> {
        let (preferences, mut order) = (Arc::clone(&self.preferences), self.order.clone());
        let (sizes, each) = (Arc::clone(&self.sizes), self.task.per_record());
        Prefetch::begin(number, move |number| {
            let indices = order.batch(number);
            let size = sizes[indices[0]];
            let mut samples = Vec::with_capacity(indices.len() * each);
            for index in indices {
                let preference = preferences.train(index)?;
                samples.extend((0..each).map(|_| sample(preference.clone(), size)));
            }
            Ok(TrainBatch { number, samples, size })
        })
    }

    /// Every sample counts the same.
    fn expected_weight(&mut self, numbers: Range<u64>) -> f64 {
        let n: usize = numbers.map(|number| self.order.batch(number).len()).sum();
        (n * self.task.per_record()) as f64
    }

    /// Of GRPO, the completions and what they are worth. Of KTO, how far the model is from its reference: on the answers of
    /// the batch, each after the prompt of another. One at a time, so that it does not depend on how the batch is cut.
    fn complete_batch(
        &self,
        device: &Device,
        trainable: TrainableModel<'_, Llama>,
        batch: &mut TrainBatch<SequenceLength, PreferenceSample>,
    ) -> Result<()> {
        if let Some(rollout) = &self.rollout {
            let SequenceLength(length) = batch.size;
            let first = batch.number * self.batch_size as u64;
            rollout.complete_batch(device, trainable, &mut batch.samples, length, first)?;
            // Of the batch, so that it does not depend on how that is cut.
            let tokens = batch.samples.iter().map(|it| it.preference.answers[0].ids.len()).max();
            let SequenceLength(filled) = filled_length(tokens.unwrap_or(0), length);
            batch.samples.iter_mut().for_each(|sample| sample.length = filled);
            return Ok(());
        }
        let n = batch.samples.len();
        if !self.task.objective.needs_kl() || n < 2 {
            return Ok(());
        }
        let mut sum = 0.0;
        for index in 0..n {
            let [own, other] =
                [index, (index + 1) % n].map(|at| &batch.samples[at].preference.answers[0]);
            let length = batch.samples[index].length;
            let answer = mismatched(own, other, length);
            // A prompt may fill the sequence.
            if answer.is_answer.iter().skip(1).any(|is_in| *is_in) {
                sum += self.log_ratio(device, trainable, &answer, length)?;
            }
        }
        let kl = sum / n as f64;
        batch.samples.iter_mut().for_each(|sample| sample.kl = kl);
        Ok(())
    }

    fn micro_batch(&self, samples: &[PreferenceSample]) -> Result<(f64, PreferenceMicroBatch)> {
        Ok(self.micro_batch_of(samples))
    }

    fn held_out_passes(&self) -> BTreeMap<SequenceLength, Vec<HeldOutPass>> {
        let mut passes = BTreeMap::<_, Vec<_>>::new();
        for (index, size) in self.held_out_sizes.iter().enumerate() {
            passes.entry(*size).or_default().extend(HeldOutPass::all(index, 1));
        }
        passes
    }

    fn held_out(&self, passes: &[HeldOutPass]) -> Result<(f64, PreferenceMicroBatch)> {
        let samples: Vec<_> =
            passes.iter().map(|pass| self.held_out_sample(pass.sample)).collect::<Result<_>>()?;
        Ok(self.micro_batch_of(&samples))
    }

    /// Of GRPO, the mean reward of completions with the other sign: lower is better, as of every loss.
    fn validate(
        &self,
        device: &Device,
        trainable: TrainableModel<'_, Llama>,
        passes: &[HeldOutPass],
    ) -> Result<Option<(f64, f64)>> {
        let Some(rollout) = &self.rollout else { return Ok(None) };
        let sample = |pass: &HeldOutPass| Ok((pass.sample, self.held_out_sample(pass.sample)?));
        let samples: Vec<_> = passes.iter().map(sample).collect::<Result<_>>()?;
        let reward = rollout.validate(device, trainable, &samples)?;
        Ok(Some((samples.len() as f64, -reward)))
    }

    fn write_samples(
        &self,
        device: &Device,
        trainable: TrainableModel<'_, Llama>,
        _: &Path,
        step: u64,
        should_continue: &(dyn Fn() -> bool + Sync),
    ) -> Result<Vec<Event>> {
        match &self.samples {
            Some(writer) => writer.write(device, trainable, step, should_continue),
            None => Ok(Vec::new()),
        }
    }
}

fn sample(preference: Preference, SequenceLength(length): SequenceLength) -> PreferenceSample {
    PreferenceSample { preference, length, kl: 0.0, advantage: 0.0, token_weight: 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_leave_little_to_fill() {
        for (tokens, most, filled) in
            [(2, 1024, 32), (33, 1024, 32), (34, 1024, 48), (50, 1024, 64), (66, 40, 40)]
        {
            assert_eq!(filled_length(tokens, most), SequenceLength(filled), "{tokens}");
        }
        for tokens in 34..3000 {
            let SequenceLength(filled) = filled_length(tokens, 1 << 20);
            assert!(filled >= tokens - 1 && 3 * (tokens - 1) > 2 * (filled - 2), "{tokens}");
        }
    }

    #[test]
    fn an_answer_comes_after_the_prompt_of_another() {
        let tokens = |ids: [u32; 4], n_prompt| AnswerTokens {
            ids: ids.into(),
            is_answer: (0..4).map(|at| at >= n_prompt).collect(),
        };
        let (own, other) = (tokens([1, 2, 3, 4], 2), tokens([5, 6, 7, 8], 1));
        let all = mismatched(&own, &other, 9);
        assert_eq!(all.ids, [1, 2, 6, 7, 8]);
        assert_eq!(all.is_answer, [false, false, true, true, true]);
        assert_eq!(mismatched(&own, &other, 3).ids, [1, 2, 6, 7]);
    }
}
