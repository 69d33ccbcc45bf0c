//! One text encoder of a pipeline: its weights, its tokenizer, its adapter, and what it makes of a text.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use compute::{Device, Tape};

use super::words::Words;
use super::{Encoding, T5Loading, Watch};
use crate::error::{Result, TrainerError};
use crate::model::adapter::read::{AdapterFile, Component, Module};
use crate::model::adapter::{Adapters, Beside, Given};
use crate::model::build::{Builder, Precision, Want, wants};
use crate::model::config::read_checked;
use crate::model::diffusion::part::Part;
use crate::model::encoder::clip::{self, Clip};
use crate::model::encoder::t5::blocks::Blocks;
use crate::model::encoder::t5::{self, T5};
use crate::model::files::{self, Files, Layout};
use crate::model::host::numbers;

/// Which text encoder a family has at a place, and where it lies.
#[derive(Clone, Copy, Debug)]
pub struct Spec {
    /// As plans and progress call it.
    pub name: &'static str,
    /// Its place among the folders `text_encoder`, `text_encoder_2`, …, and among adapters' names, from 1.
    pub place: u8,
    /// The folder of its tokenizer.
    pub tokenizer: &'static str,
    /// What it is.
    pub kind: EncoderKind,
    /// How many tokens of a prompt it sees.
    pub length: Length,
    /// Whether a folder may leave it out to save memory.
    pub is_optional: bool,
}

/// The text encoders there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EncoderKind {
    /// CLIP's text model.
    Clip,
    /// T5's encoder.
    T5,
}

/// How many tokens of a prompt an encoder sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Length {
    /// As the first tokenizer states, or so many; never more than the encoders of this kind have positions.
    Positions(usize),
    /// As `max_sequence_length` of `model_index.json` states, or so many.
    Index(usize),
}

/// What an encoder's `config.json` says.
#[derive(Clone, Debug)]
pub enum EncoderConfig {
    /// CLIP's text model.
    Clip(clip::Config),
    /// T5's encoder.
    T5(t5::Config),
}

/// How wide what an encoder gives is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Widths {
    /// Of a token.
    pub tokens: usize,
    /// Of the vector for the whole prompt; 0 where there is none.
    pub pooled: usize,
}

/// What an encoder makes of a text; nothing if it is left out.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Encoded {
    /// [tokens, width]
    pub tokens: Vec<f32>,
    /// The whole text, `[width]`.
    pub pooled: Vec<f32>,
}

/// An encoder, open.
pub struct TextEncoder {
    pub(super) spec: Spec,
    pub(super) part: Part<EncoderConfig>,
    pub(super) words: Words,
    pub(super) adapter: HashMap<String, Given>,
}

impl EncoderConfig {
    fn read(kind: EncoderKind, path: &Path) -> Result<Self> {
        Ok(match kind {
            EncoderKind::Clip => Self::Clip(read_checked(path, clip::Config::check)?),
            EncoderKind::T5 => Self::T5(read_checked(path, t5::Config::check)?),
        })
    }

    /// How wide what it gives is.
    pub fn widths(&self) -> Widths {
        match self {
            Self::Clip(config) => {
                Widths { tokens: config.hidden_size, pooled: config.pooled_width() }
            }
            Self::T5(config) => Widths { tokens: config.d_model, pooled: 0 },
        }
    }

    /// The most tokens it has positions for, if that is limited.
    pub fn positions(&self) -> Option<usize> {
        match self {
            Self::Clip(config) => Some(config.max_position_embeddings),
            Self::T5(_) => None,
        }
    }

    fn vocabulary(&self) -> usize {
        match self {
            Self::Clip(config) => config.vocab_size,
            Self::T5(config) => config.vocab_size,
        }
    }

    fn tensors(&self) -> Result<Vec<Want>> {
        match self {
            Self::Clip(config) => wants(|build| Clip::new(config, build)),
            Self::T5(config) => wants(|build| T5::new(config, build)),
        }
    }
}

impl Spec {
    /// The folder of its weights.
    pub fn folder(&self) -> String {
        self.component().folder()
    }

    pub(super) fn component(&self) -> Component {
        Component::TextEncoder(self.place)
    }

    /// Its weights and settings, of a pipeline's folder.
    pub(super) fn part(&self, pipeline: &Path) -> Result<Part<EncoderConfig>> {
        let read = |path: &Path| EncoderConfig::read(self.kind, path);
        Part::open(&pipeline.join(self.folder()), read)
    }

    /// The same without any: it would lie there.
    pub(super) fn hollow(
        &self,
        pipeline: &Path,
        config: EncoderConfig,
    ) -> Result<Part<EncoderConfig>> {
        let tensors = config.tensors()?;
        Ok(Part::hollow(&pipeline.join(self.folder()), config, tensors))
    }
}

impl TextEncoder {
    pub(super) fn new(spec: Spec, part: Part<EncoderConfig>, words: Words) -> Self {
        Self { spec, part, words, adapter: HashMap::new() }
    }

