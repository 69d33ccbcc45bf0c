//! A model folder against reference data: a file `golden.safetensors` beside config.json and the
//! weights, made by the reference itself.
//!
//! | tensor | is |
//! |---|---|
//! | `in.<name>` | an input |
//! | `out.<name>` | the model's output |
//! | `lora.<layer>.{A,B,M}` | an adapter: down, up, and for `DoRA` the magnitudes; alpha is twice the rank |
//! | `lora_out.<name>` | the model's output with it |
//! | `target`, `target.<name>` | what an output with the adapter is compared with |
//! | `loss` | the sum of the mean squared differences; of a language model, the cross entropy |
//! | `grad.<layer>.{A,B,M}` | its gradients |

use std::collections::HashMap;
use std::path::Path;

use compute::ops::IGNORE_INDEX;
use compute::{Device, Dtype, Gradients, Params, Quantisation, Tape, Tensor, Var};
use serde::Deserialize;
use weights::load::{LoadOptions, LoadRequest, load, load_f32};
use weights::{Catalog, TensorEncoding};

use crate::error::{Result, TrainerError};
use crate::model::adapter::read::{AdapterFile, Component, TargetModule};
use crate::model::adapter::{Adapters, LoraWeights};
use crate::model::build::{ModelBuilder, Precision, tensor_specs};
use crate::model::diffusion::condition::{Conditions, POOLED, TOKENS};
use crate::model::diffusion::denoiser::{self, Denoiser, DenoiserInput, DenoiserOutput};
use crate::model::diffusion::family::DiffusionFamily;
use crate::model::encoder::clip::{self, ClipTextModel};
use crate::model::encoder::qwen25vl::{self, Qwen25VlConfig, Qwen25VlEncoder};
use crate::model::encoder::t5::{self, T5Encoder};
use crate::model::files::{CheckpointLayout, WeightFiles, load_model};
pub use crate::model::host::relative_error;
use crate::model::host::to_vec;
use crate::model::llama::{self, Llama};
use crate::model::recompute::Recompute;
use crate::model::tensor_piece::TensorPiece;
use crate::model::vae::{VaeConfig, VaeDecoder, VaeEncoder};
use crate::model::{component, config};
use crate::objective::flow::Timestep;

/// The result.
#[derive(Clone, Debug)]
pub struct VerifyReport {
    /// The model's class, as the reference calls it.
    pub class: String,
    /// Number of its weights.
    pub n_weights: usize,
    /// Every output and gradient.
    pub comparisons: Vec<Comparison>,
}

impl VerifyReport {
    /// The largest difference, in tolerances.
    fn worst(&self) -> f64 {
        let each = self.comparisons.iter().map(|found| found.difference / found.tolerance);
        // NaN is the worst.
        each.fold(0.0, |most, each| if each.is_nan() { f64::INFINITY } else { most.max(each) })
    }
}

/// One tensor beside the reference's.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// Its name in the reference data.
    pub name: String,
    /// The largest difference, relative to the largest value of the reference.
    pub difference: f64,
    /// The largest allowed.
    pub tolerance: f64,
    /// The first values, the reference's and ours.
    pub first: Vec<(f32, f32)>,
}

impl Comparison {
    /// Whether it is within tolerance; NaN is not.
    pub fn is_within_tolerance(&self) -> bool {
        self.difference <= self.tolerance
    }
}

/// Tolerances of a format, for outputs and for gradients.
/// Measured over all folders of `tests/golden`, and doubled; docs/numerics.md has the table.
fn tolerances(precision: Precision) -> [f64; 2] {
    let [output, gradient] = match precision.base {
        None => [0.0, 0.0],
        Some(Quantisation::Int8) => [3e-2, 1.5e-1],
        Some(Quantisation::Fp8) => [1e-1, 8e-1],
        Some(Quantisation::Nf4) => [4e-1, 2.0],
    };
    let [of_output, of_gradient] = match precision.dtype {
        Dtype::F32 => [2e-5, 2e-5],
        Dtype::F16 => [1.5e-2, 2e-2],
        _ => [7e-2, 2.5e-1],
    };
    [output + of_output, gradient + of_gradient]
}

