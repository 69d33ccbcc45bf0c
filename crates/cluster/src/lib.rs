//! Several processes, on one machine or on many, as the ranks of one job. Whoever installed an MPI has all that this
//! needs: the library is loaded when a job is started by its `mpirun`, and a program without it runs alone.

mod error;
mod launch;
pub mod mpi;
pub mod share;
mod world;

pub use error::{ClusterError, Result};
pub use launch::Launched;
pub use world::World;
