//! Images against Pillow, folders against what they should be read as, damaged files against
//! everything. Reference images are in `tests/golden/images`, with the script that made them.

mod archives;
mod clips;
mod references;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::problem::ProblemKind;
use super::{Bucket, Crop, FolderScan, MediaKinds, Pixels, decode, resize_and_crop, scan, to_chw};
use crate::pixels::{Filter, scale};

#[derive(Deserialize)]
struct Golden {
    decoded: BTreeMap<String, Decoded>,
    resized: BTreeMap<String, Resized>,
}

#[derive(Deserialize)]
struct Decoded {
    size: [u32; 2],
    tolerance: u8,
    rgb: String,
}

#[derive(Deserialize)]
struct Resized {
    size: [u32; 2],
    rgb: String,
    to: [usize; 2],
    expected: String,
}

fn images() -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/images")).to_owned()
}

fn golden() -> Golden {
    serde_json::from_slice(&fs::read(images().join("expected.json")).unwrap()).unwrap()
}

/// The largest difference, and where.
fn difference(a: &[u8], b: &[u8]) -> (u8, usize) {
    assert_eq!(a.len(), b.len());
    let differences = a.iter().zip(b).map(|(a, b)| a.abs_diff(*b)).zip(0..);
    differences.max().unwrap()
}

