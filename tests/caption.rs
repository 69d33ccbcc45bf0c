//! `hearth caption` as a user meets it: a folder of images, run twice, interrupted, with a broken image.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;

use crate::{command, hearth, printed, said, text};

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/caption")
}

fn base() -> String {
    text(&golden().join("folder")).to_owned()
}

/// A folder with the three images of the reference.
fn images() -> TempDir {
    let folder = TempDir::new().unwrap();
    for name in ["wide", "tall", "large"] {
        let image = format!("{name}.png");
        fs::copy(golden().join("images").join(&image), folder.path().join(image)).unwrap();
    }
    folder
}

/// The prompt of the reference, and the caption of an image.
fn expected(image: &str) -> (String, String) {
    let cases = fs::read(golden().join("folder/cases.json")).unwrap();
    let cases: Vec<Value> = serde_json::from_slice(&cases).unwrap();
    let case = cases.iter().find(|case| case["image"] == image).unwrap();
    let of = |key: &str| case[key].as_str().unwrap().to_owned();
    (of("prompt"), of("caption"))
}

fn arguments<'a>(folder: &'a Path, base: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let prompt = "Describe this image.";
    let common = [
        "caption",
        text(folder),
        "--base",
        base,
        "--dtype",
        "f32",
        "--prompt",
        prompt,
        "--max-tokens",
        "16",
    ];
    [&common, more].concat()
}

fn caption(folder: &Path, more: &[&str]) -> Output {
    hearth(&arguments(folder, &base(), more))
}

