//! FLUX.2 klein: the transformer against diffusers' (`tests/golden/flux2/generate.py`), with references and without, and its VAE;
//! images with one reference; files, adapters of other programs (`files.py` there), distilled models, and what is refused.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tempfile::TempDir;
use trainer::data::reference::{ReferenceSize, scaled_reference};
use trainer::data::{Bucket, DecodingMemory, decode};
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
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/flux2")
}

/// Copies the pipeline there.
pub fn copy_base(to: &Path) {
    copy_folder(assembled(&golden().join("base")).path(), to);
}

#[test]
fn outputs_and_gradients_are_those_of_the_reference() {
    for (folder, n) in [("image", 23), ("references", 23), ("vae", 4)] {
        let folder = golden().join(folder);
        for dtype in ["f32", "bf16", "f16"] {
            let page = printed(&["verify", text(&folder), "--dtype", dtype]);
            assert!(page.contains(&format!("all {n} tensors are within tolerance")), "{page}");
        }
    }
}

/// With two it is in `tests/pipelines.rs`.
#[test]
fn an_image_of_one_reference_is_that_of_the_pipeline() {
    let edit = Reference::open(&golden().join("edit"));
    let images = edit.images_of(1.0, edit.references()[..1].to_vec());
    check("image_one", &edit.recorded, &images[..images.len() / 2]);
}

/// Scaled down by Pillow's Lanczos where they are larger, and cropped, to the bit.
#[test]
fn references_are_cropped_as_the_pipeline_does_it() {
    let (mut n, memory) = (0, DecodingMemory::new(usize::MAX));
    for entry in fs::read_dir(golden().join("scaled")).unwrap() {
        let path = entry.unwrap().path();
        let stem = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let Some((number, size)) = stem.split_once('-') else { continue };
        let (width, height) = size.split_once('x').unwrap();
        let size = [width, height].map(|side| side.parse::<u32>().unwrap());
        let from = path.with_file_name(format!("{number}.png"));
        let fit = ReferenceSize { vae: Bucket::from(size), cropped_from: Some(96), encoder: None };
        let ours = scaled_reference(&from, fit.of_vae(), &memory).unwrap();
        assert!(ours == decode(&path).unwrap(), "{stem}");
        n += 1;
    }
    assert_eq!(n, 3);
}

#[test]
fn adapters_of_all_programs_are_the_same() {
    let transformer = golden().join("pipeline/transformer");
    let at = |file: &str| golden().join(format!("adapters/{file}.safetensors"));
    for file in ["musubi", "ai_toolkit", "diffusers", "peft"] {
        let (adapter, expected) = (at(file), at("golden"));
        let verify = ["verify", text(&transformer), "--golden", text(&expected)];
        let page = printed(&[&verify[..], &["--adapter", text(&adapter)]].concat());
        assert!(page.contains("all 2 tensors are within tolerance"), "{file}: {page}");
    }
}

#[test]
fn an_adapter_goes_from_any_program_to_any_other() {
    let out = TempDir::new().unwrap();
    let mut reference = Reference::open(&golden().join("distilled"));
    reference.pipeline.add_adapter(&golden().join("pipeline/lora.safetensors")).unwrap();
    // Each is made of the one before, so that all are read once and written once.
    for format in [
        AdapterFormat::Comfyui,
        AdapterFormat::Kohya,
        AdapterFormat::Peft,
        AdapterFormat::Diffusers,
    ] {
        let done = export(&mut reference.pipeline, format, out.path(), "x").unwrap();
        if format == AdapterFormat::Comfyui {
            let names = tensor_names(&done.path);
            // The authors' names, with q, k and v of a block as one.
            let qkv = "diffusion_model.double_blocks.0.img_attn.qkv.lora_A.weight";
            let single = "diffusion_model.single_blocks.1.linear1.lora_B.weight";
            assert!([qkv, single].iter().all(|name| names.contains(&(*name).into())), "{names:?}");
        }
        reference.pipeline.add_adapter(&done.path).unwrap();
        let images = reference.images(1.0);
        check("image_lora", &reference.recorded, &images[..images.len() / 2]);
    }
}

