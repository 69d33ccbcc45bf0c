//! Energy out of samples of power: how many joules a run took, and of how much of its time that is known.
//!
//! Pure: it is told times and watts and takes no reading. Between two samples power is taken to go
//! straight from one to the other: power that swings within a second is counted as well as its meter
//! averages it. Where samples are missing, energy is not counted rather than guessed, and the share that is
//! covered says so.

use std::time::{Duration, Instant};

/// Chosen: samples come about once a second. Two may fail in a row and power will hardly have changed;
/// after a longer silence nobody knows what was drawn.
const LONGEST_GAP: Duration = Duration::from_secs(3);

/// Energy counted so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct EnergyMeter {
    joules: f64,
    covered: Duration,
    span: Option<EnergySpan>,
    last: Option<(Instant, f64)>,
}

#[derive(Clone, Copy, Debug)]
struct EnergySpan {
    first: Instant,
    last: Instant,
}

impl EnergyMeter {
    /// Takes the next sample. Power that is not known still says that time has passed; a sample from
    /// before the last one is passed over.
    pub fn add(&mut self, at: Instant, watts: Option<f64>) {
        let span = self.span.get_or_insert(EnergySpan { first: at, last: at });
        if at < span.last {
            return;
        }
        span.last = at;
        let Some(watts) = watts.filter(|watts| watts.is_finite() && *watts >= 0.0) else { return };
        if let Some((before, watts_before)) = self.last {
            let gap = at.duration_since(before);
            if gap <= LONGEST_GAP {
                self.joules += f64::midpoint(watts, watts_before) * gap.as_secs_f64();
                self.covered += gap;
            }
        }
        self.last = Some((at, watts));
    }

    /// Joules in the time that is covered; none if no time is.
    pub fn joules(&self) -> Option<f64> {
        (!self.covered.is_zero()).then_some(self.joules)
    }

    /// Mean power over the time that is covered; with a step's time it gives the step's energy.
    pub fn mean_watts(&self) -> Option<f64> {
        Some(self.joules()? / self.covered.as_secs_f64())
    }

    /// The share of the time between the first sample and the last in which power is known, 0 to 1.
    pub fn covered(&self) -> f64 {
        let whole = self.span.map_or(Duration::ZERO, |span| span.last.duration_since(span.first));
        if whole.is_zero() { 0.0 } else { self.covered.as_secs_f64() / whole.as_secs_f64() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Samples at these seconds.
    fn energy(samples: &[(f64, Option<f64>)]) -> EnergyMeter {
        let start = Instant::now();
        let mut energy = EnergyMeter::default();
        for (secs, watts) in samples {
            energy.add(start + Duration::from_secs_f64(*secs), *watts);
        }
        energy
    }

    fn check(samples: &[(f64, Option<f64>)], joules: Option<f64>, covered: f64) {
        let found = energy(samples);
        match (found.joules(), joules) {
            (Some(found), Some(joules)) => assert!((found - joules).abs() < 1e-6, "{found}"),
            (found, joules) => assert_eq!(found, joules, "{samples:?}"),
        }
        assert!((found.covered() - covered).abs() < 1e-6, "{} of {samples:?}", found.covered());
    }

    #[test]
    fn sums_made_by_hand() {
        let at = |secs, watts| (secs, Some(watts));
        check(&[at(0.0, 100.0), at(1.0, 100.0), at(2.5, 100.0)], Some(250.0), 1.0);
        check(&[at(0.0, 0.0), at(2.0, 80.0), at(3.0, 40.0)], Some(80.0 + 60.0), 1.0);
    }

    #[test]
    fn what_nobody_saw_is_not_counted() {
        let at = |secs, watts| (secs, Some(watts));
        check(&[], None, 0.0);
        check(&[at(0.0, 50.0)], None, 0.0);
        check(&[(0.0, None), (1.0, None)], None, 0.0);
        check(&[at(0.0, 50.0), (1.0, None), at(2.0, 50.0)], Some(100.0), 1.0);
        check(
            &[at(0.0, 50.0), at(1.0, 50.0), at(9.0, 50.0), at(10.0, 70.0)],
            Some(50.0 + 60.0),
            0.2,
        );
        check(&[(0.0, None), (3.0, None), at(3.0, 10.0), at(4.0, 10.0)], Some(10.0), 0.25);
    }

    #[test]
    fn nonsense_and_a_clock_that_goes_back_add_nothing() {
        let watts = [f64::NAN, f64::INFINITY, -3.0];
        for nonsense in watts {
            check(&[(0.0, Some(50.0)), (1.0, Some(nonsense)), (2.0, Some(50.0))], Some(100.0), 1.0);
        }
        check(&[(5.0, Some(50.0)), (4.0, Some(900.0)), (6.0, Some(50.0))], Some(50.0), 1.0);
    }

    /// A GPU that warms up, swings slowly and rests for 6 of every 37 seconds: a sample per second,
    /// never quite on time, against a thousand.
    #[test]
    fn a_sample_per_second_is_enough() {
        let power = |secs: f64| {
            let warm = 40.0 * (1.0 - (-secs / 90.0).exp());
            let swing = 15.0 * (secs / 2.3).sin();
            if secs % 37.0 < 31.0 { 300.0 + warm + swing } else { 60.0 + warm }
        };
        let fine = 1e-3;
        let exact: f64 = (0..600_000).map(|at| power((f64::from(at) + 0.5) * fine) * fine).sum();
        let samples: Vec<_> = (0..=600)
            .map(|secs| f64::from(secs) + f64::from(secs * 7919 % 100) * 1e-3)
            .map(|secs| (secs, Some(power(secs))))
            .collect();
        let found = energy(&samples).joules().unwrap();
        assert!((found / exact - 1.0).abs() < 0.01, "{found} J, exactly {exact} J");
    }
}
