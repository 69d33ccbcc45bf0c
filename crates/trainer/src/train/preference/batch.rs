//! Preferences as the model sees them, and what its log-probabilities are worth.
//!
//! Shapes: A answers of all samples together, each a sequence of N tokens, filled up at its end.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use compute::ops::{IGNORE_INDEX, RowWeights};

use crate::objective::grpo::GrpoObjective;
use crate::objective::preference::{
    AnswerGradient, AnswerLogProb, PreferenceObjective, RewardSums,
};
use crate::text::preference::{AnswerTokens, Preference};

/// A preference, ready to be trained on.
pub(crate) struct PreferenceSample {
    /// Its answers.
    pub preference: Preference,
    /// Tokens that each of them is filled up to.
    pub length: usize,
    /// How much more likely other answers are than in the reference, in nats; of KTO alone.
    pub kl: f64,
    /// How much better its completion is than the others after the same prompt; of GRPO alone.
    pub advantage: f64,
    /// What each token of its completion weighs.
    pub token_weight: f64,
}

/// A micro-batch of preferences.
pub struct PreferenceMicroBatch {
    /// A and N.
    pub(super) sizes: [usize; 2],
    /// [A, N]
    pub(super) ids: Vec<u32>,
    /// The next token of each that counts.
    pub(super) targets: Vec<u32>,
    /// Whether that is part of the answer.
    is_answer: Vec<bool>,
    /// Of each sample.
    labels: Vec<SampleLabel>,
}

/// What is known of a sample besides its tokens.
#[derive(Clone, Copy)]
struct SampleLabel {
    is_desirable: bool,
    kl: f64,
    advantage: f64,
    token_weight: f64,
}

impl PreferenceMicroBatch {
    /// Of samples of one length.
    pub(super) fn new(
        samples: &[PreferenceSample],
        objective: &PreferenceObjective,
        padding: u32,
    ) -> Self {
        let answers: Vec<&AnswerTokens> =
            samples.iter().flat_map(|sample| &sample.preference.answers).collect();
        let length = samples[0].length;
        let label = |sample: &PreferenceSample| SampleLabel {
            is_desirable: sample.preference.is_desirable,
            kl: sample.kl,
            advantage: sample.advantage,
            token_weight: sample.token_weight,
        };
        let mut batch = Self {
            sizes: [answers.len(), length],
            ids: Vec::with_capacity(answers.len() * length),
            targets: Vec::with_capacity(answers.len() * length),
            is_answer: Vec::with_capacity(answers.len() * length),
            labels: samples.iter().map(label).collect(),
        };
        for answer in answers {
            batch.put(answer, objective.learns_prompt(), padding);
        }
        batch
    }

    /// One answer of which nothing is known, to see how likely it is.
    pub(super) fn alone(answer: &AnswerTokens, length: usize, padding: u32) -> Self {
        let mut batch = Self {
            sizes: [1, length],
            ids: Vec::new(),
            targets: Vec::new(),
            is_answer: Vec::new(),
            labels: Vec::new(),
        };
        batch.put(answer, false, padding);
        batch
    }

    /// `n` samples of zeros, every token of which counts.
    pub(super) fn zeros(n: usize, length: usize, objective: &PreferenceObjective) -> Self {
        let answers = if objective.is_unpaired() { n } else { 2 * n };
        let all = answers * length;
        Self {
            sizes: [answers, length],
            ids: vec![0; all],
            targets: vec![0; all],
            is_answer: vec![true; all],
            labels: vec![
                SampleLabel {
                    is_desirable: true,
                    kl: 0.0,
                    advantage: 0.0,
                    token_weight: 0.0
                };
                n
            ],
        }
    }

    fn put(&mut self, AnswerTokens { ids, is_answer }: &AnswerTokens, is_all: bool, padding: u32) {
        let length = self.sizes[1];
        let end = self.ids.len() + length;
        let n = ids.len().saturating_sub(1).min(length);
        self.ids.extend(&ids[..n]);
        self.ids.resize(end, padding);
        let target = |at: usize| if is_all || is_answer[at] { ids[at] } else { IGNORE_INDEX };
        self.targets.extend((1..=n).map(target));
        self.targets.resize(end, IGNORE_INDEX);
        self.is_answer.extend(&is_answer[1..=n]);
        self.is_answer.resize(end, false);
    }

