//! `hearth train` on a model so small that a run takes seconds. Here: helpers to make jobs and read runs, and a
//! run without problems.

mod adapters;
mod archives;
mod checkpoints;
pub mod clips;
mod distilled;
mod encoders;
mod full;
mod fused;
mod gpu;
mod memory;
mod offload;
mod optimizers;
mod planned;
mod ranks;
mod requests;
mod resume;
mod screen;
mod sets;
mod state;
mod stop;
mod targets;
mod texts;
mod trouble;
pub mod twin;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};

use tempfile::TempDir;
use trainer::event::{Event, Phase, PhaseProgress, RunStart, Warning};

use crate::models::{at, golden};
use crate::{command, flux, flux2, printed, qwen_image, said, text, z_image};

/// A job for the tiny pipeline, with images that hearth draws.
const JOB: &str = "
[data]
images = 'images'
draw = 'neon'
draw_count = 5
resolution = 64
bucket_step = 16
validation = 1
[adapter]
rank = 4
[train]
steps = 6
batch_size = 2
validate_every = 4
[optimizer]
learning_rate = 1e-2
[output]
folder = 'run'
save_every = 2
";

/// A job in a folder of its own.
struct Job {
    folder: TempDir,
    file: PathBuf,
}

impl Job {
    fn new() -> Self {
        Self::of(&golden().join("pipeline"))
    }

    /// Of a FLUX.1 with a guidance embedding, in `base`.
    fn flux() -> Self {
        let job = Self::of(Path::new("base"));
        flux::with_short_prompts(&job.path("base"));
        job
    }

    /// Of a Qwen-Image.
    fn qwen_image() -> Self {
        Self::of(&qwen_image::golden().join("pipeline"))
    }

    /// Of a Z-Image, in `base`.
    fn z_image() -> Self {
        let job = Self::of(Path::new("base"));
        z_image::copy_base(&job.path("base"));
        job
    }

    /// Of a FLUX.2 klein, in `base`.
    fn flux2() -> Self {
        let job = Self::of(Path::new("base"));
        flux2::copy_base(&job.path("base"));
        job
    }

    fn of(base: &Path) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("job.toml");
        let base = format!("[base]\npath = '{}'\ndtype = 'f32'\n", text(base));
        fs::write(&file, format!("{base}{JOB}")).unwrap();
        Self { folder, file }
    }

    /// Takes a part out of the file that has no effect with other values.
    fn remove(&self, part: &str) {
        let job = fs::read_to_string(&self.file).unwrap();
        assert!(job.contains(part), "{job}");
        fs::write(&self.file, job.replace(part, "")).unwrap();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// `hearth train` on it, with other values for some keys.
    fn command(&self, set: &[&str], arguments: &[&str]) -> Command {
        let mut command = command(&[&["train", text(&self.file)], arguments].concat());
        command.args(set.iter().flat_map(|value| ["--set", value]));
        command
    }

    fn run(&self, set: &[&str], arguments: &[&str]) -> Output {
        self.command(set, arguments).output().unwrap()
    }

    /// A run that must end well; returns its folder.
    fn finish(&self, out: &str, set: &[&str], arguments: &[&str]) -> PathBuf {
        let folder = self.path(out);
        let arguments = [&["--out", text(&folder), "--quiet"], arguments].concat();
        let output = self.run(set, &arguments);
        assert!(output.status.success(), "{}", said(&output));
        check_memory(&events(&folder));
        folder
    }

    /// A run that must fail; returns its standard error.
    fn fail(&self, set: &[&str], arguments: &[&str]) -> String {
        let output = self.run(set, arguments);
        let words = said(&output);
        assert_eq!(output.status.code(), Some(1), "{words}");
        assert!(words.contains("\nhint: "), "{words}");
        words
    }
}

/// A run in the background.
struct Running {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Running {
    fn begin(mut command: Command) -> Self {
        let mut child =
            command.arg("--json").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Self { child, lines }
    }

    /// Waits until a kind of event is printed; answers whether one was.
    fn until(&mut self, kind: &str) -> bool {
        let start = format!("{{\"event\":\"{kind}\"");
        (&mut self.lines).lines().any(|line| line.unwrap().starts_with(&start))
    }

