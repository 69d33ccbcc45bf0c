//! Starting a run from the page. A job is planned first, by `hearth plan` in a process of its own; only what was planned
//! and fits can be started, by the ticket that comes with the plan. The run is `hearth train` in a process of its own,
//! which goes on when the server ends.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use machine::process::{apart_from_terminal, own_program};
use serde::Deserialize;
use serde_json::{Value, json};

use super::access::random_token;
use super::http::{HttpResponse, HttpStatus};

/// A plan that takes longer is given up. Chosen: the largest model that is known takes ten seconds.
const PLAN_TIME: Duration = Duration::from_secs(120);
/// Plans that can still be started, and runs that were started and are shown.
const TICKETS: usize = 16;
const LAUNCHES: usize = 32;
/// Bytes of what a program says that are shown, its last ones.
const SAID_BYTES: u64 = 4096;
/// Characters of a path or number.
const VALUE_CHARACTERS: usize = 1024;

/// Plans jobs and starts runs.
pub struct RunLauncher {
    recipes: Vec<PathBuf>,
    /// Where runs are begun, if there is such a folder.
    home: Option<PathBuf>,
    state: Mutex<LaunchState>,
}

#[derive(Default)]
struct LaunchState {
    planned: VecDeque<PlannedLaunch>,
    started: VecDeque<StartedRun>,
}

/// A job that fits.
struct PlannedLaunch {
    ticket: String,
    name: String,
    words: Vec<String>,
}

/// A run that was started here.
struct StartedRun {
    name: String,
    child: Child,
    said: File,
    /// How it ended, once it has.
    ended: Option<ExitStatus>,
}

/// A job as typed on the page.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LaunchForm {
    /// Its number in the list.
    recipe: Option<usize>,
    /// The folder of the run, within the one that is served.
    name: String,
    #[serde(default)]
    images: String,
    #[serde(default)]
    text: String,
    #[serde(default)]
    base: String,
    #[serde(default)]
    steps: String,
}

/// Which plan is started.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LaunchTicket {
    ticket: String,
}

impl RunLauncher {
    /// With the job files of these folders, for runs in `home`.
    pub fn new(folders: &[PathBuf], home: Option<PathBuf>) -> Self {
        let mut recipes: Vec<PathBuf> =
            folders.iter().flat_map(|folder| job_files(folder)).collect();
        recipes.sort();
        recipes.dedup();
        Self { recipes, home, state: Mutex::default() }
    }

    /// What can be chosen, and what was started.
    pub fn choices(&self) -> Value {
        let recipe = |(number, path): (usize, &PathBuf)| {
            let text = fs::read_to_string(path).unwrap_or_default();
            let about = text
                .lines()
                .map_while(|line| line.strip_prefix("# "))
                .collect::<Vec<_>>()
                .join(" ");
            let name = path.file_stem().unwrap_or_default().to_string_lossy();
            json!({ "recipe": number, "name": name, "about": about })
        };
        let started: Vec<Value> = self.state().started.iter_mut().map(StartedRun::told).collect();
        json!({
            "recipes": self.recipes.iter().enumerate().map(recipe).collect::<Vec<_>>(),
            "home": self.home.as_ref().map(|home| home.display().to_string()),
            "started": started,
        })
    }

    /// Plans a job: the plan and a ticket, or why there is none.
    pub fn plan(&self, form: &LaunchForm) -> HttpResponse {
        let words = match self.words(form) {
            Ok(words) => words,
            Err(problem) => {
                let hint = "give a job file, or a model and what to train it on";
                return HttpResponse::refusal(HttpStatus::BadRequest, &problem, hint);
            }
        };
        let (out, said) = match run_apart(&[&["plan".into(), "--json".into()], &words[..]].concat())
        {
            Ok(ran) => ran,
            Err(error) => return failed("the plan could not be made", &error),
        };
        let plan: Value = serde_json::from_str(&out).unwrap_or(Value::Null);
        let ticket = if plan["fits"] == true { random_token().ok() } else { None };
        if let Some(ticket) = &ticket {
            let mut state = self.state();
            state.planned.truncate(TICKETS - 1);
            let (ticket, name) = (ticket.clone(), form.name.clone());
            state.planned.push_front(PlannedLaunch { ticket, name, words: words.clone() });
        }
        let command = [&["hearth".into(), "train".into()], &words[..]].concat().join(" ");
        HttpResponse::json(
            json!({ "plan": plan, "ticket": ticket, "said": said, "command": command }).to_string(),
        )
    }

    /// Starts what was planned, once.
    pub fn start(&self, LaunchTicket { ticket }: &LaunchTicket) -> HttpResponse {
        let mut state = self.state();
        let Some(at) = state.planned.iter().position(|planned| planned.ticket == *ticket) else {
            let hint = "plan it again";
            return HttpResponse::refusal(
                HttpStatus::Conflict,
                "the plan was started or is too old",
                hint,
            );
        };
        let Some(PlannedLaunch { name, words, .. }) = state.planned.remove(at) else {
            return HttpResponse::refusal(
                HttpStatus::Conflict,
                "the plan is gone",
                "plan it again",
            );
        };
        match start(&words) {
            Ok((child, said)) => {
                let pid = child.id();
                state.started.truncate(LAUNCHES - 1);
                state.started.push_front(StartedRun {
                    name: name.clone(),
                    child,
                    said,
                    ended: None,
                });
                HttpResponse::json(json!({ "name": name, "process": pid }).to_string())
            }
            Err(error) => failed("the run could not be started", &error),
        }
    }

