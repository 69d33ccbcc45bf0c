//! `/metrics` for Prometheus: the text format 0.0.4, and OpenMetrics 1.0 for who asks for it. Base units; counters end
//! in `_total`. A figure that is not known is not there. A run that was over an hour ago has its state and nothing else:
//! Prometheus has the rest.

use std::fmt::Write;

use trainer::event::figures::{loss_window, mean_loss};

use super::fold::{RunFold, STEP_BUCKETS};
use super::follow::FollowedRun;
use super::view::{eta_secs, now, state_word};

/// Seconds after its last event for which a run has all its figures.
const RECENT_SECS: f64 = 3600.0;
/// Where a run can stand; each is a series, so that alerts see a change.
const STATES: [&str; 6] = ["running", "paused", "ended", "failed", "killed", "empty"];

/// What is exposed. The order is that of the page.
#[rustfmt::skip]
const FAMILIES: [MetricFamily; 24] = [
    family("hearth_run_info", MetricKind::Gauge, "What a run is: model and version."),
    family("hearth_run_state", MetricKind::Gauge, "1 for the state that a run is in, 0 for the others."),
    family("hearth_step", MetricKind::Counter, "Optimizer steps taken."),
    family("hearth_steps_planned", MetricKind::Gauge, "Optimizer steps that the run will have taken at its end."),
    family("hearth_loss", MetricKind::Gauge, "Loss: train is that of the last step, smoothed the mean of the last ones, held_out that of samples not trained on."),
    family("hearth_step_seconds", MetricKind::Histogram, "Seconds of a step, rest left out."),
    family("hearth_samples", MetricKind::Counter, "Samples trained on."),
    family("hearth_tokens", MetricKind::Counter, "Tokens trained on."),
    family("hearth_learning_rate", MetricKind::Gauge, "Learning rate of the last step."),
    family("hearth_gradient_norm", MetricKind::Gauge, "Norm of all gradients, before clipping."),
    family("hearth_nonfinite", MetricKind::Counter, "Steps whose loss or gradient was NaN or infinite."),
    family("hearth_memory_bytes", MetricKind::Gauge, "Memory: the plan and the measured peak of each phase, what the process has in use, the limit."),
    family("hearth_device_temperature_celsius", MetricKind::Gauge, "The sensor that is nearest to its limit."),
    family("hearth_device_utilisation_ratio", MetricKind::Gauge, "Share of time in which a GPU computes, or its memory is read or written."),
    family("hearth_copy_wait_seconds", MetricKind::Counter, "Time that a GPU waited for copies of offloaded weights."),
    family("hearth_device_power_watts", MetricKind::Gauge, "Power drawn."),
    family("hearth_energy_joules", MetricKind::Counter, "Energy, as far as power was known."),
    family("hearth_pace_ratio", MetricKind::Gauge, "Share of time in which the run computes."),
    family("hearth_throttled_seconds", MetricKind::Counter, "Time in which hardware lowered its clock."),
    family("hearth_checkpoint_timestamp_seconds", MetricKind::Gauge, "When a checkpoint was written last."),
    family("hearth_last_event_timestamp_seconds", MetricKind::Gauge, "When the run wrote its last event."),
    family("hearth_eta_seconds", MetricKind::Gauge, "Time to the end."),
    family("hearth_node_share_ratio", MetricKind::Gauge, "Share of a step's samples that a rank computes."),
    family("hearth_node_wait_seconds", MetricKind::Counter, "Time that a rank waited for others."),
];

struct MetricFamily {
    /// Without the ending of counters.
    name: &'static str,
    kind: MetricKind,
    help: &'static str,
}

