//! Where a run stands, from its folder alone: what it wrote last, and whether a program holds its lock.
//! A program that was killed writes nothing, and its lock is free.

use std::path::Path;

use super::history::{Ending, History};
use super::{EndReason, Phase, RunFailure, lock};
use crate::error::Result;

/// Where a run stands.
#[derive(Clone, Debug, PartialEq)]
pub enum RunState {
    /// A program works on it.
    Running {
        /// What is done; none while it trains.
        phase: Option<Phase>,
        /// Steps taken so far.
        step: u64,
    },
    /// It came to an end of its own.
    Ended(EndReason),
    /// It ended with an error.
    Failed(RunFailure),
    /// The program is gone, and said nothing.
    Killed {
        /// Steps taken until then.
        step: u64,
    },
}

/// Where the run in a folder stands; nothing if there is none.
pub fn state(folder: &Path) -> Result<Option<RunState>> {
    // Before the file is read: a run that ends meanwhile has then written how.
    let is_held = lock::is_held(folder);
    Ok(History::read(folder)?.state(is_held))
}

impl History {
    /// Where the run stands, if its lock is held or not; nothing if nothing ever happened.
    pub fn state(&self, is_held: bool) -> Option<RunState> {
        let step = self.last_step();
        if is_held && !self.is_over() {
            let phase = self.progress.as_ref().map(|progress| progress.phase.clone());
            return Some(RunState::Running { phase, step });
        }
        match self.ending() {
            Some(Ending::End(end)) => Some(RunState::Ended(end.reason)),
            Some(Ending::Failed(failed)) => Some(RunState::Failed(failed.clone())),
            Some(Ending::Lost(_)) | None => self.is_any().then_some(RunState::Killed { step }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::event::journal;
    use crate::event::lock::RunLock;

    const OPEN: &str = r#"{"event":"phase","name":"open","time":1.0}"#;
    const LOAD: &str = r#"{"event":"phase","name":"load","time":2.0}"#;
    const STEP: &str = r#"{"event":"step","step":3,"loss":0.5,"grad_norm":1.0,"learning_rate":1.0,
        "secs":1.0,"wait_secs":0.0,"peak_bytes":1,"time":4.0}"#;
    const LOST: &str = r#"{"event":"lost","step":3,"said":"gone","time":5.0}"#;
    const FINISHED: &str = r#"{"event":"end","step":3,"why":"finished","secs":1.0,"peak_bytes":1}"#;
    const STOPPED: &str =
        r#"{"event":"end","step":0,"why":"interrupted","secs":1.0,"peak_bytes":0}"#;
    const FAILED: &str = r#"{"event":"failed","step":3,"text":"no room","hint":"more","time":6.0}"#;
    const BEGIN: &str = r#"{"event":"begin","version":"","base":"","engine":"","from_step":0,"steps":9,
        "samples":1,"held_out":0,"layers":1,"parameters":1,"samples_per_step":1,"phases":[],
        "limit_bytes":1,"time":3}"#;

    /// Where a run of these lines stands while its lock is held, and when it is free.
    fn stands(lines: &[&str]) -> [Option<RunState>; 2] {
        let folder = tempfile::tempdir().unwrap();
        let text: String = lines.iter().map(|line| line.replace('\n', "") + "\n").collect();
        fs::write(folder.path().join(journal::FILE_NAME), text).unwrap();
        let lock = RunLock::take(folder.path()).unwrap();
        let held = state(folder.path()).unwrap();
        drop(lock);
        [held, state(folder.path()).unwrap()]
    }

    fn running(phase: Option<Phase>, step: u64) -> RunState {
        RunState::Running { phase, step }
    }

    #[test]
    fn what_was_said_last_and_the_lock_tell_where_a_run_stands() {
        let (finished, stopped) =
            (RunState::Ended(EndReason::Finished), RunState::Ended(EndReason::Interrupted));
        let killed = |step| RunState::Killed { step };
        let failed = RunFailure { step: 3, text: "no room".into(), hint: "more".into() };
        let failed = RunState::Failed(failed);
        let (open, load) = (Some(Phase::Open), Some(Phase::Load));
        let cases: [(&[&str], RunState, RunState); 11] = [
            (&[OPEN], running(open.clone(), 0), killed(0)),
            (&[OPEN, LOAD], running(load.clone(), 0), killed(0)),
            (&[OPEN, LOAD, BEGIN, STEP], running(None, 3), killed(3)),
            (&[OPEN, LOAD, BEGIN, STEP, LOST], running(None, 3), killed(3)),
            (&[OPEN, LOAD, BEGIN, STEP, FINISHED], finished.clone(), finished.clone()),
            (&[OPEN, LOAD, BEGIN, STEP, FAILED], failed.clone(), failed.clone()),
            (&[OPEN, LOAD, FAILED], failed.clone(), failed),
            (&[OPEN, LOAD, STOPPED], stopped.clone(), stopped),
            // A program that works on it again, and one that failed or was killed before it could.
            (&[OPEN, BEGIN, STEP, FINISHED, OPEN], running(open, 3), finished.clone()),
            (&[OPEN, BEGIN, STEP, OPEN, LOAD, FAILED], killed(3), killed(3)),
            // Of before there was a first line: the run goes on when anything follows its end.
            (&[BEGIN, STEP, FINISHED, LOAD], running(load, 3), finished),
        ];
        for (lines, held, free) in cases {
            assert_eq!(stands(lines), [Some(held), Some(free)], "{lines:#?}");
        }
        assert_eq!(stands(&[]), [Some(running(None, 0)), None]);
    }
}
