//! The text encoders of a pipeline: which there are is the family's to say. They are loaded one at a time and
//! freed; T5, by far the largest, whole or block by block.

mod encoder;
mod words;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use compute::Device;
use serde::Deserialize;
use weights::{Tick, WeightsError};

pub use encoder::{Encoded, EncoderConfig, EncoderKind, Length, Spec, TextEncoder, Widths};

use self::words::Words;
use super::condition::Condition;
use super::denoiser::Config;
use crate::error::{Result, TrainerError};
use crate::model::adapter::read::AdapterFile;
use crate::model::adapter::{Beside, Given, Parts};
use crate::model::build::Precision;
use crate::model::config::{self, Unsupported};
use crate::model::encoder::tokenizer::{Cut, Tokenizer};

/// The text encoders, open.
pub struct TextEncoders {
    /// In the family's order.
    list: Vec<Place>,
    /// Makes a condition of what they give.
    config: Config,
}

/// A place among a family's text encoders.
struct Place {
    /// Tokens of a prompt that are seen here; where the encoder is left out, as many zeros may stand for it.
    length: usize,
    encoder: Option<TextEncoder>,
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

/// T5 as plans and progress call it.
pub const T5_NAME: &str = "t5";

/// What `model_index.json` may say of prompts.
#[derive(Deserialize)]
struct Index {
    max_sequence_length: Option<usize>,
}

/// How a folder's encoder is, for programs that have to be told.
#[derive(Clone, Copy, Debug)]
pub struct TextSettings {
    /// The encoder.
    pub spec: Spec,
    /// Whether the folder has it.
    pub is_there: bool,
    /// Tokens of a prompt that it sees, or that zeros stand for, where that is not what the family's do.
    pub length: Option<usize>,
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
        let stated = Stated::read(folder)?;
        let mut parts = Vec::new();
        for spec in config.family().encoders {
            let is_there = stated.has(folder, spec);
            parts.push((*spec, if is_there { Some(spec.part(folder)?) } else { None }));
        }
        let positions = parts.iter().filter_map(|(_, part)| part.as_ref()?.config.positions());
        let most = positions.min();
        let place = |(spec, part): (Spec, Option<_>)| -> Result<Place> {
            let length = stated.length(&spec, most);
            let encoder = |part| -> Result<TextEncoder> {
                let words = Words::open(&folder.join(spec.tokenizer), length)?;
                Ok(TextEncoder::new(spec, part, words))
            };
            Ok(Place { length, encoder: part.map(encoder).transpose()? })
        };
        let list = parts.into_iter().map(place).collect::<Result<_>>()?;
        Self { list, config: config.clone() }.checked(folder)
    }

    /// Those of these settings, without weights or tokenizers.
    pub(super) fn hollow(
        path: &Path,
        config: &Config,
        encoders: Vec<EncoderConfig>,
    ) -> Result<Self> {
        let place = |(spec, encoder): (&Spec, EncoderConfig)| {
            let length = spec.length.default();
            let part = spec.hollow(path, encoder)?;
            let encoder = TextEncoder::new(*spec, part, Words::Counted(length));
            Ok(Place { length, encoder: Some(encoder) })
        };
        let list = config.family().encoders.iter().zip(encoders).map(place);
        let list = list.collect::<Result<_>>()?;
        Self { list, config: config.clone() }.checked(path)
    }

    /// That each has its weights, and that they fit each other and the transformer.
    fn checked(self, folder: &Path) -> Result<Self> {
        let widths = |place: &Place| Some(place.encoder.as_ref()?.part.config.widths());
        let widths: Vec<_> = self.list.iter().map(widths).collect();
        let problem = |Unsupported(problem)| TrainerError::Config { problem, path: folder.into() };
        self.config.check_text(&widths).map_err(problem)?;
        self.all().try_for_each(TextEncoder::check)?;
        Ok(self)
    }

    /// Those that are there.
    fn all(&self) -> impl Iterator<Item = &TextEncoder> {
        self.list.iter().filter_map(|place| place.encoder.as_ref())
    }

    /// Tokens of a prompt that each place sees.
    pub fn lengths(&self) -> impl Iterator<Item = usize> {
        self.list.iter().map(|place| place.length)
    }

    /// Takes what an adapter's file has for them.
    pub fn take_adapter(&mut self, file: &mut AdapterFile) -> Result<()> {
        let mut all = self.list.iter_mut().filter_map(|place| place.encoder.as_mut());
        all.try_for_each(|encoder| encoder.take_adapter(file))
    }

    /// The adapters' matrices by encoder.
    pub fn adapter(&self) -> Parts {
        let layers = |encoder: &TextEncoder| encoder.adapter.clone().into_iter().collect();
        self.all().map(|encoder| (encoder.spec.component(), layers(encoder))).collect()
    }

