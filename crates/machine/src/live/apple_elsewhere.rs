//! What only a Mac can answer, on a computer that is not one.

use crate::reading::Unknown;
use crate::source::Answer;

pub fn metal() -> Answer {
    Err(Unknown::because("not macOS"))
}

pub fn thermal() -> Answer {
    Err(Unknown::because("not macOS"))
}

pub fn process() -> Answer {
    Err(Unknown::because("not macOS"))
}
