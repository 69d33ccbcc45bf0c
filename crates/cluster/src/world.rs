//! The ranks of a job, and what they exchange. Every rank makes the same calls in the same order.

use std::net::{IpAddr, Ipv4Addr};

use crate::address;
use crate::bf16;
use crate::communication::{Communication, Pending};
use crate::error::{ClusterError, Result};
use crate::heartbeat::{Heartbeat, Hub, RankWord};
use crate::launch::{Launched, Launcher};
use crate::mpi::{Mpi, Number};
use crate::supervisor::{self, SupervisorAddress};

/// All ranks of a job, seen from one of them.
pub struct World {
    communication: Communication,
    launched: Launched,
    rank: usize,
    size: usize,
    library: String,
    heartbeat: Option<Heartbeat>,
    /// Where nobody supervises the ranks, the first hears the others.
    hub: Option<Hub>,
}

/// How a rank ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaveReason {
    /// The job is over.
    Done,
    /// The job can be resumed.
    Paused,
}

impl World {
    /// Joins the ranks that a launcher started; none if this process was started alone.
    pub fn join() -> Result<Option<Self>> {
        let Some(launched) = Launched::detect() else { return Ok(None) };
        // Before the library starts, which waits for all ranks: one that dies until then is noticed as well.
        let heartbeat = launched.rank.map(supervisor_heartbeat).transpose()?.flatten();
        let joined = Self::join_with(launched, heartbeat.clone());
        if let (Err(_), Some(heartbeat)) = (&joined, &heartbeat) {
            leave_failed(heartbeat);
        }
        joined.map(Some)
    }

    /// A world of this process alone, by the library of such a launcher: for tests of what ranks do.
    pub fn alone(launcher: Launcher) -> Result<Self> {
        let launched = Launched { launcher, size: 1, rank: Some(0), local_rank: 0, local_size: 1 };
        Self::join_with(launched, None)
    }

    fn join_with(launched: Launched, heartbeat: Option<Heartbeat>) -> Result<Self> {
        let communication = Communication::start(launched, heartbeat.clone())?;
        let ask = |mpi: &Mpi| Ok((mpi.rank()?, mpi.size()?, mpi.version()?));
        let (rank, size, library) = communication.call(heartbeat.clone(), ask).wait()?;
        // An MPI that does not belong to the launcher is a world of its own.
        if size != launched.size {
            let (launcher, expected) = (launched.launcher.name(), launched.size);
            return Err(ClusterError::World { launcher, expected, library, size });
        }
        let mut world = Self { communication, launched, rank, size, library, heartbeat, hub: None };
        if world.is_shared() && world.heartbeat.is_none() {
            world.hub = world.begin_heartbeat()?;
        }
        Ok(world)
    }

    /// Connects to the supervisor, or to a hub of the first rank, which is returned there. Without a way to it the ranks train all the
    /// same, and a rank that dies is their launcher's to notice.
    fn begin_heartbeat(&mut self) -> Result<Option<Hub>> {
        self.heartbeat = supervisor_heartbeat(self.rank)?;
        if self.heartbeat.is_some() {
            return Ok(None);
        }
        let (mut told, mut own) = (Vec::new(), None);
        if self.rank == 0 {
            let token = address::random_token();
            if let Ok((hub, _)) = Hub::listen(IpAddr::V4(Ipv4Addr::UNSPECIFIED), self.size, &token)
            {
                let addresses = address::of_this_machine(hub.port());
                told = SupervisorAddress { addresses, token }.to_text().into_bytes();
                own = Some(hub);
            }
        }
        let told = String::from_utf8_lossy(&self.gather(&told)?.swap_remove(0)).into_owned();
        let connected = SupervisorAddress::parse(&told)
            .and_then(|hub| Heartbeat::connect(&hub.addresses, &hub.token, self.rank).ok());
        let missing = self.max(vec![i64::from(connected.is_none())])?;
        self.heartbeat = connected.filter(|_| missing == [0]);
        Ok(own)
    }

    /// Whether there are others, or were and may come back.
    pub fn is_shared(&self) -> bool {
        self.size > 1 || supervisor::is_supervised()
    }

    /// This one's number, from zero.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many there are.
    pub fn size(&self) -> usize {
        self.size
    }

    /// What the launcher said of this process.
    pub fn launched(&self) -> Launched {
        self.launched
    }

    /// The library between them.
    pub fn library(&self) -> &str {
        &self.library
    }

