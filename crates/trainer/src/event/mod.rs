//! What happens in a run, in the order in which it happens: the loop says it once, and screens,
//! `events.jsonl` and the report are made of it. A line of that file is one event as JSON.
//!
//! ```text
//! Event ──▶ sink.rs ──▶ journal.rs ──▶ events.jsonl ──▶ History ──▶ report, model card, other programs
//!                  └──▶ listeners ────────────────────▶ History ──▶ terminal
//! events.jsonl, .lock ──▶ state.rs: running, ended, failed or killed
//! events.jsonl ──▶ tail.rs ──▶ whoever watches        requests/ ──▶ inbox.rs ──▶ the loop
//! ```
//!
//! Knows nothing of how a run is planned, trained or shown: those rooms stand above this one.

mod after_run;
pub mod clip_scores;
mod end;
pub mod eta;
pub mod evaluation;
pub mod figures;
pub mod find;
pub mod history;
mod inbox;
pub mod journal;
pub mod lock;
pub mod phase;
pub mod request;
pub mod sink;
pub mod state;
pub mod tail;
pub mod tensorboard;
mod times;
pub mod timesteps;
pub mod warning;

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use machine::Bytes;
use machine::governor::PaceDecision;
use machine::telemetry::Telemetry;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

pub use end::{BestCheckpoint, EndReason, EnergyUsed, RunEnd, RunFailure};
pub use phase::{Phase, PlannedPhase};
pub use request::{PendingRequest, RequestAnswer, RunRequest};
pub use sink::{EventListener, EventSink};
pub use state::{RunState, state};
pub use times::{RepeatedTime, TimeBasis, TimeEstimate};
pub use timesteps::{TenthLoss, TimestepLosses};
pub use warning::{Warning, WarningKind};

use crate::config::batch::BatchSettings;
use crate::config::training_data::is_text;
use crate::data::LeftOut;

/// An event, and when it happened: a line of `events.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EventRecord {
    /// What happened.
    #[serde(flatten)]
    pub event: Event,
    /// Seconds since 1970, to the millisecond. Files of before have it at a beginning only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time: Option<f64>,
}

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// A run begins, or goes on.
    Begin(RunStart),
    /// Something begins that takes a while.
    Phase {
        /// What.
        name: Phase,
    },
    /// How far a phase is; `events.jsonl` has one of these a second.
    Progress(PhaseProgress),
    /// A phase ended that had not been measured before, or took more than before.
    Memory {
        /// Which of the plan's phases.
        phase: Phase,
        /// Bytes at its peak, as planned.
        planned_bytes: usize,
        /// Bytes at its peak, as measured.
        peak_bytes: usize,
    },
    /// A step of the optimizer.
    Step(StepMetrics),
    /// The loss on samples that are not trained on.
    Validation {
        /// Steps taken so far.
        step: u64,
        /// Mean over all of them; of images also over fixed timesteps.
        #[serde(deserialize_with = "null_is_nan")]
        loss: f64,
    },
    /// How a hundred steps went, beside the hundred before.
    Health {
        /// Steps taken so far.
        step: u64,
        /// Mean of the losses.
        loss: f64,
        /// Their standard deviation.
        spread: f64,
        /// How much higher the mean is than before, relative to that.
        trend: f64,
        /// Median norm of the gradients; none where fewer than a hundred are known.
        #[serde(default, alias = "gradient_norm")]
        grad_norm: Option<f64>,
        /// Steps so far whose gradient was not finite.
        skipped: u64,
    },
    /// What the policy of a compressed model did in a step.
    Policy(PolicyMetrics),
    /// What preferences or rewards came to in a step, or in a validation.
    Rewards(RewardMetrics),
    /// Losses of a step's samples, or of a validation's, by their timesteps.
    Timesteps(TimestepLosses),
    /// A sample image was generated.
    #[serde(alias = "sample")]
    ImageSample {
        /// Steps taken so far; 0 is the base alone.
        step: u64,
        /// Relative to the run's folder.
        path: PathBuf,
        /// What was to be drawn.
        prompt: String,
        /// What the noise followed from.
        seed: u64,
        /// The reference images that it was made from, relative to the run's folder.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        references: Vec<PathBuf>,
        /// The clip of which `path` shows some frames, relative to the run's folder.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        clip: Option<PathBuf>,
    },
    /// A sample text was generated.
    #[serde(alias = "written")]
    TextSample {
        /// Steps taken so far; 0 is the base alone.
        step: u64,
        /// What it begins with.
        prompt: String,
        /// What the model added.
        text: String,
        /// What the choices followed from.
        seed: u64,
    },
    /// Everything needed to go on from here was saved.
    Checkpoint {
        /// Steps taken so far.
        step: u64,
        /// Relative to the run's folder.
        path: PathBuf,
    },
    /// Something to look at; the run goes on.
    Warning(Warning),
    /// Some of the images, files or records are not trained on.
    LeftOut(LeftOut),
    /// Something that is good to know.
    Note {
        /// What it is.
        text: String,
    },
    /// Memory ran out: the step is repeated, and the run continues, at a lower memory level.
    #[serde(alias = "tightened")]
    MemoryFallback(MemoryFallback),
    /// The GPU was lost: it is opened again, and the run begins again at its last checkpoint.
    #[serde(alias = "lost")]
    GpuLost(GpuLoss),
    /// The pace changed, or something about it is worth a word.
    #[serde(alias = "paced")]
    Pace(PaceChange),
    /// How the machine felt at a moment.
    #[serde(alias = "felt")]
    Telemetry(MachineSnapshot),
    /// How ranks that train together share their steps.
    Ranks {
        /// The step.
        step: u64,
        /// By rank.
        ranks: Vec<RankShare>,
    },
    /// The adapter was written for another program, and proven to be read by its rules.
    Exported {
        /// The program.
        format: String,
        /// Relative to the run's folder.
        path: PathBuf,
        /// Layers found again.
        layers: usize,
    },
    /// Somebody asked something of the run, and was answered.
    Request(RequestAnswer),
    /// The run is over, or was asked to stop.
    End(RunEnd),
    /// The run ended with an error.
    Failed(RunFailure),
}

