//! The text encoders of a pipeline, as the family lists them. They are loaded one at a time and freed; large ones, as T5,
//! whole or block by block.

mod clean;
mod encoder;
mod prompt;
pub mod templates;
mod token_source;
mod trained;
mod vision;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use compute::Device;
use serde::Deserialize;
use weights::{BytesDoneFn, WeightsError};

pub use crate::model::encoder::tokenizer::{PromptTemplate, TemplateImages};
pub use encoder::{
    CLIP_L_FILES, EmbeddingWidths, EncoderConfig, EncoderKind, PromptLength, QWEN3_4B_FILES,
    QWEN3_8B_FILES, QWEN25VL_FILES, T5_FILES, TextEmbedding, TextEncoder, TextEncoderSpec,
};
pub use prompt::{Prompt, PromptImage};
pub use trained::{EncoderAdapter, EncoderTraining, TrainedEncoders, TrainedTokens};

use self::clean::clean_prompt;
use self::prompt::PromptTexts;
use self::token_source::TokenSource;
use self::vision::PromptVision;
use super::condition::{Condition, ConditionLayout};
use super::denoiser::DenoiserConfig;
use super::paths::{PartSearch, PartSource};
use crate::error::{Result, TrainerError};
use crate::model::adapter::read::AdapterFile;
use crate::model::adapter::{AdaptedComponent, AdapterWeights, LayerWeights};
use crate::model::build::Precision;
use crate::model::config::{self, Unsupported};
use crate::model::encoder::tokenizer::{PromptTokenizer, Truncation};
use crate::model::kind;

/// The text encoders, open.
pub struct TextEncoders {
    /// In the family's order.
    slots: Vec<EncoderSlot>,
    /// Makes the conditioning from their outputs.
    config: DenoiserConfig,
}

/// A slot among a family's text encoders.
struct EncoderSlot {
    /// Tokens of a prompt that it sees; zeros of this length may stand for an encoder that is left out.
    length: usize,
    encoder: Option<TextEncoder>,
}

/// How text encoders are held while they encode.
#[derive(Clone, Copy, Debug)]
pub struct EncodingOptions {
    /// In which dtypes.
    pub precision: Precision,
    /// How much of a large encoder at a time.
    pub loading: EncoderLoading,
}

/// How much of a large encoder is in memory at a time: of those that have blocks
/// ([`EncoderKind::has_blocks`]). The output is the same, bit for bit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EncoderLoading {
    /// All of it.
    #[default]
    Whole,
    /// One block, read from the file for as long as it is needed.
    Blocks,
}

/// T5's name in plans and progress.
pub const T5_NAME: &str = "t5";

/// What `model_index.json` may say of prompts.
#[derive(Default, Deserialize)]
struct PromptIndex {
    max_sequence_length: Option<usize>,
}

/// A folder's encoder, for exported usage code.
#[derive(Clone, Copy, Debug)]
pub struct TextEncoderSettings {
    /// The encoder.
    pub spec: TextEncoderSpec,
    /// Whether the folder has it.
    pub is_there: bool,
    /// Tokens of a prompt that it sees, or that zeros stand for, where that differs from the family's default.
    pub length: Option<usize>,
}

/// Callbacks while encoding.
#[derive(Clone, Copy)]
pub struct EncodeCallbacks<'a> {
    /// Called with the name of each encoder and its device.
    pub on_begin: &'a dyn Fn(&'static str, &Device),
    /// Called with the number of bytes read; returns whether to go on.
    pub tick: BytesDoneFn<'a>,
    /// Called when an encoder has finished a text; returns whether to go on.
    pub on_encoded: &'a dyn Fn() -> bool,
}

impl EncodeCallbacks<'_> {
    fn check_cancelled(self) -> Result<()> {
        if (self.on_encoded)() { Ok(()) } else { Err(WeightsError::Cancelled.into()) }
    }
}

impl TextEncoders {
    /// Opens those that were found, in the family's order, for the transformer of `config`. `folder` has the tokenizers.
    pub(super) fn open(
        folder: &Path,
        found: Vec<Option<PartSource>>,
        config: &DenoiserConfig,
    ) -> Result<Self> {
        let stated = StatedLengths::read(folder)?;
        let family = config.family();
        let published = (family.published_model().encoders)();
        let mut parts = Vec::new();
        for ((spec, source), like) in family.encoders.iter().zip(found).zip(&published) {
            let part = source.map(|source| spec.part(source, like)).transpose()?;
            parts.push((*spec, part));
        }
        let positions = parts.iter().filter_map(|(_, part)| part.as_ref()?.config.positions());
        let most = positions.min();
        let slot = |(spec, part): (TextEncoderSpec, Option<_>)| -> Result<EncoderSlot> {
            let length = stated.length(&spec, most);
            let encoder = |part| -> Result<TextEncoder> {
                let words = folder.join(spec.tokenizer);
                let words = TokenSource::open(&words, length, spec.template)?;
                let vision = PromptVision::open(&spec, &part, &words, folder)?;
                Ok(TextEncoder::new(spec, part, words, vision))
            };
            Ok(EncoderSlot { length, encoder: part.map(encoder).transpose()? })
        };
        let list = parts.into_iter().map(slot).collect::<Result<_>>()?;
        Self { slots: list, config: config.clone() }.checked(folder)
    }

