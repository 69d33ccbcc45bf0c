//! Requests to the hub: one place that knows the token, follows redirects, and waits and tries again.

use std::fmt::{self, Write as _};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use ureq::http::Response;
use ureq::http::uri::Uri;
use ureq::{Agent, Body};
use weights::hub;

use crate::error::{HubError, Result};
use crate::tls;

/// Where models come from unless `HF_ENDPOINT` says otherwise.
const ENDPOINT: &str = "https://huggingface.co";

/// Chosen: a server that is there answers within these; after [`STALL`] without a byte a transfer is tried again.
const CONNECT: Duration = Duration::from_secs(15);
const ANSWER: Duration = Duration::from_secs(60);
const STALL: Duration = Duration::from_secs(30);
const WHOLE_ANSWER: Duration = Duration::from_secs(120);

/// Chosen: more in a row is a loop.
const MOST_REDIRECTS: usize = 5;

/// Chosen: half a minute with the pauses between them; each is twice as long as the one before.
const ATTEMPTS: u32 = 6;
/// Chosen: as many while the hub has not answered at all.
const FIRST_ATTEMPTS: u32 = 2;
const FIRST_PAUSE: Duration = Duration::from_millis(500);

/// Chosen: longer than this nobody waits without a word.
const LONGEST_WAIT_SECS: u64 = 300;

/// Chosen: connections at a time, as many as `huggingface_hub` has workers.
pub(crate) const CONNECTIONS: usize = 8;

/// A secret; never shown.
struct HubToken(String);

impl fmt::Debug for HubToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// Who asks the hub.
#[derive(Debug)]
pub struct HubClient {
    agent: Agent,
    endpoint: String,
    origin: Origin,
    token: Option<HubToken>,
    /// Whether the hub ever answered: before, one is rather offline than unlucky.
    was_reached: AtomicBool,
}

/// A server: scheme, host and port.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Origin {
    is_tls: bool,
    host: String,
    port: u16,
}

/// The bytes of a file that are asked for: from the first to the last.
#[derive(Clone, Copy, Debug)]
pub struct ByteRange {
    /// From 0.
    pub first: u64,
    /// The last one that belongs to it.
    pub last: u64,
}

/// Why an attempt failed.
enum FailedRequest {
    /// Trying again may help, after as long as the server asked for.
    Again(HubError, Option<Duration>),
    /// It will not.
    Final(HubError),
}

