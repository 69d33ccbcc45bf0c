//! Prompts as SD3 sees them: the tokens of two CLIPs side by side, T5's below them, and a vector for
//! the whole. Encoders are loaded one at a time and freed; T5, by far the largest, whole or block by block.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use compute::{Device, Tape};
use serde::Deserialize;
use weights::{Tick, WeightsError};

use super::Config;
use super::pipeline::Part;
use super::words::Words;
use crate::error::{Result, TrainerError};
use crate::export::Parts;
use crate::model::adapter::read::{AdapterFile, Component, Module};
use crate::model::adapter::{Adapters, Beside, Given};
use crate::model::build::{Builder, Precision, wants};
use crate::model::config;
use crate::model::encoder::clip::{self, Clip};
use crate::model::encoder::t5::blocks::Blocks;
use crate::model::encoder::t5::{self, T5};
use crate::model::encoder::tokenizer::{Cut, Tokenizer};
use crate::model::files::{self, Files};
use crate::model::host::numbers;

/// Tokens of a prompt that the CLIPs see where their tokenizer states none. Taken: every published
/// CLIP.
const CLIP_TOKENS: usize = 77;
/// Tokens of a prompt that T5 sees where the folder states none: the reference's default.
pub const T5_TOKENS: usize = 256;

/// T5 as plans and progress call it.
pub(crate) const T5_NAME: &str = "t5";

/// CLIP-L, CLIP-G, and T5, which may be left out to save memory.
pub struct TextEncoders {
    /// Width of tokens that the transformer expects.
    joint: usize,
    /// Tokens of a prompt: those of the CLIPs, and those below them.
    lengths: Lengths,
    clips: [Text<clip::Config>; 2],
    t5: Option<Text<t5::Config>>,
}

/// How text encoders are held while they encode.
#[derive(Clone, Copy, Debug)]
pub struct Encoding {
    /// In which formats.
    pub precision: Precision,
    /// How much of T5 at a time.
    pub t5: T5Loading,
}

/// How much of T5 is in memory at a time. What it encodes is the same, bit for bit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum T5Loading {
    /// All of it.
    #[default]
    Whole,
    /// One block, read from the file for as long as it is needed.
    Blocks,
}

/// How many tokens of a prompt are seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Lengths {
    /// By the CLIPs, side by side.
    clip: usize,
    /// By T5; where the folder has none, as many zeros are seen.
    t5: usize,
}

/// What a folder says of T5, for programs that have to be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextSettings {
    /// Whether the folder has it.
    pub has_t5: bool,
    /// Tokens of a prompt that it sees, or that zeros stand for.
    pub t5_tokens: usize,
}

impl Default for TextSettings {
    /// The published folders'.
    fn default() -> Self {
        Self { has_t5: true, t5_tokens: T5_TOKENS }
    }
}

impl TextSettings {
    /// Of a diffusers folder.
    pub fn read(folder: &Path) -> Result<Self> {
        let Index { max_sequence_length: t5_tokens } = config::read(&folder.join(INDEX))?;
        let has_t5 = t5_tokens > 0 && folder.join("text_encoder_3/config.json").exists();
        Ok(Self { has_t5, t5_tokens })
    }
}

const INDEX: &str = "model_index.json";

/// What `model_index.json` may say of prompts.
#[derive(Deserialize)]
struct Index {
    #[serde(default = "t5_tokens")]
    max_sequence_length: usize,
}

fn t5_tokens() -> usize {
    T5_TOKENS
}

struct Text<C> {
    /// As plans and progress call it.
    name: &'static str,
    part: Part<C>,
    words: Words,
    adapter: HashMap<String, Given>,
}

/// A prompt as the transformer sees it.
#[derive(Clone, Debug, PartialEq)]
pub struct Prompt {
    /// [tokens, joint width]
    pub tokens: Vec<f32>,
    /// [pooled width]
    pub pooled: Vec<f32>,
}

