//! The communication thread. It alone calls MPI: a call that never returns, because another rank is gone, holds this
//! thread and nobody else.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

use crate::error::{ClusterError, Result};
use crate::heartbeat::Heartbeat;
use crate::launch::Launched;
use crate::mpi::{self, Mpi};

/// How often somebody who waits for a call looks whether its ranks are still there.
const LOOK: Duration = Duration::from_millis(50);

type Job = Box<dyn FnOnce(&Mpi) + Send>;

/// The thread that calls MPI, for the others.
pub struct Communication {
    jobs: Sender<Job>,
}

/// A call that is under way. What it exchanges belongs to the communication thread until it returns.
pub struct Pending<T> {
    done: Receiver<Result<T>>,
    /// What it gave, if that was asked for before it was waited for.
    returned: Option<Result<T>>,
    /// Whether all ranks are there.
    heartbeat: Option<Heartbeat>,
}

impl Communication {
    /// Loads the launcher's library and starts it, on a thread of its own. That waits for all ranks, as long as they are
    /// there.
    pub fn start(launched: Launched, heartbeat: Option<Heartbeat>) -> Result<Self> {
        let (jobs, received) = mpsc::channel::<Job>();
        let (started, when_started) = mpsc::channel();
        let serve = move || {
            let mpi = mpi::find(launched).and_then(|mpi| mpi.init().map(|()| mpi));
            let mpi = match mpi {
                Ok(mpi) => mpi,
                Err(error) => return drop(started.send(Err(error))),
            };
            drop(started.send(Ok(())));
            for job in received {
                job(&mpi);
            }
        };
        let spawned = thread::Builder::new().name("communication".into()).spawn(serve);
        spawned.map_err(|error| call_failed(error.to_string()))?;
        Pending { done: when_started, returned: None, heartbeat }.wait()?;
        Ok(Self { jobs })
    }

    /// Hands a call to the thread. Calls are made in the order in which they are handed over.
    pub fn call<T: Send + 'static>(
        &self,
        heartbeat: Option<Heartbeat>,
        call: impl FnOnce(&Mpi) -> Result<T> + Send + 'static,
    ) -> Pending<T> {
        let (result, done) = mpsc::channel();
        // Nobody may wait for the result any more. A thread that has ended drops the job, which shows below.
        _ = self.jobs.send(Box::new(move |mpi| drop(result.send(call(mpi)))));
        Pending { done, returned: None, heartbeat }
    }
}

impl<T> Pending<T> {
    /// Of a call that is over.
    pub fn ready(value: T) -> Self {
        let (_, done) = mpsc::channel();
        Self { done, returned: Some(Ok(value)), heartbeat: None }
    }

    /// What the call gave, if it has returned and not failed.
    pub fn returned(&mut self) -> Option<&T> {
        if self.returned.is_none() {
            self.returned = self.done.try_recv().ok();
        }
        self.returned.as_ref()?.as_ref().ok()
    }

    /// Waits for the call to return, as long as all ranks are there.
    pub fn wait(mut self) -> Result<T> {
        if let Some(returned) = self.returned.take() {
            return returned.map_err(|error| self.cause(error));
        }
        let check = || self.heartbeat.as_ref().map_or(Ok(()), Heartbeat::check);
        loop {
            match self.done.recv_timeout(LOOK) {
                Ok(Err(error)) => return Err(self.cause(error)),
                Ok(done) => return done,
                Err(RecvTimeoutError::Timeout) => check()?,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(call_failed("its thread has ended".into()));
                }
            }
        }
    }

    /// Why a call failed: the library may know of a rank's death before the heartbeat does.
    fn cause(&self, error: ClusterError) -> ClusterError {
        self.heartbeat.as_ref().and_then(Heartbeat::wait_for_loss).unwrap_or(error)
    }
}

fn call_failed(message: String) -> ClusterError {
    ClusterError::Call { call: "MPI", message }
}
