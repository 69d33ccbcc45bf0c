//! A job, the first stage of the data's way: one TOML file, in two forms. [`RawConfig`] is what was
//! typed, every value optional; [`RunConfig`] is what it means, every value decided and within its
//! bounds. [`RawConfig::resolve`] is the one way from the first to the second; nothing behind it
//! sees what was typed.
//!
//! ```text
//! job.toml ──▶ RawConfig ◀── --set key=value        types and bounds, the place of each value
//!                  │ resolve                        defaults, keys that depend on each other
//!              RunConfig ──▶ resolved()             a job file again, with the origin of each value
//! ```
//!
//! A section is a file here; `section.rs` says how it is declared. Whether paths exist, and whether
//! anything fits, is the business of later stages.

pub mod adapter;
pub mod base;
pub mod batch;
mod bound;
mod change;
pub mod cluster;
pub mod compress;
pub mod data;
pub mod data_sets;
pub mod error;
pub mod generate;
pub mod machine;
pub mod model_path;
mod objective;
pub mod optimizer;
pub mod output;
pub mod preference;
mod reference;
pub(crate) mod renamed;
pub mod reward;
pub mod sample;
mod section;
mod source;
mod targets;
#[cfg(test)]
mod tests;
pub mod text;
mod text_encoders;
pub mod train;
pub mod training_data;
mod value;

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use toml::de::{DeTable, DeValue};

pub use change::{CHANGEABLE, ChangeableSetting};
pub use error::ConfigError;
pub use reference::reference;
pub use source::ValueOrigin;
pub use value::{ImageSize, Switch};

use crate::suggest::nearest;
use adapter::{AdapterConfig, AdapterKind, RawAdapter};
use base::{BaseConfig, ComputeType, RawBase};
use batch::PlanChoice;
use cluster::{ClusterConfig, RankPart, RawCluster};
use compress::RawCompress;
use data::RawData;
use data_sets::RawDataSets;
use generate::RawGenerate;
use machine::{MachineConfig, RawMachine};
use optimizer::{LrSchedule, OptimizerConfig, RawOptimizer};
use output::{OutputConfig, RawOutput};
use preference::RawPreference;
use sample::RawSample;
use section::{Key, ResolvedKey, ResolvedKeys, Section, in_order, read_table, unknown};
use source::{ConfigSource, ConfigSourceKind, RawValue};
use text::RawText;
use train::{RawTrain, TrainConfig};
use training_data::{RawImageSections, RawTextSections, TrainingData};
use value::{quoted, word};

/// A job as typed.
#[derive(Clone, Debug, Default)]
pub struct RawConfig {
    base: RawBase,
    data: RawDataSets,
    text: RawText,
    compress: RawCompress,
    preference: RawPreference,
    adapter: RawAdapter,
    train: RawTrain,
    optimizer: RawOptimizer,
    sample: RawSample,
    generate: RawGenerate,
    machine: RawMachine,
    cluster: RawCluster,
    output: RawOutput,
    /// The file's; what default paths are relative to.
    folder: PathBuf,
}

/// A job as meant. Each stage takes its section and takes it apart completely.
#[derive(Clone, Debug)]
pub struct RunConfig {
    /// The model that is trained.
    pub base: BaseConfig,
    /// What it learns from, and what is shown on the way.
    pub data: TrainingData,
    /// What is trained beside the model.
    pub adapter: AdapterConfig,
    /// How long, in what micro-batches, by which rule.
    pub train: TrainConfig,
    /// How gradients become steps.
    pub optimizer: OptimizerConfig,
    /// How the machine is treated.
    pub machine: MachineConfig,
    /// What ranks that train together exchange.
    pub cluster: ClusterConfig,
    /// What is written.
    pub output: OutputConfig,
    /// Which rank this process is; no part of the job.
    pub part: RankPart,
    rows: ResolvedKeys,
}

/// The first line of a job that hearth wrote. Old names of keys are read there.
pub const HEADER: &str = "# Written by hearth: the job as decided, with the origin of every value.";

/// What takes a key back to its default on the command line.
pub const UNSET: &str = "unset";

/// What a section declares.
type SectionKeys = fn() -> Vec<Key>;

