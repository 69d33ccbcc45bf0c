//! `mpirun` of Open MPI and of MPICH: which one there is, and its command line.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::nodes::Node;
use crate::error::{ClusterError, Result};

/// A launcher on this machine.
#[derive(Clone, Debug)]
pub struct Mpirun {
    program: PathBuf,
    kind: MpirunKind,
    /// The first line of what it says of itself.
    pub version: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MpirunKind {
    OpenMpi { major: u32 },
    Mpich,
}

/// What is launched.
pub struct Launch<'a> {
    /// The nodes, in the order of their ranks.
    pub nodes: &'a [Node],
    /// The network between them, as `10.0.0.0/24`.
    pub link: Option<&'a str>,
    /// Variables of this process that every rank gets.
    pub variables: &'a [(&'a str, String)],
    /// The program.
    pub program: &'a Path,
}

impl Mpirun {
    /// The one that is named, or the first that is found.
    pub fn find(named: Option<&Path>) -> Result<Self> {
        let names = ["mpirun", "mpirun.openmpi", "mpirun.mpich", "mpiexec"].map(Path::new);
        let tried = named.map_or(names.to_vec(), |named| vec![named]);
        let found = tried.into_iter().find_map(Self::ask);
        found.ok_or_else(|| ClusterError::Mpirun {
            problem: match named {
                Some(path) => format!("it is neither Open MPI's nor MPICH's: {}", path.display()),
                None => "none was found".into(),
            },
            hint: "install Open MPI or MPICH (apt install openmpi-bin, brew install open-mpi), or name it: --mpirun PATH",
        })
    }

    fn ask(program: &Path) -> Option<Self> {
        let said = Command::new(program).arg("--version").stdin(Stdio::null()).output().ok()?;
        Self::from_version(program, &String::from_utf8_lossy(&said.stdout))
    }

    pub(super) fn from_version(program: &Path, said: &str) -> Option<Self> {
        let first = said.lines().next()?.trim();
        // It names itself by how it was called.
        let open_mpi = ["(Open MPI) ", "(OpenRTE) "].iter().find_map(|name| first.split_once(name));
        if let Some((_, version)) = open_mpi {
            let major = version.split('.').next()?.parse().ok()?;
            let version = format!("Open MPI {version}");
            return Some(Self {
                program: program.into(),
                kind: MpirunKind::OpenMpi { major },
                version,
            });
        }
        let version = said.lines().find_map(|line| line.trim().strip_prefix("Version:"))?;
        let version = format!("MPICH {}", version.trim());
        first.contains("HYDRA").then(|| Self {
            program: program.into(),
            kind: MpirunKind::Mpich,
            version,
        })
    }

    /// As it was found, or named.
    pub(super) fn program(&self) -> &Path {
        &self.program
    }

    /// The command; the program's arguments are to follow.
    pub fn command(&self, launch: &Launch<'_>) -> Result<Command> {
        let mut command = Command::new(&self.program);
        match self.kind {
            MpirunKind::OpenMpi { major } => open_mpi(&mut command, major, launch),
            MpirunKind::Mpich => mpich(&mut command, launch)?,
        }
        for (name, value) in launch.variables {
            command.env(name, value);
        }
        command.arg(launch.program);
        Ok(command)
    }

    /// The program that reaches another node: `ssh`, or the one that the user has set for Open MPI.
    pub fn remote_shell() -> Vec<String> {
        let set = ["OMPI_MCA_plm_rsh_agent", "PRTE_MCA_plm_ssh_agent"];
        let agent = set.iter().find_map(|name| std::env::var(name).ok());
        let ssh = "ssh -o BatchMode=yes -o ConnectTimeout=5".to_owned();
        agent.unwrap_or(ssh).split_whitespace().map(str::to_owned).collect()
    }
}

