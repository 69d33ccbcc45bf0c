//! The ranks of a job, and what they exchange. Every rank makes the same calls in the same order.

use crate::error::{ClusterError, Result};
use crate::launch::Launched;
use crate::mpi::{self, Mpi, Values};

/// All ranks of a job, seen from one of them. One call at a time, from any thread.
pub struct World {
    mpi: Mpi,
    rank: usize,
    size: usize,
}

impl World {
    /// Joins the ranks that a launcher started; none if this process was started alone.
    pub fn join() -> Result<Option<Self>> {
        let Some(launched) = Launched::detect() else { return Ok(None) };
        let mpi = mpi::find(launched)?;
        mpi.init()?;
        let (rank, size) = (mpi.rank()?, mpi.size()?);
        // An MPI that does not belong to the launcher is a world of its own.
        if size != launched.size {
            let (launcher, expected) = (launched.launcher.name(), launched.size);
            let library = mpi.version()?;
            return Err(ClusterError::World { launcher, expected, library, size });
        }
        Ok(Some(Self { mpi, rank, size }))
    }

    /// This one's number, from zero.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many there are.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The library between them.
    pub fn library(&self) -> Result<String> {
        self.mpi.version()
    }

    /// Sums over all ranks, in place.
    pub fn sum(&self, values: Values<'_>) -> Result<()> {
        self.mpi.sum(values)
    }

    /// The largest over all ranks, in place.
    pub fn max(&self, values: &mut [i64]) -> Result<()> {
        self.mpi.max(values)
    }

    /// What one rank has, to all.
    pub fn broadcast(&self, bytes: &mut [u8], from: usize) -> Result<()> {
        self.mpi.broadcast(bytes, from)
    }

    /// What every rank says, by rank.
    pub fn gather(&self, said: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mut lengths = vec![0_i64; self.size];
        lengths[self.rank] = i64::try_from(said.len()).unwrap_or(i64::MAX);
        self.sum(Values::I64(&mut lengths))?;
        let mut all = Vec::new();
        for (rank, length) in lengths.into_iter().enumerate() {
            let mut bytes =
                if rank == self.rank { said.to_vec() } else { vec![0; length as usize] };
            self.broadcast(&mut bytes, rank)?;
            all.push(bytes);
        }
        Ok(all)
    }

    /// Waits for all.
    pub fn barrier(&self) -> Result<()> {
        self.mpi.barrier()
    }

    /// Leaves in order, with all others. A rank that fails does not: its launcher then ends the others.
    pub fn leave(self) -> Result<()> {
        self.mpi.finalize()
    }
}