/// All sections with their keys, in the order of the reference.
const SECTIONS: [(&str, SectionKeys); 13] = [
    ("base", RawBase::keys),
    ("data", RawData::keys),
    ("text", RawText::keys),
    ("compress", RawCompress::keys),
    ("preference", RawPreference::keys),
    ("adapter", RawAdapter::keys),
    ("train", RawTrain::keys),
    ("optimizer", RawOptimizer::keys),
    ("sample", RawSample::keys),
    ("generate", RawGenerate::keys),
    ("machine", RawMachine::keys),
    ("cluster", RawCluster::keys),
    ("output", RawOutput::keys),
];

fn known() -> Vec<(&'static str, &'static str)> {
    let of = |(section, keys): (&'static str, SectionKeys)| {
        keys().into_iter().map(move |key| (section, key.name))
    };
    SECTIONS.into_iter().flat_map(of).collect()
}

impl RawConfig {
    /// Nothing typed yet.
    pub fn empty() -> Self {
        Self { folder: absolute(Path::new("")), ..Self::default() }
    }

    /// From a job file.
    pub fn from_file(path: &Path) -> Result<Self, ConfigError> {
        let text = fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.into(), source })?;
        Self::from_text(&text, path)
    }

    /// From the text of a job file that is, or would be, at `path`.
    pub fn from_text(text: &str, path: &Path) -> Result<Self, ConfigError> {
        let folder = absolute(path.parent().unwrap_or(Path::new("")));
        let mut raw = Self { folder: folder.clone(), ..Self::default() };
        raw.read(&ConfigSource {
            text: text.into(),
            folder,
            kind: ConfigSourceKind::File(path.into()),
            is_written_by_hearth: text.starts_with(HEADER),
        })?;
        Ok(raw)
    }

    /// Takes `key=value` of `--set`, which stands above the file; of several for one key the last
    /// counts. The value is TOML; text needs no quotes. The bare word [`UNSET`] takes the key back to
    /// its default.
    pub fn set(&mut self, argument: &str) -> Result<(), ConfigError> {
        let no_assignment = || ConfigError::NoAssignment { argument: argument.into() };
        let (key, value) = argument.split_once('=').ok_or_else(no_assignment)?;
        self.assign(key.trim(), value.trim(), "--set", argument)
    }

    /// The same for a path, which may look like anything.
    pub fn set_path(&mut self, key: &str, path: &Path) -> Result<(), ConfigError> {
        let path = quoted(&path.to_string_lossy());
        self.assign(key, &path, "--set", &format!("{key}={path}"))
    }

    /// Takes a flag that stands for one key, such as `--steps 20`.
    pub fn flag(&mut self, flag: &str, key: &str, value: &str) -> Result<(), ConfigError> {
        self.assign(key, value.trim(), flag, value)
    }

    /// The same for a flag that takes a path.
    pub fn flag_path(&mut self, flag: &str, key: &str, path: &Path) -> Result<(), ConfigError> {
        let path = path.to_string_lossy();
        self.assign(key, &quoted(&path), flag, &path)
    }

    /// Reads a value that was typed after `flag`.
    fn assign(
        &mut self,
        key: &str,
        value: &str,
        flag: &str,
        argument: &str,
    ) -> Result<(), ConfigError> {
        // In quotes it is a text like any other.
        let is_unset = value == UNSET;
        let key = dotted(key);
        let source = |value: &str| ConfigSource {
            text: format!("{key} = {value}"),
            folder: absolute(Path::new("")),
            kind: ConfigSourceKind::Argument {
                flag: flag.into(),
                value: argument.into(),
                is_unset,
            },
            is_written_by_hearth: false,
        };
        let as_text = source(&quoted(value));
        match DeValue::parse(value) {
            Ok(_) => self.read(&source(value)).or_else(|error| match error {
                // A name may look like a number.
                ConfigError::Value { .. } => self.read(&as_text).map_err(|_| error),
                error => Err(error),
            }),
            Err(error) if value.starts_with(['"', '\'', '[', '{']) => Err(as_text.syntax(&error)),
            Err(_) => self.read(&as_text),
        }
    }

    /// What it means.
    pub fn resolve(self) -> Result<RunConfig, ConfigError> {
        let Self { base, data, text, compress, preference, adapter, train, .. } = self;
        let Self { optimizer, sample, generate, machine, cluster, output, folder, .. } = self;
        let rows = &mut ResolvedKeys::default();
        let mut base = base.decide("base", rows)?;
        let mut material = TrainingData::decide(
            RawImageSections { data, sample },
            RawTextSections { text, compress, preference, generate },
            rows,
        )?;
        let family = material.family(&base.path);
        if let Some(family) = family {
            material.apply_family(family, rows)?;
        }
        let adapter = adapter.decide("adapter", rows)?;
        let train = TrainConfig::new(train.decide("train", rows)?, family, rows)?;
        let mut optimizer = optimizer.decide("optimizer", rows)?;
        optimizer::apply_defaults(&mut optimizer, material.preference().is_some(), rows);
        let adapter = AdapterConfig::new(adapter, &material, &base.path, family, &optimizer, rows)?;
        optimizer::refuse_idle(&optimizer, rows)?;
        optimizer::refuse_schedule_free(&optimizer, &train, rows)?;
        base::apply_fp8(&mut base, adapter.kind, rows)?;
        train::refuse_fused(&train, base.dtype, optimizer.kind, rows)?;
        train::refuse_bf16(&train, base.dtype, optimizer.kind, rows)?;
        let machine = machine.decide("machine", rows)?;
        let cluster = cluster.decide("cluster", rows)?;
        cluster::refuse_idle(&cluster, &train, &machine, optimizer.kind, rows)?;
        let mut output = output.decide("output", rows)?;
        // What was typed is absolute already; the default is not.
        output.folder = folder.join(&output.folder);
        rows.replace("output.folder", &output.folder);
        if rows.origin("output.formats").is_some_and(ValueOrigin::is_default) {
            output.formats = adapter::default_formats(&adapter);
            rows.replace("output.formats", &output.formats);
        }
        material.apply_defaults(rows)?;
        if adapter.kind == AdapterKind::Full {
            rows.leave_out("output.formats", adapter::FULL_FINE_TUNE)?;
        }
        if let Some(without) = material.no_validation_key() {
            rows.leave_out("train.validate_every", without)?;
            if optimizer.lr_scheduler == LrSchedule::Plateau {
                rows.leave_out("optimizer.lr_scheduler", without)?;
            }
        }
        material.leave_out_idle(rows)?;
        material.refuse_base_target(adapter.kind, rows)?;
        refuse_idle(rows)?;
        if adapter.kind != AdapterKind::Full {
            rows.remove("train.fused_backward_pass");
            rows.remove("train.weight_dtype");
        }
        let rows = std::mem::take(rows);
        let (data, part) = (material, RankPart::ALONE);
        Ok(RunConfig {
            base,
            data,
            adapter,
            train,
            optimizer,
            machine,
            cluster,
            output,
            part,
            rows,
        })
    }

    fn read(&mut self, source: &ConfigSource) -> Result<(), ConfigError> {
        let table = DeTable::parse(&source.text).map_err(|error| source.syntax(&error))?;
        for (key, value) in in_order(table.get_ref()) {
            let name = source.current_name(key.get_ref());
            let typed = source.typed(name.into(), value);
            self.section(name, &typed)?
                .ok_or_else(|| unknown_section(name, &typed, source.origin(&key.span())))?;
        }
        Ok(())
    }

    /// Reads a section, if there is one of that name.
    fn section(&mut self, name: &str, typed: &RawValue<'_>) -> Result<Option<()>, ConfigError> {
        let known = known();
        match name {
            "base" => read_table(&mut self.base, name, typed, &known),
            "data" => self.data.read(name, typed, &known),
            "text" => read_table(&mut self.text, name, typed, &known),
            "compress" => read_table(&mut self.compress, name, typed, &known),
            "preference" => read_table(&mut self.preference, name, typed, &known),
            "adapter" => read_table(&mut self.adapter, name, typed, &known),
            "train" => read_table(&mut self.train, name, typed, &known),
            "optimizer" => read_table(&mut self.optimizer, name, typed, &known),
            "sample" => read_table(&mut self.sample, name, typed, &known),
            "generate" => read_table(&mut self.generate, name, typed, &known),
            "machine" => read_table(&mut self.machine, name, typed, &known),
            "cluster" => read_table(&mut self.cluster, name, typed, &known),
            "output" => read_table(&mut self.output, name, typed, &known),
            _ => return Ok(None),
        }
        .map(Some)
    }
}

