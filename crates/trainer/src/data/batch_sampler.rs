//! The order in which samples are trained on. The index of a batch, counted over the whole run, decides
//! which samples are in it: a run resumes with the next index, and no sampler state has to be saved.
//!
//! An epoch shows every sample as often as its repeats say. Samples are shuffled within their
//! bucket and cut into batches, then the batches of all buckets are shuffled. The last batch of a
//! bucket may be smaller: filling it up would show some samples more often than others.

use std::collections::BTreeMap;

use compute::RandomSequence;

/// Keeps these random numbers apart from others of the same seed: "order".
const PURPOSE: u64 = 0x6f72_6465_7200_0000;

/// Which samples are trained on together, and when.
#[derive(Clone, Debug)]
pub struct BatchSampler {
    /// The samples of each bucket, each as often as an epoch shows it.
    buckets: Vec<Vec<usize>>,
    batch: usize,
    seed: u64,
    /// The epoch that was asked for last, since the next batch is most likely of it.
    epoch: Option<(u64, Vec<Vec<usize>>)>,
}

impl BatchSampler {
    /// For samples with their sizes and repeats, up to `batch` at a time.
    pub fn new<S: Copy + Ord>(samples: &[(S, u32)], batch: usize, seed: u64) -> Self {
        let mut buckets: BTreeMap<S, Vec<usize>> = BTreeMap::new();
        for (index, (bucket, repeats)) in samples.iter().enumerate() {
            let shown = std::iter::repeat_n(index, *repeats as usize);
            buckets.entry(*bucket).or_default().extend(shown);
        }
        let buckets = buckets.into_values().collect();
        Self { buckets, batch: batch.max(1), seed, epoch: None }
    }

    /// Batches of an epoch.
    pub fn batches_per_epoch(&self) -> u64 {
        self.buckets.iter().map(|samples| samples.len().div_ceil(self.batch) as u64).sum()
    }

    /// The samples of a batch, as indices into those that were given; all of one bucket. Empty only
    /// if there are no samples.
    pub fn batch(&mut self, number: u64) -> Vec<usize> {
        let per_epoch = self.batches_per_epoch();
        let Some(epoch) = number.checked_div(per_epoch) else { return Vec::new() };
        if self.epoch.as_ref().is_none_or(|(cached, _)| *cached != epoch) {
            self.epoch = Some((epoch, self.shuffled(epoch)));
        }
        let (_, batches) = self.epoch.as_ref().expect("it was just put there");
        batches[(number % per_epoch) as usize].clone()
    }

    fn shuffled(&self, epoch: u64) -> Vec<Vec<usize>> {
        let mut draws = SequenceDraws::new(self.seed ^ PURPOSE, epoch);
        let mut batches = Vec::new();
        for samples in &self.buckets {
            let mut samples = samples.clone();
            draws.shuffle(&mut samples);
            batches.extend(samples.chunks(self.batch).map(<[usize]>::to_vec));
        }
        draws.shuffle(&mut batches);
        batches
    }
}

/// A random sequence read from its start.
pub(crate) struct SequenceDraws {
    sequence: RandomSequence,
    drawn: usize,
}

impl SequenceDraws {
    /// From a seed and the sequence's number.
    pub(crate) fn new(seed: u64, number: u64) -> Self {
        Self { sequence: RandomSequence::new(seed, number), drawn: 0 }
    }

    /// Fisher-Yates.
    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last as u64 + 1));
        }
    }

    /// Uniform below the bound, up to a bias of bound / 2^32.
    fn below(&mut self, bound: u64) -> usize {
        let word = u64::from(self.sequence.word(self.drawn));
        self.drawn += 1;
        ((word * bound) >> 32) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Bucket;

    const BATCH: usize = 4;

    /// Forty samples in three buckets, some of them repeated.
    fn samples() -> Vec<(Bucket, u32)> {
        let bucket = |index: usize| Bucket { width: 64 + index % 3 * 16, height: 64 };
        (0..40).map(|index| (bucket(index), 1 + index as u32 % 2 * 2)).collect()
    }

    fn epoch(order: &mut BatchSampler, number: u64) -> Vec<Vec<usize>> {
        let n = order.batches_per_epoch();
        (number * n..(number + 1) * n).map(|batch| order.batch(batch)).collect()
    }

    #[test]
    fn an_epoch_shows_every_sample_as_often_as_it_should() {
        let samples = samples();
        let mut order = BatchSampler::new(&samples, BATCH, 7);
        for number in [0, 1, 1_000_000] {
            let mut shown = vec![0; samples.len()];
            epoch(&mut order, number).concat().iter().for_each(|index| shown[*index] += 1);
            let repeats: Vec<u32> = samples.iter().map(|(_, repeats)| *repeats).collect();
            assert_eq!(shown, repeats);
        }
    }

    #[test]
    fn a_batch_is_of_one_bucket_and_full_but_for_the_last() {
        let samples = samples();
        let mut small = BTreeMap::<Bucket, usize>::new();
        for batch in epoch(&mut BatchSampler::new(&samples, BATCH, 7), 3) {
            let bucket = samples[batch[0]].0;
            assert!(batch.iter().all(|index| samples[*index].0 == bucket), "{batch:?}");
            assert!(batch.len() <= BATCH);
            *small.entry(bucket).or_default() += usize::from(batch.len() < BATCH);
        }
        assert!(small.values().all(|n| *n <= 1), "{small:?}");
    }

    #[test]
    fn seeds_and_epochs_decide_and_nothing_else() {
        let order = |seed| BatchSampler::new(&samples(), BATCH, seed);
        assert_eq!(epoch(&mut order(7), 2), epoch(&mut order(7), 2));
        assert_ne!(epoch(&mut order(7), 2), epoch(&mut order(8), 2));
        assert_ne!(epoch(&mut order(7), 2), epoch(&mut order(7), 3));
        let (mut forward, mut backward) = (order(7), order(7));
        let n = 3 * forward.batches_per_epoch();
        let there: Vec<_> = (0..n).map(|number| forward.batch(number)).collect();
        let mut back: Vec<_> = (0..n).rev().map(|number| backward.batch(number)).collect();
        back.reverse();
        assert_eq!(there, back);
    }

    #[test]
    fn batches_of_buckets_are_mixed() {
        let samples = samples();
        let batches = epoch(&mut BatchSampler::new(&samples, BATCH, 7), 0);
        let buckets: Vec<_> = batches.iter().map(|batch| samples[batch[0]].0).collect();
        assert!(!buckets.is_sorted(), "{buckets:?}");
    }

    #[test]
    fn without_samples_batches_are_empty() {
        let mut order = BatchSampler::new::<Bucket>(&[], BATCH, 7);
        assert_eq!((order.batches_per_epoch(), order.batch(5)), (0, Vec::new()));
    }
}
