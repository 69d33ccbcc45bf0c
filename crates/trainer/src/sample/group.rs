//! Completions of one prompt, made together: the prompt goes through the model once, then the next token of all of them
//! in one forward pass with a KV cache. They end one by one; what has ended is computed on until all have, and thrown
//! away, so that all of them have one length in the cache.

use compute::{Device, Params, Tape};

use super::token_sampler::TokenSampler;
use crate::error::{Result, TrainerError};
use crate::model::host::to_vec;
use crate::model::llama::Llama;
use crate::model::llama::kv_cache::KvCache;

/// What to complete.
pub struct GroupRequest<'a> {
    /// The prompt's tokens.
    pub prompt: &'a [u32],
    /// Completions.
    pub n_texts: usize,
    /// The most tokens of each.
    pub max_tokens: usize,
    /// Tokens that the cache has room for: prompt and completion but for the last.
    pub room: usize,
    /// How tokens are drawn.
    pub sampler: TokenSampler,
    /// Uniform numbers, by the number of the text and of its token.
    pub uniform: &'a dyn Fn(usize, usize) -> f32,
    /// Whether a token ends a text.
    pub is_end: &'a dyn Fn(u32) -> bool,
}

/// A completion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Completion {
    /// Its tokens, with the one that ends it.
    pub ids: Vec<u32>,
    /// Whether it ended by itself.
    pub is_eos: bool,
}

/// A model that reads some texts which begin with the same prompt.
pub struct GroupGenerator<'a> {
    device: &'a Device,
    model: &'a Llama,
    params: &'a Params,
    cache: KvCache,
    n_texts: usize,
}

impl<'a> GroupGenerator<'a> {
    /// Takes the memory for their keys and values.
    pub fn new(
        device: &'a Device,
        model: &'a Llama,
        params: &'a Params,
        room: usize,
        n_texts: usize,
    ) -> Result<Self> {
        let cache = model.new_group_cache(device, room, n_texts)?;
        Ok(Self { device, model, params, cache, n_texts })
    }

    /// Reads the prompt; the logits after it, of all texts.
    pub fn begin(&mut self, prompt: &[u32]) -> Result<Vec<f32>> {
        let n = prompt.len();
        let tape = Tape::inference(self.device, self.params, 0);
        let ids = self.device.upload([1, n], prompt)?;
        let hidden = self.model.forward_cached(&tape, &ids, &mut self.cache)?;
        let last = tape.split_tokens(&hidden, n - 1..n)?;
        drop(hidden);
        Ok(to_vec(self.model.logits(&tape, &last)?.tensor())?)
    }

    /// Reads the next token of each text; the logits after it, text by text.
    pub fn next(&mut self, tokens: &[u32]) -> Result<Vec<f32>> {
        let tape = Tape::inference(self.device, self.params, 0);
        let ids = self.device.upload([self.n_texts, 1], tokens)?;
        let hidden = self.model.forward_cached(&tape, &ids, &mut self.cache)?;
        Ok(to_vec(self.model.logits(&tape, &hidden)?.tensor())?)
    }

    /// Goes on before the last token that there is room for, which takes the most: for a dry run.
    pub fn skip_to_last(&mut self) {
        let last = self.cache.n_tokens() + self.cache.room() - 1;
        self.cache.skip_to(last);
    }
}

/// Completes a prompt several times.
pub fn complete(
    device: &Device,
    model: &Llama,
    params: &Params,
    request: &GroupRequest<'_>,
) -> Result<Vec<Completion>> {
    let GroupRequest { prompt, n_texts, max_tokens, room, sampler, uniform, is_end } = *request;
    let mut generator = GroupGenerator::new(device, model, params, room, n_texts)?;
    let first = generator.begin(prompt)?;
    let vocabulary = first.len();
    let mut logits = first.repeat(n_texts);
    let mut texts = vec![Completion { ids: Vec::new(), is_eos: false }; n_texts];
    for place in 0..max_tokens {
        let mut next = Vec::with_capacity(n_texts);
        for (index, (text, logits)) in texts.iter_mut().zip(logits.chunks(vocabulary)).enumerate() {
            if !text.is_eos {
                if !logits.iter().all(|logit| logit.is_finite()) {
                    return Err(TrainerError::OutputLost { what: "a completion".into() });
                }
                let token = sampler.draw(logits, uniform(index, place));
                text.ids.push(token);
                text.is_eos = is_end(token);
            }
            next.push(text.ids[text.ids.len() - 1]);
        }
        if place + 1 == max_tokens || texts.iter().all(|text| text.is_eos) {
            break;
        }
        logits = generator.next(&next)?;
    }
    Ok(texts)
}

#[cfg(test)]
mod tests {
    use compute::Dtype;

    use super::*;
    use crate::model::build::Precision;
    use crate::model::llama::language_model::LanguageModel;
    use crate::model::llama::tests::{OTHER_BLOCKS, golden, ids};

    /// Texts of transformers, which decodes greedily, and each text as if it were alone.
    #[test]
    fn texts_of_a_group_are_as_if_each_were_alone() {
        for name in ["llama3", "qwen2", "qwen3"].into_iter().chain(OTHER_BLOCKS) {
            let base = LanguageModel::open(&golden(name)).unwrap();
            let device = Device::cpu(2, 64 << 20).unwrap();
            let precision = Precision::plain(Dtype::F32);
            let (model, adapters) = base.load_adapted(&device, precision, &|_| true).unwrap();
            let (prompt, expected) = (&ids(name, "in.input_ids")[..24], ids(name, "greedy"));
            let texts = |n_texts, first: usize, temperature, ends: u32| {
                let request = GroupRequest {
                    prompt,
                    n_texts,
                    max_tokens: 16,
                    room: 40,
                    sampler: TokenSampler { temperature, ..TokenSampler::greedy() },
                    uniform: &|text, place| ((37 * (first + text) + 11 * place) % 97) as f32 / 97.0,
                    is_end: &|token| token == ends,
                };
                complete(&device, &model, &adapters.params, &request).unwrap()
            };
            for text in texts(3, 0, 0.0, u32::MAX) {
                assert_eq!(text, Completion { ids: expected.clone(), is_eos: false }, "{name}");
            }
            let end = expected[5];
            let n = expected.iter().position(|token| *token == end).unwrap() + 1;
            let ended = Completion { ids: expected[..n].into(), is_eos: true };
            assert_eq!(texts(2, 0, 0.0, end), vec![ended; 2], "{name}");
            let together = texts(4, 0, 1.0, end);
            assert!(together[1] != together[0], "{name}: {together:?}");
            for (number, text) in together.iter().enumerate() {
                assert_eq!(texts(1, number, 1.0, end)[0], *text, "{name} {number}");
            }
        }
    }
}