#[test]
fn images_are_seen_as_pillow_sees_them() {
    let mut wrong = Vec::new();
    for (name, expected) in golden().decoded {
        let pixels = decode(&images().join(&name)).unwrap_or_else(|kind| panic!("{name} {kind}"));
        assert_eq!([pixels.width, pixels.height], expected.size, "{name}");
        let rgb = base64::decode(&expected.rgb).unwrap();
        let (most, at) = difference(&pixels.rgb, &rgb);
        if most > expected.tolerance {
            wrong.push(format!("{name}: {most} at {at}, {} for {}", pixels.rgb[at], rgb[at]));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn images_are_scaled_as_pillow_scales_them() {
    for (name, Resized { size: [width, height], rgb, to, expected }) in golden().resized {
        let pixels = Pixels { width, height, rgb: base64::decode(&rgb).unwrap() };
        let made = scale(pixels.clone(), to.map(|side| side as u32), Filter::Lanczos);
        let (most, at) = difference(&made.rgb, &base64::decode(&expected).unwrap());
        assert!(most <= 2, "{name}: {most} at {at}");
    }
}

/// An image whose red is its column and whose green is its row.
fn grid(width: u32, height: u32) -> Pixels {
    let pixel = |at: u32| [(at % width) as u8, (at / width) as u8, 9];
    Pixels { width, height, rgb: (0..width * height).flat_map(pixel).collect() }
}

#[test]
fn the_asked_part_is_cut() {
    let bucket = Bucket { width: 16, height: 16 };
    for (pixels, crop, expected) in [
        (grid(16, 16), Crop::Centre, [0, 0]),
        (grid(26, 16), Crop::Centre, [5, 0]),
        (grid(26, 16), Crop::At { x: 0.0, y: 0.3 }, [0, 0]),
        (grid(26, 16), Crop::At { x: 1.0, y: 0.3 }, [10, 0]),
        (grid(16, 36), Crop::At { x: 0.3, y: 0.25 }, [0, 5]),
        (grid(16, 36), Crop::At { x: 7.0, y: 7.0 }, [0, 20]),
        (grid(26, 16), Crop::At { x: f32::NAN, y: -1.0 }, [0, 0]),
    ] {
        let cut = resize_and_crop(pixels.clone(), bucket, crop);
        assert_eq!([cut.width, cut.height], [16, 16]);
        assert_eq!(cut.rgb[..2], expected, "{crop:?} of {} x {}", pixels.width, pixels.height);
        assert_eq!(cut.rgb.len(), 16 * 16 * 3);
    }
    // Any size of image covers any bucket.
    for [width, height] in [[1, 1], [1, 90], [90, 1], [33, 31], [17, 200]] {
        let cut =
            resize_and_crop(grid(width, height), Bucket { width: 24, height: 40 }, Crop::Centre);
        assert_eq!(([cut.width, cut.height], cut.rgb.len()), ([24, 40], 24 * 40 * 3));
    }
}

/// 8 pixels wide and as high as JPEG can be: scaled whole, it would have half a million rows.
#[test]
fn ribbons_are_cut_before_they_are_scaled() {
    let rgb = (0..65535_u32).flat_map(|row| [(row >> 8) as u8; 8 * 3]).collect();
    let ribbon = Pixels { width: 8, height: 65535, rgb };
    let shorter = super::resize::shortened(ribbon.clone(), [64, 64], [0.5, 0.5]);
    assert_eq!([shorter.width, shorter.height], [8, 32]);
    let plain = grid(64, 255);
    assert_eq!(super::resize::shortened(plain.clone(), [64, 64], [0.5, 0.5]), plain);
    for (y, expected) in [(0.0, 0), (0.5, 127), (1.0, 255)] {
        let cut = resize_and_crop(
            ribbon.clone(),
            Bucket { width: 64, height: 64 },
            Crop::At { x: 0.5, y },
        );
        assert_eq!([cut.width, cut.height], [64, 64]);
        assert!(cut.rgb[0].abs_diff(expected) <= 1, "{} for {expected}", cut.rgb[0]);
    }
}

#[test]
fn numbers_are_colour_by_colour_from_minus_one_to_one() {
    let pixels = Pixels { width: 2, height: 1, rgb: vec![0, 255, 51, 102, 0, 255] };
    for (flip, expected) in
        [(false, [-1.0, -0.2, 1.0, -1.0, -0.6, 1.0]), (true, [-0.2, -1.0, -1.0, 1.0, 1.0, -0.6])]
    {
        let numbers = to_chw(&pixels, flip);
        assert_eq!(numbers.len(), 6);
        let near = numbers.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6);
        assert!(near, "{numbers:?}");
    }
}

#[test]
fn broken_files_are_named_for_what_they_are() {
    let folder = tempfile::tempdir().unwrap();
    let check = |path: &Path, expected: &str| {
        let kind = decode(path).unwrap_err();
        assert_eq!(kind.to_string(), expected, "{}", path.display());
    };
    for name in ["plain.jpg", "progressive.jpg", "rgb16.png", "lossless.webp", "plain.gif"] {
        let path = images().join(format!("truncated_{name}"));
        let bytes = fs::metadata(&path).unwrap().len();
        let expected = format!(
            "is truncated: ends after {}, in the middle of the image",
            machine::Bytes(bytes as u64)
        );
        check(&path, &expected);
    }
    // As programs that recover files end what is left of them.
    let plain = fs::read(images().join("plain.jpg")).unwrap();
    let ended = folder.path().join("ended.jpg");
    fs::write(&ended, [&plain[..plain.len() - 40], b"\xff\xd9"].concat()).unwrap();
    assert!(matches!(decode(&ended), Err(ProblemKind::Truncated { .. })));
    let zeros = images().join("zeros_plain.jpg");
    assert!(matches!(decode(&zeros), Err(ProblemKind::Truncated { .. })));
    let supported = "supported are png, jpeg, webp, gif";
    check(&images().join("other.bmp"), &format!("has format bmp, {supported}"));
    for (content, expected) in [
        (&b""[..], "has zero bytes"),
        (b"not an image\nat all", "is not an image: looks like text, \"not an image\""),
        (b"\n<!DOCTYPE html><p>403", "is not an image: looks like a web page (html)"),
        (b"{\"error\": 1}", "is not an image: looks like json"),
        (b"\0\0\0\0\0", "is not an image: looks like nothing but zeros"),
        (b"\x01\x02\xfe\xff", "is not an image: looks like bytes 01 02 fe ff"),
        (
            b"version https://git-lfs.github.com/spec/v1",
            "is not an image: looks like a pointer of git lfs, the image itself was not fetched",
        ),
        (b"\0\0\0\x1cftypheic\0\0", &format!("has format heic, {supported}")),
        (
            b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR",
            "is truncated: ends after 16 B, in the middle of the image",
        ),
    ] {
        let path = folder.path().join("a.png");
        fs::write(&path, content).unwrap();
        check(&path, expected);
    }
    assert!(matches!(decode(folder.path()), Err(ProblemKind::Unreadable { .. })));
    assert!(matches!(decode(&folder.path().join("b")), Err(ProblemKind::Unreadable { .. })));
}

/// A PNG that says it is that large, with next to no data.
fn png_head(width: u32, height: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, width, height);
    encoder.set_color(png::ColorType::Rgb);
    let mut writer = encoder.write_header().unwrap();
    writer.write_chunk(png::chunk::IDAT, b"x\xda").unwrap();
    drop(writer);
    bytes
}

#[test]
fn bombs_are_refused_by_their_heads() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.png");
    fs::write(&path, png_head(60_000, 60_000)).unwrap();
    let expected = "is too large: 60000 x 60000 pixels are 3600000000, most is 256000000";
    assert_eq!(decode(&path).unwrap_err().to_string(), expected);
}

