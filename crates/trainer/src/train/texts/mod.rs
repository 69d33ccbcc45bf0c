//! Learning from texts: a language model, the cross entropy of each next token, and texts written to
//! see what it does; what such a job does before and after the loop.
//!
//! Shapes: S sequences of N tokens.

mod feed;
mod write;

use std::fmt;
use std::path::Path;

use compute::ops::IGNORED;
use compute::{Device, Dtype, Kind, Tape, Tensor, Var};
use weights::{Catalog, Tick};

pub(super) use self::feed::Feed;
pub use self::feed::open_texts;
use self::write::Writer;
use super::folder::Folder;
use super::preparation::{prepares, tell_findings};
use super::workplace::{On, Planned};
use crate::config::RunConfig;
use crate::config::text::Text;
use crate::config::writing::Writing;
use crate::cost::Cost;
use crate::data::Counts;
use crate::error::{Result, TrainerError};
use crate::event::{Event, Sink, Warning, WarningKind};
use crate::export::language;
use crate::fingerprint::Fingerprint;
use crate::model::adapter::Adapters;
use crate::model::adapter::read::Component;
use crate::model::build::{Precision, Want};
use crate::model::files;
use crate::model::llama::Llama;
use crate::model::llama::base::Base;
use crate::model::llama::preset::Preset;
use crate::model::llama::published::Published;
use crate::model::recompute::Recompute;
use crate::model::vae::Tiling;
use crate::plan::{Job, choose, ladder};
use crate::task::draws::{Purpose, seed};
use crate::task::lesson::{Before, Learner, Lesson, Outlook, Smaller};
use crate::task::prefetch::AHEAD;
use crate::task::session::Trained;
use crate::text::{HeldOut, Sequence, Texts, Tokenizer};

/// A language model, and what it is to read.
#[derive(Clone, Copy)]
pub struct Reading<'a> {
    /// The model.
    pub base: &'a Base,
    /// Between texts and tokens.
    pub tokenizer: &'a Tokenizer,
    /// The texts.
    pub text: &'a Text,
    /// Texts written while training.
    pub writing: &'a Writing,
    /// Tokens that each of them may have.
    pub max_tokens: usize,
}

/// How long sequences are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tokens(pub usize);

impl fmt::Display for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} tokens", self.0)
    }
}

/// Sequences that go through the model at once, one after the other.
pub struct Portion {
    /// S and N.
    sizes: [usize; 2],
    ids: Vec<u32>,
    targets: Vec<u32>,
    first_keys: Vec<u32>,
}

impl Portion {
    /// Sequences of one length, and how many of their tokens count.
    pub(crate) fn of(sequences: &[Sequence]) -> (f64, Self) {
        let joined = |part: fn(&Sequence) -> &[u32]| {
            sequences.iter().flat_map(|sequence| part(sequence).iter().copied()).collect::<Vec<_>>()
        };
        let targets = joined(|sequence| &sequence.targets);
        let counted = targets.iter().filter(|target| **target != IGNORED).count();
        let portion = Self {
            sizes: [sequences.len(), sequences[0].ids.len()],
            ids: joined(|sequence| &sequence.ids),
            targets,
            first_keys: joined(|sequence| &sequence.first_keys),
        };
        (counted as f64, portion)
    }
}

/// Sequences that an epoch has where nobody counted them, in batches. Chosen: enough that batches are
/// full.
const NOMINAL_BATCHES: usize = 16;

/// Bytes of a token of a sequence on the host: itself, what follows, and where its document begins.
const TOKEN_BYTES: usize = 3 * size_of::<u32>();

/// The shortest sequences that are worth to fall back to, and the fewest tokens of a sample.
const SHORTEST: usize = 128;
const FEWEST_WRITTEN: usize = 16;