fn rows(output: &Output) -> Vec<Value> {
    assert!(output.status.success(), "{}", said(output));
    let lines = std::str::from_utf8(&output.stdout).unwrap().lines();
    lines.map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Hidden files as well.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<_> = entries.map(|name| name.into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn captions_lie_beside_their_images() {
    let folder = images();
    fs::write(folder.path().join("tall.txt"), "mine").unwrap();
    let listed = printed(&arguments(folder.path(), &base(), &["--dry-run"]));
    assert!(listed.starts_with("2 images to caption, 1 image captioned already\n"), "{listed}");
    assert!(listed.contains("large.png → ") && listed.contains("memory: "), "{listed}");
    assert_eq!(names(folder.path()).len(), 4, "a dry run writes nothing");
    let first = caption(folder.path(), &[]);
    let page = String::from_utf8_lossy(&first.stdout);
    assert!(page.contains("2 captions written, 1 image captioned already\n"), "{page}");
    let read = |name: &str| fs::read_to_string(folder.path().join(name)).unwrap();
    for name in ["wide", "large"] {
        let (prompt, caption) = expected(name);
        assert_eq!(prompt, "Describe this image.");
        assert_eq!(read(&format!("{name}.txt")), format!("{caption}\n"));
    }
    assert_eq!(read("tall.txt"), "mine");
    assert_eq!(names(folder.path()).len(), 6, "nothing but captions was written");

    let again = caption(folder.path(), &[]);
    assert!(again.status.success(), "{}", said(&again));
    let page = String::from_utf8_lossy(&again.stdout);
    assert!(page.starts_with("0 captions written, 3 images captioned already"), "{page}");
    let anew = rows(&caption(folder.path(), &["--overwrite", "--json", "--trigger", "ohwx"]));
    assert_eq!(anew.len(), 4);
    assert_eq!(anew[1]["caption"], format!("ohwx, {}", expected("tall").1));
    assert_eq!(read("tall.txt"), format!("ohwx, {}\n", expected("tall").1));
    assert_eq!((&anew[3]["n_written"], &anew[3]["n_captioned"]), (&3.into(), &0.into()));
}

#[test]
fn a_broken_image_is_left_out() {
    let folder = images();
    let whole = fs::read(folder.path().join("tall.png")).unwrap();
    fs::write(folder.path().join("cut.png"), &whole[..whole.len() / 2]).unwrap();
    fs::write(folder.path().join("notes.pdf"), "no image").unwrap();
    // Its header is fine, what follows is not.
    let mut damaged = whole;
    let middle = damaged.len() / 2;
    damaged[middle..middle + 64].fill(0);
    fs::write(folder.path().join("damaged.png"), &damaged).unwrap();
    let output = caption(folder.path(), &[]);
    assert!(output.status.success(), "{}", said(&output));
    let warned = said(&output);
    assert!(warned.contains("cut.png ") && warned.contains("damaged.png "), "{warned}");
    let page = String::from_utf8_lossy(&output.stdout);
    assert!(page.contains("3 captions written, 2 left out\n"), "{page}");
    let is_caption = |name: &&String| Path::new(*name).extension().is_some_and(|it| it == "txt");
    assert_eq!(names(folder.path()).iter().filter(is_caption).count(), 3);
    let again = rows(&caption(folder.path(), &["--json"]));
    let skipped = again.iter().filter(|row| row["is_skipped"] == true).count();
    assert_eq!(skipped, 2, "{again:?}");
}

#[test]
fn an_interrupted_run_goes_on() {
    let folder = images();
    for n in 0..40 {
        let copy = folder.path().join(format!("x{n:02}.png"));
        fs::copy(golden().join("images/large.png"), copy).unwrap();
    }
    let base = base();
    let mut child = command(&arguments(folder.path(), &base, &["--json"]));
    let mut child = child.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    lines.next().unwrap().unwrap();
    let line = format!("kill -INT {}", child.id());
    assert!(Command::new("sh").args(["-c", &line]).status().unwrap().success());
    let last = lines.map(Result::unwrap).last().unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{last}");
    let summary: Value = serde_json::from_str(&last).unwrap();
    let of = |key: &str| summary[key].as_u64().unwrap() as usize;
    assert!(of("n_written") > 0 && of("n_left") > 0, "{summary}");
    assert_eq!(of("n_written") + of("n_left"), 43);
    assert_eq!(names(folder.path()).len(), 43 + of("n_written"), "each is whole or not there");

    let rest = rows(&caption(folder.path(), &["--json"]));
    assert_eq!(rest.last().unwrap()["n_written"], of("n_left"));
    assert_eq!(rest.last().unwrap()["n_captioned"], of("n_written"));
    for name in names(folder.path()).iter().filter(|name| name.starts_with('x')) {
        if let Some(stem) = name.strip_suffix(".png") {
            let written = fs::read_to_string(folder.path().join(format!("{stem}.txt"))).unwrap();
            assert_eq!(written.trim_end(), expected("large").1, "{stem}");
        }
    }
}

#[test]
fn what_cannot_be_captioned_is_refused() {
    let folder = images();
    let empty = TempDir::new().unwrap();
    let (qwen, base) = (golden().join("../llama/qwen2"), base());
    let cases: [(&Path, &str, &[&str], &str); 7] = [
        (folder.path(), text(&qwen), &[], "expected a Qwen2.5-VL model"),
        (empty.path(), &base, &[], "no image that can be used"),
        (Path::new("nowhere"), &base, &[], "cannot read nowhere"),
        (folder.path(), &base, &["--temperature", "-1"], "temperature is -1"),
        (folder.path(), &base, &["--repetition-penalty", "-1"], "repetition penalty is -1"),
        (folder.path(), &base, &["--max-pixels", "9"], "at most 9 pixels"),
        (folder.path(), &base, &["--limit", "1MB"], "captioning does not fit"),
    ];
    for (folder, base, more, says) in cases {
        let output = hearth(&arguments(folder, base, more));
        assert_eq!(output.status.code(), Some(1), "{says}: {}", said(&output));
        let said = said(&output);
        assert!(said.contains(says) && said.contains("hint: "), "{said}");
    }
    assert_eq!(names(folder.path()).len(), 3);
    let run = empty.path().join("out");
    let train = ["train", "--text", "x", "--base", &base, "--out", text(&run)];
    let said = said(&hearth(&train));
    assert!(said.contains("a vision-language model") && said.contains("hearth caption"), "{said}");
}
