//! Shares of a step's micro-batches for machines of unequal speed: the slowest is done as early as possible.

/// How fast a rank is, and how much it can take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RankSpeed {
    /// Seconds of a step besides its micro-batches.
    pub fixed_secs: f64,
    /// Seconds of a micro-batch.
    pub unit_secs: f64,
}

impl RankSpeed {
    /// Of `units` micro-batches.
    fn secs(self, units: usize) -> f64 {
        self.fixed_secs + self.unit_secs * units as f64
    }
}

/// Micro-batches for each rank, so that the slowest takes the least time. Each next one goes to the rank that would be
/// done with it first, which is best for equal units. A rank may get none.
pub fn shares(ranks: &[RankSpeed], units: usize) -> Vec<usize> {
    let mut shares = vec![0; ranks.len()];
    for _ in 0..units {
        let next = |rank: &usize| ranks[*rank].secs(shares[*rank] + 1);
        let first = (0..ranks.len()).min_by(|a, b| next(a).total_cmp(&next(b)));
        if let Some(first) = first {
            shares[first] += 1;
        }
    }
    shares
}

/// Seconds of a step with these shares.
pub fn step_secs(ranks: &[RankSpeed], shares: &[usize]) -> f64 {
    ranks.iter().zip(shares).map(|(rank, units)| rank.secs(*units)).fold(0.0, f64::max)
}

/// The share of the ranks' summed speeds that whole micro-batches allow, from 0 to 1.
pub fn efficiency(ranks: &[RankSpeed], shares: &[usize]) -> f64 {
    let units: usize = shares.iter().sum();
    let speed: f64 = ranks.iter().map(|rank| units as f64 / rank.secs(units)).sum();
    units as f64 / step_secs(ranks, shares) / speed
}

#[cfg(test)]
mod tests {
    use super::*;

    fn speeds(secs: &[f64]) -> Vec<RankSpeed> {
        secs.iter().map(|unit_secs| RankSpeed { fixed_secs: 0.0, unit_secs: *unit_secs }).collect()
    }

    #[test]
    fn the_slowest_rank_is_done_as_early_as_whole_units_allow() {
        assert_eq!(shares(&speeds(&[1.0, 1.0]), 24), [12, 12]);
        assert_eq!(shares(&speeds(&[1.0, 2.0]), 24), [16, 8]);
        assert_eq!(shares(&speeds(&[4.5, 1.0]), 4), [0, 4]);
        assert_eq!(shares(&speeds(&[1.0]), 3), [3]);
        // Against every other split of two.
        for slow in (10..=45).map(|tenths| f64::from(tenths) / 10.0) {
            let ranks = speeds(&[1.0, slow]);
            for units in 1..40 {
                let best = step_secs(&ranks, &shares(&ranks, units));
                let least = (0..=units).map(|n| step_secs(&ranks, &[n, units - n]));
                assert!(best <= least.fold(f64::MAX, f64::min), "{slow} {units}");
            }
        }
    }

    #[test]
    fn few_units_waste_more_of_unequal_machines() {
        let worst = |units: usize| {
            let ratios = (10..=40).map(|tenths| speeds(&[1.0, f64::from(tenths) / 10.0]));
            let each = ratios.map(|ranks| efficiency(&ranks, &shares(&ranks, units)));
            each.fold(1.0, f64::min)
        };
        // As a search over all splits found.
        for (units, share) in [(4, 0.80), (8, 0.89), (12, 0.92), (16, 0.94), (24, 0.96)] {
            assert!((worst(units) - share).abs() < 0.008, "{units}: {}", worst(units));
        }
    }
}