impl Reading<'_> {
    /// What a job will be fed with, as far as a plan has to know; nothing is read for it.
    pub fn outlook(&self, batch: usize) -> Outlook<Tokens> {
        let held_out = usize::from(self.text.validation != HeldOut::None);
        Outlook { is_nominal: true, ..self.outlook_of(NOMINAL_BATCHES * batch, held_out) }
    }

    fn outlook_of(&self, n_train: usize, n_held_out: usize) -> Outlook<Tokens> {
        let counts = |n| Counts::from([(Tokens(self.text.length), n)]);
        Outlook {
            train: counts(n_train),
            held_out: if n_held_out > 0 { counts(n_held_out) } else { Counts::new() },
            to_encode: Counts::new(),
            n_texts: 0,
            is_nominal: false,
        }
    }
}

impl Lesson for Reading<'_> {
    type Model = Llama;
    type Size = Tokens;
    type Portion = Portion;

    fn path(&self) -> &Path {
        &self.base.path
    }

    fn fingerprint(&self) -> Result<Fingerprint> {
        self.base.fingerprint()
    }

    fn component(&self) -> Component {
        Component::Language
    }

    fn tensors(&self) -> Result<Vec<Want>> {
        self.base.tensors()
    }

    fn load(
        &self,
        device: &Device,
        precision: Precision,
        adapters: &mut Adapters,
        tick: Tick<'_>,
    ) -> Result<Llama> {
        self.base.load(device, precision, adapters, tick)
    }

    fn loss<'m>(
        &self,
        model: &'m Llama,
        tape: &Tape<'m>,
        Portion { sizes, ids, targets, first_keys }: &Portion,
        (_, recompute): (Dtype, Recompute),
    ) -> Result<Var> {
        let upload =
            |numbers: &[u32]| -> Result<Tensor> { Ok(tape.device().upload(*sizes, numbers)?) };
        let (ids, first_keys) = (upload(ids)?, upload(first_keys)?);
        model.loss(tape, &ids, &upload(targets)?, Some(&first_keys), recompute)
    }

    fn rehearsed(&self, Tokens(length): Tokens, n: usize) -> Result<Portion> {
        let hollow = || vec![0; n * length];
        let (ids, targets, first_keys) = (hollow(), hollow(), hollow());
        Ok(Portion { sizes: [n, length], ids, targets, first_keys })
    }

    /// Nothing: texts become tokens on the host.
    fn before(&self, _: &RunConfig, _: &Outlook<Tokens>, _: Kind, _: usize) -> Result<Before> {
        Ok(Before::default())
    }

    fn file_bytes(&self) -> u64 {
        self.base.catalog().map_or(0, Catalog::bytes)
    }

    fn host_bytes(&self, config: &RunConfig, outlook: &Outlook<Tokens>) -> usize {
        let batch = config.train.batch * self.text.length * TOKEN_BYTES;
        // The place of each sequence in the order, which an epoch shuffles.
        let order: usize = outlook.train.values().map(|n| 2 * n * size_of::<usize>()).sum();
        (AHEAD + 2) * batch + order
    }

    fn weight(Tokens(length): Tokens) -> usize {
        length
    }

    fn shows(&self) -> bool {
        !self.writing.prompts.is_empty()
    }

    fn n_measured(&self) -> usize {
        1
    }

    fn rehearse_showing(
        &self,
        device: &Device,
        learner: Learner<'_, Llama>,
        _: Option<Tiling>,
    ) -> Result<Cost> {
        Writer::new(*self)?.rehearse(device, learner)
    }

    fn smaller(&self, outlook: &Outlook<Tokens>) -> Vec<Smaller<Self>> {
        let written = halves(self.max_tokens, FEWEST_WRITTEN);
        let written: Vec<usize> = written.filter(|_| self.shows()).collect();
        let lengths: Vec<usize> = halves(self.text.length, SHORTEST).collect();
        let of_written = written.iter().map(|tokens| (None, Some(*tokens)));
        let of_lengths = lengths.iter().map(|length| (Some(*length), None));
        let least = (lengths.last().copied(), written.last().copied());
        let all = of_written.chain(of_lengths).chain([least]);
        all.map(|asked| self.asking(asked, outlook)).collect()
    }
}

