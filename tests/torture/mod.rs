//! A disk that fails, and a program that is killed, at any file operation of a run: encode, train, validate, sample,
//! save, export. A run that ends well has the adapter of an undisturbed one; any other can be started again, and then has
//! it. No panic, no hang, no half of a file under its final name, and nothing is touched but the run's folder.
//!
//! `shim.c` is loaded before libc and fails the n-th operation under that folder. The default suite tries a few random
//! points; `just torture` tries a thousand and prints a table. `HEARTH_TORTURE_SEED` repeats a choice of points,
//! `HEARTH_TORTURE_POINTS` sets how many.

#![allow(clippy::print_stdout)] // Who runs it by name reads the table and the seed.

mod points;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use safetensors::SafeTensors;
use tempfile::TempDir;

use self::points::{Fault, Operation, Random, Results};
use crate::models::golden;
use crate::{command, text};

const IMAGES: &str = "
[data]
images = 'images'
draw = 'neon'
draw_count = 3
resolution = 64
bucket_step = 16
validation = 1
[sample]
prompts = ['a fox']
size = 64
steps = 1
every = 1
";

const TEXTS: &str = "
[text]
path = 'texts.jsonl'
length = 32
validation = 0.2
[generate]
prompts = ['the fire ']
max_tokens = 3
every = 1
";

const ALL: &str = "
[train]
steps = 2
batch_size = 1
validate_every = 1
[output]
folder = 'run'
name = 'x'
save_every = 1
keep = 1
";

/// The parts in which jobs differ.
#[derive(Clone, Copy)]
struct JobParts {
    data: &'static str,
    adapter: &'static str,
}

const LORA: &str = "[adapter]\nrank = 2\n";
const FULL: &str = "[adapter]\nkind = 'full'\n";

const OF_IMAGES: JobParts = JobParts { data: IMAGES, adapter: LORA };
const OF_TEXTS: JobParts = JobParts { data: TEXTS, adapter: LORA };
/// Exports a whole model.
const FULL_OF_TEXTS: JobParts = JobParts { data: TEXTS, adapter: FULL };

/// Chosen: a run takes two seconds; on a busy computer a minute.
const PATIENCE: Duration = Duration::from_secs(240);

/// Files by their path in a run's folder.
type Files = BTreeMap<PathBuf, Vec<u8>>;

/// A job, and what comes of it where nothing fails.
struct Subject {
    place: TempDir,
    shim: PathBuf,
    /// Of the undisturbed run, in order.
    operations: Vec<Operation>,
    result: Files,
    samples: Files,
}

/// How a process ended.
struct Ended {
    status: Option<ExitStatus>,
    said: String,
}

impl Subject {
    /// Of a job on images, by a diffusion model; or on texts, by a language model.
    fn new(JobParts { data, adapter }: JobParts) -> Self {
        let is_images = data == IMAGES;
        let place = tempfile::tempdir().unwrap();
        let shim = place.path().join("shim.so");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/torture/shim.c");
        let mut compiler = Command::new("cc");
        compiler.args(["-O1", "-shared", "-fPIC", "-o", text(&shim), text(&source), "-ldl"]);
        assert!(compiler.status().unwrap().success(), "shim.c does not compile");
        let learning = golden().join("../llama/learning");
        let base = if is_images { golden().join("pipeline") } else { place.path().join("model") };
        if !is_images {
            fs::create_dir(&base).unwrap();
            for name in ["model/config.json", "model/model.safetensors", "texts.jsonl"] {
                fs::copy(learning.join(name), place.path().join(name)).unwrap();
            }
            trainer::text::Tokenizer::bytes().save(&base).unwrap();
        }
        let base = format!("[base]\npath = '{}'\ndtype = 'f32'\n", text(&base));
        let job = [&base, data, adapter, ALL].concat();
        fs::write(place.path().join("job.toml"), job).unwrap();
        let mut subject = Self {
            place,
            shim,
            operations: Vec::new(),
            result: Files::new(),
            samples: Files::new(),
        };
        subject.run_undisturbed();
        subject
    }

    fn run_undisturbed(&mut self) {
        let (out, log) = (self.folder("whole"), self.place.path().join("log"));
        // Draws the images, too.
        let ended = self.run(&out, &[("TORTURE_LOG", text(&log))], &[]);
        assert_eq!(ended.code(), Some(0), "{}", ended.said);
        self.operations = points::read_log(&fs::read_to_string(&log).unwrap());
        fs::remove_file(log).unwrap();
        assert!(self.operations.len() > 200, "{} operations", self.operations.len());
        (self.result, self.samples) = (result_of(&out), files_of(&out.join("samples")));
        assert!(self.result.len() > 1, "{:?}", self.result.keys());
        fs::remove_dir_all(out).unwrap();
    }

