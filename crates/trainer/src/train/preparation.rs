//! Events while images or texts are prepared.

use crate::data::Findings;
use crate::error::Result;
use crate::event::{Event, EventSink, ProgressUnit, Warning, WarningKind};
use crate::progress;

/// Emits the problems found in images or texts, one event for each reason.
pub(super) fn emit_findings(events: &EventSink<'_>, findings: Findings) -> Result<()> {
    let Findings { left_out, warnings, notes } = findings;
    let warning =
        |problem| Event::Warning(Warning { step: 0, kind: WarningKind::Data { problem } });
    let left_out = left_out.into_iter().map(Event::LeftOut);
    let notes = notes.into_iter().map(|text| Event::Note { text });
    events.emit_all(left_out.chain(warnings.into_iter().map(warning)).chain(notes))
}

/// Emits the progress of preparation; returns whether to continue.
pub(super) fn emit_progress(events: &EventSink<'_>, event: progress::ProgressEvent) -> bool {
    match event {
        progress::ProgressEvent::Phase { name, total } => {
            let unit = if total == 0 { ProgressUnit::Bytes } else { ProgressUnit::Samples };
            // If this cannot be written, neither can the next event, which returns the error.
            _ = events.begin_phase(name.into(), unit, total as u64);
            events.should_continue()
        }
        progress::ProgressEvent::Done => events.advance(ProgressUnit::Samples, 1),
        progress::ProgressEvent::Loaded(bytes) => events.advance(ProgressUnit::Bytes, bytes),
    }
}
