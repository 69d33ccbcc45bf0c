//! `inspect`, `shard`, `convert` and `bench load` on real files: those in tests/golden/weights were
//! written by PyTorch and by the gguf package, and what comes out is read by the safetensors crate,
//! which is also what Python's package is made of.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use safetensors::SafeTensors;
use serde_json::Value;

use crate::{hearth, printed, said, text};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/weights").join(name)
}

fn from_hex(hex: &str) -> Vec<u8> {
    let (pairs, _) = hex.as_bytes().as_chunks::<2>();
    pairs
        .iter()
        .map(|pair| u8::from_str_radix(str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect()
}

/// What a file holds after a conversion is bit for bit what the expectation says.
fn check_converted(file: &str, expected: &serde_json::Map<String, Value>) {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out.safetensors");
    printed(&["convert", text(&golden(file)), "--out", text(&out)]);
    let bytes = std::fs::read(&out).unwrap();
    let written = SafeTensors::deserialize(&bytes).unwrap();
    for (name, tensor) in expected {
        let view = written.tensor(name).unwrap();
        assert_eq!(view.data(), from_hex(tensor["hex"].as_str().unwrap()), "{file} {name}");
        assert_eq!(serde_json::json!(view.shape()), tensor["shape"], "{file} {name}");
    }
    assert_eq!(written.len(), expected.len());
}

fn expectation(file: &str) -> Value {
    serde_json::from_slice(&std::fs::read(golden(file)).unwrap()).unwrap()
}

#[test]
fn pytorch_archives_convert_bit_equal_in_every_format() {
    let expected = expectation("torch.expected.json");
    for (file, tensors) in expected.as_object().unwrap() {
        check_converted(file, tensors.as_object().unwrap());
    }
}

#[test]
fn pythons_safetensors_convert_bit_equal_in_every_format() {
    let expected = expectation("python.expected.json");
    check_converted("python.safetensors", expected["tensors"].as_object().unwrap());
}

#[test]
fn gguf_converts_to_the_numbers_the_gguf_package_gives() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out.safetensors");
    printed(&["convert", text(&golden("mixed.gguf")), "--out", text(&out), "--dtype", "f32"]);
    let bytes = std::fs::read(&out).unwrap();
    let written = SafeTensors::deserialize(&bytes).unwrap();
    let index = expectation("mixed.gguf.json");
    let numbers = std::fs::read(golden("mixed.gguf.f32.bin")).unwrap();
    let mut seen = 0;
    for tensor in index["tensors"].as_array().unwrap() {
        let view = written.tensor(tensor["name"].as_str().unwrap()).unwrap();
        if let Some(at) = tensor["f32_offset"].as_u64() {
            let at = at as usize;
            assert!(view.data() == &numbers[at..at + view.data().len()], "{}", tensor["name"]);
            seen += 1;
        }
    }
    assert!(seen > 8, "only {seen} tensors were compared");
}

#[test]
fn code_in_a_pickle_is_refused_by_name() {
    for (file, asked) in [("hostile_system.pt", "system"), ("hostile_eval.pt", "eval")] {
        let output = hearth(&["inspect", text(&golden(file))]);
        assert_eq!(output.status.code(), Some(1));
        let said = said(&output);
        assert!(said.contains("refused to run code") && said.contains(asked), "{said}");
    }
}

/// A file of a few tensors, 24 MB.
fn model(folder: &Path) -> PathBuf {
    let data: Vec<u8> =
        (0..8_000_000_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let tensor = |rows: usize| {
        safetensors::tensor::TensorView::new(
            safetensors::Dtype::U8,
            vec![rows, 8_000_000 / rows],
            &data,
        )
        .unwrap()
    };
    let path = folder.join("model.safetensors");
    let format = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let tensors = [("a.0.w", tensor(8)), ("a.1.w", tensor(8)), ("b.w", tensor(1000))];
    safetensors::serialize_to_file(tensors, Some(format), &path).unwrap();
    path
}

#[test]
fn a_model_goes_to_shards_and_back_unchanged() {
    let folder = tempfile::tempdir().unwrap();
    let path = model(folder.path());
    let shards = folder.path().join("shards");
    let index = printed(&["shard", text(&path), "--out", text(&shards), "--max-size", "10MB"]);
    let index = index.lines().last().unwrap();
    assert!(index.ends_with("model.safetensors.index.json"), "{index}");
    let index: Value = serde_json::from_slice(&std::fs::read(index).unwrap()).unwrap();
    assert_eq!(index["metadata"]["total_size"], 24_000_000);
    assert_eq!(index["weight_map"]["b.w"], "model-00003-of-00003.safetensors");
    let joined = folder.path().join("joined.safetensors");
    printed(&["convert", text(&shards), "--out", text(&joined)]);
    let (before, after) = (std::fs::read(&path).unwrap(), std::fs::read(&joined).unwrap());
    let (before, after) =
        (SafeTensors::deserialize(&before).unwrap(), SafeTensors::deserialize(&after).unwrap());
    for (name, view) in before.tensors() {
        assert!(after.tensor(&name).unwrap().data() == view.data(), "{name}");
    }
}

/// What a file's checksum is when it is written is what it is when it is read, and the crate's own.
#[test]
fn checksums_agree() {
    let folder = tempfile::tempdir().unwrap();
    let path = model(folder.path());
    let out = folder.path().join("out.safetensors");
    let line = printed(&["convert", text(&path), "--out", text(&out), "--checksum"]);
    let json: Value =
        serde_json::from_str(&printed(&["inspect", text(&out), "--checksum", "--json"])).unwrap();
    let expected = blake3::hash(&std::fs::read(&out).unwrap()).to_string();
    assert_eq!(line, format!("{expected}  {}\n", out.display()));
    assert_eq!(json[0]["checksums"][0], expected);
    assert!(printed(&["inspect", text(&out), "--checksum"]).contains(&expected));
}

#[test]
fn inspect_shows_layers_once_and_all_of_them_when_asked() {
    let folder = tempfile::tempdir().unwrap();
    let path = model(folder.path());
    let page = printed(&["inspect", text(&path)]);
    assert!(page.contains("a.*.w") && page.contains("× 2"), "{page}");
    assert!(page.contains("nothing found"), "{page}");
    assert!(printed(&["inspect", text(&path), "--all"]).contains("a.1.w"));
    let json: Value = serde_json::from_str(&printed(&["inspect", text(&path), "--json"])).unwrap();
    assert_eq!(json[0]["bytes"], 24_000_000);
    assert_eq!(json[0]["tensors"].as_array().unwrap().len(), 3);
}

#[test]
fn wrong_files_are_named_with_a_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let path = model(folder.path());
    let fails = |arguments: &[&str], part: &str| {
        let output = hearth(arguments);
        let said = said(&output);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(
            said.starts_with("error: ") && said.contains("hint: ") && said.contains(part),
            "{said}"
        );
    };
    let whole = std::fs::read(&path).unwrap();
    std::fs::write(&path, &whole[..whole.len() - 1]).unwrap();
    fails(&["inspect", text(&path)], "cut short");
    fails(&["inspect", text(&folder.path().join("lost"))], "No such file");
    fails(&["inspect", "/dev/null"], "neither a file nor a folder");
    std::fs::write(&path, &whole).unwrap();
    fails(&["shard", text(&path), "--out", "/proc/nowhere"], "cannot write /proc/nowhere");
    let output = hearth(&["shard", "x", "--out", "y", "--max-size", "ten"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(said(&output).contains("is not a size"), "{}", said(&output));
}

#[test]
fn ctrl_c_leaves_no_half_written_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = model(folder.path());
    let out = folder.path().join("out.safetensors");
    let mut interrupted = 0;
    for delay_ms in 0..40 {
        let mut child = Command::new(env!("CARGO_BIN_EXE_hearth"))
            .args(["convert", text(&path), "--out", text(&out)])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(delay_ms));
        let line = format!("kill -INT {}", child.id());
        _ = Command::new("sh").args(["-c", &line]).stderr(Stdio::null()).status().unwrap();
        let status = child.wait().unwrap();
        interrupted += u32::from(status.code() == Some(130));
        let left: Vec<_> =
            std::fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        // Before the handler stands, Ctrl-C ends the program as it ends any other.
        let partial = left.iter().any(|name| name.to_string_lossy().ends_with(".partial"));
        assert!(!partial || status.code().is_none(), "{status}: {left:?}");
        if status.success() {
            std::fs::remove_file(&out).unwrap();
        }
    }
    assert!(interrupted > 0, "no run was interrupted in its work");
}

/// Killed at a hundred moments spread over a whole run, the name always leads to a whole file: the
/// old one or the new one.
#[test]
fn kill_9_never_leaves_a_broken_file_under_the_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = model(folder.path());
    let out = folder.path().join("out.safetensors");
    let start = || {
        Command::new(env!("CARGO_BIN_EXE_hearth"))
            .args(["convert", text(&path), "--out", text(&out)])
            .stdout(Stdio::null())
            .spawn()
            .unwrap()
    };
    let begun = Instant::now();
    assert!(start().wait().unwrap().success());
    let whole_run = begun.elapsed();
    let mut killed = 0;
    for moment in 0..100 {
        // Every other time there is no old file to fall back on.
        if moment % 2 == 0 && out.exists() {
            std::fs::remove_file(&out).unwrap();
        }
        let mut child = start();
        std::thread::sleep(whole_run * moment / 100);
        child.kill().unwrap();
        killed += u32::from(!child.wait().unwrap().success());
        if out.exists() {
            let bytes = std::fs::read(&out).unwrap();
            let found = SafeTensors::deserialize(&bytes).expect("a file of that name is whole");
            assert_eq!(found.len(), 3);
        }
    }
    assert!(killed > 10, "only {killed} runs were killed before their end");
}

