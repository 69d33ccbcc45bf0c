//! `hearth serve`: shows runs in a browser.

use std::fs;
use std::io::{self, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc;
use std::thread;

use crate::commands::CommandOutcome;
use crate::failure::Failure;
use crate::interrupt;
use crate::render::screen::ScreenArgs;
use crate::text::plural;
use crate::web::{ServedFolders, TOKEN_CHARACTERS, WebAccess, WebServer, random_token};

/// The port if none is given, and how many follow that are tried. Chosen: `HEAR` on a phone's keys; none of Prometheus,
/// its exporters, TensorBoard, Gradio or other trainers.
const PORT: u16 = 4327;
const PORTS: u16 = 20;

/// Show runs in a browser: live curves, samples, memory, heat; start, pause and stop them.
///
/// Serves one page, made of the runs' folders alone: runs of other processes, finished and killed ones, and copies from
/// other machines show the same. Also /metrics for Prometheus.
///
/// Answers on this computer only, and only to who has the URL with its token. --listen opens it to others.
/// docs/watching.md has the details.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth serve                                  all runs below this folder
  hearth serve runs cat --port 8080
  hearth serve runs --read-only                 nobody can pause, stop or start a run
  hearth serve runs --listen 0.0.0.0            also from other computers; the URL has a token")]
pub struct ServeArgs {
    /// Runs, or folders that have runs in them [default: this folder]
    #[arg(value_name = "FOLDER")]
    folders: Vec<PathBuf>,

    /// Answer on this address or name, and not on this computer alone
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<String>,

    // Not as a comment, where the default would be clap's.
    #[arg(long, help = "Port [default: 4327, or the next one that is free]")]
    port: Option<u16>,

    /// File with the token, instead of a random one: 16 or more letters, digits, - and _
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,

    /// Folder of job files that can be started from the page [default: recipes]
    #[arg(long, value_name = "FOLDER", default_value = "recipes", hide_default_value = true)]
    recipes: PathBuf,

    /// Only show runs: refuse to pause, stop or start any
    #[arg(long)]
    read_only: bool,
}

pub fn run(arguments: &ServeArgs, out: &mut dyn Write) -> Result<CommandOutcome, Failure> {
    let (stop, stopped) = mpsc::channel();
    interrupt::on_first(move || _ = stop.send(()))?;
    let (n_runs, url) = arguments.start()?;
    writeln!(out, "{} of {}:", plural(n_runs, "run"), shown(&arguments.roots()?))?;
    writeln!(out, "  {url}")?;
    writeln!(out, "Ctrl-C ends the page; runs go on")?;
    out.flush()?;
    // Until Ctrl-C, or for ever where nobody can send one.
    _ = stopped.recv();
    Ok(CommandOutcome::Done)
}

/// Shows a run that this program trains or watches, and those beside it, as long as the program lives, if that is asked
/// for; returns the URL.
pub fn beside(screen: ScreenArgs, run_folder: &Path) -> Result<Option<String>, Failure> {
    if !screen.serve {
        return Ok(None);
    }
    let above = run_folder.parent().filter(|above| !above.as_os_str().is_empty());
    let arguments = ServeArgs {
        folders: above.map(Path::to_owned).into_iter().collect(),
        listen: None,
        port: None,
        token_file: None,
        recipes: "recipes".into(),
        read_only: false,
    };
    arguments.start().map(|(_, url)| Some(url))
}

impl ServeArgs {
    /// Answers from now on, on threads of its own; returns how many runs there are, and the URL.
    fn start(&self) -> Result<(usize, String), Failure> {
        let token = self.token()?;
        let addresses = self.addresses()?;
        let listeners = bind(&addresses, self.port)?;
        let port = listeners[0].local_addr()?.port();
        let access = self.access(&token, port, &addresses);
        let recipes = (!self.read_only).then(|| vec![self.recipes.clone()]);
        let server = WebServer::new(ServedFolders { roots: self.roots()?, recipes }, access)?;
        for listener in listeners {
            let server = Arc::clone(&server);
            thread::Builder::new().name("accept".into()).spawn(move || server.accept(&listener))?;
        }
        let host = self.shown_host(&addresses);
        Ok((server.n_runs(), format!("http://{host}:{port}/?token={token}")))
    }

    fn roots(&self) -> Result<Vec<PathBuf>, Failure> {
        let given = if self.folders.is_empty() { &[PathBuf::from(".")][..] } else { &self.folders };
        let absolute = |folder: &PathBuf| match folder.canonicalize() {
            Ok(path) if path.is_dir() => Ok(path),
            Ok(path) => Err(Failure::Usage {
                problem: format!("it is a file, expected a folder of runs: {}", path.display()),
                hint: "give the folder that the run wrote to, or the one above it".into(),
            }),
            Err(error) => Err(Failure::Read { path: folder.clone(), error }),
        };
        given.iter().map(absolute).collect()
    }

    fn token(&self) -> Result<String, Failure> {
        let Some(path) = &self.token_file else { return Ok(random_token()?) };
        let text = fs::read_to_string(path);
        let text = text.map_err(|error| Failure::Read { path: path.clone(), error })?;
        let token = text.trim();
        let is_plain = token.bytes().all(|it| it.is_ascii_alphanumeric() || b"-_".contains(&it));
        if token.len() < TOKEN_CHARACTERS || token.len() > 256 || !is_plain {
            return Err(Failure::Usage {
                problem: format!(
                    "the token has {} characters, expected {TOKEN_CHARACTERS} to 256 letters, digits, - and _: {}",
                    token.len(),
                    path.display()
                ),
                hint: "`openssl rand -hex 16` prints a good one".into(),
            });
        }
        Ok(token.into())
    }

    /// Where to answer: on this computer by both versions of IP, or where `--listen` says.
    fn addresses(&self) -> Result<Vec<IpAddr>, Failure> {
        let Some(listen) = &self.listen else {
            return Ok(vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()]);
        };
        let plain = listen.trim_start_matches('[').trim_end_matches(']');
        let found =
            (plain, 0).to_socket_addrs().map(|found| found.map(|it| it.ip()).collect::<Vec<_>>());
        match found {
            Ok(found) if !found.is_empty() => Ok(found),
            _ => Err(Failure::Usage {
                problem: format!("--listen {listen} is no address or name of this computer"),
                hint: "give an address such as 192.168.1.5, a name, or 0.0.0.0 for all; the port goes to --port".into(),
            }),
        }
    }

    fn access(&self, token: &str, port: u16, addresses: &[IpAddr]) -> WebAccess {
        let mut hosts: Vec<String> =
            addresses.iter().map(|it| SocketAddr::new(*it, 0).to_string()).collect();
        hosts = hosts.iter().map(|it| it.trim_end_matches(":0").to_owned()).collect();
        hosts.extend(self.listen.clone());
        let any = addresses.iter().any(IpAddr::is_unspecified);
        WebAccess::new(token.into(), port, &hosts, any)
    }

    /// By what name people open it.
    fn shown_host(&self, addresses: &[IpAddr]) -> String {
        match &self.listen {
            None => "127.0.0.1".into(),
            // Whoever is elsewhere knows by which address it is reached.
            Some(_) if addresses.iter().any(IpAddr::is_unspecified) => "127.0.0.1".into(),
            Some(listen) if listen.contains(':') && !listen.starts_with('[') => {
                format!("[{listen}]")
            }
            Some(listen) => listen.clone(),
        }
    }
}

