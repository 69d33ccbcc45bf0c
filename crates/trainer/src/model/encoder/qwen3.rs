//! Qwen3 as a text encoder (transformers' `Qwen3Model`, `Qwen3ForCausalLM`): the language model of `llama/` without its last
//! layers. Image models take hidden states from inside of it, as blocks give them, so what comes after is never loaded.

use compute::{Device, Result as Computed, Tape, Tensor, Var};
use serde::{Deserialize, Deserializer};
use weights::Catalog;

use super::stack::{EncoderStack, StackedEncoder};
use crate::error::Result;
use crate::model::build::ModelBuilder;
use crate::model::config::Unsupported;
use crate::model::files::CheckpointLayout;
use crate::model::llama::{
    BlockInputs, LanguageFamily, LlamaBlock, LlamaConfig, RopeConfig, RopeScaling, names,
};
use crate::model::tensor_piece::TensorPiece;

/// What `text_encoder/config.json` says.
#[derive(Clone, Debug, PartialEq)]
pub struct Qwen3Config {
    /// The language model.
    pub text: LlamaConfig,
    /// Which hidden states are the output. Not in the file: families differ in it.
    pub output: Qwen3Output,
}

/// Which hidden states are the output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Qwen3Output {
    /// Those before the last layer.
    #[default]
    BeforeLast,
    /// Those after layers 9, 18 and 27, one beside the other.
    Three,
}

/// Taken: diffusers 0.42.1's `Flux2KleinPipeline`.
const THREE: [usize; 3] = [9, 18, 27];

impl Qwen3Config {
    /// Qwen3-4B, as image models come with it.
    pub fn published_4b() -> Self {
        let text = LlamaConfig {
            family: LanguageFamily::Qwen3,
            vocab_size: 151_936,
            hidden_size: 2560,
            intermediate_size: 9728,
            num_hidden_layers: 36,
            num_attention_heads: 32,
            num_key_value_heads: 8,
            head_dim: 128,
            rotary_dim: 128,
            max_position_embeddings: 40_960,
            rms_norm_eps: 1e-6,
            rope: RopeConfig { theta: 1e6, scaling: RopeScaling::None },
            // The output layer is not asked for.
            tie_word_embeddings: true,
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
        Self { text, output: Qwen3Output::default() }
    }

    /// Qwen3-8B, as image models come with it.
    pub fn published_8b() -> Self {
        let Self { text, output } = Self::published_4b();
        Self { text: LlamaConfig { hidden_size: 4096, intermediate_size: 12_288, ..text }, output }
    }

    /// The same with other hidden states as output.
    #[must_use]
    pub fn with_output(self, output: Qwen3Output) -> Self {
        Self { output, ..self }
    }

    /// Width of a token of the output.
    pub fn width(&self) -> usize {
        self.text.hidden_size * self.taps().len().max(1)
    }

    /// Checks that all of it is supported.
    pub fn check(&self) -> std::result::Result<(), Unsupported> {
        let (family, n) = (self.text.family, self.text.num_hidden_layers);
        let problem = format!("model_type is {}, expected Qwen3", family.class());
        Unsupported::unless(family == LanguageFamily::Qwen3, problem)?;
        let (least, states) = match self.output {
            Qwen3Output::BeforeLast => (1, "the state before the last layer is"),
            Qwen3Output::Three => (THREE[2], "states up to that after layer 27 are"),
        };
        let problem = format!("num_hidden_layers is {n}, {states} taken");
        Unsupported::unless(n > least, problem)?;
        self.text.check()
    }
}

impl<'de> Deserialize<'de> for Qwen3Config {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        let text = LlamaConfig::deserialize(from)?;
        let text = LlamaConfig { tie_word_embeddings: true, ..text };
        Ok(Self { text, output: Qwen3Output::default() })
    }
}

/// Whether a file holds Qwen3.
pub fn is_qwen3(catalog: &Catalog) -> bool {
    shape_of(catalog, "model.layers.0.self_attn.q_norm.weight").is_some()
}

/// Infers the config of a file from its shapes, and from `like` what they do not tell: epsilon and rotary settings.
pub fn infer(catalog: &Catalog, like: &Qwen3Config) -> Option<Qwen3Config> {
    let text = names::infer(&like.text, |name| shape_of(catalog, name))?;
    Some(Qwen3Config { text, output: like.output })
}

/// The shape of a tensor by our name for it.
fn shape_of(catalog: &Catalog, name: &str) -> Option<Vec<usize>> {
    let pieces = (layout(catalog, usize::MAX).pieces)(name);
    let tensor = catalog.find(&pieces.first()?.key).ok()?;
    Some(tensor.shape.iter().map(|size| *size as usize).collect())
}