/// Told how encoding goes.
#[derive(Clone, Copy)]
pub struct Watch<'a> {
    /// Told which encoder comes, and where.
    pub begin: &'a dyn Fn(&'static str, &Device),
    /// Told how many bytes were read.
    pub tick: Tick<'a>,
    /// Told that the encoder has finished a text; answers whether to go on.
    pub encoded: &'a dyn Fn() -> bool,
}

impl Watch<'_> {
    fn go_on(self) -> Result<()> {
        if (self.encoded)() { Ok(()) } else { Err(WeightsError::Cancelled.into()) }
    }
}

impl TextEncoders {
    /// Those of a diffusers folder, which fit the transformer of `config`.
    pub fn open(folder: &Path, config: &Config) -> Result<Self> {
        let parts = [
            Part::open(&folder.join("text_encoder"), clip::Config::check)?,
            Part::open(&folder.join("text_encoder_2"), clip::Config::check)?,
        ];
        let TextSettings { has_t5, t5_tokens } = TextSettings::read(folder)?;
        let lengths = Lengths::read(folder, parts.each_ref().map(|part| &part.config), t5_tokens)?;
        let words = |tokenizer: &str, length| Words::open(&folder.join(tokenizer), length);
        let third = folder.join("text_encoder_3");
        let t5 = || -> Result<Text<t5::Config>> {
            let part = Part::open(&third, t5::Config::check)?;
            Ok(Text::new(T5_NAME, part, words("tokenizer_3", lengths.t5)?))
        };
        let [l, g] = parts;
        let clips = [
            Text::new("clip-l", l, words("tokenizer", lengths.clip)?),
            Text::new("clip-g", g, words("tokenizer_2", lengths.clip)?),
        ];
        let t5 = if has_t5 { Some(t5()?) } else { None };
        Self { joint: config.joint_attention_dim, lengths, clips, t5 }.checked(folder, config)
    }

    /// Those of these settings, without weights or tokenizers.
    pub(super) fn hollow(
        path: &Path,
        config: &Config,
        [l, g]: [clip::Config; 2],
        t5: t5::Config,
    ) -> Result<Self> {
        let lengths = Lengths { clip: CLIP_TOKENS, t5: T5_TOKENS };
        let clip = |name, folder, config| -> Result<Text<clip::Config>> {
            let tensors = wants(|build| Clip::new(&config, build))?;
            let part = Part::hollow(&path.join(folder), config, tensors);
            Ok(Text::new(name, part, Words::Counted(lengths.clip)))
        };
        let clips = [clip("clip-l", "text_encoder", l)?, clip("clip-g", "text_encoder_2", g)?];
        let tensors = wants(|build| T5::new(&t5, build))?;
        let part = Part::hollow(&path.join("text_encoder_3"), t5, tensors);
        let t5 = Some(Text::new(T5_NAME, part, Words::Counted(lengths.t5)));
        Self { joint: config.joint_attention_dim, lengths, clips, t5 }.checked(path, config)
    }

    /// Tokens of a prompt as the transformer sees it.
    pub fn n_tokens(&self) -> usize {
        self.lengths.clip + self.lengths.t5
    }

    /// Tokens of a prompt that the CLIPs and T5 see.
    pub fn lengths(&self) -> [usize; 2] {
        [self.lengths.clip, self.lengths.t5]
    }

