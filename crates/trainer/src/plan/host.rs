//! Host memory outside the arena, but for prefetched samples, which tasks estimate. Close, but not exact as the
//! arena is, which a dry run finds to the byte: `docs/measured.md` compares it with what the system counts.

use compute::DeviceKind;

use crate::data::decoding::SMALL_BYTES;

/// The program's code as far as it is used, its threads, and their workspace for matmuls. This and the one
/// below measured on a Xeon with 2 threads, 2026-11-15: what the system counts less the arena.
const PROGRAM_BYTES: usize = 26 << 20;
const THREAD_BYTES: usize = 2 << 20;
/// Blocks of files on their way to or from the disk.
const FILES_BYTES: usize = 48 << 20;
/// CUDA's context, its libraries and their workspaces, where they are in main memory. Measured on an H200 that was
/// treated as if it shared main memory, 2026-11-17: 542 MiB of the GPU beside the arena, and 556 MiB of the process
/// beside what is below.
const CUDA_BYTES: usize = 1100 << 20;

/// Bytes of a GPU's driver in this process, where it shares main memory.
pub(super) fn driver_bytes(kind: DeviceKind) -> usize {
    match kind {
        DeviceKind::Cuda { .. } => CUDA_BYTES,
        DeviceKind::Cpu { .. } | DeviceKind::Gpu { .. } => 0,
    }
}

/// Bytes outside the arena while images and texts are encoded.
pub(super) fn encoding_bytes(threads: usize) -> usize {
    program_bytes(threads) + SMALL_BYTES
}

/// Bytes of the program itself.
pub(super) fn program_bytes(threads: usize) -> usize {
    PROGRAM_BYTES + threads * THREAD_BYTES + FILES_BYTES
}
