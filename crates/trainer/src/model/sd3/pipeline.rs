//! An SD3 model with all that belongs to it: the folder that diffusers saves, or a checkpoint of
//! the original layout with such a folder for what it lacks. Opening reads settings and headers
//! and compares every name and shape; nothing large is read before all of it fits together.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use compute::{Device, Params, Tape};
use serde::Deserialize;
use weights::{Catalog, Tick};

use super::{Config, Sd3, names};
use crate::error::{Result, TrainerError};
use crate::model::adapter::read::{AdapterFile, Component, Module};
use crate::model::adapter::{Adapters, Given};
use crate::model::build::{Builder, Precision, wants};
use crate::model::encoder::clip::{self, Clip};
use crate::model::encoder::t5::{self, T5};
use crate::model::encoder::tokenizer::Tokenizer;
use crate::model::files::{self, Files, Layout};
use crate::model::host::numbers;
use crate::model::vae::{self, Decoder, Encoder};
use crate::model::{component, config};
use crate::sample::schedule;

/// Width of heads in all published models.
const HEAD: usize = 64;
/// Tokens of a prompt that the CLIP encoders see.
const CLIP_TOKENS: usize = 77;
/// Tokens of a prompt that T5 sees: the reference's default.
const T5_TOKENS: usize = 256;

/// The parts, open.
pub struct Pipeline {
    /// What was opened.
    pub path: PathBuf,
    /// The model that draws.
    pub transformer: Part<Config>,
    /// Between pictures and latents.
    pub vae: Part<vae::Config>,
    /// CLIP-L and CLIP-G.
    clips: [Text<clip::Config>; 2],
    /// T5, which may be left out to save memory.
    t5: Option<Text<t5::Config>>,
    /// How noise is taken away.
    pub schedule: schedule::Config,
    adapters: HashMap<&'static str, HashMap<String, Given>>,
}

/// A model of the pipeline: its settings, its files, how they call its tensors.
pub struct Part<C> {
    /// Its settings.
    pub config: C,
    catalog: Catalog,
    original: Option<&'static str>,
}

struct Text<C> {
    part: Part<C>,
    tokenizer: Tokenizer,
}

