//! What is disturbed: a run or a command, how it ends, and what it leaves behind.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use safetensors::SafeTensors;
use tempfile::TempDir;

use super::points::{self, Fault, Operation};
use crate::models::golden;
use crate::train::clips;
use crate::{command, package, text};

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

const LORA: &str = "[adapter]\nrank = 2\n";
const FULL: &str = "[adapter]\nkind = 'full'\n";

/// What is disturbed.
#[derive(Clone, Copy)]
pub enum Work {
    /// `hearth train`, with the parts in which jobs differ.
    Train { data: &'static str, adapter: &'static str },
    /// A command that writes into a folder.
    Command(&'static str),
}

pub const OF_TEXTS: Work = Work::Train { data: TEXTS, adapter: LORA };

/// The last exports a whole model.
pub const RUNS: [Work; 3] = [
    Work::Train { data: IMAGES, adapter: LORA },
    OF_TEXTS,
    Work::Train { data: TEXTS, adapter: FULL },
];

/// What people keep: adapters for every program, merged models, images, clips.
pub const COMMANDS: [Work; 6] = [
    Work::Command(
        "export {golden}/sd3/pipeline/lora.safetensors --base {golden}/sd3/pipeline --out {out}",
    ),
    Work::Command(
        "export {golden}/sd3/pipeline/lora.safetensors --base {golden}/sd3/pipeline --merge --out {out}/x",
    ),
    Work::Command("export {golden}/llama/qwen2/peft --base {golden}/llama/qwen2 --out {out}"),
    Work::Command(
        "export {golden}/llama/qwen2/peft --base {golden}/llama/qwen2 --merge --out {out}/x",
    ),
    Work::Command(
        "sample --base {golden}/sd3/pipeline --prompt fox --prompt fire --size 64 --steps 1 --out {out}/",
    ),
    Work::Command("sample --base {t2v} --prompt fox --frames 5 --size 64 --steps 1 --out {out}/"),
];

/// Chosen: a run takes two seconds; on a busy computer a minute.
const PATIENCE: Duration = Duration::from_secs(240);

/// Files by their path in a run's folder.
type Files = BTreeMap<PathBuf, Vec<u8>>;

/// A job or a command, and what comes of it where nothing fails.
pub struct Subject {
    pub place: TempDir,
    work: Work,
    shim: PathBuf,
    /// Of the undisturbed run, in order.
    pub operations: Vec<Operation>,
    pub result: Files,
    samples: Files,
}

/// How a process ended.
pub struct Ended {
    status: Option<ExitStatus>,
    pub said: String,
}

impl Subject {
    /// Runs it once, undisturbed.
    pub fn new(work: Work) -> Self {
        let place = tempfile::tempdir().unwrap();
        let shim = place.path().join("shim.so");
        let source = package().join("../../tests/torture/shim.c");
        let mut compiler = Command::new("cc");
        compiler.args(["-O1", "-Wno-unused-result", "-shared", "-fPIC"]);
        compiler.args(["-o", text(&shim), text(&source), "-ldl"]);
        assert!(compiler.status().unwrap().success(), "shim.c does not compile");
        match work {
            Work::Train { data, adapter } => write_job(place.path(), data, adapter),
            Work::Command(words) if words.contains("{t2v}") => {
                clips::base(&place.path().join("t2v"));
            }
            Work::Command(_) => {}
        }
        let mut subject = Self {
            place,
            work,
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
        let (phase, least) = match self.work {
            Work::Train { .. } => (None, 200),
            Work::Command(words) => (Some(points::phase_of_command(words)), 10),
        };
        self.operations = points::read_log(&fs::read_to_string(&log).unwrap(), phase);
        fs::remove_file(log).unwrap();
        assert!(self.operations.len() > least, "{} operations", self.operations.len());
        (self.result, self.samples) = (self.result_of(&out), files_of(&out.join("samples")));
        assert!(self.result.len() > 1, "{:?}", self.result.keys());
        fs::remove_dir_all(out).unwrap();
    }

    /// As the system calls it: handles lead to names without links.
    pub fn folder(&self, name: &str) -> PathBuf {
        self.place.path().canonicalize().unwrap().join(name)
    }

    /// The words of its command line.
    fn words(&self, out: &Path) -> Vec<String> {
        match self.work {
            Work::Train { .. } => {
                let job = self.place.path().join("job.toml");
                ["train", text(&job), "--out", text(out), "--quiet"].map(str::to_owned).into()
            }
            Work::Command(words) => {
                let (golden, clips) = (golden().join(".."), self.place.path().join("t2v"));
                let names =
                    [("{golden}", text(&golden)), ("{t2v}", text(&clips)), ("{out}", text(out))];
                let named = |word: &str| {
                    names.iter().fold(word.to_owned(), |word, (of, to)| word.replace(of, to))
                };
                words.split(' ').map(named).collect()
            }
        }
    }

    pub fn run(&self, out: &Path, variables: &[(&str, &str)], more: &[&str]) -> Ended {
        let (words, errors) = (self.words(out), out.with_extension("stderr"));
        let words = words.iter().map(String::as_str).chain(more.iter().copied());
        let mut command = command(&words.collect::<Vec<_>>());
        // Without ffmpeg, which would write a clip of its own.
        command.env("PATH", "");
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
    pub fn check(&self, fault: Fault, number: usize) -> Result<bool, String> {
        let out = self.folder(&format!("run-{number}"));
        let (before, met) = (self.beside(), out.with_extension("met"));
        let variables = [("TORTURE_FAULT", fault.to_string()), ("TORTURE_MET", text(&met).into())];
        let first =
            self.run(&out, &variables.each_ref().map(|(name, value)| (*name, value.as_str())), &[]);
        let is_met = fs::remove_file(&met).is_ok();
        first.check(fault.is_kill())?;
        check_whole(&out)?;
        fault.check_quarantine(files_of(&out.join("cache")).keys())?;
        if matches!(self.work, Work::Command(_)) {
            self.check_command(&out, fault)?;
        }
        // A command may be disturbed when all is done; a merged model is not written twice.
        let is_done = matches!(self.work, Work::Command(_)) && self.result_of(&out) == self.result;
        if first.code() != Some(0) && !is_done {
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
        same(&self.result, &self.result_of(&out))?;
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

    /// That a command left whole files alone, and nothing else unless it was killed.
    fn check_command(&self, out: &Path, fault: Fault) -> Result<(), String> {
        for (path, bytes) in files_of(out) {
            let is_hidden = is_hidden(&path);
            if is_hidden && !fault.may_leave_staging() {
                return Err(format!("left behind: {}", path.display()));
            }
            if !is_hidden && self.result.get(&path) != Some(&bytes) {
                return Err(format!("another file: {}", path.display()));
            }
        }
        Ok(())
    }

    /// What is learnt: the files of the adapter or the model, and the state of the last checkpoint. Of a command, all but
    /// what it works in.
    pub fn result_of(&self, out: &Path) -> Files {
        if matches!(self.work, Work::Command(_)) {
            return files_of(out).into_iter().filter(|(path, _)| !is_hidden(path)).collect();
        }
        let mut files = files_of(&out.join("adapter"));
        files.extend(files_of(&out.join("model")));
        let states = files_of(&out.join("checkpoints"));
        files.extend(states.into_iter().filter(|(path, _)| path.ends_with("state.safetensors")));
        files
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
    pub fn code(&self) -> Option<i32> {
        self.status.and_then(|status| status.code())
    }

    /// That it ended as it may.
    pub fn check(&self, is_kill: bool) -> Result<(), String> {
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

/// A job on images, by a diffusion model; or on texts, by a language model.
fn write_job(place: &Path, data: &str, adapter: &str) {
    let is_images = data == IMAGES;
    let learning = golden().join("../llama/learning");
    let base = if is_images { golden().join("pipeline") } else { place.join("model") };
    if !is_images {
        fs::create_dir(&base).unwrap();
        for name in ["model/config.json", "model/model.safetensors", "texts.jsonl"] {
            fs::copy(learning.join(name), place.join(name)).unwrap();
        }
        trainer::text::Tokenizer::bytes().save(&base).unwrap();
    }
    let base = format!("[base]\npath = '{}'\ndtype = 'f32'\n", text(&base));
    fs::write(place.join("job.toml"), [&base, data, adapter, ALL].concat()).unwrap();
}

/// All files of a folder.
pub fn files_of(folder: &Path) -> Files {
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

/// Whether a file is hidden, or in a folder that is.
fn is_hidden(path: &Path) -> bool {
    path.components().any(|part| part.as_os_str().to_string_lossy().starts_with('.'))
}

pub fn same(expected: &Files, found: &Files) -> Result<(), String> {
    if expected.keys().ne(found.keys()) {
        return Err(format!("files are {:?}, expected {:?}", found.keys(), expected.keys()));
    }
    let other = expected.iter().find(|(path, bytes)| found[*path] != **bytes);
    other.map_or(Ok(()), |(path, _)| Err(format!("other bytes: {}", path.display())))
}

/// That every file under its final name is complete.
fn check_whole(out: &Path) -> Result<(), String> {
    for (path, bytes) in files_of(out) {
        if is_hidden(&path) || path.ends_with("events.jsonl") {
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