    /// As the system calls it: handles lead to names without links.
    fn folder(&self, name: &str) -> PathBuf {
        self.place.path().canonicalize().unwrap().join(name)
    }

    fn run(&self, out: &Path, variables: &[(&str, &str)], more: &[&str]) -> Ended {
        let (job, errors) = (self.place.path().join("job.toml"), out.with_extension("stderr"));
        let words = ["train", text(&job), "--out", text(out), "--quiet"];
        let mut command = command(&[&words[..], more].concat());
        command.env("LD_PRELOAD", &self.shim).env("TORTURE_ROOT", out);
        command.env("HOME", self.place.path().join("home")).envs(variables.iter().copied());
        let file = fs::File::create(&errors).unwrap();
        let mut child = command.stdout(Stdio::null()).stderr(file).spawn().unwrap();
        let begun = Instant::now();
        let status = loop {
            match child.try_wait().unwrap() {
                None if begun.elapsed() > PATIENCE => {
                    child.kill().unwrap();
                    child.wait().unwrap();
                    break None;
                }
                None => std::thread::sleep(Duration::from_millis(5)),
                ended => break ended,
            }
        };
        let said = String::from_utf8_lossy(&fs::read(&errors).unwrap()).into_owned();
        fs::remove_file(errors).unwrap();
        Ended { status, said }
    }

    /// One fault, and what follows. Answers whether there was one, or what does not hold.
    fn check(&self, fault: Fault, number: usize) -> Result<bool, String> {
        let out = self.folder(&format!("run-{number}"));
        let (before, met) = (self.beside(), out.with_extension("met"));
        let variables = [("TORTURE_FAULT", fault.to_string()), ("TORTURE_MET", text(&met).into())];
        let first =
            self.run(&out, &variables.each_ref().map(|(name, value)| (*name, value.as_str())), &[]);
        let is_met = fs::remove_file(&met).is_ok();
        first.check(fault.is_kill())?;
        check_whole(&out)?;
        fault.check_quarantine(files_of(&out.join("cache")).keys())?;
        if first.code() != Some(0) {
            let is_saved = files_of(&out.join("checkpoints"))
                .keys()
                .any(|path| path.to_string_lossy().starts_with("step-"));
            let resume: &[&str] = if is_saved { &["--resume"] } else { &[] };
            let again = self.run(&out, &[], resume);
            if again.code() != Some(0) {
                return Err(format!(
                    "started again, it fails: {}\nat first: {}",
                    again.said, first.said
                ));
            }
            check_whole(&out)?;
        }
        same(&self.result, &result_of(&out))?;
        let samples = files_of(&out.join("samples"));
        // One that could not be written is a warning.
        let wrong = samples.iter().find(|(path, bytes)| self.samples.get(*path) != Some(bytes));
        if let Some((path, _)) = wrong {
            return Err(format!("another sample: {}", path.display()));
        }
        fs::remove_dir_all(&out).map_err(|error| error.to_string())?;
        if before != self.beside() {
            return Err("something beside the run's folder was touched".into());
        }
        Ok(is_met)
    }

    /// What lies beside the runs: the job, the model, images and texts.
    fn beside(&self) -> Files {
        let is_ours = |path: &PathBuf| {
            let first = path.components().next().map(|part| part.as_os_str().to_string_lossy());
            first.is_some_and(|name| !name.starts_with("run-") && name != "home")
        };
        files_of(self.place.path()).into_iter().filter(|(path, _)| is_ours(path)).collect()
    }
}

impl Ended {
    fn code(&self) -> Option<i32> {
        self.status.and_then(|status| status.code())
    }

    /// That it ended as it may.
    fn check(&self, is_kill: bool) -> Result<(), String> {
        let Some(status) = self.status else { return Err(format!("it hangs: {}", self.said)) };
        let is_right = match status.code() {
            Some(0) => true,
            Some(1) => self.said.contains("error: ") && self.said.contains("hint: "),
            _ => is_kill && status.signal() == Some(9),
        };
        if !is_right || self.said.contains("panicked") {
            return Err(format!("it ends with {status}: {}", self.said));
        }
        Ok(())
    }
}

/// All files of a folder.
fn files_of(folder: &Path) -> Files {
    let (mut files, mut folders) = (Files::new(), vec![folder.to_owned()]);
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(next).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if let Ok(bytes) = fs::read(&path) {
                files.insert(path.strip_prefix(folder).unwrap().to_owned(), bytes);
            }
        }
    }
    files
}

/// What is learnt: the files of the adapter or the model, and the state of the last checkpoint.
fn result_of(out: &Path) -> Files {
    let mut files = files_of(&out.join("adapter"));
    files.extend(files_of(&out.join("model")));
    let states = files_of(&out.join("checkpoints"));
    files.extend(states.into_iter().filter(|(path, _)| path.ends_with("state.safetensors")));
    files
}

