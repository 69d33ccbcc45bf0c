//! Layouts of data sets for image-editing models: which references an image gets, and in which order.

use std::fs;

use super::{Folder, IMAGE, image};
use crate::data::{MediaKinds, scan};

/// Small images and captions by their endings: a caption is the name without it.
fn folder(names: &str) -> Folder {
    let content = |name: &str| match name.rsplit('/').next().unwrap().split_once('.') {
        Some((stem, "txt")) => stem.as_bytes().to_vec(),
        _ => IMAGE.to_vec(),
    };
    let files: Vec<_> = names.split_whitespace().map(|name| (name, content(name))).collect();
    let files: Vec<_> = files.iter().map(|(name, content)| (*name, &content[..])).collect();
    Folder::new(&files)
}

fn no_caption(name: &str) -> String {
    format!("warning: {name} has no caption: an empty one is taken")
}

#[test]
fn references_pair_by_name() {
    let folder = Folder::new(&[
        ("images/a.png", IMAGE),
        ("images/a.txt", b"a"),
        ("images/b.png", IMAGE),
        ("images/b.txt", b"b"),
        ("images/c.png", IMAGE),
        ("images/c.txt", b"c"),
        ("images/sub/d.png", IMAGE),
        ("images/sub/d.txt", b"d"),
        ("control/a.jpg", IMAGE),
        ("control/b.png", b""),
        ("control/sub/d.png", IMAGE),
        ("control/z.png", IMAGE),
    ]);
    folder.check(
        &[
            "images/a.png: a + control/a.jpg",
            "images/c.png: c",
            "images/sub/d.png: d + control/sub/d.png",
        ],
        &[
            "skipped: control/b.png has zero bytes",
            "skipped: control/z.png is a reference without an image of the same name in images",
            "skipped: images/b.png has a reference that cannot be used: control/b.png",
            "warning: images/c.png has no reference of the same name in control",
        ],
    );
}

#[test]
fn sizes_of_references_are_their_own() {
    let folder = Folder::new(&[
        ("images/a.png", IMAGE),
        ("images/a.txt", b"a"),
        ("control/a.png", &image(100, 70)),
    ]);
    let scan = folder.check(&["images/a.png: a + control/a.png"], &[]);
    assert_eq!((scan.items[0].size, scan.items[0].references[0].size), ([80, 64], [100, 70]));
}

#[test]
fn folders_of_references_have_many_names() {
    for (target, references) in [
        ("images", "control"),
        ("Target", "Controls"),
        ("targets", "reference"),
        ("after", "before"),
        ("images", "references"),
        ("target", "conditioning"),
        ("images", "control_1"),
        ("images", "reference2"),
    ] {
        let names = ["/a.png", "/a.txt"].map(|name| format!("deep/{target}{name}"));
        let folder = folder(&format!("{} {} deep/{references}/a.jpg", names[0], names[1]));
        let item = format!("deep/{target}/a.png: a + deep/{references}/a.jpg");
        folder.check(&[&item], &[]);
    }
    // Without a partner it is a folder like any other.
    for name in ["control", "images", "before_1"] {
        let folder = folder(&format!("{name}/a.png {name}/a.txt other/b.png other/b.txt"));
        let scan = scan(&folder.path(""), &[], MediaKinds::Images, &|_| true).unwrap();
        assert_eq!((scan.items.len(), scan.problems.len()), (2, 0), "{name}");
    }
}

#[test]
fn numbered_folders_are_references_in_order() {
    let folder = folder(
        "images/a.png images/a.txt images/b.png images/b.txt images/sub/c.png images/sub/c.txt
         control_10/a.png control_2/a.png control_2/b.png control_2/sub/c.png control_1/a.png
         control_1/z.png",
    );
    folder.check(
        &[
            "images/a.png: a + control_1/a.png + control_2/a.png + control_10/a.png",
            "images/b.png: b + control_2/b.png",
            "images/sub/c.png: c + control_2/sub/c.png",
        ],
        &[
            "skipped: control_1/z.png is a reference without an image of the same name in images",
            "warning: images/b.png has no reference of the same name in control_1",
            "warning: images/b.png has no reference of the same name in control_10",
            "warning: images/sub/c.png has no reference of the same name in control_1/sub",
            "warning: images/sub/c.png has no reference of the same name in control_10/sub",
        ],
    );
}

