//! The one that hears all ranks.

use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use super::{BEAT, HubWord, Lines, RankWord};

/// Hears the ranks of one world, and tells them what concerns all.
pub struct Hub {
    shared: Arc<HubState>,
    address: SocketAddr,
}

/// What a hub has heard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HubEvent {
    /// A rank has said hello.
    Joined(usize),
    /// It has said that it ends, and how.
    Left(usize, RankWord),
    /// It is gone without a word. All others were told.
    Lost(usize),
}

struct HubState {
    token: String,
    /// By rank; none before it has said hello and after it is gone.
    ranks: Mutex<Vec<Option<TcpStream>>>,
    events: Sender<HubEvent>,
}

impl Hub {
    /// Listens on a port of this address for so many ranks, which know the token.
    pub fn listen(on: IpAddr, size: usize, token: &str) -> io::Result<(Self, Receiver<HubEvent>)> {
        let listener = TcpListener::bind((on, 0))?;
        let address = listener.local_addr()?;
        let (events, received) = mpsc::channel();
        let ranks = Mutex::new((0..size).map(|_| None).collect());
        let shared = Arc::new(HubState { token: token.into(), ranks, events });
        let [accepting, beating] = [(); 2].map(|()| Arc::downgrade(&shared));
        thread::Builder::new().name("hub".into()).spawn(move || {
            for stream in listener.incoming().flatten() {
                let Some(shared) = accepting.upgrade() else { return };
                // Without a thread for it, the rank hears nothing and gives up.
                _ = thread::Builder::new()
                    .name("hub of a rank".into())
                    .spawn(move || drop(shared.hear(stream)));
            }
        })?;
        thread::Builder::new().name("hub beats".into()).spawn(move || {
            while let Some(shared) = beating.upgrade() {
                shared.tell(HubWord::Beat);
                drop(shared);
                thread::sleep(BEAT);
            }
        })?;
        Ok((Self { shared, address }, received))
    }

    /// The port that it listens on.
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// Tells all ranks.
    pub fn tell(&self, word: HubWord) {
        self.shared.tell(word);
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        for stream in self.shared.ranks().iter().flatten() {
            // They may be gone.
            _ = stream.shutdown(std::net::Shutdown::Both);
        }
        // Wakes the thread that accepts, so that it sees the end.
        let shared = std::mem::replace(&mut self.shared, Arc::new(HubState::ended()));
        drop(shared);
        _ = TcpStream::connect(("127.0.0.1", self.address.port()));
    }
}

impl HubState {
    /// Of a hub that is no more.
    fn ended() -> Self {
        Self { token: String::new(), ranks: Mutex::new(Vec::new()), events: mpsc::channel().0 }
    }