/// The model and its reference.
#[derive(Clone, Copy, Debug)]
pub struct VerifyRequest<'a> {
    /// Where config.json is, and the rest unless it lies elsewhere.
    pub folder: &'a Path,
    /// The weights, also in the layout of the original checkpoints.
    pub weights: Option<&'a Path>,
    /// The reference data.
    pub golden: Option<&'a Path>,
    /// An adapter that shall do what the reference's does.
    pub adapter: Option<&'a Path>,
}

/// Compares a model with the reference.
pub fn verify(
    request: VerifyRequest<'_>,
    device: &Device,
    precision: Precision,
) -> Result<VerifyReport> {
    let VerifyRequest { folder, weights, golden, adapter } = request;
    let path = folder.join("config.json");
    let class = config::read::<ModelClass>(&path)?.name();
    let catalog = match weights {
        Some(path) => Catalog::open(path)?,
        None => component::weights(folder)?,
    };
    let golden = golden.map_or_else(|| folder.join("golden.safetensors"), Path::to_owned);
    let golden = ReferenceData { catalog: Catalog::open(&golden)?, size: None };
    let layouts = &|_: &str| Vec::new();
    let (reference, weights) = (&golden, &catalog);
    let verifier =
        Verifier { catalog: weights, golden: reference, adapter, layouts, device, precision };
    if let Some(family) = DiffusionFamily::of_transformer(&class) {
        let config = denoiser::DenoiserConfig::read(family, &path)?;
        // A checkpoint's settings are in its shapes too, but the file beside it says more.
        let prefix = denoiser::DenoiserConfig::of_checkpoint(family, &catalog, folder)?;
        let layout = prefix.map(|(_, prefix)| config.original(prefix));
        let layouts = &|module: &str| config.adapter_layouts(module);
        let layout = layout.unwrap_or_else(CheckpointLayout::identity);
        let mut nearest: Option<VerifyReport> = None;
        for size in golden.sizes()? {
            let golden = &ReferenceData { catalog: golden.catalog.clone(), size };
            let verifier = Verifier { golden, layouts, ..verifier };
            let (n_weights, comparisons) =
                verifier.compare(&layout, |build| config.build(build))?;
            let report = VerifyReport { class: class.clone(), n_weights, comparisons };
            let is_nearer = nearest.as_ref().is_none_or(|found| report.worst() < found.worst());
            nearest = if is_nearer { Some(report) } else { nearest };
        }
        return Ok(nearest.expect("there is at least one size"));
    }
    let (n_weights, comparisons) = match class.as_str() {
        "LlamaForCausalLM" | "MistralForCausalLM" | "Qwen2ForCausalLM" | "Qwen3ForCausalLM" => {
            let config = config::read_checked(&path, llama::LlamaConfig::check)?;
            let layout = llama::names::layout_of(&catalog, &config);
            verifier.compare(&layout, |build| Llama::new(&config, build))?
        }
        "CLIPTextModelWithProjection" => {
            let config = config::read_checked(&path, clip::ClipConfig::check)?;
            verifier.compare(&clip::layout(&catalog), |build| ClipTextModel::new(&config, build))?
        }
        "T5EncoderModel" => {
            let config = config::read_checked(&path, t5::T5Config::check)?;
            verifier.compare(&t5::layout(&catalog), |build| T5Encoder::new(&config, build))?
        }
        "Qwen2_5_VLForConditionalGeneration" => {
            let config = config::read_checked(&path, Qwen25VlConfig::check)?;
            let layout = qwen25vl::layout(&catalog);
            verifier.compare(&layout, |build| Qwen25VlEncoder::new(&config, build))?
        }
        class if VaeConfig::CLASSES.contains(&class) => {
            let config = VaeConfig::read(&path)?;
            let layout = config.layout(&catalog, config.original_prefix(&catalog));
            verifier.compare(&layout, |build| VaePair::new(&config, build))?
        }
        _ => {
            let problem = format!("class {class} is not one that hearth computes");
            return Err(TrainerError::Config { problem, path });
        }
    };
    Ok(VerifyReport { class, n_weights, comparisons })
}

