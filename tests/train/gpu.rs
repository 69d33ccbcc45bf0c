//! Training on a GPU, as far as a software driver for Vulkan can show it; says so where there is none.

use std::fs;
use std::path::Path;

use serde_json::Value;
use trainer::event::RunStart;

use super::{Job, begins, events, losses, trained};
use crate::models::at;
use crate::{command, printed, said, text};

const ON: [&str; 2] = ["--device", "gpu:software"];

/// Whether there is such a driver.
#[allow(clippy::print_stderr)] // Says why nothing is shown.
pub fn has_software() -> bool {
    let found: Value = serde_json::from_str(&printed(&["doctor", "--json"])).unwrap();
    let adapters = found["adapters"].as_array();
    let is_there = adapters.is_some_and(|all| all.iter().any(|one| one["is_software"] == true));
    if !is_there {
        eprintln!("no software driver for Vulkan here");
    }
    is_there
}

#[test]
fn a_gpu_trains_as_the_cpu_and_resumes_bit_for_bit() {
    if !has_software() {
        return;
    }
    let (set, more) =
        (["train.steps=2", "train.batch_size=1"], ["train.steps=4", "train.batch_size=1"]);
    let job = Job::new();
    let cpu = job.finish("cpu", &more, &[]);
    let whole = job.finish("whole", &more, &ON);
    job.finish("parts", &set, &ON);
    let parts = job.finish("parts", &more, &[&ON[..], &["--resume"]].concat());
    assert!(trained(&whole) == trained(&parts), "other bytes than without a break");
    let [exact, ours] = [&cpu, &whole].map(|run| losses(&events(run)));
    assert_eq!((exact.len(), ours.len()), (4, 4));
    for (exact, ours) in exact.iter().zip(&ours) {
        assert!((exact - ours).abs() < 1e-5 * exact, "{exact} {ours}");
    }
}

/// Weights go from the file to where they are computed with: a software GPU has the CPU's memory.
#[test]
fn weights_are_read_into_the_memory_of_a_gpu_that_shares_it() {
    if !has_software() {
        return;
    }
    let job = Job::new();
    // Every format is converted on its way; the last one is quantised there.
    for (out, set) in [("plain", "base.dtype=bf16"), ("few", "base.quantise=int8")] {
        let set = ["train.steps=1", "train.batch_size=1", set];
        let run = events(&job.finish(out, &set, &ON));
        let RunStart { loaded_in_place_bytes, loaded_staged_bytes, .. } = *begins(&run)[0];
        let files = fs::metadata(at("pipeline/transformer/diffusion_pytorch_model.safetensors"));
        assert_eq!(loaded_staged_bytes, 0);
        assert!(loaded_in_place_bytes > files.unwrap().len() / 2, "{loaded_in_place_bytes}");
    }
}

#[test]
fn a_language_model_trains_on_a_gpu_as_on_the_cpu() {
    if !has_software() {
        return;
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let place = tempfile::tempdir().unwrap();
    let [recipe, texts] = ["recipes/lm-tiny.toml", "docs"].map(|path| place.path().join(path));
    fs::create_dir_all(&texts).unwrap();
    fs::create_dir_all(recipe.parent().unwrap()).unwrap();
    fs::copy(root.join("docs/ops.md"), texts.join("ops.md")).unwrap();
    // All but what takes long on a CPU that stands for a GPU.
    let job = fs::read_to_string(root.join("recipes/lm-tiny.toml")).unwrap();
    let is_kept = |line: &&str| !line.starts_with("validat");
    let job = job.lines().filter(is_kept).collect::<Vec<_>>().join("\n");
    let (generate, output) = (job.find("[generate]").unwrap(), job.find("[output]").unwrap());
    fs::write(&recipe, job[..generate].to_owned() + &job[output..]).unwrap();
    let set = ["text.length=32", "train.steps=3"];
    // Relative. Measured: nothing, and 7e-4.
    for (dtype, most) in [("base.dtype=f32", 1e-5), ("base.dtype=bf16", 5e-3)] {
        let trained = |out: &str, on: &[&str]| -> Vec<f64> {
            let out = place.path().join(dtype).join(out);
            let set = set.into_iter().chain(["train.batch_size=2", dtype]);
            let set: Vec<&str> = set.flat_map(|value| ["--set", value]).collect();
            let words = ["train", text(&recipe), "--out", text(&out), "--quiet"];
            printed(&[&words[..], &set, on].concat());
            losses(&events(&out))
        };
        let (exact, ours) = (trained("cpu", &[]), trained("gpu", &ON));
        assert_eq!((exact.len(), ours.len()), (3, 3));
        let apart = exact.iter().zip(&ours).map(|(exact, ours)| (ours / exact - 1.0).abs());
        let apart = apart.fold(0.0, f64::max);
        assert!(apart < most, "{dtype}: {apart:e} {exact:?} {ours:?}");
    }
}

/// An op that the self-test found wrong is not trained with.
#[test]
fn a_gpu_that_failed_its_test_is_refused() {
    if !has_software() {
        return;
    }
    let (job, cache) = (Job::new(), tempfile::tempdir().unwrap());
    let mut test = command(&["doctor", "--self-test", "--device", "gpu:software"]);
    let output = test.env("XDG_CACHE_HOME", cache.path()).output().unwrap();
    let page = String::from_utf8_lossy(&output.stdout);
    assert!(page.contains("checks agree with the CPU"), "{page}{}", said(&output));
    let mut kept = fs::read_dir(cache.path().join("hearth")).unwrap();
    let kept = kept.next().unwrap().unwrap().path();
    let text = fs::read_to_string(&kept).unwrap();
    let wrong = text.replace("\"wrong\": []", "\"wrong\": [\"softmax in f32 is wrong\"]");
    assert_ne!(text, wrong);
    fs::write(&kept, wrong).unwrap();
    let mut train = job.command(&["train.steps=1"], &ON);
    let output = train.env("XDG_CACHE_HOME", cache.path()).output().unwrap();
    let words = said(&output);
    assert_eq!(output.status.code(), Some(1), "{words}");
    assert!(
        words.contains("wrong: softmax in f32 is wrong: ") && words.contains("\nhint: "),
        "{words}"
    );
    assert!(!job.path("run/checkpoints").exists());
}

#[test]
fn a_gpu_agrees_with_the_reference() {
    if !has_software() {
        return;
    }
    for (folder, dtype) in
        [("models/sd3", "f32"), ("models/sd35", "bf16"), ("models/vae_kl16", "f32")]
    {
        let folder = at(folder);
        let page = printed(&[&["verify", &folder, "--dtype", dtype][..], &ON].concat());
        assert!(page.contains("are within tolerance"), "{page}");
    }
}
