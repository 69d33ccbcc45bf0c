//! The benchmark of compressed language models: the same job with each way to choose tokens, all with as many
//! floating-point operations. `hearth bench compress` runs the jobs as any other; here is what they are and how their
//! results are measured.

use std::f64::consts::LN_2;
use std::path::{Path, PathBuf};

use compute::ops::IGNORE_INDEX;
use compute::{Device, DeviceKind, Tape};
use tokenizers::models::bpe::{BPE, BpeTrainerBuilder};
use tokenizers::normalizers::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, TokenizerBuilder};
use weights::write::write_whole;

use crate::config::{RawConfig, RunConfig};
use crate::cost::UNLIMITED;
use crate::error::{Result, TrainerError};
use crate::model::adapter::Adapters;
use crate::model::build::Precision;
use crate::model::compress::selection::is_word_end;
use crate::model::compress::{CompressedModel, CompressorInputs};
use crate::model::llama::preset::LlamaPreset;
use crate::model::recompute::Recompute;
use crate::task::session::{BatchPosition, MicroBatchStep, Session};
use crate::task::traits::Task;
use crate::text::{Sequence, TextDataset};
use crate::train::compress;
use crate::train::language::{
    LanguagePipeline, LanguageTask, SequenceLength, TextBase, open_texts,
};

/// A way to choose tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompressArm {
    /// A policy trained by REINFORCE.
    Reinforce,
    /// The same by comparing two draws.
    Grpo,
    /// The same by straight-through Gumbel-softmax.
    Gumbel,
    /// The same as H-Net does.
    Ratio,
    /// All bytes.
    All,
    /// Every N-th byte.
    Stride,
    /// Random bytes.
    Random,
    /// Where words end.
    Spaces,
    /// Where bytes are rare.
    Rarest,
    /// A plain Llama of bytes, without narrow layers.
    Bytes,
    /// The same of tokens of byte-pair encoding, made from the same texts.
    Bpe,
}

impl CompressArm {
    /// All of them, the learned ones first.
    pub const ALL: [Self; 11] = [
        Self::Reinforce,
        Self::Grpo,
        Self::Gumbel,
        Self::Ratio,
        Self::All,
        Self::Stride,
        Self::Random,
        Self::Spaces,
        Self::Rarest,
        Self::Bytes,
        Self::Bpe,
    ];

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Reinforce => "reinforce",
            Self::Grpo => "grpo",
            Self::Gumbel => "gumbel",
            Self::Ratio => "ratio",
            Self::All => "all",
            Self::Stride => "stride",
            Self::Random => "random",
            Self::Spaces => "spaces",
            Self::Rarest => "rarest",
            Self::Bytes => "bytes",
            Self::Bpe => "bpe",
        }
    }

    /// The one of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|arm| arm.name() == name)
    }
}

/// What all arms have in common.
#[derive(Clone, Debug)]
pub struct CompressBench {
    /// Texts to train on.
    pub text: PathBuf,
    /// Texts to measure on.
    pub validation: PathBuf,
    /// The trunk.
    pub preset: LlamaPreset,
    /// Bytes of a sequence.
    pub length: usize,
    /// Sequences of a step.
    pub batch: usize,
    /// Steps of the arm `reinforce`; the others take as many as cost the same.
    pub steps: u64,
    /// One byte in so many is kept, and BPE's tokens are trained in sequences of so many times fewer.
    pub keep_one_in: usize,
    /// Vocabulary of byte-pair encoding.
    pub vocabulary: usize,
    /// Further settings of all jobs, as `key=value`.
    pub settings: Vec<String>,
    /// Where runs and caches are written.
    pub folder: PathBuf,
}

