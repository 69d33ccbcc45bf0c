//! The adapter of a checkpoint: one file for diffusers, or, of a language model and of what diffusers has no form for,
//! PEFT's two. Tensors are copied from
//! the device one at a time, so that a checkpoint takes no memory beyond the plan. The bytes are those that `export`
//! writes and checks; formats that fuse layers are left to it.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use compute::Tensor;
use weights::write::AtomicFile;

use super::{AdapterFormat, FileForm, settings, stem};
use crate::error::{Result, TrainerError};
use crate::model::adapter::LayerWeights;
use crate::model::adapter::factors::{AdapterMatrix, Factors};
use crate::model::adapter::read::{Component, DIFFUSERS_FILE, PEFT_CONFIG, PEFT_FILE};
use crate::model::build::TensorSpec;
use crate::model::files::{ShardedOutput, save_tensors};

/// The adapter of a layer, on a device.
pub struct LayerTensors<'a> {
    /// The part of the model it is in.
    pub component: Component,
    /// The layer's name.
    pub module: &'a str,
    /// LoRA rank.
    pub rank: usize,
    /// The scale is alpha / rank.
    pub alpha: f32,
    /// Its matrices.
    pub factors: Factors<&'a Tensor>,
    /// `[out]`, if it is a `DoRA`.
    pub magnitude: Option<&'a Tensor>,
}

/// Writes an adapter of a model that has these tensors into a checkpoint's folder.
pub fn write(folder: &Path, layers: &[LayerTensors<'_>], of_base: &[TensorSpec]) -> Result<()> {
    let is_lora = layers.iter().all(|layer| matches!(layer.factors, Factors::Lora { .. }));
    let is_language = layers.iter().any(|layer| layer.component == Component::Language);
    let (format, name) = if is_lora && !is_language {
        (AdapterFormat::Diffusers, DIFFUSERS_FILE)
    } else {
        (AdapterFormat::Peft, PEFT_FILE)
    };
    // Those of a part of the model follow each other.
    let parts = layers.chunk_by(|a, b| a.component == b.component);
    let parts = parts.map(|of| (of[0].component, of.iter().map(without_data).collect())).collect();
    if format == AdapterFormat::Peft {
        let path = folder.join(PEFT_CONFIG);
        let mut file = AtomicFile::create(&path)?;
        let written = file.write_all(settings::peft(&parts, of_base)?.as_bytes());
        written.map_err(|source| TrainerError::Io { what: "write", path, source })?;
        file.commit()?;
    }
    let mut tensors = BTreeMap::new();
    for layer in layers {
        let stem = stem(layer.component, layer.module, format);
        let FileForm { lora, magnitude, .. } = FileForm::of(format, None);
        let named = layer.factors.named(lora).into_iter();
        tensors.extend(named.map(|(name, tensor)| (format!("{stem}.{name}"), *tensor)));
        tensors.extend(layer.magnitude.map(|tensor| (format!("{stem}.{magnitude}"), tensor)));
    }
    let stem = name.strip_suffix(".safetensors").unwrap_or(name);
    let output = ShardedOutput { folder, stem, max_shard_bytes: u64::MAX };
    save_tensors(output, &settings::header(&parts, format, None), &tensors, &|_| true)?;
    Ok(())
}

/// A layer's settings, without values.
fn without_data(layer: &LayerTensors<'_>) -> (String, LayerWeights) {
    let LayerTensors { rank, alpha, magnitude, .. } = *layer;
    let factors = layer.factors.map(|tensor| {
        let shape = tensor.shape();
        AdapterMatrix::new([shape.rows(), shape.width()], Vec::new())
    });
    let magnitude = magnitude.map(|_| Vec::new());
    (layer.module.into(), LayerWeights { rank, alpha, factors, magnitude })
}
