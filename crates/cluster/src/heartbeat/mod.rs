//! Heartbeats between the ranks of a job, beside MPI: most MPIs hang when a rank dies or a cable is pulled. Every rank
//! has a TCP connection to a [`Hub`], which runs in the supervisor (`hearth train --nodes`) or, where somebody else
//! started `mpirun`, in the first rank. Both ends say something every second. Who says nothing for [`SILENCE`], or
//! closes the connection without a word, is lost, and all others are told.
//!
//! ```text
//! rank → hub    hello TOKEN RANK     beat     done     paused     failed
//! hub → rank    beat     lost RANK     stop     join     quit
//! ```

mod hub;
mod rank;

use std::io::{self, BufRead, BufReader, Read};
use std::net::TcpStream;
use std::time::Duration;

pub use self::hub::{Hub, HubEvent};
pub use self::rank::Heartbeat;

/// How often both ends say something.
const BEAT: Duration = Duration::from_secs(1);

/// Who says nothing for so long is lost. Chosen: within ten seconds; a machine under load answers within five.
pub const SILENCE: Duration = Duration::from_secs(8);

/// Longest line that is read.
const LINE_BYTES: u64 = 256;

/// What a rank tells the hub after it has said hello.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RankWord {
    /// It is there.
    Beat,
    /// Its job is over.
    Done,
    /// It ends in order, and its job can be resumed.
    Paused,
    /// It ends by an error that it has told.
    Failed,
}

/// What the hub tells a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HubWord {
    /// It is there.
    Beat,
    /// A rank is gone.
    Lost(usize),
    /// Somebody asks the run to stop.
    Stop,
    /// Others want to join: the run shall end at its next checkpoint, to be started again with them.
    Join,
    /// The process shall end at once.
    Quit,
}

impl RankWord {
    const ALL: [(Self, &str); 4] = [
        (Self::Beat, "beat"),
        (Self::Done, "done"),
        (Self::Paused, "paused"),
        (Self::Failed, "failed"),
    ];

    fn line(self) -> String {
        let named = Self::ALL.iter().find(|(word, _)| *word == self);
        format!("{}\n", named.map_or("beat", |(_, name)| name))
    }

    fn parse(line: &str) -> Option<Self> {
        Self::ALL.iter().find(|(_, name)| *name == line).map(|(word, _)| *word)
    }
}

impl HubWord {
    fn line(self) -> String {
        match self {
            Self::Beat => "beat\n".into(),
            Self::Lost(rank) => format!("lost {rank}\n"),
            Self::Stop => "stop\n".into(),
            Self::Join => "join\n".into(),
            Self::Quit => "quit\n".into(),
        }
    }

    fn parse(line: &str) -> Option<Self> {
        match line {
            "beat" => Some(Self::Beat),
            "stop" => Some(Self::Stop),
            "join" => Some(Self::Join),
            "quit" => Some(Self::Quit),
            _ => Some(Self::Lost(line.strip_prefix("lost ")?.parse().ok()?)),
        }
    }
}

/// Lines of the other end, until it says nothing for too long.
struct Lines(BufReader<TcpStream>);

impl Lines {
    fn of(stream: &TcpStream) -> io::Result<Self> {
        stream.set_read_timeout(Some(SILENCE))?;
        stream.set_write_timeout(Some(SILENCE))?;
        stream.set_nodelay(true)?;
        Ok(Self(BufReader::new(stream.try_clone()?)))
    }

    /// The next line; none when the other end is gone.
    fn next(&mut self) -> Option<String> {
        let mut line = String::new();
        self.0.by_ref().take(LINE_BYTES).read_line(&mut line).ok().filter(|n| *n > 0)?;
        line.strip_suffix('\n').map(str::to_owned)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_read_as_they_were_written() {
        for (word, _) in RankWord::ALL {
            assert_eq!(RankWord::parse(word.line().trim_end()), Some(word));
        }
        for word in [HubWord::Beat, HubWord::Lost(12), HubWord::Stop, HubWord::Join, HubWord::Quit]
        {
            assert_eq!(HubWord::parse(word.line().trim_end()), Some(word));
        }
        for line in ["", "lost", "lost x", "lost -1", "beats", "Beat"] {
            assert!(HubWord::parse(line).is_none() && RankWord::parse(line).is_none(), "{line}");
        }
    }
}