impl RunConfig {
    /// Where a value was decided; nothing for a key that means nothing in this job.
    pub fn origin(&self, key: &str) -> Option<&ValueOrigin> {
        self.rows.origin(key)
    }

    /// All that the job reads models from.
    pub fn model_paths(&self) -> Vec<&Path> {
        let BaseConfig { path, rest, vae, text_encoders, training_adapter, .. } = &self.base;
        let tokenizer = self.data.texts().ok().and_then(|(text, _)| text.tokenizer.as_ref());
        let parts = rest.iter().chain(vae).chain(text_encoders).chain(training_adapter);
        let parts = parts.chain(tokenizer);
        std::iter::once(path).chain(parts).map(|path| &**path).collect()
    }

    /// Whether nobody typed it, and it does not follow from another key, so that a plan may choose.
    pub fn is_free(&self, key: &str) -> bool {
        let follows = key == "base.quantise" && self.base.compute == ComputeType::Fp8;
        !follows && self.origin(key).is_some_and(ValueOrigin::is_default)
    }

    /// The same job with the precision that a plan chose for `before`, which a run keeps to its end.
    #[must_use]
    pub fn with_precision_of(&self, before: &Self) -> Self {
        let mut config = self.clone();
        let rows = &mut config.rows;
        if self.is_free("base.quantise") {
            config.base.quantise = before.base.quantise;
            rows.set_planned("base.quantise", &before.base.quantise);
        }
        if self.is_free("base.quantise_encoders") {
            config.base.quantise_encoders = before.base.quantise_encoders;
            rows.set_planned("base.quantise_encoders", &before.base.quantise_encoders);
        }
        // A run of before has an adapter at every layer that was named.
        if self.is_free("adapter.exclude") {
            config.adapter.exclude.clone_from(&before.adapter.exclude);
            let exclude = Some(config.adapter.exclude.clone()).filter(|names| !names.is_empty());
            rows.set_planned("adapter.exclude", &exclude);
        }
        if self.is_free("optimizer.kind") {
            config.optimizer.kind = before.optimizer.kind;
            rows.set_planned("optimizer.kind", &before.optimizer.kind);
        }
        if self.is_free("train.fused_backward_pass") {
            config.train.fused_backward_pass = before.train.fused_backward_pass;
            rows.set_planned("train.fused_backward_pass", &before.train.fused_backward_pass);
        }
        config
    }

