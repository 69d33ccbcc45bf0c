//! What people ask of a run while it works (`event/request.rs`), done between two steps: samples and checkpoints at
//! once; what changes the job by a restart within the program, from a checkpoint, with the changed job. A run that
//! resumes learns the same bit by bit, and its plan has everything a sample of a new prompt needs.

use std::path::Path;

use serde::{Deserialize, Serialize};
use weights::plain_file::read_plain;

use super::device::DeviceSetup;
use super::folder::RunOutput;
use super::run::TrainingRun;
use super::train_into;
use crate::config::{CHANGEABLE, ConfigError, RunConfig};
use crate::error::{Result, TrainerError};
use crate::event::{PendingRequest, RunEnd, RunRequest};
use crate::report::write_text;
use crate::task::traits::DataLoader;

/// What a run's folder calls the changes that were asked for: a run that resumes keeps them.
pub const CHANGES: &str = "changes.json";

/// A key that somebody changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct KeyChange {
    key: String,
    /// Its value in the job, as TOML. Where that is another one by now, the job counts.
    before: String,
    after: String,
}

/// What a request takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RequestedWork {
    Nothing,
    Samples,
    Checkpoint,
    /// To go on with another job.
    Restart,
}

impl<D: DataLoader> TrainingRun<'_, D> {
    /// Hears what was asked since the last step; what cannot be done is refused.
    pub(super) fn hear_requests(&mut self) -> Result<()> {
        self.asked.clear();
        for PendingRequest { id, request } in self.events.requests()? {
            match self.work_of(&request) {
                Ok(RequestedWork::Nothing) => self.events.answer(&id, Some(request), None)?,
                Ok(_) => self.asked.push(PendingRequest { id, request }),
                Err(reason) => self.events.answer(&id, Some(request), Some(reason))?,
            }
        }
        Ok(())
    }

    fn work_of(&self, request: &RunRequest) -> std::result::Result<RequestedWork, String> {
        match request {
            RunRequest::Save => Ok(RequestedWork::Checkpoint),
            RunRequest::Sample { prompt: None } if self.config.sample_prompts().1.is_empty() => {
                Err("the job has no prompts; name one".into())
            }
            RunRequest::Sample { prompt: None } => Ok(RequestedWork::Samples),
            _ => {
                let refused = |error: ConfigError| with_hint(&error.to_string(), &error.hint());
                let changed = changed(self.config, request).map_err(refused)?;
                let is_other = is_other(&changed, self.config);
                if is_other && self.parallel.is_some() {
                    return Err("ranks that train together keep their job; stop, and resume with \
                                another value"
                        .into());
                }
                Ok(match request {
                    _ if is_other => RequestedWork::Restart,
                    RunRequest::Sample { .. } => RequestedWork::Samples,
                    _ => RequestedWork::Nothing,
                })
            }
        }
    }

    fn is_asked(&self, work: RequestedWork) -> bool {
        self.asked.iter().any(|asked| self.work_of(&asked.request) == Ok(work))
    }

    /// Whether somebody asked for samples.
    pub(super) fn is_sample_asked(&self) -> bool {
        self.is_asked(RequestedWork::Samples)
    }

    /// Whether somebody asked for a checkpoint.
    pub(super) fn is_save_asked(&self) -> bool {
        self.is_asked(RequestedWork::Checkpoint)
    }

    /// Whether somebody asked for another job.
    pub(super) fn is_change_asked(&self) -> bool {
        self.is_asked(RequestedWork::Restart)
    }

    /// Answers what was done, samples unless they are still due.
    pub(super) fn answer_requests(&mut self) -> Result<()> {
        for PendingRequest { id, request } in std::mem::take(&mut self.asked) {
            let is_done = match self.work_of(&request) {
                Ok(RequestedWork::Samples) => !self.progress.is_evaluation_due,
                Ok(RequestedWork::Checkpoint) => true,
                _ => false,
            };
            if is_done {
                self.events.answer(&id, Some(request), None)?;
            }
        }
        Ok(())
    }

    /// There are no samples, for a reason.
    pub(super) fn refuse_samples(&mut self, reason: &str) -> Result<()> {
        for PendingRequest { id, request } in std::mem::take(&mut self.asked) {
            if self.work_of(&request) == Ok(RequestedWork::Samples) {
                self.events.answer(&id, Some(request), Some(reason.into()))?;
            } else {
                self.asked.push(PendingRequest { id, request });
            }
        }
        Ok(())
    }
}

