//! Whether a run ends, and whether it is saved: a pure function of its status; the loop acts on it.

use crate::config::Switch;
use crate::config::output::OutputConfig;
use crate::event::EndReason;

/// The status of a run after a step: all that its end and its checkpoints are decided from.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RunStatus {
    /// Steps taken.
    pub step: u64,
    /// Steps that the run is to take.
    pub total_steps: u64,
    /// Its steps are not finite any more.
    pub is_unhealthy: bool,
    /// The held-out loss has stopped falling, for longer than the job allows.
    pub is_plateau: bool,
    /// Somebody asked it to stop.
    pub is_interrupted: bool,
    /// Validation and samples of the step were abandoned when that was asked.
    pub is_evaluation_due: bool,
    /// Somebody asked for a checkpoint.
    pub is_save_asked: bool,
    /// Somebody asked for another job, see `requests.rs`.
    pub is_change_asked: bool,
    /// No held-out loss was lower than the one just measured.
    pub is_best: bool,
}

/// What the loop does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LoopDecision {
    /// It ends, for this reason.
    pub end: Option<EndReason>,
    /// It is saved.
    pub save: Option<SaveReason>,
}

/// What a checkpoint is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SaveReason {
    /// To resume from.
    Latest,
    /// The lowest held-out loss, and nothing else.
    Best,
}

/// Decides whether a run ends and whether it is saved. Only here, and from the status alone: machines that train
/// together would share it, and all do the same. A run that ends is saved.
pub(super) fn decide(status: RunStatus, output: &OutputConfig) -> LoopDecision {
    let RunStatus { step, total_steps, is_unhealthy, is_plateau, is_best, .. } = status;
    let RunStatus { is_interrupted, is_evaluation_due, .. } = status;
    let RunStatus { is_save_asked, is_change_asked, .. } = status;
    let reasons = [
        (is_unhealthy, EndReason::Unhealthy),
        // A last step whose evaluation is missing is finished by the run that resumes.
        (is_interrupted && is_evaluation_due, EndReason::Interrupted),
        (is_plateau, EndReason::Plateau),
        (step >= total_steps, EndReason::Finished),
        (is_interrupted, EndReason::Interrupted),
        (is_change_asked, EndReason::Changed),
    ];
    let end = reasons.into_iter().find_map(|(holds, why)| holds.then_some(why));
    let is_save_due = is_save_asked || is_due(output.save_every, step);
    let save = if end.is_some() || (step > 0 && is_save_due) {
        Some(SaveReason::Latest)
    } else {
        (output.keep_best && is_best).then_some(SaveReason::Best)
    };
    LoopDecision { end, save }
}

/// Whether something that is done every so many steps is due.
pub(super) fn is_due(every: Switch<u64>, step: u64) -> bool {
    match every {
        Switch::On(every) => step.is_multiple_of(every),
        Switch::Off => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RawConfig;

    /// What is decided at step 7 of 10, saving every 5 steps, if these hold.
    fn decided(change: impl Fn(&mut RunStatus), keep_best: bool) -> LoopDecision {
        let mut raw = RawConfig::empty();
        for argument in ["base.path=x", "data.images=y", "output.save_every=5"] {
            raw.set(argument).unwrap();
        }
        raw.set(&format!("output.keep_best={keep_best}")).unwrap();
        let mut status = RunStatus { step: 7, total_steps: 10, ..RunStatus::default() };
        change(&mut status);
        decide(status, &raw.resolve().unwrap().output)
    }

    #[test]
    fn a_run_ends_and_is_saved_by_its_status() {
        use EndReason::{Changed, Finished, Interrupted, Plateau, Unhealthy};
        type Change = fn(&mut RunStatus);
        let cases: [(Change, Option<EndReason>, Option<SaveReason>); 15] = [
            (|_| {}, None, None),
            (|s| s.step = 5, None, Some(SaveReason::Latest)),
            (|s| s.is_best = true, None, Some(SaveReason::Best)),
            (|s| (s.step, s.is_best) = (5, true), None, Some(SaveReason::Latest)),
            (|s| s.step = 10, Some(Finished), Some(SaveReason::Latest)),
            (|s| s.step = 11, Some(Finished), Some(SaveReason::Latest)),
            (|s| s.is_interrupted = true, Some(Interrupted), Some(SaveReason::Latest)),
            // A run that was interrupted in its last step is done.
            (|s| (s.step, s.is_interrupted) = (10, true), Some(Finished), Some(SaveReason::Latest)),
            // Unless its evaluation is missing.
            (
                |s| (s.step, s.is_interrupted, s.is_evaluation_due) = (10, true, true),
                Some(Interrupted),
                Some(SaveReason::Latest),
            ),
            (|s| s.step = 0, None, None),
            (|s| s.is_save_asked = true, None, Some(SaveReason::Latest)),
            (|s| s.is_change_asked = true, Some(Changed), Some(SaveReason::Latest)),
            (
                |s| (s.is_interrupted, s.is_change_asked) = (true, true),
                Some(Interrupted),
                Some(SaveReason::Latest),
            ),
            (|s| (s.step, s.is_plateau) = (10, true), Some(Plateau), Some(SaveReason::Latest)),
            (
                |s| (s.is_plateau, s.is_unhealthy) = (true, true),
                Some(Unhealthy),
                Some(SaveReason::Latest),
            ),
        ];
        for (index, (change, end, save)) in cases.into_iter().enumerate() {
            assert_eq!(decided(change, true), LoopDecision { end, save }, "{index}");
            let save = save.filter(|save| *save != SaveReason::Best);
            assert_eq!(decided(change, false), LoopDecision { end, save }, "{index}");
        }
    }
}