/// Half of it, a quarter, ..., as long as that is worth to fall back to.
fn halves(of: usize, least: usize) -> impl Iterator<Item = usize> {
    let half = move |n: &usize| Some(n / 2).filter(|half| *half >= least);
    std::iter::successors(half(&of), half)
}

impl Reading<'_> {
    /// The same with sequences of this length, and samples of at most so many tokens.
    fn asking(
        &self,
        (length, written): (Option<usize>, Option<usize>),
        outlook: &Outlook<Tokens>,
    ) -> Smaller<Self> {
        let sequences = length.map(|length| format!("text.length = {length}"));
        let samples = written.map(|tokens| format!("writing.max_tokens = {tokens}"));
        let changes: Vec<String> = sequences.into_iter().chain(samples).collect();
        let of = |counts: &Counts<Tokens>| {
            let sizes = counts.iter().map(|(size, n)| (length.map_or(*size, Tokens), *n));
            sizes.collect::<Counts<_>>()
        };
        let (train, held_out) = (of(&outlook.train), of(&outlook.held_out));
        Smaller {
            change: changes.join(" and "),
            lesson: Self { max_tokens: written.unwrap_or(self.max_tokens), ..*self },
            outlook: Outlook { train, held_out, ..outlook.clone() },
        }
    }
}

/// A model with its tokenizer, open.
pub struct Opened {
    /// The model.
    pub base: Base,
    /// Between texts and tokens.
    pub tokenizer: Tokenizer,
}

impl Opened {
    /// The model and the tokenizer of a job. To plan, neither a published model nor its tokenizer need be
    /// there.
    pub fn of(config: &RunConfig, is_planned: bool) -> Result<Self> {
        let (text, _) = config.material.texts()?;
        let path = &config.base.path;
        let preset = path.file_name().and_then(|name| Preset::of(name.to_str()?));
        if let Some(preset) = preset.filter(|_| !path.exists()) {
            return Self::of_preset(config, preset, is_planned);
        }
        let mut base = if is_planned { Base::open_or_published(path)? } else { Base::open(path)? };
        let is_there = !base.catalog().is_some_and(Catalog::is_hollow);
        let tokenizer = match text.tokenizer.as_deref().or(base.tokenizer()) {
            Some(path) if is_there => Tokenizer::open(path)?,
            _ => Tokenizer::bytes(),
        };
        let (tokens, rows) = (tokenizer.vocabulary(), base.config.vocab_size);
        if tokens > rows {
            return Err(TrainerError::Request {
                problem: format!("the tokenizer has {tokens} tokens, the model {rows}"),
                hint: "give text.tokenizer the one that belongs to the model",
            });
        }
        if config.base.fresh {
            base = base.forgotten(seed(config.train.seed, Purpose::Weights));
        }
        Ok(Self { base, tokenizer })
    }

    /// A shape for tokens of a vocabulary that nobody reads.
    pub(crate) fn fresh(preset: Preset, vocabulary: usize) -> Result<Self> {
        Ok(Self { base: Base::preset(preset, vocabulary, 0)?, tokenizer: Tokenizer::bytes() })
    }

    /// A shape without weights.
    fn of_preset(config: &RunConfig, preset: Preset, is_planned: bool) -> Result<Self> {
        if !config.base.fresh {
            return Err(TrainerError::Request {
                problem: format!("base.path {} is a shape without weights", preset.name()),
                hint: "set base.fresh = true and adapter.kind = \"none\" to train it from scratch",
            });
        }
        let (text, _) = config.material.texts()?;
        let (tokenizer, vocabulary) = match &text.tokenizer {
            Some(path) => vocabulary(path, is_planned)?,
            None => counted(Tokenizer::bytes()),
        };
        // A product of whole tiles is faster, and the rows that no token has cost little.
        let vocabulary = vocabulary.next_multiple_of(VOCABULARY_STEP);
        let from = seed(config.train.seed, Purpose::Weights);
        Ok(Self { base: Base::preset(preset, vocabulary, from)?, tokenizer })
    }

