//! One text encoder of a pipeline: its weights, its tokenizer, its adapter, and encoding.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use compute::{Device, Tape};
use weights::{BytesDoneFn, Catalog};

use super::prompt::PromptTexts;
use super::token_source::TokenSource;
use super::vision::PromptVision;
use super::{EncodeCallbacks, EncoderLoading, EncodingOptions};
use crate::error::{Result, TrainerError};
use crate::model::adapter::names::EncoderNames;
use crate::model::adapter::read::{AdapterFile, Component, TargetModule};
use crate::model::adapter::{AdaptedComponent, Adapters, LayerWeights};
use crate::model::build::{ModelBuilder, Precision, TensorSpec, tensor_specs};
use crate::model::config::{self, Unsupported, read_checked};
use crate::model::diffusion::part::PipelinePart;
use crate::model::diffusion::paths::PartSource;
use crate::model::encoder::clip::{self, ClipTextModel};
use crate::model::encoder::qwen3::{self, Qwen3Config, Qwen3Encoder, Qwen3Output};
use crate::model::encoder::qwen25vl::{self, Qwen25VlConfig, Qwen25VlEncoder, vision};
use crate::model::encoder::stack::{BlockwiseEncoder, EncoderStack, PromptTokens, StackedEncoder};
use crate::model::encoder::t5::{self, T5Encoder};
use crate::model::encoder::tokenizer::{EncodedPrompt, PromptTemplate, TemplateImages};
use crate::model::files::{self, CheckpointLayout, WeightFiles};
use crate::model::host::to_vec;
use crate::model::recompute::Recompute;

/// A text encoder of a family, and its folders.
#[derive(Clone, Copy, Debug)]
pub struct TextEncoderSpec {
    /// Its name in plans and progress.
    pub name: &'static str,
    /// Its number among the folders `text_encoder`, `text_encoder_2`, …, from 1.
    pub position: u8,
    /// The folder of its tokenizer.
    pub tokenizer: &'static str,
    /// Its architecture.
    pub kind: EncoderKind,
    /// How many tokens of a prompt it sees, with what a template has after it.
    pub prompt_length: PromptLength,
    /// What a prompt is put into.
    pub template: PromptTemplate,
    /// Whether a folder may leave it out to save memory.
    pub is_optional: bool,
    /// Its names in adapters of other programs.
    pub adapter_names: EncoderNames,
    /// Names under which it is shared as one file, the best first.
    pub files: &'static [&'static str],
}

/// Taken: the files of `huggingface.co/comfyanonymous/flux_text_encoders`.
pub const CLIP_L_FILES: &[&str] = &["clip_l.safetensors"];
/// The same of T5-XXL.
pub const T5_FILES: &[&str] = &[
    "t5xxl_fp16.safetensors",
    "t5xxl_fp8_e4m3fn_scaled.safetensors",
    "t5xxl_fp8_e4m3fn.safetensors",
];

/// Taken: the files of `huggingface.co/Comfy-Org/Qwen-Image_ComfyUI`.
pub const QWEN25VL_FILES: &[&str] =
    &["qwen_2.5_vl_7b.safetensors", "qwen_2.5_vl_7b_fp8_scaled.safetensors"];

/// Taken: the files of `huggingface.co/Comfy-Org/z_image_turbo`.
pub const QWEN3_4B_FILES: &[&str] = &["qwen_3_4b.safetensors", "qwen_3_4b_fp8_mixed.safetensors"];
/// Taken: the files of `huggingface.co/Comfy-Org/vae-text-encorder-for-flux-klein-9b`.
pub const QWEN3_8B_FILES: &[&str] = &["qwen_3_8b.safetensors", "qwen_3_8b_fp8mixed.safetensors"];

/// The text encoders there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EncoderKind {
    /// CLIP's text model.
    Clip,
    /// T5's encoder.
    T5,
    /// Qwen2.5-VL: its language model, and its vision tower if prompts have images.
    Qwen25Vl,
    /// Qwen3, up to the state before its last layer.
    Qwen3,
    /// Qwen3, its states after three of its layers.
    Qwen3Layers,
}

impl EncoderKind {
    /// Whether it can be loaded block by block; small encoders are always loaded whole.
    pub fn has_blocks(self) -> bool {
        matches!(self, Self::T5 | Self::Qwen25Vl | Self::Qwen3 | Self::Qwen3Layers)
    }

