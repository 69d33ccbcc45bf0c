//! The server as others meet it, over real sockets: what it shows, and every way in that was thought of.

use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use trainer::event::journal;

use super::fold::tests::{BEGIN, step};
use super::*;

const TOKEN: &str = "0123456789abcdef";

/// A server of a folder with one run in it, which runs as long as the test does.
struct TestServer {
    _place: tempfile::TempDir,
    run: PathBuf,
    id: String,
    port: u16,
    server: Arc<WebServer>,
}

fn server() -> TestServer {
    let place = tempfile::tempdir().unwrap();
    let run = place.path().canonicalize().unwrap().join("cat");
    fs::create_dir_all(run.join("samples")).unwrap();
    fs::write(run.join("samples/a.png"), "not quite a PNG").unwrap();
    fs::write(place.path().join("secret.png"), "secret").unwrap();
    symlink(place.path().join("secret.png"), run.join("samples/link.png")).unwrap();
    symlink(place.path(), run.join("out")).unwrap();
    let sample = |path: &str| {
        format!(
            r#"{{"event":"image_sample","step":1,"path":"{path}","prompt":"<img src=x>","seed":1}}"#
        )
    };
    let paths = [
        "samples/a.png",
        "../secret.png",
        "samples/link.png",
        "out/secret.png",
        "/etc/hostname",
        "config.toml",
    ];
    let lines = [BEGIN.into(), step(1, "0.5")].into_iter().chain(paths.map(sample));
    let text: String = lines.map(|line| line.replace('\n', "") + "\n").collect();
    fs::write(run.join(journal::FILE_NAME), text).unwrap();
    fs::write(run.join("config.toml"), "[train]\nsteps = 9\n").unwrap();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let access = WebAccess::new(TOKEN.into(), port, &[], false);
    let root = place.path().canonicalize().unwrap();
    let folders = ServedFolders { roots: vec![root], recipes: Some(vec![]) };
    let server = WebServer::new(folders, access).unwrap();
    let accepting = Arc::clone(&server);
    thread::spawn(move || accepting.accept(&listener));
    let id = server.routes.index.all()[0].id.clone();
    TestServer { _place: place, run, id, port, server }
}

impl TestServer {
    /// What is answered to these bytes, as text.
    fn say(&self, bytes: &str) -> String {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(15))).unwrap();
        // A refusal may come before all is sent.
        _ = stream.write_all(bytes.as_bytes());
        let mut answer = Vec::new();
        _ = stream.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    }

    fn get_with(&self, path: &str, headers: &str) -> String {
        self.say(&format!("GET {path} HTTP/1.1\r\nHost: localhost:{}\r\n{headers}\r\n", self.port))
    }

    fn get(&self, path: &str) -> String {
        self.get_with(path, &format!("Cookie: hearth_{}={TOKEN}\r\n", self.port))
    }

    fn post(&self, path: &str, headers: &str, body: &str) -> String {
        let length = body.len();
        self.say(&format!(
            "POST {path} HTTP/1.1\r\nHost: localhost:{}\r\nContent-Length: {length}\r\n{headers}\r\n{body}",
            self.port
        ))
    }

    fn requests(&self) -> String {
        format!("/api/runs/{}/requests", self.id)
    }
}

fn status(answer: &str) -> u16 {
    answer.split(' ').nth(1).unwrap_or_else(|| panic!("no answer: {answer}")).parse().unwrap()
}