    /// Meta encoders of these configs, without weights or tokenizers.
    pub(super) fn meta(
        path: &Path,
        config: &DenoiserConfig,
        encoders: Vec<EncoderConfig>,
    ) -> Result<Self> {
        let slot = |(spec, encoder): (&TextEncoderSpec, EncoderConfig)| {
            let length = spec.prompt_length.default();
            let part = spec.meta(path, encoder)?;
            let words = TokenSource::Meta(spec.template.n_dropped + length);
            let vision = PromptVision::meta(spec, &part)?;
            let encoder = TextEncoder::new(*spec, part, words, vision);
            Ok(EncoderSlot { length, encoder: Some(encoder) })
        };
        let list = config.family().encoders.iter().zip(encoders).map(slot);
        let list = list.collect::<Result<_>>()?;
        Self { slots: list, config: config.clone() }.checked(path)
    }

    /// Checks that each has its weights, and that they fit each other and the transformer.
    fn checked(self, folder: &Path) -> Result<Self> {
        let widths = |slot: &EncoderSlot| Some(slot.encoder.as_ref()?.part.config.widths());
        let widths: Vec<_> = self.slots.iter().map(widths).collect();
        let problem = |Unsupported(problem)| TrainerError::Config { problem, path: folder.into() };
        self.config.check_text(&widths).map_err(problem)?;
        self.all().try_for_each(TextEncoder::check)?;
        Ok(self)
    }

    /// Those that are there.
    fn all(&self) -> impl Iterator<Item = &TextEncoder> {
        self.slots.iter().filter_map(|slot| slot.encoder.as_ref())
    }

    fn layout(&self) -> ConditionLayout {
        self.config.condition_layout()
    }

    /// Tokens of a prompt that each slot sees.
    pub fn lengths(&self) -> impl Iterator<Item = usize> {
        self.slots.iter().map(|slot| slot.length)
    }

    /// The prompt templates of those that have one.
    pub fn templates(&self) -> impl Iterator<Item = PromptTemplate> {
        let templates = self.all().map(|encoder| encoder.spec.template);
        templates.filter(|template| *template != PromptTemplate::NONE)
    }

    /// Whether all prompts have equally many tokens, with padding.
    pub fn pads(&self) -> bool {
        self.all().all(|encoder| encoder.spec.pads())
    }

    /// Loads their part of an adapter file.
    pub fn take_adapter(&mut self, file: &mut AdapterFile) -> Result<()> {
        let mut all = self.slots.iter_mut().filter_map(|slot| slot.encoder.as_mut());
        all.try_for_each(|encoder| encoder.take_adapter(file))
    }

    /// The adapters by encoder.
    pub fn adapter(&self) -> AdapterWeights {
        let layers = |encoder: &TextEncoder| encoder.adapter.clone().into_iter().collect();
        self.all().map(|encoder| (encoder.spec.component(), layers(encoder))).collect()
    }