    /// The kind whose files it has: what is taken of a model cannot be seen in its file.
    #[must_use]
    pub fn of_file(self) -> Self {
        if self == Self::Qwen3Layers { Self::Qwen3 } else { self }
    }
}

impl EncoderKind {
    /// Whether its tokenizer fills up prompts to one length.
    fn pads(self) -> bool {
        matches!(self, Self::Clip | Self::T5)
    }
}

/// How many tokens of a prompt an encoder sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptLength {
    /// As the first tokenizer states, or so many; never more than the encoders of this kind have positions.
    Positions(usize),
    /// As `max_sequence_length` of `model_index.json` states, or so many.
    Index(usize),
}

/// What an encoder's `config.json` says.
#[derive(Clone, Debug)]
pub enum EncoderConfig {
    /// CLIP's text model.
    Clip(clip::ClipConfig),
    /// T5's encoder.
    T5(t5::T5Config),
    /// Qwen2.5-VL.
    Qwen25Vl(Qwen25VlConfig),
    /// Qwen3.
    Qwen3(Qwen3Config),
}

/// The widths of an encoder's output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EmbeddingWidths {
    /// Of a token.
    pub tokens: usize,
    /// Of the pooled embedding; 0 where there is none.
    pub pooled: usize,
}

/// An encoded text; empty if the encoder is left out.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TextEmbedding {
    /// [tokens, width]
    pub tokens: Vec<f32>,
    /// The pooled embedding, `[width]`.
    pub pooled: Vec<f32>,
}

/// An encoder, open.
pub struct TextEncoder {
    pub(super) spec: TextEncoderSpec,
    pub(super) part: PipelinePart<EncoderConfig>,
    pub(super) tokenizer: TokenSource,
    pub(super) adapter: HashMap<String, LayerWeights>,
    /// None if prompts have no images.
    pub(super) vision: Option<PromptVision>,
}

impl EncoderConfig {
    fn read(kind: EncoderKind, path: &Path) -> Result<Self> {
        Ok(match kind {
            EncoderKind::Clip => Self::Clip(read_checked(path, clip::ClipConfig::check)?),
            EncoderKind::T5 => Self::T5(read_checked(path, t5::T5Config::check)?),
            EncoderKind::Qwen25Vl => Self::Qwen25Vl(read_checked(path, Qwen25VlConfig::check)?),
            EncoderKind::Qwen3 => Self::Qwen3(read_checked(path, Qwen3Config::check)?),
            EncoderKind::Qwen3Layers => {
                let config = config::read::<Qwen3Config>(path)?.with_output(Qwen3Output::Three);
                let wrong =
                    |Unsupported(problem)| TrainerError::Config { problem, path: path.into() };
                config.check().map_err(wrong)?;
                Self::Qwen3(config)
            }
        })
    }

    /// By the shapes of its weights, and `like` for what they do not tell.
    fn infer(catalog: &Catalog, like: &Self) -> Option<std::result::Result<Self, Unsupported>> {
        match like {
            Self::Clip(like) => {
                clip::infer(catalog, like).map(|config| config.check().map(|()| Self::Clip(config)))
            }
            Self::T5(like) => {
                t5::infer(catalog, like).map(|config| config.check().map(|()| Self::T5(config)))
            }
            Self::Qwen25Vl(like) => {
                let found = qwen25vl::infer(catalog, like);
                found.map(|config| config.check().map(|()| Self::Qwen25Vl(config)))
            }
            Self::Qwen3(like) => {
                let found = qwen3::infer(catalog, like);
                found.map(|config| config.check().map(|()| Self::Qwen3(config)))
            }
        }
    }

    /// The widths of its output.
    pub fn widths(&self) -> EmbeddingWidths {
        match self {
            Self::Clip(config) => {
                EmbeddingWidths { tokens: config.hidden_size, pooled: config.pooled_width() }
            }
            Self::T5(config) => EmbeddingWidths { tokens: config.d_model, pooled: 0 },
            Self::Qwen25Vl(config) => {
                EmbeddingWidths { tokens: config.text.hidden_size, pooled: 0 }
            }
            Self::Qwen3(config) => EmbeddingWidths { tokens: config.width(), pooled: 0 },
        }
    }

    /// Its number of position embeddings, if limited.
    pub fn positions(&self) -> Option<usize> {
        match self {
            Self::Clip(config) => Some(config.max_position_embeddings),
            Self::T5(_) | Self::Qwen25Vl(_) | Self::Qwen3(_) => None,
        }
    }

