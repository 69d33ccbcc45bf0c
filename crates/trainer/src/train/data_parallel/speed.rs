//! How fast every rank is, and which share of a step it gets for that.

use std::ops::Range;

use cluster::share::{efficiency, shares, step_secs};

use crate::event::RankShare;

/// New shares must be so much faster. Chosen: measured speeds vary by as much.
const GAIN: f64 = 1.03;
/// How much the last step counts among the measured speeds.
const NEWEST: f64 = 0.3;

/// Whole samples should allow as much of the ranks' speed. Chosen: what two machines reach with 24 samples, whatever their
/// speeds.
const WELL_SHARED: f64 = 0.95;

/// How long a rank took for the parts of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RankTimes {
    /// Forward and backward of its samples.
    pub compute_secs: f64,
    /// Waiting for the slowest rank; of the step before.
    pub wait_secs: f64,
    /// Summing gradients, after what went on beside backward; of the step before.
    pub exchange_secs: f64,
    /// What its machine feels like; zero where nobody knows.
    pub celsius: f64,
}

/// The samples of a step by rank, and the times that they follow from. All ranks have the same.
#[derive(Clone, Debug, PartialEq)]
pub struct StepShares {
    samples: Vec<usize>,
    /// Samples that each has computed since the last average of weights.
    round: Vec<usize>,
    /// Seconds of a sample, as measured.
    sample_secs: Vec<Option<f64>>,
    times: Vec<RankTimes>,
    /// Seconds that each has waited so far.
    waited_secs: Vec<f64>,
}

impl RankTimes {
    /// Its numbers.
    pub const LEN: usize = 4;

    fn from_numbers(numbers: &[f64]) -> Self {
        let at = |index: usize| numbers.get(index).copied().unwrap_or_default();
        Self { compute_secs: at(0), wait_secs: at(1), exchange_secs: at(2), celsius: at(3) }
    }

    /// All ranks' numbers in a row, of which only this rank's are known: the sum over ranks has all.
    pub fn spread(self, rank: usize, size: usize) -> Vec<f64> {
        let mut all = vec![0.0; size * Self::LEN];
        let own = [self.compute_secs, self.wait_secs, self.exchange_secs, self.celsius];
        all[rank * Self::LEN..][..Self::LEN].copy_from_slice(&own);
        all
    }
}

impl StepShares {
    /// As many samples for each rank, before anything is known of them.
    pub fn equal(size: usize, n_samples: usize) -> Self {
        Self {
            samples: shares(&vec![1.0; size], n_samples),
            round: vec![0; size],
            sample_secs: vec![None; size],
            times: vec![RankTimes::default(); size],
            waited_secs: vec![0.0; size],
        }
    }

    /// A rank's samples of a step.
    pub fn of(&self, rank: usize) -> Range<usize> {
        let start = self.samples[..rank].iter().sum();
        start..start + self.samples[rank]
    }

    /// A rank's part of the samples since the last average of weights; before any, of those of a step.
    pub fn part(&self, rank: usize) -> f64 {
        let counted = if self.round.iter().any(|n| *n > 0) { &self.round } else { &self.samples };
        counted[rank] as f64 / counted.iter().sum::<usize>() as f64
    }

    /// The weights were averaged.
    pub fn begin_round(&mut self) {
        self.round.fill(0);
    }

    /// Learns how long every rank took for its samples of a step, from the sums of [`RankTimes::spread`]; says whether
    /// the next steps are shared otherwise.
    pub fn learn(&mut self, numbers: &[f64]) -> bool {
        for (all, samples) in self.round.iter_mut().zip(&self.samples) {
            *all += samples;
        }
        self.times = numbers.chunks(RankTimes::LEN).map(RankTimes::from_numbers).collect();
        for (all, times) in self.waited_secs.iter_mut().zip(&self.times) {
            *all += times.wait_secs;
        }
        let ranks = self.sample_secs.iter_mut().zip(&self.times).zip(&self.samples);
        for ((known, times), n) in ranks.filter(|(_, n)| **n > 0) {
            let now = times.compute_secs / *n as f64;
            *known = Some(known.map_or(now, |before| before + NEWEST * (now - before)));
        }
        let Some(secs) = self.sample_secs.iter().copied().collect::<Option<Vec<f64>>>() else {
            return false;
        };
        let better = shares(&secs, self.samples.iter().sum());
        let is_better = step_secs(&secs, &self.samples) > GAIN * step_secs(&secs, &better);
        if is_better {
            self.samples = better;
        }
        is_better
    }