    fn code(mut self) -> Option<i32> {
        self.child.wait().unwrap().code()
    }
}

/// As Ctrl-C does.
fn interrupt(child: &Child) {
    signal(child, &["INT"]);
}

fn signal(child: &Child, names: &[&str]) {
    for name in names {
        let line = format!("kill -{name} {}", child.id());
        assert!(Command::new("sh").args(["-c", &line]).status().unwrap().success());
    }
}

/// The events of a run's folder.
pub fn events(folder: &Path) -> Vec<Event> {
    parsed(&fs::read_to_string(folder.join("events.jsonl")).unwrap())
}

fn parsed(lines: &str) -> Vec<Event> {
    lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn begins(events: &[Event]) -> Vec<&RunStart> {
    let mut begins = Vec::new();
    for event in events {
        if let Event::Begin(begin) = event {
            begins.push(begin);
        }
    }
    begins
}

fn warnings(events: &[Event]) -> Vec<String> {
    let mut warnings = Vec::new();
    for event in events {
        if let Event::Warning(Warning { kind, .. }) = event {
            warnings.push(kind.to_string());
        }
    }
    warnings
}

/// Steps and their losses; of a step that was taken twice, the last.
fn losses(events: &[Event]) -> Vec<f64> {
    let mut losses = Vec::new();
    for event in events {
        if let Event::Step(step) = event {
            losses.truncate(step.step as usize - 1);
            losses.push(step.loss);
        }
    }
    losses
}

/// No step took more than was planned for steps, and nothing more than was planned at all. Returns
/// what the largest step took, and what was planned for it.
pub fn check_memory(events: &[Event]) -> [usize; 2] {
    let (mut taken, mut for_steps, mut for_all) = (0, 0, 0);
    for event in events {
        match event {
            Event::Begin(begin) => {
                let most = |start: &str| {
                    let phases = begin
                        .phases
                        .iter()
                        .filter(|phase| phase.name.to_string().starts_with(start));
                    phases.map(|phase| phase.peak_bytes).max().unwrap()
                };
                (taken, for_steps, for_all) = (0, most("train "), most(""));
            }
            Event::Memory { phase, planned_bytes, peak_bytes } => {
                assert!(peak_bytes <= planned_bytes, "{phase}: {peak_bytes} of {planned_bytes}");
            }
            Event::Step(step) => {
                assert!(step.peak_bytes <= for_steps, "{} of {for_steps}", step.peak_bytes);
                taken = taken.max(step.peak_bytes);
            }
            Event::End(end) => {
                assert!((taken..=for_all).contains(&end.peak_bytes), "{end:?} {taken} {for_all}");
            }
            _ => {}
        }
    }
    [taken, for_steps]
}

/// The result of a run: its adapter, and the state of its last checkpoint.
fn trained(folder: &Path) -> [Vec<u8>; 2] {
    let adapter = folder.join("adapter/pytorch_lora_weights.safetensors");
    [fs::read(adapter).unwrap(), last_state(folder)]
}

/// The state of a run's last checkpoint: all its files, one after the other.
fn last_state(folder: &Path) -> Vec<u8> {
    let checkpoints = paths_in(&folder.join("checkpoints"));
    let files = paths_in(checkpoints.last().unwrap());
    let is_state = |path: &&PathBuf| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("state"))
    };
    files.iter().filter(is_state).flat_map(|path| fs::read(path).unwrap()).collect()
}

/// What a folder holds, by name.
fn paths_in(folder: &Path) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    all.sort_unstable();
    all
}

