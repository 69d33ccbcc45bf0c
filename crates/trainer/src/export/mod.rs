//! Adapters for other programs. Each file is read back by the rules of the program it is for, and compared: a key
//! that its reader does not know would silently change the image. `merge/` merges an adapter into its base,
//! `card/` writes the model card, `sample_command` the command line that uses a result, `language` exports language
//! models, `mlx` and `ollama` do so for these programs, `model` whole diffusion models, and `adapter_checkpoint` the adapter
//! of a checkpoint.
//!
//! ```text
//! OUT/
//!   pytorch_lora_weights.safetensors   diffusers; alpha in the header; LoRA and DoRA alone
//!   peft/                              PEFT: adapter_config.json, adapter_model.safetensors
//!   NAME-kohya.safetensors             kohya: the original layers, q, k and v together
//!   NAME-comfyui.safetensors           ComfyUI, the same layers by its own names
//! ```

pub mod adapter_checkpoint;
pub mod card;
pub(crate) mod fuse;
pub mod gguf;
pub mod language;
pub mod merge;
pub mod mlx;
pub mod model;
pub mod ollama;
pub mod sample_command;
mod settings;

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use weights::WeightsError;
use weights::folder::fill_folder;
use weights::safetensors::OutputTensor;
use weights::write::{write_file, write_whole};

use crate::error::{Result, TrainerError};
use crate::model::adapter::factors::{Factors, LokrShape};
use crate::model::adapter::names::EncoderNames;
use crate::model::adapter::read::{AdapterFile, Component, DIFFUSERS_FILE, PEFT_CONFIG, PEFT_FILE};
use crate::model::adapter::{AdapterForm, AdapterFormat, AdapterWeights, LayerWeights};
use crate::model::build::TensorSpec;
use crate::model::diffusion::Pipeline;
use crate::model::diffusion::family::{ComfyuiLora, DiffusionFamily};
use crate::model::tensor_piece::TensorPiece;

/// A file that was written and checked.
#[derive(Clone, Debug)]
pub struct ExportedFile {
    /// The program it is for.
    pub format: AdapterFormat,
    /// The file, or PEFT's folder.
    pub path: PathBuf,
    /// Layers that were read back.
    pub n_layers: usize,
    /// The largest difference of a layer's output, relative to its largest value.
    pub difference: f64,
}

/// The largest difference of a correct file. Chosen: a hundred rounding errors of f32.
const TOLERANCE: f64 = 1e-5;

/// The position of a layer in the original layout.
type OriginalLayoutFn<'a> = &'a dyn Fn(&str) -> Vec<TensorPiece>;

/// The adapter's base model, as far as the files describe it.
#[derive(Clone, Copy)]
struct ExportBase<'a> {
    /// All of its tensors.
    tensors: &'a [TensorSpec],
    original: OriginalLayoutFn<'a>,
    /// A diffusion model's family.
    family: Option<&'static DiffusionFamily>,
    norms: BaseNorms<'a>,
}

/// What is needed of the base for trained norms.
#[derive(Clone, Copy)]
enum BaseNorms<'a> {
    /// Of a diffusion model: their names in the original layout, if their vectors are weights there too.
    Names(&'a dyn Fn(&str) -> Option<String>),
    /// Of a language model: the values of a tensor. PEFT's files have the whole vectors of norms.
    Values(&'a dyn Fn(&str) -> weights::Result<Option<Vec<f32>>>),
}

impl BaseNorms<'_> {
    fn has_weight(self, norm: &str) -> bool {
        match self {
            Self::Names(name) => name(norm).is_some(),
            Self::Values(_) => true,
        }
    }
}

impl ExportBase<'_> {
    /// What other programs call the text encoder at a position.
    fn encoder_names(&self, position: u8) -> Option<EncoderNames> {
        let mut encoders = self.family?.encoders.iter();
        encoders.find(|spec| spec.position == position).map(|spec| spec.adapter_names)
    }
}

