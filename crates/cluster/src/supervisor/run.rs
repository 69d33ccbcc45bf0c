//! One start of the ranks, until they end or one is lost.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::os::unix::process::CommandExt;
use std::process::{Child, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver;
use std::thread;
use std::time::{Duration, Instant};

use super::mpirun::Launch;
use super::nodes::Node;
use super::{Notice, RESTARTED, Roster, SupervisedEnd, SupervisedJob, SupervisorAddress, VARIABLE};
use crate::address;
use crate::error::{ClusterError, Result};
use crate::heartbeat::{Hub, HubEvent, HubWord, RankWord};

/// How often the supervisor looks.
const LOOK: Duration = Duration::from_millis(50);

/// How long a launcher may take to end after its ranks. Measured: Open MPI 5 never ends by itself when a cable is pulled.
const LAUNCHER_END: Duration = Duration::from_secs(2);

/// How long ranks may take to say hello after the first of them. Chosen: far more than a program takes to start on a slow
/// disk; one that died before it could is noticed then.
const HELLO: Duration = Duration::from_secs(60);

/// The ranks of one start.
pub struct SupervisedRun {
    launcher: Child,
    hub: Hub,
    events: Receiver<HubEvent>,
    /// Ranks that have not said hello.
    awaited: BTreeSet<usize>,
    /// When the first did.
    first_hello: Option<Instant>,
    /// Ranks that have said hello and are not gone.
    here: BTreeSet<usize>,
    lost: Vec<usize>,
    /// Whether a rank has failed by itself, or has more to do.
    is_failed: bool,
    is_paused: bool,
    is_stop_told: bool,
    is_join_told: bool,
}

/// How a start ended.
pub enum RunOutcome {
    /// The job is over.
    Ended(SupervisedEnd),
    /// These ranks are gone, and the others have saved.
    Lost(Vec<usize>),
    /// It was interrupted to take in nodes that are back.
    Joining,
}

impl SupervisedRun {
    pub fn start(job: &SupervisedJob<'_>, nodes: &[Node], is_restart: bool) -> Result<Self> {
        let token = address::random_token();
        let is_alone = nodes.iter().all(Node::is_local);
        let any = if is_alone { Ipv4Addr::LOCALHOST } else { Ipv4Addr::UNSPECIFIED };
        let ranks = nodes.iter().map(|node| node.ranks).sum();
        let cannot = |error: std::io::Error| ClusterError::Mpirun {
            problem: error.to_string(),
            hint: "free ports, threads or processes, and try again",
        };
        let (hub, events) = Hub::listen(IpAddr::V4(any), ranks, &token).map_err(cannot)?;
        let addresses = addresses(nodes, is_alone, hub.port());
        let supervisor = SupervisorAddress { addresses, token }.to_text();
        let mut variables = vec![(VARIABLE, supervisor)];
        variables.extend(is_restart.then(|| (RESTARTED, "1".to_owned())));
        variables.extend(job.is_plain.then(|| ("NO_COLOR", "1".to_owned())));
        let launch = Launch { nodes, link: job.link, variables: &variables, program: job.program };
        let mut command = job.mpirun.command(&launch)?;
        command.args(job.arguments).stdin(Stdio::null());
        // Ctrl-C is for the supervisor, which asks the ranks.
        let launcher = command.process_group(0).spawn().map_err(cannot)?;
        Ok(Self {
            launcher,
            hub,
            events,
            awaited: (0..ranks).collect(),
            first_hello: None,
            here: BTreeSet::new(),
            lost: Vec::new(),
            is_failed: false,
            is_paused: false,
            is_stop_told: false,
            is_join_told: false,
        })
    }

    /// Until all ranks have ended, or those that are left have saved.
    pub fn watch(
        &mut self,
        stop: &AtomicBool,
        roster: &mut Roster,
        notice: &mut dyn FnMut(Notice),
    ) -> Result<RunOutcome> {
        loop {
            let is_over = self.launcher.try_wait().ok().flatten();
            let n_lost = self.lost.len();
            self.hear();
            self.give_up_awaited();
            for rank in &self.lost[n_lost..] {
                notice(Notice::Lost { rank: *rank, node: roster.name_of(*rank) });
            }
            if self.is_all_saved() {
                self.end();
                return Ok(RunOutcome::Lost(std::mem::take(&mut self.lost)));
            }
            // A launcher may end at the death of one rank, before the others have saved.
            if let Some(status) = is_over.filter(|_| self.here.is_empty()) {
                return Ok(self.outcome(status));
            }
            if stop.load(Ordering::Relaxed) && !self.is_stop_told {
                self.is_stop_told = true;
                self.hub.tell(HubWord::Stop);
            }
            let back = roster.find_back();
            if !back.is_empty() {
                self.is_join_told = true;
                self.hub.tell(HubWord::Join);
                notice(Notice::Back(back));
            }
            thread::sleep(LOOK);
        }
    }

    fn hear(&mut self) {
        while let Ok(event) = self.events.try_recv() {
            match event {
                HubEvent::Joined(rank) => {
                    self.first_hello.get_or_insert_with(Instant::now);
                    self.awaited.remove(&rank);
                    self.here.insert(rank);
                }
                HubEvent::Left(rank, word) => {
                    self.here.remove(&rank);
                    self.is_failed |= word == RankWord::Failed;
                    self.is_paused |= word == RankWord::Paused;
                }
                HubEvent::Lost(rank) => {
                    self.here.remove(&rank);
                    self.lost.push(rank);
                }
            }
        }
    }

    /// Takes ranks for lost that did not say hello in time: they died before they could.
    fn give_up_awaited(&mut self) {
        if self.first_hello.is_none_or(|first| first.elapsed() < HELLO) {
            return;
        }
        for rank in std::mem::take(&mut self.awaited) {
            self.hub.tell(HubWord::Lost(rank));
            self.lost.push(rank);
        }
    }

    /// Whether a rank is lost, and the first of the others has saved and left.
    fn is_all_saved(&self) -> bool {
        let saver = (0..=self.lost.len()).find(|rank| !self.lost.contains(rank));
        !self.lost.is_empty() && saver.is_none_or(|saver| !self.here.contains(&saver))
    }

    fn outcome(&self, status: ExitStatus) -> RunOutcome {
        if self.is_failed || !status.success() {
            return RunOutcome::Ended(SupervisedEnd::Failed(status));
        }
        if !self.is_paused {
            return RunOutcome::Ended(SupervisedEnd::Done);
        }
        if self.is_join_told && !self.is_stop_told {
            return RunOutcome::Joining;
        }
        RunOutcome::Ended(SupervisedEnd::Paused)
    }

    /// Ends what is left of the ranks, and the launcher.
    fn end(&mut self) {
        self.hub.tell(HubWord::Quit);
        let begun = Instant::now();
        while begun.elapsed() < LAUNCHER_END {
            if !matches!(self.launcher.try_wait(), Ok(None)) {
                return;
            }
            thread::sleep(LOOK);
        }
        // It may have ended by now.
        _ = self.launcher.kill();
        _ = self.launcher.wait();
    }
}

impl Drop for SupervisedRun {
    fn drop(&mut self) {
        if matches!(self.launcher.try_wait(), Ok(None)) {
            self.end();
        }
    }
}

/// Where ranks on these nodes find this machine.
fn addresses(nodes: &[Node], is_alone: bool, port: u16) -> Vec<SocketAddr> {
    let local = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    if is_alone {
        return vec![local];
    }
    let others = nodes.iter().filter(|node| !node.is_local());
    let towards = others.filter_map(|node| {
        let name = node.name.rsplit('@').next().unwrap_or_default();
        let ip = (name, 9).to_socket_addrs().ok()?.find(SocketAddr::is_ipv4)?;
        Some(SocketAddr::from((address::towards(ip)?, port)))
    });
    let mut all: Vec<SocketAddr> = towards.chain(address::of_this_machine(port)).collect();
    all.dedup();
    all
}
