//! A tiny Kandinsky 5 that draws shapes which stand still learns a motion from eight clips, and shows it with a shape that
//! none of them has. Its transformer is trained from scratch on stills; the motion is a LoRA. The autoencoder of clips was
//! made for this test.

use std::fs;
use std::path::Path;

use trainer::demo::show;
use trainer::sample::Image;
use trainer::sample::clip::{self, Clip};

use crate::models::copy_folder;
use crate::train::clips;
use crate::{kandinsky5, printed, text};

const SIDE: usize = 64;
const FRAMES: usize = 9;
/// Of the shape that moves in no clip.
const HELD_OUT: &str = "'a red ring', 'a green ring', 'a blue ring'";
/// Pixels that shapes move to the right in a clip.
const PATH: f32 = 30.0;

const SHAPES: [&str; 4] = ["disc", "square", "diamond", "cross"];
const COLOURS: [(&str, [f32; 3]); 3] =
    [("red", [0.9, 0.15, 0.1]), ("green", [0.1, 0.8, 0.2]), ("blue", [0.15, 0.25, 0.95])];
const BACKGROUND: [f32; 3] = [0.92, 0.9, 0.82];

const TRANSFORMER: &str = r#"{
  "_class_name": "Kandinsky5Transformer3DModel",
  "attention_type": "regular",
  "axes_dims": [8, 12, 12],
  "ff_dim": 384,
  "in_text_dim": 32,
  "in_text_dim2": 32,
  "in_visual_dim": 8,
  "model_dim": 96,
  "num_text_blocks": 1,
  "num_visual_blocks": 2,
  "out_visual_dim": 8,
  "patch_size": [1, 2, 2],
  "time_dim": 64,
  "visual_cond": true
}"#;

const STILLS_JOB: &str = "
[base]
path = 'base'
random_init = true
dtype = 'f32'
[data]
images = 'stills'
resolution = 64
bucket_step = 16
frames = 9
caption_dropout = 0.0
[adapter]
kind = 'full'
[train]
steps = 800
batch_size = 15
timestep_shift = 2.0
[optimizer]
kind = 'muon'
learning_rate = 2e-2
lr_scheduler = 'cosine'
warmup_steps = 5
[output]
folder = 'stills-run'
save_every = 'off'
";

const MOTION_JOB: &str = "
[base]
path = 'stills-run/model'
dtype = 'f32'
[data]
images = 'motion'
resolution = 64
bucket_step = 16
frames = 9
caption_dropout = 0.0
[adapter]
rank = 32
targets = 'all'
[train]
steps = 1600
batch_size = 8
timestep_shift = 2.0
[optimizer]
learning_rate = 1e-3
lr_scheduler = 'cosine'
warmup_steps = 5
[sample]
prompts = [HELD_OUT]
every = 1600
size = 64
frames = 9
steps = 20
guidance_scale = 1.0
[output]
folder = 'motion-run'
save_every = 'off'
";

#[test]
#[ignore = "long: `just sweep` runs it"]
fn eight_clips_teach_a_motion() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    write_base(&at("base"));
    let shapes = || SHAPES.iter().copied().chain(["ring"]);
    for (shape, colour) in shapes().flat_map(|shape| COLOURS.map(|colour| (shape, colour))) {
        write_clip(&at("stills"), shape, colour, 0.0);
    }
    for (shape, colour) in
        SHAPES.iter().flat_map(|shape| COLOURS[..2].iter().map(move |c| (*shape, *c)))
    {
        write_clip(&at("motion"), shape, colour, PATH);
    }
    for (name, job) in [("stills", STILLS_JOB), ("motion", MOTION_JOB)] {
        let path = at(&format!("{name}.toml"));
        fs::write(&path, job.replace("HELD_OUT", HELD_OUT)).unwrap();
        printed(&["train", text(&path), "--quiet"]);
    }
    let strip = |step: u64, prompt: u8| format!("motion-run/samples/step-{step:06}-{prompt}.png");
    let moved = |step| {
        let each = [1, 2, 3].map(|prompt| displacement(&at(&strip(step, prompt))));
        each.iter().sum::<f32>() / 3.0
    };
    let (before, after) = (moved(0), moved(1600));
    let figures = format!("of {PATH} pixels: before {before:.1}, after {after:.1}");
    assert!(before.abs() < 0.15 * PATH && after > 0.6 * PATH, "{figures}");
    let report = fs::read_to_string(at("motion-run/report.html")).unwrap();
    assert!(report.contains("step-001600-1.webp") && report.contains("card strip"));
}