    /// The words of the command line. Values stand behind an equals sign, so that none is taken for a flag.
    fn words(&self, form: &LaunchForm) -> Result<Vec<String>, String> {
        let LaunchForm { recipe, name, images, text, base, steps } = form;
        let home = self.home.as_ref().ok_or("the server has no folder for new runs, only runs")?;
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if name.is_empty()
            || name.len() > 64
            || name.starts_with(['.', '-'])
            || !name.chars().all(is_plain)
        {
            return Err(format!(
                "the name is {name:?}, expected up to 64 of a-z, A-Z, 0-9, -, _ and ."
            ));
        }
        let mut words = Vec::new();
        if let Some(number) = recipe {
            let path = self.recipes.get(*number).ok_or("there is no such recipe")?;
            words.push(path.display().to_string());
        }
        words.push(format!("--out={}", home.join(name).display()));
        for (flag, value) in
            [("--images", images), ("--text", text), ("--base", base), ("--steps", steps)]
        {
            if value.chars().count() > VALUE_CHARACTERS || value.chars().any(char::is_control) {
                return Err(format!("{flag} is too long or has control characters"));
            }
            if !value.trim().is_empty() {
                words.push(format!("{flag}={}", value.trim()));
            }
        }
        Ok(words)
    }

    fn state(&self) -> MutexGuard<'_, LaunchState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn failed(problem: &str, error: &io::Error) -> HttpResponse {
    let hint = "the terminal of hearth serve may say more";
    HttpResponse::refusal(HttpStatus::Failed, &format!("{problem}: {error}"), hint)
}

/// Job files of a folder.
fn job_files(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    paths
        .filter(|path| path.extension().is_some_and(|end| end == "toml") && path.is_file())
        .collect()
}

fn program() -> io::Result<Command> {
    let path = own_program().ok_or_else(|| io::Error::other("this program's file is not known"))?;
    let mut command = Command::new(path);
    command.stdin(Stdio::null());
    // Ctrl-C is for the server.
    apart_from_terminal(&mut command);
    Ok(command)
}

/// Runs our own program to its end; returns what it printed and what it said.
fn run_apart(words: &[String]) -> io::Result<(String, String)> {
    let (mut out, mut said) = (tempfile::tempfile()?, tempfile::tempfile()?);
    let mut child =
        program()?.args(words).stdout(out.try_clone()?).stderr(said.try_clone()?).spawn()?;
    let end = Instant::now() + PLAN_TIME;
    while child.try_wait()?.is_none() {
        if Instant::now() > end {
            child.kill()?;
            child.wait()?;
            return Err(io::Error::other("it took longer than two minutes"));
        }
        sleep(Duration::from_millis(20));
    }
    let mut text = String::new();
    out.seek(SeekFrom::Start(0))?;
    out.read_to_string(&mut text)?;
    Ok((text, last_words(&mut said)))
}

/// Starts a run. What it says goes to a file without a name, which is there as long as somebody has it open.
fn start(words: &[String]) -> io::Result<(Child, File)> {
    let said = tempfile::tempfile()?;
    let mut command = program()?;
    command.arg("train").arg("--quiet").args(words);
    let child = command.stdout(Stdio::null()).stderr(said.try_clone()?).spawn()?;
    Ok((child, said))
}

fn last_words(said: &mut File) -> String {
    let mut bytes = Vec::new();
    let length = said.metadata().map_or(0, |about| about.len());
    let read = said
        .seek(SeekFrom::Start(length.saturating_sub(SAID_BYTES)))
        .and_then(|_| said.by_ref().take(SAID_BYTES).read_to_end(&mut bytes));
    read.map_or_else(|_| String::new(), |_| String::from_utf8_lossy(&bytes).into_owned())
}

impl StartedRun {
    /// How it goes, and what it said if it failed.
    fn told(&mut self) -> Value {
        if self.ended.is_none() {
            self.ended = self.child.try_wait().ok().flatten();
        }
        let is_failed = self.ended.is_some_and(|ended| !ended.success());
        let said = is_failed.then(|| last_words(&mut self.said));
        json!({ "name": self.name, "is_over": self.ended.is_some(), "said": said })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn form(name: &str, base: &str) -> LaunchForm {
        let none = String::new;
        let (name, base) = (name.into(), base.into());
        LaunchForm { recipe: Some(0), name, images: none(), text: none(), base, steps: "5".into() }
    }

    #[test]
    fn a_form_becomes_words_and_no_value_a_flag_or_another_folder() {
        let place = tempfile::tempdir().unwrap();
        fs::write(place.path().join("cat.toml"), "# A cat.\n# Two lines.\n\n[base]\n").unwrap();
        let launcher = RunLauncher::new(&[place.path().into()], Some("/runs".into()));
        assert_eq!(launcher.choices()["recipes"][0]["about"], "A cat. Two lines.");
        let words = launcher.words(&form("cat-1", " --device=cuda:0 ")).unwrap();
        let recipe = place.path().join("cat.toml").display().to_string();
        assert_eq!(words, [&recipe, "--out=/runs/cat-1", "--base=--device=cuda:0", "--steps=5"]);
        for name in ["", "..", ".a", "a/b", "-x", "a b", "ä", &"a".repeat(65)] {
            assert!(launcher.words(&form(name, "")).is_err(), "{name}");
        }
        assert!(launcher.words(&form("a", "x\ny")).is_err());
        let other = LaunchForm { recipe: Some(7), ..form("a", "") };
        assert!(launcher.words(&other).is_err());
        let unknown = launcher.start(&LaunchTicket { ticket: "guess".into() });
        assert_eq!(unknown.status(), HttpStatus::Conflict);
        assert!(RunLauncher::new(&[], None).words(&form("a", "")).is_err());
    }
}
