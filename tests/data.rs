//! Training folders as only some systems have them: links that go round, names that are no text,
//! pipes that nobody writes to.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use trainer::data::{MediaKinds, ProblemKind, ScanOptions, scan};

fn put_image(path: &Path) {
    let mut encoder = png::Encoder::new(fs::File::create(path).unwrap(), 64, 64);
    encoder.set_color(png::ColorType::Grayscale);
    encoder.write_header().unwrap().write_image_data(&[0x80; 64 * 64]).unwrap();
}

#[test]
fn cyclic_links_are_followed_once() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().canonicalize().unwrap();
    fs::create_dir_all(root.join("a/b")).unwrap();
    put_image(&root.join("a/b/c.png"));
    symlink(&root, root.join("a/b/up")).unwrap();
    symlink("self", root.join("self")).unwrap();
    symlink("a/b", root.join("z")).unwrap();
    symlink("lost.png", root.join("y.png")).unwrap();
    let found = scan(&root, &[], MediaKinds::Images, &|_| true).unwrap();
    let paths: Vec<_> = found.items.iter().map(|item| item.path.clone()).collect();
    assert_eq!(paths, [root.join("a/b/c.png")]);
    let shown = |path: &Path| path.strip_prefix(&root).unwrap().display().to_string();
    let skipped = found.problems.iter().filter(|problem| problem.is_skipped);
    let skipped: Vec<_> = skipped.map(|problem| (shown(&problem.path), &problem.kind)).collect();
    let [(up, again), (lost, unreadable), (z, also)] = &skipped[..] else { panic!("{skipped:?}") };
    assert_eq!([up, lost, z], ["a/b/up", "y.png", "z"]);
    assert_eq!(**again, ProblemKind::FolderTwice { target: root.clone() });
    assert!(matches!(unreadable, ProblemKind::Unreadable { .. }));
    assert_eq!(**also, ProblemKind::FolderTwice { target: root.join("a/b") });
}

/// Its captions would be missed in silence.
#[test]
fn a_parquet_table_is_named() {
    let folder = tempfile::tempdir().unwrap();
    put_image(&folder.path().join("a.png"));
    fs::write(folder.path().join("metadata.parquet"), "PAR1").unwrap();
    fs::write(folder.path().join("other.npz"), "").unwrap();
    let found = scan(folder.path(), &[], MediaKinds::Images, &|_| true).unwrap();
    let kinds: Vec<_> = found.problems.into_iter().map(|problem| problem.kind).collect();
    assert_eq!(kinds, [ProblemKind::CaptionMissing, ProblemKind::Parquet, ProblemKind::Ignored]);
}

#[test]
fn cyclic_links_to_clips_are_followed_once() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().canonicalize().unwrap();
    let walk = root.join("clips/walk");
    fs::create_dir_all(&walk).unwrap();
    for name in ["1.png", "2.png"] {
        put_image(&walk.join(name));
    }
    symlink(walk.join("1.png"), walk.join("3.png")).unwrap();
    symlink(root.join("clips"), root.join("clips/again")).unwrap();
    symlink(&walk, root.join("clips/zz")).unwrap();
    assert!(Command::new("mkfifo").arg(root.join("pipe.mp4")).status().unwrap().success());
    let found = scan(&root, &[], MediaKinds::ImagesAndClips, &|_| true).unwrap();
    let clips: Vec<_> = found.items.iter().map(|item| (&item.path, item.clip.is_some())).collect();
    assert_eq!(clips, [(&walk, true)]);
    assert_eq!(found.items[0].clip.as_ref().unwrap().n_frames(24), 3);
    let kinds: Vec<_> = found.problems.iter().map(|problem| problem.kind.clone()).collect();
    let twice = |target: &Path| ProblemKind::FolderTwice { target: target.into() };
    let not_a_file = ProblemKind::Unreadable { why: "is not a file".into() };
    assert_eq!(
        kinds,
        [twice(&root.join("clips")), ProblemKind::CaptionMissing, twice(&walk), not_a_file]
    );
}

