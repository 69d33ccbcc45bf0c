//! Probes: from a [`Source`] to a [`Machine`]. Every line here and below runs the same over a live
//! computer and over a recorded one.

mod cgroup;
mod linux;
mod macos;
mod nvidia;

use crate::Machine;
use crate::source::Source;

/// Looks at everything. A system that is neither is asked as Linux is: what it does not have is
/// unknown with the reason "no such file", and NVIDIA's libraries answer anywhere.
pub fn probe(source: &mut Source) -> Machine {
    match source.recording().os.as_str() {
        "macos" => macos::probe(source),
        _ => linux::probe(source),
    }
}
