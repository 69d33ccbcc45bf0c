//! How long work takes on a machine: for each kind of call a curve of seconds over size, measured by
//! `hearth bench calibrate`, or estimated from published figures.
//!
//! A call's time is read off the curve of its class. Where that class was not measured, another
//! format of the same kernel stands in for it; where there is none, the call takes as long as its
//! arithmetic or a pass over its bytes would, whichever is longer.
//!
//! Left out: waiting for a disk, and other programs on the machine.

mod documented;
mod store;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use compute::{CallTotals, KernelClass, OffloadInterval, WorkStats};
use serde::{Deserialize, Serialize};

pub use store::{RatesKey, StoredRates, folder};

/// The curve of calls that only read and write memory.
pub const PASS: &str = "pass";
/// The curve of kernels that are bound by arithmetic.
pub const ARITHMETIC: &str = "arithmetic";
/// A curve of matmuls in fp8, whatever the size and format.
pub const FP8: &str = "matmul by fp8 units, any";
/// The curve of reading a model's files.
pub const LOAD: &str = "load";

/// The curve of copies from main memory to a GPU.
pub const LINK: &str = "link";
/// Chosen for rates without that curve: `PCIe` 3.0 x8, the slowest link of GPUs in use.
const LINK_BYTES_PER_SECOND: f64 = 6e9;

/// The shortest time of a call, in seconds; logarithms need a number above 0.
const SHORTEST: f64 = 1e-9;

/// Seconds that calls take on one machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    /// Whether they were measured, rather than estimated from published figures.
    pub is_measured: bool,
    /// Seconds that the host takes to launch a kernel, which may be longer than the kernel; 0 on the CPU.
    pub host_secs: f64,
    /// By class, without the size, as [`KernelClass`] prints itself; and the four above.
    pub curves: BTreeMap<String, RateCurve>,
}

/// Seconds per call over the size of the call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RateCurve {
    /// What size is counted in.
    pub measure: CallSizeUnit,
    /// Sizes, growing, each with its seconds, which never fall.
    points: Vec<[f64; 2]>,
}

/// What decides how long a call takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CallSizeUnit {
    /// Its arithmetic.
    Flops,
    /// The memory it reads and writes.
    Bytes,
}

impl CallSizeUnit {
    /// Of a kernel, by its name in the statistics: large matmuls and attention are bound by arithmetic.
    pub fn of(kernel: &str) -> Self {
        let computes = kernel.starts_with("matmul by")
            || kernel.starts_with("activated matmul")
            || kernel.starts_with("attention")
            || kernel == ARITHMETIC;
        if computes { Self::Flops } else { Self::Bytes }
    }

    /// The mean size of some calls.
    pub fn mean(self, calls: &CallTotals) -> f64 {
        let sum = match self {
            Self::Flops => calls.flops,
            Self::Bytes => calls.bytes,
        };
        sum as f64 / calls.count.max(1) as f64
    }
}

impl Rates {
    /// How long work takes. With block offloading, the device waits where the copy of the next block takes longer
    /// than the current one to compute.
    pub fn seconds(&self, work: &WorkStats) -> f64 {
        let wait = |interval: &OffloadInterval| {
            (self.copying(interval.copied_bytes) - self.computing(&interval.calls)).max(0.0)
        };
        self.computing(&work.calls) + work.offload_intervals.iter().map(wait).sum::<f64>()
    }

    /// The host launches kernels while others run, so that the longer of the two counts.
    fn computing(&self, calls: &BTreeMap<KernelClass, CallTotals>) -> f64 {
        let each = calls.iter().map(|(class, calls)| self.seconds_of(class, calls));
        let n_calls: u64 = calls.values().map(|calls| calls.count).sum();
        each.sum::<f64>().max(n_calls as f64 * self.host_secs)
    }

    /// Seconds to copy bytes to a GPU.
    fn copying(&self, bytes: u64) -> f64 {
        let known = self.curves.get(LINK).map(|curve| curve.seconds(bytes as f64));
        if bytes == 0 { 0.0 } else { known.unwrap_or(bytes as f64 / LINK_BYTES_PER_SECOND) }
    }

