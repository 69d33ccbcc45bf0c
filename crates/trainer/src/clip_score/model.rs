//! CLIP as a whole (transformers' `CLIPModel`): texts and images to embeddings of one space. Opening reads settings and
//! headers and compares every name and shape.

use std::path::Path;

use compute::{Device, DeviceKind, Params, Tape, Var};
use serde::Deserialize;
use serde_json::{Value, json};
use weights::{BytesDoneFn, Catalog};

use crate::cost::{self, StageMemory};
use crate::data::Pixels;
use crate::error::{Result, TrainerError};
use crate::model::adapter::Adapters;
use crate::model::build::{ModelBuilder, Precision};
use crate::model::config::{Unsupported, read_checked};
use crate::model::encoder::clip::processor::ClipImageProcessor;
use crate::model::encoder::clip::vision::{ClipVisionConfig, ClipVisionModel};
use crate::model::encoder::clip::{ClipConfig, ClipTextModel};
use crate::model::encoder::tokenizer::PromptTokenizer;
use crate::model::files::{self, CheckpointLayout, WeightFiles};
use crate::model::host::to_vec;
use crate::model::kind::{self, ModelKind};
use crate::model::recompute::Recompute;
use crate::model::tensor_piece::TensorPiece;
use crate::model::{component, hub};

/// The model, open.
pub struct ClipModel {
    config: ClipModelConfig,
    processor: ClipImageProcessor,
    tokenizer: PromptTokenizer,
    catalog: Catalog,
}

/// What `config.json` says.
#[derive(Deserialize)]
#[serde(try_from = "ClipModelJson")]
struct ClipModelConfig {
    text: ClipConfig,
    vision: ClipVisionConfig,
}

/// The file's keys.
#[derive(Deserialize)]
struct ClipModelJson {
    #[serde(default)]
    text_config: serde_json::Map<String, Value>,
    #[serde(default)]
    vision_config: ClipVisionConfig,
    #[serde(default = "default_projection")]
    projection_dim: usize,
}

/// Taken: transformers, as all that `text_config` may leave out.
fn default_projection() -> usize {
    512
}

impl TryFrom<ClipModelJson> for ClipModelConfig {
    type Error = serde_json::Error;

    fn try_from(json: ClipModelJson) -> std::result::Result<Self, Self::Error> {
        let mut text = json!({
            "vocab_size": 49408, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12,
            "num_attention_heads": 8, "max_position_embeddings": 77, "hidden_act": "quick_gelu",
            "layer_norm_eps": 1e-5, "eos_token_id": 49407,
        });
        let all = text.as_object_mut().expect("it is an object");
        all.extend(json.text_config);
        // It is that of the whole model that counts, and the class of a text model alone that does not.
        all.insert("projection_dim".into(), json.projection_dim.into());
        all.insert("architectures".into(), json!([]));
        Ok(Self { text: serde_json::from_value(text)?, vision: json.vision_config })
    }
}

impl ClipModelConfig {
    fn check(&self) -> std::result::Result<(), Unsupported> {
        self.text.check()?;
        self.vision.check()
    }
}

/// The model on a device.
pub struct LoadedClip<'a> {
    model: &'a ClipModel,
    device: &'a Device,
    parts: ClipParts,
    params: Params,
}

struct ClipParts {
    text: ClipTextModel,
    vision: ClipVisionModel,
}

impl ClipParts {
    fn new(config: &ClipModelConfig, build: &mut ModelBuilder<'_>) -> Result<Self> {
        let text = ClipTextModel::new(&config.text, build)?;
        let width = config.text.projection_dim;
        Ok(Self { text, vision: ClipVisionModel::new(&config.vision, width, build)? })
    }
}

/// Buffers that are no weights, and what turns cosines into logits.
fn layout() -> CheckpointLayout<'static> {
    CheckpointLayout {
        pieces: Box::new(|name| vec![TensorPiece::whole(name.to_owned())]),
        ignores: Box::new(|name| name.ends_with("position_ids") || name == "logit_scale"),
    }
}

