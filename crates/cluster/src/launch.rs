//! Whether a launcher started this process as a rank, by the variables that it leaves.

use std::env;

/// What a launcher says of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launched {
    /// Whose launcher.
    pub launcher: Launcher,
    /// Ranks that it started.
    pub size: usize,
    /// This one's number among them, where it says so.
    pub rank: Option<usize>,
    /// This one's number among those on this machine.
    pub local_rank: usize,
    /// Ranks on this machine.
    pub local_size: usize,
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
        let number = |name: &str| variable(name)?.parse::<usize>().ok();
        let (launcher, size) = number("OMPI_COMM_WORLD_SIZE")
            .map(|size| (Launcher::OpenMpi, size))
            .or_else(|| number("PMI_SIZE").map(|size| (Launcher::Hydra, size)))?;
        let [rank, local_rank, local_size] = match launcher {
            Launcher::OpenMpi => {
                ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"]
            }
            Launcher::Hydra => ["PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
        };
        Some(Self {
            launcher,
            size,
            rank: number(rank).filter(|rank| *rank < size),
            local_rank: number(local_rank).unwrap_or(0),
            local_size: number(local_size).unwrap_or(1).max(1),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launchers_are_known_by_their_variables() {
        let with = |all: &[(&str, &str)]| {
            Launched::from_variables(|name| {
                all.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
            })
        };
        let found = |launcher, size, rank| {
            Some(Launched { launcher, size, rank, local_rank: 0, local_size: 1 })
        };
        assert_eq!(with(&[]), None);
        assert_eq!(with(&[("OMPI_COMM_WORLD_SIZE", "3")]), found(Launcher::OpenMpi, 3, None));
        let hydra = [("PMI_SIZE", "2"), ("PMI_RANK", "1")];
        assert_eq!(with(&hydra), found(Launcher::Hydra, 2, Some(1)));
        assert_eq!(with(&[("PMI_SIZE", "many")]), None);
        let hydra = [("PMI_SIZE", "3"), ("MPI_LOCALRANKID", "1"), ("MPI_LOCALNRANKS", "2")];
        let found = Launched::from_variables(|name| {
            hydra.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
        });
        assert_eq!(found.map(|found| (found.local_rank, found.local_size)), Some((1, 2)));
    }
}