    fn ranks(&self) -> std::sync::MutexGuard<'_, Vec<Option<TcpStream>>> {
        self.ranks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, word: HubWord) {
        let line = word.line();
        for stream in self.ranks().iter_mut().flatten() {
            // One that cannot be written to is noticed by its silence.
            _ = stream.write_all(line.as_bytes());
        }
    }

    /// Hears one rank until it ends.
    fn hear(&self, stream: TcpStream) -> io::Result<()> {
        let mut lines = Lines::of(&stream)?;
        let hello = lines.next().and_then(|line| self.rank_of(&line));
        let Some(rank) = hello else { return Ok(()) };
        self.ranks()[rank] = Some(stream);
        self.emit(HubEvent::Joined(rank));
        let mut left = None;
        while let Some(word) = lines.next().as_deref().and_then(RankWord::parse) {
            left = Some(word).filter(|word| *word != RankWord::Beat).or(left);
        }
        self.ranks()[rank] = None;
        // Nobody shall wait for one that has failed either.
        if matches!(left, None | Some(RankWord::Failed)) {
            self.tell(HubWord::Lost(rank));
        }
        self.emit(left.map_or(HubEvent::Lost(rank), |word| HubEvent::Left(rank, word)));
        Ok(())
    }

    /// The rank that says hello, if it is one of ours and not here yet.
    fn rank_of(&self, hello: &str) -> Option<usize> {
        let (token, rank) = hello.strip_prefix("hello ")?.split_once(' ')?;
        let rank: usize = rank.parse().ok()?;
        let is_free = self.ranks().get(rank).is_some_and(Option::is_none);
        (token == self.token && is_free).then_some(rank)
    }

    fn emit(&self, event: HubEvent) {
        // Nobody may listen.
        _ = self.events.send(event);
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::time::{Duration, Instant};

    use super::super::{Heartbeat, SILENCE};
    use super::*;

    const TOKEN: &str = "secret";
    const SOON: Duration = Duration::from_secs(5);

    fn hub(size: usize) -> (Hub, Receiver<HubEvent>) {
        Hub::listen(Ipv4Addr::LOCALHOST.into(), size, TOKEN).unwrap()
    }

    fn rank(hub: &Hub, rank: usize) -> Heartbeat {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, hub.port()));
        Heartbeat::connect(&[address], TOKEN, rank).unwrap()
    }

    fn next(events: &Receiver<HubEvent>) -> HubEvent {
        events.recv_timeout(SOON).unwrap()
    }

    #[test]
    fn a_rank_that_is_gone_without_a_word_is_lost_and_all_are_told() {
        let (hub, events) = hub(3);
        let ranks = [0, 1, 2].map(|number| rank(&hub, number));
        let joined: Vec<_> = (0..3).map(|_| next(&events)).collect();
        assert!(joined.iter().all(|event| matches!(event, HubEvent::Joined(_))), "{joined:?}");
        let [first, second, third] = ranks;
        second.leave(RankWord::Done);
        assert_eq!(next(&events), HubEvent::Left(1, RankWord::Done));
        first.check().unwrap();
        third.abandon();
        assert_eq!(next(&events), HubEvent::Lost(2));
        let begun = Instant::now();
        while first.check().is_ok() {
            assert!(begun.elapsed() < SOON);
            thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(first.check().unwrap_err().to_string(), "rank 2 is gone");
    }

    #[test]
    fn a_rank_that_is_silent_is_lost_in_time() {
        let (hub, events) = hub(1);
        let address = (Ipv4Addr::LOCALHOST, hub.port());
        let mut silent = TcpStream::connect(address).unwrap();
        silent.write_all(format!("hello {TOKEN} 0\n").as_bytes()).unwrap();
        assert_eq!(next(&events), HubEvent::Joined(0));
        let begun = Instant::now();
        assert_eq!(events.recv_timeout(2 * SILENCE).unwrap(), HubEvent::Lost(0));
        assert!(begun.elapsed() < SILENCE + Duration::from_secs(2), "{:?}", begun.elapsed());
    }

    #[test]
    fn strangers_are_not_heard() {
        let (hub, events) = hub(1);
        let address = (Ipv4Addr::LOCALHOST, hub.port());
        for hello in
            ["hello wrong 0\n", "hello secret 1\n", "hello secret -1\n", "GET / HTTP/1.1\r\n"]
        {
            let mut stranger = TcpStream::connect(address).unwrap();
            stranger.write_all(hello.as_bytes()).unwrap();
        }
        assert!(events.recv_timeout(Duration::from_millis(300)).is_err());
        let _rank = rank(&hub, 0);
        assert_eq!(next(&events), HubEvent::Joined(0));
    }

    #[test]
    fn ranks_notice_that_the_hub_is_gone() {
        let (hub, events) = hub(1);
        let rank = rank(&hub, 0);
        assert_eq!(next(&events), HubEvent::Joined(0));
        drop(hub);
        let begun = Instant::now();
        while rank.check().is_ok() {
            assert!(begun.elapsed() < SOON);
            thread::sleep(Duration::from_millis(5));
        }
    }
}
