//! What each model computes from the inputs of reference data.

use compute::ops::IGNORE_INDEX;
use compute::{Dtype, Shape, Tape, Tensor, Var};

use super::reference_data::ReferenceData;
use crate::error::{Result, TrainerError};
use crate::model::adapter::read::Component;
use crate::model::build::ModelBuilder;
use crate::model::config::Unsupported;
use crate::model::diffusion::condition::{Conditions, POOLED, TOKENS};
use crate::model::diffusion::denoiser::{Denoiser, DenoiserInput, DenoiserOutput};
use crate::model::diffusion::vae::{LatentShape, LatentStatistics};
use crate::model::encoder::clip::{self, ClipTextModel};
use crate::model::encoder::qwen25vl::Qwen25VlEncoder;
use crate::model::encoder::t5::T5Encoder;
use crate::model::host::to_vec;
use crate::model::llama::Llama;
use crate::model::recompute::Recompute;
use crate::model::vae::{VaeConfig, VaeDecoder, VaeEncoder, flux2};
use crate::objective::flow::Timestep;

/// A model that reference data exists for.
pub trait VerifiableModel {
    /// What adapters call it.
    const COMPONENT: Component = Component::TextEncoder(1);

    /// Its outputs, as the reference lays them out.
    fn outputs<'m>(
        &'m self,
        tape: &Tape<'m>,
        golden: &ReferenceData,
        dtype: Dtype,
    ) -> Result<NamedOutputs>;

    /// Outputs that the loss is computed from.
    fn trained<'m>(
        &'m self,
        _: &Tape<'m>,
        _: &ReferenceData,
        _: Dtype,
    ) -> Result<Vec<(&'static str, Var)>> {
        Ok(Vec::new())
    }

    /// A loss other than the difference from a target.
    fn loss<'m>(&'m self, _: &Tape<'m>, _: &ReferenceData) -> Result<Option<Var>> {
        Ok(None)
    }

    /// A tensor of the reference in the layout of [`Self::trained`].
    fn arrange(&self, _: &Tape<'_>, reference: Tensor) -> Result<Tensor> {
        Ok(reference)
    }
}

/// Outputs by name.
pub type NamedOutputs = Vec<(&'static str, Vec<f32>)>;

impl VerifiableModel for Denoiser {
    const COMPONENT: Component = Component::Transformer;

    fn outputs<'m>(
        &'m self,
        tape: &Tape<'m>,
        golden: &ReferenceData,
        dtype: Dtype,
    ) -> Result<NamedOutputs> {
        let predicted = predict(self, tape, golden, dtype, Recompute::None)?;
        let is_packed = !golden.sizes.is_empty();
        let found = if is_packed { predicted.tokens } else { predicted.latents(tape)? };
        Ok(vec![("sample", to_vec(found.tensor())?)])
    }

    fn trained<'m>(
        &'m self,
        tape: &Tape<'m>,
        golden: &ReferenceData,
        dtype: Dtype,
    ) -> Result<Vec<(&'static str, Var)>> {
        // With gradient checkpointing, so that it is compared with the reference too.
        Ok(vec![("sample", predict(self, tape, golden, dtype, Recompute::Block)?.tokens)])
    }

    fn arrange(&self, tape: &Tape<'_>, reference: Tensor) -> Result<Tensor> {
        match reference.shape().sizes() {
            // Tokens already.
            [_, _, _] => Ok(reference),
            _ => Denoiser::patchify(self, tape, reference),
        }
    }
}

/// Our names of a condition's tensors, and diffusers' names.
const GIVEN: [(&str, &str); 2] =
    [(TOKENS, "in.encoder_hidden_states"), (POOLED, "in.pooled_projections")];

/// Which tokens of a prompt count.
const MASK: &str = "in.encoder_hidden_states_mask";