    /// How long calls of one class take.
    pub fn seconds_of(&self, class: &KernelClass, calls: &CallTotals) -> f64 {
        let each = match self.curve(class) {
            Some(curve) => curve.seconds(curve.measure.mean(calls)),
            None => self.roof(calls),
        };
        each * calls.count as f64
    }

    /// How long it takes to read so many bytes of a model's file, if that is known.
    pub fn loading(&self, bytes: u64) -> Option<f64> {
        self.curves.get(LOAD).map(|curve| curve.seconds(bytes as f64))
    }

    /// The curve of a class, or of its kernel in another format.
    fn curve(&self, class: &KernelClass) -> Option<&RateCurve> {
        let others = || {
            let start = format!("{}, ", class.kernel);
            self.curves.iter().find(|(name, _)| name.starts_with(&start)).map(|(_, curve)| curve)
        };
        self.curves.get(&class.to_string()).or_else(others)
    }

    fn roof(&self, calls: &CallTotals) -> f64 {
        let of = |name: &str| {
            let curve = self.curves.get(name);
            curve.map_or(0.0, |curve| curve.seconds(curve.measure.mean(calls)))
        };
        of(PASS).max(of(ARITHMETIC))
    }
}

impl RateCurve {
    /// Through measured points, in any order. Where a larger call was measured to be faster, which
    /// noise makes happen, both take the (geometric) mean of their times.
    pub fn through(measure: CallSizeUnit, points: impl IntoIterator<Item = (f64, f64)>) -> Self {
        let mut measured: Vec<(f64, f64)> = points.into_iter().collect();
        measured.sort_by(|a, b| a.0.total_cmp(&b.0));
        // Sizes that share a time, with the sum of its logarithms.
        let mut level: Vec<(Vec<f64>, f64)> = Vec::new();
        let mean = |(sizes, sum): &(Vec<f64>, f64)| sum / sizes.len() as f64;
        for (size, seconds) in measured {
            level.push((vec![size.max(1.0)], seconds.max(SHORTEST).ln()));
            while let [.., before, last] = &level[..]
                && (mean(before) > mean(last) || before.0.last() >= last.0.first())
            {
                let (sizes, sum) = level.pop().expect("there are two");
                let before = level.last_mut().expect("there are two");
                before.0.extend(sizes);
                before.1 += sum;
            }
        }
        let mut points: Vec<[f64; 2]> = Vec::new();
        for sizes in &level {
            points.extend(sizes.0.iter().map(|size| [*size, mean(sizes).exp()]));
        }
        points.dedup_by(|next, kept| next[0] <= kept[0]);
        Self { measure, points }
    }

    /// Seconds of a call: straight lines between logarithms; as long as the smallest below it, and
    /// in proportion to its size above the largest.
    pub fn seconds(&self, size: f64) -> f64 {
        let after = self.points.partition_point(|[at, _]| *at < size);
        match (after.checked_sub(1).map(|at| self.points[at]), self.points.get(after)) {
            (None, None) => 0.0,
            (None, Some([_, seconds])) => *seconds,
            (Some([at, seconds]), None) => seconds * size / at,
            (Some([at, seconds]), Some([next_at, next_seconds])) => {
                let share = (size / at).ln() / (next_at / at).ln();
                seconds * (next_seconds / seconds).powf(share)
            }
        }
    }

    /// Sizes with their seconds.
    pub fn points(&self) -> &[[f64; 2]] {
        &self.points
    }

    /// Whether it can be read: a file may hold anything.
    fn is_sound(&self) -> bool {
        let positive = |number: f64| number.is_finite() && number > 0.0;
        let grows = |pair: &[[f64; 2]]| pair[0][0] < pair[1][0] && pair[0][1] <= pair[1][1];
        !self.points.is_empty()
            && self.points.iter().flatten().all(|number| positive(*number))
            && self.points.windows(2).all(grows)
    }
}