impl CompressBench {
    /// The job of an arm, with as many steps.
    pub fn job(&self, arm: CompressArm, seed: u64, steps: u64) -> Result<RunConfig> {
        let mut raw = RawConfig::empty();
        let is_bpe = arm == CompressArm::Bpe;
        let length = if is_bpe { self.length / self.keep_one_in } else { self.length };
        let mut settings = vec![
            format!("base.path={}", self.preset.name()),
            "base.random_init=true".into(),
            "adapter.kind=full".into(),
            format!("text.length={length}"),
            format!("train.batch_size={}", self.batch),
            format!("train.steps={steps}"),
            format!("train.seed={seed}"),
            // Only at the end.
            format!("train.validate_every={steps}"),
        ];
        match arm {
            CompressArm::Bytes | CompressArm::Bpe => {}
            CompressArm::Reinforce
            | CompressArm::Grpo
            | CompressArm::Gumbel
            | CompressArm::Ratio => {
                settings.push(format!("compress.estimator={}", arm.name()));
                settings.push(format!("compress.keep_one_in={}", self.keep_one_in));
            }
            CompressArm::All => settings.push("compress.select=all".into()),
            _ => {
                settings.push(format!("compress.select={}", arm.name()));
                settings.push(format!("compress.keep_one_in={}", self.keep_one_in));
            }
        }
        for setting in settings.iter().chain(&self.settings) {
            raw.set(setting)?;
        }
        raw.set_path("text.path", &self.text)?;
        raw.set_path("text.validation", &self.validation)?;
        raw.set_path("text.cache", &self.folder.join("cache"))?;
        raw.set_path("output.folder", &self.run_folder(arm, seed))?;
        if is_bpe {
            raw.set_path("text.tokenizer", &self.tokenizer())?;
        }
        Ok(raw.resolve()?)
    }

    /// The folder of a run.
    pub fn run_folder(&self, arm: CompressArm, seed: u64) -> PathBuf {
        self.folder.join(format!("{}-{seed}", arm.name()))
    }

    fn tokenizer(&self) -> PathBuf {
        self.folder.join("bpe").join("tokenizer.json")
    }

    /// Makes the tokenizer of the arm `bpe` from the texts.
    pub fn train_tokenizer(&self) -> Result<()> {
        let path = self.tokenizer();
        let failed = |problem: String| TrainerError::Request {
            problem: format!("byte-pair encoding of {}: {problem}", self.text.display()),
            hint: "give --text a folder of plain text in UTF-8, or leave out the arm bpe",
        };
        let mut files: Vec<String> = Vec::new();
        let io = |source| TrainerError::Io { what: "read", path: self.text.clone(), source };
        if self.text.is_dir() {
            for entry in self.text.read_dir().map_err(io)? {
                files.push(entry.map_err(io)?.path().display().to_string());
            }
        } else {
            files.push(self.text.display().to_string());
        }
        files.sort();
        let mut trainer = BpeTrainerBuilder::new()
            .show_progress(false)
            .vocab_size(self.vocabulary)
            .special_tokens(vec![AddedToken::from("<|endoftext|>", true)])
            .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
            .build();
        let byte_level = ByteLevel::default().add_prefix_space(false);
        let mut tokenizer = TokenizerBuilder::<BPE, NFC, ByteLevel, ByteLevel, ByteLevel>::new()
            .with_model(BPE::default())
            .with_normalizer(None)
            .with_pre_tokenizer(Some(byte_level))
            .with_decoder(Some(byte_level))
            .build()
            .map_err(|error| failed(error.to_string()))?;
        let trained = tokenizer.train_from_files(&mut trainer, files);
        let text = trained.and_then(|trained| trained.to_string(false));
        let text = text.map_err(|error| failed(error.to_string()))?;
        let folder = path.parent().unwrap_or(&self.folder);
        let failed = |source| TrainerError::Io { what: "write", path: folder.into(), source };
        std::fs::create_dir_all(folder).map_err(failed)?;
        Ok(write_whole(&path, text.as_bytes())?)
    }

    /// Floating-point operations of a step, by a dry run.
    pub fn step_flops(&self, config: &RunConfig, kind: DeviceKind) -> Result<u64> {
        match config.data.compression() {
            Some(compress) => step_flops(&compress::open(config, compress, false)?, config, kind),
            None => step_flops(&LanguagePipeline::open(config, false)?, config, kind),
        }
    }

