//! Kandinsky 5: the transformer against diffusers' (`tests/golden/kandinsky5/generate.py`), images and clips, with prompts of
//! different length; files, adapters of other programs, and what is refused.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tempfile::TempDir;
use trainer::export::export;
use trainer::model::adapter::AdapterFormat;
use trainer::model::diffusion::Pipeline;
use trainer::model::diffusion::paths::PartPaths;

use crate::flux_files::{read, with_prefix, write};
use crate::models::{check, copy_folder};
use crate::pipelines::Reference;
use crate::{hearth, printed, said, text};

pub fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/kandinsky5")
}

/// The pipeline for images.
fn pipeline() -> TempDir {
    assembled(&golden().join("original"))
}

/// A pipeline, put together from its own parts and those of other families, as the folder's `golden.json` says.
pub fn assembled(folder: &Path) -> TempDir {
    let place = TempDir::new().unwrap();
    let settings = fs::read_to_string(folder.join("golden.json")).unwrap();
    let settings: Value = serde_json::from_str(&settings).unwrap();
    for (part, from) in settings["parts"].as_object().unwrap() {
        let from = golden().join("..").join(from.as_str().unwrap());
        copy_folder(&from, &place.path().join(part));
    }
    let index = format!(
        r#"{{"_class_name": {}, "max_sequence_length": {}, "is_distilled": {}}}"#,
        settings["class"],
        settings["length"],
        settings["is_distilled"].as_bool().unwrap_or(false)
    );
    fs::write(place.path().join("model_index.json"), index).unwrap();
    place
}

#[test]
fn outputs_and_gradients_are_those_of_the_reference() {
    for (folder, n) in [("image", 19), ("video", 19), ("standard", 1)] {
        let folder = golden().join(folder);
        for dtype in ["f32", "bf16", "f16"] {
            let page = printed(&["verify", text(&folder), "--dtype", dtype]);
            let expected = format!("all {n} tensors are within tolerance");
            assert!(page.contains(&expected), "{page}");
        }
    }
}

#[test]
fn an_adapter_goes_from_any_program_to_any_other() {
    let out = TempDir::new().unwrap();
    let mut reference = Reference::open(&golden().join("original"));
    let lora = golden().join("pipeline/lora.safetensors");
    reference.pipeline.add_adapter(&lora).unwrap();
    // Each is made of the one before, so that all are read once and written once.
    for format in [
        AdapterFormat::Comfyui,
        AdapterFormat::Kohya,
        AdapterFormat::Peft,
        AdapterFormat::Diffusers,
    ] {
        let done = export(&mut reference.pipeline, format, out.path(), "x").unwrap();
        assert_eq!(done.n_layers, 20, "{format:?}");
        reference.pipeline.add_adapter(&done.path).unwrap();
        check("image_lora", &reference.recorded, &reference.images(1.0));
    }
}

/// A transformer in a single file, with and without a prefix, gives the bits of its folder.
#[test]
fn a_single_file_gives_the_images_of_the_folder() {
    let place = pipeline();
    let mut reference = Reference::open(&golden().join("original"));
    let expected = reference.images(1.0);
    let weights = read(&place.path().join("transformer/diffusion_pytorch_model.safetensors"));
    for (file, prefix) in [("kandinsky5lite_t2i", ""), ("other", "model.diffusion_model.")] {
        let path = place.path().join(format!("{file}.safetensors"));
        write(&path, &with_prefix(prefix, &weights));
        reference.pipeline = Pipeline::open(&path, &PartPaths::rest(place.path())).unwrap();
        assert!(reference.images(1.0) == expected, "{file}");
    }
}

/// Replaces a piece of a file.
pub fn change(path: &Path, from: &str, to: &str) {
    let before = fs::read_to_string(path).unwrap();
    assert!(before.contains(from), "{before}");
    fs::write(path, before.replace(from, to)).unwrap();
}

#[test]
fn models_that_hearth_does_not_support_are_refused_by_name() {
    let cases = [
        (
            "transformer/config.json",
            "\"regular\"",
            "\"nabla\"",
            "sparse attention of models for 10 s",
        ),
        ("model_index.json", "T2IPipeline", "I2IPipeline", "makes images or clips from images"),
        ("transformer/config.json", "    1,\n    2,", "    2,\n    2,", "is not [1, n, n]"),
    ];
    for (file, from, to, expected) in cases {
        let place = pipeline();
        change(&place.path().join(file), from, to);
        let out = place.path().join("x.png");
        let base = text(place.path());
        let words =
            said(&hearth(&["sample", "--base", base, "--prompt", "a", "--out", text(&out)]));
        assert!(words.contains(expected) && words.contains("\nhint: "), "{words}");
    }
}

#[test]
fn another_family_has_one_implementation() {
    let base = golden().join("../qwen_image/pipeline");
    let words = ["sample", "--base", text(&base), "--prompt", "a", "--implementation", "diffusers"];
    let words = said(&hearth(&words));
    let expected = "implementation is diffusers, but for a Qwen-Image base there is only one";
    assert!(words.contains(expected), "{words}");
}
