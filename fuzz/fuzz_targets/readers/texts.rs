//! Texts of every form, by the first byte: records in lines or in a list, a table, or plain text. They become sequences of
//! the length that was asked for.

use std::fs;
use std::sync::LazyLock;

use trainer::text::{HeldOut, RecordKind, TextDataRequest, TextDataset, Tokenizer};

static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(Tokenizer::bytes);

const LENGTH: usize = 16;

pub fn read(bytes: &[u8]) {
    let Some((form, content)) = bytes.split_first() else { return };
    let folder = crate::place("texts");
    _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).expect("the temporary folder can be written to");
    let names = ["texts.jsonl", "texts.json", "texts.csv", "texts.txt"];
    let path = folder.join(names[usize::from(*form) % names.len()]);
    fs::write(&path, content).expect("it can be written");
    let request = TextDataRequest {
        path,
        kind: RecordKind::Texts,
        follow_links: false,
        width: None,
        length: LENGTH,
        held_out: HeldOut::Share(0.5),
        seed: 1,
        folder: folder.join("cache"),
    };
    let Ok(texts) = TextDataset::open(&request, &TOKENIZER, &|_| true) else { return };
    for index in 0..texts.n_train().min(4) {
        let sequence = texts.train(index).expect("it is there");
        assert_eq!(sequence.ids.len(), LENGTH);
        assert_eq!(sequence.targets.len(), LENGTH);
    }
}
