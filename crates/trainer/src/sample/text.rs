//! Text generation: the prompt in one forward pass (prefill), then token by token with a KV cache. The same
//! function runs first on the meta device, which gives the peak memory; then an arena of that size is
//! enough. Works on token ids only.

use std::path::Path;

use compute::{Device, DeviceKind, Params, Quantisation, Tape};
use weights::BytesDoneFn;

use super::StageMemory;
use super::token_sampler::TokenSampler;
use crate::cost::{self, nearest_fitting};
use crate::error::{Result, TrainerError};
use crate::model::adapter::Adapters;
use crate::model::build::Precision;
use crate::model::host::to_vec;
use crate::model::llama::kv_cache::KvCache;
use crate::model::llama::language_model::LanguageModel;
use crate::model::llama::{Llama, LlamaConfig};

/// What to generate.
#[derive(Clone, Debug)]
pub struct GenerationRequest {
    /// The prompt's tokens.
    pub prompt: Vec<u32>,
    /// The most tokens to add.
    pub max_tokens: usize,
    /// How tokens are sampled.
    pub sampler: TokenSampler,
}

impl GenerationRequest {
    /// Checks the request against the model.
    pub fn check(&self, config: &LlamaConfig) -> Result<()> {
        let wrong = |problem: String, hint| Err(TrainerError::Request { problem, hint });
        self.sampler.check()?;
        if self.prompt.is_empty() || self.max_tokens == 0 {
            let problem = format!("{} tokens after {}", self.max_tokens, self.prompt.len());
            return wrong(problem, "give a prompt, and ask for one at least");
        }
        let (all, most) = (self.n_tokens(), config.max_position_embeddings);
        if all > most {
            let problem = format!("prompt and text are {all} tokens, the model is made for {most}");
            return wrong(problem, "shorten the prompt, or ask for fewer tokens");
        }
        let vocabulary = config.vocab_size;
        if let Some(id) = self.prompt.iter().find(|id| **id as usize >= vocabulary) {
            let problem = format!("token {id} of the prompt, the model knows {vocabulary}");
            return wrong(problem, "use the tokenizer that belongs to the model");
        }
        Ok(())
    }

    /// Tokens of prompt and text.
    fn n_tokens(&self) -> usize {
        self.prompt.len() + self.max_tokens
    }

    /// Tokens that a model reads: the last one is generated and never an input.
    pub(crate) fn n_inputs(&self) -> usize {
        self.n_tokens() - 1
    }
}

/// A model of texts as it lies on disk, which can be loaded to generate some.
pub trait GenerativeBase {
    /// The same on a device.
    type Model;

    /// What was opened; the name of a preset.
    fn path(&self) -> &Path;

    /// Tokens that end a text, besides the tokenizer's.
    fn eos_token_ids(&self) -> &[u32];

    /// Checks that it can generate a text.
    fn check_request(&self, request: &GenerationRequest) -> Result<()>;

    /// Loads the model with its adapter.
    fn load_adapted(
        &self,
        device: &Device,
        precision: Precision,
        tick: BytesDoneFn<'_>,
    ) -> Result<(Self::Model, Adapters)>;

    /// Generates a text on a device with memory for it.
    fn generate(
        &self,
        device: &Device,
        model: &Self::Model,
        params: &Params,
        request: &GenerationRequest,
        is_end: &dyn Fn(u32) -> bool,
        take: OnToken<'_>,
    ) -> Result<GenerationResult>;
}

impl GenerativeBase for LanguageModel {
    type Model = Llama;

    fn path(&self) -> &Path {
        &self.path
    }

    fn eos_token_ids(&self) -> &[u32] {
        &self.config.eos_token_ids
    }

    fn check_request(&self, request: &GenerationRequest) -> Result<()> {
        request.check(&self.config)
    }

    fn load_adapted(
        &self,
        device: &Device,
        precision: Precision,
        tick: BytesDoneFn<'_>,
    ) -> Result<(Llama, Adapters)> {
        self.load_adapted(device, precision, tick)
    }

    fn generate(
        &self,
        device: &Device,
        model: &Llama,
        params: &Params,
        request: &GenerationRequest,
        is_end: &dyn Fn(u32) -> bool,
        take: OnToken<'_>,
    ) -> Result<GenerationResult> {
        let cache = model.new_cache(device, request.n_inputs())?;
        let mut generator = TextGenerator { device, model, params, cache };
        generate(device, &mut generator, request, is_end, take)
    }
}