    /// That each has its weights, and that they fit each other and the transformer.
    fn checked(self, folder: &Path, config: &Config) -> Result<Self> {
        let [l, g] = self.clips.each_ref().map(|clip| &clip.part.config);
        let (joint, widths) = (config.joint_attention_dim, [l.hidden_size, g.hidden_size]);
        let pooled = l.projection_dim + g.projection_dim;
        let of_t5 = self.t5.as_ref().map_or(joint, |t5| t5.part.config.d_model);
        let problem = if pooled != config.pooled_projection_dim {
            let wanted = config.pooled_projection_dim;
            format!(
                "projection_dim of both CLIPs is {pooled}, pooled_projection_dim of the transformer {wanted}"
            )
        } else if of_t5 != joint {
            format!("d_model of T5 is {of_t5}, joint_attention_dim of the transformer {joint}")
        } else if widths[0] + widths[1] > joint {
            format!(
                "hidden_size of the CLIPs is {widths:?}, joint_attention_dim of the transformer only {joint}"
            )
        } else {
            self.clips.iter().try_for_each(|clip| clip.check(clip.part.config.vocab_size))?;
            self.clips.iter().try_for_each(|clip| clip.files().map(drop))?;
            if let Some(t5) = &self.t5 {
                t5.check(t5.part.config.vocab_size)?;
                t5.files()?;
            }
            return Ok(self);
        };
        Err(TrainerError::Config { problem, path: folder.into() })
    }

    /// Takes what an adapter's file has for them.
    pub fn take_adapter(&mut self, file: &mut AdapterFile) -> Result<()> {
        for (clip, index) in self.clips.iter_mut().zip(1..) {
            let wants = wants(|build| Clip::new(&clip.part.config, build))?;
            let modules = Module::of(&wants, |_| Vec::new());
            clip.adapter = file.take(Component::TextEncoder(index), &modules)?;
        }
        if let Some(t5) = &mut self.t5 {
            let wants = wants(|build| T5::new(&t5.part.config, build))?;
            t5.adapter =
                file.take(Component::TextEncoder(3), &Module::of(&wants, |_| Vec::new()))?;
        }
        Ok(())
    }

    /// The adapters' matrices by encoder.
    pub fn adapter(&self) -> Parts {
        let clips = self.clips.iter().map(|clip| &clip.adapter);
        let all = clips.chain(self.t5.iter().map(|t5| &t5.adapter)).zip(1..);
        let part = |(layers, index): (&HashMap<String, Given>, u8)| {
            (Component::TextEncoder(index), layers.clone().into_iter().collect())
        };
        all.map(part).collect()
    }

