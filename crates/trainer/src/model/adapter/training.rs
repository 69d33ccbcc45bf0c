//! A LoRA that acts on the frozen base in training alone: one that undoes the distillation of a model to few steps, so that
//! what is trained beside it does not have to. It is computed beside the layers and never merged into them, so that samples
//! are drawn without it, to the bit, also where the base is quantised.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use compute::ops::Linear;
use compute::{Device, Dtype, Tag, Tape, Var};

use super::LayerWeights;
use super::factors::{AdapterMatrix, Factors};
use super::read::{AdapterFile, Component, TargetModule};
use crate::error::{Result, TrainerError};
use crate::fingerprint::Fingerprint;

/// The adapter. Copies of it are switched together.
#[derive(Clone)]
pub struct TrainingAdapter {
    path: PathBuf,
    layers: Arc<HashMap<String, LayerWeights>>,
    fingerprint: Fingerprint,
    is_on: Arc<AtomicBool>,
}

/// Its part for a layer, on the device.
pub(in crate::model) struct TrainingLora {
    /// [rank, in]
    down: Var,
    /// [out, rank], with the scale in it.
    up: Var,
    is_on: Arc<AtomicBool>,
}

impl TrainingAdapter {
    /// Reads the file of an adapter for these layers of a transformer.
    pub fn open(path: &Path, modules: &[TargetModule]) -> Result<Self> {
        let mut file = AdapterFile::open(path)?;
        let layers = file.take(Component::Transformer, None, modules)?;
        file.check_all_taken()?;
        if let Some((layer, kind)) =
            layers.iter().find_map(|(name, given)| Some((name, other_kind(given)?)))
        {
            let problem = format!("it is a {kind}, as {layer} shows; a training adapter is a LoRA");
            return Err(TrainerError::Adapter { problem, path: path.into() });
        }
        let fingerprint = file.fingerprint()?;
        let (layers, is_on) = (Arc::new(layers), Arc::new(AtomicBool::new(true)));
        Ok(Self { path: path.into(), layers, fingerprint, is_on })
    }

    /// Its file or folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Identifies it.
    pub fn fingerprint(&self) -> &Fingerprint {
        &self.fingerprint
    }

    /// What `work` gives while the adapter does not act.
    pub fn without<T>(&self, work: impl FnOnce() -> T) -> T {
        self.is_on.store(false, Ordering::Relaxed);
        let done = work();
        self.is_on.store(true, Ordering::Relaxed);
        done
    }

    /// Its part for a layer [out, in], if it has one.
    pub(super) fn attach(
        &self,
        device: &Device,
        module: &str,
        [outputs, inputs]: [usize; 2],
        dtype: Dtype,
    ) -> Result<Option<TrainingLora>> {
        let Some((given, [down, up])) =
            self.layers.get(module).and_then(|given| Some((given, matrices(given)?)))
        else {
            return Ok(None);
        };
        let scale = given.scale();
        let scaled: Vec<f32> = up.values.iter().map(|value| scale * value).collect();
        device.with_tag(Tag::Weights, || {
            Ok(Some(TrainingLora {
                down: device.upload_as([given.rank, inputs], &down.values, dtype)?.into(),
                up: device.upload_as([outputs, given.rank], &scaled, dtype)?.into(),
                is_on: Arc::clone(&self.is_on),
            }))
        })
    }
}

/// A and B of a LoRA.
fn matrices(given: &LayerWeights) -> Option<[&AdapterMatrix; 2]> {
    match &given.factors {
        Factors::Lora { down, up } => Some([down, up]),
        Factors::Loha { .. } | Factors::Lokr { .. } | Factors::Norm { .. } => None,
    }
}

/// What it is, if it is no LoRA.
fn other_kind(given: &LayerWeights) -> Option<&'static str> {
    match &given.factors {
        Factors::Lora { .. } => given.magnitude.is_some().then_some("DoRA"),
        other => Some(other.form_name()),
    }
}

impl TrainingLora {
    /// What it adds to a layer's output, if it acts.
    pub fn forward(&self, tape: &Tape<'_>, x: &Var) -> compute::Result<Option<Var>> {
        if !self.is_on.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let inner = tape.linear(x, Linear::new(&self.down))?;
        tape.linear(&inner, Linear::new(&self.up)).map(Some)
    }
}
