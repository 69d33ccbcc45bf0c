//! The data loader of texts: token sequences in an order that follows from the seed.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use compute::Device;

use super::samples::SampleTextWriter;
use super::{LanguageTask, SequenceLength, TextBase, TextMicroBatch};
use crate::config::RunConfig;
use crate::config::text::TextConfig;
use crate::data::BatchSampler;
use crate::error::Result;
use crate::event::Event;
use crate::fingerprint::Fingerprint;
use crate::progress;
use crate::task::prefetch::Prefetch;
use crate::task::traits::{self, HeldOutPass, PrefetchedBatches, Task, TrainBatch, TrainableModel};
use crate::text::{RecordKind, Sequence, TextDataRequest, TextDataset};

/// Token sequences and their order.
pub(crate) struct TextLoader<'a, B> {
    texts: Arc<TextDataset>,
    order: BatchSampler,
    size: SequenceLength,
    /// Texts generated during training.
    samples: Option<SampleTextWriter<'a, B>>,
}

impl<'a, B: TextBase> TextLoader<'a, B> {
    /// Of tokenised texts.
    pub fn new(task: LanguageTask<'a, B>, config: &RunConfig, texts: TextDataset) -> Result<Self> {
        let size = SequenceLength(task.text.length);
        let samples = vec![(size, 1); texts.n_train()];
        Ok(Self {
            order: BatchSampler::new(&samples, config.train.batch_size, config.train.seed),
            texts: Arc::new(texts),
            size,
            samples: task.makes_samples().then(|| SampleTextWriter::new(task)).transpose()?,
        })
    }
}

/// Tokenises the texts of a job, or finds them in the cache.
pub fn open_texts<B>(
    task: &LanguageTask<'_, B>,
    config: &RunConfig,
    on_progress: progress::ProgressFn<'_>,
) -> Result<TextDataset> {
    let TextConfig { path, length, token_format: width, validation: held_out, .. } = task.text;
    let request = TextDataRequest {
        path: path.clone(),
        kind: RecordKind::Texts,
        follow_links: task.text.follow_links,
        width: *width,
        length: *length,
        held_out: held_out.clone(),
        seed: config.train.seed,
        folder: config.cache_folder(),
    };
    TextDataset::open(&request, task.tokenizer, on_progress)
}

impl<'a, B: TextBase> traits::DataLoader for TextLoader<'a, B> {
    type Task = LanguageTask<'a, B>;
    type Sample = Sequence;

    fn fingerprint(&self) -> Fingerprint {
        self.texts.fingerprint()
    }

    fn n_train(&self) -> usize {
        self.texts.n_train()
    }

    fn n_held_out(&self) -> usize {
        self.texts.n_held_out()
    }

    fn batches_per_epoch(&self) -> u64 {
        self.order.batches_per_epoch()
    }

    fn read_from(&self, number: u64) -> PrefetchedBatches<Self> {
        let (texts, mut order, size) = (Arc::clone(&self.texts), self.order.clone(), self.size);
        Prefetch::begin(number, move |number| {
            let samples = order.batch(number).into_iter().map(|index| texts.train(index));
            Ok(TrainBatch { number, samples: samples.collect::<Result<_>>()?, size })
        })
    }

    /// As if every token counted.
    fn expected_weight(&mut self, numbers: Range<u64>) -> f64 {
        let n: usize = numbers.map(|number| self.order.batch(number).len()).sum();
        (n * self.size.0) as f64
    }

    fn micro_batch(&self, samples: &[Sequence]) -> Result<(f64, TextMicroBatch)> {
        Ok(TextMicroBatch::from_sequences(samples))
    }

    fn held_out_passes(&self) -> BTreeMap<SequenceLength, Vec<HeldOutPass>> {
        let all = (0..self.n_held_out()).flat_map(|index| HeldOutPass::all(index, 1));
        [(self.size, all.collect())].into()
    }

    fn held_out(&self, passes: &[HeldOutPass]) -> Result<(f64, TextMicroBatch)> {
        let sequences = passes.iter().map(|pass| self.texts.held_out(pass.sample));
        Ok(TextMicroBatch::from_sequences(&sequences.collect::<Result<Vec<_>>>()?))
    }

    fn write_samples(
        &self,
        device: &Device,
        trainable: TrainableModel<'_, B::Model>,
        _: &Path,
        step: u64,
        should_continue: &(dyn Fn() -> bool + Sync),
    ) -> Result<Vec<Event>> {
        match &self.samples {
            Some(writer) => writer.write(device, trainable, step, should_continue),
            None => Ok(Vec::new()),
        }
    }
}
