//! A folder of clips and images, from the scan to an adapter, with a tiny Kandinsky 5 for clips.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use super::twin::{self, OF_FLUX_ADAPTER};
use super::{Job, Running, events, losses, trained};
use crate::models::copy_folder;
use crate::{hearth, package, printed, said, text};

fn golden(path: &str) -> PathBuf {
    package().join("../../tests/golden").join(path)
}

/// Where the reference training is.
pub fn reference() -> PathBuf {
    golden("kandinsky5/t2v_train")
}

/// The pipeline, put together from its own parts and those of other families.
pub fn base(to: &Path) {
    copy_folder(&golden("kandinsky5/t2v_pipeline"), to);
    for part in ["text_encoder", "tokenizer"] {
        copy_folder(&golden("qwen_image/pipeline").join(part), &to.join(part));
        copy_folder(&golden("flux/dev/pipeline").join(part), &to.join(format!("{part}_2")));
    }
}

/// Clips of every kind beside those of the reference training; videos only where ffmpeg is installed.
fn job() -> (Job, bool) {
    let job = Job::of(Path::new("base"));
    base(&job.path("base"));
    let data = job.path("images");
    copy_folder(&reference().join("data"), &data);
    let has_ffmpeg = Command::new("ffprobe").arg("-version").output().is_ok();
    let animated = ["walk.gif", "clear.png", "walk.webp"];
    let videos = ["walk.mp4", "walk.webm", "turned.mov"];
    let videos = if has_ffmpeg { &videos[..] } else { &[] };
    for (number, name) in animated.iter().chain(videos).enumerate() {
        let (_, ending) = name.split_once('.').unwrap();
        let to = data.join(format!("clip_{number}.{ending}"));
        fs::copy(golden("clips").join(name), &to).unwrap();
        fs::write(to.with_extension("txt"), format!("clip {number}")).unwrap();
    }
    let settings = "[base]\npath = 'base'\ndtype = 'f32'\n[data]\nimages = 'images'\nresolution = 64\n\
        bucket_step = 16\nframes = 13\nfps = 12\nflip = true\nvalidation = 2\n[adapter]\nrank = 4\n\
        [train]\nsteps = 4\nbatch_size = 2\nvalidate_every = 2\n[optimizer]\nlearning_rate = 1e-2\n\
        [output]\nsave_every = 1\n";
    fs::write(&job.file, settings).unwrap();
    (job, has_ffmpeg)
}

fn cached(job: &Job, arguments: &[&str]) -> Value {
    let page = printed(&[&["cache", text(&job.file), "--json"], arguments].concat());
    serde_json::from_str(&page).unwrap()
}

#[test]
fn clips_and_images_become_an_adapter() {
    let (job, has_ffmpeg) = job();
    let found = cached(&job, &["--plan"]);
    let n_clips = if has_ffmpeg { 9 } else { 6 };
    let count = |key: &str| found[key].as_u64().unwrap();
    assert_eq!(count("images") + count("clips") + count("held_out"), 2 + n_clips, "{found}");
    let rows = found["buckets"].as_array().unwrap();
    let frames = |row: &Value| row["frames"].as_u64().unwrap();
    assert!(rows.iter().any(|row| frames(row) == 13), "{found}");
    assert!(rows.iter().all(|row| frames(row) % 4 == 1), "{found}");
    // As long as a file says, and as a folder has frames: nine of ten.
    let problems = found["problems"].to_string();
    assert!(
        problems.contains("has 10 frames at 12 fps, data.frames is 13: 9 are used"),
        "{problems}"
    );
    let page = printed(&["plan", text(&job.file)]);
    assert!(page.contains("x13f"), "{page}");

    let whole = job.finish("whole", &[], &["--threads", "1"]);
    assert_eq!(losses(&events(&whole)).len(), 4);
    assert!(whole.join("adapter/pytorch_lora_weights.safetensors").is_file());
    let killed = job.path("killed");
    let mut running = Running::begin(job.command(&[], &["--out", text(&killed), "--threads", "2"]));
    assert!(running.until("checkpoint"));
    _ = running.child.kill();
    running.child.wait().unwrap();
    job.finish("killed", &[], &["--resume"]);
    assert!(trained(&whole) == trained(&killed), "other bytes than without a break");
    assert_eq!(losses(&events(&whole)), losses(&events(&killed)));
}

/// What was encoded is found again, and segments, frames and rates are entries of their own.
#[test]
fn latents_of_clips_are_found_again() {
    let (job, _) = job();
    let shared = format!("data.cache={}", text(&job.path("cache")));
    let missing = |set: &[&str]| {
        let set: Vec<&str> =
            [&[&*shared], set].concat().iter().flat_map(|it| ["--set", *it]).collect();
        let plan = cached(&job, &[&["--plan"], &set[..]].concat());
        plan["missing_images"].as_u64().unwrap()
    };
    let all = missing(&[]);
    printed(&["cache", text(&job.file), "--quiet", "--set", &shared]);
    assert_eq!(missing(&[]), 0);
    // Images stay as they are, and of three segments the first one.
    assert_eq!(missing(&["data.fps=24"]), all - 2);
    let segments = missing(&["data.segments=3"]);
    assert!((1..=2 * (all - 2)).contains(&segments), "{segments} of {all}");
    assert!(missing(&["data.frames=5"]) >= all - 4);
    // A frame of a folder that changes is another clip.
    let data = job.path("images/walk");
    fs::copy(data.join("frame_1.png"), data.join("frame_5.png")).unwrap();
    assert_eq!(missing(&[]), 1);
    let refused = said(&hearth(&["cache", text(&job.file), "--set", "data.frames=12"]));
    assert!(refused.contains("data.frames is 12, the model takes 4·k + 1, such as 9"), "{refused}");
}

#[test]
fn training_on_clips_is_that_of_the_reference() {
    twin::check_adapter_of(&reference(), &[], OF_FLUX_ADAPTER);
}