/// One of the ranks that train together.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankShare {
    /// The name of its machine.
    pub node: String,
    /// What computes.
    pub device: String,
    /// Samples of a step that it computes from now on.
    pub samples: usize,
    /// Seconds that its part of the last step took.
    pub compute_secs: f64,
    /// Seconds that it waited for the slowest, in the step before.
    pub wait_secs: f64,
    /// Seconds that summing gradients took beyond what backward hid, in the step before.
    pub exchange_secs: f64,
    /// Seconds that it waited for others in all steps since the run began or went on; files of before do not have it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub waited_secs: Option<f64>,
    /// What its machine feels like, where it says so.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub celsius: Option<f64>,
}

/// What a run is about.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunStart {
    /// Of hearth.
    pub version: String,
    /// Of the names in this file: [`FORMAT`]. Files without it are of the first.
    #[serde(default = "first_format")]
    pub format: u32,
    /// The model's folder or file.
    pub base: String,
    /// What computes.
    pub engine: String,
    /// Steps already taken, if the run goes on.
    pub from_step: u64,
    /// Steps it will have taken at its end.
    pub steps: u64,
    /// What samples are called.
    #[serde(default = "images", deserialize_with = "unit")]
    pub unit: String,
    /// Samples that are trained on.
    #[serde(alias = "pictures")]
    pub samples: usize,
    /// Samples that are held out.
    pub held_out: usize,
    /// Layers that are trained, or have an adapter.
    pub layers: usize,
    /// Numbers that are trained.
    pub parameters: usize,
    /// Samples in a step.
    pub samples_per_step: usize,
    /// Tokens of a text in a step, filling included; none of images.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens_per_step: Option<usize>,
    /// What each phase takes at its peak.
    pub phases: Vec<PlannedPhase>,
    /// How the plan does it, in words.
    #[serde(default, alias = "how")]
    pub settings: String,
    /// Seconds of a step, as planned.
    #[serde(default)]
    pub step_secs: f64,
    /// How long each part of the run takes, as planned, and how sure that is.
    #[serde(default)]
    pub times: TimeEstimate,
    /// The most that may be taken.
    pub limit_bytes: usize,
    /// Bytes that were read from files to where they are computed with.
    #[serde(default)]
    pub loaded_in_place_bytes: u64,
    /// Bytes that were read from files into the host's memory, and copied.
    #[serde(default)]
    pub loaded_staged_bytes: u64,
}

/// The version of the names of events, phases, warnings and their fields. Files of all versions are read.
pub const FORMAT: u32 = 2;

fn first_format() -> u32 {
    1
}

/// A decision, whose cause had its tag under another name in files of the first format.
fn decision<'de, D: Deserializer<'de>>(from: D) -> Result<PaceDecision, D::Error> {
    let mut read = Map::<String, Value>::deserialize(from)?;
    if let Some(Value::Object(cause)) = read.get_mut("cause") {
        rename_tag(cause);
    }
    serde_json::from_value(Value::Object(read)).map_err(serde::de::Error::custom)
}

