//! What was planned against what was taken, for jobs of all kinds and in no more memory than planned.

use serde_json::Value;
use trainer::event::Event;

use super::{Job, check_memory, events};
use crate::{command, printed, said, text};

/// Numbers that look random and are the same in every run.
struct Dice(u64);

impl Dice {
    fn pick<'a>(&mut self, of: &[&'a str]) -> &'a str {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        of[(self.0 >> 33) as usize % of.len()]
    }
}

/// A value for each key that memory depends on.
fn settings(seed: u64) -> Vec<String> {
    let mut dice = Dice(seed);
    let keys: [(&str, &[&str]); 13] = [
        ("adapter.rank", &["1", "4", "7", "16", "32"]),
        ("adapter.kind", &["lora", "lora", "dora"]),
        ("adapter.dropout", &["0", "0", "0.1"]),
        ("base.dtype", &["f32", "bf16", "f16"]),
        ("base.quantise", &["none", "none", "int8", "nf4", "fp8"]),
        ("data.resolution", &["32", "48", "64", "96"]),
        ("train.batch_size", &["1", "2", "3", "4"]),
        ("train.gradient_accumulation", &["1", "1", "2"]),
        ("train.recompute", &["none", "queries", "alternate", "block"]),
        ("train.micro_batch", &["1", "2", "4"]),
        ("train.ema", &["off", "0.9"]),
        ("optimizer.kind", &["adamw", "adamw_8bit"]),
        ("machine.offload", &["none", "none", "blocks"]),
    ];
    keys.into_iter().map(|(key, values)| format!("{key}={}", dice.pick(values))).collect()
}

fn check(seeds: std::ops::Range<u64>) {
    let job = Job::new();
    for seed in seeds {
        let settings = settings(seed);
        let mut set: Vec<&str> = settings.iter().map(String::as_str).collect();
        set.push("train.steps=2");
        let run = job.finish(&format!("run-{seed}"), &set, &[]);
        let [taken, planned] = check_memory(&events(&run));
        let share = taken as f64 / planned as f64;
        assert!((0.97..=1.0).contains(&share), "{taken} of {planned}: {set:?}");
    }
}

#[test]
fn ten_jobs_take_what_was_planned() {
    check(0..10);
}

#[test]
fn ten_other_jobs_take_what_was_planned() {
    check(10..20);
}

/// Large enough for steps to decide what is taken, beside what the program itself holds.
const LARGE: [&str; 4] =
    ["data.resolution=192", "data.draw_count=17", "train.batch_size=16", "train.steps=2"];

fn plan(job: &Job, set: &[&str], arguments: &[&str]) -> (Option<i32>, Value) {
    let mut command = command(&[&["plan", text(&job.file), "--json"], arguments].concat());
    command.args(set.iter().flat_map(|value| ["--set", value]));
    let output = command.output().unwrap();
    let json = serde_json::from_slice(&output.stdout);
    (output.status.code(), json.unwrap_or_else(|_| panic!("{}", said(&output))))
}

fn bytes(plan: &Value, key: &str) -> u64 {
    plan[key].as_u64().unwrap_or_else(|| panic!("{key}: {plan:#}"))
}

#[test]
fn the_planned_size_is_enough_and_less_is_another_plan_or_none() {
    let job = Job::new();
    let (_, roomy) = plan(&job, &LARGE, &[]);
    let [peak, host] = ["peak_bytes", "host_bytes"].map(|key| bytes(&roomy, key));
    let limit = format!("{}B", peak + host);
    let (code, exact) = plan(&job, &LARGE, &["--limit", &limit]);
    assert_eq!((code, &exact["chosen"]), (Some(0), &roomy["chosen"]));
    job.finish("exact", &LARGE, &["--limit", &limit]);

    let limit = format!("{}B", peak * 9 / 10 + host);
    let (code, tight) = plan(&job, &LARGE, &["--limit", &limit]);
    assert_eq!(code, Some(0), "{tight:#}");
    assert_ne!(tight["chosen"], roomy["chosen"]);
    assert!(bytes(&tight, "peak_bytes") <= peak * 9 / 10);
    let run = job.finish("tight", &LARGE, &["--limit", &limit]);
    let decided = std::fs::read_to_string(run.join("config.toml")).unwrap();
    assert!(decided.contains("# chosen by the plan"), "{decided}");

    let limit = format!("{}B", peak / 10 + host);
    let (code, none) = plan(&job, &LARGE, &["--limit", &limit]);
    let shortfall = bytes(&none, "needed_bytes") - bytes(&none, "limit_bytes");
    assert_eq!((code, bytes(&none, "shortfall_bytes")), (Some(1), shortfall));
    let words = job.fail(&LARGE, &["--limit", &limit, "--out", text(&job.path("none"))]);
    assert!(words.contains("does not fit"), "{words}");
    assert!(!job.path("none/checkpoints").exists());
}

#[test]
fn a_run_resumes_in_the_precision_it_began_with() {
    let job = Job::new();
    let (_, roomy) = plan(&job, &["base.quantise=nf4", "train.recompute=block"], &[]);
    let limit = format!("{}B", bytes(&roomy, "total_bytes"));
    let set = ["base.quantise=nf4"];
    job.finish("run", &[&set[..], &["train.steps=2"]].concat(), &["--limit", &limit]);
    // Nothing says nf4 now but the run's own folder.
    let run = job.finish("run", &["train.steps=4"], &["--resume"]);
    let decided = std::fs::read_to_string(run.join("config.toml")).unwrap();
    assert!(decided.contains("quantise = \"nf4\" # chosen by the plan"), "{decided}");
}

/// What comes in a run comes as often as its times say, and `hearth plan` says the same before.
#[test]
fn times_count_what_a_run_does() {
    let job = Job::new();
    let set = ["sample.prompts=[\"a fox\",\"a cat\"]", "sample.every=4", "sample.size=64"];
    let set = [&set[..], &["sample.steps=2", "train.steps=7"]].concat();
    let (_, planned) = plan(&job, &set, &[]);
    let run = job.finish("run", &set, &[]);
    let (mut steps, mut validations, mut samples, mut saves) = (0, 0, 0, 0);
    let all = events(&run);
    for event in &all {
        match event {
            Event::Step(_) => steps += 1,
            Event::Validation { .. } => validations += 1,
            Event::ImageSample { .. } => samples += 1,
            Event::Checkpoint { .. } => saves += 1,
            _ => {}
        }
    }
    let times = super::begins(&all)[0].times;
    let counted = [times.steps, times.validation, times.samples, times.saving].map(|of| of.times);
    assert_eq!(counted, [steps, validations, samples / 2, saves]);
    assert_eq!(counted, [7, 3, 3, 4]);
    let total = times.total_secs().unwrap();
    assert!(times.encode_secs > 0.0 && times.load_secs > 0.0 && total > 0.0, "{times:?}");
    for key in ["steps", "validation", "samples", "saving"] {
        assert_eq!(
            planned["times"][key]["times"],
            serde_json::to_value(times).unwrap()[key]["times"]
        );
    }
    let total = planned["total_secs"].as_f64().unwrap();
    let page = printed(
        &[
            &["plan", text(&job.file)][..],
            &set.iter().flat_map(|value| ["--set", value]).collect::<Vec<_>>(),
        ]
        .concat(),
    );
    assert!(total > 0.0 && page.contains("total"), "{page}");
    for part in ["encode", "7 steps at", "validation", "samples", "saving", "bench calibrate"] {
        assert!(page.contains(part), "{part:?} is missing from {page}");
    }
}
