//! Whether the arena of a GPU that shares main memory is made of host memory: weights are then read straight into it,
//! without buffers between. The driver may offer such memory and the GPU still read it more slowly than what it calls
//! its own, which would cost more in every step than was gained in the first. So both are measured, once in a process.
//!
//! The trial is a small device of its own and goes the way that weights go, by [`fill_all`].

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Instant;

use super::driver::PieceLocation;
use super::memory::{HostPieces, PIECE};
use super::{CudaBackend, CudaSource, CudaVariant, LaunchConfig, arguments};
use crate::device::Backend;
use crate::{ComputeError, Device, Dtype, FillPart, Tensor, fill_all};

/// Chosen: less than this of the usual speed would cost more in steps than is gained when weights are loaded, and a
/// measurement of a millisecond is as exact as that.
const MIN_GPU_SHARE: f64 = 0.95;
/// Chosen: beyond the caches of GPUs that share memory, and soon done.
const N_PIECES: usize = 2;
/// What weights are read in at a time.
const CHUNK_BYTES: usize = 8 << 20;
/// Chosen: as many threads as keep a memory busy.
const MAX_THREADS: usize = 8;
/// Chosen: the fastest of a few is the one that nothing disturbed.
const N_LOADS: usize = 3;
const N_LAUNCHES: usize = 5;
/// Chosen: enough to keep any GPU busy.
const N_BLOCKS: usize = 2048;

const KERNELS: CudaSource =
    CudaSource { name: "host_memory", text: include_str!("host_memory.cu") };

type Result<T> = std::result::Result<T, TrialError>;

/// Why host memory is not used.
#[derive(Debug, thiserror::Error)]
enum TrialError {
    #[error(transparent)]
    Compute(#[from] ComputeError),
    #[error("{0}")]
    Unfit(&'static str),
}

/// What was found out about host memory for an arena, and what follows.
#[derive(Clone, Debug, PartialEq)]
pub struct HostMemoryTrial {
    /// Whether the arena is made of it, and weights are read straight into it.
    pub is_used: bool,
    /// Whether it was asked for, whatever was measured.
    pub is_forced: bool,
    /// What was measured, or why nothing could be.
    pub speeds: std::result::Result<TrialSpeeds, String>,
    /// What it would be made of.
    pub(super) host: Option<HostPieces>,
}

/// Speeds of both memories.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TrialSpeeds {
    /// Host memory.
    pub host: PieceSpeeds,
    /// The device's, through buffers of pinned memory.
    pub device: PieceSpeeds,
}

/// Bytes per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PieceSpeeds {
    /// By which the CPU fills it.
    pub load: f64,
    /// By which the GPU reads it.
    pub gpu_read: f64,
    /// By which the GPU writes it.
    pub gpu_write: f64,
}

impl TrialSpeeds {
    /// Whether host memory is loaded as fast, and used as fast by the GPU.
    pub fn prefers_host(&self) -> bool {
        let Self { host, device } = self;
        host.load >= device.load
            && host.gpu_read >= MIN_GPU_SHARE * device.gpu_read
            && host.gpu_write >= MIN_GPU_SHARE * device.gpu_write
    }
}

impl HostMemoryTrial {
    fn new(measured: Result<Measured>, is_forced: bool) -> Self {
        match measured {
            Ok(Measured { speeds, host }) => {
                let is_used = is_forced || speeds.prefers_host();
                Self { is_used, is_forced, speeds: Ok(speeds), host: Some(host) }
            }
            Err(error) => {
                Self { is_used: false, is_forced, speeds: Err(error.to_string()), host: None }
            }
        }
    }

    /// What the arena is made of, if it is host memory.
    pub(super) fn pieces(&self) -> Option<HostPieces> {
        self.host.filter(|_| self.is_used)
    }
}

/// Tries host memory on the GPU of this number, the first time that it is asked for in this process. Not for a GPU with
/// memory of its own.
pub fn host_memory_trial(index: usize) -> HostMemoryTrial {
    static TRIALS: Mutex<BTreeMap<usize, HostMemoryTrial>> = Mutex::new(BTreeMap::new());
    let mut trials = TRIALS.lock().expect("nothing panics while memory is tried");
    trials.entry(index).or_insert_with(|| HostMemoryTrial::new(measure(index), is_forced())).clone()
}

/// Whether host memory is taken whatever was measured: for tests on a GPU that has memory of its own, which reads the
/// host's slowly. It changes no result.
fn is_forced() -> bool {
    std::env::var_os("HEARTH_FORCE_UNIFIED").is_some_and(|value| value == "straight")
}

struct Measured {
    speeds: TrialSpeeds,
    host: HostPieces,
}

fn measure(index: usize) -> Result<Measured> {
    let trial = MemoryTrial::new(index)?;
    let device = trial.speeds(None)?;
    let mut found = Err(TrialError::Unfit("the driver maps no host memory"));
    for location in trial.cuda().driver.host_locations() {
        found = trial.try_host(location);
        if found.is_ok() {
            break;
        }
    }
    let (host, speeds) = found?;
    Ok(Measured { speeds: TrialSpeeds { host: speeds, device }, host })
}

