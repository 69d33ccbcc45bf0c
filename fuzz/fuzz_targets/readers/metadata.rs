//! Captions and metadata in a folder of one image: JSON lines, a table, or a caption, by the first byte.

use std::fs;

use trainer::data::{MediaKinds, scan};

const IMAGE: &[u8] = include_bytes!("../../seeds/pixel.png");

pub fn read(bytes: &[u8]) {
    let Some((kind, content)) = bytes.split_first() else { return };
    let folder = crate::place("metadata");
    fs::create_dir_all(&folder).expect("the temporary folder can be written to");
    let names = ["metadata.jsonl", "metadata.csv", "a.txt"];
    for (at, name) in names.iter().enumerate() {
        let content = if usize::from(*kind) % names.len() == at { content } else { b"" };
        fs::write(folder.join(name), content).expect("it can be written");
    }
    fs::write(folder.join("a.png"), IMAGE).expect("it can be written");
    _ = scan(&folder, &[], MediaKinds::Images, &|_| true);
}