fn predict<'m>(
    model: &'m Denoiser,
    tape: &Tape<'m>,
    golden: &ReferenceData,
    dtype: Dtype,
    recompute: Recompute,
) -> Result<DenoiserOutput> {
    let device = tape.device();
    let images = golden.latents(model, tape, dtype)?;
    let (latents, references) = images.split_first().expect("there is the one that is denoised");
    let given = GIVEN.into_iter().filter(|(_, theirs)| golden.catalog.find(theirs).is_ok());
    let tensor = |(ours, theirs)| Ok((ours, golden.tensor(device, theirs, dtype)?));
    let mut condition = Conditions::from_tensors(given.map(tensor).collect::<Result<Vec<_>>>()?);
    if golden.has(MASK) {
        condition = condition.with_lengths(TOKENS, golden.lengths(MASK)?);
    }
    let (_, timesteps) = golden.floats("in.timestep")?;
    // Transformers with packed latents take sigma as the timestep, others 1000 times sigma.
    let is_sigma = !golden.sizes.is_empty();
    let timestep = |time: &f32| match *time {
        time if is_sigma => Timestep { sigma: time, t: 1000.0 * time },
        time => Timestep { sigma: time / 1000.0, t: time },
    };
    let timesteps: Vec<Timestep> = timesteps.iter().map(timestep).collect();
    let scales = golden.floats("in.guidance").ok();
    let guidance = scales.as_ref().map(|(_, scales)| &scales[..]);
    let input = DenoiserInput {
        latents,
        references,
        timesteps: &timesteps,
        condition: &condition,
        guidance,
        time_dtype: Dtype::F32,
    };
    model.predict(tape, input, recompute)
}

impl VerifiableModel for Llama {
    const COMPONENT: Component = Component::Language;

    fn outputs<'m>(
        &'m self,
        tape: &Tape<'m>,
        golden: &ReferenceData,
        _: Dtype,
    ) -> Result<NamedOutputs> {
        let hidden =
            self.hidden_states(tape, &golden.tokens(tape.device())?, None, Recompute::None)?;
        let logits = self.logits(tape, &hidden)?;
        let of = |var: &Var| to_vec(var.tensor());
        Ok(vec![("hidden_states_last", of(&hidden)?), ("logits", of(&logits)?)])
    }

    fn trained<'m>(
        &'m self,
        tape: &Tape<'m>,
        golden: &ReferenceData,
        _: Dtype,
    ) -> Result<Vec<(&'static str, Var)>> {
        let hidden =
            self.hidden_states(tape, &golden.tokens(tape.device())?, None, Recompute::None)?;
        Ok(vec![("logits", self.logits(tape, &hidden)?)])
    }

    /// Of every token after the first, with gradient checkpointing, so that it is compared with the reference too.
    fn loss<'m>(&'m self, tape: &Tape<'m>, golden: &ReferenceData) -> Result<Option<Var>> {
        let ids = golden.tokens(tape.device())?;
        let (rows, mut targets) = golden.ids("in.input_ids")?;
        for row in targets.chunks_mut(ids.shape().width()) {
            row.rotate_left(1);
            row[ids.shape().width() - 1] = IGNORE_INDEX;
        }
        let targets = tape.device().upload([rows, ids.shape().width()], &targets)?;
        Llama::loss(self, tape, &ids, &targets, None, Recompute::Block).map(Some)
    }
}

impl VerifiableModel for ClipTextModel {
    fn outputs<'m>(
        &'m self,
        tape: &Tape<'m>,
        golden: &ReferenceData,
        _: Dtype,
    ) -> Result<NamedOutputs> {
        let (samples, ids) = golden.ids("in.input_ids")?;
        let clip::ClipOutput { last, penultimate, pooled } =
            self.forward(tape, &ids, samples, Recompute::None)?;
        let of = |var: &Var| to_vec(var.tensor());
        Ok(vec![
            ("text_embeds", of(&pooled)?),
            ("last_hidden_state", of(&last)?),
            ("hidden_states_m2", of(&penultimate)?),
        ])
    }

    fn trained<'m>(
        &'m self,
        tape: &Tape<'m>,
        golden: &ReferenceData,
        _: Dtype,
    ) -> Result<Vec<(&'static str, Var)>> {
        let (samples, ids) = golden.ids("in.input_ids")?;
        let clip::ClipOutput { penultimate, pooled, .. } =
            self.forward(tape, &ids, samples, Recompute::None)?;
        Ok(vec![("text_embeds", pooled), ("hidden_states_m2", penultimate)])
    }
}

