//! What goes wrong between ranks.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// A [`Result`](std::result::Result) of this crate.
pub type Result<T> = std::result::Result<T, ClusterError>;

/// What goes wrong between ranks.
#[derive(Debug, Error)]
pub enum ClusterError {
    /// A launcher started the program, and there is no library for it.
    #[error(
        "{launcher} started {size} ranks, and no MPI library for it was found; looked for {tried}"
    )]
    NoLibrary {
        /// Whose launcher.
        launcher: &'static str,
        /// Ranks that it started.
        size: usize,
        /// What was looked for.
        tried: String,
    },

    /// A library that is no MPI, or not one of the three kinds.
    #[error("MPI library cannot be used: {problem}: {}", path.display())]
    Library {
        /// Its file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },

    /// The library sees another world than the launcher started.
    #[error("{launcher} started {expected} ranks, and {library} sees {size}")]
    World {
        /// Whose launcher.
        launcher: &'static str,
        /// Ranks that it started.
        expected: usize,
        /// The library.
        library: String,
        /// Ranks that the library sees.
        size: usize,
    },

    /// A rank is gone, or who supervises all.
    #[error("{}", lost_words(ranks, *is_supervisor))]
    RankLost {
        /// The ranks that are gone.
        ranks: Vec<usize>,
        /// Whether it is the supervisor that is gone.
        is_supervisor: bool,
    },

    /// A rank cannot reach its supervisor.
    #[error("cannot reach the supervisor of the ranks at {address}")]
    NoSupervisor {
        /// Where it should be.
        address: String,
        /// Why not.
        source: io::Error,
    },

    /// The launcher cannot be used.
    #[error("mpirun cannot be used: {problem}")]
    Mpirun {
        /// What is wrong.
        problem: String,
        /// What helps.
        hint: &'static str,
    },

    /// A call failed.
    #[error("{call} failed: {message}")]
    Call {
        /// The function's name.
        call: &'static str,
        /// What the library says.
        message: String,
    },
}

impl ClusterError {
    /// What helps.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::NoLibrary { .. } => {
                "install the MPI that the launcher belongs to, or name its library: HEARTH_MPI=PATH"
            }
            Self::Library { .. } => {
                "name libmpi of Open MPI 4 or 5, or of MPICH 4 or 5: HEARTH_MPI=PATH"
            }
            Self::World { .. } => {
                "they are of different installations: use the mpirun of that library, or name the library of that \
                 mpirun: HEARTH_MPI=PATH"
            }
            Self::RankLost { .. } => {
                "what was learnt is saved: add --resume; `--nodes` goes on by itself without a node that is gone"
            }
            Self::NoSupervisor { .. } => {
                "let the firewall pass connections between the nodes, or name their network: --link 10.0.0.0/24"
            }
            Self::Mpirun { hint, .. } => hint,
            Self::Call { .. } => "see what mpirun and the other ranks printed",
        }
    }
}

fn lost_words(ranks: &[usize], is_supervisor: bool) -> String {
    if is_supervisor {
        return "the supervisor of the ranks is gone".into();
    }
    let names: Vec<String> = ranks.iter().map(ToString::to_string).collect();
    let (noun, verb) = if ranks.len() == 1 { ("rank", "is") } else { ("ranks", "are") };
    format!("{noun} {} {verb} gone", names.join(", "))
}
