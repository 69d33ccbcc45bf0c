//! A rank's connection to the hub.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Signal, getpid, kill_process};

use super::{BEAT, HubWord, Lines, RankWord, SILENCE};
use crate::error::{ClusterError, Result};

/// How long a connection may take.
const CONNECT: Duration = Duration::from_secs(3);

/// What a rank knows of the others. Clones are of the same connection.
#[derive(Clone)]
pub struct Heartbeat(Arc<RankConnection>);

struct RankConnection {
    rank: usize,
    stream: Mutex<TcpStream>,
    heard: Mutex<Heard>,
}

/// What the hub has said so far.
#[derive(Default)]
struct Heard {
    lost: BTreeSet<usize>,
    is_hub_lost: bool,
    is_stop_asked: bool,
    is_join_asked: bool,
    /// Called when the hub asks to stop.
    on_stop: Option<Box<dyn FnMut() + Send>>,
}

impl Heartbeat {
    /// Connects to the hub at the first of its addresses that answers, and says hello.
    pub fn connect(addresses: &[SocketAddr], token: &str, rank: usize) -> io::Result<Self> {
        let connect = |address| TcpStream::connect_timeout(address, CONNECT);
        let mut failed = io::Error::from(io::ErrorKind::AddrNotAvailable);
        let found = addresses
            .iter()
            .find_map(|address| connect(address).map_err(|error| failed = error).ok());
        let Some(mut stream) = found else { return Err(failed) };
        let lines = Lines::of(&stream)?;
        stream.write_all(format!("hello {token} {rank}\n").as_bytes())?;
        let shared = RankConnection {
            rank,
            stream: Mutex::new(stream),
            heard: Mutex::new(Heard::default()),
        };
        let heartbeat = Self(Arc::new(shared));
        let [hearing, beating] = [(); 2].map(|()| heartbeat.clone());
        thread::Builder::new().name("heartbeat".into()).spawn(move || hearing.hear(lines))?;
        thread::Builder::new().name("heartbeat out".into()).spawn(move || {
            while beating.say(RankWord::Beat).is_ok() {
                thread::sleep(BEAT);
            }
        })?;
        Ok(heartbeat)
    }

    /// Fails if a rank is gone, or the hub.
    pub fn check(&self) -> Result<()> {
        let heard = self.heard();
        if heard.lost.is_empty() && !heard.is_hub_lost {
            return Ok(());
        }
        let ranks = heard.lost.iter().copied().collect();
        Err(ClusterError::RankLost { ranks, is_supervisor: heard.lost.is_empty() })
    }

    /// Waits until a loss is known of that a library has reported; none if there is none.
    pub fn wait_for_loss(&self) -> Option<ClusterError> {
        let begun = Instant::now();
        while begun.elapsed() < SILENCE {
            if let Err(error) = self.check() {
                return Some(error);
            }
            thread::sleep(Duration::from_millis(20));
        }
        None
    }

    /// Whether this is the rank that saves what all have in common: the first that is there.
    pub fn is_saver(&self) -> bool {
        let heard = self.heard();
        (0..self.0.rank).all(|rank| heard.lost.contains(&rank))
    }

    /// Whether others want to join at the next checkpoint.
    pub fn is_join_asked(&self) -> bool {
        self.heard().is_join_asked
    }

    /// Calls `stop` once the hub asks for it, which it may have done already.
    pub fn on_stop(&self, mut stop: impl FnMut() + Send + 'static) {
        let mut heard = self.heard();
        if heard.is_stop_asked {
            stop();
        }
        heard.on_stop = Some(Box::new(stop));
    }

    /// Says how this rank ends, and closes the connection.
    pub fn leave(&self, word: RankWord) {
        // The hub may be gone; then nobody has to know.
        _ = self.say(word);
        self.abandon();
    }

    /// Closes the connection without a word, as a rank that is killed does.
    pub(super) fn abandon(&self) {
        _ = self.stream().shutdown(Shutdown::Both);
    }

    fn heard(&self) -> MutexGuard<'_, Heard> {
        self.0.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stream(&self) -> MutexGuard<'_, TcpStream> {
        self.0.stream.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn say(&self, word: RankWord) -> io::Result<()> {
        self.stream().write_all(word.line().as_bytes())
    }

    fn hear(&self, mut lines: Lines) {
        while let Some(word) = lines.next().as_deref().and_then(HubWord::parse) {
            match word {
                HubWord::Beat => {}
                HubWord::Lost(rank) => drop(self.heard().lost.insert(rank)),
                HubWord::Join => self.heard().is_join_asked = true,
                HubWord::Stop => self.stop(),
                // An orderly exit would wait for the library, which waits for a rank that is gone.
                HubWord::Quit => drop(kill_process(getpid(), Signal::KILL)),
            }
        }
        self.heard().is_hub_lost = true;
    }

    fn stop(&self) {
        let mut heard = self.heard();
        heard.is_stop_asked = true;
        if let Some(stop) = &mut heard.on_stop {
            stop();
        }
    }
}
