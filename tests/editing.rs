//! Editing models against what diffusers computed with them (`tests/golden/editing`): FLUX.1 Kontext from a folder of pairs
//! to an adapter, and images from a reference.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use compute::{Device, Dtype};
use serde_json::Value;
use tempfile::TempDir;
use trainer::data::reference::scaled_reference;
use trainer::data::{Bucket, decode};
use trainer::model::build::Precision;
use trainer::model::diffusion::Pipeline;
use trainer::model::diffusion::guidance::GuidanceScales;
use trainer::model::diffusion::paths::PartPaths;
use trainer::sample::{ImageRequest, SampleJob};

use crate::models::{LIMIT, check, copy_folder, recorded_in};
use crate::train::twin;
use crate::{flux, hearth, printed, said, text};

pub fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/editing")
}

/// The parts of the tiny FLUX.1 dev as a Kontext.
pub fn kontext(to: &Path) {
    flux::with_short_prompts(to);
    let path = to.join("model_index.json");
    let index = fs::read_to_string(&path).unwrap();
    fs::write(path, index.replace("\"FluxPipeline\"", "\"FluxKontextPipeline\"")).unwrap();
}

/// The same with prompts as long as published ones.
fn long_kontext(to: &Path) {
    copy_folder(&flux::folder("dev"), to);
    let path = to.join("model_index.json");
    let index = fs::read_to_string(&path).unwrap();
    fs::write(path, index.replace("\"FluxPipeline\"", "\"FluxKontextPipeline\"")).unwrap();
}

struct Kontext {
    settings: Value,
    recorded: HashMap<String, Vec<f32>>,
    pipeline: Pipeline,
    _folder: TempDir,
}

impl Kontext {
    fn open() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let base = folder.path().join("base");
        long_kontext(&base);
        let settings = fs::read_to_string(golden().join("kontext/pipeline.json")).unwrap();
        Self {
            settings: serde_json::from_str(&settings).unwrap(),
            recorded: recorded_in(&golden().join("kontext/pipeline.safetensors")),
            pipeline: Pipeline::open(&base, &PartPaths::default()).unwrap(),
            _folder: folder,
        }
    }

    fn images(&self, true_cfg: f64) -> Vec<f32> {
        let number = |key: &str| self.settings[key].as_f64().unwrap();
        let texts = self.settings["prompts"].as_array().unwrap().iter();
        let request = ImageRequest {
            prompts: texts.map(|text| text.as_str().unwrap().to_owned()).collect(),
            negative: self.settings["negative"].as_str().unwrap().to_owned(),
            size: [0, 1].map(|at| self.settings["size"][at].as_u64().unwrap() as usize),
            steps: number("steps") as usize,
            guidance: GuidanceScales {
                guidance: number("guidance") as f32,
                true_cfg: true_cfg as f32,
            },
            seed: 1,
            latents: Some(golden().join("kontext/pipeline.safetensors")),
            references: vec![golden().join("kontext/reference.png")],
            reference_resolution: number("reference_resolution") as usize,
            precision: Precision::plain(Dtype::F32),
        };
        let job = SampleJob::new(&self.pipeline, request).unwrap();
        let kind = Device::cpu(2, LIMIT).unwrap().kind();
        let plan = job.plan(kind, LIMIT).unwrap();
        let device = Device::cpu(2, plan.peak_bytes()).unwrap();
        let images = job.run(&device, &plan, &|_| true).unwrap();
        images.into_iter().flat_map(|image| image.values).collect()
    }
}

/// In exactly as much memory as was planned.
#[test]
fn images_of_kontext_are_those_of_the_reference() {
    let mut kontext = Kontext::open();
    check("image", &kontext.recorded, &kontext.images(1.0));
    let true_cfg = kontext.settings["true_cfg"].as_f64().unwrap();
    check("image_cfg", &kontext.recorded, &kontext.images(true_cfg));
    kontext.pipeline.add_adapter(&flux::folder("dev").join("lora.safetensors")).unwrap();
    check("image_lora", &kontext.recorded, &kontext.images(1.0));
}

/// By Pillow's Lanczos, which rounds to bytes between its two passes.
#[test]
fn references_are_scaled_as_the_pipelines_do_it() {
    let mut n = 0;
    for entry in fs::read_dir(golden().join("scaled")).unwrap() {
        let path = entry.unwrap().path();
        let stem = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let Some((number, size)) = stem.split_once('-') else { continue };
        let (width, height) = size.split_once('x').unwrap();
        let size = [width, height].map(|side| side.parse::<u32>().unwrap());
        let from = path.with_file_name(format!("{number}.png"));
        let ours = scaled_reference(&from, Bucket::from(size)).unwrap().rgb;
        let theirs = decode(&path).unwrap().rgb;
        let apart = ours.iter().zip(&theirs).map(|(a, b)| a.abs_diff(*b)).max();
        assert!(apart <= Some(1), "{stem}: {apart:?}");
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
    let image = golden().join("kontext/reference.png");
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
    assert!(refused.contains("1 reference images for a FLUX.1, which takes none"), "{refused}");
    let missing = folder.path().join("none.png");
    let refused = sample(&base, &["--reference", text(&missing)]);
    assert!(refused.contains("none.png cannot be read"), "{refused}");
}

/// From a folder of pairs: samples during training, the image that is edited beside them, and an image from the adapter.
#[test]
fn pairs_become_an_adapter_that_edits() {
    let folder = tempfile::tempdir().unwrap();
    let [base, run, out] = ["base", "run", "out.png"].map(|name| folder.path().join(name));
    kontext(&base);
    let job = golden().join("train/job.toml");
    let set = |setting: &str| ["--set".to_owned(), setting.to_owned()];
    let settings = [
        format!("base.path='{}'", text(&base)),
        "train.steps=2".into(),
        "data.flip=true".into(),
        "data.validation=2".into(),
        "data.caption_dropout=0.5".into(),
        "sample.prompts=['a fox']".into(),
        "sample.every=1".into(),
        "sample.size=64".into(),
        "sample.steps=2".into(),
    ];
    let settings: Vec<String> = settings.iter().flat_map(|setting| set(setting)).collect();
    let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
    printed(&[&["train", text(&job), "--out", text(&run), "--quiet"], &settings[..]].concat());
    assert!(run.join("samples/reference-1-1.png").is_file());
    assert!(run.join("samples/step-000002-1.png").is_file());
    let reference = golden().join("kontext/reference.png");
    let words = ["--adapter", text(&run), "--reference", text(&reference), "--steps", "2"];
    let fixed = ["sample", "--base", text(&base), "--prompt", "a fox", "--out", text(&out)];
    printed(&[&fixed, &words[..], &["--reference-resolution", "96", "--size", "64"]].concat());
    assert!(out.is_file());
}
