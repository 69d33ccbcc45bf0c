//! Why a model could not be downloaded: one variant per cause.

use std::borrow::Cow;
use std::io;
use std::path::PathBuf;

use weights::error::io_hint;

/// Everything that can go wrong with a download.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// `HF_HUB_OFFLINE` is set.
    #[error("HF_HUB_OFFLINE is set, and a download needs the network")]
    Offline,
    /// `HF_ENDPOINT` is no address.
    #[error("HF_ENDPOINT is {endpoint:?}, accepted is an address such as https://huggingface.co")]
    Endpoint {
        /// What it is.
        endpoint: String,
    },
    /// A token that cannot be sent.
    #[error(
        "the token from {from} is no token: it is empty, or has spaces or other odd characters"
    )]
    Token {
        /// The variable or file.
        from: String,
    },
    /// There are no certificates to check servers with.
    #[error("no certificates to check the server with: looked for {looked_for}")]
    NoCertificates {
        /// Files.
        looked_for: String,
    },
    /// The server could not be reached, or broke off.
    #[error("cannot reach {host}: {problem}")]
    Unreachable {
        /// The server.
        host: String,
        /// What happened.
        problem: String,
    },
    /// The model's licence has to be accepted first.
    #[error("{name} is gated: its licence has to be accepted first")]
    Gated {
        /// The model.
        name: String,
        /// Where.
        page: String,
        /// Whether a token was sent.
        has_token: bool,
    },
    /// There is no such model, or it is not shown to this user.
    #[error("{host} has no model {name}, or does not show it to you")]
    NoSuchModel {
        /// The model.
        name: String,
        /// The server.
        host: String,
        /// Whether a token was sent.
        has_token: bool,
    },
    /// There is no such branch, tag or commit.
    #[error("{name} has no revision {revision}")]
    NoSuchRevision {
        /// The model.
        name: String,
        /// What was asked for.
        revision: String,
    },
    /// The server does not accept the token.
    #[error("{host} refused the token (HTTP {status})")]
    TokenRefused {
        /// The server.
        host: String,
        /// 401 or 403.
        status: u16,
    },
    /// Too many requests, for longer than one would wait.
    #[error("{host} asks to wait {seconds} s: too many requests")]
    TooManyRequests {
        /// The server.
        host: String,
        /// As it said.
        seconds: u64,
    },
    /// Another answer than one can do something with.
    #[error("{host} answered HTTP {status} to {what}")]
    Status {
        /// The server.
        host: String,
        /// The code.
        status: u16,
        /// What was asked for.
        what: String,
    },
    /// An answer that is not what the hub's interface says.
    #[error("{host} gave an answer that hearth does not understand: {problem}")]
    Answer {
        /// The server.
        host: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A file's name that leads out of the folder.
    #[error("refused a file whose name leads elsewhere: {path:?}")]
    FileName {
        /// As the server has it.
        path: String,
    },
    /// Nothing to download.
    #[error("{name} has no file that fits {patterns}")]
    NoMatch {
        /// The model.
        name: String,
        /// As they were typed.
        patterns: String,
    },
    /// No model that hearth can use, or several.
    #[error("{name} has {problem}")]
    Unclear {
        /// The model.
        name: String,
        /// What there is instead.
        problem: String,
    },
    /// Not enough space.
    #[error("not enough space for {name}: {needed} to download, {free} free in {}", path.display())]
    DiskSpace {
        /// The model.
        name: String,
        /// What is still to come.
        needed: String,
        /// What is free.
        free: String,
        /// The cache.
        path: PathBuf,
    },
    /// A file that is not what the hub says.
    #[error("{file} was damaged on its way: its checksum is {found}, expected {expected}")]
    Checksum {
        /// The file.
        file: String,
        /// What came.
        found: String,
        /// What should have.
        expected: String,
    },
    /// The system refused.
    #[error("cannot {what} {}", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },
    /// The user pressed Ctrl-C.
    #[error("interrupted")]
    Cancelled,
}

/// What every function of this crate returns.
pub type Result<T> = std::result::Result<T, HubError>;

impl HubError {
    pub(crate) fn io(what: &'static str, path: &std::path::Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { what, path: path.into(), source }
    }

    /// What the user can do about it.
    pub fn hint(&self) -> Cow<'static, str> {
        let fixed = match self {
            Self::Offline => "unset HF_HUB_OFFLINE, or use what is in the cache",
            Self::Endpoint { .. } => "unset HF_ENDPOINT for huggingface.co",
            Self::Token { .. } => {
                "copy it again from huggingface.co/settings/tokens, or unset HF_TOKEN"
            }
            Self::NoCertificates { .. } => {
                "install the package ca-certificates, or set SSL_CERT_FILE to a PEM file"
            }
            Self::Unreachable { .. } => {
                "check the connection, HTTPS_PROXY and HF_ENDPOINT; run it again to go on where it stopped"
            }
            Self::Gated { page, has_token, .. } => return gated_hint(page, *has_token).into(),
            Self::NoSuchModel { has_token: false, .. } => {
                "check the name, which is OWNER/NAME; a private model needs a token in HF_TOKEN"
            }
            Self::NoSuchModel { has_token: true, .. } => {
                "check the name, which is OWNER/NAME, and what the token may read"
            }
            Self::NoSuchRevision { .. } => {
                "leave out --revision for the newest, or look at its branches and tags on its page"
            }
            Self::TokenRefused { .. } => {
                "make a new token at huggingface.co/settings/tokens and put it in HF_TOKEN, or unset it for a public model"
            }
            Self::TooManyRequests { .. } => {
                "run it again later, it goes on where it stopped; a token in HF_TOKEN allows more"
            }
            Self::Status { .. } => "run it again later, it goes on where it stopped",
            Self::Answer { .. } => {
                "check HF_ENDPOINT and proxies: this may be the page of a login or a firewall"
            }
            Self::FileName { .. } => "do not use this model; tell the hub about it",
            Self::NoMatch { .. } => "`--dry-run --all` lists its files; put patterns in quotes",
            Self::Unclear { .. } => {
                "choose files with --only 'PATTERN', all with --all; `--dry-run --all` lists them"
            }
            Self::DiskSpace { .. } => {
                "free some space, or put the cache on another disk with HF_HUB_CACHE"
            }
            Self::Checksum { .. } => "run it again: the file was removed, and is downloaded anew",
            Self::Io { source, .. } => io_hint(source),
            Self::Cancelled => "run it again to go on where it stopped",
        };
        fixed.into()
    }
}

fn gated_hint(page: &str, has_token: bool) -> String {
    let token = "put a token of huggingface.co/settings/tokens into HF_TOKEN";
    if has_token {
        format!("accept the licence at {page} with the account of the token, and run it again")
    } else {
        format!("accept the licence at {page}, then {token} and run it again")
    }
}