    /// The encoders on disk, with the adapters beside them.
    pub fn adapted_components(&self) -> impl Iterator<Item = AdaptedComponent<'_>> {
        self.all().map(TextEncoder::adapted_component)
    }

    /// Sets the adapter of the encoder at a position, if there is one.
    pub fn set_adapter(&mut self, position: u8, layers: HashMap<String, LayerWeights>) {
        let mut all = self.slots.iter_mut().filter_map(|slot| slot.encoder.as_mut());
        if let Some(encoder) = all.find(|encoder| encoder.spec.position == position) {
            encoder.adapter = layers;
        }
    }

    /// Each encoder, with the bytes of its files.
    pub fn file_bytes(&self) -> impl Iterator<Item = (TextEncoderSpec, u64)> {
        self.all().map(|encoder| (encoder.spec, encoder.part.file_bytes()))
    }

    /// A condition of zeros, with the shape of the longest other with images of these widths and heights.
    pub fn zero_condition(&self, images: &[[u32; 2]]) -> Result<Condition> {
        let n_images = self.image_tokens(images)?;
        let encoded = |slot: &EncoderSlot| {
            let length = slot.length + n_images;
            let encoded = slot.encoder.as_ref().map(|encoder| {
                let EmbeddingWidths { tokens, pooled } = encoder.part.config.widths();
                TextEmbedding { tokens: vec![0.0; length * tokens], pooled: vec![0.0; pooled] }
            });
            (length, encoded.unwrap_or_default())
        };
        Ok(self.layout().condition(&self.slots.iter().map(encoded).collect::<Vec<_>>()))
    }

    /// The conditioning of a prompt that was encoded elsewhere, for families with one text encoder: tokens of this width.
    pub fn condition_of(
        &self,
        tokens: Vec<f32>,
        width: usize,
    ) -> std::result::Result<Condition, String> {
        let [EncoderSlot { length, encoder: Some(encoder) }] = &self.slots[..] else {
            return Err(format!("{} text encoders, expected one", self.slots.len()));
        };
        let widths = encoder.part.config.widths();
        if widths != (EmbeddingWidths { tokens: width, pooled: 0 }) {
            return Err(format!("tokens of width {width}, this model's are {}", widths.tokens));
        }
        let n = tokens.len() / width.max(1);
        // Images take tokens of the prompt, too; their number follows from the images.
        let is_text = encoder.spec.template.images == TemplateImages::None;
        if n == 0 || (is_text && n > *length) {
            return Err(format!("{n} tokens, this model sees 1 to {length}"));
        }
        Ok(self.layout().condition(&[(*length, TextEmbedding { tokens, pooled: Vec::new() })]))
    }

    /// Encodes prompts.
    pub fn encode(
        &self,
        device: &Device,
        encoding: EncodingOptions,
        prompts: &[Prompt],
        callbacks: EncodeCallbacks<'_>,
    ) -> Result<Vec<Condition>> {
        let mut conditions = Vec::with_capacity(prompts.len());
        self.encode_each(device, encoding, prompts, callbacks, &mut |condition| {
            conditions.push(condition);
            Ok(())
        })?;
        Ok(conditions)
    }

    /// Encodes prompts, and passes each to `take` when it is complete: the embedding of the last encoder,
    /// nearly all of a prompt, is held for one at a time.
    pub fn encode_each(
        &self,
        device: &Device,
        encoding: EncodingOptions,
        prompts: &[Prompt],
        callbacks: EncodeCallbacks<'_>,
        take: &mut dyn FnMut(Condition) -> Result<()>,
    ) -> Result<()> {
        let prompts: Vec<Prompt> = prompts.iter().map(|prompt| self.prompt(prompt)).collect();
        self.encode_texts(device, encoding, PromptTexts::Given(&prompts), callbacks, take)
    }

    /// A prompt as the family's pipeline reads it.
    fn prompt(&self, prompt: &Prompt) -> Prompt {
        let family = self.config.family();
        let prompt = prompt.or_empty(family.empty_prompt);
        if !family.cleans_prompts {
            return prompt;
        }
        Prompt { text: clean_prompt(&prompt.text), ..prompt }
    }

    /// Encodes so many prompts for a dry run: texts as long as each encoder can see, with images of these widths and
    /// heights.
    pub fn encode_longest(
        &self,
        device: &Device,
        encoding: EncodingOptions,
        n: usize,
        images: &[[u32; 2]],
        callbacks: EncodeCallbacks<'_>,
    ) -> Result<()> {
        let prompts = PromptTexts::Longest { n, images };
        self.encode_texts(device, encoding, prompts, callbacks, &mut |_| Ok(()))
    }

    /// Tokens of the context that images of these widths and heights take, beside those of the text.
    pub fn image_tokens(&self, images: &[[u32; 2]]) -> Result<usize> {
        let mut n_tokens = self.all().map(|encoder| encoder.image_tokens(images));
        n_tokens.try_fold(0, |most, n| Ok(n?.max(most)))
    }

    fn encode_texts(
        &self,
        device: &Device,
        encoding: EncodingOptions,
        texts: PromptTexts<'_>,
        callbacks: EncodeCallbacks<'_>,
        take: &mut dyn FnMut(Condition) -> Result<()>,
    ) -> Result<()> {
        for n_images in texts.image_counts() {
            self.all().try_for_each(|encoder| encoder.check_images(n_images))?;
        }
        let last = self.slots.iter().rposition(|slot| slot.encoder.is_some());
        let mut before = Vec::new();
        for slot in &self.slots[..last.unwrap_or(0)] {
            let mut all = Vec::with_capacity(texts.len());
            if let Some(encoder) = &slot.encoder {
                encoder.encode(device, encoding, texts, callbacks, &mut |encoded| {
                    all.push(encoded);
                    Ok(())
                })?;
            }
            before.push(all.into_iter());
        }
        let mut whole = |encoded: TextEmbedding| {
            let mut encoded = Some(encoded);
            let of_slot = |(index, slot): (usize, &EncoderSlot)| {
                let encoded = match before.get_mut(index) {
                    Some(all) => all.next(),
                    None => encoded.take(),
                };
                (slot.length, encoded.unwrap_or_default())
            };
            let all: Vec<_> = self.slots.iter().enumerate().map(of_slot).collect();
            take(self.layout().condition(&all))
        };
        match last.and_then(|last| self.slots[last].encoder.as_ref()) {
            Some(encoder) => encoder.encode(device, encoding, texts, callbacks, &mut whole),
            None => (0..texts.len()).try_for_each(|_| whole(TextEmbedding::default())),
        }
    }

    /// The files that an encoded text depends on: weights, configs, tokenizers.
    pub fn sources(&self) -> Vec<PathBuf> {
        self.all().flat_map(TextEncoder::sources).collect()
    }

    /// What of a text each encoder truncates. Needs no weights.
    pub fn truncations<'t>(&self, text: &'t str) -> Vec<(TextEncoderSpec, Truncation<'t>)> {
        self.all()
            .filter_map(|encoder| Some((encoder.spec, encoder.tokenizer.truncation(text)?)))
            .collect()
    }

    /// The encoder that comes last and sees the most of a text, if it is there.
    pub fn last(&self) -> Option<TextEncoderSpec> {
        let slot = self.slots.last()?;
        slot.encoder.as_ref().map(|encoder| encoder.spec)
    }
}