/// Writes the adapter of `pipeline` into `folder`, and checks it.
pub fn export(
    pipeline: &mut Pipeline,
    format: AdapterFormat,
    folder: &Path,
    name: &str,
) -> Result<ExportedFile> {
    let parts = pipeline.adapter();
    let config = &pipeline.transformer.config;
    let original = |layer: &str| config.original_module(layer);
    let (tensors, family) = (&config.tensor_specs()?[..], Some(config.family()));
    let original_norm = |norm: &str| config.original_norm(norm);
    let norms = BaseNorms::Names(&original_norm);
    let base = ExportBase { tensors, original: &original, family, norms };
    let path = write(&parts, format, folder, name, &base)?;
    let difference = kept_if_equal(&path, || {
        // Values that are not finite get here only with --force.
        pipeline.take_adapter(AdapterFile::open(&path)?.with_any_values(true))?;
        compare(&parts, &pipeline.adapter(), format, &path)
    })?;
    let n_layers = kept(&parts, format).map(|(_, layers)| layers.len()).sum();
    // What was read back may be rounded or fused; the next format starts from the original.
    pipeline.set_adapter(parts);
    Ok(ExportedFile { format, path, n_layers, difference })
}

/// Whether a format has a place for the adapter of `pipeline`.
pub fn can_hold(pipeline: &Pipeline, format: AdapterFormat) -> bool {
    let parts = pipeline.adapter();
    let config = &pipeline.transformer.config;
    let is_lokr = |given: &LayerWeights| matches!(given.factors, Factors::Lokr { .. });
    let lokr = parts
        .iter()
        .filter(|(component, _)| *component == Component::Transformer)
        .flat_map(|(_, layers)| layers.iter().filter(|(_, given)| is_lokr(given)))
        .map(|(layer, _)| layer.as_str());
    let is_apart = || fuse::check_lokr(lokr, |layer| config.original_module(layer)).is_ok();
    let original_norm = |norm: &str| config.original_norm(norm);
    let is_held = check_layers(&parts, format, BaseNorms::Names(&original_norm)).is_ok();
    is_held && (format != AdapterFormat::Kohya || is_apart())
}

/// Removes what was written unless it is read back as it should be.
fn kept_if_equal(path: &Path, read_back: impl FnOnce() -> Result<f64>) -> Result<f64> {
    let difference = read_back();
    if difference.is_err() {
        // It may not be there any more; the error that counts is the first.
        _ = if path.is_dir() {
            let removed = [PEFT_FILE, PEFT_CONFIG].map(|name| fs::remove_file(path.join(name)));
            removed.into_iter().collect::<std::io::Result<()>>().and_then(|()| fs::remove_dir(path))
        } else {
            fs::remove_file(path)
        };
    }
    difference
}

/// The components that a format can hold.
fn kept(
    parts: &AdapterWeights,
    format: AdapterFormat,
) -> impl Iterator<Item = (Component, &BTreeMap<String, LayerWeights>)> {
    let can_hold = move |component: Component| {
        format != AdapterFormat::Peft || !matches!(component, Component::TextEncoder(_))
    };
    parts.iter().filter(move |(c, _)| can_hold(*c)).map(|(component, layers)| (*component, layers))
}