#[test]
fn file_names_need_not_be_utf8() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &[u8]| folder.path().join(OsStr::from_bytes(name));
    // Some file systems refuse such names, and then there is nothing to read.
    if fs::write(path(b"gr\xfcn.txt"), "green").is_err() {
        return;
    }
    put_image(&path(b"gr\xfcn.png"));
    let found = scan(folder.path(), &[], MediaKinds::Images, &|_| true).unwrap();
    assert_eq!(found.items[0].caption, "green");
    assert_eq!(found.problems, []);
}

#[test]
fn pipes_are_skipped() {
    let folder = tempfile::tempdir().unwrap();
    put_image(&folder.path().join("a.png"));
    for name in ["a.txt", "b.png", "metadata.jsonl"] {
        let made = Command::new("mkfifo").arg(folder.path().join(name)).status().unwrap();
        assert!(made.success());
    }
    let found = scan(folder.path(), &[], MediaKinds::Images, &|_| true).unwrap();
    let kinds: Vec<_> = found.problems.iter().map(|problem| problem.kind.to_string()).collect();
    assert_eq!(kinds, ["has no caption: an empty one is taken", "cannot be read: is not a file"]);
}

/// What a folder from strangers may not reach: by links, by `..`, by paths from the root.
#[test]
fn files_outside_the_folder_are_left_out_unless_links_are_followed() {
    let place = tempfile::tempdir().unwrap();
    let place = place.path().canonicalize().unwrap();
    let (root, secrets) = (place.join("data"), place.join("secrets"));
    fs::create_dir_all(root.join("sub")).unwrap();
    fs::create_dir(&secrets).unwrap();
    for image in [root.join("a.png"), root.join("sub/b.png")] {
        put_image(&image);
    }
    for name in ["c.png", "d.png", "e.png", "f.png"] {
        put_image(&secrets.join(name));
    }
    fs::write(secrets.join("key.txt"), "secret").unwrap();
    symlink(secrets.join("c.png"), root.join("c.png")).unwrap();
    symlink(secrets.join("key.txt"), root.join("a.txt")).unwrap();
    symlink(root.join("sub/b.png"), root.join("inside.png")).unwrap();
    symlink(&secrets, root.join("folder")).unwrap();
    let lines = [
        r#"{"file_name": "../secrets/d.png", "text": "by dots"}"#.to_owned(),
        format!(
            r#"{{"file_name": "{}", "text": "from the root"}}"#,
            secrets.join("e.png").display()
        ),
        r#"{"file_name": "sub/b.png", "text": "a", "reference": "../secrets/f.png"}"#.to_owned(),
    ];
    fs::write(root.join("metadata.jsonl"), lines.join("\n")).unwrap();
    // The folder itself may be a link.
    let linked = place.join("linked");
    symlink(&root, &linked).unwrap();
    for folder in [&root, &linked] {
        let found = scan(folder, &[], MediaKinds::Images, &|_| true).unwrap();
        let names: Vec<_> = found.items.iter().map(|item| item.path.file_name().unwrap()).collect();
        assert_eq!(names, ["a.png", "inside.png"], "{found:?}");
        assert!(found.items.iter().all(|item| item.caption.is_empty()), "{found:?}");
        let outside = found.problems.iter().map(ToString::to_string);
        let outside: Vec<_> = outside.filter(|text| text.contains("leads out of")).collect();
        assert_eq!(outside.len(), 6, "{outside:#?}");
        let options = ScanOptions { follow_links: true, ..ScanOptions::default() };
        let found = scan(folder, &[], options, &|_| true).unwrap();
        assert!(found.items.iter().any(|item| item.caption == "secret"), "{found:?}");
        assert!(found.items.len() > 5, "{found:?}");
    }
}

#[test]
fn a_caption_in_metadata_is_bounded() {
    let folder = tempfile::tempdir().unwrap();
    put_image(&folder.path().join("a.png"));
    let line = format!(r#"{{"file_name": "a.png", "text": "{}"}}"#, "x".repeat(2 << 20));
    fs::write(folder.path().join("metadata.jsonl"), line).unwrap();
    let found = scan(folder.path(), &[], MediaKinds::Images, &|_| true).unwrap();
    assert_eq!(found.items[0].caption, "");
    let said = found.problems.iter().map(ToString::to_string).collect::<String>();
    assert!(said.contains("its caption is 2 MiB long, most is 1 MiB"), "{said}");
}