/// How diffusers and transformers say which model it is.
#[derive(Deserialize)]
struct ModelClass {
    #[serde(rename = "_class_name")]
    class_name: Option<String>,
    #[serde(default)]
    architectures: Vec<String>,
}

impl ModelClass {
    fn name(self) -> String {
        self.class_name.or_else(|| self.architectures.into_iter().next()).unwrap_or_default()
    }
}

/// A model that reference data exists for.
trait VerifiableModel {
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

type NamedOutputs = Vec<(&'static str, Vec<f32>)>;

#[derive(Clone, Copy)]
struct Verifier<'a> {
    catalog: &'a Catalog,
    golden: &'a ReferenceData,
    adapter: Option<&'a Path>,
    device: &'a Device,
    precision: Precision,
    /// Where a layer lies in the adapters of other programs.
    layouts: &'a dyn Fn(&str) -> Vec<Vec<TensorPiece>>,
}

impl Verifier<'_> {
    fn compare<M: VerifiableModel>(
        &self,
        layout: &CheckpointLayout<'_>,
        build: impl Fn(&mut ModelBuilder<'_>) -> Result<M>,
    ) -> Result<(usize, Vec<Comparison>)> {
        let files = WeightFiles::find(self.catalog, layout, &build)?;
        let mut found = self.plain(&files, &build)?;
        let given = self.given::<M>(&build)?;
        if !given.is_empty() {
            found.extend(self.adapted(&files, given, &build)?);
        }
        Ok((files.n_values(), found))
    }

    /// The adapter: the reference's, or the one to be compared with it.
    fn given<M: VerifiableModel>(
        &self,
        build: impl Fn(&mut ModelBuilder<'_>) -> Result<M>,
    ) -> Result<HashMap<String, LoraWeights>> {
        let Some(path) = self.adapter else { return self.golden.adapter() };
        let mut file = AdapterFile::open(path)?;
        let modules = TargetModule::from_specs(&tensor_specs(build)?, self.layouts);
        let given = file.take(M::COMPONENT, None, &modules)?;
        file.check_all_taken()?;
        Ok(given)
    }

    fn plain<M: VerifiableModel>(
        &self,
        files: &WeightFiles<'_>,
        build: impl Fn(&mut ModelBuilder<'_>) -> Result<M>,
    ) -> Result<Vec<Comparison>> {
        let mut adapters = Adapters::none();
        let model =
            load_model(self.device, files, self.precision, &mut adapters, &|_| true, build)?;
        let params = Params::default();
        let tape = Tape::inference(self.device, &params, 0);
        let outputs = model.outputs(&tape, self.golden, self.precision.dtype)?;
        let compare = |(name, got): (&str, Vec<f32>)| {
            let name = format!("out.{name}");
            self.golden.floats(&name).map(|(_, expected)| self.comparison(name, &expected, &got))
        };
        outputs.into_iter().map(compare).collect()
    }

    fn adapted<M: VerifiableModel>(
        &self,
        files: &WeightFiles<'_>,
        given: HashMap<String, LoraWeights>,
        build: impl Fn(&mut ModelBuilder<'_>) -> Result<M>,
    ) -> Result<Vec<Comparison>> {
        let mut adapters = Adapters::loaded(given);
        let model =
            load_model(self.device, files, self.precision, &mut adapters, &|_| true, build)?;
        adapters.check_all_used(&self.catalog.path)?;
        let tape = Tape::training(self.device, &adapters.params, 0);
        let outputs = model.trained(&tape, self.golden, self.precision.dtype)?;
        let mut found = Vec::new();
        let mut loss: Option<Var> = None;
        for (name, output) in outputs {
            let arranged = |name: &str| {
                let plain = Tape::inference(self.device, &adapters.params, 0);
                model.arrange(&plain, self.golden.tensor(self.device, name, Dtype::F32)?)
            };
            let expected = format!("lora_out.{name}");
            if self.golden.has(&expected) {
                let (ours, theirs) = (to_vec(output.tensor())?, to_vec(&arranged(&expected)?)?);
                found.push(self.comparison(expected, &theirs, &ours));
            }
            let own = format!("target.{name}");
            let target = if self.golden.has(&own) { &own } else { "target" };
            if !self.golden.has(target) {
                continue;
            }
            let target = arranged(target)?;
            let part = tape.mse(&output, &target, None, None)?;
            loss = Some(loss.map_or(Ok(part.clone()), |loss| tape.add(&loss, &part))?);
        }
        let Some(loss) = loss.or(model.loss(&tape, self.golden)?) else { return Ok(found) };
        let (_, expected) = self.golden.floats("loss")?;
        found.push(self.comparison("loss".into(), &expected, &to_vec(loss.tensor())?));
        let mut gradients = Gradients::default();
        tape.backward(&loss, &mut gradients)?;
        found.extend(self.gradients(&adapters, &gradients)?);
        Ok(found)
    }

    fn gradients(&self, adapters: &Adapters, gradients: &Gradients) -> Result<Vec<Comparison>> {
        let mut found = Vec::new();
        for layer in &adapters.layers {
            let keys = [("A", Some(layer.down)), ("B", Some(layer.up)), ("M", layer.magnitude)];
            for (letter, key) in keys {
                let Some(key) = key else { continue };
                let name = format!("grad.{}.{letter}", layer.module);
                let (_, expected) = self.golden.floats(&name)?;
                // A parameter that nothing depends on has none.
                let got = gradients.get(key).map(to_vec).transpose()?;
                let got = got.unwrap_or_else(|| vec![0.0; expected.len()]);
                found.push(self.comparison(name, &expected, &got));
            }
        }
        Ok(found)
    }

    fn comparison(&self, name: String, expected: &[f32], got: &[f32]) -> Comparison {
        let [of_output, of_gradient] = tolerances(self.precision);
        let tolerance = if name.starts_with("grad.") { of_gradient } else { of_output };
        let first = expected.iter().copied().zip(got.iter().copied()).take(SHOWN).collect();
        Comparison { name, difference: relative_error(expected, got), tolerance, first }
    }
}

/// Values shown of a tensor that differs.
const SHOWN: usize = 4;

impl VerifiableModel for Denoiser {
    const COMPONENT: Component = Component::Transformer;

    fn outputs<'m>(
        &'m self,
        tape: &Tape<'m>,
        golden: &ReferenceData,
        dtype: Dtype,
    ) -> Result<NamedOutputs> {
        let predicted = predict(self, tape, golden, dtype, Recompute::None)?;
        let found = match golden.size {
            Some(_) => predicted.tokens,
            None => predicted.latents(tape)?,
        };
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
    let latents = golden.latents(model, tape, dtype)?;
    let given = GIVEN.into_iter().filter(|(_, theirs)| golden.catalog.find(theirs).is_ok());
    let tensor = |(ours, theirs)| Ok((ours, golden.tensor(device, theirs, dtype)?));
    let mut condition = Conditions::from_tensors(given.map(tensor).collect::<Result<Vec<_>>>()?);
    if golden.has(MASK) {
        condition = condition.with_lengths(TOKENS, golden.lengths(MASK)?);
    }
    let (_, timesteps) = golden.floats("in.timestep")?;
    // Transformers with packed latents take sigma as the timestep, others 1000 times sigma.
    let is_sigma = golden.size.is_some();
    let timestep = |time: &f32| match *time {
        time if is_sigma => Timestep { sigma: time, t: 1000.0 * time },
        time => Timestep { sigma: time / 1000.0, t: time },
    };
    let timesteps: Vec<Timestep> = timesteps.iter().map(timestep).collect();
    let scales = golden.floats("in.guidance").ok();
    let guidance = scales.as_ref().map(|(_, scales)| &scales[..]);
    let input = DenoiserInput {
        latents: &latents,
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
        let clip::ClipOutput { last, penultimate, pooled } = self.forward(tape, &ids, samples)?;
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
        let clip::ClipOutput { penultimate, pooled, .. } = self.forward(tape, &ids, samples)?;
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
struct VaePair {
    config: VaeConfig,
    encoder: VaeEncoder,
    decoder: VaeDecoder,
}

impl VaePair {
    fn new(config: &VaeConfig, build: &mut ModelBuilder<'_>) -> Result<Self> {
        let encoder = VaeEncoder::new(config, build)?;
        Ok(Self { config: config.clone(), encoder, decoder: VaeDecoder::new(config, build)? })
    }
}

impl VerifiableModel for VaePair {
    fn outputs<'m>(
        &'m self,
        tape: &Tape<'m>,
        golden: &ReferenceData,
        dtype: Dtype,
    ) -> Result<NamedOutputs> {
        let device = tape.device();
        let encoded = self.encoder.forward(tape, &golden.images(device, dtype)?)?;
        let sizes = encoded.shape();
        let &[samples, channels, height, width] = sizes.sizes() else {
            unreachable!("convolutions give images")
        };
        let both = to_vec(encoded.tensor())?;
        let half = |which: usize| -> Vec<f32> {
            let count = channels / 2 * height * width;
            both.chunks(2 * count)
                .flat_map(|both| both[which * count..][..count].to_vec())
                .collect()
        };
        let (mean, logarithms) = (half(0), half(1));
        let latents = device.upload_as([samples, channels / 2, height, width], &mean, dtype)?;
        let mut decoded = to_vec(self.decoder.forward(tape, &latents)?.tensor())?;
        // The reference of this one clamps; here that is done where pixels are made.
        if matches!(self.config, VaeConfig::QwenImage(_)) {
            for value in &mut decoded {
                *value = value.clamp(-1.0, 1.0);
            }
        }
        let (statistics, count) = (self.config.statistics(), channels / 2 * height * width);
        let scaled = mean.chunks(count).flat_map(|mean| statistics.to_model(mean)).collect();
        Ok(vec![
            ("mean", mean),
            ("logvar", logarithms),
            ("scaled_latent", scaled),
            ("decoded", decoded),
        ])
    }
}

/// The reference data.
struct ReferenceData {
    catalog: Catalog,
    /// Rows and columns of tokens, where a denoiser is given latents as tokens.
    size: Option<[usize; 2]>,
}

impl ReferenceData {
    fn has(&self, name: &str) -> bool {
        self.catalog.find(name).is_ok()
    }

    fn floats(&self, name: &str) -> Result<(Vec<usize>, Vec<f32>)> {
        let tensor = self.catalog.find(name)?;
        let sizes = tensor.shape.iter().map(|size| *size as usize).collect();
        Ok((sizes, load_f32(&self.catalog, tensor, 0..tensor.numel())?))
    }

    /// Rows, and all token ids.
    fn ids(&self, name: &str) -> Result<(usize, Vec<u32>)> {
        let tensor = self.catalog.find(name)?;
        let mut bytes = vec![0; tensor.numel() as usize * size_of::<i64>()];
        let wanted = vec![LoadRequest::whole(tensor, weights::FileDtype::I64, &mut bytes[..])];
        load(&self.catalog, wanted, LoadOptions::default(), &|_| true)?;
        let (numbers, _) = bytes.as_chunks::<8>();
        let rows = tensor.shape.first().map_or(1, |rows| *rows as usize);
        Ok((rows, numbers.iter().map(|bytes| i64::from_le_bytes(*bytes) as u32).collect()))
    }

    /// The tokens of all samples.
    fn tokens(&self, device: &Device) -> Result<Tensor> {
        let (rows, ids) = self.ids("in.input_ids")?;
        Ok(device.upload([rows, ids.len() / rows.max(1)], &ids)?)
    }

    fn tensor(&self, device: &Device, name: &str, dtype: Dtype) -> Result<Tensor> {
        let (sizes, numbers) = self.floats(name)?;
        Ok(device.upload_as(compute::Shape::new(&sizes), &numbers, dtype)?)
    }

    /// Images [samples, 3, height, width]; a video autoencoder's have a dimension for their one frame.
    fn images(&self, device: &Device, dtype: Dtype) -> Result<Tensor> {
        let (mut sizes, numbers) = self.floats("in.image")?;
        if let [_, _, 1, _, _] = sizes[..] {
            sizes.remove(2);
        }
        Ok(device.upload_as(compute::Shape::new(&sizes), &numbers, dtype)?)
    }

    /// How many rows of each sample a mask counts: they come first.
    fn lengths(&self, mask: &str) -> Result<Vec<usize>> {
        let tensor = self.catalog.find(mask)?;
        let n = tensor.shape.get(1).map_or(1, |n| *n as usize);
        let TensorEncoding::Plain(dtype) = tensor.encoding else { return Ok(Vec::new()) };
        let mut bytes = vec![0; tensor.bytes as usize];
        let wanted = vec![LoadRequest::whole(tensor, dtype, &mut bytes[..])];
        load(&self.catalog, wanted, LoadOptions::default(), &|_| true)?;
        let width = bytes.len() / (tensor.numel() as usize).max(1);
        let counts: Vec<bool> =
            bytes.chunks(width.max(1)).map(|one| one.iter().any(|byte| *byte != 0)).collect();
        let length = |row: &[bool]| row.iter().take_while(|counts| **counts).count();
        Ok(counts.chunks(n).map(length).collect())
    }

    /// Rows and columns of tokens, where the reference is given latents as tokens. Where it does not say them, all that
    /// make up so many tokens: the right one gives the right output.
    fn sizes(&self) -> Result<Vec<Option<[usize; 2]>>> {
        let given = self.catalog.find("in.hidden_states")?;
        let &[_, n, _] = &given.shape[..] else { return Ok(vec![None]) };
        if self.has("in.img_ids") {
            let (_, places) = self.floats("in.img_ids")?;
            let most =
                |axis: usize| places.chunks(3).map(|at| at[axis] as usize).max().unwrap_or(0);
            return Ok(vec![Some([most(1) + 1, most(2) + 1])]);
        }
        let n = n as usize;
        let divides = |rows: &usize| n.is_multiple_of(*rows);
        Ok((1..=n).filter(divides).map(|rows| Some([rows, n / rows])).collect())
    }

    /// Noisy latents [samples, channels, height, width].
    fn latents(&self, model: &Denoiser, tape: &Tape<'_>, dtype: Dtype) -> Result<Tensor> {
        let given = self.tensor(tape.device(), "in.hidden_states", dtype)?;
        match self.size {
            Some(tokens) => model.unpatchify(tape, given, tokens),
            None => Ok(given),
        }
    }

    fn adapter(&self) -> Result<HashMap<String, LoraWeights>> {
        let names = self.catalog.tensors.iter().filter_map(|tensor| {
            tensor.name.strip_prefix("lora.").and_then(|name| name.strip_suffix(".A"))
        });
        let given = |module: &str| {
            let (sizes, down) = self.floats(&format!("lora.{module}.A"))?;
            let (_, up) = self.floats(&format!("lora.{module}.B"))?;
            let magnitude = format!("lora.{module}.M");
            let magnitude =
                if self.has(&magnitude) { Some(self.floats(&magnitude)?.1) } else { None };
            let rank = sizes[0];
            Ok((
                module.to_owned(),
                LoraWeights { rank, alpha: 2.0 * rank as f32, down, up, magnitude },
            ))
        };
        names.map(given).collect()
    }
}
