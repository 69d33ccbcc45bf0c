//! Readers of what strangers share, but for weights, against any bytes. They are one program, because each takes the whole
//! trainer, which is slow to build and to link; HEARTH_READER names the one to test.

#![no_main]

mod adapter;
mod chat_template;
mod checkpoint;
mod clip;
mod events;
mod image;
mod import;
mod job;
mod language_gguf;
mod metadata;
mod settings;
mod texts;
mod tokenizer;

use std::path::PathBuf;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;

const READERS: [(&str, fn(&[u8])); 13] = [
    ("adapter", adapter::read),
    ("chat_template", chat_template::read),
    ("checkpoint", checkpoint::read),
    ("clip", clip::read),
    ("events", events::read),
    ("image", image::read),
    ("import", import::read),
    ("job", job::read),
    ("language_gguf", language_gguf::read),
    ("metadata", metadata::read),
    ("settings", settings::read),
    ("texts", texts::read),
    ("tokenizer", tokenizer::read),
];

static READER: LazyLock<fn(&[u8])> = LazyLock::new(|| {
    // As in the program: a decoder that panics has found a damaged file, any other panic is a bug.
    std::panic::set_hook(Box::new(|panic| {
        if !trainer::data::is_decoding() {
            eprintln!("{panic}");
            std::process::abort();
        }
    }));
    let name = std::env::var("HEARTH_READER").expect("HEARTH_READER names the reader");
    let known = READERS.iter().find(|(known, _)| *known == name);
    known.unwrap_or_else(|| panic!("there is no reader {name}")).1
});

fuzz_target!(|bytes: &[u8]| READER(bytes));

/// A path in the temporary folder that no other process uses.
fn place(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("hearth-fuzz-{}-{name}", std::process::id()))
}
