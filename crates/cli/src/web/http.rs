//! HTTP/1.1, as much of it as a page for a few people needs: one request per connection, whole answers or a stream.
//! Every size and time is bounded before anything is trusted: there is no request that makes the server wait or
//! allocate without end.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// Bytes of a request up to its body, and their number of headers. Chosen: what browsers send is a twentieth.
const HEAD_BYTES: usize = 16 << 10;
const HEADERS: usize = 64;
/// Bytes of a body. Chosen: a request to a run has a prompt or two.
const BODY_BYTES: usize = 64 << 10;
/// A request that is not whole by then is given up. Chosen: a phone on a bad network takes a second.
pub const REQUEST_TIME: Duration = Duration::from_secs(10);
/// Who takes nothing for so long is gone.
pub const WRITE_TIME: Duration = Duration::from_secs(10);

/// What the page may do: load from here and nowhere else. Images may also be held by the page itself.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; media-src 'self'; \
                      connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Headers of every answer.
const ALWAYS: [[&str; 2]; 7] = [
    ["Content-Security-Policy", POLICY],
    ["X-Content-Type-Options", "nosniff"],
    ["X-Frame-Options", "DENY"],
    ["Referrer-Policy", "no-referrer"],
    ["Cross-Origin-Opener-Policy", "same-origin"],
    ["Cross-Origin-Resource-Policy", "same-origin"],
    ["Connection", "close"],
];

/// A request that was read whole.
#[derive(Debug, PartialEq, Eq)]
pub struct HttpRequest {
    pub is_post: bool,
    /// As sent, without what follows a question mark. Nothing in it is decoded: no path of ours has odd characters.
    pub path: String,
    query: String,
    headers: Vec<[String; 2]>,
    pub body: Vec<u8>,
}

/// Why a request was not read.
#[derive(Debug, PartialEq, Eq)]
pub enum RequestProblem {
    /// Nobody is there any more.
    Gone,
    /// An answer says what is wrong with it.
    Refused(HttpStatus, &'static str),
}

/// Statuses that are answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HttpStatus {
    Ok,
    SeeOther,
    BadRequest,
    Unauthorized,
    Forbidden,
    NotFound,
    MethodNotAllowed,
    TimedOut,
    Conflict,
    TooLarge,
    Misdirected,
    HeadTooLarge,
    Failed,
    NotImplemented,
    Busy,
}

impl HttpStatus {
    fn line(self) -> &'static str {
        match self {
            Self::Ok => "200 OK",
            Self::SeeOther => "303 See Other",
            Self::BadRequest => "400 Bad Request",
            Self::Unauthorized => "401 Unauthorized",
            Self::Forbidden => "403 Forbidden",
            Self::NotFound => "404 Not Found",
            Self::MethodNotAllowed => "405 Method Not Allowed",
            Self::TimedOut => "408 Request Timeout",
            Self::Conflict => "409 Conflict",
            Self::TooLarge => "413 Content Too Large",
            Self::Misdirected => "421 Misdirected Request",
            Self::HeadTooLarge => "431 Request Header Fields Too Large",
            Self::Failed => "500 Internal Server Error",
            Self::NotImplemented => "501 Not Implemented",
            Self::Busy => "503 Service Unavailable",
        }
    }
}