impl HubClient {
    /// With the endpoint, token and proxy of the environment.
    pub fn from_env() -> Result<Self> {
        let set = |name: &str| std::env::var(name).ok().filter(|value| !value.trim().is_empty());
        if set("HF_HUB_OFFLINE")
            .is_some_and(|value| ["1", "on", "yes", "true"].contains(&&*value.to_lowercase()))
        {
            return Err(HubError::Offline);
        }
        Self::new(&set("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.into()), token(&set)?)
    }

    fn new(endpoint: &str, token: Option<HubToken>) -> Result<Self> {
        let endpoint = endpoint.trim().trim_end_matches('/').to_owned();
        let origin = Origin::of(&endpoint)
            .ok_or_else(|| HubError::Endpoint { endpoint: endpoint.clone() })?;
        let config = Agent::config_builder()
            .user_agent(concat!("hearth/", env!("CARGO_PKG_VERSION")))
            .accept_encoding("identity")
            .http_status_as_error(false)
            // Followed here, so that the token goes to the endpoint alone.
            .max_redirects(0)
            .max_redirects_will_error(false)
            .https_only(origin.is_tls)
            .timeout_resolve(Some(CONNECT))
            .timeout_connect(Some(CONNECT))
            .timeout_recv_response(Some(ANSWER))
            .timeout_per_read(Some(STALL))
            .max_idle_connections_per_host(CONNECTIONS);
        let config = if origin.is_tls { config.tls_config(tls::config()?) } else { config };
        let (agent, was_reached) = (config.build().new_agent(), AtomicBool::new(false));
        Ok(Self { agent, endpoint, origin, token, was_reached })
    }

    /// The address of a path below the endpoint.
    pub(crate) fn url(&self, path: &str) -> String {
        format!("{}/{}", self.endpoint, encoded(path))
    }

    /// The server's name, for messages.
    pub fn host(&self) -> String {
        self.origin.shown()
    }

    /// Whether requests carry a token.
    pub fn has_token(&self) -> bool {
        self.token.is_some()
    }

    /// The page of a model.
    pub fn page(&self, name: &str) -> String {
        self.url(name)
    }

    /// Asks for an address of the endpoint, or a range of what is there; tries again where that may help. `name` is
    /// the model that it is about.
    pub(crate) fn get(
        &self,
        name: &str,
        url: &str,
        range: Option<ByteRange>,
    ) -> Result<Response<Body>> {
        let mut pause = FIRST_PAUSE;
        for attempt in 1..ATTEMPTS {
            if attempt >= FIRST_ATTEMPTS && !self.was_reached.load(Ordering::Relaxed) {
                break;
            }
            match self.attempt(name, url, range) {
                Ok(response) => return Ok(response),
                Err(FailedRequest::Final(error)) => return Err(error),
                Err(FailedRequest::Again(_, asked)) => thread::sleep(asked.unwrap_or(pause)),
            }
            pause *= 2;
        }
        self.attempt(name, url, range)
            .map_err(|(FailedRequest::Again(error, _) | FailedRequest::Final(error))| error)
    }

    fn attempt(
        &self,
        name: &str,
        url: &str,
        range: Option<ByteRange>,
    ) -> std::result::Result<Response<Body>, FailedRequest> {
        let mut url = url.to_owned();
        for _ in 0..=MOST_REDIRECTS {
            let response = self.request(&url, range)?;
            let status = response.status().as_u16();
            if response.status().is_success() {
                return Ok(response);
            }
            if !matches!(status, 301 | 302 | 303 | 307 | 308) {
                return Err(self.refusal(name, &response, &url));
            }
            let to = header(&response, "location").and_then(|to| self.redirected(&url, &to));
            let lost = || {
                self.answer(format!(
                    "a redirect without an address that can be followed, from {}",
                    shown(&url)
                ))
            };
            url = to.ok_or_else(lost).map_err(FailedRequest::Final)?;
        }
        Err(FailedRequest::Final(self.answer(format!("more than {MOST_REDIRECTS} redirects"))))
    }

    fn request(
        &self,
        url: &str,
        range: Option<ByteRange>,
    ) -> std::result::Result<Response<Body>, FailedRequest> {
        let mut request = self.agent.get(url);
        let is_own = Origin::of(url).is_some_and(|origin| origin == self.origin);
        if let Some(HubToken(token)) =
            self.token.as_ref().filter(|_| is_own && self.origin.is_private())
        {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        if let Some(ByteRange { first, last }) = range {
            request = request.header("range", format!("bytes={first}-{last}"));
        }
        // Ranges take as long as they take; all else is small.
        let limit = if range.is_none() { Some(WHOLE_ANSWER) } else { None };
        let response = request.config().timeout_global(limit).build().call().map_err(|error| {
            let host = Origin::of(url).map_or_else(String::new, |origin| origin.shown());
            let is_final = is_final(&error);
            let error = HubError::Unreachable { host, problem: told(&error) };
            if is_final { FailedRequest::Final(error) } else { FailedRequest::Again(error, None) }
        })?;
        self.was_reached.store(true, Ordering::Relaxed);
        Ok(response)
    }

    /// Where a redirect leads; not from an encrypted connection to one that is not.
    fn redirected(&self, from: &str, to: &str) -> Option<String> {
        let to = if to.starts_with('/') && !to.starts_with("//") {
            let Origin { is_tls, host, port } = Origin::of(from)?;
            format!("{}://{host}:{port}{to}", if is_tls { "https" } else { "http" })
        } else {
            to.to_owned()
        };
        let is_tls = Origin::of(&to)?.is_tls;
        (is_tls || !self.origin.is_tls).then_some(to)
    }

    /// What a status means.
    fn refusal(&self, name: &str, response: &Response<Body>, url: &str) -> FailedRequest {
        let (status, host) = (
            response.status().as_u16(),
            Origin::of(url).map_or_else(|| self.host(), |it| it.shown()),
        );
        let (name, has_token) = (name.to_owned(), self.has_token());
        let code = header(response, "x-error-code").unwrap_or_default();
        let gated = || HubError::Gated { page: self.page(&name), name: name.clone(), has_token };
        // An address that the hub gave out is good for a while; asking again gives a new one.
        if !self.is_own(url) {
            return FailedRequest::Again(HubError::Status { host, status, what: shown(url) }, None);
        }
        let error = match (status, code.as_str()) {
            (401 | 403, "GatedRepo") => gated(),
            (401 | 404, "RepoNotFound") => HubError::NoSuchModel { name, host, has_token },
            (404, "RevisionNotFound") => {
                HubError::NoSuchRevision { name, revision: "of that name".into() }
            }
            (401, _) if has_token => HubError::TokenRefused { host, status },
            (403, _) if has_token && code.is_empty() => HubError::TokenRefused { host, status },
            (401 | 403, _) => gated(),
            (404, _) if url.contains("/api/") => HubError::NoSuchModel { name, host, has_token },
            (429, _) => {
                let asked =
                    header(response, "retry-after").and_then(|text| text.trim().parse().ok());
                let seconds: u64 = asked.unwrap_or(1);
                let error = HubError::TooManyRequests { host, seconds };
                let wait = Duration::from_secs(seconds.max(1));
                return if seconds > LONGEST_WAIT_SECS {
                    FailedRequest::Final(error)
                } else {
                    FailedRequest::Again(error, Some(wait))
                };
            }
            (408 | 500.., _) => {
                return FailedRequest::Again(
                    HubError::Status { host, status, what: shown(url) },
                    None,
                );
            }
            _ => HubError::Status { host, status, what: shown(url) },
        };
        FailedRequest::Final(error)
    }

    pub(crate) fn answer(&self, problem: String) -> HubError {
        HubError::Answer { host: self.host(), problem }
    }

    /// Whether an address is the endpoint's.
    pub(crate) fn is_own(&self, url: &str) -> bool {
        Origin::of(url).is_some_and(|origin| origin == self.origin)
    }
}

impl Origin {
    fn of(url: &str) -> Option<Self> {
        let uri: Uri = url.parse().ok()?;
        let is_tls = match uri.scheme_str()? {
            "https" => true,
            "http" => false,
            _ => return None,
        };
        // A user's name or password in an address is nothing that the hub gives out.
        let host = uri
            .host()
            .filter(|_| !uri.authority().is_some_and(|it| it.as_str().contains('@')))?
            .to_lowercase();
        Some(Self { is_tls, host, port: uri.port_u16().unwrap_or(if is_tls { 443 } else { 80 }) })
    }

    /// Whether nobody on the way can read a token.
    fn is_private(&self) -> bool {
        self.is_tls || ["localhost", "127.0.0.1", "[::1]"].contains(&self.host.as_str())
    }

    fn shown(&self) -> String {
        let usual = if self.is_tls { 443 } else { 80 };
        if self.port == usual { self.host.clone() } else { format!("{}:{}", self.host, self.port) }
    }
}

/// The token of the environment, or of the file that logging in with Python left.
fn token(set: &dyn Fn(&str) -> Option<String>) -> Result<Option<HubToken>> {
    let variable = ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"]
        .iter()
        .find_map(|name| Some(((*name).to_owned(), set(name)?)));
    let file =
        || set("HF_TOKEN_PATH").map(PathBuf::from).or_else(|| Some(hub::home_dir()?.join("token")));
    let of_file = || {
        let path = file()?;
        Some((path.display().to_string(), std::fs::read_to_string(&path).ok()?))
    };
    let Some((from, text)) = variable.or_else(of_file) else { return Ok(None) };
    let text = text.trim();
    let is_token = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic());
    if is_token { Ok(Some(HubToken(text.into()))) } else { Err(HubError::Token { from }) }
}

/// A header as text.
pub(crate) fn header(response: &Response<Body>, name: &str) -> Option<String> {
    response.headers().get(name)?.to_str().ok().map(str::to_owned)
}

/// Whether trying again cannot help: a certificate that is not trusted, an address or a proxy that is none.
fn is_final(error: &ureq::Error) -> bool {
    match error {
        ureq::Error::Io(error) => error.kind() == std::io::ErrorKind::InvalidData,
        error => matches!(
            error,
            ureq::Error::Rustls(_)
                | ureq::Error::Tls(_)
                | ureq::Error::Pem(_)
                | ureq::Error::BadUri(_)
                | ureq::Error::InvalidProxyUrl
        ),
    }
}

/// What failed, without the request's own headers.
fn told(error: &ureq::Error) -> String {
    match error {
        ureq::Error::HostNotFound => "no address for that name".into(),
        ureq::Error::Timeout(_) => "no answer in time".into(),
        error => error.to_string(),
    }
}

/// An address without its query, which may have a signature in it.
fn shown(url: &str) -> String {
    url.split('?').next().unwrap_or(url).to_owned()
}

/// A path as it stands in an address.
pub(crate) fn encoded(path: &str) -> String {
    let mut text = String::new();
    for byte in path.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
            text.push(char::from(byte));
        } else {
            _ = write!(text, "%{byte:02X}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_told_apart() {
        let same = |a: &str, b: &str| Origin::of(a) == Origin::of(b) && Origin::of(a).is_some();
        assert!(same("https://huggingface.co/a", "https://HuggingFace.co:443/b?c"));
        assert!(!same("https://huggingface.co", "https://cdn.huggingface.co"));
        assert!(!same("https://huggingface.co", "http://huggingface.co"));
        assert!(!same("http://127.0.0.1:1", "http://127.0.0.1:2"));
        for bad in ["huggingface.co", "ftp://a", "https://me:secret@huggingface.co", "", "https://"]
        {
            assert_eq!(Origin::of(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_token_is_read_and_never_shown() {
        let of = |value: &'static str| {
            token(&move |name| (name == "HF_TOKEN").then(|| value.to_owned()))
        };
        let HubToken(found) = of(" hf_abc\n").unwrap().unwrap();
        assert_eq!(found, "hf_abc");
        assert!(of("a b").is_err() && of("a\r\nx: y").is_err());
        let client = HubClient::new("http://127.0.0.1:9", of("hf_abc").unwrap()).unwrap();
        assert!(!format!("{client:?}").contains("hf_abc"));
        assert!(!Origin::of("http://example.com").unwrap().is_private());
        assert!(Origin::of("http://127.0.0.1:9").unwrap().is_private());
    }

    #[test]
    fn redirects_stay_encrypted() {
        let client = HubClient::new("http://127.0.0.1:9", None).unwrap();
        let to = |to: &str| client.redirected("http://127.0.0.1:9/a/b", to);
        assert_eq!(to("/c").as_deref(), Some("http://127.0.0.1:9/c"));
        assert_eq!(to("https://cdn/x?y").as_deref(), Some("https://cdn/x?y"));
        assert_eq!(to("//evil/x"), None);
        assert_eq!(to("file:///etc/passwd"), None);
        let origin = Origin { is_tls: true, ..client.origin.clone() };
        let client = HubClient { origin, ..client };
        assert_eq!(client.redirected("https://a/b", "http://a/b"), None);
    }

    #[test]
    fn paths_are_encoded() {
        assert_eq!(encoded("a b/c#d?e%.json"), "a%20b/c%23d%3Fe%25.json");
    }
}