    /// The files of model and tokenizer.
    pub(super) fn sources(&self) -> Vec<PathBuf> {
        [&self.part.sources()[..], self.words.sources()].concat()
    }

    /// That it has its weights, and its table a row for each of its tokens.
    pub(super) fn check(&self) -> Result<()> {
        let (n, n_rows) = (self.words.vocabulary(), self.part.config.vocabulary());
        if n <= n_rows {
            return self.files().map(drop);
        }
        let name = self.spec.name;
        let problem = format!("the tokenizer of {name} has {n} tokens, its table {n_rows} rows");
        Err(TrainerError::Config { problem, path: self.part.catalog.path.clone() })
    }

    /// Takes what an adapter's file has for it.
    pub(super) fn take_adapter(&mut self, file: &mut AdapterFile) -> Result<()> {
        let modules = Module::of(&self.part.config.tensors()?, |_| Vec::new());
        self.adapter = file.take(self.spec.component(), &modules)?;
        Ok(())
    }

    pub(super) fn beside(&self) -> Beside<'_> {
        let (component, layout) = (self.spec.component(), self.layout());
        Beside { component, catalog: &self.part.catalog, layout, layers: &self.adapter }
    }

    fn layout(&self) -> Layout<'_> {
        match self.part.config {
            EncoderConfig::Clip(_) => clip::layout(),
            EncoderConfig::T5(_) => t5::layout(&self.part.catalog),
        }
    }

    fn files(&self) -> Result<Files<'_>> {
        let (catalog, layout) = (&self.part.catalog, self.layout());
        match &self.part.config {
            EncoderConfig::Clip(config) => {
                Files::find(catalog, &layout, |build| Clip::new(config, build))
            }
            EncoderConfig::T5(config) => {
                Files::find(catalog, &layout, |build| T5::new(config, build))
            }
        }
    }

    /// Encodes texts and hands each over when it is done.
    pub(super) fn encode(
        &self,
        device: &Device,
        Encoding { precision, t5 }: Encoding,
        texts: &[String],
        watch: Watch<'_>,
        take: &mut dyn FnMut(Encoded) -> Result<()>,
    ) -> Result<()> {
        (watch.begin)(self.spec.name, device);
        let take = &mut |encoded| {
            take(encoded)?;
            watch.go_on()
        };
        match (&self.part.config, t5) {
            (EncoderConfig::Clip(config), _) => {
                self.encode_with_clip(device, (config, precision), texts, watch, take)
            }
            (EncoderConfig::T5(config), T5Loading::Whole) => {
                self.encode_with_t5(device, (config, precision), texts, watch, take)
            }
            (EncoderConfig::T5(config), T5Loading::Blocks) => {
                let (catalog, adapter, tick) = (&self.part.catalog, &self.adapter, watch.tick);
                let blocks = Blocks { config, catalog, precision, adapter, tick };
                let ids: Vec<_> = texts.iter().map(|text| self.words.ids(text)).collect();
                blocks.encode(device, &ids, &mut |tokens: &[f32]| take(Encoded::of(tokens)))
            }
        }
    }

    /// Never quantised: it is small.
    fn encode_with_clip(
        &self,
        device: &Device,
        (config, precision): (&clip::Config, Precision),
        texts: &[String],
        watch: Watch<'_>,
        take: &mut dyn FnMut(Encoded) -> Result<()>,
    ) -> Result<()> {
        let precision = Precision { base: None, ..precision };
        let mut adapters = Adapters::given(self.adapter.clone());
        let build = |build: &mut Builder<'_>| Clip::new(config, build);
        let files = self.files()?;
        let model = files::open(device, &files, precision, &mut adapters, watch.tick, build)?;
        texts.iter().try_for_each(|text| {
            let tape = Tape::inference(device, &adapters.params, 0);
            let encoded = model.forward(&tape, &self.words.ids(text), 1)?;
            let (tokens, pooled) = (encoded.before_last.tensor(), encoded.pooled.tensor());
            take(Encoded { tokens: numbers(tokens)?, pooled: numbers(pooled)? })
        })
    }

    /// Padding is seen too, as in the reference.
    fn encode_with_t5(
        &self,
        device: &Device,
        (config, precision): (&t5::Config, Precision),
        texts: &[String],
        watch: Watch<'_>,
        take: &mut dyn FnMut(Encoded) -> Result<()>,
    ) -> Result<()> {
        let mut adapters = Adapters::given(self.adapter.clone());
        let build = |build: &mut Builder<'_>| T5::new(config, build);
        let files = self.files()?;
        let model = files::open(device, &files, precision, &mut adapters, watch.tick, build)?;
        texts.iter().try_for_each(|text| {
            let tape = Tape::inference(device, &adapters.params, 0);
            let tokens = model.forward(&tape, &self.words.ids(text), 1, None)?;
            take(Encoded::of(&numbers(tokens.tensor())?))
        })
    }
}

impl Encoded {
    fn of(tokens: &[f32]) -> Self {
        Self { tokens: tokens.to_vec(), pooled: Vec::new() }
    }
}