#[test]
fn numbered_names_are_references_in_order() {
    let folder = folder(
        "images/a.png images/a.txt images/a_1.png images/a_1.txt images/b.png images/b.txt
         images/c.png images/c.txt images/d_1.png images/d_1.txt images/e.png images/e.txt
         control/a_0.png control/a_1.png control/a_2.png control/b_10.png control/b_2.png
         control/b_1.png control/c.png control/c_1.png control/d_1_0.png control/d_1_1.png
         control/e_x.png control/e_99999999999.png",
    );
    folder.check(
        &[
            "images/a.png: a + control/a_0.png + control/a_2.png",
            "images/a_1.png: a_1 + control/a_1.png",
            "images/b.png: b + control/b_1.png + control/b_2.png + control/b_10.png",
            "images/c.png: c + control/c.png",
            "images/d_1.png: d_1 + control/d_1_0.png + control/d_1_1.png",
            "images/e.png: e",
        ],
        &[
            "skipped: control/c_1.png is a reference without an image of the same name in images",
            "skipped: control/e_99999999999.png is a reference without an image of the same name \
             in images",
            "skipped: control/e_x.png is a reference without an image of the same name in images",
            "warning: images/e.png has no reference of the same name in control",
        ],
    );
}

#[test]
fn more_references_than_models_take_are_a_problem() {
    let folder = folder(
        "images/a.png images/a.txt images/b.png images/b.txt control/b_1.png control/b_2.png
         control/b_3.png control/a_1.png control/a_2.png control/a_3.png control/a_4.png
         control/a_5.png",
    );
    folder.check(
        &["images/b.png: b + control/b_1.png + control/b_2.png + control/b_3.png"],
        &["skipped: images/a.png has 5 references, most is 4"],
    );
}

#[test]
fn references_that_share_a_name_are_one() {
    let folder = folder("images/a.png images/a.txt control/a.jpg control/a.png");
    folder.check(
        &["images/a.png: a + control/a.jpg"],
        &["skipped: control/a.png shares its name with control/a.jpg: captions and references are \
           found by name"],
    );
}

#[test]
fn inputs_and_outputs_lie_in_one_folder() {
    let folder = folder(
        "01_in.png 01_in.txt 01_out.jpg 02_in.png 02_out.png 02_out.txt 03_in.png 03_out.png 03.txt
         04_in_2.png 04_in1.png 04_out.png 04_in1.txt 05_in.png 05_in.txt 06_out.png 06_out.txt
         07.png 07.txt 07_in.png 07_out.png 08.txt",
    );
    folder.check(
        &[
            "01_out.jpg: 01_in + 01_in.png",
            "02_out.png: 02_out + 02_in.png",
            "03_out.png: 03 + 03_in.png",
            "04_out.png: 04_in1 + 04_in1.png + 04_in_2.png",
            "05_in.png: 05_in",
            "06_out.png: 06_out",
            "07.png: 07",
            "07_out.png:  + 07_in.png",
        ],
        &[
            &no_caption("07_out.png"),
            "skipped: 08.txt is a caption without an image of the same name",
        ],
    );
}

#[test]
fn folders_of_references_may_be_elsewhere() {
    let folder = folder(
        "img/a.png img/a.txt img/b.png img/b.txt img/sub/c.png img/sub/c.txt one/a.png
         one/sub/c_1.png one/sub/c_2.png one/z.png two/a.jpg two/b.png two/sub/c.png",
    );
    folder.check_folders(
        "img",
        &["one", "two"],
        MediaKinds::Images,
        &[
            "img/a.png: a + one/a.png + two/a.jpg",
            "img/b.png: b + two/b.png",
            "img/sub/c.png: c + one/sub/c_1.png + one/sub/c_2.png + two/sub/c.png",
        ],
        &[
            "warning: img/b.png has no reference of the same name in one",
            "skipped: one/z.png is a reference without an image of the same name in img",
        ],
    );
    let missing = scan(&folder.path("img"), &[folder.path("gone")], MediaKinds::Images, &|_| true)
        .unwrap_err();
    assert!(missing.to_string().contains("gone"), "{missing}");
}

/// A folder of references below that of the images is not trained on; an image may be its own reference.
#[test]
fn folders_of_references_may_be_within() {
    let folder = folder("a.png a.txt refs/a.png refs/b.png");
    let unpaired = format!(
        "skipped: refs/b.png is a reference without an image of the same name in {}",
        folder.0.path().display()
    );
    folder.check_folders(
        "",
        &["refs"],
        MediaKinds::Images,
        &["a.png: a + refs/a.png"],
        &[&unpaired],
    );
    let own = ["refs/a.png:  + refs/a.png", "refs/b.png:  + refs/b.png"];
    let no_captions = ["refs/a.png", "refs/b.png"].map(no_caption);
    folder.check_folders(
        "refs",
        &["refs"],
        MediaKinds::Images,
        &own,
        &no_captions.each_ref().map(|said| &said[..]),
    );
}

