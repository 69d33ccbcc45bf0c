//! MPI, loaded at run time. One program speaks the three binary interfaces there are: Open MPI's, MPICH's and the
//! one of the MPI-5 standard.

mod abi;
mod calls;
mod find;

use std::ffi::{c_int, c_void};
use std::path::{Path, PathBuf};

use self::calls::Calls;
pub use self::find::find;
use crate::error::Result;

/// An MPI library, with its calls.
pub struct Mpi {
    calls: AnyCalls,
    path: PathBuf,
}

/// Handles are addresses or numbers.
enum AnyCalls {
    Addresses(Calls<*mut c_void>),
    Numbers(Calls<c_int>),
}

/// The same expression for both.
macro_rules! with_calls {
    ($mpi:expr, $calls:ident => $done:expr) => {
        match &$mpi.calls {
            AnyCalls::Addresses($calls) => $done,
            AnyCalls::Numbers($calls) => $done,
        }
    };
}

/// A type of numbers that ranks exchange.
pub trait Number: Copy + Send + 'static {
    #[doc(hidden)]
    const KIND: NumberKind;
}

/// The types there are.
#[derive(Clone, Copy, Debug)]
pub enum NumberKind {
    /// Gradients.
    F32,
    /// Losses and times.
    F64,
    /// Counts, and sums that are exact.
    I64,
}

impl Number for f32 {
    const KIND: NumberKind = NumberKind::F32;
}

impl Number for f64 {
    const KIND: NumberKind = NumberKind::F64;
}

impl Number for i64 {
    const KIND: NumberKind = NumberKind::I64;
}

impl Mpi {
    /// Loads a library; starts nothing yet.
    pub fn open(path: &Path) -> Result<Self> {
        let library = calls::load(path)?;
        let calls = match abi::detect(&library) {
            abi::Abi::OpenMpi => AnyCalls::Addresses(Calls::open_mpi(library, path)?),
            abi::Abi::Standard => AnyCalls::Addresses(Calls::standard(library, path)?),
            abi::Abi::Mpich => AnyCalls::Numbers(Calls::mpich(library, path)?),
        };
        Ok(Self { calls, path: path.into() })
    }

    /// The file that was loaded.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it calls itself, in one line; known before it is started.
    pub fn version(&self) -> Result<String> {
        with_calls!(self, calls => calls.version())
    }

    /// Starts it: this process is a rank from now on.
    pub(crate) fn init(&self) -> Result<()> {
        with_calls!(self, calls => calls.init())
    }

    pub(crate) fn rank(&self) -> Result<usize> {
        with_calls!(self, calls => calls.rank())
    }

    pub(crate) fn size(&self) -> Result<usize> {
        with_calls!(self, calls => calls.size())
    }

    /// Sums over all ranks, in place; all get the sums.
    pub(crate) fn sum<T: Number>(&self, values: &mut [T]) -> Result<()> {
        with_calls!(self, calls => calls.sum(values))
    }

    /// Sums of bf16, each rounded to bf16.
    pub(crate) fn sum_bf16(&self, values: &mut [u16]) -> Result<()> {
        with_calls!(self, calls => calls.sum_bf16(values))
    }

    /// The largest over all ranks, in place.
    pub(crate) fn max<T: Number>(&self, values: &mut [T]) -> Result<()> {
        with_calls!(self, calls => calls.max(values))
    }

    /// What one rank has, to all.
    pub(crate) fn broadcast(&self, bytes: &mut [u8], from: usize) -> Result<()> {
        with_calls!(self, calls => calls.broadcast(bytes, from))
    }

    pub(crate) fn barrier(&self) -> Result<()> {
        with_calls!(self, calls => calls.barrier())
    }

    pub(crate) fn finalize(&self) -> Result<()> {
        with_calls!(self, calls => calls.finalize())
    }
}
