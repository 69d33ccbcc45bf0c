//! `hearth clip-score` as a user meets it: a run with samples, its training images there or gone, its report.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tempfile::TempDir;

use crate::{hearth, printed, said, text};

fn golden(part: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(part)
}

/// A copy of the recorded run, whose training images are those of the reference.
fn run() -> TempDir {
    let folder = TempDir::new().unwrap();
    let from = golden("run");
    fs::create_dir(folder.path().join("samples")).unwrap();
    for entry in fs::read_dir(from.join("samples")).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, folder.path().join("samples").join(path.file_name().unwrap())).unwrap();
    }
    fs::copy(from.join("events.jsonl"), folder.path().join("events.jsonl")).unwrap();
    let config = fs::read_to_string(from.join("config.toml")).unwrap();
    let images = golden("caption/images");
    let config = config.replace("fox <24> images", text(&images));
    fs::write(folder.path().join("config.toml"), config).unwrap();
    folder
}

fn clip() -> String {
    text(&golden("clip_score/folder")).to_owned()
}

fn scored(run: &Path, more: &[&str]) -> Value {
    let clip = clip();
    let common = ["clip-score", text(run), "--clip", &clip, "--json"];
    let output = hearth(&[&common, more].concat());
    assert!(output.status.success(), "{}", said(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn scores_are_those_of_transformers() {
    let run = run();
    let scores = scored(run.path(), &[]);
    let expected = fs::read(golden("clip_score/run.json")).unwrap();
    let expected: Vec<Value> = serde_json::from_slice(&expected).unwrap();
    let found = scores["samples"].as_array().unwrap();
    assert_eq!((found.len(), &scores["n_images"]), (expected.len(), &3.into()));
    for (found, expected) in found.iter().zip(&expected) {
        assert_eq!((&found["path"], &found["step"]), (&expected["path"], &expected["step"]));
        for key in ["to_prompt", "to_images"] {
            let [a, b] = [found, expected].map(|score| score[key].as_f64().unwrap());
            assert!((a - b).abs() < 1e-5, "{key}: {found} {expected}");
        }
    }
    let steps: Vec<_> = scores["by_step"].as_array().unwrap().iter().collect();
    assert_eq!(steps.iter().map(|step| &step["step"]).collect::<Vec<_>>(), [0, 40, 80, 120]);
    let mean = |key: &str| (0..2).map(|at| found[at][key].as_f64().unwrap()).sum::<f64>() / 2.0;
    assert!((steps[0]["to_prompt"].as_f64().unwrap() - mean("to_prompt")).abs() < 1e-12);
    assert!(run.path().join("clip-scores.json").exists());
    let report = fs::read_to_string(run.path().join("report.html")).unwrap();
    for shown in ["<h2>CLIP scores</h2>", "Samples and their prompts", "3 training images"] {
        assert!(report.contains(shown), "{shown}");
    }
}

#[test]
fn without_training_images_there_are_prompts() {
    let run = run();
    let gone = "[base]\npath = \"x\"\n[data]\nimages = \"nowhere\"\n";
    fs::write(run.path().join("config.toml"), gone).unwrap();
    let clip = clip();
    let arguments = ["clip-score", text(run.path()), "--clip", &clip];
    let output = hearth(&arguments);
    assert!(output.status.success(), "{}", said(&output));
    let warned = said(&output);
    assert!(warned.contains("not compared with images: cannot read "), "{warned}");
    assert!(warned.contains("nowhere"), "{warned}");
    let page = String::from_utf8_lossy(&output.stdout);
    assert!(page.starts_with("8 samples scored\n") && page.contains('–'), "{page}");
    let report = fs::read_to_string(run.path().join("report.html")).unwrap();
    assert!(!report.contains("Samples and training images"));
    let images = golden("caption/images");
    let page =
        printed(&[&arguments[..], &["--images", text(&images), "--most-images", "2"]].concat());
    assert!(page.starts_with("8 samples scored, compared with 2 images\n"), "{page}");
    let scores = scored(run.path(), &["--most-images", "0"]);
    assert_eq!(scores["n_images"], 0);

    fs::write(run.path().join("samples/step-000040-1.png"), "no image").unwrap();
    let output = hearth(&arguments);
    assert!(said(&output).contains("step-000040-1.png "), "{}", said(&output));
    let page = String::from_utf8_lossy(&output.stdout);
    assert!(page.starts_with("7 samples scored\n"), "{page}");
}

#[test]
fn what_cannot_be_scored_is_refused() {
    let (run, empty, clip) = (run(), TempDir::new().unwrap(), clip());
    let qwen = golden("llama/qwen2");
    let texts = empty.path().join("texts");
    fs::create_dir(&texts).unwrap();
    let begin = fs::read_to_string(golden("run/events.jsonl")).unwrap();
    fs::write(texts.join("events.jsonl"), begin.lines().take(5).collect::<Vec<_>>().join("\n"))
        .unwrap();
    let cases: [(&Path, &str, &[&str], &str); 6] = [
        (run.path(), text(&qwen), &[], "expected a CLIP model"),
        (run.path(), "nowhere/clip", &[], "hearth fetch"),
        (empty.path(), &clip, &[], "events.jsonl"),
        (&texts, &clip, &[], "has no sample images"),
        (run.path(), &clip, &["--images", "nowhere"], "cannot read nowhere"),
        (run.path(), &clip, &["--limit", "300KB"], "300"),
    ];
    for (run, clip, more, says) in cases {
        let output = hearth(&[&["clip-score", text(run), "--clip", clip], more].concat());
        let message = said(&output);
        assert!(!output.status.success() && message.contains(says), "{says}: {message}");
        assert!(!run.join("clip-scores.json").exists(), "{says}");
    }
    let train = ["train", "--text", "x", "--base", &clip, "--out", text(empty.path())];
    let message = said(&hearth(&train));
    assert!(message.contains("a CLIP model") && message.contains("hearth clip-score"), "{message}");
}
