//! Writing a text with a compressed model: each token passes the narrow layers once, and the trunk only if it is kept.
//! Whether it is kept is decided when it comes, as in validation.
//!
//! Shapes: n next tokens of one text, D narrow width.

use compute::ops::Linear;
use compute::{Device, Dtype, Tape, Tensor, Var};

use super::forward::Compressor;
use super::gate::sigmoid;
use super::selection::CausalRule;
use super::{CompressorConfig, Selector};
use crate::error::Result;
use crate::model::llama::kv_cache::KvCache;
use crate::model::llama::{LlamaConfig, run_cached_blocks};

/// What a compressed model remembers of a text.
pub struct CompressedCache {
    encoder: KvCache,
    trunk: KvCache,
    decoder: KvCache,
    text: Vec<u32>,
    rule: CausalRule,
    kept: Vec<u32>,
    /// What the trunk made of the last kept position, [1, 1, D].
    last: Option<Tensor>,
}

impl CompressedCache {
    /// Kept positions of the text so far, ascending.
    pub fn kept(&self) -> &[u32] {
        &self.kept
    }

    /// Continues at another length of the same text: a dry run need not compute every token.
    pub(crate) fn skip_to(&mut self, n_tokens: usize) {
        self.encoder.skip_to(n_tokens);
        self.decoder.skip_to(n_tokens);
        self.text.resize(n_tokens, 0);
    }
}

impl Compressor {
    /// Empty, with room for a text of up to `max_tokens` tokens.
    pub fn new_cache(&self, device: &Device, max_tokens: usize) -> Result<CompressedCache> {
        let narrow = self.narrow_config();
        let of = |config: &LlamaConfig, room| KvCache::new(device, config, self.dtype, room);
        Ok(CompressedCache {
            encoder: of(&narrow, max_tokens)?,
            trunk: of(&self.config.trunk, max_kept(&self.config, max_tokens))?,
            decoder: of(&narrow, max_tokens)?,
            text: Vec::new(),
            rule: CausalRule::new(self.config.keep_one_in),
            kept: Vec::new(),
            last: None,
        })
    }

