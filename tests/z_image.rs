//! Z-Image: the transformer against diffusers' (`tests/golden/z_image/generate.py`), with prompts and images that are filled up
//! and not; files, adapters of other programs (`files.py` there), and what is refused.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tempfile::TempDir;
use trainer::export::export;
use trainer::model::adapter::AdapterFormat;
use trainer::model::diffusion::Pipeline;
use trainer::model::diffusion::paths::PartPaths;

use crate::flux_files::{fused, read, with_prefix, write, write_gguf};
use crate::kandinsky5::{assembled, change};
use crate::models::{check, copy_folder};
use crate::pipelines::Reference;
use crate::{hearth, printed, said, text};

pub fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/z_image")
}

/// Copies the pipeline there.
pub fn copy_base(to: &Path) {
    copy_folder(assembled(&golden().join("base")).path(), to);
}

#[test]
fn outputs_and_gradients_are_those_of_the_reference() {
    for folder in ["padded", "whole"].map(|folder| golden().join(folder)) {
        for dtype in ["f32", "bf16", "f16"] {
            let page = printed(&["verify", text(&folder), "--dtype", dtype]);
            assert!(page.contains("all 19 tensors are within tolerance"), "{page}");
        }
    }
}

#[test]
fn adapters_of_all_programs_are_the_same() {
    let transformer = golden().join("pipeline/transformer");
    let at = |file: &str| golden().join(format!("adapters/{file}.safetensors"));
    for file in ["musubi", "ai_toolkit", "diffusers", "peft", "comfyui_fused", "kohya_fused"] {
        let (adapter, expected) = (at(file), at("golden"));
        let verify = ["verify", text(&transformer), "--golden", text(&expected)];
        let page = printed(&[&verify[..], &["--adapter", text(&adapter)]].concat());
        assert!(page.contains("all 2 tensors are within tolerance"), "{file}: {page}");
    }
}

#[test]
fn an_adapter_goes_from_any_program_to_any_other() {
    let out = TempDir::new().unwrap();
    let mut reference = Reference::open(&golden().join("base"));
    reference.pipeline.add_adapter(&golden().join("base/lora.safetensors")).unwrap();
    // Each is made of the one before, so that all are read once and written once.
    for format in [
        AdapterFormat::Comfyui,
        AdapterFormat::Kohya,
        AdapterFormat::Peft,
        AdapterFormat::Diffusers,
    ] {
        let done = export(&mut reference.pipeline, format, out.path(), "x").unwrap();
        assert_eq!(done.n_layers, 30, "{format:?}");
        reference.pipeline.add_adapter(&done.path).unwrap();
        check("image_lora", &reference.recorded, &reference.images(1.0));
    }
}

/// The transformer in the layout of its authors and of ComfyUI, with and without a prefix, and as GGUF, gives the bits of the
/// folder; the text encoder is found where ComfyUI has it.
#[test]
fn single_files_and_gguf_give_the_images_of_the_folder() {
    let place = assembled(&golden().join("base"));
    let mut reference = Reference::open(&golden().join("base"));
    let expected = reference.images(1.0);
    check("image", &reference.recorded, &expected);
    let names = fs::read_to_string(golden().join("names.json")).unwrap();
    let names: Value = serde_json::from_str(&names).unwrap();
    let file = |part: &str| place.path().join(part);
    let own = read(&file("transformer/diffusion_pytorch_model.safetensors"));
    let transformer = fused(&own, &names);
    let models = place.path().join("models/diffusion_models");
    write(&models.join("z_image_bf16.safetensors"), &transformer);
    let prefixed = with_prefix("model.diffusion_model.", &transformer);
    write(&models.join("prefixed.safetensors"), &prefixed);
    write_gguf(&models.join("z-image-f32.gguf"), "lumina2", &transformer);
    // Without its last layer too, which is not used.
    let encoder = file("text_encoder/model.safetensors");
    let weights = with_prefix("model.", &read(&encoder));
    let weights = weights.into_iter().filter(|(name, _)| !name.contains("layers.2."));
    write(&place.path().join("models/text_encoders/qwen_3_4b.safetensors"), &weights.collect());
    for part in [encoder, file("transformer/diffusion_pytorch_model.safetensors")] {
        fs::remove_file(part).unwrap();
    }
    for name in ["z_image_bf16.safetensors", "prefixed.safetensors", "z-image-f32.gguf"] {
        let rest = PartPaths::rest(place.path());
        reference.pipeline = Pipeline::open(&models.join(name), &rest).unwrap();
        // Matrices of 16 bits and of 32 are multiplied in another order.
        let images = reference.images(1.0);
        check("image", &reference.recorded, &images);
        assert!(images == expected || name.contains("f32"), "{name}");
    }
}

#[test]
fn models_that_hearth_does_not_support_are_refused_by_name() {
    let cases = [
        ("\"siglip_feat_dim\": null", "\"siglip_feat_dim\": 8", "Z-Image Omni"),
        ("\"n_kv_heads\": 2", "\"n_kv_heads\": 1", "n_kv_heads 1 is not n_heads 2"),
        ("\"rope_theta\": 256.0", "\"rope_theta\": 0.0", "rope_theta is 0"),
    ];
    for (from, to, expected) in cases {
        let place = assembled(&golden().join("base"));
        change(&place.path().join("transformer/config.json"), from, to);
        let out = place.path().join("x.png");
        let base = text(place.path());
        let words =
            said(&hearth(&["sample", "--base", base, "--prompt", "a", "--out", text(&out)]));
        assert!(words.contains(expected), "{words}");
    }
}