/// Why something is refused, with the remedy.
fn with_hint(problem: &str, hint: &str) -> String {
    if hint.is_empty() { problem.into() } else { format!("{problem}; {hint}") }
}

fn read_changes(run_folder: &Path) -> Vec<KeyChange> {
    let text = read_plain(&run_folder.join(CHANGES)).unwrap_or_default();
    serde_json::from_slice(&text).unwrap_or_default()
}

/// A job with what was asked of the run it resumes, where the job did not change since.
pub(super) fn with_changes_of_before(config: &RunConfig, run_folder: &Path) -> RunConfig {
    let mut job = config.clone();
    for KeyChange { key, before, after } in read_changes(run_folder) {
        if job.value(&key) == before
            && let Ok(changed) = job.with_change(&key, &after)
        {
            job = changed;
        }
    }
    job
}

/// The job that a request asks for; the same if it asks for nothing else.
fn changed(
    config: &RunConfig,
    request: &RunRequest,
) -> std::result::Result<RunConfig, ConfigError> {
    match request {
        RunRequest::Change { key, value } => config.with_change(key, value),
        RunRequest::Sample { prompt: Some(prompt) } => {
            let (key, prompts) = config.sample_prompts();
            if prompts.contains(prompt) {
                return Ok(config.clone());
            }
            let prompts: Vec<&String> = prompts.iter().chain([prompt]).collect();
            // Texts are the same in JSON and TOML.
            let value = serde_json::to_string(&prompts).expect("prompts are texts");
            config.with_change(key, &value)
        }
        _ => Ok(config.clone()),
    }
}

/// Goes on with the changes that were asked for. If that fails before its first step, the run goes on as it was.
pub(super) fn go_on_changed(
    config: &RunConfig,
    device_setup: &DeviceSetup<'_>,
    output: RunOutput<'_>,
) -> Result<RunEnd> {
    let run_folder = &output.folder.path;
    let mut job = config.clone();
    for PendingRequest { request, .. } in output.events.requests()? {
        job = changed(&job, &request).unwrap_or(job);
    }
    let before = read_changes(run_folder);
    write_changes(run_folder, &with_differences(before.clone(), config, &job))?;
    train_into(&job, device_setup, output).or_else(|error| {
        if error.is_cancelled() || refuse_changes(config, &error, output)? == 0 {
            return Err(error);
        }
        write_changes(run_folder, &before)?;
        train_into(config, device_setup, output)
    })
}

/// The changes so far, and those from one job to the next.
fn with_differences(
    mut changes: Vec<KeyChange>,
    from: &RunConfig,
    to: &RunConfig,
) -> Vec<KeyChange> {
    for key in CHANGEABLE.into_iter().filter(|key| from.value(key) != to.value(key)) {
        let after = to.value(key).to_owned();
        if let Some(change) = changes.iter_mut().find(|change| change.key == key) {
            change.after = after;
        } else {
            let before = from.value(key).to_owned();
            changes.push(KeyChange { key: key.to_owned(), before, after });
        }
    }
    changes
}

fn write_changes(run_folder: &Path, changes: &[KeyChange]) -> Result<()> {
    let text = serde_json::to_string_pretty(changes).expect("changes are plain values");
    write_text(&run_folder.join(CHANGES), &text)
}

/// Refuses the changes that are not in effect yet; returns how many.
fn refuse_changes(
    config: &RunConfig,
    error: &TrainerError,
    RunOutput { events, .. }: RunOutput<'_>,
) -> Result<usize> {
    let mut n = 0;
    for PendingRequest { id, request } in events.requests()? {
        let is_change = changed(config, &request).is_ok_and(|job| is_other(&job, config));
        if is_change {
            let reason = with_hint(&error.with_cause(), &error.hint());
            events.answer(&id, Some(request), Some(reason))?;
            n += 1;
        }
    }
    Ok(n)
}

fn is_other(job: &RunConfig, than: &RunConfig) -> bool {
    CHANGEABLE.iter().any(|key| job.value(key) != than.value(key))
}
