//! `hearth cache` as a user meets it: a folder of images, run twice, at the same time, killed,
//! damaged.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;

use crate::{command, hearth, printed, said, text};

/// A folder with a job for the tiny pipeline and so many images.
fn job(n_images: usize) -> (TempDir, PathBuf) {
    job_of("sd3", n_images)
}

/// The same for the pipeline of a family.
fn job_of(family: &str, n_images: usize) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let images = folder.path().join("images");
    fs::create_dir(&images).unwrap();
    for index in 0..n_images {
        let rgb: Vec<u8> = (0..64 * 64 * 3).map(|at| (at * (index + 2) / 7) as u8).collect();
        let path = images.join(format!("{index:03}.png"));
        let mut encoder = png::Encoder::new(fs::File::create(&path).unwrap(), 64, 64);
        encoder.set_color(png::ColorType::Rgb);
        encoder.write_header().unwrap().write_image_data(&rgb).unwrap();
        fs::write(path.with_extension("txt"), format!("image {}, a, b, c", index % 3)).unwrap();
    }
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    let base = golden.join(family).join("pipeline");
    let job = format!(
        "[base]\npath = '{}'\n[data]\nimages = 'images'\nresolution = 64\nbucket_step = 16\n\
         validation = 2\n[sample]\nprompts = ['a fox']\n",
        text(&base)
    );
    let path = folder.path().join("job.toml");
    fs::write(&path, job).unwrap();
    (folder, path)
}

fn summary(job: &Path, arguments: &[&str]) -> Value {
    let arguments = [&["cache", text(job), "--json", "--threads", "1"], arguments].concat();
    serde_json::from_str(&printed(&arguments)).unwrap()
}

fn missing(summary: &Value) -> [u64; 2] {
    ["missing_images", "missing_texts"].map(|key| summary[key].as_u64().unwrap())
}

/// Files of the cache whose names end so.
fn files(folder: &TempDir, suffix: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder.path().join("output/cache/v2")).into_iter().flatten();
    let paths = entries.map(|entry| entry.unwrap().path());
    paths.filter(|path| text(path).ends_with(suffix)).collect()
}

#[test]
fn a_cache_of_an_older_version_is_encoded_again_with_a_note() {
    let (folder, job) = job(6);
    fs::create_dir_all(folder.path().join("output/cache/v1")).unwrap();
    let problems = |summary: Value| summary["problems"].to_string();
    let first = problems(summary(&job, &[]));
    assert!(first.contains("is of an older version: images and captions are encoded"), "{first}");
    let second = problems(summary(&job, &[]));
    assert!(!second.contains("older version"), "{second}");
}

#[test]
fn a_second_run_does_nothing() {
    let (folder, job) = job(6);
    fs::write(folder.path().join("images/broken.png"), "hello").unwrap();
    assert_eq!(missing(&summary(&job, &["--plan"])), [6, 5]);
    assert!(files(&folder, ".safetensors").is_empty(), "a plan encodes nothing");
    let first = summary(&job, &[]);
    assert_eq!(missing(&first), [6, 5]);
    assert_eq!([&first["images"], &first["held_out"], &first["texts"]], [4, 2, 5]);
    assert_eq!(first["buckets"][0]["images"], 6);
    let what = first["problems"][0]["what"].as_str().unwrap();
    assert!(what.starts_with("is not an image"), "{what}");
    let shards = files(&folder, ".safetensors");
    let again = summary(&job, &["--limit", "1MB"]);
    assert_eq!(missing(&again), [0, 0]);
    assert_eq!(files(&folder, ".safetensors"), shards);
    let page = printed(&["cache", text(&job)]);
    for part in ["4 images, 2 held out, 5 texts", "64 x 64", "broken.png", "everything is cached"] {
        assert!(page.contains(part), "{part:?} is missing from {page}");
    }
}

/// Of twenty broken files each stands there, before all else, on the page and in JSON.
/// Of six images, two can be taken with their captions, and the empty text.
#[test]
fn the_cache_of_another_trainer_is_imported() {
    let (folder, job) = job_of("qwen_image", 6);
    let other = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/cache/flymyai");
    let found = summary(&job, &["--from", text(&other)]);
    assert_eq!([&found["imported_images"], &found["imported_texts"]], [2, 3]);
    assert_eq!(missing(&found), [4, 2]);
    let problems = found["problems"].to_string();
    for why in [
        "its latent is [16, 1, 8, 4], this job's is [16, 8, 8]",
        "tokens of width 33, this model's are 32",
        "003.png.pt",
        "is not imported",
    ] {
        assert!(problems.contains(why), "{why}: {problems}");
    }
    let mut stored = Vec::new();
    for path in files(&folder, ".safetensors") {
        let shard = weights::Catalog::open(&path).unwrap();
        for tensor in &shard.tensors {
            let values = weights::load::load_f32(&shard, tensor, 0..tensor.numel()).unwrap();
            stored.push((tensor.name.rsplit('.').next().unwrap().to_owned(), values));
        }
    }
    let has = |name: &str, values: Vec<f32>| stored.contains(&(name.to_owned(), values));
    assert!(has("mean", vec![0.5; 1024]) && has("mean", vec![0.25; 1024]));
    assert!(has("deviation", vec![0.0; 1024]));
    let rows = |rows: &[u8]| rows.iter().flat_map(|row| [f32::from(*row); 32]).collect();
    assert!(has("tokens", rows(&[0, 1, 3, 4, 5, 6])), "those that the mask counts");
    assert_eq!(missing(&summary(&job, &[])), [0, 0]);
    let refused = hearth(&["cache", text(&job), "--from", text(folder.path())]);
    assert!(said(&refused).contains("no cache to import in"), "{}", said(&refused));
}

