//! Text encoders that are trained together with the model: memory, resuming, samples, and what is refused. That the numbers
//! are those of the reference is shown in `twin`.

use std::fs;
use std::path::Path;

use super::{Job, check_memory, events, losses, trained, warnings};
use crate::models::golden;
use crate::{command, printed, said, text};

const BOTH: &str = "adapter.text_encoders=['clip-l', 'clip-g']";

/// With another learning rate than the model's, captions that change, and everything that is drawn in between.
const ALL: [&str; 9] = [
    BOTH,
    "adapter.text_encoder_learning_rate=5e-3",
    "adapter.dropout=0.1",
    "train.ema=0.9",
    "data.caption_dropout=0.3",
    "data.shuffle_tags=true",
    "sample.prompts=['a fox', 'two boats']",
    "sample.size=64",
    "sample.steps=2",
];

/// Beside what decides about memory in a step: which text encoders are trained, and where they are.
#[test]
fn steps_take_what_was_planned() {
    let (sd3, flux) = (Job::new(), Job::flux());
    let sets = [
        (&sd3, &[BOTH][..]),
        (&sd3, &["adapter.text_encoders=['clip-g']", "base.dtype=bf16"]),
        (&sd3, &[BOTH, "train.recompute=block", "adapter.text_encoder_targets=['q_proj', 'fc1']"]),
        (&sd3, &[BOTH, "train.recompute=alternate", "train.micro_batch=1", "base.quantise=int8"]),
        (&sd3, &[BOTH, "train.recompute=keep_attention", "machine.offload=blocks"]),
        (&flux, &["adapter.text_encoders=['clip-l']"]),
        (&flux, &["adapter.text_encoders=['clip-l']", "train.recompute=block", "base.dtype=f16"]),
    ];
    for (at, (job, set)) in sets.into_iter().enumerate() {
        let run = job.finish(&format!("run-{at}"), &[set, &["train.steps=2"]].concat(), &[]);
        let [taken, planned] = check_memory(&events(&run));
        assert_eq!(taken, planned, "{set:?}");
    }
}

/// Micro-batches and recomputed blocks, of text encoders too, give the same losses.
#[test]
fn less_memory_gives_the_same_losses() {
    let job = Job::new();
    let run = |name: &str, set: &[&str]| {
        let set = [&[BOTH, "train.steps=4", "adapter.dropout=0.1"], set].concat();
        let run = job.finish(name, &set, &[]);
        (losses(&events(&run)), check_memory(&events(&run))[0])
    };
    let (whole, most) = run("whole", &["train.recompute=none"]);
    for recompute in ["block", "keep_attention", "alternate"] {
        let (found, taken) = run(recompute, &[&*format!("train.recompute={recompute}")]);
        assert_eq!(found, whole, "{recompute}");
        assert!(taken < most, "{recompute}: {taken} {most}");
    }
    let (apart, _) = run("apart", &["train.recompute=none", "train.micro_batch=1"]);
    let differs = |(a, b): (&f64, &f64)| (a / b - 1.0).abs();
    let worst = apart.iter().zip(&whole).map(differs).fold(0.0, f64::max);
    assert!(worst < 1e-5, "{worst:e}");
}

#[test]
fn a_run_goes_on_as_if_it_had_not_ended() {
    for (job, more) in [(Job::new(), BOTH), (Job::flux(), "adapter.text_encoders=['clip-l']")] {
        let of = |steps: &'static str| [&ALL[1..], &[more, steps]].concat();
        let whole = job.finish("whole", &of("train.steps=6"), &[]);
        job.finish("broken", &of("train.steps=3"), &[]);
        let broken = job.finish("broken", &of("train.steps=6"), &["--resume"]);
        assert!(trained(&whole) == trained(&broken), "other bytes than without a break");
        let images = |run: &Path| fs::read(run.join("samples/step-000006-2.png")).unwrap();
        assert_eq!(images(&whole), images(&broken));
    }
}

/// What was learnt by text encoders is seen in samples drawn in training, and by whoever reads the adapter.
#[test]
fn samples_are_those_of_the_exported_adapter() {
    let job = Job::new();
    let set = ["train.steps=4", "sample.prompts=['a fox']", "sample.size=64", "sample.steps=2"];
    let formats = "output.formats=['diffusers', 'kohya', 'comfyui']";
    let set = [&[BOTH, formats, "sample.every=4", "sample.seed=7"], &set[..]].concat();
    let run = job.finish("run", &set, &[]);
    let base = golden().join("pipeline");
    let drawn = |adapter: &Path, name: &str| {
        let out = job.path(&format!("{name}.png"));
        let base = ["sample", "--base", text(&base), "--adapter", text(adapter), "--dtype", "f32"];
        let image = ["--prompt", "a fox", "--size", "64x64", "--steps", "2", "--seed", "7"];
        printed(&[&base[..], &image, &["--out", text(&out)]].concat());
        pixels(&out)
    };
    let in_training = pixels(&run.join("samples/step-000004-1.png"));
    let apart = |a: &[u8], b: &[u8]| a.iter().zip(b).map(|(a, b)| a.abs_diff(*b)).max().unwrap();
    let files = fs::read_dir(run.join("adapter")).unwrap().map(|entry| entry.unwrap().path());
    let files: Vec<_> = files.collect();
    assert_eq!(files.len(), 3, "{files:?}");
    for adapter in files {
        let name = adapter.file_stem().unwrap().to_str().unwrap();
        assert!(apart(&drawn(&adapter, name), &in_training) <= 1, "{name}");
    }
    let checkpoint = drawn(&run.join("checkpoints/step-000004"), "checkpoint");
    assert!(apart(&checkpoint, &in_training) <= 1);
    // Without the text encoders' part it is another image.
    let peft = job.path("peft");
    let adapter = run.join("adapter/pytorch_lora_weights.safetensors");
    let export = ["export", text(&adapter), "--base", text(&base), "--out", text(&peft)];
    printed(&[&export[..], &["--format", "peft"]].concat());
    assert!(apart(&drawn(&peft.join("peft"), "without"), &in_training) > 1);
}

