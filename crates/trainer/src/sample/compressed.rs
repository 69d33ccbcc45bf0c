//! Text generation by a compressed model.

use std::path::Path;

use compute::{Device, Params, Tape};
use weights::BytesDoneFn;

use super::text::{GenerationRequest, GenerationResult, GenerativeBase, OnToken};
use crate::error::Result;
use crate::model::adapter::Adapters;
use crate::model::build::Precision;
use crate::model::compress::{CompressedModel, Compressor};
use crate::model::host::to_vec;
use crate::model::llama::LlamaConfig;

impl GenerativeBase for CompressedModel {
    type Model = Compressor;

    fn path(&self) -> &Path {
        &self.path
    }

    fn eos_token_ids(&self) -> &[u32] {
        &self.config.trunk.eos_token_ids
    }

    fn check_request(&self, request: &GenerationRequest) -> Result<()> {
        let trunk = &self.config.trunk;
        let max_position_embeddings = self.config.context_length();
        request.check(&LlamaConfig { max_position_embeddings, ..trunk.clone() })
    }

    /// It has no adapters.
    fn load_adapted(
        &self,
        device: &Device,
        precision: Precision,
        tick: BytesDoneFn<'_>,
    ) -> Result<(Compressor, Adapters)> {
        let mut adapters = Adapters::none();
        Ok((self.load(device, precision, &mut adapters, tick)?, adapters))
    }

    /// Every token by a forward pass of the whole text: narrow layers have no cache of their window yet.
    fn generate(
        &self,
        device: &Device,
        model: &Compressor,
        params: &Params,
        GenerationRequest { prompt, max_tokens, sampler }: &GenerationRequest,
        is_end: &dyn Fn(u32) -> bool,
        take: OnToken<'_>,
    ) -> Result<GenerationResult> {
        let mut text = prompt.clone();
        let mut n_tokens = 0;
        loop {
            let tape = Tape::inference(device, params, 0);
            let (logits, _) = model.next_logits(&tape, &text)?;
            let logits = to_vec(logits.tensor())?;
            let is_lost = !logits.iter().all(|logit| logit.is_finite());
            let token = sampler.sample(&logits, n_tokens);
            let is_eos = !is_lost && is_end(token);
            if is_lost || is_eos {
                return Ok(GenerationResult { n_tokens, is_eos, is_lost });
            }
            n_tokens += 1;
            if !take(token) || n_tokens == *max_tokens {
                return Ok(GenerationResult { n_tokens, is_eos, is_lost });
            }
            text.push(token);
            // No token takes more memory than the last: a dry run skips to it.
            if device.is_meta() {
                text.resize(prompt.len() + max_tokens - 1, 0);
                n_tokens = max_tokens - 1;
            }
        }
    }
}
