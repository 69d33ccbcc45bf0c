//! The log of a run: events in words, but for those that curves and bars show better.

use serde::Serialize;
use trainer::event::{Event, Warning};
use trainer::report::format::number;

/// A line of the log.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LogLine {
    /// Of `events.jsonl`.
    pub line: u64,
    /// Seconds since 1970.
    pub time: f64,
    pub level: LogLevel,
    pub text: String,
}

/// How much of a reader's attention a line deserves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LogLevel {
    Info,
    Warning,
    Error,
}

/// What the log says of an event.
pub fn log_line(line: u64, time: f64, event: &Event) -> Option<LogLine> {
    let (level, text) = words(event)?;
    Some(LogLine { line, time, level, text })
}

fn words(event: &Event) -> Option<(LogLevel, String)> {
    let info = |text: String| Some((LogLevel::Info, text));
    let warning = |text: String| Some((LogLevel::Warning, text));
    match event {
        Event::Begin(begin) if begin.from_step > 0 => {
            info(format!("continues after step {} of {}", begin.from_step, begin.steps))
        }
        Event::Begin(begin) => info(format!("begins: {} steps on {}", begin.steps, begin.engine)),
        Event::Phase { name } => info(format!("phase {name}")),
        Event::Validation { step, loss } => {
            info(format!("step {step}: held-out loss {}", number(*loss)))
        }
        Event::ImageSample { step, prompt, .. } => {
            info(format!("step {step}: sample image, {prompt}"))
        }
        Event::TextSample { step, prompt, .. } => {
            info(format!("step {step}: sample text, {prompt}"))
        }
        Event::Checkpoint { step, path } => {
            info(format!("step {step}: checkpoint {}", path.display()))
        }
        Event::Warning(Warning { step, kind }) => {
            let hint = kind.hint().map_or_else(String::new, |hint| format!("; hint: {hint}"));
            warning(format!("step {step}: {kind}{hint}"))
        }
        Event::LeftOut(left_out) => warning(left_out.to_string()),
        Event::Note { text } => info(text.clone()),
        Event::MemoryFallback(fallback) => warning(fallback.to_string()),
        Event::GpuLost(lost) => warning(lost.to_string()),
        Event::Pace(paced) => info(format!("step {}: {paced}", paced.step)),
        Event::Exported { format, path, .. } => {
            info(format!("wrote {} for {format}", path.display()))
        }
        Event::Request(answer) if answer.refused.is_some() => warning(answer.to_string()),
        Event::Request(answer) => info(answer.to_string()),
        Event::End(end) => info(format!("ended after step {}: {}", end.step, reason(end.reason))),
        Event::Failed(failed) => {
            Some((LogLevel::Error, format!("failed: {}; hint: {}", failed.text, failed.hint)))
        }
        Event::Progress(_)
        | Event::Memory { .. }
        | Event::Step(_)
        | Event::Health { .. }
        | Event::Telemetry(_)
        | Event::Ranks { .. }
        | Event::Policy(_)
        | Event::Rewards(_)
        | Event::Timesteps(_) => None,
    }
}

/// As `events.jsonl` has it.
pub fn reason(reason: trainer::event::EndReason) -> String {
    let value = serde_json::to_value(reason).unwrap_or_default();
    value.as_str().unwrap_or_default().into()
}
