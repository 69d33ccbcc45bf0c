//! `hearth serve`: runs in a browser, and metrics for Prometheus. All of it comes from the folders of runs, and a run
//! does not know that it is looked at.
//!
//! ```text
//! RUN/events.jsonl, .lock ──▶ index.rs ──▶ follow.rs ──▶ fold.rs ──▶ view.rs, series.rs, log.rs ──▶ JSON
//!                                             └──▶ stream.rs: server-sent events      metrics.rs: /metrics
//! socket ──▶ http.rs ──▶ access.rs ──▶ routes.rs ──▶ page/, the above, launch.rs (a new run), RUN/requests/
//! ```
//!
//! A thread for each connection: there are few, and a stream waits most of the time.

mod access;
mod fold;
mod follow;
mod http;
mod index;
mod launch;
mod log;
mod metrics;
mod routes;
mod series;
mod stream;
#[cfg(test)]
mod tests;
mod view;

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

pub use self::access::{TOKEN_CHARACTERS, WebAccess, random_token};
use self::http::{HttpRequest, HttpResponse, HttpStatus, RequestProblem, WRITE_TIME};
use self::index::RunIndex;
use self::launch::RunLauncher;
use self::routes::{WebAnswer, WebRoutes};

/// Connections in all, and of one address. Chosen: a browser has six; a class that watches one run fits.
const CONNECTIONS: usize = 256;
const CONNECTIONS_OF_ONE: usize = 128;
/// Memory of a connection's thread. Chosen: twice what the deepest answer takes without optimisation.
const STACK_BYTES: usize = 1 << 20;

/// What is served to whom.
pub struct WebServer {
    routes: WebRoutes,
    access: WebAccess,
    open: Mutex<BTreeMap<IpAddr, usize>>,
}

/// What a server serves.
pub struct ServedFolders {
    /// Runs, or folders of runs.
    pub roots: Vec<PathBuf>,
    /// Folders of job files that can be started; none if nothing may be started or asked.
    pub recipes: Option<Vec<PathBuf>>,
}

impl WebServer {
    /// Finds the runs and begins to follow them.
    pub fn new(folders: ServedFolders, access: WebAccess) -> io::Result<Arc<Self>> {
        let index = RunIndex::new(folders.roots);
        let home = index.home().map(Into::into);
        let launcher = folders.recipes.map(|recipes| RunLauncher::new(&recipes, home));
        let followed = Arc::clone(&index);
        thread::Builder::new().name("follow".into()).spawn(move || followed.follow())?;
        let routes = WebRoutes { index, launcher };
        Ok(Arc::new(Self { routes, access, open: Mutex::default() }))
    }

    /// Runs that were found.
    pub fn n_runs(&self) -> usize {
        self.routes.index.all().len()
    }

    /// Answers whoever connects, for ever.
    pub fn accept(self: Arc<Self>, listener: &TcpListener) {
        loop {
            let Ok((stream, peer)) = listener.accept() else {
                // Out of files, most likely: those who are there leave in time.
                thread::sleep(Duration::from_millis(50));
                continue;
            };
            let (server, builder) =
                (Arc::clone(&self), thread::Builder::new().stack_size(STACK_BYTES));
            // Without a thread the connection is closed.
            _ = builder.spawn(move || server.serve(stream, peer));
        }
    }

    fn serve(&self, mut stream: TcpStream, peer: SocketAddr) {
        let peer = peer.ip();
        let Some(_open) = OpenConnection::begin(&self.open, peer) else {
            let hint = "close some of its tabs";
            let busy =
                HttpResponse::refusal(HttpStatus::Busy, "too many connections are open", hint);
            return finish(busy, stream);
        };
        // Answers are written in one piece, and nobody waits for a second.
        _ = stream.set_nodelay(true);
        _ = stream.set_write_timeout(Some(WRITE_TIME));
        match HttpRequest::read(&mut stream) {
            Ok(request) => match self.answer(&request, peer) {
                WebAnswer::Whole(response) => finish(response, stream),
                // It ends when nobody is there any more.
                WebAnswer::Stream { run, after, epoch } => {
                    _ = stream::send(&run, after, epoch, &mut stream);
                }
            },
            Err(RequestProblem::Refused(status, problem)) => {
                finish(
                    HttpResponse::refusal(status, problem, "send a plain HTTP/1.1 request"),
                    stream,
                );
            }
            Err(RequestProblem::Gone) => {}
        }
    }

    fn answer(&self, request: &HttpRequest, peer: IpAddr) -> WebAnswer {
        if let Some(login) = self.access.login(request) {
            return WebAnswer::Whole(login);
        }
        match self.access.refuse(request, peer) {
            Some(refusal) => WebAnswer::Whole(refusal),
            None => self.routes.answer(request),
        }
    }
}

/// Writes an answer. What the other side still sends is not waited for, but taken, so that it gets the answer.
fn finish(response: HttpResponse, mut stream: TcpStream) {
    if response.write(&mut stream).is_ok() && stream.shutdown(Shutdown::Write).is_ok() {
        _ = stream.set_read_timeout(Some(Duration::from_millis(500)));
        let mut piece = [0; 4096];
        // Bounded: a sender that never ends is cut off.
        for _ in 0..64 {
            match io::Read::read(&mut stream, &mut piece) {
                Ok(n) if n > 0 => {}
                _ => break,
            }
        }
    }
}

/// A connection that counts until it is dropped.
struct OpenConnection<'a> {
    open: &'a Mutex<BTreeMap<IpAddr, usize>>,
    peer: IpAddr,
}

impl<'a> OpenConnection<'a> {
    fn begin(open: &'a Mutex<BTreeMap<IpAddr, usize>>, peer: IpAddr) -> Option<Self> {
        let mut counts = open.lock().unwrap_or_else(PoisonError::into_inner);
        let is_full = counts.values().sum::<usize>() >= CONNECTIONS;
        let own = counts.entry(peer).or_default();
        if is_full || *own >= CONNECTIONS_OF_ONE {
            return None;
        }
        *own += 1;
        Some(Self { open, peer })
    }
}

impl Drop for OpenConnection<'_> {
    fn drop(&mut self) {
        let mut counts = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(own) = counts.get_mut(&self.peer) {
            *own -= 1;
            if *own == 0 {
                counts.remove(&self.peer);
            }
        }
    }
}