impl HttpRequest {
    /// Reads one, in at most [`REQUEST_TIME`].
    pub fn read(stream: &mut TcpStream) -> Result<Self, RequestProblem> {
        let end = Instant::now() + REQUEST_TIME;
        let mut bytes = Vec::new();
        let head = loop {
            if let Some(at) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
                break at + 4;
            }
            if bytes.len() >= HEAD_BYTES {
                let problem = "the headers are longer than 16 KiB";
                return Err(RequestProblem::Refused(HttpStatus::HeadTooLarge, problem));
            }
            read_more(stream, &mut bytes, end)?;
        };
        let body = bytes.split_off(head);
        let mut request = Self::parse(&bytes)?;
        request.read_body(stream, body, end)?;
        Ok(request)
    }

    fn parse(head: &[u8]) -> Result<Self, RequestProblem> {
        let mut headers = [httparse::EMPTY_HEADER; HEADERS];
        let mut parsed = httparse::Request::new(&mut headers);
        let refused = |status, problem| Err(RequestProblem::Refused(status, problem));
        match parsed.parse(head) {
            Ok(httparse::Status::Complete(_)) => {}
            Err(httparse::Error::TooManyHeaders) => {
                return refused(HttpStatus::HeadTooLarge, "there are more than 64 headers");
            }
            _ => return refused(HttpStatus::BadRequest, "it is no HTTP request"),
        }
        let is_post = match parsed.method {
            Some("GET") => false,
            Some("POST") => true,
            _ => return refused(HttpStatus::MethodNotAllowed, "only GET and POST are answered"),
        };
        let (path, query) =
            parsed.path.map_or(("", ""), |it| it.split_once('?').unwrap_or((it, "")));
        let mut headers = Vec::new();
        for header in &*parsed.headers {
            let Ok(value) = std::str::from_utf8(header.value) else {
                return refused(HttpStatus::BadRequest, "a header is not UTF-8");
            };
            headers.push([header.name.to_ascii_lowercase(), value.trim().into()]);
        }
        let (path, query) = (path.into(), query.into());
        let request = Self { is_post, path, query, headers, body: Vec::new() };
        // Two of them mean two things to two readers.
        for name in ["host", "content-length", "origin", "authorization"] {
            if request.headers.iter().filter(|[of, _]| of == name).count() > 1 {
                return refused(HttpStatus::BadRequest, "a header is there twice");
            }
        }
        Ok(request)
    }

    fn read_body(
        &mut self,
        stream: &mut TcpStream,
        mut body: Vec<u8>,
        end: Instant,
    ) -> Result<(), RequestProblem> {
        let refused = |status, problem| Err(RequestProblem::Refused(status, problem));
        if self.header("transfer-encoding").is_some() {
            return refused(HttpStatus::NotImplemented, "a body needs a Content-Length");
        }
        let length = match self.header("content-length").map(str::parse::<usize>) {
            None => 0,
            Some(Ok(length)) => length,
            Some(Err(_)) => return refused(HttpStatus::BadRequest, "Content-Length is no number"),
        };
        if length > BODY_BYTES {
            return refused(HttpStatus::TooLarge, "the body is longer than 64 KiB");
        }
        while body.len() < length {
            read_more(stream, &mut body, end)?;
        }
        body.truncate(length);
        self.body = body;
        Ok(())
    }

    /// The value of a header, by its name in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|[of, _]| of == name).map(|[_, value]| value.as_str())
    }

    /// What the query says of a name, as sent.
    pub fn query(&self, name: &str) -> Option<&str> {
        let pairs = self.query.split('&').filter_map(|pair| pair.split_once('='));
        pairs.into_iter().find(|(of, _)| *of == name).map(|(_, value)| value)
    }

    /// The value of a cookie.
    pub fn cookie(&self, name: &str) -> Option<&str> {
        let all = self.headers.iter().filter(|[of, _]| of == "cookie");
        let pairs =
            all.flat_map(|[_, value]| value.split(';')).filter_map(|it| it.trim().split_once('='));
        pairs.into_iter().find(|(of, _)| *of == name).map(|(_, value)| value)
    }
}

/// Reads what has come, before `end`.
fn read_more(
    stream: &mut TcpStream,
    bytes: &mut Vec<u8>,
    end: Instant,
) -> Result<(), RequestProblem> {
    let left = end.saturating_duration_since(Instant::now());
    let late = RequestProblem::Refused(HttpStatus::TimedOut, "the request took longer than 10 s");
    if left.is_zero() {
        return Err(late);
    }
    let mut piece = [0; 4096];
    let read = stream.set_read_timeout(Some(left)).and_then(|()| stream.read(&mut piece));
    match read {
        Ok(0) => Err(RequestProblem::Gone),
        Ok(n) => {
            bytes.extend_from_slice(&piece[..n]);
            Ok(())
        }
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
            Err(late)
        }
        Err(error) if error.kind() == ErrorKind::Interrupted => Ok(()),
        Err(_) => Err(RequestProblem::Gone),
    }
}

/// An answer.
pub struct HttpResponse {
    status: HttpStatus,
    content_type: &'static str,
    headers: Vec<[String; 2]>,
    body: ResponseBody,
}

enum ResponseBody {
    Bytes(Cow<'static, [u8]>),
    /// So many bytes of a file.
    File(File, u64),
}

impl HttpResponse {
    /// What the page is made of.
    pub fn asset(content_type: &'static str, text: &'static str) -> Self {
        let body = ResponseBody::Bytes(text.as_bytes().into());
        Self { status: HttpStatus::Ok, content_type, headers: Vec::new(), body }
    }

