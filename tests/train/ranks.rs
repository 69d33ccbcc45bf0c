//! `mpirun -n N hearth train`: several ranks give what one process gives, with every MPI that is installed. Where none
//! is, these tests say so.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::texts::Place;
use super::{Job, begins, events, losses};
use crate::{said, text};

/// Relative. Sums over samples have another order.
const OF_LOSSES: f64 = 1e-5;

/// Launchers by the names that Debian gives those of Open MPI and of MPICH, or by the one there is.
fn launchers() -> Vec<&'static str> {
    let is_there = |name: &&str| {
        Command::new(*name).arg("--version").output().is_ok_and(|out| out.status.success())
    };
    let named: Vec<_> =
        ["mpirun.openmpi", "mpirun.mpich"].into_iter().filter(|name| is_there(name)).collect();
    if !named.is_empty() {
        return named;
    }
    let found: Vec<_> = ["mpirun"].into_iter().filter(is_there).collect();
    if found.is_empty() {
        #[allow(clippy::print_stderr)] // The reason a test proved nothing.
        {
            eprintln!("no mpirun here");
        }
    }
    found
}

/// So many ranks of a program on this computer.
fn ranks(launcher: &str, n: usize) -> Command {
    let mut command = Command::new(launcher);
    command.args(["-n", &n.to_string()]);
    command.args((launcher != "mpirun.mpich").then_some("--oversubscribe"));
    // Containers run as root.
    command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    command
}

fn trained(launcher: &str, n: usize, job: &Path, out: &Path, more: &[&str]) -> Output {
    let arguments = ["train", text(job), "--out", text(out), "--quiet"];
    let mut command = ranks(launcher, n);
    command.arg(env!("CARGO_BIN_EXE_hearth")).args(arguments).args(more);
    command.args(["--device", "cpu", "--threads", "1"]).output().unwrap()
}

fn check_losses(expected: &[f64], got: &[f64], what: &str) {
    assert_eq!(expected.len(), got.len(), "{what}");
    for (step, (expected, got)) in expected.iter().zip(got).enumerate() {
        assert!(
            (expected - got).abs() <= OF_LOSSES * expected,
            "{what}, step {step}: {expected} {got}"
        );
    }
}

/// The files of a result, by their names.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut names: Vec<_> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    names.sort();
    names
}

#[test]
fn ranks_train_what_one_process_trains() {
    let job = Job::new();
    let alone = job.finish("alone", &[], &[]);
    let expected = losses(&events(&alone));
    for (launcher, n) in launchers().into_iter().flat_map(|name| [(name, 2), (name, 3)]) {
        let out = job.path(&format!("{launcher}-{n}"));
        let output = trained(launcher, n, &job.file, &out, &[]);
        assert!(output.status.success(), "{launcher}: {}", said(&output));
        check_losses(&expected, &losses(&events(&out)), launcher);
        // Every rank saw the same; only the first wrote results.
        for rank in 1..n {
            let own = out.join(format!("ranks/rank-{rank}"));
            assert_eq!(losses(&events(&own)), losses(&events(&out)), "{launcher} {rank}");
            assert!(!own.join("adapter").exists() && !own.join("checkpoints").exists());
        }
        let names = |folder: &Path| -> Vec<_> {
            files(&folder.join("adapter"))
                .iter()
                .map(|path| path.file_name().unwrap().to_owned())
                .collect()
        };
        assert_eq!(names(&alone), names(&out));
    }
}

#[test]
fn ranks_resume_from_the_first_ones_checkpoint() {
    let place = Place::new();
    let expected = losses(&events(&place.train("alone", &["train.steps=8"], &[])));
    let job = place.path("job.toml");
    for launcher in launchers() {
        let out = place.path(launcher);
        let steps = |n: &'static str| ["--set", "output.save_every=4", "--steps", n];
        let first = trained(launcher, 2, &job, &out, &steps("4"));
        assert!(first.status.success(), "{}", said(&first));
        // Another number of ranks goes on.
        let resumed = trained(launcher, 3, &job, &out, &[&steps("8")[..], &["--resume"]].concat());
        assert!(resumed.status.success(), "{}", said(&resumed));
        check_losses(&expected, &losses(&events(&out)), launcher);
    }
}

/// A run with `--nodes localhost:2`, and the processes of its ranks.
struct Supervised {
    supervisor: Child,
    out: PathBuf,
}

impl Supervised {
    fn start(launcher: &str, job: &Path, out: &Path, more: &[&str]) -> Self {
        let arguments =
            ["train", text(job), "--out", text(out), "--quiet", "--nodes", "localhost:2"];
        let mut command = Command::new(env!("CARGO_BIN_EXE_hearth"));
        command.args(arguments).args(["--mpirun", launcher, "--device", "cpu", "--threads", "1"]);
        command.args(more).stdout(Stdio::piped()).stderr(Stdio::piped());
        // Containers run as root.
        command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        Self { supervisor: command.spawn().unwrap(), out: out.into() }
    }