/// Text encoders, tokenizers and scheduler of a tiny pipeline, with the autoencoder of this test.
fn write_base(folder: &Path) {
    clips::base(folder);
    for part in ["vae", "transformer"] {
        fs::remove_dir_all(folder.join(part)).unwrap();
    }
    copy_folder(&kandinsky5::golden().join("motion_vae"), &folder.join("vae"));
    fs::create_dir(folder.join("transformer")).unwrap();
    fs::write(folder.join("transformer/config.json"), TRANSFORMER).unwrap();
}

/// A shape that stands in the middle, or moves to the right by so many pixels.
fn write_clip(folder: &Path, shape: &str, (colour, fill): (&str, [f32; 3]), path: f32) {
    fs::create_dir_all(folder).unwrap();
    let middle = SIDE as f32 / 2.0;
    let frame = |index: usize| {
        let share = index as f32 / (FRAMES - 1) as f32 - 0.5;
        draw(shape, fill, [middle + path * share, middle])
    };
    let clip = Clip { frames: (0..FRAMES).map(frame).collect(), fps: 24 };
    let name = format!("{colour}-{shape}");
    clip::write(&folder.join(format!("{name}.webp")), &clip).unwrap();
    fs::write(folder.join(format!("{name}.txt")), format!("a {colour} {shape}")).unwrap();
}

const RADIUS: f32 = 12.0;

fn draw(shape: &str, fill: [f32; 3], centre: [f32; 2]) -> Image {
    let coverage = |pixel: usize| {
        let at = [pixel % SIDE, pixel / SIDE].map(|at| at as f32 + 0.5);
        let [x, y] = [0, 1].map(|axis| at[axis] - centre[axis]);
        let bar = |a: f32, b: f32| a.abs().max(3.0 * b.abs());
        let distance = match shape {
            "disc" => x.hypot(y) - RADIUS,
            "square" => x.abs().max(y.abs()) - 0.85 * RADIUS,
            "diamond" => x.abs() + y.abs() - 1.2 * RADIUS,
            "cross" => bar(x, y).min(bar(y, x)) - RADIUS,
            _ => (x.hypot(y) - 0.75 * RADIUS).abs() - 0.3 * RADIUS,
        };
        (0.5 - distance).clamp(0.0, 1.0)
    };
    let covered: Vec<f32> = (0..SIDE * SIDE).map(coverage).collect();
    let colour = |at: usize| {
        let mix = move |share: &f32| fill[at] * share + BACKGROUND[at] * (1.0 - share);
        covered.iter().map(mix).collect::<Vec<f32>>()
    };
    Image { values: [0, 1, 2].map(colour).concat(), size: [SIDE; 2] }
}

/// How far what is not background moves to the right, from the first frame of a strip to the last.
fn displacement(path: &Path) -> f32 {
    let strip = show::read(path).unwrap();
    let [width, height] = strip.size;
    let weight = |at: usize| {
        let apart = (0..3)
            .map(|colour| (strip.values[colour * width * height + at] - BACKGROUND[colour]).abs());
        (apart.sum::<f32>() - 0.5).max(0.0)
    };
    let middle = |left: usize| {
        let pixels = || (0..height).flat_map(|row| (0..SIDE).map(move |column| (row, column)));
        let weights = pixels().map(|(row, column)| weight(row * width + left + column));
        let columns =
            weights.clone().zip(pixels()).map(|(weight, (_, column))| weight * column as f32);
        columns.sum::<f32>() / weights.sum::<f32>().max(1e-6)
    };
    middle(width - SIDE) - middle(0)
}
