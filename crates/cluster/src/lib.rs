//! Several processes, on one machine or on many, as the ranks of one job. Whoever installed an MPI has all that this
//! needs: the library is loaded when a job is started by its `mpirun`, and a program without it runs alone.

mod address;
mod bf16;
mod communication;
mod error;
pub mod heartbeat;
mod launch;
pub mod mpi;
pub mod nccl;
pub mod share;
pub mod supervisor;
mod world;

pub use communication::Pending;
pub use error::{ClusterError, Result};
pub use launch::{Launched, Launcher};
pub use world::{LeaveReason, World};

/// What this machine calls itself.
pub fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}