    fn vocab_size(&self) -> usize {
        match self {
            Self::Clip(config) => config.vocab_size,
            Self::T5(config) => config.vocab_size,
            Self::Qwen25Vl(config) => config.text.vocab_size,
            Self::Qwen3(config) => config.text.vocab_size,
        }
    }

    fn tensor_specs(&self) -> Result<Vec<TensorSpec>> {
        match self {
            Self::Clip(config) => tensor_specs(|build| ClipTextModel::new(config, build)),
            Self::T5(config) => tensor_specs(|build| T5Encoder::new(config, build)),
            Self::Qwen25Vl(config) => tensor_specs(|build| Qwen25VlEncoder::new(config, build)),
            Self::Qwen3(config) => tensor_specs(|build| Qwen3Encoder::new(config, build)),
        }
    }
}

impl TextEncoderSpec {
    /// Whether it fills up prompts to one length.
    pub fn pads(&self) -> bool {
        self.kind.pads() || self.template.is_padded
    }

    /// The folder of its weights.
    pub fn folder(&self) -> String {
        self.component().folder()
    }

    /// What its names begin with in ComfyUI's checkpoints of whole pipelines.
    pub fn prefix(&self) -> String {
        format!("text_encoders.{}.transformer.", self.adapter_names.comfyui)
    }

    pub(super) fn component(&self) -> Component {
        Component::TextEncoder(self.position)
    }

    /// Its weights and config; `like` is the config of published models.
    pub(super) fn part(
        &self,
        source: PartSource,
        like: &EncoderConfig,
    ) -> Result<PipelinePart<EncoderConfig>> {
        let read = |path: &Path| EncoderConfig::read(self.kind, path);
        let infer = |catalog: &Catalog| {
            let (name, path) = (self.name, catalog.path.clone());
            match EncoderConfig::infer(catalog, like) {
                Some(Ok(config)) => Ok(config),
                Some(Err(Unsupported(problem))) => Err(TrainerError::Config { problem, path }),
                None => {
                    let problem =
                        format!("text encoder {} lacks tensors of {name}", path.display());
                    Err(TrainerError::Request { problem, hint: "download the file again" })
                }
            }
        };
        match source {
            PartSource::Folder(folder) => PipelinePart::open(&folder, read),
            PartSource::Weights(catalog, config) => {
                PipelinePart::of_weights(catalog, config, read, infer)
            }
        }
    }

    /// The same on the meta device, without files.
    pub(super) fn meta(
        &self,
        pipeline: &Path,
        config: EncoderConfig,
    ) -> Result<PipelinePart<EncoderConfig>> {
        let mut tensors = config.tensor_specs()?;
        if let EncoderConfig::Qwen25Vl(Qwen25VlConfig { vision: Ok(vision), .. }) = &config
            && self.template.images != TemplateImages::None
        {
            tensors.extend(vision::stored_tensors(vision)?);
        }
        Ok(PipelinePart::meta(&pipeline.join(self.folder()), config, tensors))
    }
}

impl TextEncoder {
    pub(super) fn new(
        spec: TextEncoderSpec,
        part: PipelinePart<EncoderConfig>,
        words: TokenSource,
        vision: Option<PromptVision>,
    ) -> Self {
        Self { spec, part, tokenizer: words, adapter: HashMap::new(), vision }
    }

    /// The files of model and tokenizer.
    pub(super) fn sources(&self) -> Vec<PathBuf> {
        let processor = self.vision.iter().filter_map(|vision| vision.source.clone());
        let files = [&self.part.sources()[..], self.tokenizer.sources()].concat();
        files.into_iter().chain(processor).collect()
    }

    /// Checks that it has its weights, and an embedding for each of its tokens.
    pub(super) fn check(&self) -> Result<()> {
        let (n, n_rows) = (self.tokenizer.vocab_size(), self.part.config.vocab_size());
        if n <= n_rows {
            if let Some(vision) = &self.vision {
                vision.check_tower(&self.part)?;
            }
            return self.files().map(drop);
        }
        let name = self.spec.name;
        let problem =
            format!("the tokenizer of {name} has {n} tokens, its embedding {n_rows} rows");
        Err(TrainerError::Config { problem, path: self.part.catalog.path.clone() })
    }

