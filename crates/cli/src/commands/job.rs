//! A job as it is given on the command line: a file, or images or texts and a model; and flags for the
//! keys that people change most.

use std::path::{Path, PathBuf};

use trainer::TrainerError;
use trainer::config::{ConfigError, RawConfig, RunConfig};
use trainer::model::kind;
use weights::hub::{self, HubPath};

use crate::failure::Failure;

/// Which job.
#[derive(Clone, Debug, clap::Args)]
pub struct JobArgs {
    /// Job file (TOML); docs/config.md lists its keys
    #[arg(value_name = "JOB")]
    file: Option<PathBuf>,

    /// Folder of images, each with a caption in a text file of the same name [data.images]
    #[arg(long, value_name = "FOLDER")]
    images: Option<PathBuf>,

    /// Texts for a language model: a file or folder of text, JSON lines or tokens [text.path]
    #[arg(long, value_name = "PATH", conflicts_with = "images")]
    text: Option<PathBuf>,

    /// Base model: a diffusers or transformers folder, a single-file checkpoint, a GGUF file, or the name of a
    /// fetched model, such as black-forest-labs/FLUX.1-dev [base.path]
    #[arg(long, value_name = "MODEL")]
    base: Option<PathBuf>,

    /// Output folder [output.folder]
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,

    /// Training steps [train.steps]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    steps: Option<String>,

    // Not as a comment, where the key would be taken for code.
    #[arg(
        long,
        value_name = "N",
        allow_negative_numbers = true,
        help = "Batch size [train.batch_size]"
    )]
    batch: Option<String>,

    // The same.
    #[arg(
        long,
        value_name = "RATE",
        allow_hyphen_values = true,
        help = "Learning rate, such as 1e-4 [optimizer.learning_rate]"
    )]
    lr: Option<String>,

    /// LoRA rank [adapter.rank]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    rank: Option<String>,

    /// LoRA targets: `attention`, `all`, `kohya`, `ai-toolkit`, or the end of a layer's name [adapter.targets]
    #[arg(long, value_name = "LAYERS")]
    targets: Option<String>,

    /// Resolution: edge of a square image in pixels [data.resolution]
    #[arg(long, value_name = "PIXELS", allow_negative_numbers = true)]
    resolution: Option<String>,

    /// Set any key of the job, or `unset` for its default; may be given several times
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
}

/// What a plan says in the place of a folder that nobody named.
const ASSUMED_DATA: &str = "images-or-texts";

/// Whether this is a model where a job file could be: a folder, or a name of the hub.
fn is_model(path: &Path) -> bool {
    let is_name =
        || path.to_str().is_some_and(|text| HubPath::of(&hub::locate(text, path)).is_some());
    path.is_dir() || !path.exists() && is_name()
}

/// A flag, the key of the job that it stands for, and what was typed after it.
pub type JobFlag<'a> = (&'static str, &'static str, Option<&'a str>);

impl JobArgs {
    /// The resolved job. `verb` is the command it was given to.
    pub fn resolve(&self, verb: &str) -> Result<RunConfig, Failure> {
        self.resolve_with(verb, &[])
    }

    /// The resolved job, with the flags that only this command has.
    pub fn resolve_with(&self, verb: &str, more: &[JobFlag<'_>]) -> Result<RunConfig, Failure> {
        match self.typed(more).and_then(RawConfig::resolve) {
            Err(ConfigError::Missing { key }) if self.file.is_none() => {
                Err(self.incomplete(verb, &key))
            }
            resolved => resolved.map_err(|error| Failure::Trainer(TrainerError::Job(error))),
        }
    }

    /// The same for a plan, for which a model alone is enough: what it would be trained on is assumed.
    pub fn resolve_planned(&self) -> Result<RunConfig, Failure> {
        let Some(model) = self.file.as_ref().filter(|path| is_model(path)) else {
            return self.resolve("plan");
        };
        let located = hub::locate(&model.to_string_lossy(), model);
        let assumed = |is_text| {
            (kind::is_language_or_named(&located) == is_text).then(|| ASSUMED_DATA.into())
        };
        let has_data = self.images.is_some() || self.text.is_some();
        let [images, text] = [false, true].map(|is_text| assumed(is_text).filter(|_| !has_data));
        let (images, text) = (self.images.clone().or(images), self.text.clone().or(text));
        Self { file: None, base: Some(model.clone()), images, text, ..self.clone() }.resolve("plan")
    }

    fn typed(&self, more: &[JobFlag<'_>]) -> Result<RawConfig, ConfigError> {
        let Self {
            file,
            images,
            text,
            base,
            out,
            steps,
            batch,
            lr,
            rank,
            targets,
            resolution,
            set,
        } = self;
        let mut raw = match file {
            Some(path) => RawConfig::from_file(path)?,
            None => RawConfig::empty(),
        };
        for (flag, key, path) in [
            ("--images", "data.images", images),
            ("--text", "text.path", text),
            ("--base", "base.path", base),
            ("--out", "output.folder", out),
        ] {
            path.as_deref().map_or(Ok(()), |path| raw.flag_path(flag, key, path))?;
        }
        let flags = [
            ("--steps", "train.steps", steps.as_deref()),
            ("--batch", "train.batch_size", batch.as_deref()),
            ("--lr", "optimizer.learning_rate", lr.as_deref()),
            ("--rank", "adapter.rank", rank.as_deref()),
            ("--targets", "adapter.targets", targets.as_deref()),
            ("--resolution", "data.resolution", resolution.as_deref()),
        ];
        for (flag, key, value) in flags.iter().chain(more) {
            value.map_or(Ok(()), |value| raw.flag(flag, key, value))?;
        }
        set.iter().try_for_each(|argument| raw.set(argument))?;
        Ok(raw)
    }

    /// That there is no job file, and not enough without one.
    fn incomplete(&self, verb: &str, missing: &str) -> Failure {
        let model = "--base MODEL, a diffusers or transformers folder or a GGUF file";
        let material = "--images FOLDER for an image model, or --text PATH for a language model";
        let problem = match (missing, &self.images, &self.text) {
            ("base.path", Some(images), _) => {
                format!("--images {} needs the model too: {model}", images.display())
            }
            ("base.path", _, Some(text)) => {
                format!("--text {} needs the model too: {model}", text.display())
            }
            ("data.images", ..) if self.base.is_some() => {
                format!("a model alone is no job, add {material}")
            }
            _ => format!(
                "no job given, `hearth {verb}` needs a job file, or a model and what to train it on"
            ),
        };
        let hint = format!(
            "one of\n  hearth {verb} job.toml\n  hearth {verb} --images FOLDER --base MODEL\n  hearth {verb} --text \
             PATH --base MODEL\n  hearth demo"
        );
        Failure::Usage { problem, hint }
    }
}
