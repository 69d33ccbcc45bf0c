//! What people have in their folders, and disks that are full.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use trainer::event::{EndReason, Event, RunEnd};

use super::{Job, check_memory, events, trained, warnings};
use crate::models::at;
use crate::{hearth, printed, said, text};

/// Files that are no images, or no good ones, and what is said of each.
const BROKEN: [(&str, &str); 6] = [
    ("cut.png", "1 truncated"),
    ("spoilt.png", "1 of 6 images left out: 1 damaged"),
    ("empty.png", "4 of 10 images left out: 1 empty"),
    ("letter.jpg", "1 not an image"),
    ("tiny.png", "1 smaller than 64 px"),
    ("0001.png", "2 images without a caption"),
];

fn spoil(images: &Path) {
    let mut whole = fs::read(images.join("0000.png")).unwrap();
    let middle = whole.len() / 2;
    fs::write(images.join("cut.png"), &whole[..middle]).unwrap();
    // Whole by its looks: only who decodes it finds out.
    whole[middle] ^= 8;
    fs::write(images.join("spoilt.png"), whole).unwrap();
    fs::write(images.join("empty.png"), "").unwrap();
    fs::write(images.join("letter.jpg"), "Dear diary").unwrap();
    let file = fs::File::create(images.join("tiny.png")).unwrap();
    png::Encoder::new(file, 2, 2).write_header().unwrap().write_image_data(&[0; 4]).unwrap();
    fs::remove_file(images.join("0001.txt")).unwrap();
}

#[test]
fn broken_images_are_named_and_left_out() {
    let job = Job::new();
    job.finish("whole", &["train.steps=1"], &[]);
    spoil(&job.path("images"));
    job.remove("draw_count = 5\n");
    let run = job.finish("broken", &["train.steps=3", "data.draw=none"], &[]);
    let events = events(&run);
    let left_out = events.iter().filter_map(|event| match event {
        Event::LeftOut(left_out) => Some(left_out.to_string()),
        _ => None,
    });
    let warned = warnings(&events).into_iter();
    let said: Vec<String> = left_out.chain(warned).collect();
    assert_eq!(said.len(), 3, "{said:#?}");
    let report = fs::read_to_string(run.join("report.html")).unwrap();
    for (file, what) in BROKEN {
        let is_told = said.iter().any(|text| text.contains(file) && text.contains(what));
        assert!(is_told, "{file} {what} is missing from {said:#?}");
        assert!(report.contains(what), "{what} is missing from the report");
    }
    let begin = super::begins(&events)[0];
    assert_eq!(begin.samples + begin.held_out, 5);
}

#[test]
fn a_folder_without_an_image_is_an_error() {
    let job = Job::new();
    let images = job.path("images");
    fs::create_dir(&images).unwrap();
    fs::write(images.join("empty.png"), "").unwrap();
    fs::write(images.join("letter.jpg"), "Dear diary").unwrap();
    job.remove("draw = 'neon'\ndraw_count = 5\n");
    let words = job.fail(&[], &[]);
    assert!(words.contains("no image to train with"), "{words}");
    assert!(words.contains("empty.png has zero bytes"), "{words}");
    // The remedy needs no --resume: nothing has begun.
    fs::remove_dir_all(&images).unwrap();
    job.finish("run", &["train.steps=1", "data.draw=neon", "data.draw_count=2"], &[]);
}

/// What is in a folder and below, with its contents.
fn contents(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut all = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            all.extend(contents(&path));
        } else {
            all.push((path.clone(), fs::read(path).unwrap()));
        }
    }
    all.sort();
    all
}

#[test]
fn files_of_others_are_not_overwritten() {
    let job = Job::new();
    let run = job.path("run");
    for (name, text_of) in [
        ("README.md", "# my project"),
        ("config.toml", "[package]"),
        ("report.html", "<html></html>"),
        ("events.jsonl", "{\"event\":\"login\"}\n"),
        ("samples/drum.wav", "bang"),
    ] {
        let path = run.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text_of).unwrap();
        let before = contents(job.folder.path());
        let words = job.fail(&[], &[]);
        let named = text(&run.join(name.split('/').next().unwrap())).to_owned();
        let said = format!("would overwrite a file that hearth did not write: {named}");
        assert!(words.contains(&said), "{words}");
        assert!(contents(job.folder.path()) == before, "{name}: something was written");
        fs::remove_dir_all(&run).unwrap();
    }
    // What is in nobody's way stays.
    fs::create_dir(&run).unwrap();
    fs::write(run.join("notes.txt"), "mine").unwrap();
    job.finish("run", &["train.steps=1"], &[]);
    assert_eq!(fs::read_to_string(run.join("notes.txt")).unwrap(), "mine");
    job.finish("run", &["train.steps=2"], &["--resume"]);
}

#[test]
fn nothing_is_written_among_the_images() {
    let job = Job::new();
    job.finish("run", &["train.steps=1"], &[]);
    let before = contents(&job.path("images"));
    for out in ["images", "images/run"] {
        let words = job.fail(&[], &["--out", text(&job.path(out))]);
        assert!(words.contains("output.folder lies in data.images"), "{words}");
        assert!(contents(&job.path("images")) == before, "{out}: something was written");
    }
}

