//! Runs that are killed, interrupted or damaged go on as if nothing had happened, bit for bit; what
//! is not the same run is refused.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::thread::sleep;
use std::time::Duration;

use trainer::config::HEADER;
use trainer::event::{EndReason, Event, RunEnd};

use super::{
    Job, Running, begins, check_memory, events, interrupt, losses, parsed, paths_in, signal,
    trained, warnings,
};
use crate::models::{copy, copy_folder};
use crate::{said, text};

/// Everything at once that remembers something between steps, or draws numbers in them.
const ALL: [&str; 15] = [
    "train.steps=12",
    "train.batch_size=1",
    "train.gradient_accumulation=2",
    "train.ema=0.9",
    "train.validate_every=3",
    "optimizer.kind=adamw_8bit",
    "optimizer.lr_scheduler=plateau",
    "adapter.kind=dora",
    "adapter.dropout=0.1",
    "data.flip=true",
    "data.shuffle_tags=true",
    "data.keep_tags=0",
    "data.caption_dropout=0.3",
    "output.save_every=1",
    "output.keep=2",
];

/// When a run is killed: milliseconds after an event of a kind, or after its start. A step's event
/// is followed by its checkpoint, which takes some ten milliseconds here.
const MOMENTS: [(&str, u64); 22] = [
    ("", 10),
    ("", 60),
    ("", 250),
    ("phase", 0),
    ("begin", 0),
    ("validation", 1),
    ("step", 0),
    ("step", 1),
    ("step", 2),
    ("step", 3),
    ("step", 4),
    ("step", 5),
    ("step", 6),
    ("step", 8),
    ("step", 10),
    ("step", 15),
    ("step", 40),
    ("checkpoint", 0),
    ("checkpoint", 1),
    ("exported", 0),
    ("end", 0),
    ("end", 3),
];

/// The same for a model that takes longer.
const FEW_MOMENTS: [(&str, u64); 6] = [
    ("begin", 0),
    ("checkpoint", 0),
    ("step", 1),
    ("checkpoint", 2),
    ("checkpoint", 20),
    ("exported", 0),
];

#[test]
fn a_run_that_is_killed_again_and_again_trains_the_same() {
    check_killed(&Job::new(), &[], &MOMENTS);
}

#[test]
fn a_run_that_is_killed_while_it_writes_shards_trains_the_same() {
    let shards = ["output.max_shard_size=16KB"];
    let saves = [0, 2, 5, 9, 14, 20].map(|millis| [("checkpoint", 0), ("step", millis)]);
    check_killed(&Job::new(), &shards, &[&saves.concat()[..], &[("exported", 0)]].concat());
}

#[test]
fn runs_of_other_families_that_are_killed_again_and_again_train_the_same() {
    check_killed(&Job::flux(), &[], &FEW_MOMENTS);
    check_killed(&Job::qwen_image(), &[], &FEW_MOMENTS);
    check_killed(&Job::z_image(), &[], &FEW_MOMENTS);
    check_killed(&Job::flux2(), &[], &FEW_MOMENTS);
}

fn check_killed(job: &Job, set: &[&str], moments: &[(&str, u64)]) {
    let set = &[&ALL[..], set].concat();
    let whole = job.finish("whole", set, &["--threads", "1"]);
    let killed = job.path("killed");
    for (at, (kind, millis)) in moments.iter().enumerate() {
        let threads = ["1", "2", "3"][at % 3];
        let arguments = ["--out", text(&killed), "--threads", threads];
        // As the program says itself: what was killed before it saved anything is started again.
        let resume: &[&str] = if n_saved(&killed) > 0 { &["--resume"] } else { &[] };
        let mut running = Running::begin(job.command(set, &[&arguments, resume].concat()));
        let happened = kind.is_empty() || running.until(kind);
        sleep(Duration::from_millis(*millis));
        // One that is done already cannot be killed.
        _ = running.child.kill();
        let output = running.child.wait_with_output().unwrap();
        assert!(happened, "{kind}: {}", said(&output));
    }
    job.finish("killed", set, &["--resume"]);
    assert!(trained(&whole) == trained(&killed), "other bytes than without a break");
    let [without, with] = [&whole, &killed].map(|run| events(run));
    assert_eq!(losses(&without), losses(&with));
    let parts: Vec<u64> = begins(&with).iter().map(|begin| begin.from_step).collect();
    assert!(parts.is_sorted() && parts.last() == Some(&12), "{parts:?}");
    assert!(parts.iter().any(|from| (1..12).contains(from)) && parts.len() > 4, "{parts:?}");
    for folder in ["checkpoints", "adapter"] {
        let names =
            fs::read_dir(killed.join(folder)).unwrap().map(|entry| entry.unwrap().file_name());
        let names: Vec<_> =
            names.filter(|name| text(Path::new(name)).contains("partial")).collect();
        assert!(names.is_empty(), "{names:?} is left of what was killed");
    }
    // What broke off is never taken for a checkpoint.
    assert!(!warnings(&with).iter().any(|text| text.contains("passed over")), "{with:?}");
}

