//! The model card: how to use the adapter. The part between the two lines is YAML for the Hugging Face hub, the
//! rest is for people. It is published with the adapter, so it has no paths but those below the run's folder.
//!
//! ```text
//! OUT/README.md
//!   ---
//!   base_model, license, tags, instance_prompt, widget
//!   ---
//!   images, trigger, how to use it, settings, figures, licence
//! ```

mod hub;
#[cfg(test)]
mod tests;
mod text;
mod usage;

use std::fmt::Write;
use std::path::{Path, PathBuf};

use toml::{Table, Value};

use self::hub::hub_name;
pub(super) use self::text::shell;
use self::text::{code, plain, yaml};
use self::usage::{ImageUsage, usage};
use super::sample_command::sample_options;
use crate::config::RunConfig;
use crate::config::training_data::is_text;
use crate::error::Result;
use crate::event::figures::RunFigures;
use crate::event::history::{ExportRecord, History, SampleImage, SampleText};
use crate::model::diffusion::family::{DiffusionFamily, PublishedPipeline};
use crate::report::format::{bytes, count, duration, link, number, plural};
use crate::report::write_text;

/// The contents of a model card.
#[derive(Clone, Debug)]
pub struct ModelCard {
    /// The adapter's name.
    pub name: String,
    /// Its author.
    pub author: Option<String>,
    /// The base's path, as in the job.
    pub base: String,
    /// Options of `hearth sample`.
    pub sample_options: Vec<String>,
    /// Sampling settings of an image model.
    pub usage: Option<ImageUsage>,
    /// The hub's name of the licence; without one that of the base applies.
    pub license: Option<String>,
    /// The trigger word.
    pub trigger: Option<String>,
    /// Sample images, by step.
    pub samples: Vec<SampleImage>,
    /// Sample texts, by step.
    pub texts: Vec<SampleText>,
    /// Files of the adapter.
    pub exports: Vec<ExportRecord>,
    /// Names and values, as in a job file.
    pub settings: Vec<(String, String)>,
    /// How training went.
    pub figures: RunFigures,
    /// Hearth's version.
    pub version: String,
}

/// The file's name.
pub const FILE_NAME: &str = "README.md";

/// The end of every model card but for the version, which marks it as written by hearth.
pub const MARK: &str = "Made with hearth";

/// Writes `README.md` of a run into its folder.
pub fn write(run_folder: &Path, config: &RunConfig) -> Result<PathBuf> {
    let history = History::open(run_folder)?;
    let path = run_folder.join(FILE_NAME);
    let facts = ModelCard::of(config, &history).expect("an open history has a beginning");
    write_text(&path, &render(&facts))?;
    Ok(path)
}

impl ModelCard {
    /// Of a run; none if it never started.
    pub fn of(config: &RunConfig, history: &History) -> Option<Self> {
        Some(Self {
            name: config.output.name.as_str().into(),
            author: config.output.author.clone(),
            base: config.base.path.display().to_string(),
            sample_options: sample_options(config),
            usage: ImageUsage::of(config),
            license: config.output.license.clone(),
            trigger: triggers(config),
            samples: history.samples.clone(),
            texts: history.texts.clone(),
            exports: history.exports.clone(),
            settings: settings(config),
            figures: RunFigures::of(history)?,
            version: history.parts.last()?.begin.version.clone(),
        })
    }

    /// The base as the hub calls it, or by its own name.
    fn base_name(&self) -> String {
        hub_name(&self.base).unwrap_or_else(|| {
            let name = Path::new(&self.base).file_name();
            name.map_or_else(|| "the base".into(), |name| name.to_string_lossy().into_owned())
        })
    }

    fn file_for(&self, format: &str) -> Option<&Path> {
        let export = self.exports.iter().find(|export| export.format == format)?;
        Some(&export.path)
    }

    /// A prompt that shows what was trained.
    fn prompt(&self) -> &str {
        if self.is_text() {
            return self.texts.last().map_or("Once upon a time", |text| &text.prompt);
        }
        let drawn = self.samples.last().map(|sample| sample.prompt.as_str());
        drawn.or(self.trigger.as_deref()).unwrap_or("a photo")
    }

    /// Whether it is of a language model.
    fn is_text(&self) -> bool {
        is_text(&self.figures.unit)
    }

    /// Those of the last step with samples.
    fn last_samples(&self) -> impl Iterator<Item = &SampleImage> {
        let last = self.samples.last().map(|sample| sample.step);
        self.samples.iter().filter(move |sample| Some(sample.step) == last)
    }
}

