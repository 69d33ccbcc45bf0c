//! What the page is told of a run, as JSON: a summary for lists and live numbers, and all of it once, when the page
//! opens the run.

use std::io::Read;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use trainer::config::{ChangeableSetting, RawConfig};
use trainer::event::figures::{loss_window, mean_loss};
use trainer::event::history::History;
use trainer::event::{
    MachineSnapshot, Phase, PolicyMetrics, RewardMetrics, RunStart, RunState, StepMetrics,
};
use weights::plain_file::open_plain;

use super::fold::RunFold;
use super::follow::FollowedRun;
use super::log::reason;
use super::series::{CurvePoint, CurvePoints, minutes, smoothed};

/// Steps that the time of a step is the median of.
const RECENT: usize = 50;
/// Warnings that are shown.
const WARNINGS: usize = 50;
/// Samples that are shown, the latest. Chosen: a gallery that a phone can still scroll.
const SAMPLES: usize = 600;
/// Bytes of a job that are shown.
const CONFIG_BYTES: u64 = 64 << 10;

/// Where a run stands, what it came to so far, and how the machine feels.
pub fn summary(run: &FollowedRun, fold: &RunFold, is_held: bool) -> Value {
    let history = &fold.history;
    let begin = history.begin();
    let felt = history.snapshots.last().map(|(_, felt)| felt);
    let step = history.steps.last();
    let window = loss_window(begin.map_or(0, |begin| begin.steps));
    json!({
        "id": run.id,
        "name": run.name,
        "folder": run.folder.display().to_string(),
        "state": state(history, is_held, fold.is_paused),
        "step": history.last_step(),
        "steps": begin.map(|begin| begin.steps),
        "time": fold.time,
        "began": history.parts.first().and_then(|part| part.time),
        "eta_secs": eta_secs(fold).filter(|_| is_held),
        "loss": mean_loss(&history.steps, window),
        "loss_window": window,
        "validation": history.validations.last().map(|(step, loss)| json!({ "step": step, "loss": loss })),
        "best_validation": best(history),
        "step_secs": recent_secs(&history.steps),
        "planned_step_secs": begin.map(|begin| begin.step_secs).filter(|secs| *secs > 0.0),
        "learning_rate": step.map(|step| step.learning_rate),
        "grad_norm": step.and_then(|step| step.grad_norm),
        "samples_per_step": begin.map(|begin| begin.samples_per_step),
        "secs": fold.totals.secs,
        "rest_secs": fold.totals.rest_secs,
        "wait_secs": fold.totals.wait_secs,
        "copy_wait_secs": fold.totals.copy_wait_secs,
        "tokens_per_step": begin.and_then(|begin| begin.tokens_per_step),
        "not_finite": fold.totals.not_finite,
        "health": fold.health,
        "checkpoint": fold.checkpoint.map(|(time, step)| json!({ "time": time, "step": step })),
        "progress": history.progress,
        "memory": memory(fold),
        "device": {
            "engine": begin.map(|begin| &begin.engine),
            "duty": felt.map(|felt| felt.duty),
            "telemetry": felt.map(|felt| &felt.telemetry),
            "joules": Some(fold.totals.joules).filter(|joules| *joules > 0.0),
            "throttled_secs": fold.totals.throttled_secs,
        },
        "pace": history.pace_changes.last().map(|(step, text)| json!({ "step": step, "text": text })),
        "ranks": history.ranks,
        "n_warnings": history.warnings.len(),
        "is_text": begin.is_some_and(RunStart::is_text),
    })
}

/// Seconds to the end, from the last event on.
pub fn eta_secs(fold: &RunFold) -> Option<f64> {
    let since = (now() - fold.time).max(0.0);
    // What is asked to stand still takes as long as it stands.
    let since = if fold.is_paused { 0.0 } else { since };
    fold.eta.as_ref()?.left_secs().map(|left| (left - since).max(0.0).round())
}

/// Seconds since 1970.
pub fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

fn state(history: &History, is_held: bool, is_paused: bool) -> Value {
    match history.state(is_held) {
        Some(RunState::Running { phase, .. }) => {
            let kind = if is_paused { "paused" } else { "running" };
            json!({ "kind": kind, "phase": phase })
        }
        Some(RunState::Ended(why)) => json!({ "kind": "ended", "reason": reason(why) }),
        Some(RunState::Failed(failed)) => {
            json!({ "kind": "failed", "text": failed.text, "hint": failed.hint })
        }
        Some(RunState::Killed { .. }) => json!({ "kind": "killed" }),
        None => json!({ "kind": "empty" }),
    }
}

