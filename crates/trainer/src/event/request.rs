//! Requests to a run: what people ask of it while it works. A request is a file in the run's folder, so whoever may
//! write there may ask: a dashboard in this program, in another one, or `echo`. The run answers with an event, and
//! removes the file when that is written.
//!
//! ```text
//! RUN/requests/ID.json ──▶ inbox.rs ──▶ the loop ──▶ Event::Request
//! {"request":"sample","prompt":"a red cat"}
//! ```
//!
//! What a run was asked and has not done when it ends is done by the one that resumes. No request changes what is
//! learnt.

use std::fmt;
use std::fs;
use std::io;
use std::path::Path;
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use weights::plain_file::open_plain;
use weights::write::write_whole;

use super::lock;
use crate::error::{Result, TrainerError};

/// The folder of requests, in a run's folder.
pub const FOLDER: &str = "requests";

const EXTENSION: &str = "json";
/// The longest request that is read. Chosen: a page of prompts.
const MOST_BYTES: u64 = 64 << 10;
/// Requests that wait at most; later ones are heard when these are done. Chosen: more than anybody clicks.
const MOST_PENDING: usize = 100;

/// What is asked of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case")]
pub enum RunRequest {
    /// Samples of all prompts, after the step at hand.
    Sample {
        /// One more prompt, which stays among those of the run.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        prompt: Option<String>,
    },
    /// A checkpoint, after the step at hand.
    Save,
    /// To stand still, after the micro-batch at hand.
    Pause,
    /// To go on after that.
    Resume,
    /// To save and end, as Ctrl-C does.
    Stop,
    /// Another value of a key that does not change what is learnt.
    Change {
        /// As in a job.
        key: String,
        /// As TOML.
        value: String,
    },
}

impl fmt::Display for RunRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sample { prompt: None } => f.write_str("sample"),
            Self::Sample { prompt: Some(prompt) } => write!(f, "sample {prompt:?}"),
            Self::Save => f.write_str("save"),
            Self::Pause => f.write_str("pause"),
            Self::Resume => f.write_str("resume"),
            Self::Stop => f.write_str("stop"),
            Self::Change { key, value } => write!(f, "change {key} to {value}"),
        }
    }
}

/// A request that waits to be answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingRequest {
    /// The name of its file.
    pub id: String,
    /// What is asked.
    pub request: RunRequest,
}

/// What became of a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestAnswer {
    /// Steps taken so far.
    pub step: u64,
    /// Which one.
    pub id: String,
    /// What was asked; none if that could not be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked: Option<RunRequest>,
    /// Why it was not done; none if it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
}

impl fmt::Display for RequestAnswer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.asked {
            Some(asked) => write!(f, "asked to {asked}")?,
            None => write!(f, "asked something")?,
        }
        match &self.refused {
            Some(reason) => write!(f, ": refused, {reason}"),
            None => f.write_str(": done"),
        }
    }
}

/// Asks something of the run in a folder; returns the request's id. A run that nobody works on is not asked.
pub fn send(run_folder: &Path, request: &RunRequest) -> Result<String> {
    static SENT: AtomicU64 = AtomicU64::new(0);
    if !lock::is_held(run_folder) {
        return Err(TrainerError::RunNotActive { path: run_folder.into() });
    }
    let folder = run_folder.join(FOLDER);
    let failed = |source| TrainerError::Io { what: "write", path: folder.clone(), source };
    match fs::create_dir(&folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(failed(error)),
        _ => {}
    }
    // By time, so that names are in the order in which they were asked.
    let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
    let id = format!("{time:014}-{}-{}", process::id(), SENT.fetch_add(1, Ordering::Relaxed));
    let text = serde_json::to_string(request).expect("a request has nothing but plain values");
    write_whole(&folder.join(&id).with_extension(EXTENSION), text.as_bytes())?;
    Ok(id)
}

/// A request's file as it was found.
pub(super) enum FoundRequest {
    /// It can be carried out.
    Whole(PendingRequest),
    /// It cannot be read, and why.
    Broken(String, String),
}

/// The requests in a run's folder, in the order of their names.
pub(super) fn found(run_folder: &Path) -> Vec<FoundRequest> {
    let Ok(entries) = fs::read_dir(run_folder.join(FOLDER)) else { return Vec::new() };
    let name = |entry: io::Result<fs::DirEntry>| entry.ok()?.file_name().into_string().ok();
    let id = |name: String| Some(name.strip_suffix(&format!(".{EXTENSION}"))?.to_owned());
    let mut ids: Vec<String> =
        entries.filter_map(name).filter_map(id).filter(|id| !id.starts_with('.')).collect();
    ids.sort();
    ids.truncate(MOST_PENDING);
    ids.into_iter().map(|id| read(run_folder, id)).collect()
}

fn read(run_folder: &Path, id: String) -> FoundRequest {
    let path = run_folder.join(FOLDER).join(format!("{id}.{EXTENSION}"));
    let text = open_plain(&path).and_then(|file| {
        let mut text = String::new();
        io::Read::read_to_string(&mut io::Read::take(file, MOST_BYTES), &mut text)?;
        Ok(text)
    });
    match text.map_err(|error| error.to_string()).and_then(|text| {
        serde_json::from_str(&text).map_err(|error| format!("it is no request: {error}"))
    }) {
        Ok(request) => FoundRequest::Whole(PendingRequest { id, request }),
        Err(problem) => FoundRequest::Broken(id, problem),
    }
}

/// Removes the file of a request that is answered. One that cannot be removed is asked again by a run that resumes.
pub(super) fn remove(run_folder: &Path, id: &str) {
    _ = fs::remove_file(run_folder.join(FOLDER).join(format!("{id}.{EXTENSION}")));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::lock::RunLock;

    #[test]
    fn requests_are_found_in_the_order_in_which_they_were_asked() {
        let run = tempfile::tempdir().unwrap();
        let save = RunRequest::Save;
        let refused = send(run.path(), &save).unwrap_err();
        assert!(matches!(refused, TrainerError::RunNotActive { .. }), "{refused}");
        assert!(!run.path().join(FOLDER).exists());
        let _lock = RunLock::take(run.path()).unwrap().unwrap();
        let sample = RunRequest::Sample { prompt: Some("a \"cat\"\n".into()) };
        let sent = [&sample, &save, &sample].map(|request| PendingRequest {
            id: send(run.path(), request).unwrap(),
            request: request.clone(),
        });
        let folder = run.path().join(FOLDER);
        // By hand, and files of others.
        fs::write(folder.join("by-hand.json"), r#"{"request":"stop"}"#).unwrap();
        fs::write(folder.join("notes.txt"), "none").unwrap();
        fs::write(folder.join("broken.json"), r#"{"request":"dance"}"#).unwrap();
        fs::write(folder.join("huge.json"), vec![b' '; 1 << 20]).unwrap();
        let (mut whole, mut broken) = (Vec::new(), Vec::new());
        for found in found(run.path()) {
            match found {
                FoundRequest::Whole(request) => whole.push(request),
                FoundRequest::Broken(id, problem) => broken.push((id, problem)),
            }
        }
        assert_eq!(whole[..3], sent);
        assert_eq!(whole[3], PendingRequest { id: "by-hand".into(), request: RunRequest::Stop });
        let ids: Vec<&str> = broken.iter().map(|(id, _)| id.as_str()).collect();
        assert_eq!(ids, ["broken", "huge"], "{broken:?}");
        remove(run.path(), "by-hand");
        assert!(!folder.join("by-hand.json").exists());
    }
}
