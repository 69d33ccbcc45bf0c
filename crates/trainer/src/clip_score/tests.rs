//! Embeddings and cosines against transformers (`tests/golden/clip_score`), and the model's memory against the plan.

use std::fs;
use std::path::{Path, PathBuf};

use compute::{Device, DeviceKind, Dtype};
use weights::Catalog;
use weights::load::load_f32;

use super::SampleScorer;
use super::model::ClipModel;
use crate::data;
use crate::event::history::SampleImage;
use crate::model::build::Precision;
use crate::model::host::relative_error;

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/clip_score")
}

const MODELS: [&str; 2] = ["folder", "older"];
const IMAGES: [&str; 3] = ["wide", "tall", "large"];
const PLAIN: Precision = Precision::plain(Dtype::F32);

fn image(name: &str) -> PathBuf {
    golden().join(format!("../caption/images/{name}.png"))
}

fn prompts() -> [String; 3] {
    let long = "The fox, at night: a photo of a fox in the snow, ".repeat(12);
    ["a red fox".into(), String::new(), long]
}

fn device() -> Device {
    Device::cpu(2, 64 << 20).unwrap()
}

fn values(catalog: &Catalog, key: &str) -> Vec<f32> {
    let tensor = catalog.find(key).unwrap();
    load_f32(catalog, tensor, 0..tensor.numel()).unwrap()
}

fn sample(path: PathBuf, prompt: &str) -> SampleImage {
    let prompt = prompt.to_owned();
    SampleImage { step: 0, path, prompt, seed: 1, references: Vec::new(), clip: None }
}

#[test]
fn embeddings_are_those_of_transformers() {
    for name in MODELS {
        let expected = Catalog::open(&golden().join(name).join("golden.safetensors")).unwrap();
        let expected = |key: &str| values(&expected, key);
        let (model, device) = (ClipModel::open(&golden().join(name)).unwrap(), device());
        let loaded = model.load(&device, PLAIN, &|_| true).unwrap();
        for (at, prompt) in prompts().iter().enumerate() {
            let error =
                relative_error(&loaded.text(prompt).unwrap(), &expected(&format!("text.{at}")));
            assert!(error < 1e-5, "{name}: text {at}: {error}");
        }
        for image_name in IMAGES {
            let pixels = data::decode(&image(image_name)).unwrap();
            let patches = model.processor().patches(pixels.clone());
            let error = relative_error(&patches, &expected(&format!("patches.{image_name}")));
            assert!(error < 1e-5, "{name}: patches of {image_name}: {error}");
            let embedding = loaded.image(pixels).unwrap();
            let error = relative_error(&embedding, &expected(&format!("image.{image_name}")));
            assert!(error < 1e-5, "{name}: {image_name}: {error}");
        }
    }
}

#[test]
fn scores_are_cosines() {
    for name in MODELS {
        let expected = Catalog::open(&golden().join(name).join("golden.safetensors")).unwrap();
        let [to_texts, to_images] =
            ["text_cosines", "image_cosines"].map(|key| values(&expected, key));
        let (model, device) = (ClipModel::open(&golden().join(name)).unwrap(), device());
        let loaded = model.load(&device, PLAIN, &|_| true).unwrap();
        let mut scorer = SampleScorer::new(&loaded);
        let alone = scorer.score(Path::new(""), &sample(image("wide"), "a red fox"));
        assert_eq!(alone.unwrap().unwrap().to_images, None);
        for image_name in IMAGES {
            scorer.add_image(&image(image_name)).unwrap().unwrap();
        }
        let is_near = |a: f64, b: f32| (a - f64::from(b)).abs() < 1e-5;
        for (row, image_name) in IMAGES.iter().enumerate() {
            for (column, prompt) in prompts().iter().enumerate() {
                let sample = sample(image(image_name), prompt);
                let score = scorer.score(Path::new(""), &sample).unwrap().unwrap();
                let mean = to_images[3 * row..3 * row + 3].iter().sum::<f32>() / 3.0;
                assert!(is_near(score.to_prompt, to_texts[3 * row + column]), "{score:?}");
                assert!(is_near(score.to_images.unwrap(), mean), "{score:?}: {mean}");
            }
        }
        assert!(scorer.score(Path::new(""), &sample("nowhere.png".into(), "")).unwrap().is_err());
    }
}

#[test]
fn memory_is_as_planned() {
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let (precision, kind) = (Precision::plain(dtype), DeviceKind::cpu(2));
        let model = ClipModel::open(&golden().join("folder")).unwrap();
        let planned = model.plan(precision, kind, usize::MAX).unwrap();
        let device = Device::cpu(2, planned).unwrap();
        let loaded = model.load(&device, precision, &|_| true).unwrap();
        loaded.text(&prompts()[2]).unwrap();
        loaded.image(data::decode(&image("large")).unwrap()).unwrap();
        assert_eq!(device.usage().extent, planned);
        let error = model.plan(precision, kind, planned - 1).unwrap_err().to_string();
        assert!(error.starts_with("CLIP scores does not fit"), "{error}");
    }
}

#[test]
fn other_settings_are_refused() {
    let settings = |file: &str| -> serde_json::Value {
        serde_json::from_slice(&fs::read(golden().join("folder").join(file)).unwrap()).unwrap()
    };
    let (config, processor) = ("config.json", "preprocessor_config.json");
    for (file, pointer, value, says) in [
        (
            config,
            "/vision_config/patch_size",
            0,
            "patch_size of the vision model is 0, expected 1 to 32",
        ),
        (
            config,
            "/vision_config/num_attention_heads",
            5,
            "hidden_size 32 of the vision model is not 5 heads",
        ),
        (
            config,
            "/vision_config/num_channels",
            4,
            "num_channels of the vision model is 4, expected 3",
        ),
        (config, "/vision_config/hidden_size", 40, "vision_model"),
        (config, "/text_config/vocab_size", 100, "vocab_size is 100, the tokenizer has ids up to"),
        (config, "/projection_dim", 21, "projection"),
        (processor, "/crop_size/width", 31, "crop_size is 31 x 32, the vision model sees 32 x 32"),
        (processor, "/size/shortest_edge", 16, "size is 16, expected 32 to 8192"),
        (processor, "/resample", 2, "resample is 2, expected 3 (bicubic)"),
        (processor, "/rescale_factor", 0, "rescale_factor is 0"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        for entry in fs::read_dir(golden().join("folder")).unwrap() {
            let path = entry.unwrap().path();
            fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
        }
        let mut changed = settings(file);
        *changed.pointer_mut(pointer).unwrap() = value.into();
        fs::write(folder.path().join(file), changed.to_string()).unwrap();
        let error = ClipModel::open(folder.path()).err().map(|error| error.to_string());
        let error = error.unwrap_or_else(|| panic!("{pointer} = {value} is taken"));
        assert!(error.contains(says), "{pointer}: {error}");
    }
}

#[test]
fn very_long_images_are_seen_by_their_middle() {
    let model = ClipModel::open(&golden().join("folder")).unwrap();
    let (width, height) = (40_000, 2);
    let rgb = vec![128; 3 * width as usize * height as usize];
    let patches = model.processor().patches(data::Pixels { width, height, rgb });
    assert_eq!(patches.len(), 3 * 32 * 32);
}