fn write(
    parts: &AdapterWeights,
    format: AdapterFormat,
    folder: &Path,
    name: &str,
    base: &ExportBase<'_>,
) -> Result<PathBuf> {
    check_layers(parts, format, base.norms)?;
    let mut tensors = BTreeMap::new();
    let form = FileForm::of(format, base.family);
    for (component, layers) in kept(parts, format) {
        for (stem, given) in stems(component, layers, format, base)? {
            insert(&stem, &given, form, &mut tensors);
        }
        if let (AdapterFormat::Peft, BaseNorms::Values(of_base)) = (format, base.norms) {
            insert_sums(component, layers, of_base, &mut tensors)?;
        }
    }
    let peft = folder.join("peft");
    let (path, result) = match format {
        AdapterFormat::Diffusers => {
            let path = folder.join(DIFFUSERS_FILE);
            (path.clone(), path)
        }
        AdapterFormat::Peft => (peft.join(PEFT_FILE), peft.clone()),
        AdapterFormat::Kohya => {
            let path = folder.join(format!("{name}-kohya.safetensors"));
            (path.clone(), path)
        }
        AdapterFormat::Comfyui => {
            let path = folder.join(format!("{name}-comfyui.safetensors"));
            (path.clone(), path)
        }
    };
    let beside = path.parent().unwrap_or(folder);
    let failed = |source| TrainerError::Io { what: "write", path: beside.into(), source };
    fill_folder(beside, failed, || {
        if format == AdapterFormat::Peft {
            let config = settings::peft(parts, base.tensors)?;
            write_whole(&peft.join(PEFT_CONFIG), config.as_bytes())?;
        }
        let family = base.family.map(|family| &family.export);
        save(&path, &settings::header(parts, format, family), &tensors)
    })?;
    Ok(result)
}

/// Shape and values of a tensor.
type TensorData = (Vec<u64>, Vec<f32>);

fn save(
    path: &Path,
    metadata: &BTreeMap<String, String>,
    tensors: &BTreeMap<String, TensorData>,
) -> Result<()> {
    let outputs = tensors.iter().map(|(name, (shape, _))| OutputTensor {
        name: name.clone(),
        dtype: weights::FileDtype::F32,
        shape: shape.clone(),
    });
    write_file(path, metadata, outputs.collect(), false, &mut |tensor, out| {
        let (_, values) = &tensors[&tensor.name];
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        out.write_all(&bytes).map_err(|source| WeightsError::io("write", path, source))
    })?;
    Ok(())
}

/// The layers' names in a format, and their weights.
fn stems(
    component: Component,
    layers: &BTreeMap<String, LayerWeights>,
    format: AdapterFormat,
    base: &ExportBase<'_>,
) -> Result<Vec<(String, LayerWeights)>> {
    let renamed = |name: &dyn Fn(&str) -> String| {
        layers.iter().map(|(layer, given)| (name(layer), given.clone())).collect()
    };
    let flat = |layer: &str| layer.replace('.', "_");
    let Component::TextEncoder(index) = component else {
        return Ok(match format {
            AdapterFormat::Diffusers | AdapterFormat::Peft => {
                renamed(&|layer| stem(component, layer, format))
            }
            AdapterFormat::Kohya => fuse::fuse(layers, base.original)?
                .into_iter()
                .map(|(layer, given)| (format!("lora_unet_{}", flat(&layer)), given))
                .collect(),
            AdapterFormat::Comfyui => {
                let has_weight = |norm: &str| base.norms.has_weight(norm);
                let (apart, others) = fuse::apart(layers, base.original, has_weight);
                let others = fuse::fuse(&others, base.original)?.into_iter();
                let others =
                    others.map(|(layer, given)| (format!("diffusion_model.{layer}"), given));
                let apart = apart.into_iter();
                let apart =
                    apart.map(|(layer, given)| (format!("lycoris_{}", flat(&layer)), given));
                others.chain(apart).collect()
            }
        });
    };
    Ok(match (format, base.encoder_names(index)) {
        (AdapterFormat::Kohya, Some(EncoderNames { kohya: [first, ..], .. })) => {
            renamed(&|layer| format!("{first}_{}", flat(layer)))
        }
        (AdapterFormat::Comfyui, Some(EncoderNames { comfyui, .. })) => {
            renamed(&|layer| format!("text_encoders.{comfyui}.transformer.{layer}"))
        }
        _ => renamed(&|layer| stem(component, layer, format)),
    })
}

/// A layer's name in diffusers or PEFT.
fn stem(component: Component, layer: &str, format: AdapterFormat) -> String {
    match (component, format) {
        (Component::Transformer | Component::Language, AdapterFormat::Peft) => {
            format!("base_model.model.{layer}")
        }
        _ => format!("{}.{layer}", component.folder()),
    }
}

