//! Clips against Pillow and against what was encoded, folders of frames, and damaged files of every kind. The clips are in
//! `tests/golden/clips`, with the script that made them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Deserialize;

use super::program::RunningProgram;
use super::video::VideoHeader;
use super::{ClipSegment, Media, ProblemKind, SizedClip, TrainingClip, in_order, look};
use crate::pixels::Pixels;

#[derive(Deserialize)]
struct GoldenClips {
    animations: BTreeMap<String, GoldenAnimation>,
    videos: BTreeMap<String, GoldenVideo>,
}

#[derive(Deserialize)]
struct GoldenAnimation {
    tolerance: u8,
    delays_ms: Vec<u64>,
    frames: Vec<String>,
}

#[derive(Deserialize)]
struct GoldenVideo {
    levels: Vec<u8>,
    rate: usize,
}

fn clips() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/clips")
}

fn golden() -> GoldenClips {
    serde_json::from_slice(&fs::read(clips().join("expected.json")).unwrap()).unwrap()
}

/// Whether ffmpeg is here; said, since a test that did nothing looks like one that passed.
#[allow(clippy::print_stderr)]
pub(in crate::data) fn has_ffmpeg() -> bool {
    let is_here = Command::new("ffprobe").arg("-version").output().is_ok();
    if !is_here {
        eprintln!("no ffmpeg here: videos are not tested");
    }
    is_here
}

fn clip(path: &Path) -> SizedClip {
    match look(path).unwrap_or_else(|kind| panic!("{} {kind}", path.display())) {
        Media::Clip(clip) => clip,
        Media::Image { .. } => panic!("{} is an image", path.display()),
    }
}

fn frames(path: &Path, segment: ClipSegment) -> Result<Vec<Pixels>, ProblemKind> {
    let SizedClip { clip, size } = clip(path);
    let mut frames = Vec::new();
    clip.read(path, size, segment, &mut |frame| frames.push(frame))?;
    Ok(frames)
}

/// Every eighth pixel.
fn sampled(pixels: &Pixels) -> Vec<u8> {
    let rows = pixels.rgb.chunks_exact(pixels.width as usize * 3).step_by(8);
    rows.flat_map(|row| row.chunks_exact(3).step_by(8).flatten().copied()).collect()
}

#[test]
fn animations_are_seen_as_pillow_sees_them() {
    for (name, GoldenAnimation { tolerance, delays_ms, frames: expected }) in golden().animations {
        let path = clips().join(&name);
        // At 50 frames a second every delay of the files is a whole number of frames.
        let shown: Vec<usize> = delays_ms
            .iter()
            .zip(0..)
            .flat_map(|(delay, number)| std::iter::repeat_n(number, *delay as usize / 20))
            .collect();
        let SizedClip { clip: found, size } = clip(&path);
        assert_eq!((found.n_frames(50), size), (shown.len(), [80, 64]), "{name}");
        let seen = frames(&path, ClipSegment { start: 0, frames: shown.len(), fps: 50 }).unwrap();
        for (at, (frame, number)) in seen.iter().zip(&shown).enumerate() {
            let expected = base64::decode(&expected[*number]).unwrap();
            let pixels = sampled(frame);
            assert_eq!(pixels.len(), expected.len(), "{name}");
            let most = pixels.iter().zip(&expected).map(|(a, b)| a.abs_diff(*b)).max().unwrap();
            assert!(most <= tolerance, "{name}: frame {at} is {most} off");
        }
        let part = ClipSegment { start: 5, frames: 9, fps: 50 };
        assert_eq!(frames(&path, part).unwrap(), seen[5..14], "{name}");
    }
}

#[test]
fn videos_are_seen_as_they_were_encoded() {
    if !has_ffmpeg() {
        return;
    }
    for (name, GoldenVideo { levels, rate }) in golden().videos {
        let path = clips().join(&name);
        let found = clip(&path);
        assert_eq!(found.clip.n_frames(rate), levels.len(), "{name}");
        let width = if name.starts_with("wide") { 160 } else { 80 };
        assert_eq!(found.size, [width, 64], "{name}");
        let level = |frame: &Pixels| {
            let sum: u64 = frame.rgb.iter().map(|value| u64::from(*value)).sum();
            (sum / frame.rgb.len() as u64) as u8
        };
        let n = levels.len();
        let seen = frames(&path, ClipSegment { start: 0, frames: n, fps: rate }).unwrap();
        for (at, (frame, expected)) in seen.iter().zip(&levels).enumerate() {
            assert!(level(frame).abs_diff(*expected) <= 3, "{name} frame {at}: {}", level(frame));
        }
        // A segment is the same frames, wherever the file has its key frames.
        for start in [1, 3, n - 5] {
            let part = frames(&path, ClipSegment { start, frames: 5, fps: rate }).unwrap();
            assert!(part == seen[start..start + 5], "{name} from {start}");
        }
        // At half the rate, of two frames that shown in the middle: the second.
        let half = frames(&path, ClipSegment { start: 0, frames: n / 2, fps: rate / 2 }).unwrap();
        for (at, frame) in half.iter().enumerate() {
            let expected = [levels[2 * at], levels[(2 * at + 1).min(n - 1)]];
            let near = expected.iter().any(|it| level(frame).abs_diff(*it) <= 3);
            assert!(near, "{name} at half the rate, frame {at}: {}", level(frame));
        }
    }
    // A phone that was held upright.
    let turned = clip(&clips().join("turned.mov"));
    assert_eq!(turned.size, [64, 80]);
    frames(&clips().join("turned.mov"), ClipSegment { start: 0, frames: 5, fps: 24 }).unwrap();
}