/// The trigger words of all sets of images.
fn triggers(config: &RunConfig) -> Option<String> {
    let (data, _) = config.data.images().ok()?;
    Some(data.triggers().join(", ")).filter(|triggers| !triggers.is_empty())
}

/// Keys that determine the adapter, besides the samples.
const SETTINGS: [&str; 25] = [
    "base.dtype",
    "base.quantise",
    "data.resolution",
    "data.caption_dropout",
    "text.length",
    "preference.method",
    "preference.beta",
    "preference.loss_type",
    "preference.num_generations",
    "preference.max_completion_length",
    "adapter.kind",
    "adapter.rank",
    "adapter.alpha",
    "adapter.targets",
    "adapter.train_norm",
    "adapter.text_encoders",
    "adapter.text_encoder_learning_rate",
    "train.batch_size",
    "train.gradient_accumulation",
    "train.weighting_scheme",
    "train.seed",
    "optimizer.kind",
    "optimizer.learning_rate",
    "optimizer.lr_scheduler",
    "optimizer.warmup_steps",
];

fn settings(config: &RunConfig) -> Vec<(String, String)> {
    let job: Table = config.resolved().parse().expect("a resolved job is TOML");
    let value = |key: &str| -> Option<String> {
        let (section, name) = key.split_once('.')?;
        match job.get(section)? {
            // Several sets of images, which may have different values.
            Value::Array(sets) => {
                let mut values: Vec<String> =
                    sets.iter().filter_map(|set| Some(set.get(name)?.to_string())).collect();
                values.dedup();
                Some(values.join(", "))
            }
            section => Some(section.get(name)?.to_string()),
        }
    };
    let settings = SETTINGS.iter().filter_map(|key| Some(((*key).to_owned(), value(key)?)));
    // An empty list is what most jobs have.
    settings.filter(|(_, value)| value != "[]").collect()
}

/// The whole model card.
pub fn render(facts: &ModelCard) -> String {
    let by = facts
        .author
        .as_ref()
        .map_or_else(String::new, |author| format!("By {}.\n\n", plain(author)));
    [
        front_matter(facts),
        format!("# {}\n\n{by}", plain(&facts.name)),
        format!(
            "A {} for `{}`, trained on {}.\n\n",
            kind(facts),
            code(&facts.base_name()),
            plural(facts.figures.samples, &facts.figures.unit)
        ),
        images(facts),
        texts(facts),
        trigger(facts),
        usage(facts),
        training(facts),
        licence(facts),
        format!("\n{MARK} {}.\n", plain(&facts.version)),
    ]
    .concat()
}

fn kind(facts: &ModelCard) -> &'static str {
    let kind = facts.settings.iter().find(|(key, _)| key == "adapter.kind");
    match kind.map(|(_, value)| value.as_str()) {
        Some("\"dora\"") => "DoRA",
        Some("\"loha\"") => "LoHa",
        Some("\"lokr\"") => "LoKr",
        _ => "LoRA",
    }
}

fn front_matter(facts: &ModelCard) -> String {
    let hub = hub_name(&facts.base);
    let mut out = String::from("---\n");
    if let Some(base) = &hub {
        _ = writeln!(out, "base_model: {}\nbase_model_relation: adapter", yaml(base));
    }
    out += &license_keys(facts.license.as_deref(), hub.as_deref());
    if facts.is_text() {
        out.push_str(
            "library_name: peft\npipeline_tag: text-generation\ntags:\n- text-generation\n- peft\n\
             - lora\n- hearth\n---\n\n",
        );
        return out;
    }
    let family = facts.usage.as_ref().map_or_else(DiffusionFamily::fallback, |drawn| drawn.family);
    let task = if family.video.is_some() { "text-to-video" } else { "text-to-image" };
    _ = write!(
        out,
        "library_name: diffusers\npipeline_tag: {task}\ntags:\n- {task}\n- diffusers\n\
         - lora\n- {}\n- template:sd-lora\n- hearth\n",
        family.export.tag
    );
    if let Some(trigger) = &facts.trigger {
        _ = writeln!(out, "instance_prompt: {}", yaml(trigger));
    }
    let mut samples = facts.last_samples().peekable();
    if samples.peek().is_some() {
        out.push_str("widget:\n");
    }
    for sample in samples {
        let (text, url) = (yaml(&sample.prompt), yaml(&link(&sample.path)));
        _ = writeln!(out, "- text: {text}\n  output:\n    url: {url}");
    }
    out + "---\n\n"
}