#[test]
fn all_that_is_left_out_is_listed_first() {
    let (folder, job) = job(4);
    let images = folder.path().join("images");
    for index in 0..20 {
        fs::write(images.join(format!("broken-{index:02}.png")), "hello").unwrap();
    }
    fs::write(images.join("empty.jpg"), "").unwrap();
    fs::write(images.join("notes.docx"), "PK").unwrap();
    fs::write(images.join("lonely.txt"), "a caption").unwrap();
    fs::copy(images.join("000.png"), images.join("copy.png")).unwrap();
    let page = printed(&["cache", text(&job), "--plan"]);
    let listed = page.split("3 images, 2 held out").next().unwrap();
    assert!(listed.starts_with("left out: 21 of 26 images"), "{page}");
    let names = (0..20).map(|index| format!("broken-{index:02}.png is not an image"));
    let others = [
        "20 not an image:",
        "empty.jpg has zero bytes",
        "notes.docx is ignored",
        "lonely.txt is a caption without an image",
        "copy.png is the same image as",
        "copy.png has no caption",
    ];
    let flat = listed.split_whitespace().collect::<Vec<_>>().join(" ");
    for part in names.chain(others.map(String::from)) {
        assert!(flat.contains(&part), "{part:?} is missing from {page}");
    }
    let summary = summary(&job, &["--plan"]);
    assert_eq!(summary["problems"].as_array().unwrap().len(), 25);
    assert_eq!([&summary["left_out"][0]["left_out"], &summary["left_out"][0]["of"]], [21, 26]);
    assert_eq!(summary["left_out"][0]["reasons"][0]["reason"], "not an image");
    fs::read_dir(&images).unwrap().map(|entry| entry.unwrap().path()).for_each(|path| {
        if !text(&path).contains("broken") {
            fs::remove_file(path).unwrap();
        }
    });
    let output = hearth(&["cache", text(&job), "--plan"]);
    assert_eq!(output.status.code(), Some(1));
    let page = String::from_utf8_lossy(&output.stdout);
    assert!(
        page.starts_with("left out: 20 of 20 images") && page.contains("broken-19.png"),
        "{page}"
    );
}

/// Told by tokenizers alone: what T5 sees is not lost, and where there is no T5 it is.
#[test]
fn truncated_captions_are_named() {
    let (folder, job) = job(4);
    let caption = |name: &str, n: usize| {
        let words = (0..n).map(|n| format!("w{n}")).collect::<Vec<_>>().join(" ");
        fs::write(folder.path().join("images").join(name), words).unwrap();
    };
    let of = |name: &str| {
        let summary = summary(&job, &["--plan"]);
        let problems = summary["problems"].as_array().unwrap().clone();
        let is_it = |problem: &&Value| problem["path"].as_str().unwrap().ends_with(name);
        let found = problems.iter().find(is_it).cloned();
        (found.unwrap_or(Value::Null), problems.len())
    };
    caption("001.txt", 3);
    assert_eq!(of("001.png").1, 0);
    caption("001.txt", 45);
    let (found, n) = of("001.png");
    let what = found["what"].as_str().unwrap();
    assert!(n == 1 && what.contains("tokens: CLIP sees the first 77, T5 all of them"), "{what}");
    assert_eq!([&found["is_skipped"], &found["is_note"]], [false, true]);
    caption("001.txt", 3);
    caption("002.txt", 400);
    let (found, n) = of("002.png");
    let what = found["what"].as_str().unwrap();
    assert!(n == 1 && what.contains("T5 sees") && what.contains("cut off is"), "{what}");
    assert_eq!([&found["is_skipped"], &found["is_note"]], [false, false]);
}