    /// Text of a type.
    pub fn text(content_type: &'static str, text: String) -> Self {
        let body = ResponseBody::Bytes(text.into_bytes().into());
        Self { status: HttpStatus::Ok, content_type, headers: Vec::new(), body }.fresh()
    }

    pub fn json(text: String) -> Self {
        Self::text("application/json", text)
    }

    /// A file that is open.
    pub fn file(content_type: &'static str, file: File, bytes: u64) -> Self {
        let (status, body) = (HttpStatus::Ok, ResponseBody::File(file, bytes));
        Self { status, content_type, headers: Vec::new(), body }
    }

    /// That it is refused, and why: lower case, then a hint.
    pub fn refusal(status: HttpStatus, problem: &str, hint: &str) -> Self {
        let text = serde_json::json!({ "error": problem, "hint": hint }).to_string();
        Self { status, ..Self::json(text) }
    }

    /// To another path of ours.
    pub fn redirect(to: &str) -> Self {
        let text = Self::text("text/plain; charset=utf-8", String::new());
        Self { status: HttpStatus::SeeOther, ..text }.with("Location", to.into())
    }

    pub fn with(mut self, name: &str, value: String) -> Self {
        self.headers.push([name.into(), value]);
        self
    }

    /// Nobody keeps it.
    fn fresh(self) -> Self {
        self.with("Cache-Control", "no-store".into())
    }

    #[cfg(test)]
    pub fn status(&self) -> HttpStatus {
        self.status
    }

    pub fn write(self, stream: &mut TcpStream) -> io::Result<()> {
        let length = match &self.body {
            ResponseBody::Bytes(bytes) => bytes.len() as u64,
            ResponseBody::File(_, bytes) => *bytes,
        };
        let mut headers = self.headers;
        headers.push(["Content-Length".into(), length.to_string()]);
        stream.write_all(head(self.status, self.content_type, &headers).as_bytes())?;
        match self.body {
            ResponseBody::Bytes(bytes) => stream.write_all(&bytes),
            ResponseBody::File(file, bytes) => io::copy(&mut file.take(bytes), stream).map(drop),
        }
    }
}

/// Status and headers of an answer.
pub fn head(status: HttpStatus, content_type: &str, headers: &[[String; 2]]) -> String {
    let mut head = format!("HTTP/1.1 {}\r\nContent-Type: {content_type}\r\n", status.line());
    let own = headers.iter().map(|[name, value]| (name.as_str(), value.as_str()));
    for (name, value) in own.chain(ALWAYS.iter().map(|[name, value]| (*name, *value))) {
        _ = write!(head, "{name}: {value}\r\n");
    }
    head + "\r\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(head: &str) -> HttpStatus {
        match HttpRequest::parse(head.as_bytes()) {
            Err(RequestProblem::Refused(status, _)) => status,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_request_is_taken_apart_and_nothing_is_decoded() {
        let text = "GET /api/%2e%2e/x?after=3&token=ab HTTP/1.1\r\nHost: localhost:1\r\nCookie: a=1; b=2\r\n\r\n";
        let request = HttpRequest::parse(text.as_bytes()).unwrap();
        assert_eq!(request.path, "/api/%2e%2e/x");
        assert_eq!([request.query("after"), request.query("token")], [Some("3"), Some("ab")]);
        assert_eq!([request.query("none"), request.cookie("b")], [None, Some("2")]);
        assert_eq!([request.header("host"), request.header("x")], [Some("localhost:1"), None]);
    }

    #[test]
    fn what_two_readers_may_read_as_two_things_is_refused() {
        for (lines, expected) in [
            ("GET / HTTP/1.1\r\nHost: a\r\nhost: b\r\n\r\n", HttpStatus::BadRequest),
            (
                "POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
                HttpStatus::BadRequest,
            ),
            ("PUT / HTTP/1.1\r\n\r\n", HttpStatus::MethodNotAllowed),
            ("hello\r\n\r\n", HttpStatus::BadRequest),
            ("GET / HTTP/1.1\r\nA\r\n\r\n", HttpStatus::BadRequest),
        ] {
            assert_eq!(problem(lines), expected, "{lines}");
        }
        let many = "h: 1\r\n".repeat(65);
        assert_eq!(problem(&format!("GET / HTTP/1.1\r\n{many}\r\n")), HttpStatus::HeadTooLarge);
    }
}