/// A device to try memory on.
struct MemoryTrial {
    device: Device,
    /// What is loaded, over and over.
    chunk: Vec<u8>,
    /// The sum of a piece that is full of it, as words.
    piece_sum: u32,
}

impl MemoryTrial {
    fn new(index: usize) -> Result<Self> {
        let device = Device::cuda(index, N_PIECES * PIECE + (1 << 20), true, None)?;
        let chunk: Vec<u8> = (0..CHUNK_BYTES).map(|at| (at * 7 + at / 251) as u8).collect();
        let words = chunk.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word));
        let piece_sum = wrapping_sum(words).wrapping_mul((PIECE / CHUNK_BYTES) as u32);
        Ok(Self { device, chunk, piece_sum })
    }

    fn cuda(&self) -> &CudaBackend {
        match self.device.backend() {
            Backend::Cuda(cuda) => cuda,
            _ => unreachable!("it was made so"),
        }
    }

    /// Speeds of one host memory, and whether the process's own reading has it.
    fn try_host(&self, location: PieceLocation) -> Result<(HostPieces, PieceSpeeds)> {
        let before = resident_bytes();
        let mut after = None;
        let host = HostPieces { location, is_resident: false };
        let speeds = self.speeds_with(Some(host), || after = resident_bytes())?;
        let grown = after.zip(before).map_or(0, |(after, before)| after.saturating_sub(before));
        let is_resident = grown >= (N_PIECES * PIECE / 2) as u64;
        Ok((HostPieces { is_resident, ..host }, speeds))
    }

    fn speeds(&self, host: Option<HostPieces>) -> Result<PieceSpeeds> {
        self.speeds_with(host, || {})
    }

    /// Speeds of a memory that then is given back. `when_full` is called while it holds something.
    fn speeds_with(
        &self,
        host: Option<HostPieces>,
        when_full: impl FnOnce(),
    ) -> Result<PieceSpeeds> {
        self.cuda().set_pieces(true, host);
        let measured = self.fill_and_use(host.is_some(), when_full);
        self.device.trim();
        self.device.synchronise()?;
        measured
    }

    fn fill_and_use(&self, is_host: bool, when_full: impl FnOnce()) -> Result<PieceSpeeds> {
        let mut tensors = (0..N_PIECES)
            .map(|_| self.device.alloc([PIECE], Dtype::U8))
            .collect::<crate::Result<Vec<_>>>()?;
        if let Some(fault) = self.cuda().memory.host_fault().filter(|_| is_host) {
            return Err(fault.into());
        }
        // Weights are what is first written to host memory, so its first time counts; buffers are filled many times.
        let n_loads = if is_host { 1 } else { N_LOADS };
        let load = fastest(n_loads, || self.load(&mut tensors))?;
        when_full();
        let mut sums = self.device.zeros([N_BLOCKS], Dtype::U32)?;
        let gpu_read = fastest(N_LAUNCHES, || self.read(&tensors, &mut sums))?;
        let gpu_write = fastest(N_LAUNCHES, || self.write(&mut tensors))?;
        self.check_copies(&tensors)?;
        Ok(PieceSpeeds { load, gpu_read, gpu_write })
    }

    /// Seconds that several threads take to fill tensors.
    fn load(&self, tensors: &mut [Tensor]) -> Result<f64> {
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS);
        let start = Instant::now();
        fill_all(tensors.iter_mut().collect(), |_, parts| -> Result<()> {
            let chunks = Mutex::new(chunks(parts));
            let next = || chunks.lock().expect("nothing panics while one is taken").pop();
            let copy = || -> Result<()> {
                while let Some(part) = next() {
                    part.fill(&mut |to| -> Result<()> {
                        to.copy_from_slice(&self.chunk[..to.len()]);
                        Ok(())
                    })?;
                }
                Ok(())
            };
            std::thread::scope(|scope| {
                // Fewer where the system gives no more; this one copies too.
                let start = |_| _ = std::thread::Builder::new().spawn_scoped(scope, copy);
                (1..threads).for_each(start);
                copy()
            })
        })?;
        self.device.synchronise()?;
        Ok(start.elapsed().as_secs_f64())
    }

    /// Seconds that the GPU takes to read tensors, which must be as they were filled.
    fn read(&self, tensors: &[Tensor], sums: &mut Tensor) -> Result<f64> {
        let mut seconds = 0.0;
        for tensor in tensors {
            let arguments = arguments![tensor, PIECE / 16, &mut *sums];
            seconds += self.launch("sum_words", &arguments)?;
            let sum = wrapping_sum(sums.read::<u32>()?);
            expect(sum == self.piece_sum, "the GPU reads other bytes")?;
        }
        Ok(seconds)
    }

    /// Seconds that the GPU takes to write tensors.
    fn write(&self, tensors: &mut [Tensor]) -> Result<f64> {
        let mut seconds = 0.0;
        for (word, tensor) in (WORD..).zip(tensors) {
            seconds += self.launch("set_words", &arguments![tensor, PIECE / 16, word])?;
        }
        Ok(seconds)
    }

    /// That the driver copies to, from and within this memory, after [`MemoryTrial::write`].
    fn check_copies(&self, tensors: &[Tensor]) -> Result<()> {
        let end = tensors[0].narrow(PIECE - 4096..PIECE);
        let same = |bytes: Vec<u8>| bytes == WORD.to_le_bytes().repeat(1024);
        expect(same(end.read()?), "the GPU writes other bytes")?;
        expect(same(end.clone().into_unique()?.read()?), "a copy has other bytes")?;
        let upload = self.device.upload([4], &[WORD, 1, 2, 3])?;
        expect(upload.read::<u32>()? == [WORD, 1, 2, 3], "an upload has other bytes")
    }

    /// Seconds of a launch, from its start to its end on the GPU.
    fn launch(&self, kernel: &'static str, arguments: &[super::CudaArg]) -> Result<f64> {
        let (cuda, grid) = (self.cuda(), LaunchConfig::blocks(N_BLOCKS));
        let milliseconds = cuda.driver.time(|| {
            cuda.launch(&KERNELS, kernel, CudaVariant::of(&[]), grid, arguments);
            cuda.check()
        })?;
        Ok(f64::from(milliseconds) / 1e3)
    }
}

