//! `hearth train --nodes`: starts the ranks by `mpirun`, hears them (`heartbeat/`), and starts them again without a node
//! that is gone, from the checkpoint that the others saved when they were told. Any MPI will do: none has to survive.

mod check;
mod mpirun;
mod nodes;
mod run;
mod shield;

use std::env;
use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

pub use self::check::{NodeCheck, check_node};
pub use self::mpirun::Mpirun;
pub use self::nodes::Node;
use self::run::{RunOutcome, SupervisedRun};
pub use self::shield::run_shielded;
use crate::error::{ClusterError, Result};

/// Tells a rank where its supervisor is.
const VARIABLE: &str = "HEARTH_SUPERVISOR";

/// A node that is lost so often, each time within [`SOON`] of the start, is given up with the run.
const LOSSES: u32 = 3;
const SOON: Duration = Duration::from_secs(60);

/// How often a node that is gone is looked for.
const PROBE: Duration = Duration::from_secs(15);

/// A job to supervise.
pub struct SupervisedJob<'a> {
    /// The launcher.
    pub mpirun: &'a Mpirun,
    /// The machines; the first has the run's folder.
    pub nodes: &'a [Node],
    /// The network between them.
    pub link: Option<&'a str>,
    /// The program of every rank.
    pub program: &'a Path,
    /// Its arguments.
    pub arguments: &'a [OsString],
    /// Whether what ranks print is for a file, without colours: a launcher may give them a terminal.
    pub is_plain: bool,
    /// Whether a loss ends the run.
    pub is_strict: bool,
}

/// What a supervisor says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// This rank is gone; the others save.
    Lost {
        /// Its number.
        rank: usize,
        /// Where it was.
        node: String,
    },
    /// The run goes on with these nodes.
    Continues(Vec<String>),
    /// Nodes are back; they join at the next checkpoint.
    Back(Vec<String>),
}

/// How a supervised job ended.
pub enum SupervisedEnd {
    /// All ranks ended in order.
    Done,
    /// They were asked to stop, and can be resumed.
    Paused,
    /// One of them failed, and has said why; or the launcher did.
    Failed(ExitStatus),
}

/// Where a rank finds its supervisor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SupervisorAddress {
    pub(crate) addresses: Vec<SocketAddr>,
    pub(crate) token: String,
}

impl SupervisorAddress {
    /// By the variable that a supervisor sets.
    pub(crate) fn from_environment() -> Option<Self> {
        Self::parse(&env::var(VARIABLE).ok()?)
    }

    pub(crate) fn to_text(&self) -> String {
        let addresses: Vec<String> = self.addresses.iter().map(ToString::to_string).collect();
        format!("{} {}", self.token, addresses.join(","))
    }

    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (token, addresses) = text.split_once(' ')?;
        let addresses: Option<Vec<SocketAddr>> =
            addresses.split(',').map(|address| address.parse().ok()).collect();
        Some(Self { addresses: addresses?, token: token.into() })
    }
}

/// Whether a supervisor started this process.
pub fn is_supervised() -> bool {
    env::var_os(VARIABLE).is_some()
}

/// Whether a supervisor started this process to go on with what others have begun.
pub fn is_restarted() -> bool {
    env::var_os(RESTARTED).is_some()
}

/// Set for ranks that go on.
const RESTARTED: &str = "HEARTH_RESTARTED";

/// Runs a job to its end, also without nodes that are lost on the way. When `stop` is raised, the ranks are asked to stop.
pub fn supervise(
    job: &SupervisedJob<'_>,
    stop: &AtomicBool,
    notice: &mut dyn FnMut(Notice),
) -> Result<SupervisedEnd> {
    let mut roster = Roster::new(job.nodes);
    let mut is_restart = false;
    loop {
        let begun = Instant::now();
        let present = roster.present();
        let mut run = SupervisedRun::start(job, &present, is_restart)?;
        match run.watch(stop, &mut roster, notice)? {
            RunOutcome::Ended(end) => return Ok(end),
            RunOutcome::Joining => roster.take_all_in(),
            RunOutcome::Lost(ranks) if job.is_strict => {
                return Err(ClusterError::RankLost { ranks, is_supervisor: false });
            }
            RunOutcome::Lost(ranks) => roster.leave_out(&ranks, begun.elapsed() < SOON)?,
        }
        is_restart = true;
        notice(Notice::Continues(roster.present().iter().map(ToString::to_string).collect()));
    }
}

/// The nodes of a job: who takes part, and who is gone.
struct Roster {
    nodes: Vec<RosterNode>,
    /// The one that is looked for, and since when.
    probe: Option<(usize, Child)>,
    probed: Instant,
}

struct RosterNode {
    node: Node,
    is_present: bool,
    /// It answers again.
    is_back: bool,
    quick_losses: u32,
}