#[test]
fn metadata_names_references() {
    let lines = r#"{"image_path": "a.png", "caption": "a", "control_path_1": "r/2.png", "control_path_0": "r/1.png"}
{"image": "b.png", "prompt": "b", "edit_image": ["r/2.png", "r/1.png", "b.png"]}
{"file_name": "c.png", "text": "c", "edit_image": "r/1.png", "image": {"bytes": null}}
{"file_name": "d.png", "text": "d", "reference": "r/2.png", "conditioning_image": null, "control_path": ""}
{"file_name": "e.png", "text": "e", "references": ["r/1.png"], "conditioning_image": ["r/2.png"]}
{"file_name": "f.png", "text": "f", "references": ["r/1.png", "r/2.png", "r/1.png", "r/2.png", "r/1.png"]}
{"file_name": "g.png", "text": "g", "references": [1]}
{"file_name": "h.png", "text": "h", "reference": "r"}
{"file_name": "i.png", "text": "i", "references": []}
{"file_name": 7}
["j.png"]
"#;
    let names = "a.png b.png c.png d.png e.png f.png g.png g.txt h.png i.png r/1.png r/2.png";
    let folder = folder(names);
    fs::write(folder.path("metadata.jsonl"), lines).unwrap();
    folder.check(
        &[
            "a.png: a + r/1.png + r/2.png",
            "b.png: b + r/2.png + r/1.png + b.png",
            "c.png: c + r/1.png",
            "d.png: d + r/2.png",
            "e.png: e + r/1.png + r/2.png",
            "g.png: g",
            "i.png: i",
        ],
        &[
            "skipped: f.png has 5 references, most is 4",
            "skipped: h.png has a reference that cannot be used: r",
            "skipped: metadata.jsonl line 7 is malformed: references is neither text nor a list of texts",
            "skipped: metadata.jsonl line 10 is malformed: file_name is not text",
            "skipped: metadata.jsonl line 11 is malformed: invalid type: sequence, expected a map at line 1 column 0",
            "skipped: r cannot be read: is not a file",
        ],
    );
}

#[test]
fn a_table_names_references() {
    let table = "image,prompt,edit_image,control_path_1\r\n\
                 a.png,\"a, edited\",\"[\"\"r/2.png\"\", \"\"r/1.png\"\"]\",\r\n\
                 b.png,b,r/1.png,\r\nc.png,c,,r/2.png\r\nd.png,d,[1].png,\r\n";
    let folder = folder("a.png b.png c.png d.png r/1.png r/2.png [1].png");
    fs::write(folder.path("metadata.csv"), table).unwrap();
    folder.check(
        &[
            "a.png: a, edited + r/2.png + r/1.png",
            "b.png: b + r/1.png",
            "c.png: c + r/2.png",
            "d.png: d + [1].png",
        ],
        &[],
    );
}

/// Whatever lies in the place of a reference, the scan ends, and the image is named.
#[test]
fn references_that_are_no_files_are_reported() {
    let folder = folder(
        "images/a.png images/a.txt images/b.png images/b.txt images/c.png images/c.txt
         control/ok.txt",
    );
    std::os::unix::fs::symlink("a.png", folder.path("control/a.png")).unwrap();
    std::os::unix::fs::symlink(folder.path("control"), folder.path("control/b.png")).unwrap();
    let pipe = std::process::Command::new("mkfifo").arg(folder.path("control/c.png")).status();
    assert!(pipe.unwrap().success());
    let scan = scan(&folder.path(""), &[], MediaKinds::Images, &|_| true).unwrap();
    let names = scan.items.iter().map(|item| item.path.file_name().unwrap().to_owned());
    assert_eq!(names.collect::<Vec<_>>(), ["b.png"]);
    let said: Vec<_> = scan.problems.iter().map(ToString::to_string).collect();
    for (name, words) in [
        ("images/a.png", "has a reference that cannot be used"),
        ("images/b.png", "has no reference of the same name"),
        ("images/c.png", "has a reference that cannot be used"),
        ("control/c.png", "cannot be read: is not a file"),
    ] {
        assert!(said.iter().any(|said| said.contains(name) && said.contains(words)), "{said:#?}");
    }
}