#[test]
fn bench_load_measures_every_reader() {
    let folder = tempfile::tempdir().unwrap();
    let lines = printed(&[
        "bench",
        "load",
        "--folder",
        text(folder.path()),
        "--size",
        "30MB",
        "--repeats",
        "1",
        "--json",
    ]);
    let figures: Vec<Value> =
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let of = |reader: &str| figures.iter().filter(|figure| figure["reader"] == reader).count();
    assert_eq!((of("memcpy"), of("raw"), of("hearth"), of("hearth-mmap")), (1, 2, 2, 2));
    for figure in &figures {
        for key in ["cache", "gib_per_s", "rss_peak_bytes", "ratio_to_memcpy"] {
            assert!(!figure[key].is_null(), "{key} is missing from {figure}");
        }
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "the file was not removed");
}

#[test]
fn a_benchmark_leaves_what_lies_beside_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model.safetensors");
    std::fs::copy(golden("python.safetensors"), &model).unwrap();
    for method in ["raw-write", "hearth-write"] {
        let beside = model.with_extension(method);
        std::fs::write(&beside, "mine").unwrap();
        printed(&["bench", "load", "--device", "cpu", "--file", text(&model), "--only", method]);
        assert_eq!(std::fs::read_to_string(&beside).unwrap(), "mine", "{method}");
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 3);
}
