//! Every checkpoint can be used: it holds the adapter of its step, as libraries read it, or becomes a
//! model; and the best one is kept.

use std::fs;
use std::path::{Path, PathBuf};

use trainer::event::{BestCheckpoint, Event, RunEnd};

use super::{Job, events, texts};
use crate::models::at;
use crate::{hearth, printed, said, text};

const OF_DIFFUSERS: &str = "pytorch_lora_weights.safetensors";

fn read(path: &Path) -> Vec<u8> {
    fs::read(path).unwrap_or_else(|error| panic!("{error}: {}", path.display()))
}

/// The folders of a run's checkpoints, by step.
fn checkpoints(run: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(run.join("checkpoints")).unwrap();
    let mut folders: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    folders.sort();
    folders
}

#[test]
fn a_checkpoint_holds_the_adapter_of_its_step() {
    let job = Job::new();
    // All that changes what is written of an adapter.
    let set = ["adapter.kind=dora", "adapter.alpha=2", "train.ema=0.9"];
    let whole = job.finish("whole", &set, &[]);
    let all = checkpoints(&whole);
    assert_eq!(all.len(), 3);
    let adapter = |folder: &Path| read(&folder.join(OF_DIFFUSERS));
    assert!(adapter(&all[2]) == adapter(&whole.join("adapter")), "not what the run wrote");
    assert!(adapter(&all[1]) != adapter(&all[2]));
    let shorter = job.finish("shorter", &[&set[..], &["train.steps=4"]].concat(), &[]);
    assert!(adapter(&all[1]) == adapter(&shorter.join("adapter")), "not what ends there");

    // It is an adapter like any other.
    let base = at("pipeline");
    for (from, out) in [(&all[1], "a"), (&shorter.join("adapter"), "b")] {
        let out = job.path(out);
        let name = ["--name", "x", "--format", "comfyui,peft"];
        let words = ["export", text(from), "--base", &base, "--out", text(&out)];
        printed(&[&words[..], &name].concat());
    }
    for file in
        ["x-comfyui.safetensors", "peft/adapter_model.safetensors", "peft/adapter_config.json"]
    {
        let [a, b] = ["a", "b"].map(|folder| read(&job.path(folder).join(file)));
        assert!(a == b, "{file}");
    }
    let image = job.path("fox.png");
    let words = ["sample", "--base", &base, "--adapter", text(&all[1]), "--prompt", "a fox"];
    let small = ["--size", "64x64", "--steps", "1", "--dtype", "f32", "--out", text(&image)];
    printed(&[&words[..], &small].concat());
    assert!(image.is_file());
}

#[test]
fn a_checkpoint_of_a_language_model_is_a_folder_of_peft() {
    let place = texts::Place::new();
    let set = ["train.steps=4", "text.length=32", "adapter.rank=2", "output.save_every=2"];
    let run = place.train("run", &set, &[]);
    let last = run.join("checkpoints/step-000004");
    for file in ["adapter_config.json", "adapter_model.safetensors"] {
        assert!(read(&last.join(file)) == read(&run.join("adapter/peft").join(file)), "{file}");
    }
    let (model, early) = (place.path("model"), run.join("checkpoints/step-000002"));
    let says = |adapter: &Path| {
        let words =
            ["sample", "--base", text(&model), "--adapter", text(adapter), "--dtype", "f32"];
        printed(
            &[&words[..], &["--prompt", "the ", "--max-tokens", "4", "--temperature", "0"]]
                .concat(),
        )
    };
    assert_eq!(says(&last), says(&run.join("adapter/peft")));
    says(&early);
}

#[test]
fn a_checkpoint_of_a_full_fine_tune_becomes_a_model() {
    let place = texts::Place::new();
    let set = ["adapter.kind=full", "train.steps=4", "train.ema=0.9", "output.save_every=2"];
    let run = place.train("run", &set, &[]);
    let (base, last) = (place.path("model"), run.join("checkpoints/step-000004"));
    let export = |base: &Path, out: &str, more: &[&str]| {
        let out = place.path(out);
        let words = ["export", text(&last), "--base", text(base), "--out", text(&out)];
        hearth(&[&words[..], more].concat())
    };
    let output = export(&base, "made", &[]);
    assert!(output.status.success(), "{}", said(&output));
    for file in ["model.safetensors", "config.json", "tokenizer.json"] {
        let (made, written) = (place.path("made").join(file), run.join("model").join(file));
        assert!(read(&made) == read(&written), "{file}");
    }
    for (output, part) in [
        (export(&base, "made", &[]), "--out is there already"),
        (export(&base, "other", &["--merge"]), "--merge is for adapters"),
        (export(Path::new("tiny"), "other", &[]), "tiny"),
        (
            hearth(&["sample", "--base", text(&base), "--adapter", text(&last), "--prompt", "a"]),
            "no adapter in the checkpoint",
        ),
    ] {
        let words = said(&output);
        assert!(words.contains(part) && words.contains("\nhint: "), "{part}: {words}");
    }
    assert!(!place.path("other").exists());
}

/// Far too high a rate: what is learnt first is the best.
const RISING: [&str; 5] = [
    "optimizer.learning_rate=8",
    "train.validate_every=1",
    "train.steps=8",
    "output.save_every=3",
    "output.keep=1",
];

fn best(run: &Path) -> BestCheckpoint {
    let mut events = events(run);
    let Some(Event::End(RunEnd { best: Some(best), .. })) = events.pop() else {
        panic!("{events:?}")
    };
    best
}

#[test]
fn the_best_checkpoint_is_kept_and_named() {
    let job = Job::new();
    let output = job.run(&RISING, &[]);
    assert!(output.status.success(), "{}", said(&output));
    let run = job.path("run");
    let BestCheckpoint { step, loss, path } = best(&run);
    let mut measured = Vec::new();
    for event in events(&run) {
        if let Event::Validation { step, loss } = event {
            measured.push((step, loss));
        }
    }
    let lowest = measured.iter().skip(1).copied().min_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
    assert_eq!((step, loss), lowest);
    assert!(step < 8 && step % 3 != 0, "{measured:?}: another rate would show more");
    assert_eq!(checkpoints(&run), [run.join(&path), run.join("checkpoints/step-000008")]);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let named = format!("held-out loss {loss:.4} at step {step}: {}", run.join(&path).display());
    assert!(said.contains(&named), "{said}");
    for page in ["report.html", "README.md"] {
        let page = fs::read_to_string(run.join(page)).unwrap();
        assert!(page.contains(text(&path)), "{page}");
    }
    // It is what the run would have come to by then.
    let steps = format!("train.steps={step}");
    let shorter = [&RISING[..2], &[steps.as_str()], &RISING[3..]].concat();
    let shorter = job.finish("shorter", &shorter, &[]);
    let adapter = |folder: &Path| read(&folder.join(OF_DIFFUSERS));
    assert!(adapter(&run.join(&path)) == adapter(&shorter.join("adapter")));

    // A break changes nothing of it.
    let parts =
        job.finish("parts", &[&RISING[..2], &["train.steps=5"], &RISING[3..]].concat(), &[]);
    job.finish("parts", &RISING, &["--resume"]);
    assert_eq!(best(&parts), best(&run));
    let names = |run: &Path| -> Vec<_> {
        checkpoints(run).iter().map(|path| path.file_name().unwrap().to_owned()).collect()
    };
    assert_eq!(names(&parts), names(&run));
}
