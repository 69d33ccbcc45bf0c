//! Captions and metadata in a folder of one image: JSON lines, a table, or a caption, by the first byte.

#![no_main]

use std::fs;

use libfuzzer_sys::fuzz_target;
use trainer::data::{MediaKinds, scan};

const IMAGE: &[u8] = include_bytes!("../seeds/pixel.png");

fuzz_target!(|bytes: &[u8]| {
    let Some((kind, content)) = bytes.split_first() else { return };
    let folder = std::env::temp_dir().join(format!("hearth-fuzz-{}", std::process::id()));
    fs::create_dir_all(&folder).expect("the temporary folder can be written to");
    let names = ["metadata.jsonl", "metadata.csv", "a.txt"];
    for (at, name) in names.iter().enumerate() {
        let content = if usize::from(*kind) % names.len() == at { content } else { b"" };
        fs::write(folder.join(name), content).expect("it can be written");
    }
    fs::write(folder.join("a.png"), IMAGE).expect("it can be written");
    _ = scan(&folder, &[], MediaKinds::Images, &|_| true);
});
