//! The last lines of a run: how it went, where everything is, and the command that uses what was trained.

use std::path::{Path, PathBuf};

use machine::Bytes;
use trainer::config::training_data::TrainingData;
use trainer::config::{RawConfig, RunConfig};
use trainer::event::figures::RunFigures;
use trainer::event::history::{ExportRecord, History, SampleImage};
use trainer::event::{BestCheckpoint, EndReason, EnergyUsed, RunEnd};
use trainer::export::sample_command::{SampleCommand, sample_options};
use trainer::model::diffusion::editing::REFERENCE_RESOLUTION;
use trainer::report::format::number;
use weights::hub::HubPath;

use crate::render::progress::duration;
use crate::text::{BOLD, DIM, TextPage, plural, thousands};

/// What came of a run, as a page. `options` follow the command that uses it.
pub fn page(config: &RunConfig, end: &RunEnd, history: &History, options: &[String]) -> String {
    let mut page = TextPage::new();
    let Some(figures) = RunFigures::of(history) else { return String::new() };
    page.line(BOLD, &headline(end, &figures));
    if let Some(loss) = figures.final_loss {
        let first = figures.first_loss.map(|loss| format!("; {} at first", number(loss)));
        let first = first.unwrap_or_default();
        page.row("loss", BOLD, &format!("{}, {}{first}", number(loss), figures.loss_label()));
    }
    page.row("health", BOLD, &format!("NaN/Inf steps: {}", figures.not_finite_steps));
    page.row("time", BOLD, &time(&figures));
    page.row("memory", BOLD, &memory(end, &figures));
    if let Some(energy) = &end.energy {
        page.row("energy", BOLD, &energy_of(energy));
    }
    let folder = &config.output.folder;
    if let Some(BestCheckpoint { step, loss, path }) =
        end.best.as_ref().filter(|best| best.step < end.step)
    {
        let (loss, path) = (number(*loss), from_here(&folder.join(path)));
        page.row("best", BOLD, &format!("held-out loss {loss} at step {step}: {path}"));
    }
    page.row("folder", BOLD, &from_here(folder));
    page.row("report", BOLD, &from_here(&folder.join("report.html")));
    for ExportRecord { format, path, layers } in &history.exports {
        let path = from_here(&folder.join(path));
        if format == MODEL {
            page.row("model", BOLD, &path);
        } else {
            let layers = plural(*layers, "layer");
            page.row("adapter", BOLD, &format!("{path} ({format}, {layers})"));
        }
    }
    let used = config.with_precision_of(&as_run(folder, config));
    let options = [references(&used, &history.samples), options.to_vec()].concat();
    match sample_command(&used, &history.exports, &options) {
        // On one line however long it is: it is there to be copied.
        Some(command) if end.reason.is_done() => {
            format!("{}{DIM}try it with{DIM:#}\n  {command}\n", page.finish())
        }
        _ => page.finish(),
    }
}

fn headline(end: &RunEnd, figures: &RunFigures) -> String {
    let why = match end.reason {
        EndReason::Finished => "finished",
        EndReason::Plateau => "stopped: the held-out loss does not fall any more",
        EndReason::Interrupted => "interrupted",
        EndReason::Changed => "changed",
        EndReason::Unhealthy => "stopped: nothing finite is learnt any more",
        EndReason::Diverged => "diverged, so that nothing was exported,",
    };
    let of = match figures.planned_steps {
        steps if steps == end.step => String::new(),
        steps => format!(" of {}", thousands(steps as usize)),
    };
    format!("{why} after step {}{of}", thousands(end.step as usize))
}

fn time(figures: &RunFigures) -> String {
    let RunFigures { secs, steps, wait_secs, rest_secs, .. } = *figures;
    let part = |secs: f64, what: &str| match secs {
        1.0.. => format!(", {} of it {what}", duration(secs)),
        _ => String::new(),
    };
    format!(
        "{} for {}{}{}",
        duration(secs),
        plural(steps as usize, "step"),
        part(wait_secs, "waiting for data"),
        part(rest_secs, "resting")
    )
}

fn memory(end: &RunEnd, figures: &RunFigures) -> String {
    let bytes = |bytes: usize| Bytes(bytes as u64);
    let planned = figures.planned_bytes.map(|planned| format!("planned {}, ", bytes(planned)));
    let (peak, limit) = (bytes(end.peak_bytes), bytes(figures.limit_bytes));
    format!("{peak} at its peak; {}limit {limit}", planned.unwrap_or_default())
}

fn energy_of(energy: &EnergyUsed) -> String {
    let watt_hours = energy.joules / 3600.0;
    let known = match energy.covered {
        0.995.. => String::new(),
        covered => format!(", known for {:.0} % of the time", 100.0 * covered),
    };
    format!("{watt_hours:.2} Wh{known}")
}

/// A path as one would type it where the program was called.
fn from_here(path: &Path) -> String {
    if HubPath::of(path).is_some() {
        return weights::hub::shown(path);
    }
    let here = std::env::current_dir().unwrap_or_default();
    let below = path.strip_prefix(here).ok().filter(|below| below.components().next().is_some());
    below.unwrap_or(path).display().to_string()
}

/// What a full fine-tune is exported as.
const MODEL: &str = "model";

/// The job with what the plan chose for it.
fn as_run(folder: &Path, config: &RunConfig) -> RunConfig {
    let resolved = RawConfig::from_file(&folder.join("config.toml")).and_then(RawConfig::resolve);
    resolved.unwrap_or_else(|_| config.clone())
}

