//! How good a language model is: perplexity of texts, questions with choices, questions with one answer. The same
//! functions run first on the meta device, which gives the peak memory; then an arena of that size is enough.

mod questions;

use std::collections::BTreeSet;

use compute::ops::IGNORE_INDEX;
use compute::{Device, DeviceKind, Params, Quantisation, Tape};

pub use self::questions::{Question, QuestionKind, read_questions};
use crate::cost::{self, StageMemory, check_cancelled, nearest_fitting};
use crate::error::{Result, TrainerError};
use crate::event::evaluation::{ChoiceScore, EvaluationScores, RightShare, TextScore};
use crate::model::build::Precision;
use crate::model::host::to_vec;
use crate::model::llama::Llama;
use crate::model::llama::language_model::LanguageModel;
use crate::model::recompute::Recompute;
use crate::sample::text::{GenerationRequest, GenerativeBase};
use crate::sample::token_sampler::TokenSampler;
use crate::text::{Sequence, TextDataset, Tokenizer};

/// Lengths of questions are rounded up to a multiple of it, so that few of them differ. Chosen: little is computed in
/// vain, and a dry run of each length takes moments.
const LENGTH_STEP: usize = 64;

/// What a model is asked.
pub struct Evaluation<'a> {
    /// Texts for the perplexity.
    pub texts: Option<&'a TextDataset>,
    /// Questions.
    pub questions: &'a [Question],
    /// The most tokens of an answer.
    pub max_tokens: usize,
}

/// A question in tokens, as the model reads it.
enum PreparedQuestion<'a> {
    /// A sequence for each choice, of which only the choice counts.
    Choices {
        sequences: Vec<Sequence>,
        question: &'a Question,
    },
    Exact {
        request: GenerationRequest,
        answer: &'a str,
    },
}

/// An evaluation that was found to be possible with a model.
pub struct PreparedEvaluation<'a> {
    base: &'a LanguageModel,
    tokenizer: &'a Tokenizer,
    texts: Option<&'a TextDataset>,
    questions: Vec<PreparedQuestion<'a>>,
}

impl<'a> Evaluation<'a> {
    /// Encodes the questions, and checks them against the model.
    pub fn prepare(
        &self,
        base: &'a LanguageModel,
        tokenizer: &'a Tokenizer,
    ) -> Result<PreparedEvaluation<'a>> {
        let most = base.config.max_position_embeddings;
        let questions = self.questions.iter().map(|question| match &question.kind {
            QuestionKind::Choices { choices, .. } => {
                let sequences = choices
                    .iter()
                    .map(|choice| choice_sequence(tokenizer, &question.prompt, choice, most));
                Ok(PreparedQuestion::Choices {
                    sequences: sequences.collect::<Result<_>>()?,
                    question,
                })
            }
            QuestionKind::Exact(answer) => {
                let prompt = encode_prompt(tokenizer, &question.prompt)?;
                let (max_tokens, sampler) = (self.max_tokens, TokenSampler::greedy());
                let request = GenerationRequest { prompt, max_tokens, sampler };
                base.check_request(&request)?;
                Ok(PreparedQuestion::Exact { request, answer })
            }
        });
        let questions = questions.collect::<Result<_>>()?;
        Ok(PreparedEvaluation { base, tokenizer, texts: self.texts, questions })
    }
}