/// Whether a pipeline uses an encoder. One that sees nothing, or that a folder leaves out, is not loaded.
pub(super) fn is_used(search: &PartSearch<'_>, spec: &TextEncoderSpec) -> bool {
    let Some(folder) = &search.folder else { return !spec.is_optional };
    StatedLengths::read(folder).map_or(!spec.is_optional, |stated| stated.has(folder, spec))
}

/// What a folder states about lengths.
struct StatedLengths {
    /// By its first tokenizer.
    first: Option<usize>,
    /// By `model_index.json`.
    index: Option<usize>,
}

impl StatedLengths {
    fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(kind::MODEL_INDEX);
        // A folder with tokenizers alone has none.
        let index = if path.exists() {
            config::read::<PromptIndex>(&path)?
        } else {
            PromptIndex::default()
        };
        let first = PromptTokenizer::stated_length(&folder.join("tokenizer"))?;
        Ok(Self { first, index: index.max_sequence_length })
    }

    /// Whether a folder has an encoder. One that sees nothing is not loaded either.
    fn has(&self, folder: &Path, spec: &TextEncoderSpec) -> bool {
        let is_seen = self.length(spec, None) > 0;
        !spec.is_optional || is_seen && folder.join(spec.folder()).join("config.json").exists()
    }

    /// Tokens of a prompt that an encoder sees. The first tokenizer decides for all CLIPs, as in the reference; none can
    /// see more tokens than it has positions, and their outputs are concatenated.
    fn length(&self, spec: &TextEncoderSpec, most: Option<usize>) -> usize {
        match spec.prompt_length {
            PromptLength::Positions(usual) => {
                self.first.unwrap_or(usual).min(most.unwrap_or(usize::MAX))
            }
            PromptLength::Index(usual) => self.index.unwrap_or(usual),
        }
    }
}

impl PromptLength {
    /// Where nothing is stated.
    pub fn default(self) -> usize {
        match self {
            Self::Positions(usual) | Self::Index(usual) => usual,
        }
    }
}

impl TextEncoderSettings {
    /// Of each encoder in a diffusers folder.
    pub fn read(folder: &Path, specs: &[TextEncoderSpec]) -> Result<Vec<Self>> {
        let stated = StatedLengths::read(folder)?;
        let settings = |spec: &TextEncoderSpec| {
            let length = match spec.prompt_length {
                PromptLength::Positions(_) => None,
                PromptLength::Index(usual) => stated.index.filter(|stated| *stated != usual),
            };
            Self { spec: *spec, is_there: stated.has(folder, spec), length }
        };
        Ok(specs.iter().map(settings).collect())
    }

