//! Where a run stands, told by its folder alone, as other programs do: while it runs, when it was killed,
//! when it ended, and when it failed.

use std::fs;
use std::time::{SystemTime, UNIX_EPOCH};

use trainer::event::history::History;
use trainer::event::{EndReason, RunFailure, RunState, state};

use super::{Job, Running, interrupt};
use crate::said;

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64()
}

#[test]
fn a_running_a_killed_and_a_finished_run_differ() {
    let (job, begun) = (Job::new(), now());
    let run = job.path("run");
    assert_eq!(state(&run).unwrap(), None);
    // More steps than it will ever take.
    let mut running = Running::begin(job.command(&["train.steps=9999"], &[]));
    assert!(running.until("phase"));
    let now_running = state(&run).unwrap();
    assert!(matches!(now_running, Some(RunState::Running { step: 0, .. })), "{now_running:?}");
    assert!(running.until("checkpoint"));
    let Some(RunState::Running { phase, step: 2.. }) = state(&run).unwrap() else {
        panic!("{:?}", state(&run))
    };
    assert_eq!(phase, None, "it trains");
    running.child.kill().unwrap();
    running.child.wait().unwrap();
    let Some(RunState::Killed { step }) = state(&run).unwrap() else { panic!("{:?}", state(&run)) };
    // What could not even begin to go on leaves the run as it was.
    job.fail(&["train.steps=9999", "train.seed=7"], &["--resume"]);
    assert_eq!(state(&run).unwrap(), Some(RunState::Killed { step }));
    job.finish("run", &[&format!("train.steps={}", step + 1)], &["--resume"]);
    let finished = Some(RunState::Ended(EndReason::Finished));
    assert_eq!(state(&run).unwrap(), finished);
    job.fail(&["train.seed=7"], &["--resume"]);
    assert_eq!(state(&run).unwrap(), finished);
    check_times(&run, begun);
}

/// Every line says when it was written.
fn check_times(run: &std::path::Path, begun: f64) {
    let text = fs::read_to_string(run.join("events.jsonl")).unwrap();
    let time = |line: &str| {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        line["time"].as_f64().unwrap()
    };
    let times: Vec<f64> = text.lines().map(time).collect();
    assert!(times.is_sorted(), "{times:?}");
    // To the millisecond.
    assert!(times[0] > begun - 1e-3 && times.last().unwrap() < &(now() + 1e-3), "{times:?}");
}

#[test]
fn a_run_that_failed_says_so_and_one_that_was_stopped_too() {
    let job = Job::new();
    let run = job.path("run");
    let output = job.run(&[], &["--limit", "1MB"]);
    assert!(!output.status.success());
    let Some(RunState::Failed(RunFailure { step: 0, text, hint })) = state(&run).unwrap() else {
        panic!("{:?}", state(&run))
    };
    let words = said(&output);
    assert!(words.contains(&text) && words.contains(&hint), "{text} {hint} {words}");

    let mut running = Running::begin(job.command(&["train.steps=9999"], &[]));
    assert!(running.until("phase"));
    interrupt(&running.child);
    assert_eq!(running.code(), Some(130));
    assert_eq!(state(&run).unwrap(), Some(RunState::Ended(EndReason::Interrupted)));
    assert!(History::open(&run).is_err(), "nothing has begun");
}
