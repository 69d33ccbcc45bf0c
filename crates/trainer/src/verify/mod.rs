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

mod models;
mod reference_data;

use std::collections::HashMap;
use std::path::Path;

use compute::{Device, Dtype, Gradients, Params, Quantisation, Tape, Var};
use serde::Deserialize;
use weights::Catalog;

use self::models::{VaePair, VerifiableModel};
use self::reference_data::ReferenceData;
use crate::error::{Result, TrainerError};
use crate::model::adapter::read::{AdapterFile, TargetModule};
use crate::model::adapter::{Adapters, LayerWeights};
use crate::model::build::{ModelBuilder, Precision, tensor_specs};
use crate::model::diffusion::denoiser;
use crate::model::diffusion::family::DiffusionFamily;
use crate::model::encoder::clip::{self, ClipTextModel};
use crate::model::encoder::qwen25vl::{self, Qwen25VlConfig, Qwen25VlEncoder};
use crate::model::encoder::t5::{self, T5Encoder};
use crate::model::files::{CheckpointLayout, WeightFiles, load_model};
use crate::model::host::cosine;
pub use crate::model::host::relative_error;
use crate::model::host::to_vec;
use crate::model::llama::{self, Llama};
use crate::model::tensor_piece::TensorPiece;
use crate::model::vae::VaeConfig;
use crate::model::{component, config};

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
    /// The cosine of the angle between both: 1 is the same direction. Two zeros have one.
    pub cosine: f64,
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
        Dtype::F32 => [2e-5, 1e-4],
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
    let golden =
        ReferenceData { catalog: Catalog::open(&golden)?, sizes: Vec::new(), channels_last: None };
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
        for sizes in golden.possible_sizes()? {
            let channels = config.is_channels_last().then(|| config.latent_spec().channels);
            let catalog = golden.catalog.clone();
            let golden = &ReferenceData { catalog, sizes, channels_last: channels };
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
        class if llama::LanguageFamily::of_class(class).is_some() => {
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
    ) -> Result<HashMap<String, LayerWeights>> {
        let Some(path) = self.adapter else { return self.golden.adapter() };
        let mut file = AdapterFile::open(path)?;
        let modules = TargetModule::with_norms(&tensor_specs(build)?, self.layouts);
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
        given: HashMap<String, LayerWeights>,
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
            let named = layer.factors.named(["A", "B"]).into_iter().map(|(name, key)| (name, *key));
            for (letter, key) in named.chain(layer.magnitude.map(|key| ("M", key))) {
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
        let (difference, cosine) = (relative_error(expected, got), cosine(expected, got));
        Comparison { name, difference, tolerance, cosine, first }
    }
}

/// Values shown of a tensor that differs.
const SHOWN: usize = 4;