fn pixels(path: &Path) -> Vec<u8> {
    let file = std::io::BufReader::new(fs::File::open(path).unwrap());
    let mut reader = png::Decoder::new(file).read_info().unwrap();
    let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
    reader.next_frame(&mut pixels).unwrap();
    pixels
}

/// The cache is that of a job without trained text encoders: nothing is encoded again.
#[test]
fn the_cache_is_that_of_other_jobs() {
    let job = Job::new();
    let folder = format!("data.cache='{}'", text(&job.path("cache")));
    let entries = || {
        let files = fs::read_dir(job.path("cache/v2")).unwrap();
        let names = files.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.filter(|name| name.ends_with(".safetensors")).collect();
        names.sort();
        names
    };
    job.finish("plain", &["train.steps=1", &folder], &[]);
    let before = entries();
    job.finish("encoders", &["train.steps=1", &folder, BOTH], &[]);
    assert!(!before.is_empty() && entries() == before);
}

#[test]
fn what_cannot_be_trained_is_refused() {
    let (sd3, qwen) = (Job::new(), Job::qwen_image());
    let none = "names clip-l, which cannot be trained; of a Qwen-Image model none can";
    for (job, set, expected) in [
        (
            &sd3,
            &["adapter.text_encoders=['t5']"][..],
            "names t5, which cannot be trained; of an SD3 model: clip-l, clip-g",
        ),
        (&sd3, &["adapter.text_encoders=['clip']"], "names clip, which cannot be trained"),
        (&qwen, &["adapter.text_encoders=['clip-l']"], none),
        (
            &sd3,
            &[BOTH, "output.formats=['diffusers', 'peft']"],
            "PEFT hold the adapter of one model",
        ),
        (&sd3, &[BOTH, "adapter.kind=dora"], "adapter.text_encoders"),
        (&sd3, &[BOTH, "adapter.kind=lokr"], "adapter.text_encoders"),
        (
            &sd3,
            &["adapter.text_encoder_learning_rate=1e-5"],
            "has no effect with adapter.text_encoders = []",
        ),
        (&sd3, &[BOTH, "adapter.text_encoder_targets=['to_q']"], "adapter.text_encoder_targets"),
    ] {
        let out = job.path("none");
        let output = job.run(set, &["--out", text(&out)]);
        let words = said(&output);
        assert!(!output.status.success() && words.contains("\nhint: "), "{words}");
        assert!(words.contains(expected), "{expected}: {words}");
    }
}

/// A plan needs no files of a published model, also where its text encoders are trained. All that could be chosen is typed.
#[test]
fn a_published_model_is_planned() {
    let job = Job::new();
    let step_bytes = |encoders: &str| {
        let chosen = ["base.quantise=none", "base.quantise_encoders=none", "machine.offload=none"];
        let chosen = [&chosen[..], &["train.micro_batch=1", "train.recompute=block"]].concat();
        let encoders = format!("adapter.text_encoders={encoders}");
        let mut plan = command(&["plan", text(&job.file), "--json", "--limit", "200GB"]);
        plan.args(["--set", "base.path=stable-diffusion-3.5-medium", "--set", &encoders]);
        let output = plan.args(chosen.iter().flat_map(|set| ["--set", set])).output().unwrap();
        let json: serde_json::Value =
            serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", said(&output)));
        let phases = json["phases"].as_array().unwrap();
        let of_step =
            phases.iter().find(|phase| phase["name"].as_str().unwrap().starts_with("train"));
        of_step.unwrap()["peak_bytes"].as_u64().unwrap()
    };
    // CLIP-L and CLIP-G in 16 bits are 1.6 GB; their embeddings are in f32, 0.2 GB more.
    assert!(step_bytes("['clip-l', 'clip-g']") > step_bytes("[]") + 1_700_000_000);
}

/// Layers of text encoders are counted, and one that gets no gradient would be named.
#[test]
fn layers_of_text_encoders_are_counted() {
    let job = Job::new();
    let run = |name: &str, set: &[&str]| {
        let run = job.finish(name, &[set, &["train.steps=1"]].concat(), &[]);
        let all = events(&run);
        assert!(!warnings(&all).iter().any(|said| said.contains("gradient")), "{all:?}");
        super::begins(&all)[0].layers
    };
    // Two encoders of two blocks with four layers each.
    assert_eq!(run("with", &[BOTH]), run("without", &[]) + 16);
}