    /// What is known of the other ranks, if they are connected.
    pub fn heartbeat(&self) -> Option<&Heartbeat> {
        self.heartbeat.as_ref()
    }

    /// Sums over all ranks.
    pub fn sum<T: Number>(&self, values: Vec<T>) -> Result<Vec<T>> {
        self.start_sum(values).wait()
    }

    /// The same, while other work is done.
    pub fn start_sum<T: Number>(&self, mut values: Vec<T>) -> Pending<Vec<T>> {
        self.call(move |mpi| mpi.sum(&mut values).map(|()| values))
    }

    /// The same for values that travel in bf16.
    pub fn start_sum_bf16(&self, values: Vec<f32>) -> Pending<Vec<f32>> {
        self.call(move |mpi| {
            let mut rounded: Vec<u16> = values.into_iter().map(bf16::from_f32).collect();
            mpi.sum_bf16(&mut rounded)?;
            Ok(rounded.into_iter().map(bf16::to_f32).collect())
        })
    }

    /// The same for values whose sums are rounded only at the end.
    pub fn start_sum_f64(&self, mut values: Vec<f64>) -> Pending<Vec<f32>> {
        self.call(move |mpi| {
            mpi.sum(&mut values)?;
            Ok(values.into_iter().map(|sum| sum as f32).collect())
        })
    }

    /// The largest over all ranks.
    pub fn max<T: Number>(&self, mut values: Vec<T>) -> Result<Vec<T>> {
        self.call(move |mpi| mpi.max(&mut values).map(|()| values)).wait()
    }

    /// What one rank has, to all; the others give as many bytes.
    pub fn broadcast(&self, bytes: Vec<u8>, from: usize) -> Result<Vec<u8>> {
        self.start_broadcast(bytes, from).wait()
    }

    /// The same, while other work is done.
    pub fn start_broadcast(&self, mut bytes: Vec<u8>, from: usize) -> Pending<Vec<u8>> {
        self.call(move |mpi| mpi.broadcast(&mut bytes, from).map(|()| bytes))
    }

    /// What every rank says, by rank.
    pub fn gather(&self, said: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mut lengths = vec![0_i64; self.size];
        lengths[self.rank] = i64::try_from(said.len()).unwrap_or(i64::MAX);
        let lengths = self.sum(lengths)?;
        let mut all = Vec::new();
        for (rank, length) in lengths.into_iter().enumerate() {
            let bytes = if rank == self.rank { said.to_vec() } else { vec![0; length as usize] };
            all.push(self.broadcast(bytes, rank)?);
        }
        Ok(all)
    }

    /// Waits for all.
    pub fn barrier(&self) -> Result<()> {
        self.call(Mpi::barrier).wait()
    }

    /// Leaves in order, with all others. A rank that fails does not: the others are told when it is dropped.
    pub fn leave(mut self, reason: LeaveReason) -> Result<()> {
        // Others may have left already, which is no loss any more.
        self.communication.call(None, Mpi::finalize).wait()?;
        if let Some(heartbeat) = self.heartbeat.take() {
            heartbeat.leave(match reason {
                LeaveReason::Done => RankWord::Done,
                LeaveReason::Paused => RankWord::Paused,
            });
        }
        Ok(())
    }

    fn call<T: Send + 'static>(
        &self,
        call: impl FnOnce(&Mpi) -> Result<T> + Send + 'static,
    ) -> Pending<T> {
        self.communication.call(self.heartbeat.clone(), call)
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // The others hear of this one's end before they hear nothing any more.
        let _hub = self.hub.take();
        if let Some(heartbeat) = &self.heartbeat {
            leave_failed(heartbeat);
        }
    }
}

/// Connects to the supervisor, if there is one.
fn supervisor_heartbeat(rank: usize) -> Result<Option<Heartbeat>> {
    let Some(SupervisorAddress { addresses, token }) = SupervisorAddress::from_environment() else {
        return Ok(None);
    };
    let connected = Heartbeat::connect(&addresses, &token, rank);
    let heartbeat = connected.map_err(|source| ClusterError::NoSupervisor {
        address: addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
        source,
    })?;
    Ok(Some(heartbeat))
}

/// Says that this rank ends and why: one that ends because another is gone can go on without it.
fn leave_failed(heartbeat: &Heartbeat) {
    let is_lost = heartbeat.check().is_err();
    heartbeat.leave(if is_lost { RankWord::Paused } else { RankWord::Failed });
}