    /// Whether a plan may choose a fused backward pass.
    pub fn can_fuse_backward(&self) -> bool {
        self.adapter.kind == AdapterKind::Full
            && train::fused_obstacle(&self.train, self.base.dtype, self.optimizer.kind).is_none()
    }

    /// The same job with what a plan chose.
    #[must_use]
    pub fn with_choice(&self, choice: &PlanChoice) -> Self {
        let PlanChoice { micro_batch, recompute, fused_backward_pass, .. } = *choice;
        let PlanChoice { offload, quantise, quantise_encoders, optimizer, .. } = *choice;
        let mut config = self.clone();
        config.train.micro_batch = Some(micro_batch);
        config.train.recompute = recompute;
        config.train.fused_backward_pass = fused_backward_pass;
        config.machine.offload = offload;
        config.base.quantise = quantise;
        config.base.quantise_encoders = quantise_encoders;
        config.optimizer.kind = optimizer;
        let rows = &mut config.rows;
        rows.set_planned("train.micro_batch", &config.train.micro_batch);
        rows.set_planned("train.recompute", &recompute);
        rows.set_planned("train.fused_backward_pass", &fused_backward_pass);
        rows.set_planned("machine.offload", &offload);
        rows.set_planned("base.quantise", &quantise);
        rows.set_planned("base.quantise_encoders", &quantise_encoders);
        rows.set_planned("optimizer.kind", &optimizer);
        config
    }

    /// Every value that is set, by key, as TOML.
    pub fn values(&self) -> impl Iterator<Item = (String, String)> {
        let value =
            |row: &ResolvedKey| Some((format!("{}.{}", row.section, row.name), row.value.clone()?));
        self.rows.0.iter().filter_map(value)
    }

    /// Where what was prepared of images or texts is kept.
    pub fn cache_folder(&self) -> PathBuf {
        self.data.cache().cloned().unwrap_or_else(|| self.output.folder.join("cache"))
    }