/// The names of files, of which blocks from `n_blocks` on and all that comes after them are ignored.
pub fn layout(catalog: &Catalog, n_blocks: usize) -> CheckpointLayout<'static> {
    let is_after = move |name: &str| block_of(name).is_some_and(|index| index >= n_blocks);
    if names::is_gguf(catalog) {
        let place = |name: &str| vec![TensorPiece::whole(names::gguf_name(name))];
        let is_spare = move |name: &str| {
            ["output.weight", "output_norm.weight"].contains(&name) || is_after(name)
        };
        return CheckpointLayout { pieces: Box::new(place), ignores: Box::new(is_spare) };
    }
    let prefix = names::prefix(catalog);
    let ours = prefix.clone();
    let is_spare = move |name: &str| match name.strip_prefix(&ours) {
        Some(inner) => {
            ["norm.weight", "lm_head.weight"].contains(&inner)
                || inner.ends_with("rotary_emb.inv_freq")
                || is_after(name)
        }
        None => true,
    };
    let place = move |name: &str| {
        let inner = name.strip_prefix("model.").unwrap_or(name);
        vec![TensorPiece::whole(format!("{prefix}{inner}"))]
    };
    CheckpointLayout { pieces: Box::new(place), ignores: Box::new(is_spare) }
}

/// The index of the block that a tensor of a file is of.
fn block_of(name: &str) -> Option<usize> {
    let mut parts = name.split('.').skip_while(|part| !["layers", "blk"].contains(part));
    parts.nth(1)?.parse().ok()
}

/// The encoder.
pub type Qwen3Encoder = StackedEncoder<Qwen3Config>;

impl EncoderStack for Qwen3Config {
    /// The token embedding.
    type Embedding = Var;
    type Block = LlamaBlock;
    type Inputs = BlockInputs;

    /// As many as the output needs.
    fn n_blocks(&self) -> usize {
        match self.output {
            Qwen3Output::BeforeLast => self.text.num_hidden_layers - 1,
            Qwen3Output::Three => THREE[2],
        }
    }

    fn taps(&self) -> &[usize] {
        match self.output {
            Qwen3Output::BeforeLast => &[],
            Qwen3Output::Three => &THREE,
        }
    }

    fn epsilon(&self) -> f32 {
        self.text.rms_norm_eps
    }

    fn layout<'c>(&self, catalog: &'c Catalog) -> CheckpointLayout<'c> {
        layout(catalog, self.n_blocks())
    }

    fn embedding(&self, build: &mut ModelBuilder<'_>) -> Result<Var> {
        let sizes = [self.text.vocab_size, self.text.hidden_size];
        build.array("model.embed_tokens.weight", sizes)
    }

    fn block(&self, build: &mut ModelBuilder<'_>, index: usize) -> Result<LlamaBlock> {
        LlamaBlock::new(&self.text, build.at(format!("model.layers.{index}")))
    }

    fn last_norm(&self, _: &mut ModelBuilder<'_>) -> Result<Option<Var>> {
        Ok(None)
    }

    fn tokens(embedding: &Var) -> &Var {
        embedding
    }

    fn inputs(&self, device: &Device, _: &Var, n: usize) -> Result<BlockInputs> {
        self.text.check_length(n)?;
        BlockInputs::of_text(&self.text, device, n)
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

    /// All tensors of the published model, whose names begin with `model.`.
    fn specs() -> Vec<TensorSpec> {
        let mut config = Qwen3Config::published_4b();
        config.text.num_hidden_layers += 1;
        tensor_specs(|build| Qwen3Encoder::new(&config, build)).unwrap()
    }

    /// Counted by transformers, with the output layer, which is tied.
    #[test]
    fn the_published_model_has_its_number_of_parameters() {
        let count: usize = specs().iter().map(|spec| spec.shape.elements()).sum();
        // And the last norm.
        assert_eq!(count + 2560, 4_022_468_096);
    }

    /// What a file calls our tensors, and the tensors that it has beside.
    type NamesOfFile<'a> = (&'a dyn Fn(&str) -> String, [&'a str; 2]);

    #[test]
    fn published_files_are_known_by_all_names() {
        let published = Qwen3Config::published_4b();
        let bare = |name: &str| name.replacen("model.", "", 1);
        let forms: [NamesOfFile<'_>; 3] = [
            (&str::to_owned, ["model.norm.weight", "lm_head.weight"]),
            (&bare, ["norm.weight", "lm_head.weight"]),
            (&names::gguf_name, ["output_norm.weight", "output.weight"]),
        ];
        for (name, spare) in forms {
            let sizes = |spec: &TensorSpec| spec.shape.sizes().iter().map(|n| *n as u64).collect();
            let own = specs().into_iter().map(|spec| (name(&spec.name), sizes(&spec)));
            let spare = spare.map(|name| (name.to_owned(), vec![3]));
            let catalog = Catalog::meta(Path::new("file"), FileDtype::Bf16, own.chain(spare));
            assert!(is_qwen3(&catalog));
            assert_eq!(infer(&catalog, &published).unwrap(), published);
            let build = |build: &mut ModelBuilder<'_>| Qwen3Encoder::new(&published, build);
            WeightFiles::find(&catalog, &published.layout(&catalog), build).unwrap();
        }
    }
}
