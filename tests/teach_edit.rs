//! A tiny FLUX.1 Kontext learns an edit, "invert the colours", from twelve pairs of images, and does it to an image that
//! it never saw. Its transformer is trained from scratch; the autoencoder is that of the built-in model.

use std::fs;
use std::path::Path;

use compute::RandomSequence;
use trainer::demo::{DemoStyle, Scene, show};
use trainer::sample::{Image, image_file};

use crate::models::copy_folder;
use crate::{editing, printed, text};

const PROMPT: &str = "invert the colours";
const N_PAIRS: usize = 12;
const SIDE: usize = 64;
const SEED: u64 = 3;
const STEPS: u64 = 200;

/// As small as it learns this in a minute of a debug build.
const TRANSFORMER: &str = r#"{
  "_class_name": "FluxTransformer2DModel",
  "attention_head_dim": 32,
  "axes_dims_rope": [4, 14, 14],
  "guidance_embeds": true,
  "in_channels": 64,
  "joint_attention_dim": 48,
  "num_attention_heads": 3,
  "num_layers": 1,
  "num_single_layers": 1,
  "patch_size": 1,
  "pooled_projection_dim": 32
}"#;

const JOB: &str = "
[base]
path = 'base'
random_init = true
dtype = 'f32'
[data]
images = 'pairs'
resolution = 64
reference_resolution = 64
bucket_step = 16
[adapter]
kind = 'full'
[train]
steps = STEPS
batch_size = 6
[optimizer]
kind = 'muon'
learning_rate = 3e-2
lr_scheduler = 'cosine'
warmup_steps = 5
[sample]
prompts = ['PROMPT']
references = 'held-out.png'
every = STEPS
size = 64
steps = 10
[output]
folder = 'run'
save_every = 'off'
";

#[test]
#[ignore = "long: `just sweep` runs it"]
fn twelve_pairs_teach_an_edit() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    write_base(&at("base"));
    write_pairs(&at("pairs"));
    let reference = held_out();
    let expected = inverted(&reference);
    image_file::write(&at("held-out.png"), &reference, &[]).unwrap();
    let job = JOB.replace("STEPS", &STEPS.to_string()).replace("PROMPT", PROMPT);
    fs::write(at("job.toml"), job).unwrap();
    printed(&["train", text(&at("job.toml")), "--quiet"]);

    let error = |name: &str| mean_error(&show::read(&at(name)).unwrap(), &expected);
    let before = error("run/samples/step-000000-1.png");
    let after = error(&format!("run/samples/step-{STEPS:06}-1.png"));
    let unedited = mean_error(&reference, &expected);
    let model = at("run/model");
    let mut arguments = vec!["sample", "--base", text(&model), "--prompt", PROMPT];
    let (held_out, out) = (at("held-out.png"), at("edited.png"));
    arguments.extend(["--reference", text(&held_out), "--reference-resolution", "64"]);
    arguments.extend(["--size", "64", "--steps", "10", "--dtype", "f32", "--out", text(&out)]);
    printed(&arguments);
    let sampled = error("edited.png");
    let figures = format!(
        "of 255: reference {unedited:.1}, before {before:.1}, after {after:.1}, sampled {sampled:.1}"
    );
    assert!(after.max(sampled) < 0.4 * before.min(unedited), "{figures}");
    let report = fs::read_to_string(at("run/report.html")).unwrap();
    for shown in ["reference", "before training", &format!("step {STEPS}")] {
        assert!(report.contains(&format!("<figcaption>{shown}</figcaption>")), "{shown}");
    }
}

/// Text encoders, tokenizers and scheduler of a tiny Kontext with the built-in model's autoencoder. Weights of the
/// transformer are random init.
fn write_base(folder: &Path) {
    editing::kontext(folder);
    for part in ["vae", "transformer"] {
        fs::remove_dir_all(folder.join(part)).unwrap();
    }
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/demo");
    copy_folder(&demo.join("vae"), &folder.join("vae"));
    fs::create_dir(folder.join("transformer")).unwrap();
    fs::write(folder.join("transformer/config.json"), TRANSFORMER).unwrap();
}

fn write_pairs(folder: &Path) {
    for name in ["control", "images"] {
        fs::create_dir_all(folder.join(name)).unwrap();
    }
    for index in 0..N_PAIRS {
        let image = scene(index);
        let at = |kind: &str, end: &str| folder.join(format!("{kind}/{index:02}.{end}"));
        image_file::write(&at("control", "png"), &image, &[]).unwrap();
        image_file::write(&at("images", "png"), &inverted(&image), &[]).unwrap();
        fs::write(at("images", "txt"), PROMPT).unwrap();
    }
}

/// A shape on a background, both in any colours.
fn scene(index: usize) -> Image {
    let mut scene = Scene::new(DemoStyle::Flat, SEED, index);
    let random = RandomSequence::new(SEED, index as u64);
    let colour = |first: usize| [0, 1, 2].map(|channel| random.word(first + channel) as u8);
    (scene.colour.fill, scene.background.fill) = (colour(100), colour(103));
    scene.draw(SIDE)
}

/// A shape that no pair has, in its usual colours.
fn held_out() -> Image {
    let scene = Scene::new(DemoStyle::Flat, SEED, 20);
    assert!(
        (0..N_PAIRS).all(|index| Scene::new(DemoStyle::Flat, SEED, index).shape != scene.shape)
    );
    scene.draw(SIDE)
}

fn inverted(image: &Image) -> Image {
    Image { values: image.values.iter().map(|value| 1.0 - value).collect(), size: image.size }
}

/// Mean absolute difference, in steps of 255.
fn mean_error(image: &Image, expected: &Image) -> f32 {
    assert_eq!(image.size, expected.size);
    let pairs = image.values.iter().zip(&expected.values);
    let sum: f32 = pairs.map(|(a, b)| (a - b).abs()).sum();
    255.0 * sum / image.values.len() as f32
}
