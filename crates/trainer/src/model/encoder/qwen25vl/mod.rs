//! Qwen2.5-VL as a text encoder (transformers' `Qwen2_5_VLForConditionalGeneration`): the language model of `llama/` with
//! its last hidden state after the final norm. The output layer is not loaded, the vision tower only for prompts with
//! images. `vision_language` is all of it, which writes about images.
//!
//! Its rotary positions have three axes, for images; those of text are equal on all, which is one axis.

mod positions;
pub mod processor;
pub mod tower;
pub mod vision;
pub mod vision_language;
pub mod windows;

use compute::{Device, Result as Computed, Tape, Tensor, Var};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value, json};
use weights::Catalog;

use self::positions::mrope_positions;
use self::vision::VisionConfig;
use super::stack::{EncoderStack, StackedEncoder, TokenLayout};
use crate::error::Result;
use crate::model::build::ModelBuilder;
use crate::model::config::Unsupported;
use crate::model::files::CheckpointLayout;
use crate::model::llama::{
    BlockInputs, LanguageFamily, LlamaBlock, LlamaConfig, RopeConfig, RopeScaling, names,
};
use crate::model::tensor_piece::TensorPiece;

/// What `text_encoder/config.json` says. Files of transformers up to 4.51 have the settings of the language model at the
/// top, later ones under `text_config`.
#[derive(Clone, Debug, PartialEq)]
pub struct Qwen25VlConfig {
    /// The language model.
    pub text: LlamaConfig,
    /// Pairs of a head that turn with each axis of positions: time, height, width.
    pub mrope_section: [usize; 3],
    /// The vision tower, or why its settings cannot be read.
    pub vision: std::result::Result<Box<VisionConfig>, String>,
}

/// Taken: the default of transformers' `Qwen2_5_VLTextConfig`, as the next.
const DEFAULT_THETA: f64 = 1e6;
const DEFAULT_EPSILON: f64 = 1e-5;
const DEFAULT_SECTION: [usize; 3] = [16, 24, 24];

impl Qwen25VlConfig {
    /// Qwen2.5-VL-7B, as image models come with it.
    pub fn published() -> Self {
        let text = LlamaConfig {
            family: LanguageFamily::Qwen2,
            vocab_size: 152_064,
            hidden_size: 3584,
            intermediate_size: 18_944,
            num_hidden_layers: 28,
            num_attention_heads: 28,
            num_key_value_heads: 4,
            head_dim: 128,
            rotary_dim: 128,
            max_position_embeddings: 128_000,
            rms_norm_eps: 1e-6,
            rope: RopeConfig { theta: DEFAULT_THETA, scaling: RopeScaling::None },
            tie_word_embeddings: false,
            attention_bias: false,
            mlp_bias: false,
            window: None,
            full_attention: Vec::new(),
            local_rope_theta: None,
            query_pre_attn_scalar: None,
            experts: None,
            bos_token_id: None,
            eos_token_ids: Vec::new(),
        };
        Self {
            text,
            mrope_section: DEFAULT_SECTION,
            vision: Ok(Box::new(VisionConfig::published())),
        }
    }

    /// Checks that all that prompts of text need is supported.
    pub fn check(&self) -> std::result::Result<(), Unsupported> {
        self.text.check()
    }

    /// The vision tower, once all that prompts with images need is found to be supported.
    pub fn checked_vision(&self) -> std::result::Result<&VisionConfig, Unsupported> {
        let vision = self.vision.as_ref().map_err(|problem| Unsupported(problem.clone()))?;
        vision.check(self.text.hidden_size)?;
        let (section, pairs) = (self.mrope_section, self.text.head_dim / 2);
        let problem = format!("mrope_section {section:?} is not {pairs} pairs of a head together");
        Unsupported::unless(section.iter().sum::<usize>() == pairs, problem)?;
        Ok(vision)
    }
}

impl<'de> Deserialize<'de> for Qwen25VlConfig {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        use serde::de::Error;
        let mut settings = Map::<String, Value>::deserialize(from)?;
        let vision = vision_config(settings.remove("vision_config"));
        let is_tied = |settings: &Map<String, Value>| {
            settings.get("tie_word_embeddings").and_then(Value::as_bool).unwrap_or(false)
        };
        let outer_is_tied = is_tied(&settings);
        let text = settings.remove("text_config");
        let text = text.unwrap_or(Value::Object(settings));
        let Value::Object(text) = text else {
            return Err(D::Error::custom(format!("text_config is {text}, expected settings")));
        };
        // transformers from version 5 on has it beside `text_config`, older ones within it.
        let tie_word_embeddings = outer_is_tied || is_tied(&text);
        let mrope_section = mrope_section(&text).map_err(D::Error::custom)?;
        let text = serde_json::from_value(as_qwen2(text));
        let text: LlamaConfig = text.map_err(D::Error::custom)?;
        Ok(Self { text: LlamaConfig { tie_word_embeddings, ..text }, mrope_section, vision })
    }
}

