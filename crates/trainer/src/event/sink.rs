//! Where a run says what happens: each event gets its time, is written to `events.jsonl`, and is then
//! handed to everybody who listens, in their order. Listeners cannot change a run. Who wants it to stop
//! cancels a token, which the run asks between two pieces of work, and its device at every allocation. Other requests
//! come through the run's folder (`request.rs`), and are answered here.

use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use compute::CancelToken;

use super::inbox::Inbox;
use super::journal::Journal;
use super::{
    EndReason, Event, EventRecord, PendingRequest, Phase, PhaseProgress, ProgressUnit,
    RequestAnswer, RunEnd, RunFailure, RunRequest,
};
use crate::error::{Result, TrainerError};

/// Hears every event. Called from several threads, one at a time; must not emit any itself.
pub type EventListener<'a> = &'a (dyn Fn(&EventRecord) + Sync);

/// What a run emits its events to.
pub struct EventSink<'a> {
    state: Mutex<SinkState>,
    listeners: &'a [EventListener<'a>],
    stop: &'a CancelToken,
    inbox: Inbox,
    begun: Instant,
}

struct SinkState {
    journal: Journal,
    /// How far the phase is that is counted now.
    progress: Option<PhaseProgress>,
    /// Steps taken so far.
    step: u64,
}

impl<'a> EventSink<'a> {
    /// Of the run in a folder, whose file goes on if the run does.
    pub fn open(
        folder: &Path,
        resume: bool,
        listeners: &'a [EventListener<'a>],
        stop: &'a CancelToken,
    ) -> Result<Self> {
        let journal = Journal::open(folder, resume)?;
        let state = Mutex::new(SinkState { journal, progress: None, step: 0 });
        let inbox = Inbox::begin(folder, resume, stop);
        Ok(Self { state, listeners, stop, inbox, begun: Instant::now() })
    }

    /// Writes an event down and hands it on.
    pub fn emit(&self, event: Event) -> Result<()> {
        if matches!(event, Event::End(_) | Event::Failed(_)) {
            // Whoever asked it to stop is answered before it is over.
            self.requests()?;
        }
        let mut state = self.state();
        match &event {
            Event::Begin(begin) => state.step = begin.from_step,
            Event::Step(step) => state.step = step.step,
            _ => {}
        }
        self.dispatch(&mut state, event)
    }

    /// Several, in their order.
    pub fn emit_all(&self, events: impl IntoIterator<Item = Event>) -> Result<()> {
        events.into_iter().try_for_each(|event| self.emit(event))
    }

    /// A phase begins of which so much is to be done; 0 where nobody knows how much.
    pub fn begin_phase(&self, phase: Phase, unit: ProgressUnit, total: u64) -> Result<()> {
        let mut state = self.state();
        state.progress = Some(PhaseProgress { phase: phase.clone(), done: 0, total, unit });
        self.dispatch(&mut state, Event::Phase { name: phase })
    }

    /// So much more of the phase is done, if that is what it counts; answers whether to go on.
    pub fn advance(&self, unit: ProgressUnit, by: u64) -> bool {
        let mut state = self.state();
        if let Some(progress) = state.progress.as_mut().filter(|progress| progress.unit == unit) {
            progress.done += by;
            let event = Event::Progress(progress.clone());
            // What cannot be written now cannot be at the next event, which says so.
            _ = self.dispatch(&mut state, event);
        }
        self.should_continue()
    }

    /// That the run ends before its end: it failed, or was asked to stop before it began.
    pub fn fail(&self, error: &TrainerError) -> Result<()> {
        let step = self.state().step;
        self.emit(if error.is_cancelled() {
            let secs = self.begun.elapsed().as_secs_f64();
            let reason = EndReason::Interrupted;
            Event::End(RunEnd {
                step,
                reason,
                secs,
                peak_bytes: 0,
                energy: None,
                loss: None,
                best: None,
            })
        } else {
            Event::Failed(RunFailure::of(error, step))
        })
    }

    /// Whether nobody asked to stop.
    pub fn should_continue(&self) -> bool {
        !self.stop.is_cancelled()
    }

    /// Who is asked.
    pub fn cancel_token(&self) -> &CancelToken {
        self.stop
    }

    /// What was asked of the run and is still to be done. What needed only to be heard is answered now.
    pub fn requests(&self) -> Result<Vec<PendingRequest>> {
        for answer in self.inbox.answers() {
            self.answer(&answer.id, answer.asked, answer.refused)?;
        }
        Ok(self.inbox.pending())
    }

    /// Whether somebody asked the run to stand still.
    pub fn is_paused(&self) -> bool {
        self.inbox.is_paused()
    }

    /// A request is done, or refused with a reason. It is forgotten when that is written down.
    pub fn answer(
        &self,
        id: &str,
        asked: Option<RunRequest>,
        refused: Option<String>,
    ) -> Result<()> {
        let step = self.state().step;
        let answer = RequestAnswer { step, id: id.into(), asked, refused };
        self.emit(Event::Request(answer))?;
        self.inbox.forget(id);
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, SinkState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All under one lock, so that everybody hears events in the order of the file.
    fn dispatch(&self, state: &mut SinkState, event: Event) -> Result<()> {
        let record = EventRecord { event, time: Some(now()) };
        state.journal.write(&record)?;
        self.listeners.iter().for_each(|listener| listener(&record));
        Ok(())
    }
}