    /// The encoders as they lie on disk, with the matrices beside them.
    pub fn beside(&self) -> impl Iterator<Item = Beside<'_>> {
        self.all().map(TextEncoder::beside)
    }

    /// Puts matrices beside the layers of the encoder at a place, if it is there.
    pub fn set_adapter(&mut self, place: u8, layers: HashMap<String, Given>) {
        let mut all = self.list.iter_mut().filter_map(|place| place.encoder.as_mut());
        if let Some(encoder) = all.find(|encoder| encoder.spec.place == place) {
            encoder.adapter = layers;
        }
    }

    /// Bytes of each encoder's files.
    pub fn file_bytes(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.all().map(|encoder| (encoder.spec.name, encoder.part.file_bytes()))
    }

    /// What a model is told of a text, all zeros: its shape is that of any other.
    pub fn hollow_condition(&self) -> Condition {
        let encoded = |place: &Place| {
            let encoded = place.encoder.as_ref().map(|encoder| {
                let Widths { tokens, pooled } = encoder.part.config.widths();
                Encoded { tokens: vec![0.0; place.length * tokens], pooled: vec![0.0; pooled] }
            });
            (place.length, encoded.unwrap_or_default())
        };
        self.config.condition(&self.list.iter().map(encoded).collect::<Vec<_>>())
    }

    /// Encodes prompts.
    pub fn encode(
        &self,
        device: &Device,
        encoding: Encoding,
        texts: &[String],
        watch: Watch<'_>,
    ) -> Result<Vec<Condition>> {
        let mut conditions = Vec::with_capacity(texts.len());
        self.encode_each(device, encoding, texts, watch, &mut |condition| {
            conditions.push(condition);
            Ok(())
        })?;
        Ok(conditions)
    }

    /// Encodes prompts and hands each over when it is whole: the tokens of the last encoder, nearly
    /// all of a prompt, are never held for more than one.
    pub fn encode_each(
        &self,
        device: &Device,
        encoding: Encoding,
        texts: &[String],
        watch: Watch<'_>,
        take: &mut dyn FnMut(Condition) -> Result<()>,
    ) -> Result<()> {
        let last = self.list.iter().rposition(|place| place.encoder.is_some());
        let mut before = Vec::new();
        for place in &self.list[..last.unwrap_or(0)] {
            let mut all = Vec::with_capacity(texts.len());
            if let Some(encoder) = &place.encoder {
                encoder.encode(device, encoding, texts, watch, &mut |encoded| {
                    all.push(encoded);
                    Ok(())
                })?;
            }
            before.push(all.into_iter());
        }
        let mut whole = |encoded: Encoded| {
            let mut encoded = Some(encoded);
            let of_place = |(index, place): (usize, &Place)| {
                let encoded = match before.get_mut(index) {
                    Some(all) => all.next(),
                    None => encoded.take(),
                };
                (place.length, encoded.unwrap_or_default())
            };
            let all: Vec<_> = self.list.iter().enumerate().map(of_place).collect();
            take(self.config.condition(&all))
        };
        match last.and_then(|last| self.list[last].encoder.as_ref()) {
            Some(encoder) => encoder.encode(device, encoding, texts, watch, &mut whole),
            None => texts.iter().try_for_each(|_| whole(Encoded::default())),
        }
    }

    /// The files that decide what becomes of a text: weights, settings, tokenizers.
    pub fn sources(&self) -> Vec<PathBuf> {
        self.all().flat_map(TextEncoder::sources).collect()
    }

    /// What of a text each encoder cuts off, if it does. Needs no weights.
    pub fn cuts<'t>(&self, text: &'t str) -> Vec<(Spec, Cut<'t>)> {
        self.all().filter_map(|encoder| Some((encoder.spec, encoder.words.cut(text)?))).collect()
    }

    /// The encoder that comes last and sees the most of a text, if it is there.
    pub fn last(&self) -> Option<Spec> {
        let place = self.list.last()?;
        place.encoder.as_ref().map(|encoder| encoder.spec)
    }
}

/// What a folder states about lengths.
struct Stated {
    /// By its first tokenizer.
    first: Option<usize>,
    /// By `model_index.json`.
    index: Option<usize>,
}

impl Stated {
    fn read(folder: &Path) -> Result<Self> {
        let Index { max_sequence_length: index } = config::read(&folder.join("model_index.json"))?;
        Ok(Self { first: Tokenizer::stated_length(&folder.join("tokenizer"))?, index })
    }

    /// Whether a folder has an encoder. One that sees nothing is not loaded either.
    fn has(&self, folder: &Path, spec: &Spec) -> bool {
        let is_seen = self.length(spec, None) > 0;
        !spec.is_optional || is_seen && folder.join(spec.folder()).join("config.json").exists()
    }

    /// Tokens of a prompt that an encoder sees. The first tokenizer speaks for all CLIPs, as in the reference; none can
    /// see more tokens than it has positions, and they go side by side.
    fn length(&self, spec: &Spec, most: Option<usize>) -> usize {
        match spec.length {
            Length::Positions(usual) => self.first.unwrap_or(usual).min(most.unwrap_or(usize::MAX)),
            Length::Index(usual) => self.index.unwrap_or(usual),
        }
    }
}

impl Length {
    /// Where nothing is stated.
    pub fn default(self) -> usize {
        match self {
            Self::Positions(usual) | Self::Index(usual) => usual,
        }
    }
}

impl TextSettings {
    /// Of each encoder in a diffusers folder.
    pub fn read(folder: &Path, specs: &[Spec]) -> Result<Vec<Self>> {
        let stated = Stated::read(folder)?;
        let settings = |spec: &Spec| {
            let length = match spec.length {
                Length::Positions(_) => None,
                Length::Index(usual) => stated.index.filter(|stated| *stated != usual),
            };
            Self { spec: *spec, is_there: stated.has(folder, spec), length }
        };
        Ok(specs.iter().map(settings).collect())
    }

    /// As the published folders are.
    pub fn usual(specs: &[Spec]) -> Vec<Self> {
        specs.iter().map(|spec| Self { spec: *spec, is_there: true, length: None }).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use compute::{Dtype, Kind, Quantisation};

    use super::super::sd3;
    use super::*;
    use crate::model::diffusion::Pipeline;
    use crate::model::encoder::t5::blocks::TEXTS_AT_ONCE;
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
    fn lengths(index: &str, tokenizer: &str, positions: [usize; 2]) -> [usize; 2] {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("tokenizer")).unwrap();
        fs::write(folder.path().join("model_index.json"), index).unwrap();
        fs::write(folder.path().join("tokenizer/tokenizer_config.json"), tokenizer).unwrap();
        let stated = Stated::read(folder.path()).unwrap();
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