#[test]
fn what_ffprobe_says_is_understood() {
    let read = |text: &str| VideoHeader::read(&serde_json::from_str(text).unwrap());
    let header = |size, duration_us| Ok(VideoHeader { size, duration_us });
    for (said, expected) in [
        (r#"{"streams": []}"#, Err("it has no video")),
        (r#"{"streams": [{"width": 8}]}"#, Err("it does not say how large it is")),
        (r#"{"streams": [{"width": 0, "height": 8}]}"#, Err("its frames are 0 x 8 pixels")),
        (r#"{"streams": [{"width": 8, "height": 8}]}"#, Err("it does not say how long it is")),
        (
            r#"{"streams": [{"width": 8, "height": 8, "duration": "nan"}]}"#,
            Err("it does not say how long it is"),
        ),
        (
            r#"{"streams": [{"width": 8, "height": 6, "duration": "2.5"}]}"#,
            header([8, 6], 2_500_000),
        ),
        (
            r#"{"streams": [{"width": 8, "height": 6, "nb_frames": "48", "avg_frame_rate": "24000/1000"}]}"#,
            header([8, 6], 2_000_000),
        ),
        (
            r#"{"streams": [{"width": 8, "height": 6, "tags": {"DURATION": "00:01:05.04", "rotate": "270"}}]}"#,
            header([6, 8], 65_040_000),
        ),
        (
            r#"{"streams": [{"width": 720, "height": 576, "sample_aspect_ratio": "16:15"}], "format": {"duration": "1"}}"#,
            header([768, 576], 1_000_000),
        ),
    ] {
        assert_eq!(read(said), expected.map_err(str::to_owned), "{said}");
    }
}

#[test]
fn frames_are_ordered_by_their_numbers() {
    let paths = |names: &[&str]| names.iter().map(PathBuf::from).collect::<Vec<_>>();
    for (names, expected) in [
        (
            &["a/f_10.png", "a/f_2.jpg", "a/f_1.png"][..],
            Some(&["a/f_1.png", "a/f_2.jpg", "a/f_10.png"][..]),
        ),
        (&["007.png", "0010.png"], Some(&["007.png", "0010.png"])),
        (&["1.png"], None),
        (&["1.png", "01.jpg"], None),
        (&["a1.png", "b2.png"], None),
        (&["a1.png", "a.png"], None),
        (&["1.png", "99999999999999999999999.png"], None),
    ] {
        assert_eq!(in_order(&paths(names)), expected.map(paths), "{names:?}");
    }
}

/// Images of a folder, by their names and sizes.
fn folder(files: &[(&str, [u32; 2])]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, [width, height]) in files {
        let file = fs::File::create(folder.path().join(name)).unwrap();
        let mut encoder = png::Encoder::new(file, *width, *height);
        encoder.set_color(png::ColorType::Grayscale);
        let number = name.bytes().find(u8::is_ascii_digit).unwrap();
        let pixels = vec![number; (width * height) as usize];
        encoder.write_header().unwrap().write_image_data(&pixels).unwrap();
    }
    folder
}

fn refused(path: &Path) -> String {
    match look(path) {
        Ok(_) => panic!("{} is taken", path.display()),
        Err(kind) => kind.to_string(),
    }
}

#[test]
fn folders_of_frames_are_read_one_by_one() {
    let found = folder(&[("f2.png", [70, 64]), ("f1.png", [70, 64]), ("f3.png", [70, 64])]);
    let SizedClip { clip: TrainingClip { .. }, size } = clip(found.path());
    assert_eq!(size, [70, 64]);
    let seen = frames(found.path(), ClipSegment { start: 1, frames: 2, fps: 24 }).unwrap();
    assert_eq!(seen.iter().map(|frame| frame.rgb[0]).collect::<Vec<_>>(), *b"23");
    let beyond = frames(found.path(), ClipSegment { start: 1, frames: 3, fps: 24 }).unwrap_err();
    assert_eq!(beyond.to_string(), "ends early: 2 of 3 frames can be decoded");
    let two = folder(&[("f1.png", [70, 64]), ("f2.png", [64, 64])]);
    assert_eq!(
        refused(two.path()),
        "has frames of two sizes: the first of 70 x 64 pixels, f2.png of 64 x 64"
    );
    fs::write(two.path().join("f2.png"), b"<html>").unwrap();
    assert_eq!(
        refused(two.path()),
        "has a frame that cannot be used: f2.png is not an image: looks like a web page (html)"
    );
    fs::remove_file(two.path().join("f2.png")).unwrap();
    assert!(refused(two.path()).starts_with("is not a clip: "));
}

/// Every clip, cut at many places and with many bytes changed: a problem or frames, and the program goes on.
#[test]
fn damaged_clips_give_problems() {
    let folder = tempfile::tempdir().unwrap();
    let mut n_refused = 0;
    let videos = if has_ffmpeg() { golden().videos.into_keys().collect() } else { Vec::new() };
    for name in golden().animations.into_keys().chain(videos) {
        let is_video = !name.ends_with("gif") && !name.ends_with("webp") && !name.ends_with("png");
        let whole = fs::read(clips().join(&name)).unwrap();
        let path = folder.path().join(&name);
        // Each video starts two programs.
        let n = if is_video { 4 } else { 40 };
        for at in (0..whole.len()).step_by(whole.len() / n + 1) {
            let mut flipped = whole.clone();
            flipped[at] ^= 0xff;
            for content in [&whole[..at], &flipped] {
                fs::write(&path, content).unwrap();
                n_refused += usize::from(read_all(&path).is_err());
            }
        }
    }
    assert!(n_refused > 100, "{n_refused}");
}

fn read_all(path: &Path) -> Result<(), ProblemKind> {
    let Media::Clip(SizedClip { clip, size }) = look(path)? else { return Ok(()) };
    let n = clip.n_frames(24);
    clip.read(path, size, ClipSegment { start: 0, frames: n.min(100), fps: 24 }, &mut |_| {})
}

/// A GIF that says that its frames never end.
#[test]
fn endless_files_are_refused() {
    let path = tempfile::tempdir().unwrap().keep().join("a.gif");
    let frame = b"\x2c\0\0\0\0\x01\0\x01\0\0\x02\x02\x44\x01\0";
    let mut bytes = b"GIF89a\x01\0\x01\0\x80\0\0\0\0\0\xff\xff\xff".to_vec();
    (0..super::MOST_FRAMES + 5).for_each(|_| bytes.extend_from_slice(frame));
    fs::write(&path, bytes).unwrap();
    assert_eq!(refused(&path), "is too long: 100001 frames, most is 100000");
    fs::remove_dir_all(path.parent().unwrap()).unwrap();
}

#[test]
fn files_that_are_no_videos_are_named_for_what_they_are() {
    let folder = tempfile::tempdir().unwrap();
    for (name, content, expected) in [
        ("a.mp4", &b""[..], "has zero bytes"),
        ("b.mp4", b"<!doctype html>", "is not a video: looks like a web page (html)"),
        (
            "c.mkv",
            b"#EXTM3U\n#EXTINF:1,\n/etc/hostname\n",
            "is not a video: looks like text, \"#extm3u\"",
        ),
    ] {
        let path = folder.path().join(name);
        fs::write(&path, content).unwrap();
        assert_eq!(refused(&path), expected);
    }
    let gone = refused(&folder.path().join("gone.mp4"));
    assert!(gone.starts_with("cannot be read: "), "{gone}");
}

/// A name that begins like an option, or like an address, is a name.
#[test]
fn odd_names_of_videos_are_names() {
    if !has_ffmpeg() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for name in ["-i.mp4", "http:x.mp4", "a b'c\"d;e|f.mp4", "ü%03d.mp4", "concat:a|b.mp4"] {
        let path = folder.path().join(name);
        fs::copy(clips().join("walk.mp4"), &path).unwrap();
        let segment = ClipSegment { start: 0, frames: 5, fps: 24 };
        assert_eq!(frames(&path, segment).unwrap().len(), 5, "{name}");
    }
}

/// It would go on for ever: were it not killed, this test would not end.
#[test]
fn a_program_that_is_not_wanted_any_more_is_killed() {
    if !has_ffmpeg() {
        return;
    }
    let endless =
        ["-v", "error", "-f", "lavfi", "-i", "testsrc=size=64x64", "-f", "rawvideo", "pipe:1"];
    let mut program =
        RunningProgram::start("ffmpeg", &endless.map(Into::into), 64 * 64 * 3).unwrap();
    assert_eq!(program.next().unwrap().map(|piece| piece.len()), Some(64 * 64 * 3));
    drop(program);
}

#[test]
fn a_program_that_is_missing_is_said_with_how_to_install_it() {
    let missing = RunningProgram::start("hearth-has-no-such-program", &[], 1).err().unwrap();
    let said = missing.to_string();
    assert!(
        said.starts_with("has 1 video, which the program ffmpeg reads, and it is not installed: "),
        "{said}"
    );
}
