//! Editing models against what diffusers computed with them (`tests/golden/editing`): FLUX.1 Kontext from a folder of pairs
//! to an adapter, and images from a reference.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use compute::{Device, Dtype};
use serde_json::Value;
use tempfile::TempDir;
use trainer::data::reference::scaled_reference;
use trainer::data::{Bucket, DecodingMemory, decode};
use trainer::model::build::Precision;
use trainer::model::diffusion::Pipeline;
use trainer::model::diffusion::guidance::GuidanceScales;
use trainer::model::diffusion::paths::PartPaths;
use trainer::model::diffusion::text::{EncodeCallbacks, EncoderLoading, EncodingOptions, Prompt};
use trainer::sample::reference::{fit_references, prompt_image};
use trainer::sample::{ImageRequest, SampleJob};

use crate::models::{LIMIT, check, copy_folder, recorded_in};
use crate::train::{check_memory, events, twin};
use crate::{flux, hearth, printed, qwen_image, said, text};

pub fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/editing")
}

/// The parts of the tiny FLUX.1 dev as a Kontext.
pub fn kontext(to: &Path) {
    flux::with_short_prompts(to);
    replace(&to.join("model_index.json"), "\"FluxPipeline\"", "\"FluxKontextPipeline\"");
}

/// The parts of a tiny text-to-image pipeline as an editing one: of the class of `pipeline.json` in a folder of ours.
fn editing(model: &str, to: &Path) -> Value {
    let settings = fs::read_to_string(golden().join(model).join("pipeline.json")).unwrap();
    let settings: Value = serde_json::from_str(&settings).unwrap();
    let (from, plain) = match model {
        "kontext" => (flux::folder("dev"), "FluxPipeline"),
        _ => (qwen_image::golden().join("pipeline"), "QwenImagePipeline"),
    };
    copy_folder(&from, to);
    let class = settings["class"].as_str().unwrap();
    replace(&to.join("model_index.json"), &format!("\"{plain}\""), &format!("\"{class}\""));
    if model == "kontext" {
        return settings;
    }
    // Qwen2.5-VL's own, as published.
    let processor = to.join("processor");
    fs::create_dir(&processor).unwrap();
    let published = r#"{"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2,
        "merge_size": 2, "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711]}"#;
    fs::write(processor.join("preprocessor_config.json"), published).unwrap();
    if model == "edit_2511" {
        let config = to.join("transformer/config.json");
        replace(&config, "\"zero_cond_t\": false", "\"zero_cond_t\": true");
    }
    settings
}

/// Replaces the first occurrence of a text in a file.
fn replace(path: &Path, from: &str, to: &str) {
    let text = fs::read_to_string(path).unwrap();
    assert!(text.contains(from), "{} has no {from}", path.display());
    fs::write(path, text.replacen(from, to, 1)).unwrap();
}

/// An editing pipeline with what diffusers computed.
struct EditingReference {
    model: &'static str,
    settings: Value,
    recorded: HashMap<String, Vec<f32>>,
    pipeline: Pipeline,
    _folder: TempDir,
}

impl EditingReference {
    fn open(model: &'static str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let base = folder.path().join("base");
        Self {
            model,
            settings: editing(model, &base),
            recorded: recorded_in(&golden().join(model).join("pipeline.safetensors")),
            pipeline: Pipeline::open(&base, &PartPaths::default()).unwrap(),
            _folder: folder,
        }
    }

    fn references(&self) -> Vec<PathBuf> {
        let n = self.settings["references"].as_u64().unwrap();
        let name = |number| format!("{}/reference-{number}.png", self.model);
        (0..n).map(|number| golden().join(name(number))).collect()
    }