/// Told which part comes, and where.
pub type Begin<'a> = &'a dyn Fn(&'static str, &Device);

/// A prompt as the transformer sees it.
#[derive(Clone, Debug, PartialEq)]
pub struct Prompt {
    /// [tokens, joint width]
    pub tokens: Vec<f32>,
    /// [pooled width]
    pub pooled: Vec<f32>,
}

#[derive(Deserialize)]
struct Index {
    #[serde(rename = "_class_name")]
    class: String,
}

impl Pipeline {
    /// Opens a folder; or a checkpoint, and `rest` for what it lacks.
    pub fn open(path: &Path, rest: Option<&Path>) -> Result<Self> {
        let folder = if path.is_dir() { path } else { rest.ok_or_else(|| needs_rest(path))? };
        check_class(folder)?;
        let original = if path.is_dir() { None } else { Some(path) };
        let clip = |name: &str, tokenizer: &str| {
            Text::open(folder, [name, tokenizer], CLIP_TOKENS, clip::Config::check)
        };
        let has_t5 = folder.join("text_encoder_3/config.json").exists();
        let t5 =
            || Text::open(folder, ["text_encoder_3", "tokenizer_3"], T5_TOKENS, t5::Config::check);
        let pipeline = Self {
            path: path.into(),
            transformer: transformer(folder, original)?,
            vae: vae_part(folder, original)?,
            clips: [clip("text_encoder", "tokenizer")?, clip("text_encoder_2", "tokenizer_2")?],
            t5: if has_t5 { Some(t5()?) } else { None },
            schedule: config::read_checked(
                &folder.join("scheduler/scheduler_config.json"),
                schedule::Config::check,
            )?,
            adapters: HashMap::new(),
        };
        pipeline.check()?;
        Ok(pipeline)
    }

    /// That every part has its weights and fits the others.
    fn check(&self) -> Result<()> {
        self.transformer_files()?;
        self.decoder_files()?;
        for clip in &self.clips {
            clip_files(&clip.part)?;
        }
        if let Some(t5) = &self.t5 {
            t5_files(&t5.part)?;
        }
        let [l, g] = [0, 1].map(|index| &self.clips[index].part.config);
        let config = &self.transformer.config;
        let pairs = [
            (
                "projection_dim of both CLIPs",
                l.projection_dim + g.projection_dim,
                "pooled_projection_dim",
                config.pooled_projection_dim,
            ),
            (
                "latent_channels of the vae",
                self.vae.config.latent_channels,
                "in_channels",
                config.in_channels,
            ),
            (
                "d_model of T5",
                self.t5.as_ref().map_or(config.joint_attention_dim, |t5| t5.part.config.d_model),
                "joint_attention_dim",
                config.joint_attention_dim,
            ),
        ];
        let wrong = |problem| TrainerError::Config { problem, path: self.path.clone() };
        let clips = self.clips.iter().map(|text| (&text.tokenizer, text.part.config.vocab_size));
        let t5 = self.t5.iter().map(|text| (&text.tokenizer, text.part.config.vocab_size));
        for (tokenizer, size) in clips.chain(t5) {
            if tokenizer.vocabulary() > size {
                let n = tokenizer.vocabulary();
                return Err(wrong(format!(
                    "a tokenizer has {n} tokens, its encoder's table {size}"
                )));
            }
        }
        for (what, is, asked, wanted) in pairs {
            if is != wanted {
                return Err(wrong(format!(
                    "{what} is {is}, {asked} of the transformer is {wanted}"
                )));
            }
        }
        if l.hidden_size + g.hidden_size > config.joint_attention_dim {
            return Err(wrong(format!(
                "hidden_size of both CLIPs is {} and {}, joint_attention_dim of the transformer only {}",
                l.hidden_size, g.hidden_size, config.joint_attention_dim
            )));
        }
        Ok(())
    }

    /// Puts an adapter's matrices beside the layers they are for.
    pub fn add_adapter(&mut self, path: &Path) -> Result<()> {
        let mut file = AdapterFile::open(path)?;
        let n_blocks = self.transformer.config.num_layers;
        let config = &self.transformer.config;
        let modules = Module::of(&wants(|build| Sd3::new(config, build))?, |module| {
            names::original_module(module, n_blocks)
        });
        let mut adapters = HashMap::new();
        adapters.insert(TRANSFORMER, file.take(Component::Transformer, &modules)?);
        for (index, clip) in self.clips.iter().enumerate() {
            let modules =
                Module::of(&wants(|build| Clip::new(&clip.part.config, build))?, |_| Vec::new());
            adapters.insert(
                CLIPS[index],
                file.take(Component::TextEncoder(index as u8 + 1), &modules)?,
            );
        }
        if let Some(t5) = &self.t5 {
            let modules =
                Module::of(&wants(|build| T5::new(&t5.part.config, build))?, |_| Vec::new());
            adapters.insert(T5_NAME, file.take(Component::TextEncoder(3), &modules)?);
        }
        file.check_all_taken()?;
        self.adapters = adapters;
        Ok(())
    }

    fn adapters(&self, name: &str) -> Adapters {
        self.adapters.get(name).map_or_else(Adapters::none, |given| Adapters::given(given.clone()))
    }

    /// Prompts as the transformer sees them. Encoders are loaded one at a time, and freed;
    /// `begin` is told which one comes, and how many bytes it reads.
    pub fn encode(
        &self,
        device: &Device,
        precision: Precision,
        texts: &[String],
        (begin, tick): (Begin<'_>, Tick<'_>),
    ) -> Result<Vec<Prompt>> {
        let plain = Precision { base: None, ..precision };
        let mut encoded = Vec::with_capacity(2);
        for (index, clip) in self.clips.iter().enumerate() {
            begin(CLIPS[index], device);
            encoded.push(self.encode_clip(device, plain, (CLIPS[index], clip), texts, tick)?);
        }
        let t5 = match &self.t5 {
            Some(t5) => {
                begin(T5_NAME, device);
                self.encode_t5(device, precision, t5, texts, tick)?
            }
            // A model without it is told nothing in its place.
            None => vec![
                vec![0.0; T5_TOKENS * self.transformer.config.joint_attention_dim];
                texts.len()
            ],
        };
        let [l, g] =
            [0, 1].map(|index| (&encoded[index], self.clips[index].part.config.hidden_size));
        let join = |index: usize| {
            let (l, g) = ((&l.0[index], l.1), (&g.0[index], g.1));
            join(l, g, &t5[index], self.transformer.config.joint_attention_dim)
        };
        Ok((0..texts.len()).map(join).collect())
    }

    fn encode_clip(
        &self,
        device: &Device,
        precision: Precision,
        (name, text): (&str, &Text<clip::Config>),
        texts: &[String],
        tick: Tick<'_>,
    ) -> Result<Vec<(Vec<f32>, Vec<f32>)>> {
        let mut adapters = self.adapters(name);
        let build = |build: &mut Builder<'_>| Clip::new(&text.part.config, build);
        let model =
            files::open(device, &clip_files(&text.part)?, precision, &mut adapters, tick, build)?;
        let encode = |prompt: &String| {
            let tape = Tape::inference(device, &adapters.params, 0);
            let encoded = model.forward(&tape, &text.tokenizer.encode(prompt).ids, 1)?;
            Ok((numbers(encoded.before_last.tensor()), numbers(encoded.pooled.tensor())))
        };
        texts.iter().map(encode).collect()
    }

    fn encode_t5(
        &self,
        device: &Device,
        precision: Precision,
        text: &Text<t5::Config>,
        texts: &[String],
        tick: Tick<'_>,
    ) -> Result<Vec<Vec<f32>>> {
        let mut adapters = self.adapters(T5_NAME);
        let build = |build: &mut Builder<'_>| T5::new(&text.part.config, build);
        let model =
            files::open(device, &t5_files(&text.part)?, precision, &mut adapters, tick, build)?;
        let encode = |prompt: &String| {
            let tape = Tape::inference(device, &adapters.params, 0);
            let encoded = model.forward(&tape, &text.tokenizer.encode(prompt).ids, 1, None)?;
            Ok(numbers(encoded.tensor()))
        };
        texts.iter().map(encode).collect()
    }

    /// Tokens of a prompt as the transformer sees it.
    pub fn n_tokens(&self) -> usize {
        CLIP_TOKENS + T5_TOKENS
    }

    /// How many tokens of a text each encoder cuts off, if it does.
    pub fn cut_off(&self, text: &str) -> Vec<(&'static str, usize)> {
        let clips = CLIPS.iter().zip(&self.clips).map(|(name, clip)| (*name, &clip.tokenizer));
        let all = clips.chain(self.t5.iter().map(|t5| (T5_NAME, &t5.tokenizer)));
        let cut = all.map(|(name, tokenizer)| (name, tokenizer.encode(text).dropped));
        cut.filter(|(_, dropped)| *dropped > 0).collect()
    }

    /// The model that draws, with its adapters' parameters.
    pub fn load_transformer(
        &self,
        device: &Device,
        precision: Precision,
        tick: Tick<'_>,
    ) -> Result<(Sd3, Params)> {
        let mut adapters = self.adapters(TRANSFORMER);
        let build = |build: &mut Builder<'_>| Sd3::new(&self.transformer.config, build);
        let model =
            files::open(device, &self.transformer_files()?, precision, &mut adapters, tick, build)?;
        Ok((model, adapters.params))
    }

    /// Latents to pictures.
    pub fn load_decoder(
        &self,
        device: &Device,
        precision: Precision,
        tick: Tick<'_>,
    ) -> Result<Decoder> {
        let build = |build: &mut Builder<'_>| Decoder::new(&self.vae.config, build);
        files::open(device, &self.decoder_files()?, precision, &mut Adapters::none(), tick, build)
    }

    /// Pictures to latents.
    pub fn load_encoder(
        &self,
        device: &Device,
        precision: Precision,
        tick: Tick<'_>,
    ) -> Result<Encoder> {
        let build = |build: &mut Builder<'_>| Encoder::new(&self.vae.config, build);
        let files = Files::find(&self.vae.catalog, &self.vae_layout(), build)?;
        files::open(device, &files, precision, &mut Adapters::none(), tick, build)
    }

    fn transformer_files(&self) -> Result<Files<'_>> {
        let Part { config, catalog, original } = &self.transformer;
        let layout = original.map_or_else(Layout::same, |prefix| names::original(config, prefix));
        Files::find(catalog, &layout, |build| Sd3::new(config, build))
    }

    fn vae_layout(&self) -> Layout<'_> {
        let Part { config, catalog, original } = &self.vae;
        match original {
            Some(prefix) => vae::names::original(config, prefix),
            None => vae::names::diffusers(catalog),
        }
    }

    fn decoder_files(&self) -> Result<Files<'_>> {
        let Part { config, catalog, .. } = &self.vae;
        Files::find(catalog, &self.vae_layout(), |build| Decoder::new(config, build))
    }
}