    /// As a job file that means the same, with the origin of every value.
    pub fn resolved(&self) -> String {
        let mut text = String::new();
        let mut section = "";
        for ResolvedKey { section: of, name, value, origin } in &self.rows.0 {
            if of != section {
                let gap = if section.is_empty() { "" } else { "\n" };
                let _ = match of.split_once('[') {
                    Some((list, _)) => writeln!(text, "{gap}[[{list}]]"),
                    None => writeln!(text, "{gap}[{of}]"),
                };
                section = of;
            }
            // A line break in a path would end the comment.
            let origin = origin.to_string().replace(char::is_control, " ");
            let _ = match value {
                Some(value) => writeln!(text, "{name} = {value} # {origin}"),
                None => writeln!(text, "# {name} is not set"),
            };
        }
        text
    }
}

impl PlanChoice {
    /// By key, as a job file would say it, without its quotes.
    pub fn settings(&self) -> [(&'static str, String); 7] {
        [
            ("train.micro_batch", word(&self.micro_batch)),
            ("train.recompute", word(&self.recompute)),
            ("machine.offload", word(&self.offload)),
            ("base.quantise", word(&self.quantise)),
            ("base.quantise_encoders", word(&self.quantise_encoders)),
            ("optimizer.kind", word(&self.optimizer)),
            ("train.fused_backward_pass", word(&self.fused_backward_pass)),
        ]
    }
}

/// Two jobs are equal if they mean the same, wherever that was written.
impl PartialEq for RunConfig {
    fn eq(&self, other: &Self) -> bool {
        let Self { base, data, adapter, train, optimizer, machine, cluster, output, part, rows: _ } =
            self;
        *base == other.base
            && *data == other.data
            && *adapter == other.adapter
            && *train == other.train
            && *optimizer == other.optimizer
            && *machine == other.machine
            && *cluster == other.cluster
            && *output == other.output
            && *part == other.part
    }
}

/// Keys of one section that would be ignored because of another key are refused.
fn refuse_idle(rows: &ResolvedKeys) -> Result<(), ConfigError> {
    for (key, idle, other, cause) in [
        ("train.stop_after_plateau", "\"off\"", "data.validation", "0"),
        ("train.stop_after_plateau", "\"off\"", "text.validation", "0"),
        ("sample.every", "\"off\"", "sample.prompts", "[]"),
        ("sample.references", "[]", "sample.prompts", "[]"),
        ("generate.every", "\"off\"", "generate.prompts", "[]"),
        ("base.random_init", "false", "adapter.kind", "\"lora\""),
        ("base.random_init", "false", "adapter.kind", "\"dora\""),
        ("train.weight_dtype", "\"f32\"", "adapter.kind", "\"lora\""),
        ("train.weight_dtype", "\"f32\"", "adapter.kind", "\"dora\""),
        ("train.fused_backward_pass", "false", "adapter.kind", "\"lora\""),
        ("train.fused_backward_pass", "false", "adapter.kind", "\"dora\""),
        ("base.quantise", "\"none\"", "adapter.kind", "\"full\""),
        ("machine.offload", "\"none\"", "adapter.kind", "\"full\""),
    ] {
        if let Some(origin) = rows.origin(key)
            && rows.value(key) != idle
            && rows.value(other) == cause
        {
            let with = format!("{other} = {cause}");
            let (key, origin) = (key.into(), origin.clone());
            return Err(ConfigError::NoEffect { key, with, origin });
        }
    }
    Ok(())
}

/// What a name at the top may mean: a section, or a key that lost its section.
fn unknown_section(name: &str, typed: &RawValue<'_>, origin: ValueOrigin) -> ConfigError {
    let what = if typed.value.is_table() { "section" } else { "key" };
    if let Some(renamed) = renamed::refuse(what, name, origin.clone()) {
        return renamed;
    }
    let known = known();
    let is_key = known.iter().any(|(_, key)| *key == name);
    match nearest(name, SECTIONS.iter().map(|(section, _)| *section)) {
        Some(near) if !is_key => {
            let advice = format!("did you mean `[{near}]`?");
            ConfigError::UnknownKey { key: name.into(), advice, origin }
        }
        _ => unknown("", name, &known, origin),
    }
}

/// `data.1.flip` of `data[1].flip`, as errors name the keys of a set: TOML has no such keys.
fn dotted(key: &str) -> String {
    let number = || key.strip_prefix("data[")?.split_once(']');
    match number() {
        Some((number, rest)) => format!("data.{number}{rest}"),
        None => key.to_owned(),
    }
}

fn absolute(path: &Path) -> PathBuf {
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    // It fails only where there is no current folder; then a relative path is all there is.
    std::path::absolute(path).unwrap_or_else(|_| path.into())
}
