//! Completions of a batch's prompts by the model as it is now, and what they are worth. Every random number follows from
//! the seed, the batch, the sample and the token: a run that resumes makes the same completions.

use compute::{Device, RandomSequence, WorkStats};

use super::PreferenceTask;
use super::batch::{PreferenceSample, RewardLog};
use super::reward::RewardedText;
use crate::config::Switch;
use crate::error::Result;
use crate::model::llama::Llama;
use crate::objective::grpo::{GrpoObjective, deviation, mean};
use crate::sample::group::{Completion, GroupGenerator, GroupRequest, complete};
use crate::sample::text::GenerativeBase;
use crate::sample::token_sampler::TokenSampler;
use crate::task::seed::{Purpose, seed};
use crate::task::traits::TrainableModel;
use crate::text::preference::AnswerTokens;

/// Makes completions and has them rewarded.
#[derive(Clone, Copy)]
pub(super) struct Rollout<'a> {
    pub task: PreferenceTask<'a>,
    pub objective: GrpoObjective,
    /// Of the run.
    pub seed: u64,
}

/// Completions with their rewards.
struct RewardedCompletions {
    completions: Vec<Completion>,
    rewards: Vec<f64>,
}

impl Rollout<'_> {
    /// Completes the prompts of a batch, `num_generations` times each, and says how much better than the others each
    /// completion is. `length` is what a sample of the batch has room for.
    pub fn complete_batch(
        &self,
        device: &Device,
        trainable: TrainableModel<'_, Llama>,
        samples: &mut [PreferenceSample],
        length: usize,
        first_sample: u64,
    ) -> Result<()> {
        let (n, from) = (self.objective.num_generations, seed(self.seed, Purpose::Completions));
        let mut completions = Vec::with_capacity(samples.len());
        for group in samples.chunks(n) {
            let first = first_sample + completions.len() as u64;
            let uniform = |text: usize, place| draw(from, first + text as u64, place);
            completions.extend(self.completed(device, trainable, group, length, &uniform)?);
        }
        let RewardedCompletions { completions, rewards } =
            self.rewarded(device, samples.iter(), completions)?;
        let advantages = self.objective.advantages(&rewards);
        let lengths: Vec<usize> = completions.iter().map(|it| it.ids.len()).collect();
        let weights = self.objective.token_weights(&lengths);
        self.log(&rewards, &completions);
        self.task.log.add("reward_std", deviation(&rewards));
        self.task.log.add("frac_reward_zero_std", advantages.zero_std_share);
        let values = advantages.advantages.into_iter().zip(weights);
        for ((sample, completion), (advantage, token_weight)) in
            samples.iter_mut().zip(&completions).zip(values)
        {
            sample.preference.answers[0].extend(&completion.ids);
            (sample.advantage, sample.token_weight) = (advantage, token_weight);
        }
        Ok(())
    }

    /// The mean reward of one completion of each held-out prompt. Its random numbers are the same at every validation.
    pub fn validate(
        &self,
        device: &Device,
        trainable: TrainableModel<'_, Llama>,
        samples: &[(usize, PreferenceSample)],
    ) -> Result<f64> {
        let from = seed(self.seed, Purpose::HeldOutCompletions);
        let mut completions = Vec::with_capacity(samples.len());
        for (index, sample) in samples {
            let uniform = |_, place| draw(from, *index as u64, place);
            let group = std::slice::from_ref(sample);
            completions.extend(self.completed(
                device,
                trainable,
                group,
                sample.length,
                &uniform,
            )?);
        }
        let samples = samples.iter().map(|(_, sample)| sample);
        let RewardedCompletions { completions, rewards } =
            self.rewarded(device, samples, completions)?;
        self.log(&rewards, &completions);
        Ok(mean(&rewards))
    }

    /// As many completions of one prompt as there are samples.
    fn completed(
        &self,
        device: &Device,
        TrainableModel { model, params, .. }: TrainableModel<'_, Llama>,
        group: &[PreferenceSample],
        length: usize,
        uniform: &dyn Fn(usize, usize) -> f32,
    ) -> Result<Vec<Completion>> {
        let request = GroupRequest {
            prompt: &group[0].preference.answers[0].ids,
            n_texts: group.len(),
            max_tokens: self.objective.max_completion_length,
            room: length,
            sampler: self.sampler(),
            uniform,
            is_end: &|token| self.is_end(token),
        };
        complete(device, model, params, &request)
    }

    fn sampler(&self) -> TokenSampler {
        let preference = self.task.preference;
        TokenSampler {
            temperature: preference.temperature as f32,
            top_k: match preference.top_k {
                Switch::On(k) => Some(k),
                Switch::Off => None,
            },
            top_p: preference.top_p as f32,
            seed: 0,
        }
    }

    fn is_end(&self, token: u32) -> bool {
        let language = &self.task.language;
        language.tokenizer.is_eos(token) || language.base.eos_token_ids().contains(&token)
    }

    fn rewarded<'s>(
        &self,
        device: &Device,
        samples: impl IntoIterator<Item = &'s PreferenceSample>,
        completions: Vec<Completion>,
    ) -> Result<RewardedCompletions> {
        let text = |(sample, completion): (&'s PreferenceSample, &Completion)| {
            let shown = &completion.ids[..completion.ids.len() - usize::from(completion.is_eos)];
            let completion = self.task.language.tokenizer.decode(shown);
            RewardedText { record: &sample.preference.record, completion }
        };
        let texts: Vec<_> = samples.into_iter().zip(&completions).map(text).collect();
        let check = || Ok(device.check_cancelled()?);
        let rewards = self.task.rewarder.rewards(self.task.preference, &texts, &check)?;
        Ok(RewardedCompletions { completions, rewards })
    }

    fn log(&self, rewards: &[f64], completions: &[Completion]) {
        let of = |value: &dyn Fn(&Completion) -> f64| {
            mean(&completions.iter().map(value).collect::<Vec<_>>())
        };
        let log: &RewardLog = self.task.log;
        log.add("reward", mean(rewards));
        log.add("completions/mean_length", of(&|it| it.ids.len() as f64));
        log.add("completions/clipped_ratio", of(&|it| f64::from(u8::from(!it.is_eos))));
    }
}

/// The work of completions on the meta device: of a prompt that fills its part of `length` tokens, and of the last token,
/// which takes the longest. Each with how often it is done for a prompt.
pub(super) fn dry_run(
    device: &Device,
    TrainableModel { model, params, .. }: TrainableModel<'_, Llama>,
    objective: &GrpoObjective,
    length: usize,
    n_texts: usize,
) -> Result<[(usize, WorkStats); 2]> {
    let most = objective.max_completion_length.min(length);
    let prompt = vec![0; length + 1 - most];
    let before = device.work();
    let mut generator = GroupGenerator::new(device, model, params, length, n_texts)?;
    generator.begin(&prompt)?;
    let begun = device.work();
    if most > 1 {
        generator.skip_to_last();
        generator.next(&vec![0; n_texts])?;
    }
    Ok([(1, begun.since(&before)), (most - 1, device.work().since(&begun))])
}

fn draw(seed: u64, sample: u64, place: usize) -> f32 {
    RandomSequence::new(seed, sample).uniform(place)
}

impl AnswerTokens {
    fn extend(&mut self, completion: &[u32]) {
        self.ids.extend(completion);
        self.is_answer.resize(self.ids.len(), true);
    }
}
