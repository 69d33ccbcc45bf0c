//! What people ask of a run while it works: it is done or refused, and nothing of what is learnt is another.

use std::fs;
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use trainer::event::request::send;
use trainer::event::{EndReason, Event, RequestAnswer, RunRequest, RunState, state};

use super::{Job, Running, events, losses};
use crate::{command, printed, said, text};

fn answers(run: &Path) -> Vec<RequestAnswer> {
    let answer = |event| match event {
        Event::Request(answer) => Some(answer),
        _ => None,
    };
    events(run).into_iter().filter_map(answer).collect()
}

/// Puts a request into a run's folder by hand, as a shell does.
fn ask(run: &Path, id: &str, request: &str) {
    let folder = run.join("requests");
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join(id).with_extension("json"), request).unwrap();
}

fn adapter(run: &Path) -> Vec<u8> {
    fs::read(run.join("adapter/pytorch_lora_weights.safetensors")).unwrap()
}

const MORE: [&str; 3] = ["train.steps=6", "sample.size=64", "sample.steps=1"];

#[test]
fn requests_survive_a_restart_and_change_nothing_of_what_is_learnt() {
    let job = Job::new();
    let sampled = ["train.steps=2", "sample.prompts=['a fox']", "sample.size=64", "sample.steps=1"];
    for run in ["plain", "asked"] {
        job.finish(run, &sampled, &[]);
    }
    let more = [&MORE[..], &["sample.prompts=['a fox']"]].concat();
    let plain = job.finish("plain", &more, &["--resume"]);
    let run = job.path("asked");
    // Of nobody any more.
    assert!(send(&run, &RunRequest::Save).unwrap_err().to_string().contains("no program works"));
    ask(&run, "1", r#"{"request":"sample","prompt":"a blue \"cat\""}"#);
    ask(&run, "2", r#"{"request":"save"}"#);
    ask(&run, "3", r#"{"request":"change","key":"output.save_every","value":"5"}"#);
    ask(&run, "4", r#"{"request":"change","key":"train.seed","value":"5"}"#);
    ask(&run, "5", r#"{"request":"change","key":"machine.mode","value":"loud"}"#);
    ask(&run, "6", r#"{"request":"stop"}"#);
    ask(&run, "7", "no request");
    job.finish("asked", &more, &["--resume"]);
    let mut answers = answers(&run);
    answers.sort_by(|a, b| a.id.cmp(&b.id));
    let refused: Vec<Option<&str>> = answers.iter().map(|a| a.refused.as_deref()).collect();
    assert_eq!(refused[..3], [None; 3], "{answers:?}");
    for (refused, part) in refused[3..].iter().zip([
        "train.seed cannot change while a run works; these can: machine.mode, output.save_every",
        "`machine.mode` is \"loud\", accepted is one of quiet, balanced, full, overnight",
        "started again",
        "no request",
    ]) {
        assert!(refused.is_some_and(|why| why.contains(part)), "{refused:?} {part}");
    }
    assert_eq!(fs::read_dir(run.join("requests")).unwrap().count(), 0);
    let drawn = |event: &Event| matches!(event, Event::ImageSample { prompt, .. } if prompt == "a blue \"cat\"");
    assert!(events(&run).iter().any(drawn), "the new prompt was drawn");
    assert_eq!(losses(&events(&run)), losses(&events(&plain)));
    assert_eq!(adapter(&run), adapter(&plain));
    // What was changed is kept by the run that resumes, unless the job says otherwise.
    job.finish("asked", &[&more[..], &["train.steps=7"]].concat(), &["--resume"]);
    let settings = fs::read_to_string(run.join("config.toml")).unwrap();
    assert!(settings.contains("save_every = 5"), "{settings}");
    assert!(settings.contains("a blue"), "{settings}");
    job.finish(
        "asked",
        &[&more[..], &["train.steps=8", "output.save_every=3"]].concat(),
        &["--resume"],
    );
    let settings = fs::read_to_string(run.join("config.toml")).unwrap();
    assert!(settings.contains("save_every = 3"), "{settings}");
}

#[test]
fn a_run_pauses_goes_on_and_stops_as_it_is_asked() {
    let job = Job::new();
    let run = job.path("run");
    let mut running = Running::begin(job.command(&["train.steps=99999"], &[]));
    assert!(running.until("step"));
    let n_steps = || losses(&events(&run)).len();
    send(&run, &RunRequest::Pause).unwrap();
    assert!(running.until("request"));
    // The one at hand may still end.
    sleep(Duration::from_millis(300));
    let paused_at = n_steps();
    sleep(Duration::from_millis(600));
    assert_eq!(n_steps(), paused_at);
    send(&run, &RunRequest::Resume).unwrap();
    assert!(running.until("request") && running.until("step"));
    assert!(n_steps() > paused_at);
    let listed = printed(&["runs", text(job.folder.path())]);
    assert!(listed.contains("training"), "{listed}");
    send(&run, &RunRequest::Stop).unwrap();
    assert!(running.until("end"));
    assert_eq!(running.code(), Some(130));
    assert_eq!(state(&run).unwrap(), Some(RunState::Ended(EndReason::Interrupted)));
    let asked: Vec<_> = answers(&run).into_iter().map(|answer| answer.asked.unwrap()).collect();
    assert_eq!(asked, [RunRequest::Pause, RunRequest::Resume, RunRequest::Stop]);
    // Lines of a run that is over, and a list of it.
    let watched = said(&command(&["watch", text(&run)]).output().unwrap());
    assert!(watched.contains("asked to pause: done"), "{watched}");
    let json = printed(&["watch", text(&run), "--json"]);
    assert_eq!(json.lines().count(), events(&run).len());
    let listed = printed(&["runs", text(job.folder.path())]);
    assert!(listed.contains("stopped"), "{listed}");
    let none = command(&["watch", text(&job.path("none"))]).output().unwrap();
    assert!(said(&none).contains("hint: "), "{}", said(&none));
}

/// A job that cannot be planned with the change goes on without it.
#[test]
fn a_change_that_does_not_fit_is_refused_and_the_run_goes_on() {
    let job = Job::new();
    job.finish("run", &["train.steps=2"], &[]);
    let run = job.path("run");
    ask(&run, "1", r#"{"request":"sample","prompt":"a fox"}"#);
    // Samples of this size take more than there is.
    let set = ["train.steps=4", "sample.size=4096", "sample.steps=1"];
    job.finish("run", &set, &["--resume", "--limit", "100MB"]);
    let answers = answers(&run);
    assert!(answers[0].refused.is_some(), "{answers:?}");
    assert_eq!(losses(&events(&run)).len(), 4);
}
