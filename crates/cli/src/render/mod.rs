//! Pages for people. Nothing here decides anything; it is told what to draw.

pub mod bench;
pub mod cache;
pub mod caption;
pub mod clip_score;
pub mod doctor;
pub mod evaluate;
pub mod export;
pub mod fetch;
pub mod image_progress;
pub mod import;
pub mod inspect;
pub mod json;
pub mod line;
pub mod plan;
pub mod progress;
pub mod rates;
pub mod run_summary;
pub mod sample;
pub mod screen;
pub mod training;
pub mod verify;

use std::io::Write;

use crate::terminal;
use crate::text::WARN;

/// Done, but not as asked: a line on standard error.
pub fn warn(text: &str) {
    _ = writeln!(terminal::stderr(), "{WARN}warning:{WARN:#} {text}");
}
