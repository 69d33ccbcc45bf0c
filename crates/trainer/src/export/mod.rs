//! Adapters for other programs. Each file that is written is read again by the rules of the program
//! it is for, and compared with what was to be written: a key that its reader does not know would
//! change the image without a word. `merge/` adds an adapter to its base instead, `card/` tells
//! people about it, `language` has what is written of language models, `streamed` and `full` what is made
//! of checkpoints.
//!
//! ```text
//! OUT/
//!   pytorch_lora_weights.safetensors   diffusers; alpha in the header
//!   peft/                              PEFT: adapter_config.json, adapter_model.safetensors
//!   NAME-kohya.safetensors             kohya: the original layers, q, k and v together
//!   NAME-comfyui.safetensors           ComfyUI, the same layers by its own names
//! ```

pub mod adapter_checkpoint;
pub mod card;
mod fuse;
pub mod gguf;
pub mod language;
pub mod merge;
pub mod model;
mod settings;

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use weights::WeightsError;
use weights::safetensors::OutputTensor;
use weights::write::write_file;

use crate::error::{Result, TrainerError};
use crate::model::adapter::read::{AdapterFile, Component, DIFFUSERS_FILE, PEFT_CONFIG, PEFT_FILE};
use crate::model::adapter::{AdapterFormat, AdapterWeights, LoraWeights};
use crate::model::build::TensorSpec;
use crate::model::diffusion::Pipeline;
use crate::model::diffusion::family::ExportMetadata;
use crate::model::tensor_piece::TensorPiece;

/// A file that was written and proven.
#[derive(Clone, Debug)]
pub struct ExportedFile {
    /// Whom it is for.
    pub format: AdapterFormat,
    /// Where it lies.
    pub path: PathBuf,
    /// Layers that were found again in it.
    pub n_layers: usize,
    /// The largest difference of what a layer adds, relative to the largest number it adds.
    pub difference: f64,
}

/// Above this a file does not hold what was to be written. Chosen: a hundred roundings of f32.
const TOLERANCE: f64 = 1e-5;

/// Where a layer lies in the original layout.
type OriginalLayoutFn<'a> = &'a dyn Fn(&str) -> Vec<TensorPiece>;

/// The model that an adapter is for, as far as its files speak of it.
struct ExportBase<'a> {
    /// All of its tensors.
    tensors: &'a [TensorSpec],
    original: OriginalLayoutFn<'a>,
    /// Of a diffusion model's family.
    export: Option<&'a ExportMetadata>,
}

/// Writes what `pipeline` holds into `folder` and proves it.
pub fn export(
    pipeline: &mut Pipeline,
    format: AdapterFormat,
    folder: &Path,
    name: &str,
) -> Result<ExportedFile> {
    let parts = pipeline.adapter();
    let config = &pipeline.transformer.config;
    let original = |layer: &str| config.original_module(layer);
    let (tensors, export) = (&config.tensor_specs()?[..], Some(&config.family().export));
    let base = ExportBase { tensors, original: &original, export };
    let path = write(&parts, format, (folder, name), &base)?;
    // Values that are not finite come here only if that was asked for.
    pipeline.take_adapter(AdapterFile::open(&path)?.with_any_values(true))?;
    let again = pipeline.adapter();
    let difference = compare(&parts, &again, format, &path)?;
    let n_layers = kept(&parts, format).map(|(_, layers)| layers.len()).sum();
    // What was read back may have been rounded or put together anew; the next file is made of the
    // first again.
    pipeline.set_adapter(parts);
    Ok(ExportedFile { format, path, n_layers, difference })
}

/// The parts that a format has room for.
fn kept(
    parts: &AdapterWeights,
    format: AdapterFormat,
) -> impl Iterator<Item = (Component, &BTreeMap<String, LoraWeights>)> {
    let has_room = move |component: Component| {
        format != AdapterFormat::Peft || !matches!(component, Component::TextEncoder(_))
    };
    parts.iter().filter(move |(c, _)| has_room(*c)).map(|(component, layers)| (*component, layers))
}