/// Wrong settings of a tower that is not used do not matter.
fn vision_config(settings: Option<Value>) -> std::result::Result<Box<VisionConfig>, String> {
    let settings = settings.ok_or("vision_config is missing")?;
    serde_json::from_value(settings).map_err(|error| format!("vision_config: {error}"))
}

fn mrope_section(text: &Map<String, Value>) -> serde_json::Result<[usize; 3]> {
    let mut rotary =
        ["rope_parameters", "rope_scaling"].into_iter().filter_map(|key| text.get(key));
    let section = rotary.find_map(|rotary| rotary.get("mrope_section"));
    section.map_or(Ok(DEFAULT_SECTION), |section| serde_json::from_value(section.clone()))
}

/// The same settings as those of a Qwen2.
fn as_qwen2(mut text: Map<String, Value>) -> Value {
    text.insert("model_type".into(), "qwen2".into());
    text.entry("rms_norm_eps").or_insert(DEFAULT_EPSILON.into());
    text.entry("rope_theta").or_insert(DEFAULT_THETA.into());
    for rotary in ["rope_scaling", "rope_parameters"] {
        let Some(Value::Object(rotary)) = text.get_mut(rotary) else { continue };
        for kind in ["type", "rope_type"] {
            if rotary.get(kind).is_some_and(|kind| kind == "mrope") {
                rotary.insert(kind.into(), json!("default"));
            }
        }
    }
    Value::Object(text)
}

/// Whether a file holds Qwen2.5-VL or a Qwen2, whose names and shapes are the same.
pub fn is_qwen25vl(catalog: &Catalog) -> bool {
    shape_of(catalog, "model.layers.0.self_attn.q_proj.bias").is_some()
}

/// Infers the config of a file from its shapes, and from `like` what they do not tell: the width of heads, epsilon and
/// rotary settings.
pub fn infer(catalog: &Catalog, like: &Qwen25VlConfig) -> Option<Qwen25VlConfig> {
    let text = names::infer(&like.text, |name| shape_of(catalog, name))?;
    let vision = like.vision.as_ref().map_err(Clone::clone);
    let vision = vision.and_then(|like| {
        let found = vision::infer(catalog, like).map(Box::new);
        found.ok_or_else(|| "the file has no vision tower".to_owned())
    });
    Some(Qwen25VlConfig { text, mrope_section: like.mrope_section, vision })
}

/// The shape of a tensor by our name for it.
fn shape_of(catalog: &Catalog, name: &str) -> Option<Vec<usize>> {
    let pieces = (layout(catalog).pieces)(name);
    let tensor = catalog.find(&pieces.first()?.key).ok()?;
    Some(tensor.shape.iter().map(|size| *size as usize).collect())
}

const EMBEDDING: &str = "embed_tokens.weight";

/// Names begin with `model.`, in files of newer transformers with `model.language_model.`; all others are the output layer
/// and the vision tower. GGUF files have names of their own.
pub fn layout(catalog: &Catalog) -> CheckpointLayout<'static> {
    if names::is_gguf(catalog) {
        let place = |name: &str| vec![TensorPiece::whole(names::gguf_name(name))];
        let ignores = |name: &str| name == "output.weight";
        return CheckpointLayout { pieces: Box::new(place), ignores: Box::new(ignores) };
    }
    let prefix = names::prefix(catalog);
    let ours = prefix.clone();
    let is_spare = move |name: &str| match name.strip_prefix(&ours) {
        Some(inner) => inner.starts_with("visual.") || inner.ends_with("rotary_emb.inv_freq"),
        None => true,
    };
    let place = move |name: &str| {
        let inner = name.strip_prefix("model.").unwrap_or(name);
        vec![TensorPiece::whole(format!("{prefix}{inner}"))]
    };
    CheckpointLayout { pieces: Box::new(place), ignores: Box::new(is_spare) }
}

/// The encoder.
pub type Qwen25VlEncoder = StackedEncoder<Qwen25VlConfig>;

impl EncoderStack for Qwen25VlConfig {
    /// The token embedding.
    type Embedding = Var;
    type Block = LlamaBlock;
    type Inputs = BlockInputs;

    fn n_blocks(&self) -> usize {
        self.text.num_hidden_layers
    }

    fn epsilon(&self) -> f32 {
        self.text.rms_norm_eps
    }