#[test]
fn the_page_its_parts_and_a_run_are_shown_with_strict_headers() {
    let it = server();
    let cat = format!("/api/runs/{}", it.id);
    for path in
        ["/", "/app.js", "/run.js", "/chart.js", "/style.css", "/api/runs", "/api/jobs", &cat]
    {
        let answer = it.get(path);
        assert_eq!(status(&answer), 200, "{path}\n{answer}");
        for header in [
            "default-src 'none'",
            "frame-ancestors 'none'",
            "nosniff",
            "Referrer-Policy: no-referrer",
        ] {
            assert!(answer.contains(header), "{path}: {header}");
        }
        assert!(!answer.contains("Access-Control"), "no other page may read it");
    }
    let answer = it.get(&cat);
    assert!(
        answer.contains(r#""prompt":"<img src=x>""#) && answer.contains(r#""line":8"#),
        "{answer}"
    );
    assert_eq!(status(&it.get("/api/runs/0123")), 404);
    let page = include_str!("page/index.html");
    let [app, run, chart] =
        [include_str!("page/app.js"), include_str!("page/run.js"), include_str!("page/chart.js")];
    for script in [app, run, chart] {
        for way in [
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
        ] {
            assert!(!script.contains(way), "{way}: what a run says would be markup");
        }
    }
    assert!(!page.contains("https://") && !page.contains("<style") && !page.contains("onclick"));
    let size =
        [page, include_str!("page/style.css"), app, run, chart].map(str::len).iter().sum::<usize>();
    assert!(size <= 75_000, "the page has {size} bytes");
}

#[test]
fn a_token_becomes_a_cookie_and_nothing_is_shown_without() {
    let it = server();
    for headers in
        ["", "Cookie: hearth_1=0123456789abcdef\r\n", "Authorization: Bearer 0123456789abcdeX\r\n"]
    {
        for path in ["/", "/api/runs", "/app.js", &format!("/api/runs/{}/events", it.id)] {
            assert_eq!(status(&it.get_with(path, headers)), 401, "{path} {headers}");
        }
    }
    assert_eq!(status(&it.get_with("/?token=0123456789abcdeX", "")), 401);
    let login = it.get_with(&format!("/?token={TOKEN}"), "");
    assert_eq!(status(&login), 303);
    assert!(
        login.contains("Location: /\r\n") && login.contains("HttpOnly; SameSite=Strict"),
        "{login}"
    );
    assert_eq!(
        status(&it.get_with("/api/runs", &format!("Authorization: Bearer {TOKEN}\r\n"))),
        200
    );
    // For monitoring on this computer.
    assert_eq!(status(&it.get_with("/healthz", "")), 200);
    let accept = "Accept: application/openmetrics-text;version=1.0.0\r\n";
    let is_killed = "hearth_run_state{run=\"cat\",state=\"killed\"} 1";
    // Runs are read by a thread of its own.
    let (begun, mut metrics) = (Instant::now(), String::new());
    while !metrics.contains(is_killed) {
        assert!(begun.elapsed() < Duration::from_secs(10), "{metrics}");
        metrics = it.get_with("/metrics", accept);
    }
    assert!(metrics.contains("# EOF"), "{metrics}");
    assert_eq!(status(&it.post("/metrics", "", "")), 401);
}

#[test]
fn a_name_that_was_made_to_lead_here_is_refused() {
    let it = server();
    let cookie = format!("Cookie: hearth_{}={TOKEN}\r\n", it.port);
    for host in
        ["Host: evil.example\r\n", "Host: localhost.evil.example\r\n", "", "Host: 10.0.0.7\r\n"]
    {
        for path in ["/", "/api/runs", "/metrics", "/healthz", &format!("/?token={TOKEN}")] {
            let answer = it.say(&format!("GET {path} HTTP/1.1\r\n{host}{cookie}\r\n"));
            assert_eq!(status(&answer), 421, "{host} {path}");
        }
    }
}

#[test]
fn only_our_own_page_changes_anything() {
    let it = server();
    let _lock = trainer::event::lock::RunLock::take(&it.run).unwrap().unwrap();
    let cookie = format!("Cookie: hearth_{}={TOKEN}\r\n", it.port);
    let own =
        format!("{cookie}Origin: http://localhost:{}\r\nSec-Fetch-Site: same-origin\r\n", it.port);
    let save = r#"{"request":"save"}"#;
    let asked = || fs::read_dir(it.run.join("requests")).map_or(0, Iterator::count);
    for headers in [
        String::new(),
        // A form of another page: the browser sends the cookie, and says where it comes from.
        format!("{cookie}Origin: http://evil.example\r\n"),
        format!("{cookie}Origin: null\r\n"),
        format!("{cookie}Sec-Fetch-Site: cross-site\r\n"),
        format!("{cookie}Sec-Fetch-Site: same-site\r\nOrigin: http://localhost:{}\r\n", it.port),
        format!("{cookie}Origin: http://localhost:1\r\n"),
        // Nobody who says nothing.
        cookie.clone(),
        format!("Authorization: Bearer {TOKEN}\r\nOrigin: http://evil.example\r\n"),
    ] {
        let answer = it.post(&it.requests(), &headers, save);
        assert!(matches!(status(&answer), 401 | 403), "{headers}\n{answer}");
    }
    assert_eq!(asked(), 0);
    assert_eq!(status(&it.post(&it.requests(), &own, save)), 200);
    assert_eq!(
        status(&it.post(&it.requests(), &format!("Authorization: Bearer {TOKEN}\r\n"), save)),
        200
    );
    assert_eq!(asked(), 2);
    for wrong in ["", "{", r#"{"request":"dance"}"#] {
        assert_eq!(status(&it.post(&it.requests(), &own, wrong)), 400, "{wrong}");
    }
    assert_eq!(status(&it.post("/api/start", &own, r#"{"ticket":"guess"}"#)), 409);
    assert_eq!(status(&it.get_with(&it.requests(), &own)), 404, "to look changes nothing");
    assert_eq!(asked(), 2);
}

#[test]
fn a_run_that_nobody_works_on_is_not_asked() {
    let it = server();
    let answer = it.post(
        &it.requests(),
        &format!("Authorization: Bearer {TOKEN}\r\n"),
        r#"{"request":"stop"}"#,
    );
    assert_eq!(status(&answer), 409);
    assert!(answer.contains("hint"), "{answer}");
}

#[test]
fn a_sample_is_served_by_its_line_and_nothing_else_is() {
    let it = server();
    let file = |line: &str| it.get(&format!("/api/runs/{}/files/{line}", it.id));
    let sample = file("3");
    assert!(
        status(&sample) == 200
            && sample.contains("image/png")
            && sample.ends_with("not quite a PNG")
    );
    // The run's own history names files elsewhere: by a path, through links, of another kind.
    for line in ["4", "5", "6", "7", "8", "1", "99", "-1", "3/clip", "3/../4"] {
        let answer = file(line);
        assert!(status(&answer) == 404 && !answer.contains("secret"), "{line}: {answer}");
    }
    for path in [
        "/../../etc/passwd",
        "/..%2f..%2fetc/passwd",
        "/api/runs/../../x",
        "//etc/passwd",
        "/page/app.js",
        "/%2e%2e/x",
    ] {
        assert_eq!(status(&it.get(path)), 404, "{path}");
    }
    assert!(matches!(
        status(&it.get(&format!("/api/runs/{}/files/../../../secret.png", it.id))),
        404
    ));
}

#[test]
fn requests_that_are_huge_or_broken_are_refused_and_nobody_waits() {
    let it = server();
    let long = "x".repeat(40_000);
    for (bytes, expected) in [
        (format!("GET /{long} HTTP/1.1\r\nHost: localhost\r\n\r\n"), 431),
        (format!("GET / HTTP/1.1\r\nHost: localhost\r\nX: {long}\r\n\r\n"), 431),
        (
            "POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999\r\n\r\n"
                .into(),
            400,
        ),
        ("POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 70000\r\n\r\n".into(), 413),
        (
            "POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
                .into(),
            501,
        ),
        ("DELETE / HTTP/1.1\r\nHost: localhost\r\n\r\n".into(), 405),
        ("GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n".into(), 400),
        ("\u{0}\u{1}\r\n\r\n".into(), 400),
    ] {
        assert_eq!(status(&it.say(&bytes)), expected, "{}", &bytes[..bytes.len().min(60)]);
    }
}

#[test]
fn who_sends_a_request_slowly_is_given_up_and_keeps_nobody_out() {
    let it = server();
    let begun = Instant::now();
    let mut slow = TcpStream::connect((Ipv4Addr::LOCALHOST, it.port)).unwrap();
    slow.write_all(b"GET / HT").unwrap();
    let mut dripping = slow.try_clone().unwrap();
    thread::spawn(move || {
        // A byte a second is never quiet for long.
        while dripping.write_all(b"x").is_ok() {
            thread::sleep(Duration::from_secs(1));
        }
    });
    assert_eq!(status(&it.get("/healthz")), 200);
    let mut answer = String::new();
    slow.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    _ = slow.read_to_string(&mut answer);
    assert_eq!(status(&answer), 408);
    assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
}

#[test]
fn one_address_cannot_take_all_connections() {
    let it = server();
    let connect = || TcpStream::connect((Ipv4Addr::LOCALHOST, it.port)).unwrap();
    let held: Vec<TcpStream> = (0..CONNECTIONS_OF_ONE).map(|_| connect()).collect();
    let end = Instant::now() + Duration::from_secs(8);
    while it.server.open.lock().unwrap().values().sum::<usize>() < CONNECTIONS_OF_ONE {
        assert!(Instant::now() < end, "connections are counted");
        thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(status(&it.get("/healthz")), 503);
    drop(held);
    while it.server.open.lock().unwrap().values().sum::<usize>() > 0 {
        assert!(Instant::now() < end, "connections that are gone are not counted");
        thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(status(&it.get("/healthz")), 200);
}

/// What a stream says until it has `wanted`.
fn streamed(it: &TestServer, path: &str, headers: &str, wanted: &str) -> String {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, it.port)).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let cookie = format!("Cookie: hearth_{}={TOKEN}\r\n", it.port);
    write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\n{cookie}{headers}\r\n").unwrap();
    let (mut text, mut piece) = (String::new(), [0; 4096]);
    while !text.contains(wanted) {
        let n = stream.read(&mut piece).unwrap_or_else(|error| panic!("{error}: {text}"));
        assert!(n > 0, "it ended: {text}");
        text.push_str(&String::from_utf8_lossy(&piece[..n]));
    }
    text
}

#[test]
fn a_stream_goes_on_after_the_last_line_that_a_browser_has() {
    let it = server();
    let path = format!("/api/runs/{}/events?after=8&epoch=0", it.id);
    let text = streamed(&it, &path, "Last-Event-ID: 1\r\n", "event: summary");
    assert!(
        text.contains("text/event-stream") && text.contains("id: 2\n") && !text.contains("id: 1\n"),
        "{text}"
    );
    let text = streamed(&it, &path, "", "event: summary");
    assert!(!text.contains("id: "), "{text}");
    append(&it.run, &step(2, "0.25"));
    let text = streamed(&it, &path, "", "id: 9\n");
    assert!(text.contains(r#""loss":0.25"#), "{text}");
}

fn append(run: &Path, line: &str) {
    let mut file = fs::OpenOptions::new().append(true).open(run.join(journal::FILE_NAME)).unwrap();
    file.write_all(format!("{}\n", line.replace('\n', "")).as_bytes()).unwrap();
}