    /// Waits until so many steps are taken; returns how many there are then.
    fn wait_for_step(&mut self, step: usize) -> usize {
        let begun = Instant::now();
        loop {
            let log = fs::read_to_string(self.out.join("events.jsonl")).unwrap_or_default();
            let n = log.lines().filter(|line| line.starts_with("{\"event\":\"step\"")).count();
            if n >= step {
                return n;
            }
            assert!(begun.elapsed() < Duration::from_secs(120), "no step {step}");
            assert!(self.supervisor.try_wait().unwrap().is_none(), "it has ended");
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// Kills the process of a rank: of a parent and its child the child.
    fn kill(&self, rank: usize) {
        let ours = format!("--out\0{}\0", text(&self.out));
        let [open_mpi, mpich] =
            ["OMPI_COMM_WORLD_RANK", "PMI_RANK"].map(|name| format!("{name}={rank}\0"));
        let mut found = Vec::new();
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let read = |name: &str| {
                String::from_utf8_lossy(&fs::read(entry.path().join(name)).unwrap_or_default())
                    .into_owned()
            };
            let environment = read("environ");
            let is_rank = environment.contains(&open_mpi) || environment.contains(&mpich);
            let is_child =
                environment.contains("HEARTH_SHIELDED") || environment.contains(&open_mpi);
            if is_rank && is_child && read("cmdline").contains(&ours) {
                found.push(entry.file_name().to_string_lossy().into_owned());
            }
        }
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(Command::new("kill").args(["-9", &found[0]]).status().unwrap().success());
    }
}

#[test]
fn a_rank_that_is_killed_costs_no_step() {
    let place = Place::new();
    let set = ["train.steps=40", "train.batch_size=6"];
    let expected = losses(&events(&place.train("alone", &set, &[])));
    let more: Vec<&str> = set.iter().flat_map(|set| ["--set", *set]).collect();
    for (launcher, rank) in launchers().into_iter().flat_map(|name| [(name, 0), (name, 1)]) {
        let out = place.path(&format!("{launcher}-{rank}"));
        let mut run = Supervised::start(launcher, &place.path("job.toml"), &out, &more);
        let taken = run.wait_for_step(3);
        run.kill(rank);
        let output = run.supervisor.wait_with_output().unwrap();
        assert!(output.status.success(), "{launcher}: {}", said(&output));
        assert!(said(&output).contains("the run goes on with localhost:2"), "{}", said(&output));
        let events = events(&out);
        let began: Vec<u64> = begins(&events).iter().map(|begin| begin.from_step).collect();
        assert!(began.len() == 2 && began[1] >= taken as u64, "{launcher}: {taken} {began:?}");
        check_losses(&expected, &losses(&events), launcher);
    }
}

#[test]
fn a_lost_rank_ends_a_strict_run_with_a_checkpoint() {
    let place = Place::new();
    for launcher in launchers() {
        let out = place.path(launcher);
        let more = ["--strict", "--steps", "400"];
        let mut run = Supervised::start(launcher, &place.path("job.toml"), &out, &more);
        let taken = run.wait_for_step(2);
        run.kill(1);
        let output = run.supervisor.wait_with_output().unwrap();
        let words = said(&output);
        assert_eq!(output.status.code(), Some(1), "{launcher}: {words}");
        assert!(words.contains("error: rank 1 is gone") && words.contains("--resume"), "{words}");
        let saved = fs::read_dir(out.join("checkpoints")).unwrap().count();
        assert_eq!(saved, 1, "{launcher}, {taken} steps were taken");
    }
}

#[test]
fn speeds_together_are_measured_beside_those_alone() {
    let place = Place::new();
    for launcher in launchers() {
        let mut command = ranks(launcher, 2);
        command.arg(env!("CARGO_BIN_EXE_hearth")).args(["bench", "cluster"]);
        command.arg(place.path("job.toml")).args(["--measure", "4", "--json"]);
        command.args(["--device", "cpu", "--threads", "1"]).current_dir(place.path("."));
        let output = command.output().unwrap();
        assert!(output.status.success(), "{launcher}: {}", said(&output));
        let figures: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let secs = |value: &serde_json::Value| value.as_f64().filter(|secs| *secs > 0.0);
        let sum: f64 =
            (0..2).map(|rank| 1.0 / secs(&figures["ranks"][rank]["alone_secs"]).unwrap()).sum();
        let of_the_sum = 1.0 / secs(&figures["together_secs"]).unwrap() / sum;
        assert!(
            (of_the_sum / secs(&figures["of_the_sum"]).unwrap() - 1.0).abs() < 1e-9,
            "{figures}"
        );
        let samples = (0..2).map(|rank| figures["ranks"][rank]["samples"].as_u64().unwrap());
        assert_eq!(samples.sum::<u64>(), 4, "{figures}");
        let left = fs::read_dir(place.path(".")).unwrap().flatten();
        let left =
            left.filter(|entry| entry.file_name().to_string_lossy().starts_with(".hearth-bench"));
        assert_eq!(left.count(), 0, "nothing is kept");
    }
}

#[test]
fn ranks_with_different_jobs_are_refused() {
    let place = Place::new();
    let job = place.path("job.toml");
    let other = place.path("other.toml");
    fs::write(&other, fs::read_to_string(&job).unwrap().replace("3e-3", "4e-3")).unwrap();
    // Each rank asks its launcher which one it is.
    let script = place.path("rank.sh");
    let line = format!(
        "case \"$OMPI_COMM_WORLD_RANK$PMI_RANK\" in 1) job='{}';; *) job='{}';; esac\n\
         exec '{}' train \"$job\" --out '{}' --quiet --device cpu --threads 1\n",
        text(&other),
        text(&job),
        env!("CARGO_BIN_EXE_hearth"),
        text(&place.path("run"))
    );
    fs::write(&script, line).unwrap();
    for launcher in launchers() {
        let output = ranks(launcher, 2).args(["sh", text(&script)]).output().unwrap();
        let words = said(&output);
        assert!(!output.status.success(), "{launcher}");
        assert!(
            words.contains("rank 1 has another job than rank 0: optimizer.learning_rate"),
            "{words}"
        );
    }
}