    /// The log-probability of each answer, from the cross entropies of all targets [A, N], and from those of the
    /// reference model.
    pub(super) fn log_probs(
        &self,
        losses: &[f64],
        reference: Option<&[f64]>,
    ) -> Vec<AnswerLogProb> {
        let [_, length] = self.sizes;
        let answer = |(index, targets): (usize, &[u32])| {
            let mut sum = AnswerLogProb::default();
            let counted = (index * length..).zip(targets);
            for (at, _) in counted.filter(|(_, target)| **target != IGNORE_INDEX) {
                sum.text -= losses[at];
                sum.text_tokens += 1;
                if self.is_answer[at] {
                    sum.answer -= losses[at];
                    sum.answer_tokens += 1;
                    sum.reference -= reference.map_or(0.0, |losses| losses[at]);
                }
            }
            sum
        };
        self.targets.chunks(length).enumerate().map(answer).collect()
    }

    /// The mean loss of the samples, and its derivative by each cross entropy; notes what it came to.
    pub(super) fn weigh(
        &self,
        objective: &PreferenceObjective,
        losses: &[f64],
        reference: Option<&[f64]>,
        log: &RewardLog,
    ) -> RowWeights {
        let mut sums = log.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let PreferenceObjective::Grpo(grpo) = objective {
            return self.weigh_completions(grpo, losses, reference, &mut sums);
        }
        let answers = self.log_probs(losses, reference);
        let (mut loss, mut gradients) = (0.0, Vec::with_capacity(answers.len()));
        if objective.is_unpaired() {
            for (answer, SampleLabel { is_desirable, kl, .. }) in answers.iter().zip(&self.labels) {
                let sample = objective.single(*answer, *is_desirable, *kl);
                sums.add_single(&sample, *is_desirable);
                if objective.needs_kl() {
                    sums.add("kl", kl.max(0.0));
                }
                loss += sample.loss;
                gradients.extend(sample.gradients);
            }
        } else {
            for pair in answers.chunks(2) {
                let sample = objective.pair(pair[0], pair[1]);
                sums.add_pair(&sample);
                loss += sample.loss;
                gradients.extend(sample.gradients);
            }
        }
        let share = 1.0 / self.labels.len() as f64;
        RowWeights { loss: share * loss, weights: self.row_weights(&gradients, share) }
    }

    /// The same of completions, token by token.
    fn weigh_completions(
        &self,
        objective: &GrpoObjective,
        losses: &[f64],
        reference: Option<&[f64]>,
        sums: &mut RewardSums,
    ) -> RowWeights {
        let [n, length] = self.sizes;
        let (mut loss, mut weights) = (0.0, vec![0.0; self.targets.len()]);
        let all = self.targets.iter().enumerate();
        for (at, _) in all.filter(|(_, target)| **target != IGNORE_INDEX) {
            let SampleLabel { advantage, token_weight, .. } = self.labels[at / length];
            let of_reference = reference.map_or(0.0, |losses| -losses[at]);
            let token = objective.token(-losses[at], of_reference, advantage);
            let share = token_weight / n as f64;
            loss += share * token.loss;
            weights[at] = -(share * token.slope) as f32;
            if reference.is_some() {
                sums.add("kl", token.kl);
            }
        }
        RowWeights { loss, weights }
    }

    /// A cross entropy is a log-probability with the other sign.
    fn row_weights(&self, gradients: &[AnswerGradient], share: f64) -> Vec<f32> {
        let [_, length] = self.sizes;
        let weight = |(at, target): (usize, &u32)| {
            let AnswerGradient { answer, text } = gradients[at / length];
            let by = text + if self.is_answer[at] { answer } else { 0.0 };
            if *target == IGNORE_INDEX { 0.0 } else { -(share * by) as f32 }
        };
        self.targets.iter().enumerate().map(weight).collect()
    }
}

/// What preferences came to since it was last reset.
#[derive(Default)]
pub(crate) struct RewardLog(Mutex<RewardSums>);

impl RewardLog {
    /// The means, if there are any.
    pub fn means(&self) -> Option<BTreeMap<String, f64>> {
        let means = self.0.lock().unwrap_or_else(PoisonError::into_inner).means();
        Some(means).filter(|means| !means.is_empty())
    }

    /// Takes in a value of a mean.
    pub fn add(&self, name: &'static str, value: f64) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).add(name, value);
    }

    /// Forgets all.
    pub fn reset(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = RewardSums::default();
    }
}