/// A text as texts begin in training.
fn encode_prompt(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>> {
    Ok(tokenizer.bos().into_iter().chain(tokenizer.encode(text)?).collect())
}

/// A question and one of its choices, of which the choice is predicted.
fn choice_sequence(
    tokenizer: &Tokenizer,
    prompt: &str,
    choice: &str,
    most: usize,
) -> Result<Sequence> {
    // A tokenizer may join the end of the one and the beginning of the other; that token is the choice's.
    let n_prompt = encode_prompt(tokenizer, prompt)?.len();
    let all = encode_prompt(tokenizer, &format!("{prompt}{choice}"))?;
    let (n, first) = (all.len() - 1, n_prompt.clamp(1, all.len().max(2) - 1));
    if all.len() > most {
        return Err(TrainerError::Request {
            problem: format!("a question of {} tokens, the model is made for {most}", all.len()),
            hint: "shorten the question, or leave it out",
        });
    }
    let length = n.next_multiple_of(LENGTH_STEP).min(most);
    let mut sequence = Sequence {
        ids: all[..n].to_vec(),
        targets: (1..all.len()).map(|at| if at < first { IGNORE_INDEX } else { all[at] }).collect(),
        first_keys: vec![0; length],
    };
    sequence.ids.resize(length, 0);
    sequence.targets.resize(length, IGNORE_INDEX);
    Ok(sequence)
}

/// Called after each sequence; returns whether to go on.
pub type OnSequence<'a> = &'a dyn Fn() -> bool;

impl PreparedEvaluation<'_> {
    /// Sequences that are read, and answers that are written.
    pub fn n_passes(&self) -> usize {
        let of_question = |question: &PreparedQuestion<'_>| match question {
            PreparedQuestion::Choices { sequences, .. } => sequences.len(),
            PreparedQuestion::Exact { .. } => 1,
        };
        let of_texts = self.texts.map_or(0, TextDataset::n_train);
        of_texts + self.questions.iter().map(of_question).sum::<usize>()
    }

    /// Peak bytes of loading the model and of all that it is asked, by a dry run. If that is more than `limit`, the error
    /// names what would fit.
    pub fn plan(&self, precision: Precision, kind: DeviceKind, limit: usize) -> Result<usize> {
        let peak_bytes = self.peak(precision, kind)?;
        if peak_bytes <= limit {
            return Ok(peak_bytes);
        }
        let quantised = Precision { base: Some(Quantisation::Nf4), ..precision };
        let remedy =
            nearest_fitting(limit, &[("--quantise nf4".to_owned(), quantised)], |it, _| {
                self.peak(*it, kind)
            })?;
        Err(cost::too_large(StageMemory { name: "evaluation", peak_bytes }, limit, remedy))
    }

    fn peak(&self, precision: Precision, kind: DeviceKind) -> Result<usize> {
        let device = Device::meta(kind, cost::UNLIMITED);
        let (model, adapters) = self.base.load_adapted(&device, precision, &|_| true)?;
        let params = &adapters.params;
        let mut lengths = BTreeSet::new();
        lengths.extend(self.texts.map(|texts| texts.train(0).map(|it| it.ids.len())).transpose()?);
        for question in &self.questions {
            match question {
                PreparedQuestion::Choices { sequences, .. } => {
                    lengths.extend(sequences.iter().map(|sequence| sequence.ids.len()));
                }
                PreparedQuestion::Exact { request, .. } => {
                    self.base.generate(
                        &device,
                        &model,
                        params,
                        request,
                        &|_| false,
                        &mut |_| true,
                    )?;
                }
            }
        }
        for length in lengths {
            let zeros = || vec![0; length];
            let sequence = Sequence { ids: zeros(), targets: zeros(), first_keys: zeros() };
            log_likelihood(&device, &model, params, &sequence)?;
        }
        Ok(device.usage().extent)
    }

    /// Loads the model, and asks it.
    pub fn run(
        &self,
        device: &Device,
        precision: Precision,
        on_sequence: OnSequence<'_>,
    ) -> Result<EvaluationScores> {
        let (model, adapters) = self.base.load_adapted(device, precision, &|_| true)?;
        let params = &adapters.params;
        let tick = || check_cancelled(on_sequence());
        let texts = self.texts.map(|texts| self.score_texts(device, &model, params, texts, &tick));
        let (mut by_sum, mut by_length, mut exact) = (Vec::new(), Vec::new(), Vec::new());
        for question in &self.questions {
            match question {
                PreparedQuestion::Choices { sequences, question } => {
                    let mut likely = Vec::with_capacity(sequences.len());
                    for sequence in sequences {
                        likely.push(log_likelihood(device, &model, params, sequence)?);
                        tick()?;
                    }
                    by_sum.push(question.is_right(&likely, |_| 1.0));
                    by_length.push(question.is_right(&likely, |choice| choice.len().max(1) as f64));
                }
                PreparedQuestion::Exact { request, answer } => {
                    let written = self.write(device, &model, params, request)?;
                    exact.push(written.trim() == answer.trim());
                    tick()?;
                }
            }
        }
        let choices = (!by_sum.is_empty()).then(|| ChoiceScore {
            accuracy: RightShare::of(&by_sum),
            accuracy_by_length: RightShare::of(&by_length),
        });
        let exact_match = (!exact.is_empty()).then(|| RightShare::of(&exact));
        Ok(EvaluationScores { texts: texts.transpose()?, choices, exact_match })
    }

    fn score_texts(
        &self,
        device: &Device,
        model: &Llama,
        params: &Params,
        texts: &TextDataset,
        tick: &dyn Fn() -> Result<()>,
    ) -> Result<TextScore> {
        let (mut n_tokens, mut n_bytes, mut sum) = (0, 0, 0.0);
        for index in 0..texts.n_train() {
            let sequence = texts.train(index)?;
            sum -= log_likelihood(device, model, params, &sequence)?;
            let targets: Vec<u32> =
                sequence.targets.iter().copied().filter(|it| *it != IGNORE_INDEX).collect();
            n_tokens += targets.len() as u64;
            n_bytes += self.tokenizer.decode(&targets).len();
            tick()?;
        }
        let loss = sum / n_tokens as f64;
        let bits_per_byte = sum / std::f64::consts::LN_2 / n_bytes.max(1) as f64;
        Ok(TextScore { n_tokens, loss, perplexity: loss.exp(), bits_per_byte })
    }

    /// An answer, up to the end of its first line.
    fn write(
        &self,
        device: &Device,
        model: &Llama,
        params: &Params,
        request: &GenerationRequest,
    ) -> Result<String> {
        let ends = self.base.eos_token_ids();
        let is_end = |token: u32| ends.contains(&token) || self.tokenizer.is_eos(token);
        let (mut tokens, mut text) = (Vec::new(), String::new());
        let take = &mut |token| {
            tokens.push(token);
            text = self.tokenizer.decode(&tokens);
            !text.trim_start().contains('\n')
        };
        let written = self.base.generate(device, model, params, request, &is_end, take)?;
        if written.is_lost {
            return Err(TrainerError::OutputLost { what: "an answer".into() });
        }
        Ok(text.trim_start().lines().next().unwrap_or_default().to_owned())
    }
}

/// The log-probability of all targets together, in nats.
fn log_likelihood(
    device: &Device,
    model: &Llama,
    params: &Params,
    sequence: &Sequence,
) -> Result<f64> {
    let tape = Tape::inference(device, params, 0);
    let n = sequence.targets.iter().filter(|target| **target != IGNORE_INDEX).count();
    let sizes = [1, sequence.ids.len()];
    let ids = device.upload(sizes, &sequence.ids)?;
    let targets = device.upload(sizes, &sequence.targets)?;
    let first_keys = Some(&sequence.first_keys[..]);
    let loss = model.loss(&tape, &ids, &targets, first_keys, Recompute::None)?;
    let mean = f64::from(to_vec(loss.tensor())?.first().copied().unwrap_or(0.0));
    if !device.is_meta() && n > 0 && !mean.is_finite() {
        return Err(TrainerError::OutputLost { what: "the loss of a text".into() });
    }
    Ok(-mean * n as f64)
}
