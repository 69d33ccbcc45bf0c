//! Probes: from a [`ProbeSource`] to a [`Machine`]. Every line here and below runs the same over a live
//! computer and over a recorded one. What a run asks every second has functions of its own, so that only
//! that is asked; [`Monitor`](crate::monitor::Monitor) puts it together.

mod cgroup;
mod linux;
mod macos;
mod nvidia;
mod power;

pub use self::linux::temperature;
pub use self::nvidia::telemetry as gpu_telemetry;
pub use self::power::{PowerStatus, microjoules};

use crate::Machine;
use crate::memory::SystemMemory;
use crate::reading::{Bytes, Reading};
use crate::source::ProbeSource;
use crate::thermal::MacThermal;

/// Looks at everything. A system that is neither is asked as Linux is: what it does not have is
/// unknown with the reason "no such file", and NVIDIA's libraries answer anywhere.
pub fn probe(source: &mut ProbeSource) -> Machine {
    if is_mac(source) { macos::probe(source) } else { linux::probe(source) }
}

/// Main memory and memory pressure.
pub fn memory(source: &mut ProbeSource) -> SystemMemory {
    if is_mac(source) { macos::memory(source) } else { linux::memory(source) }
}

/// What this process holds of main memory; on macOS with what Metal was given.
pub fn process_memory(source: &mut ProbeSource) -> Reading<Bytes> {
    if is_mac(source) { macos::process_memory(source) } else { linux::process_memory(source) }
}

/// Mains or battery.
pub fn power_status(source: &mut ProbeSource) -> PowerStatus {
    if is_mac(source) { power::mac_power_status(source) } else { power::power_status(source) }
}

/// What macOS says of heat; nothing elsewhere.
pub fn mac_thermal(source: &mut ProbeSource) -> Option<MacThermal> {
    is_mac(source).then(|| macos::thermal(source))
}

fn is_mac(source: &ProbeSource) -> bool {
    source.recording().os == "macos"
}
