//! What decoding images takes: planned from their headers, and held by the program as a whole.

use std::borrow::Cow;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;

use crate::{command, said, text};

const MIB: u64 = 1 << 20;

/// What the program takes beside images and tensors. Measured: 40 MiB without optimisation, and some.
const PROGRAM: u64 = 70 * MIB;

/// A job for the tiny pipeline, and its folder of images.
fn job(name: &str, image: &[u8]) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let images = folder.path().join("images");
    fs::create_dir(&images).unwrap();
    fs::write(images.join(name), image).unwrap();
    fs::write(images.join(name).with_extension("txt"), "an image").unwrap();
    let base = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/sd3/pipeline");
    let job = format!(
        "[base]\npath = '{}'\n[data]\nimages = 'images'\nresolution = 64\nbucket_step = 16\n",
        text(&base)
    );
    let path = folder.path().join("job.toml");
    fs::write(&path, job).unwrap();
    (folder, path)
}

/// A run, and the most memory that it held.
fn run(arguments: &[&str]) -> (Output, u64) {
    let mut child = command(arguments);
    let child = child.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let status = format!("/proc/{}/status", child.id());
    let watch = std::thread::spawn(move || {
        let mut peak = 0;
        // It ends as a zombie, which holds nothing.
        while let Some(now) = fs::read_to_string(&status).ok().and_then(|text| held(&text)) {
            peak = now;
            std::thread::sleep(Duration::from_millis(1));
        }
        peak
    });
    let output = child.wait_with_output().unwrap();
    (output, watch.join().unwrap())
}

fn held(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? * 1024)
}

/// A PNG of 16 bits without a pixel that can be decoded.
fn head(width: u32, height: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, width, height);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Sixteen);
    let mut writer = encoder.write_header().unwrap();
    writer.write_chunk(png::chunk::IDAT, b"x\xda").unwrap();
    drop(writer);
    bytes
}

/// 16 bits a channel, in one colour.
fn deep(side: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, side, side);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Sixteen);
    encoder.set_compression(png::Compression::Fastest);
    encoder.set_filter(png::Filter::NoFilter);
    let mut writer = encoder.write_header().unwrap();
    writer.write_image_data(&vec![7; side as usize * side as usize * 6]).unwrap();
    drop(writer);
    bytes
}

#[test]
fn an_image_that_does_not_fit_is_refused_with_both_numbers_before_it_is_decoded() {
    let (_folder, job) = job("deep.png", &head(15_900, 16_000));
    for verb in ["cache", "train"] {
        let (output, peak) = run(&[verb, text(&job), "--limit", "400MB"]);
        let said = said(&output);
        assert!(!output.status.success(), "{said}");
        for part in ["deep.png", "does not fit", "needs ", "MiB, limit 381 MiB", "hint:"] {
            assert!(said.contains(part), "{part}: {said}");
        }
        assert!(peak < 2 * PROGRAM, "{verb}: {} MiB", peak / MIB);
    }
}

#[test]
fn decoding_takes_what_was_planned() {
    let (_folder, job) = job("deep.png", &deep(2400));
    let (output, peak) = run(&["cache", text(&job), "--json", "--threads", "1"]);
    assert!(output.status.success(), "{}", said(&output));
    let summary: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(summary["problems"], Value::Array(Vec::new()));
    let [arena, decoding] =
        ["peak_bytes", "decoding_bytes"].map(|key| summary[key].as_u64().unwrap());
    // Eight bits of the deepest image, and little more.
    assert!((17_000_000..30_000_000).contains(&decoding), "{decoding}");
    assert!(peak < PROGRAM + arena + decoding, "{peak} of {arena} + {decoding}");
}

#[test]
fn a_colour_profile_takes_nothing() {
    let (folder, job) = job("plain.png", &head(64, 64));
    let mut info = png::Info::with_size(64, 64);
    info.color_type = png::ColorType::Rgb;
    info.icc_profile = Some(Cow::Owned(vec![0; 200 << 20]));
    let file = File::create(folder.path().join("images/profile.png")).unwrap();
    let encoder = png::Encoder::with_info(file, info).unwrap();
    encoder.write_header().unwrap().write_image_data(&[9; 64 * 64 * 3]).unwrap();
    let (output, peak) = run(&["cache", text(&job), "--json", "--threads", "1"]);
    assert!(output.status.success(), "{}", said(&output));
    let summary: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(summary["images"], 1, "{summary}");
    assert!(peak < PROGRAM + 20 * MIB, "{} MiB", peak / MIB);
}