/// What a reason was called in files of the first format; Serde has no other names for tags.
fn rename_tag(object: &mut Map<String, Value>) {
    if let Some(reason) = object.remove("why") {
        object.insert("reason".into(), reason);
    }
}

/// Images had another name in the first format.
fn unit<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let unit = String::deserialize(from)?;
    Ok(if unit == "picture" { images() } else { unit })
}

/// Runs from before there were others were about images.
fn images() -> String {
    "image".into()
}

impl RunStart {
    /// Whether it is about texts.
    pub fn is_text(&self) -> bool {
        is_text(&self.unit)
    }

    /// Bytes that were planned for the largest step; none if no plan names one.
    pub fn step_bytes(&self) -> Option<usize> {
        let steps = self.phases.iter().filter(|phase| matches!(phase.name, Phase::Train(_)));
        steps.map(|phase| phase.peak_bytes).max()
    }
}

/// How far a phase is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PhaseProgress {
    /// Which.
    pub phase: Phase,
    /// So much is done ...
    pub done: u64,
    /// ... of this; 0 where nobody knows how much it will be.
    pub total: u64,
    /// What is counted.
    pub unit: ProgressUnit,
}

impl PhaseProgress {
    /// Nothing is done yet, and nobody said of how much.
    fn begun(phase: Phase) -> Self {
        Self { phase, done: 0, total: 0, unit: ProgressUnit::Samples }
    }
}

/// What progress counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProgressUnit {
    /// Images, or files of texts.
    Samples,
    /// Bytes that are read.
    Bytes,
}

/// A step of the optimizer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// From 1.
    pub step: u64,
    /// Mean over the step's samples.
    #[serde(deserialize_with = "null_is_nan")]
    pub loss: f64,
    /// Of all gradients together, before they are clipped; none where it is not finite.
    #[serde(alias = "gradient_norm")]
    pub grad_norm: Option<f64>,
    /// How far this step went.
    pub learning_rate: f64,
    /// What the loss was multiplied by for backward, in f16.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub loss_scale: Option<f64>,
    /// Whether nothing was changed, since a gradient was not finite.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub is_skipped: bool,
    /// Seconds it took, waiting included and rest left out.
    pub secs: f64,
    /// Seconds of rest, to keep to the pace.
    #[serde(skip_serializing_if = "is_zero", default)]
    pub rest_secs: f64,
    /// Seconds of it that were spent waiting for samples.
    pub wait_secs: f64,
    /// Bytes taken at the worst moment of the step.
    pub peak_bytes: usize,
    /// Kernels that a GPU was given; none on a CPU.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub launches: Option<u64>,
    /// Seconds of it in which a GPU waited for copies of offloaded weights; none where it waited for none.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub copy_wait_secs: Option<f64>,
}

/// What the policy of a compressed model did in a step: how it chose, and what its choices brought.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PolicyMetrics {
    /// From 1.
    pub step: u64,
    /// How open its choices are: the entropy of keeping a position or not, as a share of the largest. 1 is choosing at
    /// random, 0 is certain.
    pub entropy: f64,
    /// The share of kept positions that were kept at the same place of the sequence before. One in N by chance; 1 is a
    /// choice that does not look at the text.
    pub same_places: f64,
    /// The share of kept positions that are the first after a word.
    pub word_ends: f64,
    /// How much less the loss is with the trunk than by the narrow layers alone, in nats per token.
    pub reward: f64,
    /// Standard deviation of the advantages; none where an estimator has none.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub advantage_spread: Option<f64>,
}

/// What preferences or rewards came to in a step, or in a validation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RewardMetrics {
    /// Steps taken so far.
    pub step: u64,
    /// Means by the names that TRL logs them under, such as `rewards/margins`; of a validation those begin with `eval_`.
    #[serde(deserialize_with = "null_values_are_nan")]
    pub metrics: BTreeMap<String, f64>,
}

impl RewardMetrics {
    /// Whether they are those of a validation.
    pub fn is_held_out(&self) -> bool {
        self.metrics.keys().any(|name| name.starts_with("eval_"))
    }
}

/// Another way to compute batches, in less memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryFallback {
    /// Steps taken so far.
    pub step: u64,
    /// The way that did not fit.
    pub from: BatchSettings,
    /// The way from here on.
    pub to: BatchSettings,
    /// Bytes that there was no room for.
    pub asked_bytes: usize,
    /// Bytes that were taken then.
    pub in_use_bytes: usize,
    /// The most that could be.
    pub limit_bytes: usize,
}