    fn images(&self, true_cfg: f64) -> Vec<f32> {
        let number = |key: &str| self.settings[key].as_f64().unwrap();
        let texts = self.settings["prompts"].as_array().unwrap().iter();
        let n_images = self.settings["images"].as_u64().unwrap() as usize;
        let request = ImageRequest {
            prompts: texts.take(n_images).map(|text| text.as_str().unwrap().to_owned()).collect(),
            negative: self.settings["negative"].as_str().unwrap().to_owned(),
            size: [0, 1].map(|at| self.settings["size"][at].as_u64().unwrap() as usize),
            frames: 1,
            fps: 1,
            steps: number("steps") as usize,
            guidance: GuidanceScales {
                guidance: number("guidance") as f32,
                true_cfg: true_cfg as f32,
            },
            seed: 1,
            latents: Some(golden().join(self.model).join("pipeline.safetensors")),
            references: self.references(),
            reference_resolution: number("reference_resolution") as usize,
            precision: Precision::plain(Dtype::F32),
        };
        let job = SampleJob::new(&self.pipeline, request).unwrap();
        let kind = Device::cpu(2, LIMIT).unwrap().kind();
        let plan = job.plan(kind, LIMIT).unwrap();
        let device = Device::cpu(2, plan.peak_bytes()).unwrap();
        let clips = job.run(&device, &plan, &|_| true).unwrap();
        clips.into_iter().flat_map(|clip| clip.frames).flat_map(|frame| frame.values).collect()
    }
}

/// In exactly as much memory as was planned.
#[test]
fn images_of_kontext_are_those_of_the_reference() {
    let mut kontext = EditingReference::open("kontext");
    check("image", &kontext.recorded, &kontext.images(1.0));
    let true_cfg = kontext.settings["true_cfg"].as_f64().unwrap();
    check("image_cfg", &kontext.recorded, &kontext.images(true_cfg));
    kontext.pipeline.add_adapter(&flux::folder("dev").join("lora.safetensors")).unwrap();
    check("image_lora", &kontext.recorded, &kontext.images(1.0));
}

/// The first with one reference, which the text encoder sees as large as the VAE; 2511 with two of other sizes.
#[test]
fn images_of_qwen_image_edit_are_those_of_the_reference() {
    for model in ["edit", "edit_2511"] {
        let mut edit = EditingReference::open(model);
        check("image", &edit.recorded, &edit.images(1.0));
        let adapter = qwen_image::golden().join("pipeline/lora.safetensors");
        edit.pipeline.add_adapter(&adapter).unwrap();
        check("image_lora", &edit.recorded, &edit.images(1.0));
    }
}

/// What the text encoder makes of a prompt and its images.
#[test]
fn prompts_of_qwen_image_edit_are_those_of_the_reference() {
    for model in ["edit", "edit_2511"] {
        let edit = EditingReference::open(model);
        let resolution = edit.settings["reference_resolution"].as_u64().unwrap() as usize;
        let sized = fit_references(&edit.pipeline, &edit.references(), resolution).unwrap();
        let memory = Arc::new(DecodingMemory::new(usize::MAX));
        let image = |(path, size): &(PathBuf, _)| prompt_image(path, *size, &memory);
        let images = sized.iter().filter_map(image).collect();
        let prompt = edit.settings["prompts"][0].as_str().unwrap().to_owned();
        let precision = Precision::plain(Dtype::F32);
        let options = EncodingOptions { precision, loading: EncoderLoading::Whole };
        let callbacks =
            EncodeCallbacks { on_begin: &|_, _| (), tick: &|_| true, on_encoded: &|| true };
        let device = Device::cpu(2, LIMIT).unwrap();
        let prompts = [Prompt { text: prompt, images }];
        let encoded = edit.pipeline.encoders.encode(&device, options, &prompts, callbacks).unwrap();
        check("prompt_embeds", &edit.recorded, &encoded[0].0[0].values);
    }
}

/// By Pillow's Lanczos, to the bit.
#[test]
fn references_are_scaled_as_the_pipelines_do_it() {
    let (mut n, memory) = (0, DecodingMemory::new(usize::MAX));
    for entry in fs::read_dir(golden().join("scaled")).unwrap() {
        let path = entry.unwrap().path();
        let stem = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let Some((number, size)) = stem.split_once('-') else { continue };
        let (width, height) = size.split_once('x').unwrap();
        let size = [width, height].map(|side| side.parse::<u32>().unwrap());
        let from = path.with_file_name(format!("{number}.png"));
        let ours = scaled_reference(&from, Bucket::from(size), &memory).unwrap().rgb;
        let theirs = decode(&path).unwrap().rgb;
        assert!(ours == theirs, "{stem}");
        n += 1;
    }
    assert_eq!(n, 3);
}

