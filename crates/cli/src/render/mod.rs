//! Pages for people. Nothing here decides anything; it is told what to draw.

pub mod bench;
pub mod doctor;
pub mod inspect;
pub mod progress;