    /// The encoders as they lie on disk, with the matrices beside them.
    pub fn beside(&self) -> impl Iterator<Item = Beside<'_>> {
        let clips =
            self.clips.iter().map(|clip| (&clip.part.catalog, clip::layout(), &clip.adapter));
        let t5 = self.t5.iter().map(|t5| {
            let catalog = &t5.part.catalog;
            (catalog, t5::layout(catalog), &t5.adapter)
        });
        clips.chain(t5).zip(1..).map(|((catalog, layout, layers), index)| Beside {
            component: Component::TextEncoder(index),
            catalog,
            layout,
            layers,
        })
    }

    /// Puts matrices beside the layers of an encoder.
    pub fn set_adapter(&mut self, index: u8, layers: HashMap<String, Given>) {
        match (index, &mut self.t5) {
            (1 | 2, _) => self.clips[usize::from(index) - 1].adapter = layers,
            (_, Some(t5)) => t5.adapter = layers,
            (_, None) => {}
        }
    }

    /// Bytes of each encoder's files.
    pub fn file_bytes(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let clips = self.clips.iter().map(|clip| (clip.name, clip.part.catalog.bytes()));
        clips.chain(self.t5.iter().map(|t5| (t5.name, t5.part.catalog.bytes())))
    }

    /// Encodes prompts.
    pub fn encode(
        &self,
        device: &Device,
        encoding: Encoding,
        texts: &[String],
        watch: Watch<'_>,
    ) -> Result<Vec<Prompt>> {
        let mut prompts = Vec::with_capacity(texts.len());
        self.encode_each(device, encoding, texts, watch, &mut |prompt| {
            prompts.push(prompt);
            Ok(())
        })?;
        Ok(prompts)
    }

    /// Encodes prompts and hands each over when it is whole: the tokens of the last encoder, nearly
    /// all of a prompt, are never held for more than one.
    pub fn encode_each(
        &self,
        device: &Device,
        encoding: Encoding,
        texts: &[String],
        watch: Watch<'_>,
        take: &mut dyn FnMut(Prompt) -> Result<()>,
    ) -> Result<()> {
        let [l, g] = &self.clips;
        let of_l = l.encode(device, encoding.precision, texts, watch)?;
        let of_g = g.encode(device, encoding.precision, texts, watch)?;
        let mut clips = of_l.into_iter().zip(of_g);
        let mut join = |of_t5: &[f32]| {
            let (l, g) = clips.next().expect("each encoder sees every text once");
            take(self.join(&l, &g, of_t5))
        };
        match &self.t5 {
            Some(t5) => t5.encode(device, encoding, texts, watch, &mut join),
            // A model without it is told zeros in its place.
            None => texts.iter().try_for_each(|_| join(&[])),
        }
    }

    /// Both CLIPs side by side, widened with zeros, and T5 below.
    fn join(&self, l: &OfClip, g: &OfClip, t5: &[f32]) -> Prompt {
        let [l_width, g_width] = self.clips.each_ref().map(|clip| clip.part.config.hidden_size);
        let padding = vec![0.0; self.joint - l_width - g_width];
        let rows = l.tokens.chunks(l_width).zip(g.tokens.chunks(g_width));
        let parts = rows.flat_map(|(l, g)| [l, g, &padding[..]]).chain([t5]);
        let mut tokens = parts.collect::<Vec<_>>().concat();
        tokens.resize(self.n_tokens() * self.joint, 0.0);
        Prompt { tokens, pooled: [&l.pooled[..], &g.pooled[..]].concat() }
    }

    /// The files that decide what becomes of a text: weights, settings, tokenizers.
    pub fn sources(&self) -> Vec<PathBuf> {
        self.clips
            .iter()
            .map(Text::sources)
            .chain(self.t5.iter().map(Text::sources))
            .flatten()
            .collect()
    }

    /// What of a text each encoder cuts off, if it does. Needs no weights.
    pub fn cuts<'t>(&self, text: &'t str) -> Vec<(&'static str, Cut<'t>)> {
        let clips = self.clips.iter().map(|clip| (clip.name, &clip.words));
        let all = clips.chain(self.t5.iter().map(|t5| (t5.name, &t5.words)));
        all.filter_map(|(name, words)| Some((name, words.cut(text)?))).collect()
    }

    /// Whether T5 is among them.
    pub fn has_t5(&self) -> bool {
        self.t5.is_some()
    }
}

impl Lengths {
    /// As the folder states them. The first tokenizer speaks for both CLIPs, as in the reference;
    /// neither can see more tokens than it has positions.
    fn read(folder: &Path, clips: [&clip::Config; 2], t5: usize) -> Result<Self> {
        let stated = Tokenizer::stated_length(&folder.join("tokenizer"))?.unwrap_or(CLIP_TOKENS);
        let clip =
            clips.map(|clip| clip.max_position_embeddings).into_iter().fold(stated, usize::min);
        Ok(Self { clip, t5 })
    }
}

/// A prompt as a CLIP sees it.
struct OfClip {
    /// [tokens, width]
    tokens: Vec<f32>,
    pooled: Vec<f32>,
}

impl<C> Text<C> {
    fn new(name: &'static str, part: Part<C>, words: Words) -> Self {
        Self { name, part, words, adapter: HashMap::new() }
    }

    /// The files of model and tokenizer.
    fn sources(&self) -> Vec<PathBuf> {
        [&self.part.sources()[..], self.words.sources()].concat()
    }

    /// That its table has a row for each of its tokens.
    fn check(&self, n_rows: usize) -> Result<()> {
        let n = self.words.vocabulary();
        if n <= n_rows {
            return Ok(());
        }
        let problem =
            format!("the tokenizer of {} has {n} tokens, its table {n_rows} rows", self.name);
        Err(TrainerError::Config { problem, path: self.part.catalog.path.clone() })
    }