#[test]
fn training_an_adapter_of_kontext_is_that_of_the_reference() {
    twin::check_adapter(&golden(), &[], twin::OF_FLUX_ADAPTER);
}

/// What is asked of a model that takes references, and of one that does not.
#[test]
fn references_that_a_model_cannot_take_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let base = folder.path().join("base");
    kontext(&base);
    let dev = flux::folder("dev");
    let image = golden().join("kontext/reference-0.png");
    let out = folder.path().join("out.png");
    let sample = |base: &Path, words: &[&str]| {
        let fixed = ["sample", "--base", text(base), "--prompt", "a", "--out", text(&out)];
        said(&hearth(&[&fixed, words].concat()))
    };
    let refused = sample(&base, &[]);
    assert!(
        refused.contains("no reference image for a FLUX.1 Kontext, which edits one"),
        "{refused}"
    );
    let two = ["--reference", text(&image), "--reference", text(&image)];
    let refused = sample(&base, &two);
    assert!(refused.contains("2 reference images, a FLUX.1 Kontext takes at most 1"), "{refused}");
    let refused = sample(&dev, &["--reference", text(&image)]);
    assert!(refused.contains("1 reference image for a FLUX.1, which takes none"), "{refused}");
    let missing = folder.path().join("none.png");
    let refused = sample(&base, &["--reference", text(&missing)]);
    assert!(refused.contains("none.png cannot be read"), "{refused}");
}

/// From a folder of pairs: samples during training, the image that is edited beside them, and an image from the adapter.
#[test]
fn pairs_become_an_adapter_that_edits() {
    for (model, n_references) in [("kontext", 1), ("edit", 1), ("edit_2511", 2)] {
        let folder = tempfile::tempdir().unwrap();
        let [base, run, out] = ["base", "run", "out.png"].map(|name| folder.path().join(name));
        editing(model, &base);
        // Its text encoder sees larger images.
        let is_small = model != "edit_2511";
        let at = |name: &str| format!("\"{}\"", text(&golden().join("train").join(name)));
        let settings = [
            &format!("base.path='{}'", text(&base)),
            &format!("data.references=[{}]", vec![at("control"); n_references].join(", ")),
            "train.steps=2",
            &format!("data.flip={is_small}"),
            "data.validation=2",
            &format!("data.caption_dropout={}", if is_small { 0.5 } else { 0.0 }),
            "sample.prompts=['a fox', 'a boat']",
            "sample.every=1",
            "sample.size=64",
            "sample.steps=2",
        ];
        let job = folder.path().join("job.toml");
        let toml = fs::read_to_string(golden().join("train/job.toml")).unwrap();
        let guidance = if model == "kontext" { "guidance_scale = 1.0\n" } else { "" };
        let toml = toml.replace("guidance_scale = 1.0\n", guidance);
        let toml = toml.replace("\"../../sd3/train/images\"", &at("../../sd3/train/images"));
        fs::write(&job, toml.replace("\"control\"", &at("control"))).unwrap();
        let settings: Vec<&str> = settings.iter().flat_map(|setting| ["--set", setting]).collect();
        printed(&[&["train", text(&job), "--out", text(&run), "--quiet"], &settings[..]].concat());
        // Plans are for the longest prompt; those of Qwen-Image are not padded to it.
        let [taken, planned] = check_memory(&events(&run));
        assert!(taken <= planned && (model != "kontext" || taken == planned), "{taken} {planned}");
        assert!(run.join("samples/reference-2-1.png").is_file());
        assert!(run.join("samples/step-000002-2.png").is_file());
        let reference = golden().join("kontext/reference-0.png");
        let words = ["--adapter", text(&run), "--reference", text(&reference), "--steps", "2"];
        let fixed = ["sample", "--base", text(&base), "--prompt", "a fox", "--out", text(&out)];
        printed(&[&fixed, &words[..], &["--reference-resolution", "96", "--size", "64"]].concat());
        assert!(out.is_file());
    }
}