fn shown(roots: &[PathBuf]) -> String {
    roots.iter().map(|root| root.display().to_string()).collect::<Vec<_>>().join(", ")
}

/// Listens at one port of all addresses; at the next one if it is taken and nobody asked for it.
fn bind(addresses: &[IpAddr], port: Option<u16>) -> Result<Vec<TcpListener>, Failure> {
    let candidates = port.map_or(PORT..PORT + PORTS, |port| port..port.saturating_add(1));
    let mut refused = io::Error::from(io::ErrorKind::AddrInUse);
    for candidate in candidates.clone() {
        match bind_all(addresses, candidate) {
            Ok(listeners) => return Ok(listeners),
            Err(error) => refused = error,
        }
    }
    Err(Failure::Usage {
        problem: format!(
            "cannot listen at port {} of {}: {refused}",
            candidates.start, addresses[0]
        ),
        hint: "give another --port, above 1023, and an address of this computer".into(),
    })
}

fn bind_all(addresses: &[IpAddr], port: u16) -> io::Result<Vec<TcpListener>> {
    let mut listeners = vec![TcpListener::bind((addresses[0], port))?];
    let port = listeners[0].local_addr()?.port();
    for address in &addresses[1..] {
        match TcpListener::bind((*address, port)) {
            Ok(listener) => listeners.push(listener),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => return Err(error),
            // A computer may have only one version of IP.
            Err(_) => {}
        }
    }
    Ok(listeners)
}