    /// Bytes for each target of the held-out texts: what a loss per token is divided by.
    pub fn bytes_per_target(&self, config: &RunConfig) -> Result<f64> {
        let (text, _) = config.data.texts()?;
        if text.tokenizer.is_none() {
            return Ok(1.0);
        }
        let pipeline = LanguagePipeline::open(config, false)?;
        let texts = held_out(&pipeline.task(config)?, config)?;
        let (mut n_bytes, mut n_targets) = (0, 0);
        for index in 0..texts.n_held_out() {
            let mut targets = texts.held_out(index)?.targets;
            targets.retain(|target| *target != IGNORE_INDEX);
            n_targets += targets.len();
            n_bytes += pipeline.tokenizer.decode(&targets).len();
        }
        Ok(n_bytes as f64 / n_targets.max(1) as f64)
    }

    /// What a trained model keeps of the held-out texts; nothing for byte-pair encoding.
    pub fn kept(
        &self,
        config: &RunConfig,
        model: &Path,
        kind: DeviceKind,
        open: &dyn Fn(usize) -> compute::Result<Device>,
    ) -> Result<Option<KeptStats>> {
        let Some(compress) = config.data.compression() else { return Ok(None) };
        let base = CompressedModel::open(model, compress.training())?;
        let pipeline = compress::open(config, compress, false)?;
        let texts = held_out(&pipeline.task(config)?, config)?;
        let n = texts.n_held_out().min(MEASURED);
        let sequences = (0..n).map(|index| texts.held_out(index)).collect::<Result<Vec<_>>>()?;
        let precision = Precision::plain(config.base.dtype);
        let meta = Device::meta(kind, UNLIMITED);
        kept_stats(&meta, &base, precision, &sequences[..1])?;
        let device = open(meta.usage().extent)?;
        kept_stats(&device, &base, precision, &sequences).map(Some)
    }
}

/// Held-out sequences that kept positions are counted in. Chosen: a hundred thousand bytes.
const MEASURED: usize = 64;

/// What is kept of a text.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct KeptStats {
    /// The share of bytes.
    pub share: f64,
    /// The share of all ends of words.
    pub spaces_found: f64,
}

/// Bits per byte of a mean loss per target.
pub fn bits_per_byte(loss: f64, bytes_per_target: f64) -> f64 {
    loss / LN_2 / bytes_per_target
}

fn held_out<B>(task: &LanguageTask<'_, B>, config: &RunConfig) -> Result<TextDataset> {
    open_texts(task, config, &|_| true)
}

fn step_flops<B: TextBase>(
    pipeline: &LanguagePipeline<B>,
    config: &RunConfig,
    kind: DeviceKind,
) -> Result<u64> {
    let task = pipeline.task(config)?;
    let device = Device::meta(kind, UNLIMITED);
    let mut session = Session::new(&device, &task, config, &|_| true)?;
    let before = device.work().flops;
    let size = SequenceLength(task.text.length);
    let micro_batch = &task.dummy_micro_batch(size, config.train.batch_size)?;
    let (position, recompute) = (BatchPosition::default(), Recompute::None);
    session.accumulate(MicroBatchStep { micro_batch, position, share: 1.0, recompute })?;
    session.update(0.0, 0, 1.0)?;
    Ok(device.work().flops - before)
}

/// Sequence by sequence.
fn kept_stats(
    device: &Device,
    base: &CompressedModel,
    precision: Precision,
    sequences: &[Sequence],
) -> Result<KeptStats> {
    let mut adapters = Adapters::none();
    let model = base.load(device, precision, &mut adapters, &|_| true)?;
    let [mut n_kept, mut n_all, mut n_found, mut n_ends] = [0usize; 4];
    for Sequence { ids, targets, first_keys } in sequences {
        let tape = Tape::inference(device, &adapters.params, 0);
        let inputs = CompressorInputs { sizes: [1, ids.len()], ids, targets, first_keys };
        let kept = model.loss(&tape, inputs, &base.training, Recompute::None)?.kept.concat();
        n_all += ids.len();
        n_kept += kept.len();
        n_found += kept.iter().filter(|at| is_word_end(ids, **at as usize)).count();
        n_ends += (0..ids.len()).filter(|at| is_word_end(ids, *at)).count();
    }
    let share = |n: usize, of: usize| n as f64 / of.max(1) as f64;
    Ok(KeptStats { share: share(n_kept, n_all), spaces_found: share(n_found, n_ends) })
}