/// The parts, as plans and progress name them.
const CLIPS: [&str; 2] = ["clip-l", "clip-g"];
const T5_NAME: &str = "t5";
const TRANSFORMER: &str = "transformer";

fn clip_files(part: &Part<clip::Config>) -> Result<Files<'_>> {
    Files::find(&part.catalog, &clip::layout(), |build| Clip::new(&part.config, build))
}

fn t5_files(part: &Part<t5::Config>) -> Result<Files<'_>> {
    Files::find(&part.catalog, &t5::layout(&part.catalog), |build| T5::new(&part.config, build))
}

fn needs_rest(path: &Path) -> TrainerError {
    TrainerError::Request {
        problem: format!("a single file has no text encoders and tokenizers: {}", path.display()),
        hint: "name a folder of the same family that has them with --rest",
    }
}

fn check_class(folder: &Path) -> Result<()> {
    let index = folder.join("model_index.json");
    let problem = |problem: String| TrainerError::Folder {
        what: "model folder",
        problem,
        path: folder.into(),
    };
    if !index.exists() {
        return Err(problem("has no model_index.json".into()));
    }
    let Index { class } = config::read(&index)?;
    if !class.starts_with("StableDiffusion3") {
        return Err(problem(format!("holds a {class}, expected a StableDiffusion3Pipeline")));
    }
    Ok(())
}

