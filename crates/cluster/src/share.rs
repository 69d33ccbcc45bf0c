//! Shares of a step for machines of unequal speed: the slowest is done as early as possible.

/// Units of work for each rank, by the seconds that each takes for one. Each next unit goes to the rank that would be done
/// with it first, which is best for equal units. A rank may get none.
pub fn shares(unit_secs: &[f64], units: usize) -> Vec<usize> {
    let mut shares = vec![0; unit_secs.len()];
    for _ in 0..units {
        let next = |rank: &usize| unit_secs[*rank] * (shares[*rank] + 1) as f64;
        let first = (0..unit_secs.len()).min_by(|a, b| next(a).total_cmp(&next(b)));
        if let Some(first) = first {
            shares[first] += 1;
        }
    }
    shares
}

/// Seconds of a step with these shares.
pub fn step_secs(unit_secs: &[f64], shares: &[usize]) -> f64 {
    unit_secs.iter().zip(shares).map(|(secs, units)| secs * *units as f64).fold(0.0, f64::max)
}

/// The share of the ranks' summed speeds that whole units allow, from 0 to 1.
pub fn efficiency(unit_secs: &[f64], shares: &[usize]) -> f64 {
    let speed: f64 = unit_secs.iter().map(|secs| 1.0 / secs).sum();
    shares.iter().sum::<usize>() as f64 / step_secs(unit_secs, shares) / speed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_rank_is_done_as_early_as_whole_units_allow() {
        assert_eq!(shares(&[1.0, 1.0], 24), [12, 12]);
        assert_eq!(shares(&[1.0, 2.0], 24), [16, 8]);
        assert_eq!(shares(&[4.5, 1.0], 4), [0, 4]);
        assert_eq!(shares(&[1.0], 3), [3]);
        // Against every other split of two.
        for slow in (10..=45).map(|tenths| f64::from(tenths) / 10.0) {
            let ranks = [1.0, slow];
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
            let ratios = (10..=40).map(|tenths| [1.0, f64::from(tenths) / 10.0]);
            let each = ratios.map(|ranks| efficiency(&ranks, &shares(&ranks, units)));
            each.fold(1.0, f64::min)
        };
        // As a search over all splits found.
        for (units, share) in [(4, 0.80), (8, 0.89), (12, 0.92), (16, 0.94), (24, 0.96)] {
            assert!((worst(units) - share).abs() < 0.008, "{units}: {}", worst(units));
        }
    }
}
