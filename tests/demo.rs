//! The demo's recipe, cut short: the built-in model draws in the new style afterwards, which is
//! counted in its images, and did not before.

use std::fs;
use std::path::Path;

use trainer::demo::{Colour, ImageStatistics, show};

use crate::{hearth, printed, said, text};

const PROMPTS: [&str; 2] = ["neon style, a red star", "neon style, a blue circle"];

/// The recipe learns for ten times as many images, in smaller steps; a debug build has a minute.
const SHORTER: [&str; 6] = [
    "train.steps=50",
    "train.batch_size=4",
    "train.ema=0.9",
    "optimizer.learning_rate=4e-3",
    "sample.steps=10",
    "output.formats=['diffusers']",
];

#[test]
fn a_dozen_images_teach_a_style() {
    let folder = tempfile::tempdir().unwrap();
    let (run, images) = (folder.path().join("run"), folder.path().join("images"));
    let job = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes/demo.toml");
    let prompts = format!("sample.prompts={PROMPTS:?}");
    let mut arguments = vec!["train", text(&job), "--out", text(&run), "--quiet"];
    arguments.extend(["--images", text(&images), "--set", &prompts]);
    arguments.extend(SHORTER.iter().flat_map(|argument| ["--set", argument]));
    printed(&arguments);
    for (number, prompt) in (1..).zip(PROMPTS) {
        let [before, after] = [0, 50].map(|step| statistics(&run, step, number));
        let colour = Colour::named(prompt).unwrap();
        // Filled shapes on light paper become lights in the dark, of the colour that was asked for.
        assert!(before.backdrop > 0.7 && after.backdrop < 0.2, "{before:?} {after:?}");
        assert!(before.dark < 0.2 && after.dark > 0.5, "{before:?} {after:?}");
        for figures in [before, after] {
            let likeness = figures.likeness(colour);
            assert!(likeness > 0.6, "{prompt}: {likeness} {figures:?}");
        }
    }
    let sheet = show::before_after(&run).unwrap();
    assert!(sheet.ends_with("before-after.png") && sheet.exists());
}

#[test]
fn the_demo_overwrites_nothing() {
    for name in ["README.md", "before-after.png", "base/model_index.json"] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, "mine").unwrap();
        let output = hearth(&["demo", "--out", text(folder.path())]);
        assert_eq!(output.status.code(), Some(1), "{}", said(&output));
        let named = format!("would overwrite a file that hearth did not write: {}", text(&path));
        assert!(said(&output).contains(&named), "{}", said(&output));
        assert_eq!(fs::read_to_string(&path).unwrap(), "mine");
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "{name}");
    }
}

fn statistics(run: &Path, step: u64, number: usize) -> ImageStatistics {
    let path = run.join(format!("samples/step-{step:06}-{number}.png"));
    ImageStatistics::from_image(&show::read(&path).unwrap())
}