fn write(
    parts: &AdapterWeights,
    format: AdapterFormat,
    (folder, name): (&Path, &str),
    base: &ExportBase<'_>,
) -> Result<PathBuf> {
    let mut tensors = BTreeMap::new();
    for (component, layers) in kept(parts, format) {
        for (stem, given) in stems(component, layers, format, base.original)? {
            insert(&stem, &given, format, &mut tensors);
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
    fs::create_dir_all(beside).map_err(failed)?;
    if format == AdapterFormat::Peft {
        let config = settings::peft(parts, base.tensors);
        fs::write(peft.join(PEFT_CONFIG), config).map_err(failed)?;
    }
    save(&path, &settings::header(parts, format, base.export), &tensors)?;
    Ok(result)
}

/// Shape and numbers of a tensor to be written.
type TensorData = (Vec<u64>, Vec<f32>);

fn save(
    path: &Path,
    metadata: &BTreeMap<String, String>,
    tensors: &BTreeMap<String, TensorData>,
) -> Result<()> {
    let entering = tensors.iter().map(|(name, (shape, _))| OutputTensor {
        name: name.clone(),
        dtype: weights::FileDtype::F32,
        shape: shape.clone(),
    });
    write_file(path, metadata, entering.collect(), false, &mut |tensor, out| {
        let (_, numbers) = &tensors[&tensor.name];
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        out.write_all(&bytes).map_err(|source| WeightsError::io("write", path, source))
    })?;
    Ok(())
}

/// What a program calls the layers, and what it puts into each.
fn stems(
    component: Component,
    layers: &BTreeMap<String, LoraWeights>,
    format: AdapterFormat,
    original: OriginalLayoutFn<'_>,
) -> Result<Vec<(String, LoraWeights)>> {
    let renamed = |name: &dyn Fn(&str) -> String| {
        layers.iter().map(|(layer, given)| (name(layer), given.clone())).collect()
    };
    let flat = |layer: &str| layer.replace('.', "_");
    let Component::TextEncoder(index) = component else {
        return Ok(match format {
            AdapterFormat::Diffusers | AdapterFormat::Peft => {
                renamed(&|layer| stem(component, layer, format))
            }
            AdapterFormat::Kohya => fuse::fuse(layers, original)?
                .into_iter()
                .map(|(layer, given)| (format!("lora_unet_{}", flat(&layer)), given))
                .collect(),
            AdapterFormat::Comfyui => fuse::fuse(layers, original)?
                .into_iter()
                .map(|(layer, given)| (format!("diffusion_model.{layer}"), given))
                .collect(),
        });
    };
    Ok(match format {
        AdapterFormat::Kohya => renamed(&|layer| format!("lora_te{index}_{}", flat(layer))),
        _ => renamed(&|layer| stem(component, layer, format)),
    })
}

/// What diffusers or PEFT, which know our layers, call one of them.
fn stem(component: Component, layer: &str, format: AdapterFormat) -> String {
    match (component, format) {
        (Component::Transformer | Component::Language, AdapterFormat::Peft) => {
            format!("base_model.model.{layer}")
        }
        _ => format!("{}.{layer}", component.folder()),
    }
}

/// How the names of a layer's tensors end: A, B and, of a `DoRA`, its magnitudes.
fn suffixes(format: AdapterFormat) -> [&'static str; 3] {
    match format {
        AdapterFormat::Diffusers | AdapterFormat::Peft => {
            ["lora_A.weight", "lora_B.weight", "lora_magnitude_vector"]
        }
        AdapterFormat::Kohya => ["lora_down.weight", "lora_up.weight", "dora_scale"],
        AdapterFormat::Comfyui => ["lora_A.weight", "lora_B.weight", "dora_scale"],
    }
}

/// A layer's tensors by their names there.
fn insert(
    stem: &str,
    given: &LoraWeights,
    format: AdapterFormat,
    into: &mut BTreeMap<String, TensorData>,
) {
    let [outputs, inputs] = given.sizes().map(|size| size as u64);
    let rank = given.rank as u64;
    let [down, up, magnitude] = suffixes(format).map(|ending| format!("{stem}.{ending}"));
    into.insert(down, (vec![rank, inputs], given.down.clone()));
    into.insert(up, (vec![outputs, rank], given.up.clone()));
    let has_settings = matches!(format, AdapterFormat::Diffusers | AdapterFormat::Peft);
    if !has_settings {
        into.insert(format!("{stem}.alpha"), (Vec::new(), vec![given.alpha]));
    }
    if let Some(numbers) = &given.magnitude {
        let shape = if has_settings { vec![outputs] } else { vec![outputs, 1] };
        into.insert(magnitude, (shape, numbers.clone()));
    }
}

/// That what was read back adds the same to every layer.
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
                return wrong(format!("{layer} is not found again"));
            };
            let [before, after] = [given, found].map(LoraWeights::probe);
            // What is not finite differs from itself.
            if !given.is_finite() || !before.iter().all(|number| number.is_finite()) {
                continue;
            }
            let apart = crate::model::host::relative_error(&before, &after);
            if apart.is_nan() || apart > TOLERANCE || given.magnitude != found.magnitude {
                return wrong(format!("{layer} differs by {apart:e} when it is read again"));
            }
            worst = worst.max(apart);
        }
    }
    Ok(worst)
}