/// One word for where a run stands, for metrics.
pub fn state_word(history: &History, is_held: bool, is_paused: bool) -> String {
    state(history, is_held, is_paused)["kind"].as_str().unwrap_or_default().into()
}

fn best(history: &History) -> Value {
    let lowest = history.validations.iter().min_by(|a, b| a.1.total_cmp(&b.1));
    lowest.map_or(Value::Null, |(step, loss)| json!({ "step": step, "loss": loss }))
}

/// Of the middle one of the last steps: one that was held up says little.
pub fn recent_secs(steps: &[StepMetrics]) -> Option<f64> {
    let last = &steps[steps.len().saturating_sub(RECENT)..];
    let mut secs: Vec<f64> = last.iter().map(|step| step.secs).collect();
    secs.sort_by(f64::total_cmp);
    secs.get(secs.len() / 2).copied()
}

/// Phases as planned, with what they took; and now.
fn memory(fold: &RunFold) -> Value {
    let history = &fold.history;
    let Some(begin) = history.begin() else { return Value::Null };
    let taken = |name: &Phase| history.phases.iter().find(|phase| phase.name == *name);
    let planned = begin.phases.iter().map(|phase| {
        let peak = taken(&phase.name).map(|taken| taken.peak_bytes);
        json!({ "name": phase.name, "planned_bytes": phase.peak_bytes, "peak_bytes": peak })
    });
    json!({
        "limit_bytes": begin.limit_bytes,
        "peak_bytes": fold.totals.peak_bytes,
        "phases": planned.collect::<Vec<_>>(),
    })
}

/// All that a page shows of a run.
pub fn snapshot(run: &FollowedRun, fold: &RunFold, is_held: bool) -> Value {
    let history = &fold.history;
    let latest = |n: usize| n.saturating_sub(SAMPLES);
    let images = fold.images.iter().skip(latest(fold.images.len())).map(|(line, image)| {
        json!({ "file": line, "step": image.step, "prompt": image.prompt, "seed": image.seed,
            "has_clip": image.clip.is_some() })
    });
    let texts = fold.texts.iter().skip(latest(fold.texts.len())).map(|(line, text)| {
        json!({ "line": line, "step": text.step, "prompt": text.prompt, "text": text.text })
    });
    let warnings = history.warnings.iter().rev().take(WARNINGS);
    json!({
        "summary": summary(run, fold, is_held),
        "begin": history.begin(),
        "parts": history.parts.iter().map(|part| json!({
            "time": part.time, "from_step": part.begin.from_step, "last_step": part.last_step,
        })).collect::<Vec<_>>(),
        "series": series(history),
        "images": images.collect::<Vec<_>>(),
        "texts": texts.collect::<Vec<_>>(),
        "warnings": warnings.map(|(step, text)| json!({ "step": step, "text": text })).collect::<Vec<_>>(),
        "log": fold.log,
        "config": config(&run.folder),
        "changeable": changeable(&run.folder),
        "answers": fold.answers.iter().map(|it| json!({ "id": it.id, "refused": it.refused })).collect::<Vec<_>>(),
    })
}

/// The job as decided.
fn config(folder: &Path) -> Option<String> {
    let mut text = String::new();
    let file = open_plain(&folder.join("config.toml")).ok()?;
    file.take(CONFIG_BYTES).read_to_string(&mut text).ok()?;
    Some(text)
}

/// The settings that may change while the run works.
fn changeable(folder: &Path) -> Vec<ChangeableSetting> {
    let job = RawConfig::from_file(&folder.join("config.toml")).and_then(RawConfig::resolve);
    job.map_or_else(|_| Vec::new(), |config| config.changeable())
}