/// Seconds since 1970, to the millisecond.
fn now() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0.0, |since| (since.as_secs_f64() * 1e3).round() / 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::journal;

    /// What a run leaves behind of these, and what a listener heard.
    fn emitted(work: impl Fn(&EventSink<'_>)) -> (Vec<EventRecord>, Vec<EventRecord>) {
        let folder = tempfile::tempdir().unwrap();
        let (heard, stop) = (Mutex::new(Vec::new()), CancelToken::default());
        let listener = |record: &EventRecord| heard.lock().unwrap().push(record.clone());
        work(&EventSink::open(folder.path(), false, &[&listener], &stop).unwrap());
        let mut written = Vec::new();
        journal::read(&folder.path().join(journal::FILE_NAME), |record| written.push(record))
            .unwrap();
        (written, heard.into_inner().unwrap())
    }

    #[test]
    fn listeners_hear_all_progress_and_the_file_has_the_first_and_the_last() {
        let (written, heard) = emitted(|sink| {
            sink.begin_phase(Phase::Images, ProgressUnit::Samples, 500).unwrap();
            for _ in 0..500 {
                // Bytes that are read meanwhile are not what is counted.
                assert!(
                    sink.advance(ProgressUnit::Samples, 1)
                        && sink.advance(ProgressUnit::Bytes, 4096)
                );
            }
        });
        assert_eq!(heard.len(), 501);
        let done = |record: &EventRecord| match &record.event {
            Event::Phase { name } => (name.clone(), 0),
            Event::Progress(PhaseProgress { phase, done, .. }) => (phase.clone(), *done),
            other => panic!("{other:?}"),
        };
        assert_eq!(done(&written[0]), (Phase::Images, 0));
        assert_eq!(done(written.last().unwrap()), (Phase::Images, 500));
        // One a second, whatever the machine.
        let secs = heard.last().unwrap().time.unwrap() - heard[0].time.unwrap();
        assert!(written.len() as f64 <= 3.0 + secs, "{} in {secs} s", written.len());
        assert!(written.iter().all(|record| heard.contains(record)));
    }

    #[test]
    fn what_ends_a_run_early_is_written_down() {
        let last = |error: TrainerError| {
            let (mut written, _) = emitted(|sink| sink.fail(&error).unwrap());
            written.pop().unwrap().event
        };
        let Event::Failed(failed) = last(TrainerError::NoGradients { layers: 3, steps: 4 }) else {
            panic!("an error is a failure")
        };
        assert!(failed.text.contains("none of 3 trained layers"), "{failed:?}");
        assert!(failed.hint.contains("learning_rate"), "{failed:?}");
        let stopped = last(weights::WeightsError::Cancelled.into());
        assert!(
            matches!(stopped, Event::End(RunEnd { reason: EndReason::Interrupted, .. })),
            "{stopped:?}"
        );
    }

    #[test]
    fn a_cancelled_token_stops_whoever_asks() {
        let (folder, stop) = (tempfile::tempdir().unwrap(), CancelToken::default());
        let sink = EventSink::open(folder.path(), false, &[], &stop).unwrap();
        assert!(sink.should_continue() && sink.advance(ProgressUnit::Bytes, 1));
        stop.cancel();
        assert!(!sink.should_continue() && !sink.advance(ProgressUnit::Bytes, 1));
    }
}
