//! Runs with every optimizer beside `AdamW`: planned memory, resume to the bit, and where schedule-free ones evaluate.

use std::fs;
use std::path::Path;

use trainer::event::Event;
use weights::Catalog;
use weights::load::load_f32;

use super::{Job, events, last_state, losses, paths_in, trained};

const KINDS: [(&str, &str); 4] = [
    ("lion", "optimizer.weight_decay=0.1"),
    ("adafactor", "optimizer.scale_parameter=true"),
    ("adamw_schedule_free", "optimizer.warmup_steps=3"),
    ("prodigy", "optimizer.learning_rate=1"),
];

/// Every phase took what was planned.
fn check_planned(run: &Path) {
    let mut n_phases = 0;
    for event in events(run) {
        if let Event::Memory { phase, planned_bytes, peak_bytes } = event {
            assert_eq!(planned_bytes, peak_bytes, "{phase}");
            n_phases += 1;
        }
    }
    assert!(n_phases > 3);
}

#[test]
fn adapters_are_planned_and_resumed_to_the_bit() {
    let job = Job::new();
    for (kind, setting) in KINDS {
        let kind = format!("optimizer.kind={kind}");
        let prompts = "sample.prompts=['a fox']";
        let samples = [prompts, "sample.size=64", "sample.every=2", "sample.steps=1"];
        let set = [&[&*kind, setting][..], &samples].concat();
        let run = |out: &str, steps: &str, arguments: &[&str]| {
            let steps = format!("train.steps={steps}");
            job.finish(&format!("{out}-{kind}"), &[&set[..], &[&steps]].concat(), arguments)
        };
        let whole = run("whole", "6", &["--threads", "1"]);
        run("run", "3", &[]);
        let resumed = run("run", "6", &["--resume"]);
        assert_eq!(losses(&events(&whole)), losses(&events(&resumed)), "{kind}");
        assert!(trained(&whole) == trained(&resumed), "{kind}: other bytes than without a break");
        check_planned(&whole);
        let all = losses(&events(&whole));
        assert!(all.iter().all(|loss| loss.is_finite()) && all.len() == 6, "{kind}: {all:?}");
    }
}

#[test]
fn full_fine_tunes_are_planned_and_resumed_to_the_bit() {
    let job = Job::new();
    job.remove("rank = 4\n");
    for (kind, setting) in KINDS {
        let kind = format!("optimizer.kind={kind}");
        let set = ["adapter.kind=full", "train.batch_size=1", &kind, setting];
        let run = |out: &str, steps: &str, arguments: &[&str]| {
            let steps = format!("train.steps={steps}");
            job.finish(&format!("{out}-{kind}"), &[&set[..], &[&steps]].concat(), arguments)
        };
        let whole = run("whole", "4", &[]);
        run("run", "2", &[]);
        let resumed = run("run", "4", &["--resume"]);
        assert!(last_state(&whole) == last_state(&resumed), "{kind}: other bytes");
        check_planned(&whole);
    }
}

/// A checkpoint has the parameters in training; adapters and models have their average.
#[test]
fn schedule_free_results_are_averages() {
    let kind = "optimizer.kind=adamw_schedule_free";
    let job = Job::new();
    let run = job.finish("lora", &[kind, "optimizer.betas=[0.8, 0.99]"], &[]);
    let last = paths_in(&run.join("checkpoints")).pop().unwrap();
    let adapter = Catalog::open(&run.join("adapter/pytorch_lora_weights.safetensors")).unwrap();
    assert!(check_average(&last, &adapter, |name| format!("transformer.{name}")) > 10);
    let job = Job::new();
    job.remove("rank = 4\n");
    let set = ["adapter.kind=full", kind, "optimizer.betas=[0.8, 0.99]", "train.steps=3"];
    let run = job.finish("full", &set, &[]);
    let last = paths_in(&run.join("checkpoints")).pop().unwrap();
    let model = run.join("model/transformer/diffusion_pytorch_model.safetensors");
    assert!(check_average(&last, &Catalog::open(&model).unwrap(), str::to_owned) > 10);
}

