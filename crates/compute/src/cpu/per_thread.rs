//! Workspace of which each thread of the pool has a piece.

use std::sync::{Mutex, MutexGuard};

use super::CpuBackend;

impl CpuBackend {
    /// Calls `work` for every index below `tasks`, each time with this thread's `floats` of the
    /// workspace.
    pub fn with_scratch(
        &self,
        workspace: &mut [f32],
        floats: usize,
        tasks: usize,
        work: impl Fn(usize, ThreadScratch<'_>) + Sync,
    ) {
        let rooms = PerThread::new(workspace, floats, self.pool.current_num_threads());
        self.par_for(tasks, &|task| work(task, ThreadScratch(&mut rooms.get())));
    }
}

/// Workspace that is handed out piece by piece.
pub(crate) struct ThreadScratch<'a>(pub &'a mut [f32]);

impl<'a> ThreadScratch<'a> {
    pub fn take(&mut self, floats: usize) -> &'a mut [f32] {
        let (piece, rest) = std::mem::take(&mut self.0).split_at_mut(floats);
        self.0 = rest;
        piece
    }
}

/// The pieces, by thread. A lock that nobody contends costs nanoseconds, and spares us unsafe code.
struct PerThread<'a>(Vec<Mutex<&'a mut [f32]>>);

impl<'a> PerThread<'a> {
    /// Cuts `workspace` into pieces of `floats`.
    fn new(workspace: &'a mut [f32], floats: usize, threads: usize) -> Self {
        let mut rest = workspace;
        let piece = |_| {
            let (piece, after) = std::mem::take(&mut rest).split_at_mut(floats);
            rest = after;
            Mutex::new(piece)
        };
        Self((0..threads).map(piece).collect())
    }

    /// This thread's piece.
    fn get(&self) -> MutexGuard<'_, &'a mut [f32]> {
        let thread = rayon::current_thread_index().expect("called from a task of the pool");
        self.0[thread].lock().expect("no task panics")
    }
}
