//! Events of a run read back for its report, and for a run that continues it.

use std::fs;

use trainer::event::history::History;

pub fn read(bytes: &[u8]) {
    let folder = crate::place("events");
    fs::create_dir_all(&folder).expect("the temporary folder can be written to");
    fs::write(folder.join("events.jsonl"), bytes).expect("it can be written");
    _ = History::read(&folder);
}
