//! Layouts of clips: which folders and files are one, and where their captions are.

use std::fs;
use std::path::Path;

use super::{Folder, IMAGE};
use crate::data::clip::install_command;
use crate::data::clip::tests::has_ffmpeg;
use crate::data::{MediaKinds, Problem, ProblemKind, scan};

fn golden(name: &str) -> Vec<u8> {
    let clips = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/clips");
    fs::read(clips.join(name)).unwrap()
}

#[test]
fn folders_of_frames_are_clips_where_somebody_says_so() {
    let folder = Folder::new(&[
        // A caption beside it, one in it, and a folder for clips.
        ("walk/f_1.png", IMAGE),
        ("walk/f_2.png", IMAGE),
        ("walk/f_10.png", IMAGE),
        ("walk.txt", b"a dog walks"),
        ("run/001.png", IMAGE),
        ("run/002.png", IMAGE),
        ("run/caption.txt", b"a dog runs"),
        ("Clips/3_sit/1.png", IMAGE),
        ("Clips/3_sit/2.png", IMAGE),
        ("Clips/stand/1.png", IMAGE),
        ("Clips/stand/2.png", IMAGE),
        // Images like any other: with captions of their own, without any, with names of their own.
        ("dogs/1.png", IMAGE),
        ("dogs/1.txt", b"one"),
        ("dogs/2.png", IMAGE),
        ("dogs/2.txt", b"two"),
        ("Clips/cats/1.png", IMAGE),
        ("Clips/cats/1.txt", b"a cat"),
        ("Clips/cats/2.png", IMAGE),
        ("Clips/cats/2.txt", b"two cats"),
        ("birds/1.png", IMAGE),
        ("birds/2.png", IMAGE),
        ("named/a.png", IMAGE),
        ("named/b.png", IMAGE),
        ("named.txt", b"not of a clip"),
        ("9.png", IMAGE),
        ("9.txt", b"an image"),
    ]);
    let missing = |name: &str| format!("warning: {name} has no caption: an empty one is taken");
    let [a, b, c, d, e] =
        ["Clips/stand", "birds/1.png", "birds/2.png", "named/a.png", "named/b.png"].map(missing);
    folder.check_clips(
        &[
            "9.png: an image",
            "Clips/3_sit (2): sit x3",
            "Clips/cats/1.png: a cat",
            "Clips/cats/2.png: two cats",
            "Clips/stand (2): ",
            "birds/1.png: ",
            "birds/2.png: ",
            "dogs/1.png: one",
            "dogs/2.png: two",
            "named/a.png: ",
            "named/b.png: ",
            "run (2): a dog runs",
            "walk (3): a dog walks",
        ],
        &[&a, &b, &c, &d, &e, "skipped: named.txt is a caption without an image of the same name"]
            .map(|said| said as &str),
    );
}

#[test]
fn metadata_names_clips() {
    let lines = "{\"file_name\": \"walk\", \"text\": \"a dog walks\"}\n\
        {\"video_path\": \"anim.gif\", \"caption\": \"it moves\"}\n\
        {\"file_name\": \"set/1.png\", \"text\": \"one\"}\n\
        {\"video\": \"empty\", \"text\": \"nothing\"}\n\
        {\"video\": \"gone.mp4\"}\n";
    let folder = Folder::new(&[
        ("metadata.jsonl", lines.as_bytes()),
        ("walk/1.png", IMAGE),
        ("walk/2.png", IMAGE),
        ("set/1.png", IMAGE),
        ("set/2.png", IMAGE),
        ("set.txt", b"of all"),
        ("empty/readme.md", b""),
        ("anim.gif", &golden("walk.gif")),
    ]);
    folder.check_clips(
        &["anim.gif (19): it moves", "set/1.png: one", "set/2.png: ", "walk (2): a dog walks"],
        &[
            "skipped: empty is not a clip: a folder of frames has at least two images, name_1.png, name_2.png, …",
            "skipped: empty/readme.md is ignored: neither an image, nor a caption (.txt, .caption), nor metadata \
             (.jsonl, .csv)",
            "skipped: metadata.jsonl line 5 names a missing file: gone.mp4",
            "warning: set/2.png has no caption: an empty one is taken",
            "skipped: set.txt is a caption without an image of the same name",
        ],
    );
}

#[test]
fn animations_and_videos_are_clips_of_a_video_model_alone() {
    let folder = Folder::new(&[
        ("a.gif", &golden("walk.gif")),
        ("a.txt", b"a"),
        ("b.webp", &golden("walk.webp")),
        ("b.txt", b"b"),
        ("c.png", &golden("walk.png")),
        ("c.txt", b"c"),
        ("d.mp4", &golden("walk.mp4")),
        ("d.txt", b"d"),
        ("e.MOV", &golden("turned.mov")),
        ("e.txt", b"e"),
        ("f.webm", &golden("walk.webm")[..400]),
        ("g.mp4", b"no"),
    ]);
    let animated = |name: &str| format!("warning: {name} is animated: the first frame is taken");
    let [a, b, c] = ["a.gif", "b.webp", "c.png"].map(animated);
    let ignored = |name: &str| {
        let what = "neither an image, nor a caption (.txt, .caption), nor metadata (.jsonl, .csv)";
        format!("skipped: {name} is ignored: {what}")
    };
    let unpaired =
        |name: &str| format!("skipped: {name} is a caption without an image of the same name");
    let [d, e, f, g] = ["d.mp4", "e.MOV", "f.webm", "g.mp4"].map(ignored);
    let [d_text, e_text] = ["d.txt", "e.txt"].map(unpaired);
    folder.check(
        &["a.gif: a", "b.webp: b", "c.png: c"],
        &[&a, &b, &c, &d, &d_text, &e, &e_text, &f, &g].map(|said| said as &str),
    );
    if !has_ffmpeg() {
        return;
    }
    let found = scan(&folder.path(""), &[], MediaKinds::ImagesAndClips, &|_| true).unwrap();
    let names = found.items.iter().map(|item| {
        let name = item.path.file_name().unwrap().to_string_lossy().into_owned();
        (name, item.clip.as_ref().unwrap().n_frames(24), item.size)
    });
    let expected = [
        ("a.gif", 19, [80, 64]),
        ("b.webp", 19, [80, 64]),
        ("c.png", 19, [80, 64]),
        ("d.mp4", 28, [80, 64]),
        ("e.MOV", 9, [64, 80]),
    ];
    assert!(names.eq(expected.map(|(name, n, size)| (name.to_owned(), n, size))), "{found:?}");
    let kinds: Vec<&ProblemKind> = found.problems.iter().map(|problem| &problem.kind).collect();
    assert!(
        matches!(kinds[..], [ProblemKind::Damaged { .. }, ProblemKind::NotAVideo { .. }]),
        "{kinds:?}"
    );
}

#[test]
fn a_missing_program_is_said_once_with_the_line_that_installs_it() {
    let problem = Problem::skipped("clips", ProblemKind::ProgramMissing { n: 3 });
    let said = "clips has 3 videos, which the program ffmpeg reads, and it is not installed: ";
    assert_eq!(problem.to_string(), format!("{said}{}", install_command()));
    let left_out = &crate::data::Findings::of_images(&[problem], 4).left_out[0];
    assert_eq!((left_out.left_out, left_out.of), (3, 7));
}