/// How a layer's tensors are named, and where its scale is.
#[derive(Clone, Copy)]
struct FileForm {
    /// Endings of A and B of a `LoRA`.
    lora: [&'static str; 2],
    /// That of magnitudes.
    magnitude: &'static str,
    scale: ScalePlace,
}

/// Where a file has the scale of a layer.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ScalePlace {
    /// In settings, of the header or beside the file.
    Settings,
    /// In a tensor for each layer.
    Alpha,
    /// In B of a `LoRA`; others have an alpha.
    Values,
}

impl FileForm {
    /// Of a model of this family.
    fn of(format: AdapterFormat, family: Option<&DiffusionFamily>) -> Self {
        let is_scaled = family.is_some_and(|it| it.export.comfyui == ComfyuiLora::Scaled);
        let lora_ab = ["lora_A.weight", "lora_B.weight"];
        match format {
            AdapterFormat::Diffusers | AdapterFormat::Peft => Self {
                lora: lora_ab,
                magnitude: "lora_magnitude_vector",
                scale: ScalePlace::Settings,
            },
            AdapterFormat::Comfyui if is_scaled => {
                Self { lora: lora_ab, magnitude: "dora_scale", scale: ScalePlace::Values }
            }
            // ComfyUI reads other endings too; diffusers converts its files only with these.
            AdapterFormat::Kohya | AdapterFormat::Comfyui => Self {
                lora: ["lora_down.weight", "lora_up.weight"],
                magnitude: "dora_scale",
                scale: ScalePlace::Alpha,
            },
        }
    }

    /// The layer with its scale where it has to be; nothing if that is where it is.
    fn scaled(self, given: &LayerWeights) -> Option<LayerWeights> {
        match self.scale {
            ScalePlace::Settings => None,
            ScalePlace::Values => given.with_scale_in_b().or_else(|| given.with_baked_scale()),
            // LyCORIS does not scale what has no rank.
            ScalePlace::Alpha => given.with_baked_scale(),
        }
    }

    fn has_alpha(self, given: &LayerWeights) -> bool {
        match given.factors {
            Factors::Norm { .. } => false,
            Factors::Lora { .. } => self.scale == ScalePlace::Alpha,
            Factors::Loha { .. } | Factors::Lokr { .. } => self.scale != ScalePlace::Settings,
        }
    }
}

/// A layer's tensors by their names there.
fn insert(
    stem: &str,
    given: &LayerWeights,
    form: FileForm,
    into: &mut BTreeMap<String, TensorData>,
) {
    let scaled = form.scaled(given);
    let given = scaled.as_ref().unwrap_or(given);
    for (name, matrix) in given.factors.named(form.lora) {
        let sizes = matrix.sizes().map(|size| size as u64);
        let shape = if given.factors.is_norm() { sizes[..1].into() } else { sizes.into() };
        into.insert(format!("{stem}.{name}"), (shape, matrix.values.clone()));
    }
    if form.has_alpha(given) {
        into.insert(format!("{stem}.alpha"), (Vec::new(), vec![given.alpha]));
    }
    if let Some(values) = &given.magnitude {
        let outputs = values.len() as u64;
        let is_flat = form.scale == ScalePlace::Settings;
        let shape = if is_flat { vec![outputs] } else { vec![outputs, 1] };
        into.insert(format!("{stem}.{}", form.magnitude), (shape, values.clone()));
    }
}

/// The whole vectors of norms, as PEFT loads them (`modules_to_save`), beside what was added to them.
fn insert_sums(
    component: Component,
    layers: &BTreeMap<String, LayerWeights>,
    of_base: &dyn Fn(&str) -> weights::Result<Option<Vec<f32>>>,
    into: &mut BTreeMap<String, TensorData>,
) -> Result<()> {
    for (norm, given) in layers {
        let Factors::Norm { weight, bias } = &given.factors else { continue };
        let stem = stem(component, norm, AdapterFormat::Peft);
        for (end, added) in [("weight", Some(weight)), ("bias", bias.as_ref())] {
            let (Some(added), Some(own)) = (added, of_base(&format!("{norm}.{end}"))?) else {
                continue;
            };
            let sum: Vec<f32> = own.iter().zip(&added.values).map(|(a, b)| a + b).collect();
            into.insert(format!("{stem}.{end}"), (vec![sum.len() as u64], sum));
        }
    }
    Ok(())
}