/// Every image, cut at many places and with many bytes changed: a problem or pixels, and the
/// program goes on.
#[test]
fn damaged_files_give_problems() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("damaged");
    let mut n_refused = 0;
    for name in golden().decoded.into_keys() {
        let whole = fs::read(images().join(&name)).unwrap();
        for at in (0..whole.len()).step_by(whole.len() / 12 + 1) {
            let mut flipped = whole.clone();
            flipped[at] ^= 0xff;
            for content in [&whole[..at], &flipped] {
                fs::write(&path, content).unwrap();
                n_refused += usize::from(decode(&path).is_err());
            }
        }
    }
    assert!(n_refused > 100, "{n_refused}");
}

/// A folder with small images of one colour, captions and other files by their endings.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new(files: &[(&str, &[u8])]) -> Self {
        let folder = Self(tempfile::tempdir().unwrap());
        for (name, content) in files {
            let path = folder.path(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            let content = if *content == IMAGE { image(80, 64) } else { content.to_vec() };
            fs::write(path, content).unwrap();
        }
        folder
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Items as `path: caption`, with repeats and references if there are any, then problems.
    fn check(&self, items: &[&str], problems: &[&str]) -> FolderScan {
        self.check_folders("", &[], MediaKinds::Images, items, problems)
    }

    /// The same for a model of clips; those are items as `path (frames at 24 fps): caption`.
    fn check_clips(&self, items: &[&str], problems: &[&str]) -> FolderScan {
        self.check_folders("", &[], MediaKinds::ImagesAndClips, items, problems)
    }

    /// The same of a folder in it, with folders of references.
    fn check_folders(
        &self,
        images: &str,
        references: &[&str],
        media: MediaKinds,
        items: &[&str],
        problems: &[&str],
    ) -> FolderScan {
        let references: Vec<PathBuf> = references.iter().map(|name| self.path(name)).collect();
        let images = if images.is_empty() { self.0.path().into() } else { self.path(images) };
        let found = scan(&images, &references, media, &|_| true).unwrap();
        let root = format!("{}{}", self.0.path().display(), std::path::MAIN_SEPARATOR);
        let short = |path: &Path| path.display().to_string().replace(&root, "");
        let shown: Vec<_> = found
            .items
            .iter()
            .map(|item| {
                let repeats =
                    if item.repeats == 1 { String::new() } else { format!(" x{}", item.repeats) };
                let named =
                    item.references.iter().map(|image| format!(" + {}", short(&image.path)));
                let references: String = named.collect();
                let clip = item.clip.as_ref().map(|clip| format!(" ({})", clip.n_frames(24)));
                let path = format!("{}{}", short(&item.path), clip.unwrap_or_default());
                format!("{path}: {}{repeats}{references}", item.caption)
            })
            .collect();
        assert_eq!(shown, items);
        let shown: Vec<_> = found
            .problems
            .iter()
            .map(|problem| {
                let mark = if problem.is_skipped { "skipped" } else { "warning" };
                format!("{mark}: {} {}", short(&problem.path), problem.kind).replace(&root, "")
            })
            .collect();
        assert_eq!(shown, problems);
        assert_eq!(scan(&images, &references, media, &|_| true).unwrap(), found, "a second time");
        found
    }
}