/// Peak bytes of loading a model and generating these texts one after the other, by a dry run. If that is more
/// than `limit`, the error names the nearest request that would fit.
pub fn plan_generation(
    base: &impl GenerativeBase,
    precision: Precision,
    requests: &[GenerationRequest],
    kind: DeviceKind,
    limit: usize,
) -> Result<usize> {
    let peak_bytes = peak(base, precision, requests, kind)?;
    if peak_bytes <= limit {
        return Ok(peak_bytes);
    }
    let quantised = Precision { base: Some(Quantisation::Nf4), ..precision };
    let weights = (precision.base != quantised.base)
        .then(|| ("--quantise nf4".to_owned(), (quantised, usize::MAX)));
    let most = requests.iter().map(|request| request.max_tokens).max().unwrap_or(0);
    let shorter = [most / 2, most / 4].into_iter().filter(|tokens| *tokens > 0).map(|tokens| {
        let typed = format!("--max-tokens {tokens}");
        match &weights {
            Some((change, (precision, _))) => (format!("{change} {typed}"), (*precision, tokens)),
            None => (typed, (precision, tokens)),
        }
    });
    let candidates: Vec<_> = weights.clone().into_iter().chain(shorter).collect();
    let remedy = nearest_fitting(limit, &candidates, |(precision, tokens), _| {
        let shorter = |request: &GenerationRequest| GenerationRequest {
            max_tokens: request.max_tokens.min(*tokens),
            ..request.clone()
        };
        peak(base, *precision, &requests.iter().map(shorter).collect::<Vec<_>>(), kind)
    })?;
    Err(cost::too_large(StageMemory { name: "writing", peak_bytes }, limit, remedy))
}

fn peak(
    base: &impl GenerativeBase,
    precision: Precision,
    requests: &[GenerationRequest],
    kind: DeviceKind,
) -> Result<usize> {
    let device = Device::meta(kind, cost::UNLIMITED);
    let (model, adapters) = base.load_adapted(&device, precision, &|_| true)?;
    for request in requests {
        base.generate(&device, &model, &adapters.params, request, &|_| false, &mut |_| true)?;
    }
    Ok(device.usage().extent)
}

/// Called with each new token, without the end-of-text token; returns whether to go on.
pub type OnToken<'a> = &'a mut dyn FnMut(u32) -> bool;

/// How a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GenerationResult {
    /// Tokens that were added.
    pub n_tokens: usize,
    /// Whether the model gave an end-of-text token.
    pub is_eos: bool,
    /// Whether the model's output stopped being finite, so that there is no next token.
    pub is_lost: bool,
}

/// A model that reads a text piece by piece, and remembers it.
pub trait TokenPredictor {
    /// The logits after the next tokens of the text.
    fn logits(&mut self, tokens: &[u32]) -> Result<Vec<f32>>;

    /// Continues at another length of the text: a dry run need not compute every token, and what stands behind is
    /// forgotten.
    fn skip_to(&mut self, n_tokens: usize);
}

/// Generates a text on a device with memory for it.
pub fn generate(
    device: &Device,
    predictor: &mut dyn TokenPredictor,
    request: &GenerationRequest,
    is_end: &dyn Fn(u32) -> bool,
    take: OnToken<'_>,
) -> Result<GenerationResult> {
    let GenerationRequest { prompt, max_tokens, sampler } = request;
    let mut logits = predictor.logits(prompt)?;
    let mut n_tokens = 0;
    loop {
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
        // No token takes more memory than the last: a dry run skips to it.
        if device.is_meta() {
            predictor.skip_to(request.n_inputs() - 1);
            n_tokens = max_tokens - 1;
        }
        logits = predictor.logits(&[token])?;
    }
}

/// A model with the KV cache of a text.
pub(super) struct TextGenerator<'a> {
    pub(super) device: &'a Device,
    pub(super) model: &'a Llama,
    pub(super) params: &'a Params,
    pub(super) cache: KvCache,
}

impl TokenPredictor for TextGenerator<'_> {
    fn logits(&mut self, tokens: &[u32]) -> Result<Vec<f32>> {
        let n = tokens.len();
        let tape = Tape::inference(self.device, self.params, 0);
        let ids = self.device.upload([1, n], tokens)?;
        let hidden = self.model.forward_cached(&tape, &ids, &mut self.cache)?;
        let last = tape.split_tokens(&hidden, n - 1..n)?;
        drop(hidden);
        Ok(to_vec(self.model.logits(&tape, &last)?.tensor())?)
    }

    fn skip_to(&mut self, n_tokens: usize) {
        self.cache.skip_to(n_tokens);
    }
}

#[cfg(test)]
mod tests {
    use compute::{Dtype, Quantisation};

    use super::*;
    use crate::model::host::relative_error;
    use crate::model::llama::tests::{OTHER_BLOCKS, golden, ids, recorded};

    const PLAIN: Precision = Precision::plain(Dtype::F32);

