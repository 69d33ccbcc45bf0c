//! Who may see and ask what. Three guards, each against another way in:
//!
//! - a token, printed with the URL and exchanged for a cookie: other users of the computer, other computers;
//! - the Host header is one of ours: pages of others whose name was made to lead here (DNS rebinding);
//! - what changes something comes from our own page: forms and scripts of other pages (CSRF).

use std::fs::File;
use std::io::Read;
use std::net::IpAddr;

use super::http::{HttpRequest, HttpResponse, HttpStatus};

/// Characters of a token that people give. Chosen: as hard to guess as 64 random bits, if they are letters.
pub const TOKEN_CHARACTERS: usize = 16;

/// The guards.
pub struct WebAccess {
    token: String,
    cookie: String,
    /// Names by which the server may be called, in lower case, beside those of the loopback.
    hosts: Vec<String>,
    /// Any address may be its own: it listens on all. A name cannot be made to lead here by an address.
    any_address: bool,
}

/// 128 random bits, as text.
pub fn random_token() -> std::io::Result<String> {
    let mut bytes = [0; 16];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(format!("{:032x}", u128::from_le_bytes(bytes)))
}

impl WebAccess {
    pub fn new(token: String, port: u16, hosts: &[String], any_address: bool) -> Self {
        let hosts = hosts.iter().map(|host| host.to_ascii_lowercase()).collect();
        // Cookies of a host go to all of its ports.
        Self { token, cookie: format!("hearth_{port}"), hosts, any_address }
    }

    /// Refuses a request that is not for this server, or that its sender may not make.
    pub fn refuse(&self, request: &HttpRequest, peer: IpAddr) -> Option<HttpResponse> {
        let host = request.header("host").unwrap_or_default();
        if !self.is_own(host) {
            let hint = "open the URL that hearth serve printed; another name needs --listen NAME";
            return refusal(
                HttpStatus::Misdirected,
                &format!("the Host header {host:?} is not this server's"),
                hint,
            );
        }
        if is_open(&request.path) && !request.is_post && peer.to_canonical().is_loopback() {
            return None;
        }
        let (bearer, cookie) = (self.has_bearer(request), self.has_cookie(request));
        if !bearer && !cookie {
            let hint = "open the URL that hearth serve printed, with its token";
            return refusal(
                HttpStatus::Unauthorized,
                "the token is missing or not this server's",
                hint,
            );
        }
        // A token in a header is no browser's doing; a cookie is sent whoever asks.
        if request.is_post && !is_same_origin(request, host, bearer) {
            let hint =
                "use the page that this server shows, or send the token as Authorization: Bearer";
            return refusal(HttpStatus::Forbidden, "the request comes from another page", hint);
        }
        None
    }

    /// The way in: a token in the URL becomes a cookie, and leaves the address bar.
    pub fn login(&self, request: &HttpRequest) -> Option<HttpResponse> {
        let host = request.header("host").unwrap_or_default();
        let token = request.query("token").filter(|_| request.path == "/" && self.is_own(host))?;
        is_equal(token, &self.token).then(|| {
            let cookie = format!(
                "{}={}; HttpOnly; SameSite=Strict; Path=/; Max-Age=2592000",
                self.cookie, self.token
            );
            HttpResponse::redirect("/").with("Set-Cookie", cookie)
        })
    }

    fn has_bearer(&self, request: &HttpRequest) -> bool {
        let given = request.header("authorization").and_then(|value| value.strip_prefix("Bearer "));
        given.is_some_and(|given| is_equal(given, &self.token))
    }

    fn has_cookie(&self, request: &HttpRequest) -> bool {
        request.cookie(&self.cookie).is_some_and(|given| is_equal(given, &self.token))
    }

    /// Whether a Host header names this server. Its port is not looked at: tunnels change it.
    fn is_own(&self, host: &str) -> bool {
        let name = name_of(host).to_ascii_lowercase();
        let address = name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>().ok();
        let is_loopback =
            name == "localhost" || address.is_some_and(|it| it.to_canonical().is_loopback());
        is_loopback || self.hosts.contains(&name) || (self.any_address && address.is_some())
    }
}

/// Paths that programs of this computer may read without a token.
fn is_open(path: &str) -> bool {
    matches!(path, "/healthz" | "/metrics")
}

/// The name without its port; an address of version 6 stands in brackets.
fn name_of(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|it| it.is_ascii_digit()) && !name.is_empty() => {
            if name.contains(':') && !name.ends_with(']') {
                host
            } else {
                name
            }
        }
        _ => host,
    }
}

/// Whether a request that changes something comes from our own page. A browser says so in one header at least.
fn is_same_origin(request: &HttpRequest, host: &str, is_bearer: bool) -> bool {
    let site = request.header("sec-fetch-site").map(|site| site == "same-origin");
    let origin = request.header("origin").map(|origin| {
        let of = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
        of.is_some_and(|of| of.eq_ignore_ascii_case(host))
    });
    match (site, origin) {
        (None, None) => is_bearer,
        (site, origin) => site.unwrap_or(true) && origin.unwrap_or(true),
    }
}

/// In a time that says nothing of where they differ.
fn is_equal(a: &str, b: &str) -> bool {
    let differences = a.bytes().zip(b.bytes()).fold(0, |sum, (a, b)| sum | (a ^ b));
    a.len() == b.len() && differences == 0
}

#[expect(clippy::unnecessary_wraps, reason = "each guard refuses, or has nothing to say")]
fn refusal(status: HttpStatus, problem: &str, hint: &str) -> Option<HttpResponse> {
    Some(HttpResponse::refusal(status, problem, hint))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_ours_by_name_and_whatever_their_port() {
        let local = WebAccess::new("t".into(), 1, &[], false);
        for host in
            ["localhost", "LOCALHOST:80", "127.0.0.1:4327", "[::1]:4327", "[::1]", "127.9.9.9"]
        {
            assert!(local.is_own(host), "{host}");
        }
        let evil = [
            "",
            "evil.example",
            "localhost.evil.example:4327",
            "127.0.0.1.nip.io",
            "10.0.0.1",
            "::1:x",
        ];
        for host in evil {
            assert!(!local.is_own(host), "{host}");
        }
        let named = WebAccess::new("t".into(), 1, &["Spark.local".into()], false);
        assert!(named.is_own("spark.local:4327") && !named.is_own("10.0.0.1:4327"));
        let all = WebAccess::new("t".into(), 1, &[], true);
        assert!(
            all.is_own("10.0.0.1:4327") && all.is_own("[fe80::1]:1") && !all.is_own("evil.example")
        );
    }

    #[test]
    fn tokens_are_random_and_compared_whole() {
        let [a, b] = [(); 2].map(|()| random_token().unwrap());
        assert!(a.len() == 32 && a != b);
        assert!(
            is_equal(&a, &a) && !is_equal(&a, &b) && !is_equal(&a, &a[..31]) && !is_equal(&a, "")
        );
    }
}