/// Stands for an image in `Folder::new`.
const IMAGE: &[u8] = b"image";

fn image(width: u32, height: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, width, height);
    encoder.set_color(png::ColorType::Grayscale);
    let mut writer = encoder.write_header().unwrap();
    writer.write_image_data(&vec![7; (width * height) as usize]).unwrap();
    writer.finish().unwrap();
    bytes
}

#[test]
fn captions_lie_beside_images() {
    let folder = Folder::new(&[
        ("a.png", IMAGE),
        ("a.txt", b"\xef\xbb\xbf  a dog,\r\nbrown\r\n"),
        ("b.JPG", IMAGE),
        ("b.caption", b"a cat"),
        ("c.webp", IMAGE),
        ("d.png", IMAGE),
        ("d.txt", b"gr\xfcn"),
        ("e.v2.png", IMAGE),
        ("e.v2.txt", b"dots"),
        ("f.png", IMAGE),
        ("f.txt", b"one"),
        ("f.caption", b"two"),
        ("g.png", IMAGE),
        ("g.txt", b" \n"),
        ("h.jpg", IMAGE),
        ("h.png", IMAGE),
        ("h.txt", b"both"),
        ("deep/er/i.png", IMAGE),
        ("deep/er/i.txt", "größer".as_bytes()),
        ("._a.png", b"junk"),
        (".hidden/x.png", IMAGE),
        ("Thumbs.db", b"junk"),
        ("readme.md", b"junk"),
        ("j.png", IMAGE),
        ("j.txt", b"\xff\xfe\x41\0\x3d\xd8\x4c\xdc\x0d\0\x0a\0"),
        ("k.txt", b"of nothing"),
    ]);
    let scan = folder.check(
        &[
            "a.png: a dog,\nbrown",
            "b.JPG: a cat",
            "c.webp: ",
            "d.png: ",
            "deep/er/i.png: größer",
            "e.v2.png: dots",
            "f.png: one",
            "g.png: ",
            "h.jpg: both",
            "h.png: both",
            "j.png: A\u{1f44c}",
        ],
        &[
            "warning: c.webp has no caption: an empty one is taken",
            "warning: d.txt is not UTF-8: byte 2 is 0xfc, an empty caption is taken",
            "warning: f.png has two captions that differ: that of f.txt is taken",
            "warning: g.png has an empty caption",
            "warning: h.png shares its name with h.jpg: captions and references are found by name",
            "skipped: k.txt is a caption without an image of the same name",
            "skipped: readme.md is ignored: neither an image, nor a caption (.txt, .caption), nor metadata \
             (.jsonl, .csv)",
        ],
    );
    assert_eq!(scan.items[0].size, [80, 64]);
}

#[test]
fn images_that_cannot_be_used_are_skipped() {
    let folder = Folder::new(&[
        ("a.png", b""),
        ("b.png", &image(80, 63)),
        ("c.bmp", b"BM......"),
        ("d.jpg", b"<html>"),
        ("e.png", &image(80, 64)[..90]),
        ("f.png", &png_head(60_000, 60_000)),
    ]);
    folder.check(
        &[],
        &[
            "skipped: a.png has zero bytes",
            "skipped: b.png is too small: 80 x 63 pixels, least is 64 on each side",
            "skipped: c.bmp has format bmp, supported are png, jpeg, webp, gif",
            "skipped: d.jpg is not an image: looks like a web page (html)",
            "skipped: e.png is truncated: ends after 90 B, in the middle of the image",
            "skipped: f.png is too large: 60000 x 60000 pixels are 3600000000, most is 256000000",
        ],
    );
    assert!(scan(&folder.path("nothing"), &[], MediaKinds::Images, &|_| true).is_err());
    let stopped = scan(&folder.path(""), &[], MediaKinds::Images, &|_| false).unwrap_err();
    assert!(stopped.is_cancelled(), "{stopped}");
    assert!(scan(&folder.path("a.png"), &[], MediaKinds::Images, &|_| true).is_err());
}