#[test]
fn a_run_that_is_not_finite_exports_no_adapter() {
    let job = Job::new();
    let set =
        ["train.steps=40", "train.batch_size=1", "optimizer.learning_rate=10", "base.dtype=f16"];
    let output = job.run(&set, &[]);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let page = String::from_utf8_lossy(&output.stdout);
    assert!(page.contains("stopped: nothing finite is learnt any more after step 27"), "{page}");
    let run = job.path("run");
    let events = events(&run);
    assert!(matches!(events.last(), Some(Event::End(RunEnd { reason: EndReason::Unhealthy, .. }))));
    let told = warnings(&events);
    assert!(
        told.iter().any(|text| text.starts_with("19 steps so far changed nothing")),
        "{told:?}"
    );
    let words = said(&output);
    assert!(words.contains("hint: begin a new run with bf16 if base.dtype is f16"), "{words}");
    assert!(run.join("report.html").is_file() && !run.join("adapter").exists());
}

/// What spoils everything beside the largest learning rate, in how many steps, and what is said.
const DIVERGED: [(&str, u64, &str); 2] = [
    ("base.dtype=f16", 4, "warning: the run diverged: "),
    ("optimizer.weight_decay=10", 3, "the largest usable is 65504"),
];

#[test]
fn a_run_that_diverged_is_exported_only_by_force() {
    for (at, (key, steps, said_of_it)) in DIVERGED.into_iter().enumerate() {
        let job = Job::new();
        let steps = format!("train.steps={steps}");
        let set = ["optimizer.learning_rate=10", key, &steps];
        job.remove("validation = 1\n");
        job.remove("validate_every = 4\n");
        let output = job.run(&set, &[]);
        let words = said(&output);
        assert_eq!(output.status.code(), Some(1), "{at}: {words}");
        assert!(words.contains(said_of_it), "{at}: {words}");
        assert!(words.contains("--resume --force writes the result all the same"), "{words}");
        let run = job.path("run");
        let told = events(&run);
        assert!(matches!(
            told.last(),
            Some(Event::End(RunEnd { reason: EndReason::Diverged, .. }))
        ));
        assert!(!run.join("adapter").exists() && !run.join("README.md").exists());
        assert!(fs::read_to_string(run.join("report.html")).unwrap().contains("diverged"));
        // Again it comes to the same, unless it is forced.
        assert_eq!(job.run(&set, &["--resume"]).status.code(), Some(1));
        let output = job.run(&set, &["--resume", "--force"]);
        assert!(output.status.success(), "{}", said(&output));
        assert!(run.join("adapter/pytorch_lora_weights.safetensors").is_file());
        assert!(said(&output).contains("the run diverged: "), "{}", said(&output));
    }
}

#[test]
fn an_adapter_that_is_not_finite_is_refused() {
    let job = Job::new();
    let run = job.finish("run", &["train.steps=1"], &[]);
    let adapter = run.join("adapter/pytorch_lora_weights.safetensors");
    let mut bytes = fs::read(&adapter).unwrap();
    let last = bytes.len() - 4;
    bytes[last..].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&adapter, bytes).unwrap();
    let (base, out, image) = (at("pipeline"), job.path("exported"), job.path("fox.png"));
    let of_sample = ["sample", "--base", &base, "--adapter", text(&adapter), "--prompt", "a fox"];
    let of_export = ["export", text(&adapter), "--base", &base, "--out", text(&out)];
    let [to_image, by_force] = [["--out", text(&image)], ["--format", "kohya"]];
    for words in [[&of_sample[..], &to_image].concat(), [&of_export[..], &by_force].concat()] {
        let output = hearth(&words);
        let words = said(&output);
        assert_eq!(output.status.code(), Some(1), "{words}");
        assert!(words.contains("error: 1 of ") && words.contains(".lora_"), "{words}");
        assert!(words.contains("are not finite"), "{words}");
    }
    assert!(!image.exists() && !out.exists());
    printed(&[&of_export[..], &by_force, &["--force"]].concat());
    assert!(fs::read_dir(&out).unwrap().count() > 0);
}

/// Files may not grow beyond this in the run whose disk is full; a checkpoint is larger.
const KILOBYTES: usize = 32;

#[test]
fn a_full_disk_leaves_the_checkpoint_before() {
    let job = Job::new();
    let whole = trained(&job.finish("whole", &[], &[]));
    let cache = format!("data.cache='{}'", text(&job.path("whole/cache")));
    let run = job.finish("run", &[&cache, "train.steps=2"], &[]);
    let before = trained(&run);

    let full = job.command(&[&cache], &["--resume"]);
    let line = format!("trap '' XFSZ; ulimit -f {KILOBYTES}; exec \"$@\"");
    let mut command = Command::new("bash");
    command.args(["-c", &line, "bash"]).arg(full.get_program()).args(full.get_args());
    let output = command.output().unwrap();
    let words = said(&output);
    assert_eq!(output.status.code(), Some(1), "{words}");
    assert!(words.contains("step-000004") && words.contains("too large"), "{words}");
    assert!(before == trained(&run), "the checkpoint before is not what it was");

    job.finish("run", &[&cache], &["--resume"]);
    assert!(whole == trained(&run), "other bytes than with room on the disk");
    check_memory(&events(&run));
}
