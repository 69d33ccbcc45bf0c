//! Texts generated during training.

use std::sync::{Mutex, PoisonError};

use compute::Device;

use super::{LanguageTask, TextBase};
use crate::config::Switch;
use crate::config::generate::GenerationConfig;
use crate::cost::{Cost, check_cancelled};
use crate::error::Result;
use crate::event::Event;
use crate::sample::text::GenerationRequest;
use crate::sample::token_sampler::TokenSampler;
use crate::task::traits::TrainableModel;

/// Generates sample texts.
pub(crate) struct SampleTextWriter<'a, B> {
    task: LanguageTask<'a, B>,
    /// Each prompt with its tokens.
    prompts: Vec<(&'a String, Vec<u32>)>,
}

impl<'a, B: TextBase> SampleTextWriter<'a, B> {
    /// Checks the prompts.
    pub fn new(task: LanguageTask<'a, B>) -> Result<Self> {
        let mut prompts = Vec::new();
        for prompt in &task.generate.prompts {
            let mut ids: Vec<u32> = task.tokenizer.bos().into_iter().collect();
            ids.extend(task.tokenizer.encode(prompt)?);
            if ids.is_empty() {
                // A new text starts after an end-of-sequence token.
                ids.extend(task.tokenizer.eos());
            }
            prompts.push((prompt, ids));
        }
        let writer = Self { task, prompts };
        for (number, (_, ids)) in writer.prompts.iter().enumerate() {
            task.base.check_request(&writer.request(ids, number))?;
        }
        Ok(writer)
    }

    fn request(&self, ids: &[u32], number: usize) -> GenerationRequest {
        let GenerationConfig { temperature, top_k, top_p, seed, .. } = *self.task.generate;
        let max_tokens = self.task.max_tokens;
        let sampler = TokenSampler {
            temperature: temperature as f32,
            top_k: match top_k {
                Switch::On(k) => Some(k),
                Switch::Off => None,
            },
            top_p: top_p as f32,
            seed: seed + number as u64,
        };
        GenerationRequest { prompt: ids.to_vec(), max_tokens, sampler }
    }

    /// Generates on the meta device; returns what it costs: of each text the first token, with the prompt, and
    /// the last, which takes the longest.
    pub fn dry_run(
        &self,
        device: &Device,
        trainable: TrainableModel<'_, B::Model>,
    ) -> Result<Cost> {
        let seen = Mutex::new(vec![device.work()]);
        self.write(device, trainable, 0, &|| {
            seen.lock().unwrap_or_else(PoisonError::into_inner).push(device.work());
            true
        })?;
        let seen = seen.into_inner().unwrap_or_else(PoisonError::into_inner);
        let since = |index: usize| seen[index + 1].since(&seen[index]);
        // With one token there is no last.
        let per_text = self.task.max_tokens.min(2);
        let times = |index: usize| {
            let is_last = per_text == 2 && index % 2 == 1;
            if is_last { self.task.max_tokens as f64 - 1.0 } else { 1.0 }
        };
        let works = (0..seen.len() - 1).map(|index| (times(index), since(index))).collect();
        Ok(Cost { works, read_bytes: 0 })
    }

    /// Generates a text for each prompt.
    pub fn write(
        &self,
        device: &Device,
        trainable: TrainableModel<'_, B::Model>,
        step: u64,
        should_continue: &(dyn Fn() -> bool + Sync),
    ) -> Result<Vec<Event>> {
        let tokenizer = self.task.tokenizer;
        let mut events = Vec::with_capacity(self.prompts.len());
        for (number, (prompt, ids)) in self.prompts.iter().enumerate() {
            let request = self.request(ids, number);
            let (mut written, mut is_wanted) = (Vec::new(), true);
            let mut take = |id| {
                written.push(id);
                is_wanted = should_continue();
                is_wanted
            };
            let TrainableModel { model, params, .. } = trainable;
            let is_end = |id| tokenizer.is_eos(id);
            let base = self.task.base;
            base.generate(device, model, params, &request, &is_end, &mut take)?;
            // Half a text is none.
            check_cancelled(is_wanted)?;
            if device.is_meta() {
                // A dry run skips to the last token.
                written.resize(self.task.max_tokens, 0);
            }
            let text = base.shown(device, model, params, ids, &written, tokenizer)?;
            let prompt = (*prompt).clone();
            events.push(Event::TextSample { step, prompt, text, seed: request.sampler.seed });
        }
        Ok(events)
    }
}