const fn family(name: &'static str, kind: MetricKind, help: &'static str) -> MetricFamily {
    MetricFamily { name, kind, help }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum MetricKind {
    Counter,
    Gauge,
    Histogram,
}

impl MetricKind {
    fn word(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// A number of a family.
struct MetricSample {
    family: &'static str,
    /// What follows the family's name.
    suffix: &'static str,
    labels: String,
    value: f64,
}

/// How metrics are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricsFormat {
    Prometheus,
    OpenMetrics,
}

impl MetricsFormat {
    /// What somebody asks for by an Accept header.
    pub fn of(accept: Option<&str>) -> Self {
        let is_open = accept.is_some_and(|accept| accept.contains("application/openmetrics-text"));
        if is_open { Self::OpenMetrics } else { Self::Prometheus }
    }

    pub fn content_type(self) -> &'static str {
        match self {
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// The page of all runs.
pub fn page<'a>(runs: impl Iterator<Item = &'a FollowedRun>, format: MetricsFormat) -> String {
    let mut samples = Vec::new();
    for run in runs {
        run.peek(|fold, is_held| samples.extend(run_samples(&run.name, fold, is_held)));
    }
    written(&samples, format)
}

fn written(samples: &[MetricSample], format: MetricsFormat) -> String {
    let mut text = String::new();
    for MetricFamily { name, kind, help } in &FAMILIES {
        let is_counter = *kind == MetricKind::Counter;
        let total = if is_counter { "_total" } else { "" };
        // OpenMetrics names a counter without its ending.
        let family = if format == MetricsFormat::OpenMetrics { "" } else { total };
        _ = write!(text, "# HELP {name}{family} {help}\n# TYPE {name}{family} {}\n", kind.word());
        for sample in samples.iter().filter(|sample| sample.family == *name) {
            let MetricSample { suffix, labels, value, .. } = sample;
            _ = writeln!(text, "{name}{suffix}{total}{{{labels}}} {value}");
        }
    }
    if format == MetricsFormat::OpenMetrics {
        text.push_str("# EOF\n");
    }
    text
}

/// The samples of one run, in any order.
struct RunMetrics {
    run: String,
    samples: Vec<MetricSample>,
}

impl RunMetrics {
    fn add(&mut self, family: &'static str, value: Option<f64>) {
        self.add_with(family, &[], value);
    }

    fn add_with(&mut self, family: &'static str, labels: &[(&str, &str)], value: Option<f64>) {
        self.push(family, "", labels, value);
    }

    fn push(
        &mut self,
        family: &'static str,
        suffix: &'static str,
        labels: &[(&str, &str)],
        value: Option<f64>,
    ) {
        debug_assert!(FAMILIES.iter().any(|of| of.name == family), "{family}");
        let Some(value) = value else { return };
        let own = std::iter::once(("run", self.run.as_str())).chain(labels.iter().copied());
        let labels = own.map(|(name, value)| format!("{name}=\"{}\"", escaped(value)));
        let labels = labels.collect::<Vec<_>>().join(",");
        self.samples.push(MetricSample { family, suffix, labels, value });
    }
}

fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

fn run_samples(name: &str, fold: &RunFold, is_held: bool) -> Vec<MetricSample> {
    let history = &fold.history;
    let mut metrics = RunMetrics { run: name.into(), samples: Vec::new() };
    let state = state_word(history, is_held, fold.is_paused);
    for word in STATES {
        let is_it = f64::from(u8::from(state == word));
        metrics.add_with("hearth_run_state", &[("state", word)], Some(is_it));
    }
    if is_held || now() - fold.time < RECENT_SECS {
        training(&mut metrics, fold);
        device(&mut metrics, fold);
        metrics.add("hearth_eta_seconds", eta_secs(fold).filter(|_| is_held));
        metrics.add("hearth_last_event_timestamp_seconds", Some(fold.time));
    }
    metrics.samples
}

fn training(metrics: &mut RunMetrics, fold: &RunFold) {
    let RunFold { history, totals, .. } = fold;
    let Some(begin) = history.begin() else { return };
    let labels =
        [("model", begin.base.as_str()), ("version", &begin.version), ("device", &begin.engine)];
    metrics.add_with("hearth_run_info", &labels, Some(1.0));
    let step = history.last_step() as f64;
    metrics.add("hearth_step", Some(step));
    metrics.add("hearth_steps_planned", Some(begin.steps as f64));
    metrics.add("hearth_samples", Some(step * begin.samples_per_step as f64));
    metrics.add("hearth_tokens", begin.tokens_per_step.map(|tokens| step * tokens as f64));
    let waited = Some(totals.copy_wait_secs).filter(|secs| *secs > 0.0);
    metrics.add("hearth_copy_wait_seconds", waited);
    let last = history.steps.last();
    let smoothed = mean_loss(&history.steps, loss_window(begin.steps));
    let held_out = history.validations.last().map(|(_, loss)| *loss);
    for (split, loss) in
        [("train", last.map(|it| it.loss)), ("smoothed", smoothed), ("held_out", held_out)]
    {
        metrics.add_with("hearth_loss", &[("split", split)], loss);
    }
    metrics.add("hearth_learning_rate", last.map(|step| step.learning_rate));
    metrics.add("hearth_gradient_norm", last.and_then(|step| step.grad_norm));
    metrics.add("hearth_nonfinite", Some(totals.not_finite as f64));
    metrics.add("hearth_energy_joules", Some(totals.joules).filter(|joules| *joules > 0.0));
    metrics.add("hearth_throttled_seconds", Some(totals.throttled_secs));
    metrics.add("hearth_checkpoint_timestamp_seconds", fold.checkpoint.map(|(time, _)| time));
    let mut below = 0;
    for (bound, n) in
        STEP_BUCKETS.iter().map(ToString::to_string).chain(["+Inf".into()]).zip(totals.buckets)
    {
        below += n;
        metrics.push("hearth_step_seconds", "_bucket", &[("le", &bound)], Some(below as f64));
    }
    metrics.push("hearth_step_seconds", "_sum", &[], Some(totals.secs));
    metrics.push("hearth_step_seconds", "_count", &[], Some(below as f64));
    for phase in &begin.phases {
        let labels = |kind| [("phase", phase.name.to_string()), ("kind", kind)];
        let labels = labels("plan".to_string());
        let plan = labels.each_ref().map(|(name, value)| (*name, value.as_str()));
        metrics.add_with("hearth_memory_bytes", &plan, Some(phase.peak_bytes as f64));
    }
    for phase in &history.phases {
        let name = phase.name.to_string();
        let labels = [("phase", name.as_str()), ("kind", "peak")];
        metrics.add_with("hearth_memory_bytes", &labels, Some(phase.peak_bytes as f64));
    }
    let limit = [("phase", "all"), ("kind", "limit")];
    metrics.add_with("hearth_memory_bytes", &limit, Some(begin.limit_bytes as f64));
}

fn device(metrics: &mut RunMetrics, fold: &RunFold) {
    let RunFold { history, rank_waits, .. } = fold;
    if let Some((_, felt)) = history.snapshots.last() {
        let telemetry = &felt.telemetry;
        metrics.add("hearth_pace_ratio", Some(felt.duty));
        metrics.add("hearth_device_power_watts", telemetry.watts);
        for (of, share) in
            [("gpu", telemetry.gpu_utilisation), ("memory", telemetry.memory_utilisation)]
        {
            metrics.add_with("hearth_device_utilisation_ratio", &[("of", of)], share);
        }
        if let Some(temperature) = &telemetry.temperature {
            let labels = [("device", temperature.sensor.as_str())];
            metrics.add_with(
                "hearth_device_temperature_celsius",
                &labels,
                Some(temperature.celsius),
            );
        }
        let held = telemetry.memory.map(|memory| memory.held as f64);
        metrics.add_with("hearth_memory_bytes", &[("phase", "all"), ("kind", "in_use")], held);
    }
    let samples: usize = history.ranks.iter().map(|rank| rank.samples).sum();
    for (rank, of) in history.ranks.iter().enumerate() {
        let waited = rank_waits.get(&(rank, of.node.clone())).map(|wait| wait.total_secs());
        let rank = rank.to_string();
        let labels = [("node", of.node.as_str()), ("rank", &rank)];
        let share = of.samples as f64 / samples.max(1) as f64;
        metrics.add_with("hearth_node_share_ratio", &labels, Some(share));
        metrics.add_with("hearth_node_wait_seconds", &labels, waited);
    }
}

#[cfg(test)]
mod tests {
    use super::super::fold::tests::{BEGIN, folded, step};
    use super::*;

    #[test]
    fn ranks_count_what_they_waited_over_the_whole_run() {
        let told = |secs: [f64; 2]| {
            let rank = |secs: f64| {
                format!(
                    r#"{{"node":"a","device":"cpu","samples":1,"compute_secs":1.0,"wait_secs":0.5,
                    "exchange_secs":0.1,"waited_secs":{secs}}}"#
                )
            };
            format!(r#"{{"event":"ranks","step":1,"ranks":[{}]}}"#, secs.map(rank).join(","))
        };
        let lines = [told([1.0, 2.0]), told([3.0, 4.5]), told([0.5, 0.25])];
        let waited = |lines: &[&str]| {
            let samples = run_samples("run", &folded(lines), true);
            let of = samples.iter().filter(|it| it.family == "hearth_node_wait_seconds");
            of.map(|it| it.value).collect::<Vec<_>>()
        };
        let [first, second, third] = lines.each_ref().map(String::as_str);
        assert_eq!(waited(&[BEGIN, first, second]), [3.0, 4.5]);
        assert_eq!(waited(&[BEGIN, first, second, BEGIN]), [3.0, 4.5], "it went on");
        assert_eq!(waited(&[BEGIN, first, second, BEGIN, third]), [3.5, 4.75]);
        let old = first.replace(",\"waited_secs\":1", "").replace(",\"waited_secs\":2", "");
        assert_eq!(waited(&[BEGIN, &old]), [0.0; 0], "nobody counted");
    }

    #[test]
    fn a_run_is_exposed_in_both_formats() {
        let steps = [step(1, "1.0"), step(2, "null")];
        let fold = folded(&[BEGIN, &steps[0], &steps[1]]);
        let samples = run_samples("a \"b\"\\\n", &fold, true);
        let plain = written(&samples, MetricsFormat::Prometheus);
        for line in [
            r#"hearth_step_total{run="a \"b\"\\\n"} 2"#,
            r#"hearth_run_state{run="a \"b\"\\\n",state="running"} 1"#,
            r#"hearth_loss{run="a \"b\"\\\n",split="train"} NaN"#,
            r#"hearth_nonfinite_total{run="a \"b\"\\\n"} 1"#,
            r#"hearth_step_seconds_bucket{run="a \"b\"\\\n",le="0.25"} 0"#,
            r#"hearth_step_seconds_bucket{run="a \"b\"\\\n",le="+Inf"} 2"#,
            r#"hearth_memory_bytes{run="a \"b\"\\\n",phase="load",kind="plan"} 5"#,
            "# TYPE hearth_step_total counter",
        ] {
            assert!(plain.lines().any(|it| it == line), "{line}\n{plain}");
        }
        assert!(!plain.contains("watts{") && !plain.contains("# EOF"));
        let open = written(&samples, MetricsFormat::OpenMetrics);
        assert!(
            open.contains("# TYPE hearth_step counter\nhearth_step_total{")
                && open.ends_with("# EOF\n")
        );
        let old = run_samples("old", &fold, false);
        assert!(old.iter().all(|sample| sample.family == "hearth_run_state"));
    }
}
