//! Qwen2.5-VL while it writes a caption: the prompt with its image, then token after token, each with the repetition penalty
//! of transformers' `RepetitionPenaltyLogitsProcessor`.

use std::collections::BTreeSet;

use compute::{Device, Params, Tape};

use crate::error::Result;
use crate::model::encoder::qwen25vl::vision_language::{LoadedVisionLanguage, VisionLanguageModel};
use crate::model::encoder::stack::PromptTokens;
use crate::model::host::to_vec;
use crate::model::llama::kv_cache::KvCache;
use crate::sample::text::TokenPredictor;

/// The model with the cache of a text.
pub(super) struct CaptionPredictor<'a> {
    pub device: &'a Device,
    pub model: &'a VisionLanguageModel,
    pub loaded: &'a LoadedVisionLanguage,
    pub params: &'a Params,
    pub cache: &'a mut KvCache,
    /// The prompt, until it was read.
    pub prompt: Option<PromptTokens>,
    /// Logits of tokens that occurred are divided by it; 1 changes nothing.
    pub repetition_penalty: f32,
    /// The tokens that occurred, those of the prompt among them.
    pub seen: BTreeSet<u32>,
}

impl TokenPredictor for CaptionPredictor<'_> {
    fn logits(&mut self, tokens: &[u32]) -> Result<Vec<f32>> {
        let (n, text) = (tokens.len(), &self.loaded.text);
        let tape = Tape::inference(self.device, self.params, 0);
        let hidden = match self.prompt.take() {
            Some(prompt) => self.model.read_prompt(&tape, self.loaded, &prompt, self.cache)?,
            None => text.forward_cached(&tape, &self.device.upload([1, n], tokens)?, self.cache)?,
        };
        let last = tape.split_tokens(&hidden, n - 1..n)?;
        drop(hidden);
        let mut logits = to_vec(text.logits(&tape, &last)?.tensor())?;
        self.seen.extend(tokens);
        penalise(&mut logits, &self.seen, self.repetition_penalty);
        Ok(logits)
    }

    fn skip_to(&mut self, n_tokens: usize) {
        self.cache.skip_to(n_tokens);
    }
}

/// Makes tokens that occurred less likely.
fn penalise(logits: &mut [f32], seen: &BTreeSet<u32>, penalty: f32) {
    for token in seen {
        if let Some(logit) = logits.get_mut(*token as usize) {
            *logit = if *logit < 0.0 { *logit * penalty } else { *logit / penalty };
        }
    }
}
