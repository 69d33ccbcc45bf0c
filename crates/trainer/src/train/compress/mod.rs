//! Training a compressed language model: the task is that of any language model, with another model in it.

#[cfg(test)]
mod tests;

use compute::{Device, Params, Tape, Var};
use weights::{BytesDoneFn, Catalog};

use super::folder::RunFolder;
use super::language::{LanguagePipeline, TextBase, TextMicroBatch, own_vocabulary};
use super::{checkpoint, full};
use crate::config::RunConfig;
use crate::config::adapter::AdapterKind;
use crate::config::compress::CompressConfig;
use crate::error::{Result, TrainerError};
use crate::event::{EventSink, PolicyMetrics};
use crate::fingerprint::Fingerprint;
use crate::model::adapter::Adapters;
use crate::model::build::{Precision, TensorSpec};
use crate::model::compress::policy_stats::PolicyFigures;
use crate::model::compress::{
    CompressedModel, Compressor, CompressorConfig, CompressorInputs, CompressorMode,
    CompressorType, Estimator, Selector,
};
use crate::model::config::Unsupported;
use crate::model::llama::preset::LlamaPreset;
use crate::model::recompute::Recompute;
use crate::task::seed::{Purpose, seed};
use crate::text::Tokenizer;

/// Opens the model and the tokenizer of a job: a preset to train from scratch, or a folder that was exported before.
pub fn open(
    config: &RunConfig,
    compress: &CompressConfig,
    is_planned: bool,
) -> Result<LanguagePipeline<CompressedModel>> {
    let wrong = |problem: String, hint| Err(TrainerError::Request { problem, hint });
    if config.adapter.kind != AdapterKind::Full {
        let problem = "a compressed model is trained whole, and adapter.kind is not \"full\"";
        return wrong(problem.into(), "set adapter.kind = \"full\"");
    }
    let learns_by_draws = matches!(compress.estimator, Estimator::Reinforce | Estimator::Grpo);
    if compress.mode == CompressorMode::Reconstruct && !learns_by_draws {
        let problem = format!(
            "compress.mode is \"reconstruct\", and compress.estimator {:?} needs what the trunk makes of all tokens",
            compress.estimator
        );
        return wrong(problem, "set compress.estimator = \"reinforce\" or \"grpo\"");
    }
    let (text, _) = config.data.texts()?;
    let (path, training) = (&config.base.path, compress.training());
    let (tokenizer, vocabulary) = own_vocabulary(text, is_planned)?;
    let Some(preset) = LlamaPreset::by_path(path) else {
        let base = CompressedModel::open(path, training)?;
        if base.config.select != compress.select {
            let problem = format!(
                "compress.select is {:?}, the model in {} was trained with {:?}",
                compress.select,
                path.display(),
                base.config.select
            );
            return wrong(problem, "set compress.select to what the model was trained with");
        }
        if base.config.mode != compress.mode {
            let problem = format!(
                "compress.mode is {:?}, the model in {} was trained with {:?}",
                compress.mode,
                path.display(),
                base.config.mode
            );
            return wrong(problem, "set compress.mode to what the model was trained with");
        }
        if base.config.is_smoothed != is_smoothed(compress) {
            let trained = if base.config.is_smoothed { "with" } else { "without" };
            let problem = format!(
                "compress.estimator is {:?}, the model in {} was trained {trained} its smoothing",
                compress.estimator,
                path.display(),
            );
            return wrong(problem, "set compress.estimator to what the model was trained with");
        }
        return Ok(LanguagePipeline { base, tokenizer });
    };
    if !config.base.random_init {
        let problem = format!("base.path {} is a shape without weights", preset.name());
        return wrong(problem, "set base.random_init = true to train it from scratch");
    }
    let shape = shape(preset, vocabulary, compress);
    if let Err(Unsupported(problem)) = shape.check() {
        return wrong(problem, "change compress.width, or leave it out");
    }
    let from = seed(config.train.seed, Purpose::Weights);
    let base = CompressedModel::random_init(path, shape, training, from);
    Ok(LanguagePipeline { base, tokenizer })
}

