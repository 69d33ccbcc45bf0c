//! Server-sent events: the lines of a run as they are written, and its summary when that changes. A line's number is
//! its id, so that a browser that was cut off goes on after the last line it has.

use std::fmt::Write as _;
use std::io::{self, Write};
use std::net::TcpStream;
use std::time::Duration;

use super::follow::{FollowedRun, StreamPosition};
use super::http::{HttpStatus, head};

/// Quiet for so long, a comment is sent: it shows whether anybody is there.
const QUIET: Duration = Duration::from_secs(15);

/// Sends a run until the other side is gone. Whoever trains on the same machine goes first.
pub fn send(run: &FollowedRun, after: u64, epoch: u64, stream: &mut TcpStream) -> io::Result<()> {
    machine::process::give_way();
    let fresh = ["Cache-Control".into(), "no-store".into()];
    stream.write_all(head(HttpStatus::Ok, "text/event-stream", &[fresh]).as_bytes())?;
    stream.write_all(b"retry: 2000\n\n")?;
    // A run that was let go is read again first.
    run.look(|_, _| ());
    let mut at = StreamPosition { epoch, line: after, version: 0 };
    loop {
        let batch = run.wait(at, QUIET);
        let mut text = String::new();
        if batch.is_reload {
            text.push_str("event: reload\ndata: {}\n\n");
        }
        for (line, record) in &batch.lines {
            _ = write!(text, "id: {line}\ndata: {record}\n\n");
        }
        if let Some(summary) = &batch.summary {
            _ = write!(text, "event: summary\ndata: {summary}\n\n");
        }
        if text.is_empty() {
            text.push_str(": quiet\n\n");
        }
        stream.write_all(text.as_bytes())?;
        if batch.is_reload {
            // The page asks for the run anew, and where to go on.
            return Ok(());
        }
        at = batch.position;
    }
}