/// Ranks may use all cores; four links carry 1.2 to 1.9 times as much as one; the death of a rank is not the end of the
/// others: the supervisor decides.
fn open_mpi(command: &mut Command, major: u32, launch: &Launch<'_>) {
    let hosts: Vec<String> =
        launch.nodes.iter().map(|node| format!("{}:{}", node.name, node.ranks)).collect();
    command.args(["--host", &hosts.join(","), "--map-by", "slot", "--bind-to", "none"]);
    command.args(["--mca", "btl_tcp_links", "4"]);
    if let Some(link) = launch.link {
        let of_the_daemons = if major >= 5 { "--prtemca" } else { "--mca" };
        let key = if major >= 5 { "prte_if_include" } else { "oob_tcp_if_include" };
        command.args(["--mca", "btl_tcp_if_include", link, of_the_daemons, key, link]);
    }
    if major >= 5 {
        command.args(["--with-ft", "ulfm"]);
    } else {
        command.arg("--enable-recovery");
    }
    for (name, _) in launch.variables {
        command.args(["-x", name]);
    }
}

/// Variables travel by themselves.
fn mpich(command: &mut Command, launch: &Launch<'_>) -> Result<()> {
    if launch.link.is_some() {
        return Err(ClusterError::Mpirun {
            problem: "MPICH does not choose a network by its address, as --link asks".into(),
            hint: "use Open MPI: --mpirun PATH; or leave --link out and name nodes by their addresses on that network",
        });
    }
    let hosts: Vec<String> =
        launch.nodes.iter().map(|node| format!("{}:{}", node.name, node.ranks)).collect();
    let ranks: usize = launch.nodes.iter().map(|node| node.ranks).sum();
    command.args(["-hosts", &hosts.join(","), "-n", &ranks.to_string()]);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mpirun(said: &str) -> Option<Mpirun> {
        Mpirun::from_version(Path::new("mpirun"), said)
    }

    fn words(said: &str, link: Option<&str>) -> String {
        let nodes = [Node::local(1), Node { name: "spark".into(), ranks: 2 }];
        let variables = [("HEARTH_SUPERVISOR", "secret".into())];
        let program = Path::new("hearth");
        let launch = Launch { nodes: &nodes, link, variables: &variables, program };
        let command = mpirun(said).unwrap().command(&launch).unwrap();
        let words: Vec<_> =
            command.get_args().map(|word| word.to_string_lossy().into_owned()).collect();
        words.join(" ")
    }

    const MPICH: &str =
        "HYDRA build details:\n    Version:                                 4.0.2\n";

    #[test]
    fn launchers_are_known_by_what_they_say() {
        assert_eq!(
            mpirun("mpirun (Open MPI) 4.1.4\n").unwrap().kind,
            MpirunKind::OpenMpi { major: 4 }
        );
        assert_eq!(mpirun("mpirun (Open MPI) 5.0.11\n").unwrap().version, "Open MPI 5.0.11");
        assert_eq!(mpirun(MPICH).unwrap().version, "MPICH 4.0.2");
        assert_eq!(mpirun("mpirun.openmpi (OpenRTE) 4.1.4\n").unwrap().version, "Open MPI 4.1.4");
        assert!(mpirun("").is_none() && mpirun("slurm 23.1\n").is_none());
    }

    #[test]
    fn commands_name_nodes_and_never_the_secret() {
        let four = words("mpirun (Open MPI) 4.1.4", Some("10.0.0.0/24"));
        assert_eq!(
            four,
            "--host localhost:1,spark:2 --map-by slot --bind-to none --mca btl_tcp_links 4 \
             --mca btl_tcp_if_include 10.0.0.0/24 --mca oob_tcp_if_include 10.0.0.0/24 \
             --enable-recovery -x HEARTH_SUPERVISOR hearth"
        );
        let five = words("mpirun (Open MPI) 5.0.11", None);
        assert!(five.contains("--with-ft ulfm") && !five.contains("secret"), "{five}");
        assert_eq!(words(MPICH, None), "-hosts localhost:1,spark:2 -n 3 hearth");
    }
}
