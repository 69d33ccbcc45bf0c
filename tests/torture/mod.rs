//! A disk that fails, and a program that is killed, at any file operation of a run (encode, train, validate, sample, save,
//! export) and of `hearth export` and `hearth sample`. What ends well has the result of an undisturbed one; any other can
//! be started again, and then has it. No panic, no hang, no half of a file under its final name, and nothing is touched
//! but the folder that is written to. Threads that the system refuses are an error, too.
//!
//! `shim.c` is loaded before libc and fails the n-th operation under that folder. The default suite tries a few random
//! points; `just torture` tries two thousand and prints a table. Variables of its own:
//!
//! ```text
//! HEARTH_TORTURE_SEED      repeats a choice of points
//! HEARTH_TORTURE_POINTS    how many
//! HEARTH_TORTURE_THREADS   how many side by side; as many as there are cores
//! ```

#![allow(clippy::print_stdout)] // Who runs it by name reads the table and the seed.

mod points;
mod subject;

use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use self::points::{Random, Results};
use self::subject::{COMMANDS, OF_TEXTS, RUNS, Subject, Work, files_of, same};
use crate::text;

/// Of so many points, one disturbs a command; those have fewer operations.
const COMMAND_SHARE: usize = 4;

/// Tries so many random points; returns what did not hold.
fn torture(n_points: usize, n_threads: usize) -> Results {
    let variable =
        |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let seed = variable("HEARTH_TORTURE_SEED").unwrap_or_else(points::seed_of_now);
    let n_points = variable("HEARTH_TORTURE_POINTS").map_or(n_points, |n| n as usize);
    let n_threads = variable("HEARTH_TORTURE_THREADS").map_or(n_threads, |n| n as usize);
    println!("HEARTH_TORTURE_SEED={seed} HEARTH_TORTURE_POINTS={n_points}");
    let works: Vec<Work> = RUNS.into_iter().chain(COMMANDS).collect();
    // Made when the first point is one of theirs.
    let subjects: Vec<OnceLock<Subject>> = works.iter().map(|_| OnceLock::new()).collect();
    let mut random = Random(seed);
    let points: Vec<(usize, Random)> = (0..n_points)
        .map(|_| match random.below(COMMAND_SHARE) {
            0 => (RUNS.len() + random.below(COMMANDS.len()), random.fork()),
            _ => (random.below(RUNS.len()), random.fork()),
        })
        .collect();
    let (next, results) = (AtomicUsize::new(0), Mutex::new(Results::new(seed)));
    let check_next = || {
        let number = next.fetch_add(1, Ordering::Relaxed);
        let (of, random) = points.get(number)?;
        let subject = subjects[*of].get_or_init(|| Subject::new(works[*of]));
        let fault = random.clone().fault(&subject.operations, number % 2 == 0);
        let held = subject.check(fault, number);
        let mut results = results.lock().unwrap_or_else(PoisonError::into_inner);
        results.add(fault, held);
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
    same(&subject.result, &subject.result_of(&out)).unwrap();
}

#[test]
fn every_command_is_disturbed_once() {
    for work in COMMANDS {
        let subject = Subject::new(work);
        for (number, is_kill) in [true, false].into_iter().enumerate() {
            let mut random = Random(points::seed_of_now());
            let fault = random.fault(&subject.operations, is_kill);
            subject.check(fault, number).unwrap_or_else(|problem| panic!("{fault}: {problem}"));
        }
    }
}

#[test]
fn threads_that_the_system_refuses_are_an_error() {
    let subject = Subject::new(OF_TEXTS);
    let mut n_well = 0;
    for n_threads in (0..10).chain([12, 16, 24, 32, 64]) {
        let out = subject.folder(&format!("run-{n_threads}"));
        let ended = subject.run(&out, &[("TORTURE_THREADS", &n_threads.to_string())], &[]);
        ended.check(false).unwrap_or_else(|problem| panic!("{n_threads} threads: {problem}"));
        assert!(n_threads > 0 || ended.code() == Some(1), "no thread was refused");
        n_well += usize::from(ended.code() == Some(0));
    }
    assert!(n_well > 0, "it never has enough threads");
}

#[test]
#[ignore = "takes an hour: just torture"]
fn a_thousand_kills_and_a_thousand_faults_anywhere_change_nothing() {
    let n_threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let results = torture(2200, n_threads);
    println!("{results}");
    results.assert_held();
}