/// Whole checkpoints of a run.
fn n_saved(run: &Path) -> usize {
    let all = fs::read_dir(run.join("checkpoints")).into_iter().flatten().flatten();
    all.filter(|entry| text(&entry.path()).contains("/step-")).count()
}

#[test]
fn without_a_checkpoint_there_is_nothing_to_resume() {
    let job = Job::new();
    let run = job.path("run");
    let words = job.fail(&[], &["--resume"]);
    assert!(words.contains(&format!("no run to resume in {}", text(&run))), "{words}");
    assert!(words.contains("hint: start one without --resume"), "{words}");
    assert!(!run.exists(), "something was written");

    // One that was killed before it saved anything is started again, and not gone on with.
    let set = ["train.steps=2", "output.save_every=off"];
    let mut running = Running::begin(job.command(&set, &[]));
    assert!(running.until("begin"));
    running.child.kill().unwrap();
    running.child.wait().unwrap();
    assert_eq!(n_saved(&run), 0);
    let words = job.fail(&set, &["--resume"]);
    assert!(words.contains(&format!("the run in {} has no checkpoint", text(&run))), "{words}");
    assert!(words.contains("hint: start again without --resume"), "{words}");
    job.finish("run", &set, &[]);
    assert_eq!(begins(&events(&run)).len(), 1, "the history of what came to nothing is left");

    // One whose checkpoints were deleted is not begun again over what came of it.
    fs::remove_dir_all(run.join("checkpoints")).unwrap();
    assert!(job.fail(&set, &[]).contains("there is a run already"));
    assert!(job.fail(&set, &["--resume"]).contains("hint: put its checkpoints folder back"));
}

#[test]
fn a_run_does_not_resume_with_fewer_steps_than_it_took() {
    let job = Job::new();
    let run = job.finish("run", &["train.steps=4"], &[]);
    let [config, history] = ["config.toml", "events.jsonl"].map(|name| run.join(name));
    let before = fs::read(&config).unwrap();
    let words = job.fail(&["train.steps=3"], &["--resume"]);
    assert!(words.contains("the run has taken 4 steps, the job asks for 3"), "{words}");
    assert!(words.contains(text(&run)), "{words}");
    assert_eq!(fs::read(&config).unwrap(), before);
    // Exactly as many are a run that has finished: what is missing is written.
    fs::remove_dir_all(run.join("adapter")).unwrap();
    job.finish("run", &["train.steps=4"], &["--resume"]);
    assert!(run.join("adapter/pytorch_lora_weights.safetensors").is_file());
    assert_eq!(losses(&parsed(&fs::read_to_string(history).unwrap())).len(), 4);
}

