//! Whether nodes can train together: the same program and the same MPI on each.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use super::mpirun::Mpirun;
use super::nodes::Node;

/// What a node answered.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeCheck {
    /// Its name.
    pub node: String,
    /// The version of the program there.
    pub program: Result<String, String>,
    /// The MPI there.
    pub mpi: Result<String, String>,
    /// Seconds until it answered: logging in included.
    pub secs: f64,
}

/// Asks a node for its versions, at the paths that a run would use.
pub fn check_node(node: &Node, program: &Path, mpirun: &Mpirun) -> NodeCheck {
    let begun = Instant::now();
    let first_line = |said: &str| said.lines().next().unwrap_or_default().trim().to_owned();
    let version = said_by(node, program).map(|said| first_line(&said));
    let secs = begun.elapsed().as_secs_f64();
    let launcher = mpirun.program();
    let mpi = said_by(node, launcher).and_then(|said| {
        let known = Mpirun::from_version(launcher, &said);
        known.map(|mpirun| mpirun.version).ok_or_else(|| "neither Open MPI nor MPICH".to_owned())
    });
    NodeCheck { node: node.name.clone(), program: version, mpi, secs }
}

/// What a program on a node says of its version; or why it does not.
fn said_by(node: &Node, program: &Path) -> Result<String, String> {
    let mut command = if node.is_local() {
        Command::new(program)
    } else {
        let shell = Mpirun::remote_shell();
        let mut command = Command::new(&shell[0]);
        let path = program.display().to_string().replace('\'', r"'\''");
        command.args(&shell[1..]).args([&node.name, &format!("'{path}'")]);
        command
    };
    let output = command.arg("--version").stdin(Stdio::null()).output();
    let output = output.map_err(|error| error.to_string())?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if output.status.success() {
        return Ok(text(&output.stdout));
    }
    let problem = text(&output.stderr);
    let last = problem.lines().last().unwrap_or("no answer");
    Err(last.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_says_what_it_has_or_why_not() {
        let mpirun = Mpirun::from_version(Path::new("echo"), "mpirun (Open MPI) 4.1.4").unwrap();
        let here = check_node(&Node::local(1), Path::new("echo"), &mpirun);
        assert!(here.program.is_ok_and(|said| !said.is_empty()));
        assert_eq!(here.mpi, Err("neither Open MPI nor MPICH".into()));
        let missing = check_node(&Node::local(1), Path::new("/nonexistent/hearth"), &mpirun);
        assert!(missing.program.is_err());
    }
}