/// The hub's keys for the licence: the author's choice, else that of the base.
fn license_keys(own: Option<&str>, hub: Option<&str>) -> String {
    let base = hub.and_then(PublishedPipeline::license_of);
    let id = own.or(base.map(|license| license.id)).unwrap_or("other");
    if own.is_some() || id != "other" {
        return format!("license: {}\n", yaml(id));
    }
    let name = base.and_then(|license| license.name).unwrap_or("as-the-base-model");
    let link = hub.map(|hub| yaml(&format!("https://huggingface.co/{hub}/blob/main/LICENSE.md")));
    let link = link.map_or_else(String::new, |link| format!("license_link: {link}\n"));
    format!("license: other\nlicense_name: {name}\n{link}")
}

/// The last images, beside those of the base from the same noise.
fn images(facts: &ModelCard) -> String {
    let is_first = |sample: &&SampleImage| sample.step == 0;
    let before: Vec<_> = facts.samples.iter().filter(is_first).collect();
    let image =
        |sample: &SampleImage| format!("![{}]({})", plain(&sample.prompt), link(&sample.path));
    let mut rows = String::new();
    for sample in facts.last_samples().filter(|sample| sample.step > 0) {
        let same =
            |first: &&&SampleImage| (&first.prompt, first.seed) == (&sample.prompt, sample.seed);
        let first = before.iter().find(same).map_or_else(String::new, |first| image(first));
        _ = writeln!(rows, "| {} | {first} | {} |", plain(&sample.prompt), image(sample));
    }
    if rows.is_empty() {
        return rows;
    }
    format!("| prompt | before | after |\n|---|---|---|\n{rows}\n")
}

fn trigger(facts: &ModelCard) -> String {
    let Some(trigger) = &facts.trigger else { return String::new() };
    format!("## Trigger words\n\nWrite `{}` into the prompt to use the adapter.\n\n", code(trigger))
}

/// The last texts, beside those of the base.
fn texts(facts: &ModelCard) -> String {
    let steps = [facts.texts.first(), facts.texts.last()].map(|text| text.map(|text| text.step));
    let [Some(first), Some(last)] = steps else { return String::new() };
    let mut out = String::from("## Sample texts\n\n");
    for (title, step) in [("before", first), ("after", last)] {
        for SampleText { prompt, text, .. } in facts.texts.iter().filter(|text| text.step == step) {
            _ = write!(out, "{title}: **{}** {}\n\n", plain(prompt), plain(text));
        }
    }
    out
}

fn training(facts: &ModelCard) -> String {
    let RunFigures { steps, secs, unit, samples, parameters, peak_bytes, .. } = &facts.figures;
    let mut rows = vec![
        ("steps".to_string(), count(*steps)),
        (format!("{unit}s"), count(*samples as u64)),
        ("trainable parameters".into(), count(*parameters as u64)),
        ("time".into(), duration(*secs)),
    ];
    rows.extend(
        facts
            .figures
            .final_loss
            .map(|loss| (format!("loss, {}", facts.figures.loss_label()), number(loss))),
    );
    let validation = facts.figures.best_validation;
    let kept = facts.figures.best_checkpoint.as_ref();
    let kept = kept.map_or_else(String::new, |path| {
        format!(": `{}`; the adapter is that of the last step", code(&path.display().to_string()))
    });
    rows.extend(validation.map(|(step, loss)| {
        let text = format!("{} at step {}{kept}", number(loss), count(step));
        ("best validation loss".into(), text)
    }));
    rows.extend(peak_bytes.map(|peak| ("peak memory".into(), bytes(peak))));
    let mut out = String::from("## Training\n\n| figure | value |\n|---|---|\n");
    for (name, value) in rows {
        _ = writeln!(out, "| {name} | {value} |");
    }
    out.push_str("\n| setting | value |\n|---|---|\n");
    for (key, value) in &facts.settings {
        _ = writeln!(out, "| `{key}` | {} |", plain(value));
    }
    out + "\n"
}

fn licence(facts: &ModelCard) -> String {
    let own = facts
        .license
        .as_ref()
        .map_or_else(String::new, |license| format!("This adapter is under `{}`. ", code(license)));
    let hub = hub_name(&facts.base);
    let summary = hub.as_deref().and_then(PublishedPipeline::license_of);
    let summary =
        summary.map_or_else(String::new, |license| format!(" {}", plain(license.summary)));
    let base = match hub {
        Some(hub) => format!("[{hub}](https://huggingface.co/{hub})"),
        None => format!("`{}`", code(&facts.base_name())),
    };
    format!(
        "## Licence\n\n{own}The licence of the base model applies; see LICENSE of {base}.{summary}\n"
    )
}