    /// Loads its part of an adapter file.
    pub(super) fn take_adapter(&mut self, file: &mut AdapterFile) -> Result<()> {
        let modules = TargetModule::from_specs(&self.part.config.tensor_specs()?, |_| Vec::new());
        let names = Some(self.spec.adapter_names);
        self.adapter = file.take(self.spec.component(), names, &modules)?;
        Ok(())
    }

    pub(super) fn adapted_component(&self) -> AdaptedComponent<'_> {
        let (component, layout) = (self.spec.component(), self.layout());
        AdaptedComponent { component, catalog: &self.part.catalog, layout, layers: &self.adapter }
    }

    fn layout(&self) -> CheckpointLayout<'_> {
        match &self.part.config {
            EncoderConfig::Clip(_) => clip::layout(&self.part.catalog),
            EncoderConfig::T5(_) => t5::layout(&self.part.catalog),
            EncoderConfig::Qwen25Vl(_) => qwen25vl::layout(&self.part.catalog),
            EncoderConfig::Qwen3(config) => config.layout(&self.part.catalog),
        }
    }

    fn files(&self) -> Result<WeightFiles<'_>> {
        let (catalog, layout) = (&self.part.catalog, self.layout());
        match &self.part.config {
            EncoderConfig::Clip(config) => {
                WeightFiles::find(catalog, &layout, |build| ClipTextModel::new(config, build))
            }
            EncoderConfig::T5(config) => {
                WeightFiles::find(catalog, &layout, |build| T5Encoder::new(config, build))
            }
            EncoderConfig::Qwen25Vl(config) => {
                WeightFiles::find(catalog, &layout, |build| Qwen25VlEncoder::new(config, build))
            }
            EncoderConfig::Qwen3(config) => {
                WeightFiles::find(catalog, &layout, |build| Qwen3Encoder::new(config, build))
            }
        }
    }

    /// Encodes texts, and passes each to `take` when it is done.
    pub(super) fn encode(
        &self,
        device: &Device,
        options: EncodingOptions,
        texts: PromptTexts<'_>,
        callbacks: EncodeCallbacks<'_>,
        take: &mut dyn FnMut(TextEmbedding) -> Result<()>,
    ) -> Result<()> {
        (callbacks.on_begin)(self.spec.name, device);
        let take = &mut |encoded| {
            take(encoded)?;
            callbacks.check_cancelled()
        };
        if let (Some(vision), EncoderConfig::Qwen25Vl(config)) = (&self.vision, &self.part.config) {
            let encode = &mut |tokens: &[PromptTokens]| {
                self.encode_with_stack(device, config, options, tokens, callbacks, take)
            };
            return self.with_images(vision, device, options, texts, callbacks, encode);
        }
        let tokens = self.tokens(texts);
        match &self.part.config {
            EncoderConfig::Clip(_) => {
                self.encode_with_clip(device, options.precision, &tokens, callbacks, take)
            }
            EncoderConfig::T5(config) => {
                self.encode_with_stack(device, config, options, &tokens, callbacks, take)
            }
            EncoderConfig::Qwen25Vl(config) => {
                self.encode_with_stack(device, config, options, &tokens, callbacks, take)
            }
            EncoderConfig::Qwen3(config) => {
                self.encode_with_stack(device, config, options, &tokens, callbacks, take)
            }
        }
    }

    /// The tokens of each text.
    fn tokens(&self, texts: PromptTexts<'_>) -> Vec<PromptTokens> {
        let tokens = |EncodedPrompt { ids, n_tokens, .. }| {
            let n_attended = self.spec.template.is_padded.then_some(n_tokens);
            PromptTokens { n_attended, ..PromptTokens::from(ids) }
        };
        match texts {
            PromptTexts::Given(texts) => {
                texts.iter().map(|prompt| tokens(self.tokenizer.encode(&prompt.text))).collect()
            }
            PromptTexts::Longest { n, .. } => {
                let n_tokens = self.tokenizer.max_tokens();
                let longest = EncodedPrompt { ids: vec![0; n_tokens], n_tokens, dropped: 0 };
                vec![tokens(longest); n]
            }
        }
    }

    /// Loads CLIP, with adapters beside its layers.
    pub(super) fn load_clip(
        &self,
        device: &Device,
        precision: Precision,
        adapters: &mut Adapters,
        tick: BytesDoneFn<'_>,
    ) -> Result<ClipTextModel> {
        let EncoderConfig::Clip(config) = &self.part.config else {
            unreachable!("who asks for CLIP knows that it is one")
        };
        let build = |build: &mut ModelBuilder<'_>| ClipTextModel::new(config, build);
        files::load_model(device, &self.files()?, precision, adapters, tick, build)
    }

    /// Never quantised: it is small.
    fn encode_with_clip(
        &self,
        device: &Device,
        precision: Precision,
        texts: &[PromptTokens],
        callbacks: EncodeCallbacks<'_>,
        take: &mut dyn FnMut(TextEmbedding) -> Result<()>,
    ) -> Result<()> {
        let precision = Precision { base: None, ..precision };
        let mut adapters = Adapters::loaded(self.adapter.clone());
        let model = self.load_clip(device, precision, &mut adapters, callbacks.tick)?;
        texts.iter().try_for_each(|PromptTokens { ids, .. }| {
            let tape = Tape::inference(device, &adapters.params, 0);
            let encoded = model.forward(&tape, ids, 1, Recompute::None)?;
            let (tokens, pooled) = (encoded.penultimate.tensor(), encoded.pooled.tensor());
            take(TextEmbedding { tokens: to_vec(tokens)?, pooled: to_vec(pooled)? })
        })
    }

    /// Whole or block by block. T5 attends to padding, as in the reference. The hidden states of a template's prefix are
    /// dropped.
    fn encode_with_stack<C: EncoderStack>(
        &self,
        device: &Device,
        config: &C,
        EncodingOptions { precision, loading }: EncodingOptions,
        texts: &[PromptTokens],
        callbacks: EncodeCallbacks<'_>,
        take: &mut dyn FnMut(TextEmbedding) -> Result<()>,
    ) -> Result<()> {
        let n_dropped = self.spec.template.n_dropped * self.part.config.widths().tokens;
        let mut take = |states: &[f32]| {
            // A tokenizer may make fewer tokens of a template than the published one.
            take(TextEmbedding::from_tokens(states.get(n_dropped..).unwrap_or_default()))
        };
        if loading == EncoderLoading::Blocks {
            let (catalog, adapter, tick) = (&self.part.catalog, &self.adapter, callbacks.tick);
            let blocks = BlockwiseEncoder { config, catalog, precision, adapter, tick };
            return blocks.encode(device, texts, &mut take);
        }
        let mut adapters = Adapters::loaded(self.adapter.clone());
        let build = |build: &mut ModelBuilder<'_>| StackedEncoder::new(config, build);
        let files = self.files()?;
        let model =
            files::load_model(device, &files, precision, &mut adapters, callbacks.tick, build)?;
        texts.iter().try_for_each(|prompt| {
            let tape = Tape::inference(device, &adapters.params, 0);
            take(&to_vec(model.forward_prompt(&tape, prompt)?.tensor())?)
        })
    }
}

