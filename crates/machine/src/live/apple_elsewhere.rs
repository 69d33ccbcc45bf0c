//! What only a Mac can answer, on a computer that is not one.

use crate::reading::Unknown;
use crate::source::ProbeAnswer;

pub fn metal() -> ProbeAnswer {
    Err(Unknown::because("not macOS"))
}

pub fn thermal() -> ProbeAnswer {
    Err(Unknown::because("not macOS"))
}

pub fn process() -> ProbeAnswer {
    Err(Unknown::because("not macOS"))
}
