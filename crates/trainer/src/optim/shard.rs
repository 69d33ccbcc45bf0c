//! Which rank holds the optimizer's state of which parameter (`ZeRO` stage 1: Rajbhandari et al., "`ZeRO`: Memory Optimizations
//! Toward Training Trillion Parameter Models", arXiv 1910.02054, section 5.1). Whole parameters, not slices of them: the
//! state of each has the form that its optimizer gives it, and a checkpoint has the same tensors with any number of ranks.

use std::cmp::Reverse;

use crate::config::cluster::RankPart;

/// The owner of every parameter's state.
pub struct OptimizerShard {
    owners: Vec<usize>,
    rank: usize,
}

impl OptimizerShard {
    /// Of parameters of so many values. The largest come first, each to the rank that has the fewest values.
    pub fn new(n_values: &[usize], part: RankPart) -> Self {
        let mut order: Vec<usize> = (0..n_values.len()).collect();
        order.sort_by_key(|index| Reverse(n_values[*index]));
        let (mut owners, mut held) = (vec![0; n_values.len()], vec![0; part.size]);
        for index in order {
            let rank = (0..part.size).min_by_key(|rank| held[*rank]).unwrap_or(0);
            owners[index] = rank;
            held[rank] += n_values[index];
        }
        Self { owners, rank: part.rank }
    }

    /// The rank that updates a parameter.
    pub fn owner(&self, index: usize) -> usize {
        self.owners[index]
    }

    /// Whether this rank does.
    pub fn is_own(&self, index: usize) -> bool {
        self.owners[index] == self.rank
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_parameter_has_one_owner_and_ranks_hold_about_as_much() {
        let n_values = [1000, 10, 10, 400, 300, 310, 20, 5];
        let shards = [0, 1].map(|rank| OptimizerShard::new(&n_values, RankPart { rank, size: 2 }));
        let held = |shard: &OptimizerShard| -> usize {
            (0..8).filter(|index| shard.is_own(*index)).map(|index| n_values[index]).sum()
        };
        assert_eq!(shards.each_ref().map(held), [1030, 1025]);
        for index in 0..8 {
            assert_ne!(shards[0].is_own(index), shards[1].is_own(index));
            assert_eq!(shards[0].owner(index), shards[1].owner(index));
        }
    }
}
