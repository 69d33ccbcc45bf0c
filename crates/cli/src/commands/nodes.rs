//! `hearth train --nodes`: this process starts the ranks of the job and supervises them.

use std::env;
use std::ffi::OsString;
use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;

use cluster::supervisor::{self, Mpirun, Node, Notice, SupervisedEnd, SupervisedJob, supervise};
use cluster::{LeaveReason, World};
use compute::CancelToken;
use machine::{Machine, ProbeSource};
use trainer::TrainerError;

use super::device::COMPUTER;
use super::resume::resume_command;
use crate::commands::CommandOutcome;
use crate::failure::Failure;
use crate::interrupt;
use crate::render;

/// The machines that train together.
#[derive(Debug, Default, clap::Args)]
pub struct NodesArgs {
    /// Train on these machines together, this one first: mac.local,spark.local:2 for two ranks on the second
    #[arg(long, value_name = "NODE,...", value_delimiter = ',', help_heading = COMPUTER)]
    nodes: Vec<Node>,

    /// Train on so many NVIDIA GPUs of this machine together
    #[arg(long, value_name = "N", conflicts_with = "nodes", help_heading = COMPUTER)]
    gpus: Option<usize>,

    /// Network between the nodes, such as 10.0.0.0/24
    #[arg(long, value_name = "NETWORK", help_heading = COMPUTER)]
    link: Option<String>,

    /// The mpirun of Open MPI or MPICH that starts the nodes
    #[arg(long, value_name = "PATH", help_heading = COMPUTER)]
    mpirun: Option<PathBuf>,

    /// Stop when a node is lost, instead of going on without it
    #[arg(long, help_heading = COMPUTER)]
    strict: bool,
}

/// What takes a word after it, and what does not.
const WITH_VALUE: [&str; 4] = ["--nodes", "--gpus", "--link", "--mpirun"];
const WITHOUT_VALUE: [&str; 1] = ["--strict"];

impl NodesArgs {
    /// What is to be done before this process is a rank, or trains alone: it may be the one that starts the ranks, or the
    /// parent of one.
    pub fn run(&self, out: &mut dyn Write) -> Result<Option<CommandOutcome>, Failure> {
        if let Some(nodes) = self.nodes()? {
            return self.supervise(&nodes, out).map(Some);
        }
        if let Some(code) = supervisor::run_shielded()? {
            interrupt::leave(code);
        }
        Ok(None)
    }

    /// The machines, if this process is to start others.
    fn nodes(&self) -> Result<Option<Vec<Node>>, Failure> {
        if let Some(gpus) = self.gpus {
            check_gpus(gpus)?;
            return Ok(Some(vec![Node::local(gpus)]));
        }
        if self.nodes.is_empty() {
            let extra = [
                ("--link", self.link.is_some()),
                ("--mpirun", self.mpirun.is_some()),
                ("--strict", self.strict),
            ];
            if let Some((flag, _)) = extra.into_iter().find(|(_, is_given)| *is_given) {
                let problem = format!("{flag} is about several machines, and there is one");
                let hint = "name them: --nodes mac.local,spark.local".to_owned();
                return Err(Failure::Usage { problem, hint });
            }
            return Ok(None);
        }
        Ok(Some(self.nodes.clone()))
    }

    /// Starts a rank of this program on each node, with the words that this one was started with, and goes on without
    /// those that are lost.
    fn supervise(&self, nodes: &[Node], out: &mut dyn Write) -> Result<CommandOutcome, Failure> {
        let words: Vec<OsString> = env::args_os().skip(1).collect();
        let program = env::current_exe()?;
        let mpirun = Mpirun::find(self.mpirun.as_deref()).map_err(TrainerError::from)?;
        let job = SupervisedJob {
            mpirun: &mpirun,
            nodes,
            link: self.link.as_deref(),
            program: &program,
            arguments: &without_nodes(&words),
            is_plain: !io::stdout().is_terminal(),
            is_strict: self.strict,
        };
        let stop = interrupt::flag()?;
        let end = supervise(&job, &stop, &mut |notice| render::warn(&told(&notice)));
        match end.map_err(TrainerError::from)? {
            SupervisedEnd::Done => Ok(CommandOutcome::Done),
            SupervisedEnd::Failed(_) => Ok(CommandOutcome::Differs),
            SupervisedEnd::Paused => {
                let words = words.iter().map(|word| word.to_string_lossy().into_owned());
                writeln!(out, "saved; continue with\n  {}", resume_command(words))?;
                Ok(CommandOutcome::Interrupted)
            }
        }
    }
}

/// Cancels when the supervisor asks the ranks to stop.
pub fn stop_when_asked(world: Option<&World>, stop: &CancelToken) {
    if let Some(heartbeat) = world.and_then(World::heartbeat) {
        let raised = stop.clone();
        heartbeat.on_stop(move || raised.cancel());
    }
}

/// Leaves the other ranks in order, if there are any.
pub fn leave(world: Option<World>, is_paused: bool) -> Result<(), Failure> {
    let reason = if is_paused { LeaveReason::Paused } else { LeaveReason::Done };
    let left = world.map_or(Ok(()), |world| world.leave(reason));
    Ok(left.map_err(TrainerError::from)?)
}

fn told(notice: &Notice) -> String {
    match notice {
        Notice::Lost { rank, node } => format!("rank {rank} of {node} is gone; the others save"),
        Notice::Continues(nodes) => format!("the run goes on with {}", nodes.join(", ")),
        Notice::Back(nodes) => {
            format!("{} is back, and joins at the next checkpoint", nodes.join(", "))
        }
    }
}

/// Fails where there are not as many.
fn check_gpus(asked: usize) -> Result<(), Failure> {
    let machine = Machine::probe(&mut ProbeSource::live());
    let found = machine.nvidia_gpus().count();
    if (1..=found).contains(&asked) {
        return Ok(());
    }
    let problem = format!("--gpus {asked}, and this machine has {found} NVIDIA GPUs");
    let hint =
        "`hearth doctor` lists them; --nodes localhost:2 trains in two processes on any device"
            .to_owned();
    Err(Failure::Usage { problem, hint })
}

/// The words of a rank: those of the supervisor, without what is the supervisor's.
fn without_nodes(words: &[OsString]) -> Vec<OsString> {
    let mut kept = Vec::new();
    let mut words = words.iter();
    while let Some(word) = words.next() {
        let text = word.to_string_lossy();
        if WITH_VALUE.contains(&text.as_ref()) {
            words.next();
        } else if !is_of_nodes(&text) {
            kept.push(word.clone());
        }
    }
    kept
}

fn is_of_nodes(word: &str) -> bool {
    let has_value =
        |flag: &&str| word.strip_prefix(*flag).is_some_and(|rest| rest.starts_with('='));
    WITHOUT_VALUE.contains(&word) || WITH_VALUE.iter().any(has_value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_get_the_words_of_the_job() {
        let words = |text: &str| -> Vec<OsString> { text.split(' ').map(OsString::from).collect() };
        let typed = "train job.toml --nodes a,b:2 --link=10.0.0.0/24 --strict --steps 5 --mpirun /x --gpus=2";
        assert_eq!(without_nodes(&words(typed)), words("train job.toml --steps 5"));
    }
}