    fn adapters(&self) -> Adapters {
        Adapters::given(self.adapter.clone())
    }
}

impl Text<clip::Config> {
    fn files(&self) -> Result<Files<'_>> {
        let Part { config, catalog, .. } = &self.part;
        Files::find(catalog, &clip::layout(), |build| Clip::new(config, build))
    }

    /// Never quantised: it is small.
    fn encode(
        &self,
        device: &Device,
        precision: Precision,
        texts: &[String],
        watch: Watch<'_>,
    ) -> Result<Vec<OfClip>> {
        (watch.begin)(self.name, device);
        let (precision, mut adapters) = (Precision { base: None, ..precision }, self.adapters());
        let build = |build: &mut Builder<'_>| Clip::new(&self.part.config, build);
        let files = self.files()?;
        let model = files::open(device, &files, precision, &mut adapters, watch.tick, build)?;
        let encode = |text: &String| {
            let tape = Tape::inference(device, &adapters.params, 0);
            let encoded = model.forward(&tape, &self.words.ids(text), 1)?;
            let (tokens, pooled) = (encoded.before_last.tensor(), encoded.pooled.tensor());
            watch.go_on()?;
            Ok(OfClip { tokens: numbers(tokens)?, pooled: numbers(pooled)? })
        };
        texts.iter().map(encode).collect()
    }
}