#[test]
fn ctrl_c_saves_and_says_how_to_resume() {
    let job = Job::new();
    let set = ["train.steps=5", "train.gradient_accumulation=2", "output.save_every=off"];
    let whole = job.finish("whole", &set, &[]);
    let run = job.path("run");
    let mut command = job.command(&set, &[]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let journal = run.join("events.jsonl");
    wait_for(&mut child, || {
        fs::read_to_string(&journal).is_ok_and(|text| text.contains("\"step\":1,"))
    });
    interrupt(&child);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", said(&output));
    let asked = "stopping, then saving; Ctrl-C again gives it up\n";
    assert_eq!(said(&output).matches(asked).count(), 1, "{}", said(&output));
    let before = events(&run);
    let Some(Event::End(RunEnd { step, reason: EndReason::Interrupted, .. })) = before.last()
    else {
        panic!("{before:?}")
    };
    assert!((1..5).contains(step), "{step}");
    assert!(!run.join("adapter").exists());
    let page = String::from_utf8_lossy(&output.stdout);
    let again =
        format!("saved after step {step}; continue with\n  hearth train {}", text(&job.file));
    assert!(page.contains(&again), "{page}");
    assert!(page.contains("--set train.gradient_accumulation=2"), "{page}");
    let adapter = run.join(format!("checkpoints/step-{step:06}"));
    assert!(page.contains(&format!("the adapter so far is in\n  {}", text(&adapter))), "{page}");
    assert!(adapter.join("pytorch_lora_weights.safetensors").is_file());
    assert!(page.trim_end().ends_with("--resume"), "{page}");
    job.finish("run", &set, &["--resume"]);
    assert!(trained(&whole) == trained(&run), "other bytes than without a break");
}

#[test]
fn ctrl_c_while_images_are_encoded_ends_in_order() {
    let job = Job::new();
    let set = ["data.shuffle_tags=true", "data.keep_tags=0", "data.draw_count=12", "train.steps=1"];
    let run = job.path("run");
    let mut running = Running::begin(job.command(&set, &[]));
    wait_for(&mut running.child, || {
        fs::read_dir(run.join("cache/v2")).is_ok_and(|mut files| {
            files.any(|file| text(&file.unwrap().path()).ends_with(".safetensors"))
        })
    });
    interrupt(&running.child);
    let output = running.child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", said(&output));
    assert!(said(&output).contains("interrupted"), "{}", said(&output));
    assert!(said(&output).contains("stopping, no step has begun; "), "{}", said(&output));
    assert!(begins(&events(&run)).is_empty());
    // Nothing has begun, so nothing has to be resumed.
    job.finish("run", &set, &[]);
}

/// Waits until something is so, as long as the program runs.
fn wait_for(child: &mut Child, mut is_so: impl FnMut() -> bool) {
    while !is_so() {
        assert!(child.try_wait().unwrap().is_none(), "it ended before");
        sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_second_ctrl_c_leaves_at_once() {
    let job = Job::new();
    let mut running = Running::begin(job.command(&["train.steps=2"], &[]));
    assert!(running.until("validation"));
    // Both reach it before it can save: signals wait while it is stopped, one of each kind.
    signal(&running.child, &["STOP", "INT", "TERM", "CONT"]);
    // Said at once, also to who reads JSON and nothing else.
    let mut line = String::new();
    BufReader::new(running.child.stderr.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "stopping, then saving; Ctrl-C again gives it up\n");
    assert_eq!(running.code(), Some(130));
    let run = job.path("run");
    assert!(!events(&run).iter().any(|event| matches!(event, Event::End(_))));
    assert!(!run.join("checkpoints").exists());
}

#[test]
fn ctrl_c_is_heard_while_a_sample_is_drawn() {
    let job = Job::new();
    let set = ["sample.prompts=['a fox']", "sample.size=64", "sample.steps=900"];
    let mut running = Running::begin(job.command(&set, &[]));
    assert!(running.until("validation"));
    interrupt(&running.child);
    assert_eq!(running.code(), Some(130));
    let drawn = |events: &[Event]| -> Vec<u64> {
        let mut steps = Vec::new();
        for event in events {
            if let Event::ImageSample { step, .. } = event {
                steps.push(*step);
            }
        }
        steps
    };
    let before = events(&job.path("run"));
    assert!(drawn(&before).is_empty(), "{before:?}");
    let Some(Event::End(end)) = before.last() else { panic!("{before:?}") };
    assert_eq!((end.step, end.reason), (0, EndReason::Interrupted));
    // The run that resumes draws it.
    let run =
        job.finish("run", &[set[0], set[1], "sample.steps=1", "train.steps=2"], &["--resume"]);
    let after = events(&run);
    assert_eq!(drawn(&after), [0, 2]);
    let n_validations = after.iter().filter(|event| matches!(event, Event::Validation { .. }));
    assert_eq!(n_validations.count(), 2, "that of step 0 was complete");
}

#[test]
fn a_damaged_checkpoint_is_skipped() {
    let job = Job::new();
    let set = ["output.keep=1"];
    let run = job.finish("run", &set, &[]);
    let whole = trained(&run);
    assert_eq!(fs::read_dir(run.join("checkpoints")).unwrap().count(), 1);

    // The only one: nothing is left to go on from, and nothing is begun anew without a word.
    let last = run.join("checkpoints/step-000006/state.safetensors");
    flip_a_bit(&last);
    let words = job.fail(&set, &["--resume"]);
    assert!(words.contains("checkpoint is broken") && words.contains("step-000006"), "{words}");
    flip_a_bit(&last);
    job.finish("run", &set, &["--resume"]);
    assert!(whole == trained(&run), "other bytes than without the damage");

    job.finish("run", &["output.keep=2", "train.steps=8"], &["--resume"]);
    let longer = trained(&run);
    flip_a_bit(&run.join("checkpoints/step-000008/state.safetensors"));
    job.finish("run", &["output.keep=2", "train.steps=8"], &["--resume"]);
    assert!(longer == trained(&run), "other bytes than without the damage");
    let events = events(&run);
    let from: Vec<u64> = begins(&events).iter().map(|begin| begin.from_step).collect();
    assert_eq!(from, [0, 6, 6, 6]);
    let warnings = warnings(&events);
    let passed = warnings.iter().filter(|text| text.starts_with("checkpoint passed over: "));
    assert_eq!(passed.count(), 1, "{warnings:?}");
}

#[test]
fn a_damaged_progress_file_is_skipped() {
    let job = Job::new();
    let run = job.finish("run", &[], &[]);
    let whole = trained(&run);
    let path = run.join("checkpoints/step-000006/progress.json");
    let intact = fs::read_to_string(&path).unwrap();
    for (was, is) in [
        // One bit each: steps, updates and batches taken, what it belongs to.
        ("\"step\": 6", "\"step\": 2"),
        ("\"applied\": 6", "\"applied\": 4"),
        ("\"batches\": 6", "\"batches\": 7"),
        ("\"adapter.rank\": \"4\"", "\"adapter.rank\": \"5\""),
    ] {
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.contains(was), "{text}");
        fs::write(&path, text.replacen(was, is, 1)).unwrap();
        job.finish("run", &[], &["--resume"]);
        assert!(whole == trained(&run), "{is}: other bytes than without the damage");
        let events = events(&run);
        assert_eq!(begins(&events).last().unwrap().from_step, 4, "{is}");
        assert!(warnings(&events).iter().any(|text| text.starts_with("checkpoint passed over: ")));
    }
    // Of before it had a checksum.
    let before = intact.replacen("\"version\": 4", "\"version\": 3", 1);
    let own = before.lines().find(|line| line.contains("own_checksum")).unwrap();
    fs::write(&path, before.replacen(own, "", 1)).unwrap();
    job.finish("run", &[], &["--resume"]);
    assert!(whole == trained(&run), "other bytes than from a checkpoint of before");
    assert_eq!(begins(&events(&run)).last().unwrap().from_step, 6);
}

#[test]
fn a_file_among_checkpoints_and_a_moved_folder() {
    let job = Job::new();
    let checkpoints = job.path("run/checkpoints");
    fs::create_dir_all(&checkpoints).unwrap();
    for name in ["step-000002", "step-000099"] {
        fs::write(checkpoints.join(name), "mine").unwrap();
    }
    fs::write(job.path("run/config.toml"), HEADER).unwrap();
    let mut running = Running::begin(job.command(&["train.steps=4000"], &[]));
    assert!(running.until("checkpoint") && running.until("checkpoint"));
    for name in ["step-000002.set-aside", "step-000099"] {
        assert_eq!(fs::read_to_string(checkpoints.join(name)).unwrap(), "mine");
    }
    // What was saved by then lies in the folder that was moved.
    fs::rename(job.path("run"), job.path("moved")).unwrap();
    assert!(!running.until("end"));
    assert_eq!(running.code(), Some(1));
    assert!(!job.path("run").exists(), "the folder was made again");
    assert!(n_saved(&job.path("moved")) > 0);
}

#[test]
fn old_checkpoints_that_a_kill_left_are_removed() {
    let job = Job::new();
    let set = ["output.keep=1", "train.steps=2"];
    let run = job.finish("run", &set, &[]);
    // As if it had been killed between saving the last and removing the one before.
    let [old, last] = [1, 2].map(|step| run.join(format!("checkpoints/step-00000{step}")));
    copy_folder(&last, &old);
    job.finish("run", &set, &["--resume"]);
    assert_eq!(paths_in(&run.join("checkpoints")), [last]);
}

#[test]
fn samples_that_cannot_be_written_do_not_end_a_run() {
    let job = Job::new();
    let set = ["sample.prompts=['a fox']", "sample.size=64", "sample.steps=1", "train.steps=2"];
    fs::create_dir(job.path("run")).unwrap();
    fs::write(job.path("run/config.toml"), HEADER).unwrap();
    fs::write(job.path("run/samples"), "mine").unwrap();
    let run = job.finish("run", &set, &[]);
    assert_eq!(fs::read_to_string(run.join("samples")).unwrap(), "mine");
    let warnings = warnings(&events(&run));
    let told = warnings.iter().filter(|text| text.starts_with("samples are not written: "));
    assert_eq!(told.count(), 1, "{warnings:?}");
}

#[test]
fn a_state_in_shards_is_whole_or_skipped() {
    let job = Job::new();
    let whole = job.finish("whole", &["train.ema=0.9"], &[]);
    let set =
        ["train.ema=0.9", "output.max_shard_size=4KB", "output.save_every=2", "output.keep=2"];
    let run = job.finish("run", &set, &[]);
    assert_eq!(trained(&whole)[0], trained(&run)[0], "the adapter does not depend on files");
    let expected = trained(&run);
    let last = run.join("checkpoints/step-000006");
    assert!(n_shards(&last) > 2);
    for damage in ["a bit", "a shard", "the index", "a checksum"] {
        let shard = last.join(format!("state-00002-of-{:05}.safetensors", n_shards(&last)));
        match damage {
            "a bit" => flip_a_bit(&shard),
            "a shard" => fs::remove_file(&shard).unwrap(),
            "the index" => fs::remove_file(last.join("state.safetensors.index.json")).unwrap(),
            _ => {
                let progress = fs::read_to_string(last.join("progress.json")).unwrap();
                let name = text(Path::new(shard.file_name().unwrap())).to_owned();
                fs::write(last.join("progress.json"), progress.replace(&name, "other")).unwrap();
            }
        }
        job.finish("run", &set, &["--resume"]);
        assert!(expected == trained(&run), "{damage}: other bytes than without the damage");
        let events = events(&run);
        assert_eq!(begins(&events).last().unwrap().from_step, 4, "{damage}");
    }
}

/// Shards of a checkpoint's state.
fn n_shards(checkpoint: &Path) -> usize {
    let is_shard = |path: &&PathBuf| text(path).contains("/state-");
    paths_in(checkpoint).iter().filter(is_shard).count()
}

#[test]
fn a_run_that_ended_early_is_not_trained_further() {
    let job = Job::new();
    let set = [
        "optimizer.learning_rate=1e-12",
        "train.validate_every=1",
        "train.stop_after_plateau=2",
        "output.save_every=off",
    ];
    let run = job.finish("run", &set, &[]);
    let before = trained(&run);
    // As if it had been killed before that.
    fs::remove_dir_all(run.join("adapter")).unwrap();
    job.finish("run", &set, &["--resume"]);
    assert!(before == trained(&run), "other bytes than without a break");
    let events = events(&run);
    let is_early = |event: &&Event| {
        matches!(event, Event::End(RunEnd { reason: EndReason::Plateau, step: 2, .. }))
    };
    assert_eq!(events.iter().filter(is_early).count(), 2, "{events:?}");
}

fn flip_a_bit(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 8;
    fs::write(path, bytes).unwrap();
}

#[test]
fn another_job_does_not_resume_this_one() {
    let job = Job::new();
    let run = job.finish("run", &["train.steps=2"], &[]);
    let config = fs::read(run.join("config.toml")).unwrap();
    let refuses = |set: &[&str], arguments: &[&str], parts: &[&str]| {
        let words = job.fail(set, arguments);
        for part in parts {
            assert!(words.contains(part), "{part:?} is missing from {words}");
        }
    };
    let resume = ["--resume"];
    let wider = ["adapter.rank=8", "adapter.alpha=4"];
    refuses(&wider, &resume, &["adapter.rank was 4, is 8", "step-000002"]);
    refuses(&["train.seed=7"], &resume, &["train.seed was 42, is 7"]);
    refuses(&[], &[], &["run"]);
    let base = other_base();
    let path = format!("base.path='{}'", text(base.path()));
    let changed = "the base has changed: 1 changed (context_embedder.bias)";
    refuses(&[&path], &resume, &[changed]);
    fs::write(job.path("images/0000.txt"), "another caption").unwrap();
    refuses(&[], &resume, &["has changed: 1 changed (caption of 0000.png)"]);
    // Of a run that kept no parts it is only known that something differs.
    fs::remove_file(run.join(".inputs.json")).unwrap();
    refuses(&[], &resume, &["the dataset was "]);
    assert_eq!(fs::read(run.join("config.toml")).unwrap(), config);
    check_memory(&events(&run));
}

#[test]
fn added_and_removed_images_are_named() {
    let job = Job::new();
    job.finish("drawn", &["train.steps=1"], &[]);
    job.remove("draw = 'neon'\ndraw_count = 5\n");
    job.finish("run", &["train.steps=1"], &[]);
    for end in ["png", "txt"] {
        let at = |name: &str| job.path("images").join(name).with_extension(end);
        fs::rename(at("0001"), at("fox")).unwrap();
    }
    let words = job.fail(&["train.steps=2"], &["--resume"]);
    let named = "has changed: 1 added (fox.png), 1 removed (0001.png): ";
    assert!(words.contains(named), "{words}");
}

#[test]
fn the_learning_rate_changes_when_it_is_typed() {
    let job = Job::new();
    let run = job.finish("run", &["train.steps=2"], &[]);
    let file = fs::read_to_string(&job.file).unwrap();
    fs::write(&job.file, file.replace("1e-2", "2e-3")).unwrap();
    // Not by a file, which may have changed for another reason.
    let words = job.fail(&[], &["--resume"]);
    assert!(words.contains("optimizer.learning_rate was 0.01, is 0.002"), "{words}");
    assert!(words.contains("--resume --set optimizer.learning_rate=VALUE"), "{words}");
    let typed = ["train.steps=4", "optimizer.learning_rate=2e-3", "optimizer.lr_scheduler=wsd"];
    // Whatever else changed is refused as before.
    let other = [&typed[..], &["train.seed=7"]].concat();
    assert!(job.fail(&other, &["--resume"]).contains("another job: train.seed was 42, is 7"));
    job.finish("run", &typed, &["--resume"]);
    let events = events(&run);
    let told = warnings(&events).join("; ");
    for part in [
        "optimizer.learning_rate was 0.01, is 0.002 from here on",
        "optimizer.lr_scheduler was \"constant\", is \"wsd\" from here on",
        "optimizer.decay was not set, is 0.2 from here on",
    ] {
        assert_eq!(told.matches(part).count(), 1, "{part:?} in {told}");
    }
    let rates: Vec<f64> = events.iter().filter_map(rate).collect();
    assert_eq!(rates[..3], [0.01, 0.01, 0.002]);
    // What was decided then holds from there on.
    let words = job.fail(&["train.steps=4", "optimizer.learning_rate=1e-2"], &["--resume"]);
    assert!(words.contains("optimizer.lr_scheduler was \"wsd\", is \"constant\""), "{words}");
    job.finish("run", &typed, &["--resume"]);
}

fn rate(event: &Event) -> Option<f64> {
    match event {
        Event::Step(step) => Some(step.learning_rate),
        _ => None,
    }
}

/// The tiny pipeline with one bit of its transformer changed.
fn other_base() -> tempfile::TempDir {
    let base = copy();
    let path: PathBuf = base.path().join("transformer/diffusion_pytorch_model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let (length, _) = bytes.split_first_chunk().unwrap();
    let first = 8 + u64::from_le_bytes(*length) as usize;
    bytes[first] ^= 1;
    fs::write(path, bytes).unwrap();
    base
}

#[test]
fn two_runs_do_not_share_a_folder() {
    let job = Job::new();
    let set = ["train.steps=1000", "output.save_every=off"];
    let mut running = Running::begin(job.command(&set, &[]));
    assert!(running.until("step"));
    let words = job.fail(&set, &["--resume"]);
    assert!(words.contains(text(&job.path("run"))), "{words}");
    interrupt(&running.child);
    // Programs read this: nothing but events may be said, to the last line.
    let rest: String = (&mut running.lines).lines().map(|line| line.unwrap() + "\n").collect();
    assert!(matches!(parsed(&rest).last(), Some(Event::End(_))), "{rest}");
    assert_eq!(running.code(), Some(130));
}
