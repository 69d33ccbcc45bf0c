//! Qwen-Image: the transformer against diffusers' (`tests/golden/qwen_image/generate.py`), with prompts of different length
//! and images of odd sides; adapters of other programs (`adapters.py` there).

use std::path::{Path, PathBuf};

use trainer::export::export;
use trainer::model::adapter::AdapterFormat;

use crate::models::check;
use crate::pipelines::Reference;
use crate::{printed, text};

pub fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/qwen_image")
}

#[test]
fn outputs_and_gradients_are_those_of_the_reference() {
    for folder in ["mask", "plain"].map(|folder| golden().join(folder)) {
        for dtype in ["f32", "bf16", "f16"] {
            let page = printed(&["verify", text(&folder), "--dtype", dtype]);
            assert!(page.contains("all 15 tensors are within tolerance"), "{page}");
        }
    }
}

#[test]
fn adapters_of_all_programs_are_the_same() {
    let transformer = golden().join("pipeline/transformer");
    let at = |file: &str| golden().join(format!("adapters/{file}.safetensors"));
    let programs =
        ["musubi", "comfyui", "ai_toolkit", "flymyai", "bare", "peft", "onetrainer", "simpletuner"];
    for file in programs {
        let (adapter, expected) = (at(file), at("golden"));
        let verify = ["verify", text(&transformer), "--golden", text(&expected)];
        let page = printed(&[&verify[..], &["--adapter", text(&adapter)]].concat());
        assert!(page.contains("all 2 tensors are within tolerance"), "{file}: {page}");
    }
}

#[test]
fn an_adapter_goes_from_any_program_to_any_other() {
    let out = tempfile::tempdir().unwrap();
    let mut reference = Reference::open(&golden().join("pipeline"));
    reference.pipeline.add_adapter(&reference.folder.join("lora.safetensors")).unwrap();
    // Each is made of the one before, so that all are read once and written once.
    for format in [
        AdapterFormat::Comfyui,
        AdapterFormat::Kohya,
        AdapterFormat::Peft,
        AdapterFormat::Diffusers,
    ] {
        let done = export(&mut reference.pipeline, format, out.path(), "x").unwrap();
        assert_eq!(done.n_layers, 16, "{format:?}");
        reference.pipeline.add_adapter(&done.path).unwrap();
        check("image_lora", &reference.recorded, &reference.images(1.0));
    }
}