/// Texts have the same page: what is left out, then what there is.
#[test]
fn texts_are_checked_too() {
    let folder = tempfile::tempdir().unwrap();
    let texts = folder.path().join("texts");
    fs::create_dir(&texts).unwrap();
    fs::write(texts.join("a.jsonl"), "{\"text\": \"one two\"}\n{\"words\": 1}\n").unwrap();
    fs::write(texts.join("b.csv"), "text\n\"three\nfour\"\n").unwrap();
    fs::write(texts.join("c.parquet"), "PAR1").unwrap();
    fs::write(texts.join("README.md"), "# card").unwrap();
    let job = folder.path().join("job.toml");
    let lines = "[base]\npath = 'tiny'\nrandom_init = true\n[adapter]\nkind = 'full'\n[text]\npath = 'texts'\n\
                 length = 64\nvalidation = 0\n";
    fs::write(&job, lines).unwrap();
    let page = printed(&["cache", text(&job), "--plan"]);
    let flat = page.split_whitespace().collect::<Vec<_>>().join(" ");
    for part in [
        "left out: 2 of 4 files left out: 1 of 3 records",
        "c.parquet is Parquet, which is not read: python -c",
        "README.md is not trained on",
        "a.jsonl line 2 has the keys words",
        "2 files, 2 documents, 19 tokens 1 sequences of 64 tokens, 0 held out",
    ] {
        assert!(flat.contains(part), "{part:?} is missing from {page}");
    }
    let summary = summary(&job, &["--plan"]);
    assert_eq!(summary["problems"].as_array().unwrap().len(), 3);
    assert_eq!([&summary["files"], &summary["documents"], &summary["sequences"]], [2, 2, 1]);
}

#[test]
fn impossible_requests_are_refused_before_the_work() {
    let (folder, job) = job(3);
    let fails = |arguments: &[&str], parts: &[&str]| {
        let output = hearth(&[&["cache", text(&job)], arguments].concat());
        let said = said(&output);
        assert_eq!(output.status.code(), Some(1), "{said}");
        for part in parts {
            assert!(said.contains(part), "{part:?} is missing from {said}");
        }
        assert!(files(&folder, ".safetensors").is_empty());
    };
    fails(&["--limit", "1MB"], &["images does not fit: needs", "limit 977 KiB", "\nhint: "]);
    fails(&["--set", "data.validation=3"], &["holds out 3 images, there are 3"]);
    fails(&["--set", "data.bucket_step=33"], &["data.bucket_step", "33"]);
    fails(&["--set", "data.images=nowhere"], &["cannot read", "nowhere"]);
}

#[test]
fn a_lost_bit_is_found_and_repaired() {
    let (folder, job) = job(3);
    summary(&job, &[]);
    let [shard, _] = &files(&folder, ".safetensors")[..] else { panic!("images and texts") };
    let whole = fs::read(shard).unwrap();
    let mut bytes = whole.clone();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 8;
    fs::write(shard, bytes).unwrap();
    let repaired = summary(&job, &[]);
    assert_ne!(missing(&repaired), [0, 0]);
    let problem = &repaired["problems"][0];
    assert_eq!(problem["path"], text(shard));
    assert!(problem["what"].as_str().unwrap().starts_with("is damaged and was put aside"));
    // The same entries in the same form are the same bytes under the same name.
    assert_eq!(fs::read(shard).unwrap(), whole);
    assert_eq!(summary(&job, &[])["problems"], Value::Array(vec![]));
}

fn begin(job: &Path, arguments: &[&str]) -> Child {
    let words = [&["cache", text(job), "--json", "--threads", "1"], arguments].concat();
    command(&words).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

#[test]
fn two_at_once_do_not_disturb_each_other() {
    let (folder, job) = job(8);
    let both = [begin(&job, &[]), begin(&job, &[])];
    for child in both {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", said(&output));
    }
    let after = summary(&job, &[]);
    assert_eq!(missing(&after), [0, 0]);
    assert_eq!(after["problems"], Value::Array(vec![]));
    assert!(files(&folder, ".partial").is_empty());
}

/// Killed when the first shard is there, while texts are encoded.
#[test]
fn a_killed_run_is_continued() {
    let (folder, job) = job(12);
    let set = ["data.shuffle_tags=true", "data.keep_tags=0"];
    let set: Vec<&str> = set.iter().flat_map(|value| ["--set", value]).collect();
    let mut child = begin(&job, &set);
    while files(&folder, ".safetensors").is_empty() && child.try_wait().unwrap().is_none() {
        std::thread::sleep(Duration::from_millis(2));
    }
    // A child that is done already cannot be killed.
    _ = child.kill();
    child.wait().unwrap();
    let left = missing(&summary(&job, &[&["--plan"], &set[..]].concat()));
    assert!(left[0] < 12, "nothing was kept");
    let resumed = summary(&job, &set);
    assert_eq!(missing(&resumed), left);
    assert_eq!(resumed["problems"], Value::Array(vec![]));
    assert_eq!(missing(&summary(&job, &set)), [0, 0]);
}