    /// The logits after the next tokens of a text, f32 of `[vocabulary]`.
    pub fn next_logits<'m>(
        &'m self,
        tape: &Tape<'m>,
        tokens: &[u32],
        cache: &mut CompressedCache,
    ) -> Result<Var> {
        let n = tokens.len();
        let (narrow, window) = (self.narrow_config(), Some(self.config.window));
        let x = self.embed(tape, &tape.device().upload([1, n], tokens)?)?;
        let encoder = &mut cache.encoder;
        let states = run_cached_blocks(&self.encoder, None, &narrow, tape, x, encoder, window)?;
        let x = tape.add(&self.trunk_states(tape, &states, tokens, cache)?, &states)?;
        drop(states);
        let decoder = &mut cache.decoder;
        let x = run_cached_blocks(&self.decoder, None, &narrow, tape, x, decoder, window)?;
        let x = tape.split_tokens(&x, n - 1..n)?;
        let x = tape.convert(&self.normed(tape, &x, &self.norm)?, Dtype::F32)?;
        Ok(tape.linear(&x, Linear::new(&self.tokens.var(tape)))?)
    }

    /// What the trunk made of the last kept position at or before each, [1, n, D].
    fn trunk_states<'m>(
        &'m self,
        tape: &Tape<'m>,
        states: &Var,
        tokens: &[u32],
        cache: &mut CompressedCache,
    ) -> Result<Var> {
        let (device, n, d) = (tape.device(), tokens.len(), self.config.width);
        let keys = self.keys(tape, states)?;
        let kept = self.keep(tokens, &keys, cache);
        let before = match &cache.last {
            Some(last) => Var::from(last.clone()),
            None => Var::from(device.zeros([1, 1, d], states.dtype())?),
        };
        let mut slots = before.clone();
        if !kept.is_empty() {
            let x = self.run_trunk_cached(tape, states, &kept, n, &mut cache.trunk)?;
            let mut parts = vec![before];
            for (slot, at) in kept.iter().enumerate() {
                let x = tape.split_tokens(&x, slot..slot + 1)?;
                let is_first = slot == 0 && cache.last.is_none();
                let is_smoothed = self.config.is_smoothed && !is_first;
                let x = match keys.get(*at as usize).filter(|_| is_smoothed) {
                    Some(key) => averaged(tape, &x, parts.last().expect("one before"), *key)?,
                    None => x,
                };
                parts.push(x);
            }
            cache.last = parts.last().map(|last| last.tensor().clone());
            slots = tape.concat_tokens(&parts.iter().collect::<Vec<_>>())?;
        }
        let slot = |at: u32| kept.partition_point(|kept| *kept <= at) as u32;
        let ids: Vec<u32> = (0..n as u32).map(slot).collect();
        Ok(tape.gather_tokens(&slots, &device.upload([1, n], &ids)?)?)
    }

    /// The policy's logits, if it has one.
    fn keys(&self, tape: &Tape<'_>, states: &Var) -> Result<Vec<f32>> {
        let Some(policy) = &self.policy else { return Ok(Vec::new()) };
        let logits = policy.logits(tape, states)?;
        if tape.device().is_meta() {
            return Ok(vec![0.0; states.shape().sizes()[1]]);
        }
        Ok(logits.tensor().read::<f32>()?)
    }

    /// Which of the next tokens are kept, counted from the first of them.
    fn keep(&self, tokens: &[u32], keys: &[f32], cache: &mut CompressedCache) -> Vec<u32> {
        let first = cache.text.len() as u32;
        cache.text.extend(tokens);
        let n = cache.text.len();
        let kept: Vec<u32> = match self.config.select {
            Selector::Policy => (0..)
                .zip(keys)
                .filter(|(_, key)| cache.rule.keeps(**key))
                .map(|(at, _)| at)
                .collect(),
            selector => {
                let room = max_kept(&self.config, n).min(n);
                let all = selector.select(&cache.text, self.config.keep_one_in, room);
                all.into_iter()
                    .filter(|at| (first..n as u32).contains(at))
                    .map(|at| at - first)
                    .collect()
            }
        };
        cache.kept.extend(kept.iter().map(|at| first + at));
        kept
    }

    /// Kept ones of states [1, n, D] through the trunk: [1, at least so many, D]. As many pass as could be kept, so that
    /// a dry run takes the same memory; what is too much is forgotten.
    fn run_trunk_cached<'m>(
        &'m self,
        tape: &Tape<'m>,
        states: &Var,
        kept: &[u32],
        n: usize,
        cache: &mut KvCache,
    ) -> Result<Var> {
        let n_before = cache.n_tokens();
        let mut padded = kept.to_vec();
        let most = max_kept(&self.config, n).min(n).min(cache.room());
        padded.resize(most.max(kept.len()), n as u32 - 1);
        let positions = tape.device().upload([1, padded.len()], &padded)?;
        let x = tape.gather_tokens(states, &positions)?;
        let x = self.trunk.in_proj.forward(tape, &x)?;
        let (blocks, config) = (&self.trunk.blocks, &self.config.trunk);
        let x = run_cached_blocks(blocks, None, config, tape, x, cache, None)?;
        cache.skip_to(n_before + kept.len());
        let x = self.normed(tape, &x, &self.trunk.norm)?;
        Ok(self.trunk.out_proj.forward(tape, &x)?)
    }

    /// The layers on one side.
    fn narrow_config(&self) -> LlamaConfig {
        LlamaConfig { num_hidden_layers: self.config.layers, ..self.config.narrow() }
    }
}

/// The most positions of a text that are kept without looking ahead.
fn max_kept(config: &CompressorConfig, n: usize) -> usize {
    match config.select {
        Selector::All => n,
        _ => CausalRule::max_kept(config.keep_one_in, n),
    }
}

