//! Qwen-Image: the transformer against diffusers' (`tests/golden/qwen_image/generate.py`), with prompts of different length
//! and images of odd sides; adapters of other programs (`adapters.py` there).

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use trainer::export::export;
use trainer::model::adapter::AdapterFormat;
use trainer::model::diffusion::Pipeline;
use trainer::model::diffusion::paths::PartPaths;

use crate::flux_files::{Tensors, read, with_prefix, write, write_gguf};
use crate::models::{check, copy_folder};
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

#[test]
fn transformers_in_fp8_are_those_of_the_reference() {
    let folder = golden().join("pipeline/transformer");
    for file in ["scaled", "cast"] {
        let at = |end: &str| golden().join(format!("files/{file}{end}"));
        let (weights, reference) = (at(".safetensors"), at(".golden.safetensors"));
        let files = ["--weights", text(&weights), "--golden", text(&reference)];
        let page = printed(&[&["verify", text(&folder)][..], &files].concat());
        assert!(page.contains("within tolerance"), "{file}: {page}");
    }
}

/// The parts of a pipeline as ComfyUI's users have them, found in its folders; a folder with tokenizer and configs.
fn comfyui(to: &Path) -> PathBuf {
    let pipeline = golden().join("pipeline");
    let part = |file: &str| read(&pipeline.join(file));
    let names = fs::read_to_string(golden().join("files/vae_names.json")).unwrap();
    let names: Value = serde_json::from_str(&names).unwrap();
    let vae = part("vae/diffusion_pytorch_model.safetensors").into_iter();
    let vae: Tensors = vae.map(|(name, it)| (names[&name].as_str().unwrap().into(), it)).collect();
    write(&to.join("vae/qwen_image_vae.safetensors"), &vae);
    let encoder = part("text_encoder/model.safetensors");
    write(&to.join("text_encoders/qwen_2.5_vl_7b.safetensors"), &encoder);
    let transformer = part("transformer/diffusion_pytorch_model.safetensors");
    let path = to.join("diffusion_models/qwen_image_bf16.safetensors");
    write(&path, &transformer);
    let prefixed = with_prefix("model.diffusion_model.", &transformer);
    write(&to.join("diffusion_models/prefixed.safetensors"), &prefixed);
    write_gguf(&to.join("diffusion_models/qwen-image-f32.gguf"), "qwen_image", &transformer);
    copy_folder(&pipeline, &to.join("rest"));
    for file in [
        "transformer/diffusion_pytorch_model.safetensors",
        "vae/diffusion_pytorch_model.safetensors",
        "text_encoder/model.safetensors",
    ] {
        fs::remove_file(to.join("rest").join(file)).unwrap();
    }
    path
}

/// Every form gives the images of diffusers; those of 16 bits, as the folder is, its bits too.
#[test]
fn separate_files_and_gguf_give_the_images_of_the_folder() {
    let place = tempfile::tempdir().unwrap();
    let base = comfyui(place.path());
    let mut reference = Reference::open(&golden().join("pipeline"));
    let expected = reference.images(1.0);
    check("image", &reference.recorded, &expected);
    for file in ["qwen_image_bf16.safetensors", "prefixed.safetensors", "qwen-image-f32.gguf"] {
        let rest = PartPaths::rest(&place.path().join("rest"));
        reference.pipeline = Pipeline::open(&base.with_file_name(file), &rest).unwrap();
        let images = reference.images(1.0);
        check("image", &reference.recorded, &images);
        assert!(images == expected || file.contains("f32"), "{file}");
    }
}