    fn request(name: &str, max_tokens: usize) -> GenerationRequest {
        let prompt = ids(name, "in.input_ids")[..24].to_vec();
        GenerationRequest { prompt, max_tokens, sampler: TokenSampler::greedy() }
    }

    fn text_of(
        base: &LanguageModel,
        request: &GenerationRequest,
        is_end: &dyn Fn(u32) -> bool,
    ) -> Vec<u32> {
        request.check(&base.config).unwrap();
        let device = Device::cpu(2, 64 << 20).unwrap();
        let (model, adapters) = base.load_adapted(&device, PLAIN, &|_| true).unwrap();
        let mut text = Vec::new();
        let take = &mut |token| {
            text.push(token);
            true
        };
        let params = &adapters.params;
        let written = base.generate(&device, &model, params, request, is_end, take).unwrap();
        let is_eos = text.len() < request.max_tokens;
        assert_eq!(written, GenerationResult { n_tokens: text.len(), is_eos, is_lost: false });
        text
    }

    #[test]
    fn texts_are_those_of_transformers() {
        for name in ["llama3", "qwen2", "qwen3"].into_iter().chain(OTHER_BLOCKS) {
            let (base, request) = (LanguageModel::open(&golden(name)).unwrap(), request(name, 16));
            let expected = ids(name, "greedy");
            assert_eq!(text_of(&base, &request, &|_| false), expected, "{name}");
            // All that comes before the end.
            let end = expected[5];
            let first = expected.iter().position(|token| *token == end).unwrap();
            assert_eq!(
                text_of(&base, &request, &|token| token == end),
                expected[..first],
                "{name}"
            );
        }
    }

    #[test]
    fn cached_tokens_are_as_in_one_forward_pass() {
        let device = Device::cpu(2, 64 << 20).unwrap();
        let base = LanguageModel::open(&golden("qwen3")).unwrap();
        let (model, adapters) = base.load_adapted(&device, PLAIN, &|_| true).unwrap();
        let (params, tokens) = (&adapters.params, ids("qwen3", "in.input_ids"));
        let cache = model.new_cache(&device, 24).unwrap();
        let mut generator = TextGenerator { device: &device, model: &model, params, cache };
        let expected = recorded("qwen3", "out.logits");
        for step in [0..7, 7..8, 8..9, 9..24] {
            let got = generator.logits(&tokens[step.clone()]).unwrap();
            let expected = &expected[(step.end - 1) * got.len()..step.end * got.len()];
            assert!(relative_error(expected, &got) < 1e-5, "{step:?}");
        }
        assert!(generator.logits(&tokens[..1]).is_err(), "there is no room for a 25th");
    }

    #[test]
    fn a_text_takes_what_was_planned() {
        let mut base = LanguageModel::open(&golden("qwen2")).unwrap();
        base.add_adapter(&golden("qwen2/peft")).unwrap();
        let requests = [request("qwen2", 40), request("qwen2", 9)];
        for (dtype, quantisation) in
            [(Dtype::F32, None), (Dtype::Bf16, None), (Dtype::F32, Some(Quantisation::Int8))]
        {
            let precision = Precision { base: quantisation, ..Precision::plain(dtype) };
            let planned =
                plan_generation(&base, precision, &requests, DeviceKind::cpu(2), usize::MAX)
                    .unwrap();
            let device = Device::cpu(2, planned).unwrap();
            let (model, adapters) = base.load_adapted(&device, precision, &|_| true).unwrap();
            for request in &requests {
                let params = &adapters.params;
                let written = base
                    .generate(&device, &model, params, request, &|_| false, &mut |_| true)
                    .unwrap();
                assert_eq!(written.n_tokens, request.max_tokens);
            }
            assert_eq!(device.usage().extent, planned, "{dtype} {quantisation:?}");
            let refused =
                plan_generation(&base, precision, &requests, DeviceKind::cpu(2), planned - 1);
            let error = refused.unwrap_err().to_string();
            assert!(error.starts_with("writing does not fit: needs"), "{error}");
        }
    }

    #[test]
    fn what_cannot_be_written_is_refused() {
        let config = LanguageModel::open(&golden("llama")).unwrap().config;
        let fine = request("llama", 4);
        let cases = [
            (GenerationRequest { prompt: vec![], ..fine.clone() }, "4 tokens after 0"),
            (GenerationRequest { max_tokens: 0, ..fine.clone() }, "0 tokens after 24"),
            (
                GenerationRequest { max_tokens: 233, ..fine.clone() },
                "257 tokens, the model is made for 256",
            ),
            (
                GenerationRequest { prompt: vec![512], ..fine },
                "token 512 of the prompt, the model knows 512",
            ),
        ];
        for (request, says) in cases {
            let error = request.check(&config).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }
}