    /// How long a rank had to wait in the last step for the one that computed longest.
    pub fn wait_secs(&self, rank: usize) -> f64 {
        let slowest = self.times.iter().map(|times| times.compute_secs).fold(0.0, f64::max);
        slowest - self.times[rank].compute_secs
    }

    /// A word on samples that are too few to be shared well, once speeds are known.
    pub fn too_few_samples(&self) -> Option<String> {
        let secs = self.sample_secs.iter().copied().collect::<Option<Vec<f64>>>()?;
        let n: usize = self.samples.iter().sum();
        let reached = |n: usize| efficiency(&secs, &shares(&secs, n));
        if reached(n) >= WELL_SHARED {
            return None;
        }
        let enough = (n..=n.max(1) * 64).find(|n| reached(*n) >= WELL_SHARED)?;
        Some(format!(
            "{n} samples per step are too few for {} ranks of these speeds: {:.0} % of their sum at most; {enough} allow \
             {:.0} % (train.gradient_accumulation)",
            self.samples.len(),
            100.0 * reached(n),
            100.0 * reached(enough),
        ))
    }

    /// For people; `names` are those of the ranks' nodes and devices.
    pub fn describe(&self, names: &[[String; 2]]) -> Vec<RankShare> {
        let share = |(rank, [node, device]): (usize, &[String; 2])| {
            let times = self.times[rank];
            RankShare {
                node: node.clone(),
                device: device.clone(),
                samples: self.samples[rank],
                compute_secs: times.compute_secs,
                wait_secs: times.wait_secs,
                exchange_secs: times.exchange_secs,
                waited_secs: Some(self.waited_secs[rank]),
                celsius: Some(times.celsius).filter(|celsius| *celsius != 0.0),
            }
        };
        names.iter().enumerate().map(share).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(secs: [f64; 2]) -> Vec<f64> {
        let rank = |rank: usize| RankTimes {
            compute_secs: secs[rank],
            wait_secs: secs[1 - rank],
            celsius: 50.0,
            ..RankTimes::default()
        };
        let both = rank(0).spread(0, 2).into_iter().zip(rank(1).spread(1, 2));
        both.map(|(one, other)| one + other).collect()
    }

    #[test]
    fn a_round_is_averaged_by_the_samples_that_were_computed() {
        let mut shares = StepShares::equal(2, 24);
        assert_eq!(shares.part(0), 0.5);
        // The next steps are shared otherwise; this one was not.
        assert!(shares.learn(&times([6.0, 12.0])));
        assert_eq!((shares.of(0).len(), shares.part(0)), (16, 0.5));
        assert_eq!([0, 1].map(|rank| shares.wait_secs(rank)), [6.0, 0.0]);
        shares.learn(&times([8.0, 8.0]));
        assert_eq!(shares.part(0), 28.0 / 48.0);
        shares.begin_round();
        assert_eq!(shares.part(0), 16.0 / 24.0);
    }

    #[test]
    fn shares_follow_measured_speeds() {
        let mut shares = StepShares::equal(2, 24);
        assert_eq!((shares.of(0), shares.of(1)), (0..12, 12..24));
        // A rank of half the speed.
        assert!(shares.learn(&times([6.0, 12.0])));
        assert_eq!((shares.of(0), shares.of(1)), (0..16, 16..24));
        // As measured now; noise of a percent changes nothing.
        assert!(!shares.learn(&times([8.0, 8.08])));
        assert_eq!(shares.of(0), 0..16);
        assert_eq!(shares.too_few_samples(), None);
        let mut few = StepShares::equal(2, 4);
        few.learn(&times([2.0, 3.0]));
        let word = few.too_few_samples().unwrap();
        assert!(word.starts_with("4 samples per step are too few for 2 ranks"), "{word}");
        assert!(word.contains("80 % of their sum at most; 5 allow 100 %"), "{word}");
        let told = shares.describe(&[["a".into(), "cpu".into()], ["b".into(), "cpu".into()]]);
        assert_eq!((told[1].samples, told[1].celsius), (8, Some(50.0)));
        assert_eq!([told[0].wait_secs, told[1].wait_secs], [8.08, 8.0]);
        assert_eq!([&told[0], &told[1]].map(|it| it.waited_secs), [Some(20.08), Some(14.0)]);
    }
}
