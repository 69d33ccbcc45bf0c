//! Whether a launcher started this process as a rank, by the variables that it leaves.

use std::env;

/// What a launcher says of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launched {
    /// Whose launcher.
    pub launcher: Launcher,
    /// Ranks that it started.
    pub size: usize,
}

/// A kind of launcher; each has its own library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// `mpirun` of Open MPI.
    OpenMpi,
    /// `mpiexec` of MPICH, Intel MPI or MVAPICH (Hydra).
    Hydra,
}

impl Launcher {
    /// As people call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::OpenMpi => "mpirun of Open MPI",
            Self::Hydra => "mpiexec of MPICH",
        }
    }
}

impl Launched {
    /// By the variables of this process; none if it was started alone.
    pub fn detect() -> Option<Self> {
        Self::from_variables(|name| env::var(name).ok())
    }

    fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Option<Self> {
        let size = |name: &str| variable(name)?.parse().ok();
        let open_mpi = size("OMPI_COMM_WORLD_SIZE").map(|size| (Launcher::OpenMpi, size));
        let found = open_mpi.or_else(|| size("PMI_SIZE").map(|size| (Launcher::Hydra, size)));
        found.map(|(launcher, size)| Self { launcher, size })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launchers_are_known_by_their_variables() {
        let with = |all: &'static [(&str, &str)]| {
            Launched::from_variables(|name| {
                all.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
            })
        };
        let found = |launcher, size| Some(Launched { launcher, size });
        assert_eq!(with(&[]), None);
        assert_eq!(with(&[("OMPI_COMM_WORLD_SIZE", "3")]), found(Launcher::OpenMpi, 3));
        assert_eq!(with(&[("PMI_SIZE", "2"), ("PMI_RANK", "1")]), found(Launcher::Hydra, 2));
        assert_eq!(with(&[("PMI_SIZE", "many")]), None);
    }
}
