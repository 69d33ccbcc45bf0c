//! `hearth fetch`: a model of the Hugging Face hub into its cache. The one command with a network.

use std::io::Write;
use std::path::Path;

use hub::select::{MODEL_INDEX, select};
use hub::{FetchJob, FileSelection, HubClient, HubModel};
use trainer::config::{RawConfig, RunConfig};
use weights::hub::listing::{HubListing, HubListingFile};
use weights::hub::{HubName, HubPath, PREFIX, cache_dir, is_revision};

use crate::commands::CommandOutcome;
use crate::failure::Failure;
use crate::render;
use crate::render::fetch::{FetchReport, FetchedFile};
use crate::render::progress::ByteProgress;

/// Download a model by its name, such as black-forest-labs/FLUX.1-dev, or all models that a job names.
///
/// The files go into the cache of the Hugging Face hub, which Python's libraries use too; what they have
/// downloaded is not downloaded again. After that, the name can be given wherever hearth takes a model.
///
/// Takes only the files that hearth needs: one precision, one format, no single files beside a diffusers folder.
/// Every file is compared with its checksum. After an interruption, run it again: it goes on where it stopped.
///
/// Some models are gated: accept the licence on the model's page, and put a token into `HF_TOKEN`, or log in with
/// Python's `hf auth login`. Also read are `HF_HUB_CACHE`, `HF_HOME`, `HF_ENDPOINT`, `HTTPS_PROXY`, `NO_PROXY` and
/// `SSL_CERT_FILE`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth fetch stabilityai/stable-diffusion-3.5-medium
  hearth fetch black-forest-labs/FLUX.1-dev --dry-run          which files, and how many bytes
  hearth fetch recipes/flux1-dev-lora-gpu-24gb.toml            all models of a job
  hearth fetch Qwen/Qwen3-4B --revision main
  hearth fetch Qwen/Qwen3-4B-GGUF --only '*Q8_0*'              one of several GGUF files
  hearth train --images my-cat --base stabilityai/stable-diffusion-3.5-medium --out cat")]
pub struct FetchArgs {
    /// OWNER/NAME as on huggingface.co, OWNER/NAME@REVISION, or a job file
    #[arg(value_name = "NAME|JOB.toml")]
    name: String,

    /// Branch, tag or commit [default: main]
    #[arg(long, value_name = "REVISION")]
    revision: Option<String>,

    /// Only files that fit a pattern, such as '*.gguf'
    #[arg(long, value_name = "PATTERN", num_args = 1..)]
    only: Vec<String>,

    /// All files, also those that hearth has no use for
    #[arg(long, conflicts_with = "only")]
    all: bool,

    /// Show which files would be downloaded, and stop
    #[arg(long)]
    dry_run: bool,

    /// Print one JSON object for each model
    #[arg(long)]
    json: bool,
}

/// A model and which of its files.
#[derive(PartialEq)]
struct WantedModel {
    name: HubName,
    selection: FileSelection,
}

impl FetchArgs {
    /// What was named, or what the job names.
    fn wanted(&self) -> Result<Vec<WantedModel>, Failure> {
        let path = Path::new(&self.name);
        let is_job = path.extension().is_some_and(|ending| ending == "toml") && path.is_file();
        if !is_job {
            let name = self.hub_name()?;
            return Ok(vec![WantedModel { selection: self.selection(&name), name }]);
        }
        if self.revision.is_some() || self.all || !self.only.is_empty() {
            return Err(Failure::Usage {
                problem: format!(
                    "--revision, --only and --all are for one model, {} is a job",
                    self.name
                ),
                hint: "leave them out, or name the model".into(),
            });
        }
        let wanted = models_of(&job(path)?);
        if wanted.is_empty() {
            return Err(Failure::Usage {
                problem: format!("{} names no model of the hub, only paths", self.name),
                hint: "write OWNER/NAME in base.path, or get the models otherwise".into(),
            });
        }
        Ok(wanted)
    }

    fn hub_name(&self) -> Result<HubName, Failure> {
        let wrong = |what: &str, typed: &str, accepted: &str| {
            Failure::Usage {
            problem: format!("{what} is {typed:?}, accepted is {accepted}"),
            hint: "the name is at the top of the model's page: `hearth fetch black-forest-labs/FLUX.1-dev`".into(),
        }
        };
        let typed =
            self.name.trim_start_matches("https://huggingface.co/").trim_start_matches(PREFIX);
        let name =
            HubName::parse(typed).ok_or_else(|| wrong("the name", &self.name, "OWNER/NAME"))?;
        match &self.revision {
            Some(revision) if !is_revision(revision) => {
                Err(wrong("--revision", revision, "a branch, tag or commit without slashes"))
            }
            Some(revision) => Ok(HubName { revision: Some(revision.clone()), ..name }),
            None => Ok(name),
        }
    }

