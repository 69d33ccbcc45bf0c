//! A hub on this computer: the part of its interface that a download uses, from files in memory, with everything that
//! can go wrong on the way. Large files are served by a second server, as the hub does.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256};
use serde_json::{Value, json};

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
pub const NAME: &str = "tiny/model";

/// What it serves, and how badly.
#[derive(Default)]
pub struct HubScript {
    pub files: Vec<(String, Vec<u8>)>,
    /// Files from this size are large ones.
    pub lfs_bytes: usize,
    /// Entries of the list on each page; 0 for all.
    pub page: usize,
    /// Status and `X-Error-Code` of every answer.
    pub refuses: Option<(u16, &'static str)>,
    /// Statuses of the first answers to requests for files.
    pub stumbles: Mutex<Vec<u16>>,
    /// Connections that break off after so many bytes of a file, from the first on.
    pub cuts: Mutex<Vec<usize>>,
    /// A file of which other bytes are sent.
    pub damaged: Option<String>,
    /// Whether ranges are ignored.
    pub ignores_ranges: bool,
    /// Whether a body never ends.
    pub is_endless: bool,
    /// Milliseconds after every 64 KiB.
    pub pause_ms: u64,
    /// The list of files, instead of the right one.
    pub tree: Option<Value>,
    /// What is sent to whoever asks for anything.
    pub body: Option<String>,
    /// Where the list goes on, instead of here.
    pub next: Option<String>,
}

/// A request that came.
#[derive(Clone, Debug)]
pub struct SeenRequest {
    /// Whether to the server of large files.
    pub is_cdn: bool,
    pub has_token: bool,
    pub sent_bytes: usize,
}

/// The servers.
pub struct FakeHub {
    pub address: SocketAddr,
    seen: Arc<Mutex<Vec<SeenRequest>>>,
}

impl HubScript {
    /// All files of a folder.
    pub fn of(folder: &Path) -> Self {
        let mut files = Vec::new();
        collect(folder, "", &mut files);
        Self { files, lfs_bytes: 4096, ..Self::default() }
    }

    /// Of one large file beside settings, as language models are.
    pub fn of_bytes(weights: Vec<u8>) -> Self {
        let files =
            vec![("config.json".into(), b"{}".to_vec()), ("model.safetensors".into(), weights)];
        Self { files, lfs_bytes: 4096, ..Self::default() }
    }

    pub fn serve(self) -> FakeHub {
        let [hub, cdn] = [(), ()].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let (address, cdn_address) = (hub.local_addr().unwrap(), cdn.local_addr().unwrap());
        let (script, seen) = (Arc::new(self), Arc::new(Mutex::new(Vec::new())));
        for (listener, is_cdn) in [(hub, false), (cdn, true)] {
            let (script, seen) = (Arc::clone(&script), Arc::clone(&seen));
            thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let (script, seen) = (Arc::clone(&script), Arc::clone(&seen));
                    let connection = HubConnection { script, seen, is_cdn, address, cdn_address };
                    thread::spawn(move || connection.answer(stream));
                }
            });
        }
        FakeHub { address, seen }
    }

    fn entry(&self, path: &str, bytes: &[u8]) -> Value {
        if bytes.len() < self.lfs_bytes {
            return json!({ "type": "file", "path": path, "size": bytes.len(), "oid": git_sha1(bytes) });
        }
        let lfs = json!({ "oid": sha256(bytes), "size": bytes.len(), "pointerSize": 135 });
        json!({ "type": "file", "path": path, "size": bytes.len(), "oid": git_sha1(b"pointer"), "lfs": lfs })
    }
}

impl FakeHub {
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn seen(&self) -> Vec<SeenRequest> {
        self.seen.lock().unwrap().clone()
    }

    /// Bytes of files that were sent so far.
    pub fn sent(&self) -> usize {
        self.seen().iter().map(|seen| seen.sent_bytes).sum()
    }
}

struct HubConnection {
    script: Arc<HubScript>,
    seen: Arc<Mutex<Vec<SeenRequest>>>,
    is_cdn: bool,
    address: SocketAddr,
    cdn_address: SocketAddr,
}

impl HubConnection {
    /// One request; then the connection is closed.
    fn answer(&self, mut stream: TcpStream) {
        let Some((path, headers)) = request(&mut stream) else { return };
        let index = {
            let mut seen = self.seen.lock().unwrap();
            let has_token = headers.contains_key("authorization");
            seen.push(SeenRequest { is_cdn: self.is_cdn, has_token, sent_bytes: 0 });
            seen.len() - 1
        };
        let script = &self.script;
        if let Some((status, code)) = script.refuses {
            return reply(&mut stream, status, &[("X-Error-Code", code)], b"");
        }
        if let Some(body) = &script.body {
            return reply(&mut stream, 200, &[], body.as_bytes());
        }
        if let Some(rest) = path.strip_prefix(&format!("/api/models/{NAME}/")) {
            return self.api(&mut stream, rest);
        }
        let path = path
            .trim_start_matches(&format!("/{NAME}/resolve/{COMMIT}/"))
            .trim_start_matches("/cdn/");
        let Some((name, bytes)) = script.files.iter().find(|(name, _)| name == path) else {
            return reply(&mut stream, 404, &[("X-Error-Code", "EntryNotFound")], b"");
        };
        if !self.is_cdn && bytes.len() >= script.lfs_bytes {
            let to = format!("http://{}/cdn/{name}", self.cdn_address);
            return reply(&mut stream, 302, &[("Location", &to)], b"");
        }
        let stumble = { script.stumbles.lock().unwrap().pop() };
        if let Some(status) = stumble {
            return reply(&mut stream, status, &[("Retry-After", "1")], b"");
        }
        self.send(&mut stream, name, bytes, headers.get("range").map(String::as_str), index);
    }