/// Checks, before anything is trained or written, that a format has a place for trained norms of an image model; all of
/// these are weights in the original layout, or not.
pub fn check_norms(format: AdapterFormat, are_weights: bool) -> Result<()> {
    let (problem, hint) = match format {
        AdapterFormat::Comfyui => return Ok(()),
        AdapterFormat::Kohya if are_weights => return Ok(()),
        AdapterFormat::Kohya => (
            "trained norms of this model have no names that readers of kohya's files know",
            "set output.formats to comfyui, which has names for them, or leave adapter.train_norm out",
        ),
        AdapterFormat::Diffusers | AdapterFormat::Peft => (
            "trained norms have no form in the files of diffusers, nor in those of PEFT for image models",
            "set output.formats to comfyui or kohya, leave adapter.train_norm out, or merge the adapter with \
             `hearth export --merge`",
        ),
    };
    Err(TrainerError::Request { problem: problem.into(), hint })
}

/// Checks, before anything is trained or written, that a format has a place for adapters of this form.
pub fn check_form(form: AdapterForm, format: AdapterFormat) -> Result<()> {
    let name = match form {
        AdapterForm::Lora | AdapterForm::Dora => return Ok(()),
        AdapterForm::Loha => "LoHa",
        AdapterForm::Lokr(_) => "LoKr",
    };
    if format != AdapterFormat::Diffusers {
        return Ok(());
    }
    Err(TrainerError::Request {
        problem: format!(
            "a {name} has no form in the files of diffusers, which hold LoRA and DoRA"
        ),
        hint: "set output.formats to peft, kohya or comfyui; diffusers models load it with PEFT",
    })
}

/// The same for an adapter that is there.
fn check_layers(parts: &AdapterWeights, format: AdapterFormat, norms: BaseNorms<'_>) -> Result<()> {
    for (layer, given) in parts.iter().flat_map(|(_, layers)| layers) {
        let form = match given.factors {
            Factors::Lora { .. } => AdapterForm::Lora,
            Factors::Loha { .. } => AdapterForm::Loha,
            Factors::Lokr { .. } => AdapterForm::Lokr(LokrShape::default()),
            Factors::Norm { .. } => {
                if let BaseNorms::Names(_) = norms {
                    check_norms(format, norms.has_weight(layer))?;
                }
                continue;
            }
        };
        check_form(form, format)?;
    }
    Ok(())
}

/// Fails unless what was read back gives the same output of every layer.
fn compare(
    parts: &AdapterWeights,
    again: &AdapterWeights,
    format: AdapterFormat,
    path: &Path,
) -> Result<f64> {
    let again: HashMap<_, _> = again
        .iter()
        .flat_map(|(component, layers)| {
            layers.iter().map(move |(l, g)| ((component.folder(), l), g))
        })
        .collect();
    let wrong = |problem| Err(TrainerError::Adapter { problem, path: path.into() });
    let mut worst = 0.0f64;
    for (component, layers) in kept(parts, format) {
        for (layer, given) in layers {
            let Some(found) = again.get(&(component.folder(), layer)) else {
                if given.is_zero() && given.magnitude.is_none() {
                    continue;
                }
                return wrong(format!("{layer} is missing when it is read back"));
            };
            let [before, after] = [given, found].map(LayerWeights::probe);
            // NaN differs from itself.
            if !given.is_finite() || !before.iter().all(|number| number.is_finite()) {
                continue;
            }
            let apart = crate::model::host::relative_error(&before, &after);
            if apart.is_nan() || apart > TOLERANCE || given.magnitude != found.magnitude {
                return wrong(format!("{layer} differs by {apart:e} when it is read back"));
            }
            worst = worst.max(apart);
        }
    }
    Ok(worst)
}