impl VerifiableModel for T5Encoder {
    fn outputs<'m>(
        &'m self,
        tape: &Tape<'m>,
        golden: &ReferenceData,
        _: Dtype,
    ) -> Result<NamedOutputs> {
        let (samples, ids) = golden.ids("in.input_ids")?;
        let of_sample = ids.chunks(ids.len() / samples.max(1));
        let lengths: Vec<u32> =
            of_sample.map(|ids| ids.iter().filter(|id| **id != 0).count() as u32).collect();
        let all = self.forward(tape, &ids, samples, None)?;
        let masked = self.forward(tape, &ids, samples, Some(&lengths))?;
        Ok(vec![("no_mask", to_vec(all.tensor())?), ("masked", to_vec(masked.tensor())?)])
    }
}

impl VerifiableModel for Qwen25VlEncoder {
    fn outputs<'m>(
        &'m self,
        tape: &Tape<'m>,
        golden: &ReferenceData,
        _: Dtype,
    ) -> Result<NamedOutputs> {
        let (samples, ids) = golden.ids("in.input_ids")?;
        let (_, mask) = golden.ids("in.attention_mask")?;
        let of_sample = mask.chunks(mask.len() / samples.max(1));
        let lengths: Vec<u32> = of_sample.map(|mask| mask.iter().sum()).collect();
        let last = self.forward(tape, &ids, samples, Some(&lengths))?;
        Ok(vec![("hidden_states_last", to_vec(last.tensor())?)])
    }
}

/// Both halves, as the reference data has them.
pub struct VaePair {
    config: VaeConfig,
    encoder: VaeEncoder,
    decoder: VaeDecoder,
    statistics: LatentStatistics,
}

impl VaePair {
    /// Builds both.
    pub fn new(config: &VaeConfig, build: &mut ModelBuilder<'_>) -> Result<Self> {
        let encoder = VaeEncoder::new(config, build)?;
        let decoder = VaeDecoder::new(config, build)?;
        Ok(Self {
            config: config.clone(),
            encoder,
            decoder,
            statistics: statistics(config, build)?,
        })
    }
}

/// How latents are scaled, which some files say.
fn statistics(config: &VaeConfig, build: &mut ModelBuilder<'_>) -> Result<LatentStatistics> {
    let VaeConfig::Flux2(own) = config else { return Ok(config.statistics()) };
    let n = own.n_statistics();
    let [means, variances] = flux2::names::STATISTICS.map(|name| build.vector(name, n));
    let [means, variances] = [means?, variances?].map(|values| to_vec(values.tensor()));
    let found = own.statistics(means?, &variances?);
    found.map_err(|Unsupported(problem)| TrainerError::Request {
        problem,
        hint: "download the file again",
    })
}

impl VerifiableModel for VaePair {
    fn outputs<'m>(
        &'m self,
        tape: &Tape<'m>,
        golden: &ReferenceData,
        dtype: Dtype,
    ) -> Result<NamedOutputs> {
        let device = tape.device();
        let takes_clips = self.config.temporal_scale_factor() > 1;
        let encoded = self.encoder.forward(tape, &golden.images(device, dtype, takes_clips)?)?;
        let mut sizes = encoded.shape().sizes().to_vec();
        // Means and log variances.
        sizes[1] /= 2;
        let count: usize = sizes[1..].iter().product();
        let both = to_vec(encoded.tensor())?;
        let half = |which: usize| -> Vec<f32> {
            both.chunks(2 * count)
                .flat_map(|both| both[which * count..][..count].to_vec())
                .collect()
        };
        let (mean, logarithms) = (half(0), half(1));
        let latents = device.upload_as(Shape::new(&sizes), &mean, dtype)?;
        let mut decoded = to_vec(self.decoder.forward(tape, &latents)?.tensor())?;
        // The reference of this one clamps; here that is done where pixels are made.
        if matches!(self.config, VaeConfig::QwenImage(_)) {
            for value in &mut decoded {
                *value = value.clamp(-1.0, 1.0);
            }
        }
        let shape = LatentShape::from_sizes(&sizes[1..]).expect("latents have such sizes");
        let scaled = |mean: &[f32]| self.statistics.to_model(mean, shape);
        let scaled = mean.chunks(count).flat_map(scaled).collect();
        Ok(vec![
            ("mean", mean),
            ("logvar", logarithms),
            ("scaled_latent", scaled),
            ("decoded", decoded),
        ])
    }
}