    fn selection(&self, name: &HubName) -> FileSelection {
        match &name.file {
            _ if self.all => FileSelection::All,
            _ if !self.only.is_empty() => FileSelection::Only(self.only.clone()),
            Some(file) => FileSelection::Only(vec![file.clone()]),
            None => FileSelection::Needed,
        }
    }
}

fn job(path: &Path) -> trainer::Result<RunConfig> {
    Ok(RawConfig::from_file(path)?.resolve()?)
}

/// The models of a job, each once. Of one that only gives its tokenizer, that is enough.
fn models_of(config: &RunConfig) -> Vec<WantedModel> {
    let tokenizer = config.data.texts().ok().and_then(|(text, _)| text.tokenizer.as_deref());
    let mut wanted = Vec::new();
    for path in config.model_paths() {
        let Some(name) = HubPath::of(path).map(|path| path.short_name()) else { continue };
        let selection = match &name.file {
            Some(file) => FileSelection::Only(vec![file.clone()]),
            None if tokenizer == Some(path) => FileSelection::Only(vec![TOKENIZER_FILES.into()]),
            None => FileSelection::Needed,
        };
        let model = WantedModel { name, selection };
        if !wanted.contains(&model) {
            wanted.push(model);
        }
    }
    wanted
}

/// The files of a tokenizer.
const TOKENIZER_FILES: &str = "tokenizer*.json";

pub fn run(arguments: &FetchArgs, out: &mut dyn Write) -> Result<CommandOutcome, Failure> {
    for wanted in arguments.wanted()? {
        let report = fetch(arguments, wanted)?;
        if arguments.json {
            render::json::object(out, &report)?;
        } else {
            write!(out, "{}", render::fetch::page(&report))?;
        }
    }
    Ok(CommandOutcome::Done)
}

fn fetch(
    arguments: &FetchArgs,
    WantedModel { name, selection }: WantedModel,
) -> Result<FetchReport, Failure> {
    let cache = cache_dir().ok_or_else(|| Failure::Usage {
        problem: "there is no home folder, so no place for a cache".into(),
        hint: "set HF_HUB_CACHE to a folder".into(),
    })?;
    let client = HubClient::from_env()?;
    let model = HubModel::find(&client, &name)?;
    let index = model.file(MODEL_INDEX).map(|file| model.read(&client, file)).transpose()?;
    let files = select(&model, index.as_deref(), &selection)?;
    if selection == FileSelection::Needed {
        keep_listing(&name, &model, &files);
    }
    let commit = model.commit.clone();
    let job = FetchJob::new(client, model, cache, files);
    let fetched = |file: &hub::RemoteFile| FetchedFile {
        path: file.path.clone(),
        bytes: file.bytes,
        was_there: job.is_there(file),
    };
    let mut report = FetchReport {
        name: HubName { revision: None, file: None, ..name.clone() }.to_string(),
        revision: name.revision().into(),
        commit,
        files: job.files().iter().map(fetched).collect(),
        missing_bytes: job.missing_bytes(),
        transferred_bytes: 0,
        snapshot: None,
    };
    if !arguments.dry_run {
        let progress = ByteProgress::begin("downloading", report.missing_bytes)?;
        let outcome = job.run(&|bytes| progress.tick(bytes))?;
        drop(progress);
        report.transferred_bytes = outcome.transferred_bytes;
        report.snapshot = Some(outcome.snapshot);
    }
    Ok(report)
}

/// For plans without a network. That it cannot be kept costs them a number, and is no reason to fail.
fn keep_listing(name: &HubName, model: &HubModel, files: &[hub::RemoteFile]) {
    let listed =
        |file: &hub::RemoteFile| HubListingFile { path: file.path.clone(), bytes: file.bytes };
    let listing =
        HubListing { commit: model.commit.clone(), files: files.iter().map(listed).collect() };
    if let Some(folder) = machine::folders::cache_dir() {
        _ = listing.write(&folder.join("hearth"), name);
    }
}
