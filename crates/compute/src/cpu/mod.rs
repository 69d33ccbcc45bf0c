//! The CPU backend: its memory, its threads, and what its ops share. Work is cut into
//! pieces so that results do not depend on the number of threads: by shape alone, or where every
//! number is computed in the same order wherever a piece begins.

pub(crate) mod gemm;
pub(crate) mod math;
mod memory;
mod per_thread;
pub(crate) mod rows;
mod shared;
pub(crate) mod simd;
pub(crate) mod sums;

pub(crate) use memory::HostMemory;
pub(crate) use per_thread::ThreadScratch;
pub(crate) use shared::SharedSlice;

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::dtype::{Real, with_real};
use crate::{ComputeError, Result, Tensor};
use gemm::GemmBackend;

pub(crate) struct CpuBackend {
    pool: rayon::ThreadPool,
    memory: HostMemory,
    /// What multiplies.
    pub gemm_backend: GemmBackend,
}

impl CpuBackend {
    /// `has_amx` is what [`gemm::has_amx`] found, or false.
    pub fn new(threads: usize, limit_bytes: usize, has_amx: bool) -> Result<Self> {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|index| format!("cpu-{index}"))
            .build()
            .map_err(|source| ComputeError::Threads { threads, source })?;
        let way = if has_amx { GemmBackend::Amx } else { GemmBackend::Simd };
        Ok(Self { pool, memory: HostMemory::reserve(limit_bytes)?, gemm_backend: way })
    }

    pub fn memory(&self) -> &HostMemory {
        &self.memory
    }

    /// Runs `work` on the pool, where rayon's parallel loops use its threads.
    pub fn install<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        self.pool.install(work)
    }

    /// Calls `work` once for every index below `count`, on any thread. Threads take one index at a
    /// time, so that a core that is slow, or shared with another program, holds nobody up; rayon's
    /// own loops give each thread its share in advance.
    pub fn par_for(&self, count: usize, work: &(dyn Fn(usize) + Sync)) {
        let next = AtomicUsize::new(0);
        let take = || {
            let index = next.fetch_add(1, Ordering::Relaxed);
            (index < count).then_some(index)
        };
        let take_all = || std::iter::from_fn(take).for_each(work);
        match count {
            0 => {}
            1 => self.install(take_all),
            _ => drop(self.pool.broadcast(|_| take_all())),
        }
    }

    /// Sets every element of a real tensor by its index.
    pub fn fill(&self, tensor: &mut Tensor, value: impl Fn(usize) -> f32 + Sync) {
        with_real!(tensor.dtype(), T => {
            self.par_rows(tensor.data_mut::<T>(), 1, |first, piece| {
                for (index, number) in piece.iter_mut().enumerate() {
                    *number = T::from_f32(value(first + index));
                }
            });
        });
    }
}
