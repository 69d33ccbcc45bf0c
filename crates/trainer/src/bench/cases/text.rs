//! A training step of a language model from scratch, on random tokens, for benchmarks without texts. A full
//! fine-tune, as a run would do it.

use compute::{Device, Dtype, RandomSequence};

use crate::config::RawConfig;
use crate::error::Result;
use crate::model::llama::preset::LlamaPreset;
use crate::model::recompute::Recompute;
use crate::task::session::{BatchPosition, MicroBatchStep, Session};
use crate::text::Sequence;
use crate::train::language::{LanguagePipeline, TextMicroBatch};

/// The benchmark.
#[derive(Clone, Copy, Debug)]
pub struct TextStep {
    /// The model's shape.
    pub preset: LlamaPreset,
    /// Vocabulary size.
    pub vocabulary: usize,
    /// Tokens of a sequence.
    pub length: usize,
    /// Documents that are packed into a sequence: each half of what the ones before it left, the last all.
    pub documents: usize,
    /// Sequences of a step.
    pub batch: usize,
    /// Format of activations; parameters are f32.
    pub dtype: Dtype,
    /// What is recomputed.
    pub recompute: Recompute,
}

impl TextStep {
    /// Gives `work` a function that takes a step and returns its loss.
    pub fn with_steps<T>(
        &self,
        device: &Device,
        work: impl FnOnce(&mut dyn FnMut() -> Result<f64>) -> T,
    ) -> Result<T> {
        let config = self.config()?;
        let pipeline = LanguagePipeline::random_init(self.preset, self.vocabulary)?;
        let task = pipeline.task(&config)?;
        let mut session = Session::new(device, &task, &config, &|_| true)?;
        let micro_batch = self.micro_batch();
        let mut taken = 0;
        Ok(work(&mut || {
            let position = BatchPosition { batch: taken, first_sample: 0 };
            let (micro_batch, recompute) = (&micro_batch, self.recompute);
            let step = MicroBatchStep { micro_batch, position, share: 1.0, recompute };
            let loss = session.accumulate(step)?;
            session.update(3e-4, taken, 1.0)?;
            taken += 1;
            Ok(loss)
        }))
    }

    fn config(&self) -> Result<crate::config::RunConfig> {
        let mut raw = RawConfig::empty();
        let dtype = match self.dtype {
            Dtype::Bf16 => "bf16",
            Dtype::F16 => "f16",
            _ => "f32",
        };
        for argument in [
            &format!("base.path={}", self.preset.name()),
            "base.random_init=true",
            "adapter.kind=full",
            "text.path=none",
            &format!("base.dtype={dtype}"),
            &format!("text.length={}", self.length),
            &format!("train.batch_size={}", self.batch),
        ] {
            raw.set(argument)?;
        }
        Ok(raw.resolve()?)
    }

    fn first_keys(&self) -> Vec<u32> {
        let mut first_keys = Vec::with_capacity(self.length);
        for others in (0..self.documents).rev() {
            let (begun, rest) = (first_keys.len(), self.length - first_keys.len());
            let length = if others == 0 { rest } else { rest / 2 };
            first_keys.resize(begun + length, begun as u32);
        }
        first_keys
    }

    fn micro_batch(&self) -> TextMicroBatch {
        let sequence = |number: usize| {
            let random = RandomSequence::new(0, number as u64);
            let ids = |from: usize| {
                let id = |at| random.word(at) % self.vocabulary as u32;
                (from..from + self.length).map(id).collect()
            };
            Sequence { ids: ids(0), targets: ids(1), first_keys: self.first_keys() }
        };
        TextMicroBatch::from_sequences(&(0..self.batch).map(sequence).collect::<Vec<_>>()).1
    }
}