/// Compares a checkpoint's average with what was exported; returns how many tensors differ from those in training.
fn check_average(checkpoint: &Path, exported: &Catalog, name: impl Fn(&str) -> String) -> usize {
    let state = fs::read_dir(checkpoint).unwrap().map(|entry| entry.unwrap().path());
    let state = state.filter(|path| path.extension().is_some_and(|it| it == "safetensors"));
    let state = state.map(|path| Catalog::open(&path).unwrap());
    let state =
        state.into_iter().find(|catalog| catalog.find("optimizer.weights").is_ok()).unwrap();
    let values = |catalog: &Catalog, name: &str| {
        let tensor = catalog.find(name).unwrap();
        load_f32(catalog, tensor, 0..tensor.numel()).unwrap()
    };
    let mut n_moved = 0;
    for (stored, of) in state.metadata.iter().filter(|(key, _)| key.starts_with("parameter.")) {
        let (y, index) = (values(&state, stored), stored.trim_start_matches("parameter."));
        let z = values(&state, &format!("optimizer.{index}.z"));
        let found = values(exported, &name(of));
        for ((y, z), found) in y.iter().zip(&z).zip(&found) {
            let x = f64::from(*y) + (1.0 - 1.0 / 0.8) * (f64::from(*z) - f64::from(*y));
            assert!((x - f64::from(*found)).abs() < 1e-6 * x.abs().max(0.1), "{of}: {x} {found}");
        }
        n_moved += usize::from(y != found);
    }
    n_moved
}

#[test]
fn prodigy_reports_the_rate_it_found() {
    let job = Job::new();
    let set = ["optimizer.kind=prodigy", "optimizer.learning_rate=1", "train.steps=40"];
    let run = job.finish("run", &set, &[]);
    let rate = |event: &Event| match event {
        Event::Step(step) => Some(step.learning_rate),
        _ => None,
    };
    let rates: Vec<f64> = events(&run).iter().filter_map(rate).collect();
    assert!((rates[0] / 1e-6 - 1.0).abs() < 1e-3, "{rates:?}");
    assert!(rates.is_sorted() && rates[39] > 1e-4, "{rates:?}");
}

#[test]
fn what_excludes_each_other_is_named() {
    let job = Job::new();
    for (set, problem) in [
        (
            &["optimizer.kind=adamw_schedule_free", "train.ema=0.9"][..],
            "`optimizer.kind = \"adamw_schedule_free\"` is not possible with `train.ema = 0.9`",
        ),
        (
            &["optimizer.kind=adamw_schedule_free", "optimizer.lr_scheduler=cosine"],
            "with `optimizer.lr_scheduler = \"cosine\"`",
        ),
        (
            &["optimizer.kind=adafactor", "optimizer.betas=[0.9, 0.99]"],
            "`optimizer.betas` has no effect with optimizer.kind = \"adafactor\"",
        ),
        (
            &["optimizer.kind=lion", "optimizer.d_coef=2"],
            "`optimizer.d_coef` has no effect with optimizer.kind = \"lion\"",
        ),
        (
            &["optimizer.kind=prodigy", "cluster.sync_every=4"],
            "`cluster.sync_every = 4` is not possible with `optimizer.kind = \"prodigy\"`",
        ),
        (
            &["optimizer.kind=adamw_schedule_free", "cluster.shard_optimizer=true"],
            "`cluster.shard_optimizer = true` is not possible with `optimizer.kind",
        ),
        (
            &["optimizer.lr_scheduler=polynomial", "optimizer.lr_end=0.1"],
            "`optimizer.lr_end = 0.1` is not possible with `optimizer.learning_rate = 0.01`",
        ),
        (
            &["optimizer.lr_scheduler=cosine", "optimizer.cycles=3"],
            "`optimizer.cycles` has no effect with optimizer.lr_scheduler = \"cosine\"",
        ),
    ] {
        let words = job.fail(set, &[]);
        assert!(words.contains(problem), "{words}");
    }
    job.remove("rank = 4\n");
    let set = ["adapter.kind=full", "train.fused_backward_pass=true", "optimizer.kind=prodigy"];
    let words = job.fail(&set, &[]);
    assert!(words.contains("with `optimizer.kind = \"prodigy\"`"), "{words}");
}
