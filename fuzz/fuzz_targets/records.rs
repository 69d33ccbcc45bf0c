//! Events of a run read back for its report, and for a run that continues it.

#![no_main]

use std::fs;

use libfuzzer_sys::fuzz_target;
use trainer::event::history::History;

fuzz_target!(|bytes: &[u8]| {
    let folder = std::env::temp_dir().join(format!("hearth-fuzz-{}", std::process::id()));
    fs::create_dir_all(&folder).expect("the temporary folder can be written to");
    fs::write(folder.join("events.jsonl"), bytes).expect("it can be written");
    _ = History::read(&folder);
});