/// The command that samples from the result of a job, with the settings of its own samples; none if nothing was
/// exported.
fn sample_command(
    config: &RunConfig,
    exports: &[ExportRecord],
    options: &[String],
) -> Option<String> {
    let of_diffusers = exports.iter().find(|export| export.format == "diffusers");
    let export = of_diffusers.or(exports.first())?;
    let path = from_here(&config.output.folder.join(&export.path));
    let initial = config.output.folder.join("initial");
    let base = from_here(if config.base.random_init { &initial } else { &config.base.path });
    let parts = config.base.parts().flags(from_here);
    let options = [sample_options(config), options.to_vec()].concat();
    let (prompt, options) = (prompt(&config.data), &options[..]);
    let command = if export.format == MODEL {
        SampleCommand { base: &path, parts: &[], adapter: None, prompt, options }
    } else {
        let (parts, adapter) = (&parts[..], Some(&path[..]));
        SampleCommand { base: &base, parts, adapter, prompt, options }
    };
    Some(command.line())
}

/// Flags for the references of the run's first sample image, if it has any. The copies in its folder are used.
fn references(config: &RunConfig, samples: &[SampleImage]) -> Vec<String> {
    let (Some(sample), TrainingData::Images { data, .. }) = (samples.first(), &config.data) else {
        return Vec::new();
    };
    let path = |path: &PathBuf| from_here(&config.output.folder.join(path));
    let paths = sample.references.iter().map(path);
    let mut flags: Vec<String> = paths.flat_map(|path| ["--reference".into(), path]).collect();
    let resolution = data.common().reference_resolution;
    if !flags.is_empty() && resolution != REFERENCE_RESOLUTION as usize {
        flags.extend(["--reference-resolution".into(), resolution.to_string()]);
    }
    flags
}

/// The job's first prompt, else a usual one.
fn prompt(data: &TrainingData) -> &str {
    match data {
        TrainingData::Images { data, sample } => {
            let prompt = sample.prompts.first().map(String::as_str);
            prompt.or(data.triggers().first().copied()).unwrap_or("a photo")
        }
        TrainingData::Texts { generate, .. } => {
            generate.prompts.first().map_or("Once upon a time", String::as_str)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_edit_is_tried_with_the_references_of_its_sample() {
        let flags_of = |resolution: &str, references: &[&str]| {
            let job = format!(
                "[base]\npath = '/kontext'\n[data]\nimages = '/d'\n{resolution}[output]\nfolder = '/out'\n"
            );
            let raw = RawConfig::from_text(&job, Path::new("/job.toml")).unwrap();
            let sample = SampleImage {
                step: 0,
                path: "samples/a.png".into(),
                prompt: String::new(),
                seed: 1,
                references: references.iter().map(PathBuf::from).collect(),
                clip: None,
            };
            super::references(&raw.resolve().unwrap(), &[sample]).join(" ")
        };
        assert_eq!(flags_of("reference_resolution = 512\n", &[]), "");
        assert_eq!(flags_of("", &["samples/r.png"]), "--reference /out/samples/r.png");
        assert_eq!(
            flags_of("reference_resolution = 512\n", &["r.png", "s.png"]),
            "--reference /out/r.png --reference /out/s.png --reference-resolution 512"
        );
    }

    fn check(job: &str, exports: &[(&str, &str)], expected: Option<&str>) {
        let job = job.replace("DATA", "[data]\nimages = '/d'\nresolution = 512\n");
        let config = RawConfig::from_text(&job, Path::new("/job.toml")).unwrap().resolve().unwrap();
        let exports: Vec<_> = exports
            .iter()
            .map(|(format, path)| ExportRecord {
                format: (*format).into(),
                path: path.into(),
                layers: 1,
            })
            .collect();
        let options = ["--device".to_owned(), "cpu".into()];
        assert_eq!(sample_command(&config, &exports, &options).as_deref(), expected, "{job}");
    }

    #[test]
    fn the_command_uses_what_was_trained_as_its_samples_were_made() {
        let base = "[base]\npath = '/sd3'\n";
        let out = "[output]\nfolder = '/my out'\n";
        let diffusers = [("kohya", "adapter/k"), ("diffusers", "adapter/d")];
        check(&format!("{base}DATA{out}"), &[], None);
        check(
            &format!("{base}DATA trigger = 'zwx'\n{out}"),
            &diffusers,
            Some(
                "hearth sample --base /sd3 --adapter '/my out/adapter/d' --prompt zwx \
                 --size 512x512 --device cpu",
            ),
        );
        check(
            &format!(
                "{base}dtype = 'f32'\nquantise = 'nf4'\nDATA{out}[sample]\nprompts = ['it''s', 'b']\n\
                 size = 96\nsteps = 8\nguidance_scale = 2.5\n"
            )
            .replace("'it''s'", "\"it's\""),
            &diffusers[..1],
            Some(
                r"hearth sample --base /sd3 --adapter '/my out/adapter/k' --prompt 'it'\''s' --dtype f32 --quantise nf4 --size 96x96 --steps 8 --guidance 2.5 --device cpu",
            ),
        );
        check(
            &format!(
                "{base}random_init = true\n[adapter]\nkind = 'full'\n[text]\npath = '/t'\n{out}"
            ),
            &[("model", "model")],
            Some(
                "hearth sample --base '/my out/model' --prompt 'Once upon a time' --max-tokens 64 \
                 --top-p 1 --device cpu",
            ),
        );
    }
}