fn transformer(folder: &Path, original: Option<&Path>) -> Result<Part<Config>> {
    let Some(path) = original else {
        return Part::open(&folder.join("transformer"), Config::check);
    };
    let catalog = Catalog::open(path)?;
    // A model of the same family has heads as wide.
    let beside = folder.join("transformer/config.json");
    let d_head =
        if beside.exists() { config::read::<Config>(&beside)?.attention_head_dim } else { HEAD };
    let found = names::prefix(&catalog)
        .and_then(|prefix| Some((prefix, names::infer(&catalog, prefix, d_head)?)));
    let Some((prefix, config)) = found else {
        let problem = "holds no SD3 transformer in the original layout".into();
        return Err(TrainerError::Folder { what: "checkpoint", problem, path: path.into() });
    };
    Ok(Part { config, catalog, original: Some(prefix) })
}

/// A checkpoint's own, if it has one.
fn vae_part(folder: &Path, original: Option<&Path>) -> Result<Part<vae::Config>> {
    let mut part = Part::open(&folder.join("vae"), vae::Config::check)?;
    if let Some(path) = original {
        let catalog = Catalog::open(path)?;
        if let Some(prefix) = vae::names::prefix(&catalog) {
            part = Part { catalog, original: Some(prefix), ..part };
        }
    }
    Ok(part)
}

impl<C: serde::de::DeserializeOwned> Part<C> {
    fn open(
        folder: &Path,
        check: fn(&C) -> std::result::Result<(), config::Unsupported>,
    ) -> Result<Self> {
        let config = config::read_checked(&folder.join("config.json"), check)?;
        Ok(Self { config, catalog: component::weights(folder)?, original: None })
    }
}

impl<C: serde::de::DeserializeOwned> Text<C> {
    fn open(
        folder: &Path,
        [model, tokenizer]: [&str; 2],
        length: usize,
        check: fn(&C) -> std::result::Result<(), config::Unsupported>,
    ) -> Result<Self> {
        Ok(Self {
            part: Part::open(&folder.join(model), check)?,
            tokenizer: Tokenizer::open(&folder.join(tokenizer), length)?,
        })
    }
}

/// Both CLIPs side by side, widened with zeros, and T5 below.
fn join(
    ((l, l_pooled), l_width): (&(Vec<f32>, Vec<f32>), usize),
    ((g, g_pooled), g_width): (&(Vec<f32>, Vec<f32>), usize),
    t5: &[f32],
    width: usize,
) -> Prompt {
    let padding = vec![0.0; width - l_width - g_width];
    let rows = l.chunks(l_width).zip(g.chunks(g_width));
    let clips = rows.flat_map(|(l, g)| [l, g, &padding[..]].concat());
    Prompt {
        tokens: clips.chain(t5.iter().copied()).collect(),
        pooled: [&l_pooled[..], &g_pooled[..]].concat(),
    }
}