/// The curves.
pub fn series(history: &History) -> Value {
    let steps = &history.steps;
    let minutes = minutes(steps);
    let curve = |value: &dyn Fn(usize) -> Option<f64>| {
        let point = |at: usize| {
            Some(CurvePoint { step: steps[at].step, minutes: minutes[at], value: value(at)? })
        };
        CurvePoints::of(&(0..steps.len()).filter_map(point).collect::<Vec<_>>())
    };
    let smooth = smoothed(steps, loss_window(history.begin().map_or(0, |begin| begin.steps)));
    let at_step = |step: u64| {
        let n = steps.partition_point(|it| it.step <= step);
        if n == 0 { 0.0 } else { minutes[n - 1] }
    };
    let validations = history.validations.iter();
    let held_out = validations.map(|(step, loss)| CurvePoint {
        step: *step,
        minutes: at_step(*step),
        value: *loss,
    });
    let policy = |value: &dyn Fn(&PolicyMetrics) -> Option<f64>| {
        let point = |policy: &PolicyMetrics| {
            let minutes = at_step(policy.step);
            Some(CurvePoint { step: policy.step, minutes, value: value(policy)? })
        };
        CurvePoints::of(&history.policy.iter().filter_map(point).collect::<Vec<_>>())
    };
    let reward = |name: &str| {
        let point = |rewards: &RewardMetrics| {
            let minutes = at_step(rewards.step);
            Some(CurvePoint { step: rewards.step, minutes, value: *rewards.metrics.get(name)? })
        };
        CurvePoints::of(&history.rewards.iter().filter_map(point).collect::<Vec<_>>())
    };
    let felt = |value: &dyn Fn(&MachineSnapshot) -> Option<f64>| {
        let mut points: Vec<CurvePoint> = Vec::new();
        for (minutes, felt) in &history.snapshots {
            // What was felt in steps that were lost with a break would lead the curve backwards.
            while points.last().is_some_and(|last| last.step > felt.step) {
                points.pop();
            }
            let value = value(felt);
            points.extend(value.map(|value| CurvePoint {
                step: felt.step,
                minutes: *minutes,
                value,
            }));
        }
        CurvePoints::of(&points)
    };
    json!({
        "loss": curve(&|at| Some(steps[at].loss)),
        "smoothed": curve(&|at| Some(smooth[at])),
        "held_out": CurvePoints::of(&held_out.collect::<Vec<_>>()),
        "step_secs": curve(&|at| Some(steps[at].secs)),
        "learning_rate": curve(&|at| Some(steps[at].learning_rate)),
        "grad_norm": curve(&|at| steps[at].grad_norm),
        "peak_bytes": curve(&|at| Some(steps[at].peak_bytes as f64)),
        "process_bytes": felt(&|felt| felt.telemetry.memory.map(|memory| memory.held as f64)),
        "celsius": felt(&|felt| felt.telemetry.temperature.as_ref().map(|it| it.celsius)),
        "watts": felt(&|felt| felt.telemetry.watts),
        "duty": felt(&|felt| Some(felt.duty)),
        "gpu_utilisation": felt(&|felt| felt.telemetry.gpu_utilisation),
        "memory_utilisation": felt(&|felt| felt.telemetry.memory_utilisation),
        "entropy": policy(&|policy| Some(policy.entropy)),
        "word_ends": policy(&|policy| Some(policy.word_ends)),
        "same_places": policy(&|policy| Some(policy.same_places)),
        "rewards/chosen": reward("rewards/chosen"),
        "rewards/rejected": reward("rewards/rejected"),
        "rewards/margins": reward("rewards/margins"),
        "rewards/accuracies": reward("rewards/accuracies"),
        "completion_reward": reward("reward"),
        "frac_reward_zero_std": reward("frac_reward_zero_std"),
        "reward": policy(&|policy| Some(policy.reward)),
    })
}

#[cfg(test)]
mod tests {
    use super::super::fold::tests::{BEGIN, folded, step};
    use super::*;

    #[test]
    fn a_summary_says_where_a_run_stands_and_what_it_came_to() {
        let run = FollowedRun::new("1".into(), "<b>run".into(), "nowhere".into());
        let steps = [step(1, "1.0"), step(2, "0.5")];
        let memory =
            r#"{"event":"memory","phase":"load","planned_bytes":5,"peak_bytes":4,"time":11}"#;
        let lines = [BEGIN, memory, &steps[0], &steps[1]];
        let fold = folded(&lines);
        let told = summary(&run, &fold, true);
        assert_eq!(told["state"]["kind"], "running");
        assert_eq!(
            [&told["step"], &told["steps"], &told["name"]],
            [&json!(2), &json!(9), &json!("<b>run")]
        );
        assert_eq!(told["memory"]["phases"][0]["peak_bytes"], 4);
        assert_eq!(told["memory"]["phases"][1]["peak_bytes"], Value::Null);
        assert_eq!(told["step_secs"], 0.3);
        assert_eq!(summary(&run, &fold, false)["state"]["kind"], "killed");
        let pause = r#"{"event":"request","step":2,"id":"1","asked":{"request":"pause"}}"#;
        let paused = folded(&[&lines[..], &[pause]].concat());
        assert_eq!(summary(&run, &paused, true)["state"]["kind"], "paused");
        let all = snapshot(&run, &fold, true);
        assert_eq!(all["series"]["loss"]["values"], json!([1.0, 0.5]));
        assert_eq!(all["series"]["loss"]["minutes"][0], json!(0.005));
    }
}