#[test]
fn folders_name_repeats_and_class() {
    let folder = Folder::new(&[
        ("10_sks dog/a.png", IMAGE),
        ("10_sks dog/b.png", IMAGE),
        ("10_sks dog/b.txt", b"its own"),
        ("10_sks dog/more/c.png", IMAGE),
        ("0_off/d.png", IMAGE),
        ("2024_holidays/e.png", IMAGE),
        ("3_/f.png", IMAGE),
    ]);
    folder.check(
        &[
            "10_sks dog/a.png: sks dog x10",
            "10_sks dog/b.png: its own x10",
            "10_sks dog/more/c.png: sks dog x10",
            "2024_holidays/e.png: ",
            "3_/f.png:  x3",
        ],
        &[
            "skipped: 0_off has 0 repeats in its name, least is 1",
            "warning: 2024_holidays/e.png has no caption: an empty one is taken",
            "warning: 3_/f.png has no caption: an empty one is taken",
        ],
    );
}

#[test]
fn metadata_names_images() {
    let lines = "\u{feff}{\"file_name\": \"a.png\", \"text\": \" a dog \"}\r\n\
        {\"image_path\": \"./sub/b.png\", \"caption\": \"b\", \"control_path\": \"edges/b.png\"}\n\
        \n\
        {\"file_name\": \"gone.png\", \"text\": \"x\"}\n\
        {\"text\": \"x\"}\n\
        {\"file_name\": \"a.png\", \"text\": \"again\"}\n\
        {\"file_name\": \"c\", \"text\": \"odd name\"}\n\
        {\"file_name\": \n";
    let folder = Folder::new(&[
        ("metadata.jsonl", lines.as_bytes()),
        ("a.png", IMAGE),
        ("a.txt", b"from a file"),
        ("c", IMAGE),
        ("d.png", IMAGE),
        ("d.txt", b"d"),
        ("sub/b.png", IMAGE),
        ("edges/b.png", IMAGE),
    ]);
    folder.check(
        &["a.png: a dog", "c: odd name", "d.png: d", "sub/b.png: b + edges/b.png"],
        &[
            "warning: a.png has two captions that differ: that of metadata.jsonl is taken",
            "skipped: metadata.jsonl line 4 names a missing file: gone.png",
            "skipped: metadata.jsonl line 5 is malformed: has no file_name, image_path or image",
            "skipped: metadata.jsonl line 6 is malformed: names a.png again",
            "skipped: metadata.jsonl line 8 is malformed: EOF while parsing a value at line 1 column 14",
        ],
    );
}

/// As `datasets` reads it, written by pandas: quotes, a line end in a caption, a column more.
#[test]
fn metadata_may_be_a_table() {
    let table = "\u{feff}file_name,text,score\r\na.png,\"a dog, \"\"Rex\"\"\nasleep\",0.5\r\nb.png,,1\r\n\
                 gone.png,x,1\r\n";
    let folder = Folder::new(&[
        ("train/metadata.csv", table.as_bytes()),
        ("train/a.png", IMAGE),
        ("train/b.png", IMAGE),
        ("train/b.txt", b"b"),
    ]);
    folder.check(
        &["train/a.png: a dog, \"Rex\"\nasleep", "train/b.png: b"],
        &["skipped: train/metadata.csv line 4 names a missing file: gone.png"],
    );
}

#[test]
fn sizes_are_the_right_way_up_and_animations_are_told() {
    for (name, expected) in golden().decoded {
        let header = super::header::read(&images().join(&name)).unwrap();
        assert_eq!(header.size, expected.size, "{name}");
        assert_eq!(header.is_animated, name.starts_with("animated"), "{name}");
    }
}
