//! Text generation by a compressed model.

use std::path::Path;

use compute::{Device, Params, Tape};
use weights::BytesDoneFn;

use super::text::{
    GenerationRequest, GenerationResult, GenerativeBase, OnToken, TokenPredictor, generate,
};
use crate::error::{Result, TrainerError};
use crate::model::adapter::Adapters;
use crate::model::build::Precision;
use crate::model::compress::{CompressedCache, CompressedModel, Compressor, CompressorMode};
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
        if self.config.mode == CompressorMode::Reconstruct {
            return Err(TrainerError::Request {
                problem: format!(
                    "{} reconstructs texts and cannot continue them",
                    self.path.display()
                ),
                hint: "leave out generate.prompts, or train a model with compress.mode = \"next\"",
            });
        }
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

    fn generate(
        &self,
        device: &Device,
        model: &Compressor,
        params: &Params,
        request: &GenerationRequest,
        is_end: &dyn Fn(u32) -> bool,
        take: OnToken<'_>,
    ) -> Result<GenerationResult> {
        let cache = model.new_cache(device, request.n_inputs())?;
        let mut generator = CompressedGenerator { device, model, params, cache };
        generate(device, &mut generator, request, is_end, take)
    }
}

/// A compressed model with what it remembers of a text.
struct CompressedGenerator<'a> {
    device: &'a Device,
    model: &'a Compressor,
    params: &'a Params,
    cache: CompressedCache,
}

impl TokenPredictor for CompressedGenerator<'_> {
    fn logits(&mut self, tokens: &[u32]) -> Result<Vec<f32>> {
        let tape = Tape::inference(self.device, self.params, 0);
        Ok(to_vec(self.model.next_logits(&tape, tokens, &mut self.cache)?.tensor())?)
    }

    fn skip_to(&mut self, n_tokens: usize) {
        self.cache.skip_to(n_tokens);
    }
}