    /// What a job is about.
    pub fn lesson<'a>(&'a self, config: &'a RunConfig) -> Result<Reading<'a>> {
        let (text, writing) = config.material.texts()?;
        self.base.config.check_length(text.length)?;
        let max_tokens = writing.max_tokens;
        Ok(Reading { base: &self.base, tokenizer: &self.tokenizer, text, writing, max_tokens })
    }
}

/// A tokenizer and how many tokens it has. To plan, the folder's name will do if it is a published
/// model's.
fn vocabulary(path: &Path, is_planned: bool) -> Result<(Tokenizer, usize)> {
    let published = [Some(path), path.parent()].into_iter().flatten().find_map(Published::of);
    match published.filter(|_| is_planned && !path.exists()) {
        Some(model) => Ok((Tokenizer::bytes(), model.config().vocab_size)),
        None => Ok(counted(Tokenizer::open(path)?)),
    }
}

fn counted(tokenizer: Tokenizer) -> (Tokenizer, usize) {
    let vocabulary = tokenizer.vocabulary();
    (tokenizer, vocabulary)
}

/// Rows of a fresh model's table come in multiples of this. Chosen: as others do.
const VOCABULARY_STEP: usize = 64;

/// Turns texts into tokens, and decides how the run is done.
pub(super) fn prepare(
    config: &RunConfig,
    lesson: &Reading<'_>,
    on: &On<'_>,
    events: &Sink<'_>,
) -> Result<(Planned, Texts)> {
    warn_of_length(lesson, events)?;
    let texts = open_texts(lesson, config, &|event| prepares(events, event))?;
    tell_findings(events, texts.findings())?;
    let room = on.room();
    let outlook = &lesson.outlook_of(texts.n_train(), texts.n_held_out());
    let plan = choose(Job { lesson, config, outlook }, room)?;
    let config = config.with(&plan.choice);
    let ladder = ladder(Job { lesson, config: &config, outlook }, room)?;
    Ok((Planned { config, plan, ladder }, texts))
}

/// Positions that a model never saw are computed like any other, and mean little to it.
fn warn_of_length(lesson: &Reading<'_>, events: &Sink<'_>) -> Result<()> {
    let (length, most) = (lesson.text.length, lesson.base.config.max_position_embeddings);
    if length <= most {
        return Ok(());
    }
    let kind = WarningKind::SequencesTooLong { tokens: length, made_for: most };
    events.emit(Event::Warning(Warning { step: 0, kind }))
}

/// Writes what was trained: an adapter for PEFT, or the whole model.
pub(super) fn write_result(
    config: &RunConfig,
    Opened { mut base, tokenizer }: Opened,
    trained: Trained,
    folder: &Folder,
    events: &Sink<'_>,
) -> Result<()> {
    match trained {
        Trained::Adapter(layers) => {
            base.set_adapter(layers);
            let exported = language::write_adapter(&mut base, &folder.path.join("adapter"))?;
            let path = exported.path.strip_prefix(&folder.path).unwrap_or(&exported.path).into();
            let (format, layers) = ("peft".into(), exported.n_layers);
            events.emit(Event::Exported { format, path, layers })
        }
        Trained::Own(own) => {
            let (dtype, out) = (files::stored(config.base.dtype), folder.path.join("model"));
            language::write_model(&base, &tokenizer, dtype, &out, &mut |_, want| {
                Ok(own.get(&want.name).expect("all of the model was trained").clone())
            })?;
            let (format, path) = ("model".into(), "model".into());
            events.emit(Event::Exported { format, path, layers: own.len() })
        }
    }
}
