//! What a run holds: its process, and the memory that its device was given beside it. One sum for the governor, the
//! live line and the report. A reading of the process alone misses what a driver keeps for a GPU, even where that lies
//! in main memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::probe;
use crate::source::ProbeSource;

/// Where the memory of a run's device lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryPlace {
    /// In the process, whose own reading has all of it: the CPU, a software driver, Metal.
    Process,
    /// In main memory, where a reading of the process does not show it: a GPU that shares memory, by CUDA or Vulkan.
    BesideProcess,
    /// On the GPU.
    Gpu,
}

/// The memory of a run.
#[derive(Clone, Debug)]
pub struct HeldMemory {
    place: MemoryPlace,
    /// Bytes that the device was given, as they come and go.
    device_bytes: Arc<AtomicU64>,
}

impl HeldMemory {
    /// Of a process whose device was given `device_bytes`.
    pub fn new(place: MemoryPlace, device_bytes: Arc<AtomicU64>) -> Self {
        Self { place, device_bytes }
    }

    /// Of a process that computes in its own memory.
    pub fn of_process() -> Self {
        Self::new(MemoryPlace::Process, Arc::default())
    }

    /// Bytes of main memory, if the process itself holds so many; none where the run computes in memory of a GPU.
    pub fn main_memory_bytes(&self, process_bytes: u64) -> Option<u64> {
        (self.place != MemoryPlace::Gpu).then(|| process_bytes.saturating_add(self.beside_bytes()))
    }

    /// Bytes of this process and its device now, whatever memory they lie in; none where the system does not tell.
    pub fn now(&self) -> Option<u64> {
        let process = probe::process_memory(&mut ProbeSource::live());
        Some(process.known()?.0.saturating_add(self.beside_bytes()))
    }

    /// Bytes of the device that a reading of the process does not have.
    fn beside_bytes(&self) -> u64 {
        match self.place {
            MemoryPlace::Process => 0,
            MemoryPlace::BesideProcess | MemoryPlace::Gpu => {
                self.device_bytes.load(Ordering::Relaxed)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_counts_once_and_where_it_lies() {
        let device = Arc::new(AtomicU64::new(0));
        let held = |place| HeldMemory::new(place, device.clone()).main_memory_bytes(100);
        for bytes in [40, 7] {
            device.store(bytes, Ordering::Relaxed);
            assert_eq!(held(MemoryPlace::Process), Some(100));
            assert_eq!(held(MemoryPlace::BesideProcess), Some(100 + bytes));
            assert_eq!(held(MemoryPlace::Gpu), None);
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn what_is_taken_shows_at_once() {
        let device = Arc::new(AtomicU64::new(0));
        let held = HeldMemory::new(MemoryPlace::BesideProcess, device.clone());
        let before = held.now().unwrap();
        device.store(1 << 40, Ordering::Relaxed);
        let taken = std::hint::black_box(vec![1_u8; 64 << 20]);
        let grown = held.now().unwrap() - before;
        assert!(grown > (1 << 40) + (60 << 20), "{grown} bytes more with {} taken", taken.len());
    }
}