    /// As the published folders are.
    pub fn defaults(specs: &[TextEncoderSpec]) -> Vec<Self> {
        specs.iter().map(|spec| Self { spec: *spec, is_there: true, length: None }).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use compute::{DeviceKind, Dtype, Quantisation};

    use super::super::sd3;
    use super::*;
    use crate::model::diffusion::Pipeline;
    use crate::model::diffusion::paths::PartPaths;
    use crate::model::encoder::stack::TEXT_BATCH;
    use crate::sample::encoding::plan_encoding;

    /// In exactly as much memory as was planned for T5 block by block.
    #[test]
    fn t5_block_by_block_gives_the_same_bits() {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/sd3/pipeline");
        let encoders = Pipeline::open(&golden, &PartPaths::default()).unwrap().encoders;
        let fox = |n| Prompt::from(format!("a fox, number {n}"));
        let all: Vec<Prompt> = (0..TEXT_BATCH + 3).map(fox).collect();
        let callbacks =
            EncodeCallbacks { on_begin: &|_, _| (), tick: &|_| true, on_encoded: &|| true };
        for (dtype, base) in [
            (Dtype::F32, None),
            (Dtype::Bf16, None),
            (Dtype::F16, None),
            (Dtype::Bf16, Some(Quantisation::Nf4)),
        ] {
            let precision = Precision { base, ..Precision::plain(dtype) };
            for texts in [&all[..1], &all[..2], &all] {
                let of = |loading, bytes| {
                    let device = Device::cpu(2, bytes).unwrap();
                    encoders
                        .encode(&device, EncodingOptions { precision, loading }, texts, callbacks)
                        .unwrap()
                };
                let n = texts.len();
                let [whole, blocks] =
                    [EncoderLoading::Whole, EncoderLoading::Blocks].map(|loading| {
                        let stages = crate::sample::encoding::dry_run(
                            &encoders,
                            EncodingOptions { precision, loading },
                            n,
                            &[],
                            DeviceKind::cpu(2),
                        );
                        stages.unwrap().iter().map(|stage| stage.memory.peak_bytes).max().unwrap()
                    });
                assert_eq!(
                    of(EncoderLoading::Whole, whole),
                    of(EncoderLoading::Blocks, blocks),
                    "{dtype} {n}"
                );
            }
        }
    }

    /// T5-XXL in bf16: whole where it fits, else in blocks, which take a tenth.
    #[test]
    fn t5_is_loaded_in_blocks_only_where_the_whole_does_not_fit() {
        let path = Path::new("stable-diffusion-3.5-medium");
        let encoders = Pipeline::open_or_published(path, &PartPaths::default()).unwrap().encoders;
        let precision = Precision::plain(Dtype::Bf16);
        let peak = |limit| {
            let planned =
                plan_encoding(&encoders, precision, 3, &[], DeviceKind::cpu(2), limit).unwrap();
            (planned.0.last().unwrap().memory.peak_bytes, planned.1)
        };
        let (whole, loading) = peak(usize::MAX);
        assert_eq!(loading, EncoderLoading::Whole);
        assert_eq!(peak(whole), (whole, EncoderLoading::Whole));
        let (blocks, loading) = peak(whole - 1);
        assert_eq!(loading, EncoderLoading::Blocks);
        assert!(10 * blocks < whole, "{blocks} {whole}");
    }

    /// A folder with the two files that state lengths, and what is read from them for CLIPs of
    /// these positions.
    fn lengths(index: &str, tokenizer: &str, positions: [usize; 2]) -> [usize; 2] {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("tokenizer")).unwrap();
        fs::write(folder.path().join("model_index.json"), index).unwrap();
        fs::write(folder.path().join("tokenizer/tokenizer_config.json"), tokenizer).unwrap();
        let stated = StatedLengths::read(folder.path()).unwrap();
        let [clip, _, t5] = sd3::FAMILY.encoders else { panic!("two CLIPs and T5") };
        let most = positions.into_iter().min();
        [stated.length(clip, most), stated.length(t5, most)]
    }

    #[test]
    fn prompts_are_as_long_as_the_folder_states() {
        let short = r#"{"model_max_length": 16}"#;
        // What transformers writes for "no limit".
        let endless = r#"{"model_max_length": 1000000000000000019884624838656}"#;
        for (index, tokenizer, positions, expected) in [
            ("{}", "{}", [77, 77], [77, 256]),
            (r#"{"max_sequence_length": 0}"#, short, [77, 77], [16, 0]),
            (r#"{"max_sequence_length": 512}"#, endless, [77, 64], [64, 512]),
            ("{}", short, [77, 12], [12, 256]),
        ] {
            assert_eq!(lengths(index, tokenizer, positions), expected, "{index} {tokenizer}");
        }
    }
}