impl ClipModel {
    /// Opens a folder as transformers saves it.
    pub fn open(path: &Path) -> Result<Self> {
        hub::check(path)?;
        if !path.is_dir() {
            let problem = format!("no folder of a CLIP model at {}", path.display());
            return Err(TrainerError::Request { problem, hint: kind::CLIP_MODELS });
        }
        kind::check(path, ModelKind::Clip)?;
        let config = read_checked(&path.join("config.json"), ClipModelConfig::check)?;
        let processor = ClipImageProcessor::open(path, &config.vision)?;
        let tokenizer = PromptTokenizer::open(path, config.text.max_position_embeddings)?;
        let (needed, vocab_size) = (tokenizer.vocab_size(), config.text.vocab_size);
        if needed > vocab_size {
            let problem =
                format!("vocab_size is {vocab_size}, the tokenizer has ids up to {}", needed - 1);
            return Err(TrainerError::Config { problem, path: path.join("config.json") });
        }
        let opened = Self { config, processor, tokenizer, catalog: component::weights(path)? };
        opened.files()?;
        Ok(opened)
    }

    fn files(&self) -> Result<WeightFiles<'_>> {
        WeightFiles::find(&self.catalog, &layout(), |build| ClipParts::new(&self.config, build))
    }

    #[cfg(test)]
    pub(super) fn processor(&self) -> &ClipImageProcessor {
        &self.processor
    }

    /// Bytes of its files.
    pub fn n_bytes(&self) -> u64 {
        self.catalog.bytes()
    }

    /// Peak bytes of loading it and embedding a text and an image, by a dry run.
    pub fn plan(&self, precision: Precision, kind: DeviceKind, limit: usize) -> Result<usize> {
        let device = Device::meta(kind, cost::UNLIMITED);
        let loaded = self.load(&device, precision, &|_| true)?;
        loaded.text("")?;
        let ClipVisionConfig { image_size, .. } = self.config.vision;
        let side = image_size as u32;
        let rgb = vec![0; 3 * image_size * image_size];
        loaded.image(Pixels { width: side, height: side, rgb })?;
        let peak_bytes = device.usage().extent;
        if peak_bytes > limit {
            let phase = StageMemory { name: "CLIP scores", peak_bytes };
            return Err(cost::too_large(phase, limit, None));
        }
        Ok(peak_bytes)
    }

    /// Loads it.
    pub fn load<'a>(
        &'a self,
        device: &'a Device,
        precision: Precision,
        tick: BytesDoneFn<'_>,
    ) -> Result<LoadedClip<'a>> {
        let build = |build: &mut ModelBuilder<'_>| ClipParts::new(&self.config, build);
        let (files, mut none) = (self.files()?, Adapters::none());
        let parts = files::load_model(device, &files, precision, &mut none, tick, build)?;
        Ok(LoadedClip { model: self, device, parts, params: Params::default() })
    }
}

impl LoadedClip<'_> {
    /// The embedding of a text, of length 1. What is too long for the model is cut off.
    pub fn text(&self, text: &str) -> Result<Vec<f32>> {
        let ids = self.model.tokenizer.encode(text).ids;
        self.embedding(|tape| Ok(self.parts.text.forward(tape, &ids, 1, Recompute::None)?.pooled))
    }

    /// The embedding of an image, of length 1.
    pub fn image(&self, image: Pixels) -> Result<Vec<f32>> {
        let values = self.model.processor.patches(image);
        self.embedding(|tape| self.parts.vision.forward(tape, &values))
    }

    fn embedding<'s>(&'s self, forward: impl FnOnce(&Tape<'s>) -> Result<Var>) -> Result<Vec<f32>> {
        let tape = Tape::inference(self.device, &self.params, 0);
        let embedding = to_vec(forward(&tape)?.tensor())?;
        let length = embedding.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
        let is_lost = !length.is_finite() || length == 0.0;
        if is_lost && !self.device.is_meta() {
            return Err(TrainerError::OutputLost { what: "an embedding of CLIP".into() });
        }
        Ok(embedding.into_iter().map(|x| (f64::from(x) / length) as f32).collect())
    }
}
