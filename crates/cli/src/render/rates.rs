//! How fast a machine was found to be, and how well that foretold its steps, as tables.

use std::path::PathBuf;

use machine::Bytes;
use serde::Serialize;
use trainer::plan::rates::{CallSizeUnit, RateCurve, Rates, RatesKey};

use crate::text::{BOLD, DIM, PLAIN, TextPage};

/// A job's step.
#[derive(Debug, Serialize)]
pub struct StepPrediction {
    pub job: String,
    pub predicted_ms: f64,
    pub ms_median: f64,
    /// Of the fastest step: what disturbs only makes longer, as in calibration.
    pub ms_best: f64,
    /// Predicted over that of the fastest step.
    pub ratio: f64,
    /// Where the time was to go, and where it went, the longest first.
    pub parts: Vec<PredictedKernel>,
}

/// A kernel's part of a step.
#[derive(Debug, Serialize)]
pub struct PredictedKernel {
    pub kernel: String,
    pub predicted_ms: f64,
    /// What is done between calls is a part of the call before. Nothing where another device computes.
    pub ms_mean: f64,
}

/// Rates with whose they are.
#[derive(Debug, Serialize)]
pub struct CalibrationReport {
    pub owner: RatesKey,
    /// Nothing where the user has no cache folder.
    pub path: Option<PathBuf>,
    pub secs: f64,
    #[serde(flatten)]
    pub rates: Rates,
}

/// How far a prediction may be off. Chosen: what the choice between two plans stands.
const MARK: f64 = 0.15;

/// Draws what `hearth bench calibrate` measured.
pub fn calibrated(all: &CalibrationReport) -> String {
    let mut page = TextPage::new();
    let owner = &all.owner;
    let threads = match owner.threads {
        0 => String::new(),
        n => format!(" with {n} threads"),
    };
    let title = format!("{}, {}{threads}", owner.name, owner.engine);
    page.line(BOLD, &title);
    let mut rows = vec![["calls", "smallest", "µs", "largest", "µs", "at best"].map(str::to_owned)];
    for (name, curve) in &all.rates.curves {
        let [Some(first), Some(last)] = [curve.points().first(), curve.points().last()] else {
            continue;
        };
        let size = |at: f64| match curve.measure {
            CallSizeUnit::Flops => format!("{:.3} MFLOP", at / 1e6),
            CallSizeUnit::Bytes => Bytes(at as u64).to_string(),
        };
        let micros = |seconds: f64| format!("{:.0}", 1e6 * seconds);
        rows.push([
            name.clone(),
            size(first[0]),
            micros(first[1]),
            size(last[0]),
            micros(last[1]),
            best(curve),
        ]);
    }
    page.table(&rows);
    page.line(DIM, &format!("medians; measured in {:.0} s", all.secs));
    match &all.path {
        Some(path) => page.line(PLAIN, &format!("kept in {}", path.display())),
        None => page.line(PLAIN, "not kept: there is no cache folder; give one with --folder"),
    }
    page.finish()
}

fn best(curve: &RateCurve) -> String {
    let rates = curve.points().iter().map(|[size, seconds]| size / seconds / 1e9);
    let unit = match curve.measure {
        CallSizeUnit::Flops => "GFLOP/s",
        CallSizeUnit::Bytes => "GB/s",
    };
    format!("{:.1} {unit}", rates.fold(0.0, f64::max))
}

/// Draws what `hearth bench predict` found.
pub fn predicted(all: &[StepPrediction]) -> String {
    let mut page = TextPage::new();
    let titles = ["job", "predicted ms", "best ms", "median ms", "predicted / best"];
    let mut rows = vec![titles.map(str::to_owned)];
    for StepPrediction { job, predicted_ms, ms_median, ms_best, ratio, .. } in all {
        rows.push([
            job.clone(),
            format!("{predicted_ms:.1}"),
            format!("{ms_best:.1}"),
            format!("{ms_median:.1}"),
            format!("{ratio:.2}"),
        ]);
    }
    page.table(&rows);
    let within = all.iter().filter(|figures| (figures.ratio - 1.0).abs() <= MARK).count();
    let line = format!("{within} of {} within {:.0} %", all.len(), 100.0 * MARK);
    page.line(DIM, &line);
    page.finish()
}
