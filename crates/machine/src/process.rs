//! This process itself: what it took so far, where the system tells.

use std::time::Duration;

use crate::key_values::KeyValueLines;
use crate::reading::{Bytes, Unknown};

/// The most memory it has held at once, in bytes.
pub fn peak_resident() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    in_status(&status, "VmHWM").ok().map(|bytes| bytes.0)
}

/// The memory it holds, out of the text of `/proc/self/status`. Pages of files that are mapped count: they
/// are ours to give back.
pub fn resident(status: &str) -> Result<Bytes, Unknown> {
    in_status(status, "VmRSS")
}

fn in_status(status: &str, key: &str) -> Result<Bytes, Unknown> {
    KeyValueLines::new(status).number(key).and_then(Bytes::from_kib)
}

/// CPU time of all its threads: what the same work takes, whoever else is on the machine.
pub fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_words_are_read() {
        let status = "Name:\thearth\nVmHWM:\t    3340 kB\nVmRSS:\t    3000 kB\n";
        assert_eq!(resident(status), Ok(Bytes(3000 * 1024)));
        for broken in ["", "VmRSS: lots kB", "VmRSS: -1 kB", "VmRSS: 18446744073709551615 kB"] {
            assert!(resident(broken).is_err(), "{broken}");
        }
    }

    #[test]
    fn work_takes_cpu_time() {
        let before = cpu_time();
        let sum = (0..20_000_000u64).fold(0u64, |sum, i| std::hint::black_box(sum ^ i));
        assert!(cpu_time() > before, "{sum}");
    }
}
