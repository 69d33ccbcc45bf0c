//! Training a model that is distilled to few steps: the warning, and the adapter that acts in training alone.

use std::fs;

use super::{Job, events, losses};
use crate::{said, text, z_image};

const SAMPLES: [&str; 6] = [
    "train.steps=1",
    "sample.prompts=['a fox']",
    "sample.every=1",
    "sample.size=[64, 64]",
    "sample.steps=2",
    // Nothing is learnt, to any bit that an image shows.
    "optimizer.learning_rate=1e-12",
];

fn training_adapter() -> String {
    let file = z_image::golden().join("train/training_adapter.safetensors");
    format!("base.training_adapter='{}'", text(&file))
}

/// Losses are those with it; samples and what is written are those without.
#[test]
fn an_adapter_of_training_is_in_no_sample() {
    let job = Job::z_image();
    let plain = job.finish("plain", &SAMPLES, &[]);
    let beside = job.finish("beside", &[&SAMPLES[..], &[&training_adapter()]].concat(), &[]);
    assert_ne!(losses(&events(&plain)), losses(&events(&beside)));
    let image = |run: &std::path::Path| fs::read(run.join("samples/step-000001-1.png")).unwrap();
    assert!(image(&plain) == image(&beside), "the sample was drawn with it");
    let adapter = "adapter/pytorch_lora_weights.safetensors";
    let size = |run: &std::path::Path| fs::metadata(run.join(adapter)).unwrap().len();
    assert_eq!(size(&plain), size(&beside));
}

#[test]
fn training_a_distilled_model_as_it_is_is_warned_of() {
    let job = Job::z_image();
    fs::rename(job.path("base"), job.path("my-turbo")).unwrap();
    let base = format!("base.path='{}'", text(&job.path("my-turbo")));
    let warned = "a Z-Image Turbo is distilled to few steps, which training undoes";
    for (adapter, is_warned) in [("base.dtype=f32", true), (&training_adapter(), false)] {
        let folder = job.path(if is_warned { "plain" } else { "beside" });
        let output = job.run(&[&base, adapter, "train.steps=1"], &["--out", text(&folder)]);
        assert!(output.status.success(), "{}", said(&output));
        let journal = fs::read_to_string(folder.join("events.jsonl")).unwrap();
        assert_eq!(journal.contains(warned), is_warned, "{journal}");
        assert_eq!(journal.contains("ostris/zimage_turbo_training_adapter"), is_warned);
    }
}

#[test]
fn an_adapter_of_training_is_beside_a_lora_alone() {
    let job = Job::z_image();
    let words = job.fail(&["adapter.kind=dora", &training_adapter()], &[]);
    let expected = "adapter.kind is dora, and base.training_adapter acts beside a LoRA alone";
    assert!(words.contains(expected), "{words}");
}

/// A run is not resumed with another.
#[test]
fn another_adapter_of_training_is_noticed() {
    let job = Job::z_image();
    let adapter = training_adapter();
    job.finish("run", &["train.steps=2", &adapter], &[]);
    let run = job.path("run");
    let words = job.fail(&["train.steps=4"], &["--out", text(&run), "--resume"]);
    assert!(words.contains("training adapter"), "{words}");
    job.finish("run", &["train.steps=4", &adapter], &["--resume"]);
    let whole = job.finish("whole", &["train.steps=4", &adapter], &[]);
    assert_eq!(losses(&events(&run)), losses(&events(&whole)));
}