impl Text<t5::Config> {
    fn files(&self) -> Result<Files<'_>> {
        let Part { config, catalog, .. } = &self.part;
        Files::find(catalog, &t5::layout(catalog), |build| T5::new(config, build))
    }

    /// [tokens, width] of each text. Padding is seen too, as in the reference.
    fn encode(
        &self,
        device: &Device,
        Encoding { precision, t5 }: Encoding,
        texts: &[String],
        watch: Watch<'_>,
        take: &mut dyn FnMut(&[f32]) -> Result<()>,
    ) -> Result<()> {
        (watch.begin)(self.name, device);
        let mut take = |tokens: &[f32]| {
            take(tokens)?;
            watch.go_on()
        };
        let ids = texts.iter().map(|text| self.words.ids(text));
        match t5 {
            T5Loading::Whole => self.encode_whole(device, precision, ids, watch, &mut take),
            T5Loading::Blocks => {
                let Part { config, catalog, .. } = &self.part;
                let (adapter, tick) = (&self.adapter, watch.tick);
                let blocks = Blocks { config, catalog, precision, adapter, tick };
                blocks.encode(device, &ids.collect::<Vec<_>>(), &mut take)
            }
        }
    }

    fn encode_whole(
        &self,
        device: &Device,
        precision: Precision,
        mut ids: impl Iterator<Item = Vec<u32>>,
        watch: Watch<'_>,
        take: &mut dyn FnMut(&[f32]) -> Result<()>,
    ) -> Result<()> {
        let mut adapters = self.adapters();
        let build = |build: &mut Builder<'_>| T5::new(&self.part.config, build);
        let files = self.files()?;
        let model = files::open(device, &files, precision, &mut adapters, watch.tick, build)?;
        ids.try_for_each(|ids| {
            let tape = Tape::inference(device, &adapters.params, 0);
            take(&numbers(model.forward(&tape, &ids, 1, None)?.tensor())?)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use compute::{Dtype, Kind, Quantisation};

    use super::*;
    use crate::model::encoder::t5::blocks::TEXTS_AT_ONCE;
    use crate::model::sd3::pipeline::Pipeline;
    use crate::sample::encoding::plan_encoding;

    /// In exactly as much memory as was planned for T5 block by block.
    #[test]
    fn t5_block_by_block_gives_the_same_bits() {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/sd3/pipeline");
        let encoders = Pipeline::open(&golden, None).unwrap().encoders;
        let all: Vec<String> =
            (0..TEXTS_AT_ONCE + 3).map(|n| format!("a fox, number {n}")).collect();
        let watch = Watch { begin: &|_, _| (), tick: &|_| true, encoded: &|| true };
        for (dtype, base) in [
            (Dtype::F32, None),
            (Dtype::Bf16, None),
            (Dtype::F16, None),
            (Dtype::Bf16, Some(Quantisation::Nf4)),
        ] {
            let precision = Precision { base, ..Precision::plain(dtype) };
            for texts in [&all[..1], &all[..2], &all] {
                let of = |t5, bytes| {
                    let device = Device::cpu(2, bytes).unwrap();
                    encoders.encode(&device, Encoding { precision, t5 }, texts, watch).unwrap()
                };
                let n = texts.len();
                let [whole, blocks] = [T5Loading::Whole, T5Loading::Blocks].map(|t5| {
                    let stages = crate::sample::encoding::rehearse(
                        &encoders,
                        Encoding { precision, t5 },
                        n,
                        Kind::cpu(2),
                    );
                    stages.unwrap().iter().map(|stage| stage.phase.peak_bytes).max().unwrap()
                });
                assert_eq!(
                    of(T5Loading::Whole, whole),
                    of(T5Loading::Blocks, blocks),
                    "{dtype} {n}"
                );
            }
        }
    }

    /// T5-XXL in bf16: whole where it fits, else in blocks, which take a tenth.
    #[test]
    fn t5_is_loaded_in_blocks_only_where_the_whole_does_not_fit() {
        let path = Path::new("stable-diffusion-3.5-medium");
        let encoders = Pipeline::open_or_published(path, None).unwrap().encoders;
        let precision = Precision::plain(Dtype::Bf16);
        let peak = |limit| {
            let planned = plan_encoding(&encoders, precision, 3, (Kind::cpu(2), limit)).unwrap();
            (planned.0.last().unwrap().phase.peak_bytes, planned.1)
        };
        let (whole, loading) = peak(usize::MAX);
        assert_eq!(loading, T5Loading::Whole);
        assert_eq!(peak(whole), (whole, T5Loading::Whole));
        let (blocks, loading) = peak(whole - 1);
        assert_eq!(loading, T5Loading::Blocks);
        assert!(10 * blocks < whole, "{blocks} {whole}");
    }

    /// A folder with the two files that state lengths, and what is read from them for CLIPs of
    /// these positions.
    fn lengths(index: &str, tokenizer: &str, positions: [usize; 2]) -> (usize, usize) {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("tokenizer")).unwrap();
        fs::write(folder.path().join("model_index.json"), index).unwrap();
        fs::write(folder.path().join("tokenizer/tokenizer_config.json"), tokenizer).unwrap();
        let clips = positions.map(|positions| {
            let text = format!(
                r#"{{"vocab_size": 4, "hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1,
                "num_attention_heads": 1, "max_position_embeddings": {positions},
                "projection_dim": 4, "hidden_act": "gelu", "eos_token_id": 2}}"#
            );
            serde_json::from_str(&text).unwrap()
        });
        let TextSettings { t5_tokens, .. } = TextSettings::read(folder.path()).unwrap();
        let lengths = Lengths::read(folder.path(), clips.each_ref(), t5_tokens);
        let Lengths { clip, t5 } = lengths.unwrap();
        (clip, t5)
    }

    #[test]
    fn prompts_are_as_long_as_the_folder_states() {
        let short = r#"{"model_max_length": 16}"#;
        // What transformers writes for "no limit".
        let endless = r#"{"model_max_length": 1000000000000000019884624838656}"#;
        for (index, tokenizer, positions, expected) in [
            ("{}", "{}", [77, 77], (77, 256)),
            (r#"{"max_sequence_length": 0}"#, short, [77, 77], (16, 0)),
            (r#"{"max_sequence_length": 512}"#, endless, [77, 64], (64, 512)),
            ("{}", short, [77, 12], (12, 256)),
        ] {
            assert_eq!(lengths(index, tokenizer, positions), expected, "{index} {tokenizer}");
        }
    }
}