fn same(expected: &Files, found: &Files) -> Result<(), String> {
    if expected.keys().ne(found.keys()) {
        return Err(format!("files are {:?}, expected {:?}", found.keys(), expected.keys()));
    }
    let other = expected.iter().find(|(path, bytes)| found[*path] != **bytes);
    other.map_or(Ok(()), |(path, _)| Err(format!("other bytes: {}", path.display())))
}

/// That every file under its final name is complete.
fn check_whole(out: &Path) -> Result<(), String> {
    for (path, bytes) in files_of(out) {
        let is_hidden =
            |part: std::path::Component<'_>| part.as_os_str().to_string_lossy().starts_with('.');
        if path.components().any(is_hidden) || path.ends_with("events.jsonl") {
            continue;
        }
        let is_whole = match path.extension().and_then(|end| end.to_str()) {
            Some("safetensors") => SafeTensors::deserialize(&bytes).is_ok(),
            Some("json") => serde_json::from_slice::<serde_json::Value>(&bytes).is_ok(),
            Some("html") => bytes.trim_ascii_end().ends_with(b"</html>"),
            Some("png") => bytes.ends_with(b"IEND\xaeB`\x82"),
            Some("toml") => toml::from_slice::<toml::Table>(&bytes).is_ok(),
            _ => !bytes.is_empty(),
        };
        if !is_whole {
            return Err(format!("half of a file: {}", path.display()));
        }
    }
    Ok(())
}

/// Tries so many random points; returns what did not hold.
fn torture(n_points: usize, n_threads: usize) -> Results {
    let variable =
        |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let seed = variable("HEARTH_TORTURE_SEED").unwrap_or_else(points::seed_of_now);
    let n_points = variable("HEARTH_TORTURE_POINTS").map_or(n_points, |n| n as usize);
    println!("HEARTH_TORTURE_SEED={seed} HEARTH_TORTURE_POINTS={n_points}");
    let subjects = [OF_IMAGES, OF_TEXTS, FULL_OF_TEXTS].map(Subject::new);
    let mut random = Random(seed);
    let points: Vec<(usize, Fault)> = (0..n_points)
        .map(|number| number % subjects.len())
        .map(|of| (of, random.fault(&subjects[of].operations)))
        .collect();
    let (next, results) = (AtomicUsize::new(0), Mutex::new(Results::new(seed)));
    let check_next = || {
        let number = next.fetch_add(1, Ordering::Relaxed);
        let (of, fault) = points.get(number)?;
        let held = subjects[*of].check(*fault, number);
        let mut results = results.lock().unwrap_or_else(PoisonError::into_inner);
        results.add(*fault, held);
        if number % 100 == 99 {
            println!("after {} of {n_points}\n{results}", number + 1);
        }
        Some(())
    };
    std::thread::scope(|scope| {
        for _ in 0..n_threads {
            scope.spawn(|| while check_next().is_some() {});
        }
    });
    results.into_inner().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn a_few_faults_anywhere_change_nothing() {
    torture(6, 1).assert_held();
}

#[test]
fn a_run_that_cannot_write_its_events_is_saved_first() {
    let subject = Subject::new(OF_TEXTS);
    let (out, log) = (subject.folder("run-full"), subject.place.path().join("log"));
    let journal = out.join("events.jsonl");
    let of_events = ("TORTURE_ROOT", text(&journal));
    let ended = subject.run(&out, &[of_events, ("TORTURE_LOG", text(&log))], &[]);
    assert_eq!(ended.code(), Some(0), "{}", ended.said);
    let log = fs::read_to_string(log).unwrap();
    // The first step, after which nothing was saved yet.
    let at = 1 + log.lines().position(|line| line.contains("{\"event\":\"step\"")).unwrap();
    fs::remove_dir_all(&out).unwrap();
    let ended = subject.run(&out, &[of_events, ("TORTURE_FAULT", &format!("full:{at}"))], &[]);
    ended.check(false).unwrap();
    assert_eq!(ended.code(), Some(1), "{}", ended.said);
    assert!(
        ended.said.contains("events.jsonl") && ended.said.contains("No space"),
        "{}",
        ended.said
    );
    assert!(!files_of(&out.join("checkpoints")).is_empty(), "what was trained is lost");
    let again = subject.run(&out, &[], &["--resume"]);
    assert_eq!(again.code(), Some(0), "{}", again.said);
    same(&subject.result, &result_of(&out)).unwrap();
}

#[test]
#[ignore = "takes an hour: just torture"]
fn a_thousand_faults_anywhere_change_nothing() {
    let n_threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let results = torture(1000, n_threads);
    println!("{results}");
    results.assert_held();
}