/// A slot, smoothed by the one before: P of itself, 1 - P of that.
fn averaged(tape: &Tape<'_>, x: &Var, before: &Var, logit: f32) -> Result<Var> {
    let p = sigmoid(logit) as f32;
    Ok(tape.add(&tape.scale(x, p)?, &tape.scale(before, 1.0 - p)?)?)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::model::adapter::Adapters;
    use crate::model::build::Precision;
    use crate::model::compress::draw::Drawn;
    use crate::model::compress::{
        CompressedModel, CompressorInputs, CompressorMode, CompressorTraining, CompressorType,
    };
    use crate::model::host::{relative_error, to_vec};
    use crate::model::llama::preset::LlamaPreset;
    use crate::model::recompute::Recompute;

    /// Token by token and in pieces of any size, as in one pass over the whole text.
    #[test]
    fn cached_tokens_are_as_in_one_forward_pass() {
        let cases = [Selector::Policy, Selector::Stride, Selector::Spaces, Selector::All];
        for (select, is_smoothed) in
            cases.map(|select| (select, false)).into_iter().chain([(Selector::Policy, true)])
        {
            let config = CompressorConfig {
                model_type: CompressorType::Compressor,
                trunk: LlamaPreset::Tiny.config(128),
                width: 64,
                layers: 1,
                window: 8,
                keep_one_in: if select == Selector::All { 1 } else { 4 },
                select,
                mode: CompressorMode::Next,
                is_smoothed,
            };
            let training = CompressorTraining::default();
            let base = CompressedModel::random_init(Path::new("none"), config, training, 5);
            let device = Device::cpu(1, 128 << 20).unwrap();
            let (precision, mut adapters) = (Precision::plain(Dtype::F32), Adapters::none());
            let model = base.load(&device, precision, &mut adapters, &|_| true).unwrap();
            let tape = Tape::inference(&device, &adapters.params, 0);
            let text: Vec<u32> = b"some words of a text, and more of them after these"
                .iter()
                .map(|byte| u32::from(*byte))
                .collect();
            let mut cache = model.new_cache(&device, text.len()).unwrap();
            let mut from = 0;
            for to in [3, 4, 5, 21, 22, 23, 24, 40, text.len()] {
                let got = model.next_logits(&tape, &text[from..to], &mut cache).unwrap();
                from = to;
                let expected = whole(&model, &tape, &text[..to], cache.kept());
                let error = relative_error(&expected, &to_vec(got.tensor()).unwrap());
                assert!(error < 1e-4, "{select:?} {is_smoothed} {to}: {error}");
            }
            assert!(cache.kept().len() >= text.len() / 5, "{select:?}: {:?}", cache.kept());
        }
    }

    fn whole<'m>(model: &'m Compressor, tape: &Tape<'m>, text: &[u32], kept: &[u32]) -> Vec<f32> {
        let (n, first_keys) = (text.len(), vec![0; text.len()]);
        let inputs =
            CompressorInputs { sizes: [1, n], ids: text, targets: &[], first_keys: &first_keys };
        let device = tape.device();
        let narrow = model.narrow_inputs(device, &first_keys, n, Recompute::None).unwrap();
        let ids = device.upload([1, n], text).unwrap();
        let states = model.encode(tape, &ids, &narrow, Recompute::None).unwrap();
        let drawn = model.draw(tape, &states, inputs, &CompressorTraining::default()).unwrap();
        let drawn = Drawn { kept: vec![kept.to_vec()], ..drawn };
        let hidden = model.decode(tape, &states, &drawn, inputs, &narrow, Recompute::None).unwrap();
        let last = tape.split_tokens(&hidden, n - 1..n).unwrap();
        to_vec(tape.linear(&last, Linear::new(&model.tokens.var(tape))).unwrap().tensor()).unwrap()
    }
}
