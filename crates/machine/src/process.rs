//! This process itself: what it took so far, where the system tells.

use std::time::Duration;

/// The most memory it has held at once, in bytes.
pub fn peak_resident() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok().map(|kib| kib * 1024)
}

/// Processor time of all its threads: what the same work takes, whoever else is on the machine.
pub fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_takes_processor_time() {
        let before = cpu_time();
        let sum = (0..20_000_000u64).fold(0u64, |sum, i| std::hint::black_box(sum ^ i));
        assert!(cpu_time() > before, "{sum}");
    }
}