impl Roster {
    fn new(nodes: &[Node]) -> Self {
        let all = nodes.iter().map(|node| RosterNode {
            node: node.clone(),
            is_present: true,
            is_back: false,
            quick_losses: 0,
        });
        Self { nodes: all.collect(), probe: None, probed: Instant::now() }
    }

    fn present(&self) -> Vec<Node> {
        self.nodes.iter().filter(|node| node.is_present).map(|node| node.node.clone()).collect()
    }

    /// The indices of nodes whose ranks these are.
    fn of_ranks(&self, ranks: &[usize]) -> Vec<usize> {
        let mut owners = Vec::new();
        for (index, node) in self.nodes.iter().enumerate().filter(|(_, node)| node.is_present) {
            owners.extend(std::iter::repeat_n(index, node.node.ranks));
        }
        let mut found: Vec<usize> =
            ranks.iter().filter_map(|rank| owners.get(*rank).copied()).collect();
        found.dedup();
        found
    }

    /// The name of a rank's node.
    fn name_of(&self, rank: usize) -> String {
        let index = self.of_ranks(&[rank]).first().copied().unwrap_or_default();
        self.nodes[index].node.name.clone()
    }

    /// Goes on without the nodes of these ranks; not without the first, which has the run's folder.
    fn leave_out(&mut self, ranks: &[usize], is_soon: bool) -> Result<()> {
        for index in self.of_ranks(ranks) {
            let node = &mut self.nodes[index];
            node.quick_losses = if is_soon { node.quick_losses + 1 } else { 0 };
            if node.quick_losses >= LOSSES && index == 0 {
                return Err(ClusterError::RankLost { ranks: ranks.to_vec(), is_supervisor: false });
            }
            node.is_present = index == 0;
            node.is_back = false;
        }
        Ok(())
    }

    fn take_all_in(&mut self) {
        for node in &mut self.nodes {
            node.is_present |= node.is_back;
            node.is_back = false;
        }
    }

    /// Looks for nodes that are gone, one after the other; returns those that are back since the last time.
    fn find_back(&mut self) -> Vec<String> {
        let mut back = Vec::new();
        if let Some((index, mut child)) = self.probe.take() {
            match child.try_wait() {
                Ok(None) => self.probe = Some((index, child)),
                Ok(Some(status)) if status.success() => back.push(self.mark_back(index)),
                _ => {}
            }
            return back;
        }
        if self.probed.elapsed() < PROBE {
            return back;
        }
        self.probed = Instant::now();
        let is_sought =
            |node: &RosterNode| !node.is_present && !node.is_back && node.quick_losses < LOSSES;
        let Some(index) = self.nodes.iter().position(is_sought) else { return back };
        if self.nodes[index].node.is_local() {
            back.push(self.mark_back(index));
        } else {
            self.probe = probe(&self.nodes[index].node).map(|child| (index, child));
        }
        back
    }

    fn mark_back(&mut self, index: usize) -> String {
        self.nodes[index].is_back = true;
        self.nodes[index].node.name.clone()
    }
}

/// Starts to look whether a node answers.
fn probe(node: &Node) -> Option<Child> {
    let shell = Mpirun::remote_shell();
    let mut command = Command::new(shell.first()?);
    command.args(&shell[1..]).args([&node.name, "true"]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_they_were_written() {
        let address = SupervisorAddress {
            addresses: vec!["10.0.0.1:80".parse().unwrap(), "[::1]:80".parse().unwrap()],
            token: "secret".into(),
        };
        assert_eq!(SupervisorAddress::parse(&address.to_text()), Some(address));
        for wrong in ["", "secret", "secret ", "secret 10.0.0.1", "secret host:1"] {
            assert_eq!(SupervisorAddress::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn all_but_the_first_node_are_left_out_when_they_are_gone() {
        let nodes: Vec<Node> =
            ["localhost", "b:2", "c"].iter().map(|node| node.parse().unwrap()).collect();
        let names = |roster: &Roster| -> Vec<String> {
            roster.present().iter().map(ToString::to_string).collect()
        };
        let mut roster = Roster::new(&nodes);
        assert_eq!([0, 2, 3].map(|rank| roster.name_of(rank)), ["localhost", "b", "c"]);
        roster.leave_out(&[2], false).unwrap();
        assert_eq!(names(&roster), ["localhost", "c"]);
        // Ranks are counted over the nodes that are there.
        assert_eq!(roster.name_of(1), "c");
        roster.leave_out(&[0], true).unwrap();
        assert_eq!(names(&roster), ["localhost", "c"]);
        roster.mark_back(1);
        roster.take_all_in();
        assert_eq!(names(&roster), ["localhost", "b:2", "c"]);
        roster.leave_out(&[0], true).unwrap();
        assert!(roster.leave_out(&[0], true).is_err(), "lost three times within a minute");
    }
}
