//! Text encoders that are trained together with the denoiser. They stay loaded and run inside of a step; what the cache has of
//! them is replaced by what they give now, so that gradients flow through the condition.
//!
//! Only CLIP can be trained: it pads prompts to one length and is small. T5 and language models stay in the cache.

use compute::{Device, Dtype, Params, Tape};
use weights::BytesDoneFn;

use super::encoder::{TextEmbedding, TextEncoder};
use super::{EncoderSlot, Prompt, TextEncoders};
use crate::error::{Result, TrainerError};
use crate::model::adapter::{AdapterTarget, Adapters};
use crate::model::build::Precision;
use crate::model::diffusion::condition::{Condition, Conditions, OutputShape, TrainedOutput};
use crate::model::encoder::clip::{ClipOutput, ClipTextModel};
use crate::model::host::to_vec;
use crate::model::recompute::Recompute;

/// The adapter of a text encoder that is trained.
#[derive(Clone, Debug, PartialEq)]
pub struct EncoderAdapter {
    /// The encoder.
    pub name: String,
    /// By layer.
    pub targets: Vec<AdapterTarget>,
}

/// Which text encoders are trained, and how.
#[derive(Clone, Copy, Debug)]
pub struct EncoderTraining<'a> {
    /// The adapter of each.
    pub adapters: &'a [EncoderAdapter],
    /// What their initial matrices follow from.
    pub seed: u64,
}

/// Text encoders in training, loaded; none in most jobs.
#[derive(Default)]
pub struct TrainedEncoders(Vec<TrainedEncoder>);

struct TrainedEncoder {
    /// Its index among the family's.
    index: usize,
    model: ClipTextModel,
}

/// The token ids of some prompts, of equal length, for each text encoder in training.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrainedTokens {
    n_prompts: usize,
    /// By encoder, one prompt after the other.
    ids: Vec<Vec<u32>>,
}

impl TextEncoders {
    /// Checks that each of these text encoders is there and can be trained.
    pub fn check_trained(&self, training: EncoderTraining<'_>) -> Result<()> {
        let can_be: Vec<&str> = self.trainable().map(|(_, encoder)| encoder.spec.name).collect();
        let mut names = training.adapters.iter().map(|own| &*own.name);
        let Some(other) = names.find(|name| !can_be.contains(name)) else { return Ok(()) };
        let title = self.config.family().title;
        let problem = format!("adapter.text_encoders names {other}, which cannot be trained");
        let (problem, hint) = if can_be.is_empty() {
            (format!("{problem}; of {title} model none can"), "leave out adapter.text_encoders")
        } else {
            let hint = "name these alone: the embeddings of other text encoders stay in the cache";
            (format!("{problem}; of {title} model: {}", can_be.join(", ")), hint)
        };
        Err(TrainerError::Request { problem, hint })
    }

    /// Loads those that are trained, with adapters beside their layers.
    pub fn load_trained(
        &self,
        device: &Device,
        dtype: Dtype,
        training: EncoderTraining<'_>,
        adapters: &mut Adapters,
        tick: BytesDoneFn<'_>,
    ) -> Result<TrainedEncoders> {
        let load = |(index, encoder, own): (usize, &TextEncoder, &EncoderAdapter)| {
            let (component, targets) = (encoder.spec.component(), own.targets.clone());
            let seed = training.seed.wrapping_add(encoder.spec.position.into());
            let model = adapters.of_encoder(component, targets, seed, |adapters| {
                encoder.load_clip(device, Precision::plain(dtype), adapters, tick)
            })?;
            Ok(TrainedEncoder { index, model })
        };
        self.trained(training).map(load).collect::<Result<_>>().map(TrainedEncoders)
    }

    /// The tokens of prompts for those that are trained.
    pub fn trained_tokens(&self, training: EncoderTraining<'_>, prompts: &[&str]) -> TrainedTokens {
        let ids = |(_, encoder, _): (usize, &TextEncoder, &EncoderAdapter)| {
            let ids =
                |text: &&str| encoder.tokenizer.encode(&self.prompt(&Prompt::from(*text)).text).ids;
            prompts.iter().flat_map(ids).collect()
        };
        TrainedTokens { n_prompts: prompts.len(), ids: self.trained(training).map(ids).collect() }
    }

    /// Bytes of the files of those that are trained.
    pub fn trained_file_bytes(&self, training: EncoderTraining<'_>) -> u64 {
        self.trained(training).map(|(_, encoder, _)| encoder.part.file_bytes()).sum()
    }

    /// Conditions from the cache with what those in training make of the prompts now.
    pub fn with_trained<'m>(
        &self,
        tape: &Tape<'m>,
        trained: &'m TrainedEncoders,
        tokens: &TrainedTokens,
        cached: Conditions,
        recompute: Recompute,
    ) -> Result<Conditions> {
        if trained.0.is_empty() {
            return Ok(cached);
        }
        let outputs = trained.outputs(tape, tokens, recompute)?;
        self.layout().with_trained(tape, cached, &self.output_shapes(), &outputs)
    }

    /// The same of one prompt, for inference.
    pub fn condition_with_trained(
        &self,
        device: &Device,
        trained: &TrainedEncoders,
        params: &Params,
        tokens: &TrainedTokens,
        cached: &Condition,
    ) -> Result<Condition> {
        let tape = Tape::inference(device, params, 0);
        let (mut condition, shapes) = (cached.clone(), self.output_shapes());
        for TrainedOutput { index, tokens, pooled } in
            trained.outputs(&tape, tokens, Recompute::None)?
        {
            let (tokens, pooled) = (to_vec(tokens.tensor())?, to_vec(pooled.tensor())?);
            self.layout().put(&mut condition, &shapes, index, &TextEmbedding { tokens, pooled });
        }
        Ok(condition)
    }

    /// Those that can be trained, with their index.
    fn trainable(&self) -> impl Iterator<Item = (usize, &TextEncoder)> {
        let can_be = self.config.family().trainable_encoders;
        let all = self.slots.iter().enumerate();
        let all = all.filter_map(|(index, slot)| Some((index, slot.encoder.as_ref()?)));
        all.filter(|(_, encoder)| can_be.contains(&encoder.spec.name))
    }

    /// Those that are trained, with their index and adapter.
    fn trained<'a>(
        &'a self,
        training: EncoderTraining<'a>,
    ) -> impl Iterator<Item = (usize, &'a TextEncoder, &'a EncoderAdapter)> {
        self.trainable().filter_map(move |(index, encoder)| {
            let own = training.adapters.iter().find(|own| own.name == encoder.spec.name)?;
            Some((index, encoder, own))
        })
    }

    fn output_shapes(&self) -> Vec<OutputShape> {
        let shape = |slot: &EncoderSlot| {
            let widths = slot.encoder.as_ref().map(|encoder| encoder.part.config.widths());
            OutputShape { rows: slot.length, widths: widths.unwrap_or_default() }
        };
        self.slots.iter().map(shape).collect()
    }
}

impl TrainedEncoders {
    fn outputs<'m>(
        &'m self,
        tape: &Tape<'m>,
        TrainedTokens { n_prompts, ids }: &TrainedTokens,
        recompute: Recompute,
    ) -> Result<Vec<TrainedOutput>> {
        let output = |(TrainedEncoder { index, model }, ids): (&'m TrainedEncoder, &Vec<u32>)| {
            let ClipOutput { penultimate: tokens, pooled, .. } =
                model.forward(tape, ids, *n_prompts, recompute)?;
            Ok(TrainedOutput { index: *index, tokens, pooled })
        };
        self.0.iter().zip(ids).map(output).collect()
    }
}