#[test]
fn images_become_an_adapter() {
    let job = Job::new();
    let set = [
        "output.formats=['diffusers','peft','kohya','comfyui']",
        "sample.prompts=['a fox']",
        "sample.size=64",
        "sample.steps=2",
        "sample.every=3",
    ];
    let output = job.run(&set, &["--json"]);
    assert!(output.status.success(), "{}", said(&output));
    assert!(said(&output).is_empty(), "{}", said(&output));
    let run = job.path("run");
    let written = fs::read(run.join("events.jsonl")).unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&written));
    let events = events(&run);
    // Telemetry and the governor's decisions depend on time and machine.
    let is_fixed = |event: &&Event| {
        !matches!(event, Event::Telemetry(_) | Event::Pace(_) | Event::Progress(_))
    };
    let names: Vec<String> = events.iter().filter(is_fixed).map(name).collect();
    let expected = "phase phase phase phase phase phase phase begin memory memory memory memory memory memory validation \
                    timesteps memory image_sample memory step timesteps step timesteps memory checkpoint step timesteps \
                    image_sample step timesteps validation timesteps checkpoint step timesteps step timesteps \
                    validation timesteps image_sample checkpoint \
                    phase exported exported exported exported end";
    assert_eq!(names.join(" "), expected);
    // All that comes before and after training can be followed.
    let phases: Vec<String> = events.iter().filter_map(phase).collect();
    assert_eq!(phases.join(" "), "open checksums images clip-l clip-g t5 load export");
    for (name, total) in [("images", 5), ("t5", 7)] {
        let is_last = |event: &Event| {
            matches!(event, Event::Progress(PhaseProgress { phase, done, total: of, .. })
                if phase.to_string() == name && (*done, *of) == (total, total))
        };
        assert!(events.iter().any(is_last), "{name}: {events:?}");
    }
    let mut held_out = Vec::new();
    for event in &events {
        if let Event::Validation { loss, .. } = event {
            held_out.push(*loss);
        }
    }
    assert!(held_out.is_sorted_by(|before, after| before > after), "{held_out:?}");
    // Every step's bucket is the largest, as there is only one.
    let [taken, planned] = check_memory(&events);
    assert_eq!(taken, planned);
    // Every phase was measured, and takes exactly what its dry run took.
    let named: Vec<&Phase> = begins(&events)[0].phases.iter().map(|phase| &phase.name).collect();
    let mut measured = Vec::new();
    for event in &events {
        if let Event::Memory { phase, planned_bytes, peak_bytes } = event {
            measured.push(phase);
            assert_eq!(planned_bytes, peak_bytes, "{phase}");
        }
    }
    assert_eq!(measured.len(), named.len(), "{measured:?} {named:?}");
    assert!(named.iter().all(|name| measured.contains(name)), "{measured:?} {named:?}");
    for file in [
        "adapter/pytorch_lora_weights.safetensors",
        "adapter/peft/adapter_model.safetensors",
        "adapter/adapter-kohya.safetensors",
        "adapter/adapter-comfyui.safetensors",
        "samples/step-000000-1.png",
        "samples/step-000003-1.png",
        "samples/step-000006-1.png",
        "config.toml",
        "README.md",
        "report.html",
    ] {
        assert!(run.join(file).is_file(), "{file} is missing");
    }
    assert_ne!(
        fs::read(run.join("samples/step-000000-1.png")).unwrap(),
        fs::read(run.join("samples/step-000006-1.png")).unwrap()
    );
}

fn phase(event: &Event) -> Option<String> {
    match event {
        Event::Phase { name } => Some(name.to_string()),
        _ => None,
    }
}

fn name(event: &Event) -> String {
    serde_json::to_value(event).unwrap()["event"].as_str().unwrap().to_owned()
}

#[test]
fn a_quiet_run_needs_no_job_file_and_prints_nothing() {
    let job = Job::new();
    job.finish("drawn", &["train.steps=1"], &[]);
    let (base, images, out) = (at("pipeline"), job.path("images"), job.path("other"));
    let paths = ["--base", &base, "--images", text(&images), "--out", text(&out)];
    let set = ["train.steps=2", "data.resolution=64", "data.bucket_step=16", "base.dtype=f32"];
    let set: Vec<&str> = set.iter().flat_map(|value| ["--set", value]).collect();
    assert_eq!(printed(&[&["train", "--quiet"], &paths[..], &set].concat()), "");
    assert_eq!(losses(&events(&out)).len(), 2);
    assert!(out.join("adapter/pytorch_lora_weights.safetensors").is_file());
}