fn tensor_names(path: &Path) -> Vec<String> {
    let bytes = fs::read(path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    file.names().into_iter().map(str::to_owned).collect()
}

/// Transformer and VAE in the layout of their authors and of ComfyUI, with and without a prefix, and the transformer as GGUF, give
/// the bits of the folder; the other parts are found where ComfyUI has them.
#[test]
fn single_files_and_gguf_give_the_images_of_the_folder() {
    let place = assembled(&golden().join("base"));
    let mut reference = Reference::open(&golden().join("base"));
    let expected = reference.images(1.0);
    check("image", &reference.recorded, &expected);
    let names = |file: &str| -> Value {
        serde_json::from_str(&fs::read_to_string(golden().join(file)).unwrap()).unwrap()
    };
    let file = |part: &str| place.path().join(part);
    let own = read(&file("transformer/diffusion_pytorch_model.safetensors"));
    let transformer = fused(&own, &names("names.json"));
    let models = place.path().join("models/diffusion_models");
    write(&models.join("flux-2-klein-base-4b.safetensors"), &transformer);
    let prefixed = with_prefix("model.diffusion_model.", &transformer);
    write(&models.join("prefixed.safetensors"), &prefixed);
    write_gguf(&models.join("flux2-klein-base-f32.gguf"), "flux", &transformer);
    let (vae, vae_names) =
        (file("vae/diffusion_pytorch_model.safetensors"), names("vae_names.json"));
    let renamed = read(&vae).into_iter();
    let renamed = renamed.map(|(name, it)| (vae_names[&name].as_str().unwrap().to_owned(), it));
    write(&place.path().join("models/vae/flux2-vae.safetensors"), &renamed.collect());
    // Without its last layer too, which is not used.
    let encoder = file("text_encoder/model.safetensors");
    let weights = read(&encoder).into_iter().filter(|(name, _)| !name.contains("layers.27."));
    write(&place.path().join("models/text_encoders/qwen_3_4b.safetensors"), &weights.collect());
    for part in [encoder, vae, file("transformer/diffusion_pytorch_model.safetensors")] {
        fs::remove_file(part).unwrap();
    }
    let rest = PartPaths::rest(place.path());
    for name in
        ["flux-2-klein-base-4b.safetensors", "prefixed.safetensors", "flux2-klein-base-f32.gguf"]
    {
        reference.pipeline = Pipeline::open(&models.join(name), &rest).unwrap();
        // Matrices of 16 bits and of 32 are multiplied in another order.
        let images = reference.images(1.0);
        check("image", &reference.recorded, &images);
        assert!(images == expected || name.contains("f32"), "{name}");
    }
    // Of a single file the name says whether it is distilled.
    let distilled = models.join("flux-2-klein-4b.safetensors");
    fs::rename(models.join("prefixed.safetensors"), &distilled).unwrap();
    let pipeline = Pipeline::open(&distilled, &rest).unwrap();
    assert_eq!(pipeline.family().title, "a FLUX.2 klein 4B");
    assert_eq!(reference.pipeline.family().title, "a FLUX.2 klein base 4B");
}

/// Of a folder `model_index.json` says it, whatever the folder is called.
#[test]
fn training_a_distilled_model_is_warned_of() {
    let place = assembled(&golden().join("distilled"));
    let (job, out) = (golden().join("train/job.toml"), place.path().join("run"));
    let base = format!("base.path='{}'", text(place.path()));
    let train = ["train", text(&job), "--set", &base, "--set", "train.steps=1"];
    printed(&[&train[..], &["--out", text(&out)]].concat());
    let journal = fs::read_to_string(out.join("events.jsonl")).unwrap();
    for words in
        ["a FLUX.2 klein 4B is distilled to few steps", "black-forest-labs/FLUX.2-klein-base-4B"]
    {
        assert!(journal.contains(words), "{journal}");
    }
}

#[test]
fn models_that_hearth_does_not_support_are_refused_by_name() {
    let transformer = "transformer/config.json";
    let cases = [
        (transformer, "\"guidance_embeds\": false", "\"guidance_embeds\": true", "FLUX.2 dev"),
        (transformer, "\"mlp_ratio\": 3.0", "\"mlp_ratio\": 2.5", "mlp_ratio 2.5 is not a whole"),
        (
            "text_encoder/config.json",
            "\"num_hidden_layers\": 28",
            "\"num_hidden_layers\": 27",
            "num_hidden_layers is 27, states up to that after layer 27 are taken",
        ),
        (
            "vae/config.json",
            "\"patch_size\": [\n    2,\n    2\n  ]",
            "\"patch_size\": [4, 4]",
            "patch_size 4x4 is not 2x2",
        ),
    ];
    for (file, from, to, expected) in cases {
        let place = assembled(&golden().join("base"));
        change(&place.path().join(file), from, to);
        let out = place.path().join("x.png");
        let base = text(place.path());
        let words =
            said(&hearth(&["sample", "--base", base, "--prompt", "a", "--out", text(&out)]));
        assert!(words.contains(expected), "{words}");
    }
}