impl fmt::Display for MemoryFallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { from, to, asked_bytes, in_use_bytes, limit_bytes, .. } = self;
        let [asked, in_use, limit] =
            [asked_bytes, in_use_bytes, limit_bytes].map(|bytes| Bytes(*bytes as u64));
        write!(
            f,
            "out of memory: asked {asked}, in use {in_use} of {limit}; from here {to} instead of \
             {from}, which is slower; a higher --limit avoids it"
        )
    }
}

/// A GPU that was lost.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuLoss {
    /// Steps taken until then; those since the last checkpoint are taken again.
    pub step: u64,
    /// What was said of it.
    #[serde(alias = "said")]
    pub message: String,
}

impl fmt::Display for GpuLoss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { step, message } = self;
        write!(
            f,
            "the GPU was lost after step {step}: {message}; it is opened again, and the run goes on from its last \
             checkpoint"
        )
    }
}

/// A decision of the governor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PaceChange {
    /// Steps taken so far.
    pub step: u64,
    /// The way of computing from here on.
    #[serde(alias = "how")]
    pub settings: BatchSettings,
    /// Bytes that the process and its device gave back, measured; none where nothing was to be given back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub freed_bytes: Option<u64>,
    /// What was decided, and why.
    #[serde(flatten, deserialize_with = "decision")]
    pub decision: PaceDecision,
}

impl PaceChange {
    /// What was given back, in words; nothing if nothing was to be.
    pub fn freed(&self) -> String {
        match self.freed_bytes {
            Some(0) => "; no memory could be given back".into(),
            Some(freed) => format!("; {} given back", Bytes(freed)),
            None => String::new(),
        }
    }
}

impl fmt::Display for PaceChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PaceDecision { from, to, cause } = &self.decision;
        write!(f, "{cause}")?;
        if to.level != from.level {
            write!(f, "; from here {}", self.settings)?;
        }
        if to.duty != from.duty {
            write!(f, "; at {:.0} % of full pace", 100.0 * to.duty)?;
        }
        match (from.is_paused, to.is_paused) {
            (false, true) => f.write_str("; the run stands still")?,
            (true, false) => f.write_str("; the run goes on")?,
            _ => {}
        }
        f.write_str(&self.freed())
    }
}

/// How the machine felt at a moment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MachineSnapshot {
    /// Steps taken so far.
    pub step: u64,
    /// Seconds since this part of the run began to train.
    pub secs: f64,
    /// Share of time in which it computes.
    pub duty: f64,
    /// What was read.
    #[serde(flatten)]
    pub telemetry: Telemetry,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // Serde passes a reference.
fn is_zero(secs: &f64) -> bool {
    *secs == 0.0
}

/// JSON has no word for what is not finite: it is written as `null`, and read as NaN.
fn null_is_nan<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or(f64::NAN))
}

