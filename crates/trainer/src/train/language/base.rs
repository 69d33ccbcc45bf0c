//! What tasks on texts differ in: the model. [`LanguageTask`](super::LanguageTask) and the data loader are the same for
//! all of them.

use compute::{Device, Params, Tape, Tensor, Var};
use weights::{BytesDoneFn, Catalog};

use super::{LanguagePipeline, TextMicroBatch};
use crate::config::RunConfig;
use crate::config::adapter::AdapterKind;
use crate::error::Result;
use crate::event::{Event, EventSink, Phase, PolicyMetrics};
use crate::export::language;
use crate::fingerprint::Fingerprint;
use crate::model::adapter::Adapters;
use crate::model::adapter::read::AdapterFile;
use crate::model::build::{Precision, TensorSpec};
use crate::model::llama::Llama;
use crate::model::llama::language_model::LanguageModel;
use crate::model::recompute::Recompute;
use crate::sample::text::GenerativeBase;
use crate::text::Tokenizer;
use crate::train::folder::RunFolder;
use crate::train::{checkpoint, full};

/// A model of texts as it lies on disk, or as it will be initialised.
pub trait TextBase: GenerativeBase + Sized {
    /// Identifies the model.
    fn fingerprint(&self) -> Result<Fingerprint>;

    /// All of its tensors.
    fn tensor_specs(&self) -> Result<Vec<TensorSpec>>;

    /// What its files hold; nothing for a preset.
    fn catalog(&self) -> Option<&Catalog>;

    /// Tokens of the longest text that it is made for.
    fn context_length(&self) -> usize;

    /// Checks that it can compute texts of this length.
    fn check_length(&self, length: usize) -> Result<()>;

    /// Loads the model, with adapters beside its layers.
    fn load(
        &self,
        device: &Device,
        precision: Precision,
        adapters: &mut Adapters,
        tick: BytesDoneFn<'_>,
    ) -> Result<Self::Model>;

    /// The mean cross entropy of the tokens that count.
    fn loss<'m>(
        &self,
        model: &'m Self::Model,
        tape: &Tape<'m>,
        micro_batch: &TextMicroBatch,
        recompute: Recompute,
    ) -> Result<Var>;

    /// What its policy did since it was last asked, if it has one.
    fn policy_metrics(&self, _: &Self::Model, _step: u64) -> Option<PolicyMetrics> {
        None
    }

    /// A generated text as it is shown.
    fn shown(
        &self,
        _: &Device,
        _: &Self::Model,
        _: &Params,
        _prompt: &[u32],
        written: &[u32],
        tokenizer: &Tokenizer,
    ) -> Result<String> {
        Ok(tokenizer.decode(written))
    }

    /// Exports the result of a run that is done.
    fn write_result(
        pipeline: LanguagePipeline<Self>,
        config: &RunConfig,
        step: u64,
        folder: &RunFolder,
        events: &EventSink<'_>,
    ) -> Result<()>;
}

impl TextBase for LanguageModel {
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
        self.config.max_position_embeddings
    }

    fn check_length(&self, _length: usize) -> Result<()> {
        Ok(())
    }

    fn load(
        &self,
        device: &Device,
        precision: Precision,
        adapters: &mut Adapters,
        tick: BytesDoneFn<'_>,
    ) -> Result<Llama> {
        self.load(device, precision, adapters, tick)
    }

    fn loss<'m>(
        &self,
        model: &'m Llama,
        tape: &Tape<'m>,
        TextMicroBatch { sizes, ids, targets, first_keys }: &TextMicroBatch,
        recompute: Recompute,
    ) -> Result<Var> {
        let upload =
            |values: &[u32]| -> Result<Tensor> { Ok(tape.device().upload(*sizes, values)?) };
        let ids = upload(ids)?;
        model.loss(tape, &ids, &upload(targets)?, Some(first_keys), recompute)
    }

    /// An adapter for PEFT, or the whole model.
    fn write_result(
        mut pipeline: LanguagePipeline<Self>,
        config: &RunConfig,
        step: u64,
        folder: &RunFolder,
        events: &EventSink<'_>,
    ) -> Result<()> {
        let checkpoint = folder.path.join(checkpoint::path(step));
        if config.adapter.kind == AdapterKind::Full {
            return full::export_result(config, &checkpoint, events, |full, tick| {
                full.write_language_model(&pipeline, &folder.path.join(full::MODEL), tick)
            });
        }
        events.emit(Event::Phase { name: Phase::Export })?;
        let base = &mut pipeline.base;
        // Whether its values can be used was judged before.
        base.take_adapter(AdapterFile::open(&checkpoint)?.with_any_values(true))?;
        let exported = language::write_adapter(base, &folder.path.join("adapter"))?;
        let path = exported.path.strip_prefix(&folder.path).unwrap_or(&exported.path).into();
        let (format, layers) = ("peft".into(), exported.n_layers);
        events.emit(Event::Exported { format, path, layers })
    }
}