/// The shape of a model whose trunk is a preset.
fn shape(preset: LlamaPreset, vocabulary: usize, compress: &CompressConfig) -> CompressorConfig {
    let trunk = preset.config(vocabulary);
    let half = (trunk.hidden_size / 2).next_multiple_of(trunk.head_dim);
    let is_compressed = compress.select != Selector::All;
    CompressorConfig {
        model_type: CompressorType::Compressor,
        width: compress.width.unwrap_or(half),
        layers: compress.layers,
        window: compress.window,
        keep_one_in: if is_compressed { compress.keep_one_in } else { 1 },
        select: compress.select,
        mode: compress.mode,
        is_smoothed: is_smoothed(compress),
        trunk,
    }
}

fn is_smoothed(compress: &CompressConfig) -> bool {
    compress.select == Selector::Policy && compress.estimator == Estimator::Ratio
}

impl TextBase for CompressedModel {
    fn fingerprint(&self) -> Result<Fingerprint> {
        self.fingerprint()
    }

    fn tensor_specs(&self) -> Result<Vec<TensorSpec>> {
        self.tensor_specs()
    }

    fn catalog(&self) -> Option<&Catalog> {
        self.catalog()
    }

    fn context_length(&self) -> usize {
        self.config.context_length()
    }

    /// Any: the trunk is made for its preset's context, of which there are N times as many tokens.
    fn check_length(&self, length: usize) -> Result<()> {
        let one_in = self.config.keep_one_in;
        if length >= one_in {
            return Ok(());
        }
        Err(TrainerError::Request {
            problem: format!("sequences of {length} tokens, of which one in {one_in} is kept"),
            hint: "set text.length higher, or compress.keep_one_in lower",
        })
    }

    fn load(
        &self,
        device: &Device,
        precision: Precision,
        adapters: &mut Adapters,
        tick: BytesDoneFn<'_>,
    ) -> Result<Compressor> {
        self.load(device, precision, adapters, tick)
    }

    fn loss<'m>(
        &self,
        model: &'m Compressor,
        tape: &Tape<'m>,
        TextMicroBatch { sizes, ids, targets, first_keys }: &TextMicroBatch,
        recompute: Recompute,
    ) -> Result<Var> {
        let inputs = CompressorInputs { sizes: *sizes, ids, targets, first_keys };
        Ok(model.loss(tape, inputs, &self.training, recompute)?.loss)
    }

    fn policy_metrics(&self, model: &Compressor, step: u64) -> Option<PolicyMetrics> {
        let figures = model.policy_figures()?;
        let PolicyFigures { entropy, same_places, word_ends, reward, advantage_spread } = figures;
        Some(PolicyMetrics { step, entropy, same_places, word_ends, reward, advantage_spread })
    }

    /// With a bar after each kept token.
    fn shown(
        &self,
        device: &Device,
        model: &Compressor,
        params: &Params,
        prompt: &[u32],
        written: &[u32],
        tokenizer: &Tokenizer,
    ) -> Result<String> {
        let all = [prompt, written].concat();
        let tape = Tape::inference(device, params, 0);
        let mut cache = model.new_cache(device, all.len())?;
        model.next_logits(&tape, &all, &mut cache)?;
        let (mut text, mut from) = (String::new(), 0);
        for at in cache.kept().iter().filter_map(|at| (*at as usize).checked_sub(prompt.len())) {
            text += &tokenizer.decode(&written[from..=at]);
            text.push('|');
            from = at + 1;
        }
        Ok(text + &tokenizer.decode(&written[from..]))
    }

    fn write_result(
        pipeline: LanguagePipeline<Self>,
        config: &RunConfig,
        step: u64,
        folder: &RunFolder,
        events: &EventSink<'_>,
    ) -> Result<()> {
        let checkpoint = folder.path.join(checkpoint::path(step));
        full::export_result(config, &checkpoint, events, |full, tick| {
            full.write_compressed_model(&pipeline, &folder.path.join(full::MODEL), tick)
        })
    }
}