/// The same for the values of a map.
fn null_values_are_nan<'de, D: Deserializer<'de>>(
    from: D,
) -> Result<BTreeMap<String, f64>, D::Error> {
    let read = BTreeMap::<String, Option<f64>>::deserialize(from)?;
    Ok(read.into_iter().map(|(name, value)| (name, value.unwrap_or(f64::NAN))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn health_from_before_norms_were_told_is_read() {
        let told = |norm: &str| {
            format!(
                r#"{{"event":"health","step":200,"loss":0.5,"spread":0.25,"trend":0.0,{norm}"skipped":1}}"#
            )
        };
        let norm = |line: &str| match serde_json::from_str(line).unwrap() {
            Event::Health { grad_norm, skipped: 1, .. } => grad_norm,
            other => panic!("{other:?}"),
        };
        assert_eq!(norm(&told("")), None);
        assert_eq!(norm(&told(r#""grad_norm":0.5,"#)), Some(0.5));
        assert_eq!(norm(&told(r#""gradient_norm":0.5,"#)), Some(0.5));
    }

    /// Lines as the first format had them, and as the second has them.
    const RENAMED: [(&str, &str); 11] = [
        (
            r#"{"event":"sample","step":1,"path":"a.png","prompt":"a","seed":7}"#,
            r#"{"event":"image_sample","step":1,"path":"a.png","prompt":"a","seed":7}"#,
        ),
        (
            r#"{"event":"written","step":1,"prompt":"a","text":"b","seed":7}"#,
            r#"{"event":"text_sample","step":1,"prompt":"a","text":"b","seed":7}"#,
        ),
        (
            r#"{"event":"tightened","step":1,"from":{"micro":2,"recompute":"none"},"to":{"micro":1,"recompute":"none"},"asked_bytes":3,"in_use_bytes":2,"limit_bytes":4}"#,
            r#"{"event":"memory_fallback","step":1,"from":{"micro_batch":2,"recompute":"none"},"to":{"micro_batch":1,"recompute":"none"},"asked_bytes":3,"in_use_bytes":2,"limit_bytes":4}"#,
        ),
        (
            r#"{"event":"lost","step":1,"said":"gone"}"#,
            r#"{"event":"gpu_lost","step":1,"message":"gone"}"#,
        ),
        (
            r#"{"event":"paced","step":1,"how":{"micro":1,"recompute":"none"},"from":{"rung":0,"duty":1.0,"is_paused":false},"to":{"rung":1,"duty":1.0,"is_paused":false},"cause":{"why":"slow_no_more","drift":1.25,"limit":1.5}}"#,
            r#"{"event":"pace","step":1,"settings":{"micro_batch":1,"recompute":"none"},"from":{"level":0,"duty":1.0,"is_paused":false},"to":{"level":1,"duty":1.0,"is_paused":false},"cause":{"reason":"speed_recovered","drift":1.25,"limit":1.5}}"#,
        ),
        (
            r#"{"event":"felt","step":1,"secs":1.0,"duty":1.0,"memory":null,"stalled":0.5,"level":"critical","heat":{"sensor":"cpu","celsius":80.0,"limit":null},"throttled":null,"watts":null,"on_battery":null}"#,
            r#"{"event":"telemetry","step":1,"secs":1.0,"duty":1.0,"memory":null,"memory_stall":0.5,"pressure_level":"critical","temperature":{"sensor":"cpu","celsius":80.0,"limit":null},"throttled":null,"watts":null,"on_battery":null}"#,
        ),
        (
            r#"{"event":"step","step":1,"loss":0.5,"gradient_norm":1.0,"learning_rate":1.0,"secs":1.0,"wait_secs":0.0,"peak_bytes":1}"#,
            r#"{"event":"step","step":1,"loss":0.5,"grad_norm":1.0,"learning_rate":1.0,"secs":1.0,"wait_secs":0.0,"peak_bytes":1}"#,
        ),
        (
            r#"{"event":"end","step":1,"why":"finished","secs":1.0,"peak_bytes":1}"#,
            r#"{"event":"end","step":1,"reason":"finished","secs":1.0,"peak_bytes":1}"#,
        ),
        (
            r#"{"event":"memory","phase":"pictures","planned_bytes":1,"peak_bytes":1}"#,
            r#"{"event":"memory","phase":"images","planned_bytes":1,"peak_bytes":1}"#,
        ),
        (r#"{"event":"phase","name":"show"}"#, r#"{"event":"phase","name":"sample"}"#),
        (
            r#"{"event":"begin","version":"0.1.0","format":2,"base":"b","engine":"cpu","from_step":0,"steps":1,"unit":"picture","pictures":1,"held_out":0,"layers":1,"parameters":1,"samples_per_step":1,"phases":[],"how":"1 at once","step_secs":1.0,"times":{},"limit_bytes":1}"#,
            r#"{"event":"begin","version":"0.1.0","format":2,"base":"b","engine":"cpu","from_step":0,"steps":1,"unit":"image","samples":1,"held_out":0,"layers":1,"parameters":1,"samples_per_step":1,"phases":[],"settings":"1 at once","step_secs":1.0,"times":{},"limit_bytes":1}"#,
        ),
    ];

    #[test]
    fn lines_of_the_first_format_are_read() {
        for (old, new) in RENAMED {
            let read = |line: &str| serde_json::from_str::<EventRecord>(line).unwrap();
            assert_eq!(read(old), read(new), "{old}");
            // As it is written today; times that were not there have their default.
            if !new.contains("\"begin\"") {
                assert_eq!(serde_json::to_string(&read(old)).unwrap(), new);
            }
        }
        for (old, new) in [
            ("loss_scattered\",\"steps\":1,\"spread\":1.0,\"mean\":1.0", "loss_unstable"),
            (
                "no_room_for_samples\",\"asked_bytes\":1,\"in_use_bytes\":1,\"limit_bytes\":1",
                "no_memory_for_samples",
            ),
            ("checkpoint_passed_over\",\"problem\":\"broken", "checkpoint_skipped"),
            ("diverged\",\"why\":\"grown\",\"now\":9.0,\"first\":1.0", "diverged"),
        ] {
            let end = if old.ends_with("broken") { "\"" } else { "" };
            let line =
                format!("{{\"event\":\"warning\",\"step\":1,\"text\":\"\",\"kind\":\"{old}{end}}}");
            match serde_json::from_str(&line).unwrap() {
                Event::Warning(warning) => assert_eq!(warning.kind.name(), new, "{line}"),
                other => panic!("{other:?}"),
            }
        }
    }
}