impl TextEmbedding {
    fn from_tokens(tokens: &[f32]) -> Self {
        Self { tokens: tokens.to_vec(), pooled: Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use compute::{Dtype, Quantisation};
    use weights::FileDtype;
    use weights::load::{LoadOptions, LoadRequest, load, load_f32};

    use super::super::prompt::Prompt;
    use super::super::templates::QWEN_IMAGE_TEMPLATE;
    use super::*;
    use crate::model::encoder::stack::TEXT_BATCH;
    use crate::model::host::relative_error;

    fn golden() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/qwen25vl/prompts")
    }

    fn integers(catalog: &Catalog, name: &str) -> Vec<u32> {
        let tensor = catalog.find(name).unwrap();
        let mut bytes = vec![0; tensor.numel() as usize * size_of::<i64>()];
        let wanted = vec![LoadRequest::whole(tensor, FileDtype::I64, &mut bytes[..])];
        load(catalog, wanted, LoadOptions::default(), &|_| true).unwrap();
        bytes.as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes) as u32).collect()
    }

    fn floats(catalog: &Catalog, name: &str) -> Vec<f32> {
        let tensor = catalog.find(name).unwrap();
        load_f32(catalog, tensor, 0..tensor.numel()).unwrap()
    }

    const SPEC: TextEncoderSpec = TextEncoderSpec {
        name: "qwen2.5-vl",
        position: 1,
        tokenizer: "tokenizer",
        kind: EncoderKind::Qwen25Vl,
        prompt_length: PromptLength::Index(512),
        template: QWEN_IMAGE_TEMPLATE,
        is_optional: false,
        adapter_names: EncoderNames { kohya: &["lora_te1"], comfyui: "qwen25_7b" },
        files: QWEN25VL_FILES,
    };

    fn open(tokenizer: &str) -> TextEncoder {
        let like = EncoderConfig::Qwen25Vl(Qwen25VlConfig::published());
        let part = SPEC.part(PartSource::Folder(golden()), &like).unwrap();
        let length = SPEC.prompt_length.default();
        let words = TokenSource::open(&golden().join(tokenizer), length, SPEC.template).unwrap();
        let encoder = TextEncoder::new(SPEC, part, words, None);
        encoder.check().unwrap();
        encoder
    }

    fn encode(
        encoder: &TextEncoder,
        precision: Precision,
        loading: EncoderLoading,
        texts: &[String],
    ) -> Vec<TextEmbedding> {
        let texts: Vec<Prompt> = texts.iter().cloned().map(Prompt::from).collect();
        let callbacks =
            EncodeCallbacks { on_begin: &|_, _| (), tick: &|_| true, on_encoded: &|| true };
        let device = Device::cpu(2, 1 << 28).unwrap();
        let options = EncodingOptions { precision, loading };
        let mut found = Vec::new();
        encoder
            .encode(&device, options, PromptTexts::Given(&texts), callbacks, &mut |encoded| {
                found.push(encoded);
                Ok(())
            })
            .unwrap();
        found
    }

    fn prompts() -> Vec<String> {
        serde_json::from_slice(&fs::read(golden().join("prompts.json")).unwrap()).unwrap()
    }

    /// As diffusers' `QwenImagePipeline` encodes them: empty, with line breaks and special tokens at their borders, and
    /// longer than what is seen.
    #[test]
    fn prompts_in_a_template_are_those_of_the_reference() {
        let reference = Catalog::open(&golden().join("golden.safetensors")).unwrap();
        let prompts = prompts();
        for tokenizer in ["tokenizer", "tokenizer_json"] {
            let encoder = open(tokenizer);
            let precision = Precision::plain(Dtype::F32);
            let found = encode(&encoder, precision, EncoderLoading::Whole, &prompts);
            for (at, (prompt, found)) in prompts.iter().zip(found).enumerate() {
                let mut ids = integers(&reference, &format!("ids.{at}"));
                ids.truncate(QWEN_IMAGE_TEMPLATE.n_dropped + 512);
                assert_eq!(encoder.tokenizer.encode(prompt).ids, ids, "{tokenizer} {prompt:?}");
                let expected = floats(&reference, &format!("out.{at}"));
                let difference = relative_error(&expected, &found.tokens);
                assert!(difference < 2e-5, "{tokenizer} {prompt:?}: {difference}");
            }
        }
    }

    #[test]
    fn what_of_a_prompt_is_cut_off_is_said() {
        let prompts = prompts();
        let encoder = open("tokenizer");
        let cut: Vec<_> = prompts.iter().map(|text| encoder.tokenizer.truncation(text)).collect();
        let lost = |at: usize| cut[at].map(|cut| (cut.n_tokens, cut.max_tokens, cut.lost.len()));
        assert_eq!(lost(7), Some((1806, 512, 3434)));
        // Of this one, only the last token of the template.
        assert_eq!(lost(8), None);
        assert!(cut.iter().enumerate().all(|(at, cut)| at == 7 || cut.is_none()));
    }

    #[test]
    fn texts_of_different_lengths_block_by_block_give_the_same_bits() {
        let encoder = open("tokenizer");
        let texts: Vec<String> = (0..TEXT_BATCH + 3).map(|n| "fox ".repeat(n % 5)).collect();
        for (dtype, base) in [
            (Dtype::F32, None),
            (Dtype::Bf16, None),
            (Dtype::F16, None),
            (Dtype::Bf16, Some(Quantisation::Int8)),
        ] {
            let precision = Precision { base, ..Precision::plain(dtype) };
            let [whole, blocks] = [EncoderLoading::Whole, EncoderLoading::Blocks]
                .map(|loading| encode(&encoder, precision, loading, &texts));
            assert_eq!(whole, blocks, "{dtype} {base:?}");
            assert!(whole.iter().all(|text| text.tokens.iter().all(|value| value.is_finite())));
        }
    }
}