    fn layout<'c>(&self, catalog: &'c Catalog) -> CheckpointLayout<'c> {
        layout(catalog)
    }

    fn embedding(&self, build: &mut ModelBuilder<'_>) -> Result<Var> {
        build.array(format!("model.{EMBEDDING}"), [self.text.vocab_size, self.text.hidden_size])
    }

    fn block(&self, build: &mut ModelBuilder<'_>, index: usize) -> Result<LlamaBlock> {
        LlamaBlock::new(&self.text, build.at(format!("model.layers.{index}")))
    }

    fn last_norm(&self, build: &mut ModelBuilder<'_>) -> Result<Option<Var>> {
        build.vector("model.norm.weight", self.text.hidden_size).map(Some)
    }

    fn tokens(embedding: &Var) -> &Var {
        embedding
    }

    fn inputs(&self, device: &Device, _: &Var, n: usize) -> Result<BlockInputs> {
        self.text.check_length(n)?;
        BlockInputs::of_text(&self.text, device, n)
    }

    fn image_inputs(&self, device: &Device, layout: &TokenLayout) -> Result<Option<BlockInputs>> {
        self.text.check_length(layout.n)?;
        let positions = mrope_positions(layout);
        BlockInputs::of_sections(&self.text, device, self.mrope_section, &positions).map(Some)
    }

    fn forward(
        &self,
        tape: &Tape<'_>,
        block: &LlamaBlock,
        x: &Var,
        inputs: &BlockInputs,
        lengths: Option<&Tensor>,
    ) -> Computed<Var> {
        block.forward(tape, x, &inputs.with_lengths(lengths))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use weights::FileDtype;

    use super::*;
    use crate::model::build::{TensorSpec, tensor_specs};
    use crate::model::files::WeightFiles;

    /// A file of the published sizes, with these names.
    fn file(name: impl Fn(&str) -> String) -> Catalog {
        let config = Qwen25VlConfig::published();
        let specs = tensor_specs(|build| Qwen25VlEncoder::new(&config, build)).unwrap();
        let sizes = |spec: &TensorSpec| spec.shape.sizes().iter().map(|n| *n as u64).collect();
        let own = specs.iter().map(|spec| (name(&spec.name), sizes(spec)));
        let spare = ["lm_head.weight", "visual.blocks.0.norm1.weight", "model.visual.merger.ln_q"];
        let spare = spare.map(|name| (name.to_owned(), vec![3]));
        let spare = spare.into_iter().filter(|_| name("model.norm.weight") != "output_norm.weight");
        Catalog::meta(Path::new("file"), FileDtype::Bf16, own.chain(spare))
    }

    #[test]
    fn published_files_are_known_by_all_names() {
        let published = Qwen25VlConfig::published();
        let nested = |name: &str| name.replacen("model.", "model.language_model.", 1);
        let forms: [&dyn Fn(&str) -> String; 4] = [
            &str::to_owned,
            &nested,
            &|name| name.replacen("model.", "language_model.model.", 1),
            &names::gguf_name,
        ];
        for name in forms {
            let catalog = file(name);
            assert!(is_qwen25vl(&catalog));
            let inferred = infer(&catalog, &published).unwrap();
            assert_eq!(inferred.text, published.text);
            assert_eq!(inferred.vision, Err("the file has no vision tower".into()));
            let build = |build: &mut ModelBuilder<'_>| Qwen25VlEncoder::new(&published, build);
            WeightFiles::find(&catalog, &layout(&catalog), build).unwrap();
        }
    }

    /// Counted by transformers, without the output layer.
    #[test]
    fn the_published_model_has_its_number_of_parameters() {
        let config = Qwen25VlConfig::published();
        let specs = tensor_specs(|build| Qwen25VlEncoder::new(&config, build)).unwrap();
        let count: usize = specs.iter().map(|spec| spec.shape.elements()).sum();
        assert_eq!(count, 7_070_619_136);
    }

    #[test]
    fn settings_are_read_in_both_forms() {
        let text = json!({
            "vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944,
            "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
            "max_position_embeddings": 128_000, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
            "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [16, 24, 24]},
            "sliding_window": 32_768, "use_sliding_window": false, "tie_word_embeddings": false,
        });
        let mut flat = text.clone();
        let vision = json!({"hidden_size": 1280});
        flat["vision_config"] = vision.clone();
        for settings in [flat, json!({"text_config": text, "vision_config": vision})] {
            let config: Qwen25VlConfig = serde_json::from_value(settings).unwrap();
            assert_eq!(config, Qwen25VlConfig::published());
        }
        let wrong = serde_json::from_value::<Qwen25VlConfig>(json!({"text_config": 3}));
        assert_eq!(wrong.unwrap_err().to_string(), "text_config is 3, expected settings");
    }
}