/// Bytes per second of what takes so many seconds, at its fastest.
fn fastest(n: usize, mut run: impl FnMut() -> Result<f64>) -> Result<f64> {
    let mut least = f64::INFINITY;
    for _ in 0..n {
        least = least.min(run()?);
    }
    Ok((N_PIECES * PIECE) as f64 / least)
}

/// What the GPU writes.
const WORD: u32 = 0x5eed_0001;

fn chunks(parts: Vec<FillPart<'_>>) -> Vec<FillPart<'_>> {
    let mut chunks = Vec::new();
    for mut rest in parts {
        while rest.bytes() > 0 {
            let n = rest.bytes().min(CHUNK_BYTES);
            let (first, after) = rest.split_at(n);
            chunks.push(first);
            rest = after;
        }
    }
    chunks
}

fn wrapping_sum(words: impl IntoIterator<Item = u32>) -> u32 {
    words.into_iter().fold(0, u32::wrapping_add)
}

/// Memory that does not do what it should is not used.
fn expect(is_right: bool, what: &'static str) -> Result<()> {
    if is_right { Ok(()) } else { Err(TrialError::Unfit(what)) }
}

/// Bytes of main memory that the system counts as this process's, where it tells: on Linux.
fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn speeds(load: f64, gpu_read: f64, gpu_write: f64) -> PieceSpeeds {
        PieceSpeeds { load, gpu_read, gpu_write }
    }

    #[test]
    fn host_memory_is_taken_if_nothing_is_slower() {
        let device = speeds(10.0, 200.0, 180.0);
        for (host, expected) in [
            (speeds(20.0, 200.0, 180.0), true),
            (speeds(10.0, 191.0, 172.0), true),
            (speeds(9.9, 200.0, 180.0), false),
            (speeds(20.0, 189.0, 180.0), false),
            (speeds(20.0, 200.0, 170.0), false),
            (speeds(f64::NAN, 200.0, 180.0), false),
            (speeds(20.0, 0.0, f64::NAN), false),
        ] {
            let speeds = TrialSpeeds { host, device };
            assert_eq!(speeds.prefers_host(), expected, "{host:?}");
            let host = HostPieces { location: PieceLocation::Host, is_resident: true };
            for is_forced in [false, true] {
                let measured = Ok(Measured { speeds, host });
                let trial = HostMemoryTrial::new(measured, is_forced);
                assert_eq!(trial.pieces(), (expected || is_forced).then_some(host));
            }
        }
    }

    #[test]
    fn what_cannot_be_had_is_not_taken_and_says_why() {
        let refused = || ComputeError::Cuda {
            call: "cuMemSetAccess",
            code: 801,
            name: "CUDA_ERROR_NOT_SUPPORTED".into(),
        };
        for is_forced in [false, true] {
            let trial = HostMemoryTrial::new(Err(refused().into()), is_forced);
            assert!(!trial.is_used && trial.pieces().is_none());
            assert_eq!(trial.speeds, Err(refused().to_string()));
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_system_tells_what_the_process_holds() {
        let before = resident_bytes().unwrap();
        let taken = std::hint::black_box(vec![1_u8; 64 << 20]);
        let grown = resident_bytes().unwrap() - before;
        assert!(grown > 60 << 20, "{grown} bytes more with {} taken", taken.len());
    }
}