    fn api(&self, stream: &mut TcpStream, rest: &str) {
        let script = &self.script;
        if rest == "revision/main" {
            return reply(
                stream,
                200,
                &[],
                json!({ "id": NAME, "sha": COMMIT }).to_string().as_bytes(),
            );
        }
        let Some(query) = rest.strip_prefix(&format!("tree/{COMMIT}?recursive=true")) else {
            return reply(stream, 404, &[("X-Error-Code", "RevisionNotFound")], b"");
        };
        if let Some(tree) = &script.tree {
            return reply(stream, 200, &[], tree.to_string().as_bytes());
        }
        let first: usize = query.strip_prefix("&cursor=").map_or(0, |at| at.parse().unwrap());
        let page = if script.page == 0 { script.files.len() } else { script.page };
        let entries = script
            .files
            .iter()
            .skip(first)
            .take(page)
            .map(|(path, bytes)| script.entry(path, bytes));
        let body = Value::from(entries.collect::<Vec<_>>()).to_string();
        let next = format!(
            "http://{}/api/models/{NAME}/tree/{COMMIT}?recursive=true&cursor={}",
            self.address,
            first + page
        );
        let link = format!("<{}>; rel=\"next\"", script.next.as_ref().unwrap_or(&next));
        let more: &[(&str, &str)] =
            if first + page < script.files.len() { &[("Link", &link)] } else { &[] };
        reply(stream, 200, more, body.as_bytes());
    }

    fn send(
        &self,
        stream: &mut TcpStream,
        name: &str,
        bytes: &[u8],
        range: Option<&str>,
        index: usize,
    ) {
        let script = &self.script;
        let mut bytes = bytes.to_vec();
        if script.damaged.as_deref() == Some(name) {
            bytes[0] ^= 1;
        }
        let range = range.filter(|_| !script.ignores_ranges).and_then(|range| {
            let (first, last) = range.strip_prefix("bytes=")?.split_once('-')?;
            Some((first.parse::<usize>().ok()?, last.parse::<usize>().ok()?.min(bytes.len() - 1)))
        });
        let (first, last) = range.unwrap_or((0, bytes.len().saturating_sub(1)));
        let body = if bytes.is_empty() { &[][..] } else { &bytes[first..=last] };
        let mut head = format!(
            "HTTP/1.1 {}\r\nConnection: close\r\n",
            if range.is_some() { "206 Partial" } else { "200 OK" }
        );
        if range.is_some() {
            _ = write!(head, "Content-Range: bytes {first}-{last}/{}\r\n", bytes.len());
        }
        if !script.is_endless {
            _ = write!(head, "Content-Length: {}\r\n", body.len());
        }
        let cut = { script.cuts.lock().unwrap().pop() };
        let body = &body[..cut.unwrap_or(usize::MAX).min(body.len())];
        _ = stream.write_all((head + "\r\n").as_bytes());
        for chunk in body.chunks(64 << 10) {
            if stream.write_all(chunk).is_err() {
                return;
            }
            self.seen.lock().unwrap()[index].sent_bytes += chunk.len();
            thread::sleep(Duration::from_millis(script.pause_ms));
        }
        while script.is_endless && stream.write_all(&[0; 4096]).is_ok() {}
    }
}

/// Path with query, and headers with names in lower case.
fn request(stream: &mut TcpStream) -> Option<(String, HashMap<String, String>)> {
    let (mut text, mut byte) = (Vec::new(), [0]);
    while !text.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte).ok()?;
        text.push(byte[0]);
    }
    let text = String::from_utf8(text).ok()?;
    let mut lines = text.lines();
    let path = lines.next()?.split(' ').nth(1)?.to_owned();
    let headers = lines.filter_map(|line| line.split_once(": "));
    Some((path, headers.map(|(name, value)| (name.to_lowercase(), value.to_owned())).collect()))
}

fn reply(stream: &mut TcpStream, status: u16, headers: &[(&str, &str)], body: &[u8]) {
    let mut head =
        format!("HTTP/1.1 {status} X\r\nConnection: close\r\nContent-Length: {}\r\n", body.len());
    for (name, value) in headers {
        _ = write!(head, "{name}: {value}\r\n");
    }
    _ = stream.write_all(&[(head + "\r\n").as_bytes(), body].concat());
}

fn collect(folder: &Path, shown: &str, into: &mut Vec<(String, Vec<u8>)>) {
    let mut entries: Vec<_> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    entries.sort_unstable();
    for path in entries {
        let name = format!("{shown}{}", path.file_name().unwrap().to_string_lossy());
        if path.is_dir() {
            collect(&path, &format!("{name}/"), into);
        } else {
            into.push((name, fs::read(&path).unwrap()));
        }
    }
}

pub fn sha256(bytes: &[u8]) -> String {
    hex(Context::new(&SHA256), &[bytes])
}

pub fn git_sha1(bytes: &[u8]) -> String {
    hex(
        Context::new(&SHA1_FOR_LEGACY_USE_ONLY),
        &[format!("blob {}\0", bytes.len()).as_bytes(), bytes],
    )
}

fn hex(mut context: Context, parts: &[&[u8]]) -> String {
    for part in parts {
        context.update(part);
    }
    context.finish().as_ref().iter().fold(String::new(), |mut text, byte| {
        _ = write!(text, "{byte:02x}");
        text
    })
}
