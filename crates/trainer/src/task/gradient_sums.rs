//! The sums of a step's gradients over all ranks, bucket by bucket. While backward of a rank's last micro-batch runs, the
//! buckets whose gradients are complete are already on their way, so that a slow link hides behind compute.
//!
//! Every rank sums the same buckets in the same order, whatever becomes of its part of the step: one that gives it up sends
//! zeros. A bucket that was handed over is complete, so that a part that is computed again, with less memory, sends only the
//! rest.

use std::collections::VecDeque;

use cluster::{Pending, World};
use compute::{Gradients, ParamKey, Params};

use super::exact_sums::ExactSums;
use crate::config::cluster::WireFormat;
use crate::error::Result;

/// Gradients of a bucket, at most. Chosen: 4 MB, which takes few calls.
const BUCKET_VALUES: usize = 1 << 20;
/// Buckets, at least. Chosen: backward hides all but the last.
const LEAST_BUCKETS: usize = 8;
/// Buckets that are on their way while more are made: copies in main memory. Chosen: 128 MB, which a link of 1 Gbit/s carries
/// in a second.
const MOST_BUCKETS: usize = 32;

/// What is on its way, and what has arrived.
pub struct GradientSums<'a> {
    world: &'a World,
    wire: WireFormat,
    buckets: Vec<GradientBucket>,
    /// By parameter.
    bucket_of: Vec<usize>,
    on_their_way: VecDeque<Pending<Vec<f32>>>,
    /// Sums that were written into the gradients; those after them are on their way.
    n_written: usize,
    /// Buckets of parts of steps that were computed again.
    #[cfg(test)]
    pub n_kept: usize,
}

/// Gradients that are summed together.
struct GradientBucket {
    params: Vec<(ParamKey, usize)>,
    /// Gradients that this part of the step has yet to complete.
    n_missing: usize,
}

/// The gradients of a step as this rank has them.
pub struct OwnGradients<'g> {
    pub gradients: &'g mut Gradients,
    /// Where they are summed in an order that does not matter.
    pub exact: &'g mut Option<ExactSums>,
}

impl<'a> GradientSums<'a> {
    /// Of these parameters: the last first, which backward reaches first.
    pub fn new(world: &'a World, wire: WireFormat, params: &Params) -> Self {
        let values = params.values();
        let n_all: usize = values.iter().map(|value| value.shape().elements()).sum();
        let most = BUCKET_VALUES.min(n_all.div_ceil(LEAST_BUCKETS));
        let mut keys: Vec<ParamKey> = params.keys().collect();
        keys.reverse();
        let mut buckets = vec![GradientBucket { params: Vec::new(), n_missing: 0 }];
        let (mut bucket_of, mut n_values) = (vec![0; keys.len()], 0);
        for key in keys {
            if n_values >= most {
                buckets.push(GradientBucket { params: Vec::new(), n_missing: 0 });
                n_values = 0;
            }
            let n = values[key.index()].shape().elements();
            bucket_of[key.index()] = buckets.len() - 1;
            buckets.last_mut().expect("there is one from the start").params.push((key, n));
            n_values += n;
        }
        Self {
            world,
            wire,
            buckets,
            bucket_of,
            on_their_way: VecDeque::new(),
            n_written: 0,
            #[cfg(test)]
            n_kept: 0,
        }
    }

    /// A part of a step begins, or begins again: no gradient is complete. Sums that have arrived are kept.
    pub fn begin(&mut self, gradients: &Gradients) -> Result<()> {
        for bucket in self.buckets[..self.n_written].iter().rev() {
            let mut sums = Vec::new();
            for (key, n) in &bucket.params {
                sums.extend(gradients.read(*key)?.unwrap_or_else(|| vec![0.0; *n]));
            }
            let arrived = bucket.params.iter().map(|(key, _)| gradients.get(*key).is_some());
            sums.extend(arrived.map(|arrived| f32::from(u8::from(arrived))));
            self.on_their_way.push_front(Pending::ready(sums));
        }
        self.n_written = 0;
        #[cfg(test)]
        {
            self.n_kept += self.n_sent();
        }
        self.buckets.iter_mut().for_each(|bucket| bucket.n_missing = bucket.params.len());
        Ok(())
    }

    /// A gradient is complete: sends the buckets that are, and takes those that have arrived.
    pub fn complete(&mut self, key: ParamKey, own: &mut OwnGradients<'_>) -> compute::Result<()> {
        self.buckets[self.bucket_of[key.index()]].n_missing -= 1;
        self.write_arrived(own)?;
        while self.on_their_way.len() < MOST_BUCKETS && self.is_complete(self.n_sent()) {
            self.send(own)?;
        }
        Ok(())
    }

    /// The gradients of this rank are all there: sends those that were not sent yet.
    pub fn send_rest(&mut self, own: &mut OwnGradients<'_>) -> Result<()> {
        self.buckets.iter_mut().for_each(|bucket| bucket.n_missing = 0);
        while self.n_sent() < self.buckets.len() {
            self.write_arrived(own)?;
            if self.on_their_way.len() == MOST_BUCKETS {
                self.write_next(own)?;
            }
            self.send(own)?;
        }
        Ok(())
    }

    /// This rank has no gradients for the others, which wait for them: sends zeros, and drops what arrives.
    pub fn give_up(&mut self, own: &mut OwnGradients<'_>) -> Result<()> {
        own.gradients.reset();
        own.exact.iter_mut().for_each(ExactSums::reset);
        while self.n_sent() < self.buckets.len() {
            if self.on_their_way.len() == MOST_BUCKETS
                && let Some(sums) = self.on_their_way.pop_front()
            {
                sums.wait()?;
                self.n_written += 1;
            }
            self.send(own)?;
        }
        Ok(())
    }

    /// Waits until the gradients are the sums over all ranks. One that arrived nowhere stays missing.
    pub fn take(&mut self, own: &mut OwnGradients<'_>) -> Result<()> {
        while !self.on_their_way.is_empty() {
            self.write_next(own)?;
        }
        self.n_written = 0;
        Ok(())
    }

    /// Forgets a step that some rank has given up.
    pub fn forget(&mut self) {
        self.on_their_way.clear();
        self.n_written = 0;
    }

    /// Whether the sum of a gradient has arrived.
    pub fn has_arrived(&self, key: ParamKey) -> bool {
        self.bucket_of[key.index()] < self.n_written
    }

    fn n_sent(&self) -> usize {
        self.n_written + self.on_their_way.len()
    }

    fn is_complete(&self, bucket: usize) -> bool {
        self.buckets.get(bucket).is_some_and(|bucket| bucket.n_missing == 0)
    }

    /// Hands the next bucket over.
    fn send(&mut self, own: &mut OwnGradients<'_>) -> compute::Result<()> {
        let sums = self.start_sum(&self.buckets[self.n_sent()].params, own)?;
        self.on_their_way.push_back(sums);
        Ok(())
    }

    fn start_sum(
        &self,
        params: &[(ParamKey, usize)],
        OwnGradients { gradients, exact }: &mut OwnGradients<'_>,
    ) -> compute::Result<Pending<Vec<f32>>> {
        if let Some(exact) = exact {
            params.iter().try_for_each(|(key, _)| exact.add(*key, gradients))?;
            let read = |key| Ok(exact.get(key).map(<[f64]>::to_vec));
            return Ok(self.world.start_sum_f64(values(params, read)?));
        }
        let values = values(params, |key| gradients.read(key))?;
        Ok(match self.wire {
            WireFormat::F32 => self.world.start_sum(values),
            WireFormat::Bf16 => self.world.start_sum_bf16(values),
        })
    }

    /// Takes sums that have arrived, in order, of gradients that nothing is added to any more.
    fn write_arrived(&mut self, own: &mut OwnGradients<'_>) -> compute::Result<()> {
        while self.is_complete(self.n_written)
            && let Some(sums) = self.on_their_way.front_mut().and_then(Pending::returned)
        {
            write(&self.buckets[self.n_written].params, sums, own.gradients)?;
            self.on_their_way.pop_front();
            self.n_written += 1;
        }
        Ok(())
    }

    /// Waits for the next sums.
    fn write_next(&mut self, own: &mut OwnGradients<'_>) -> Result<()> {
        let Some(sums) = self.on_their_way.pop_front() else { return Ok(()) };
        write(&self.buckets[self.n_written].params, &sums.wait()?, own.gradients)?;
        self.n_written += 1;
        Ok(())
    }
}

/// The numbers of a bucket: of every gradient, zeros where none arrived, then for each whether it did.
fn values<N: From<u8> + Copy>(
    params: &[(ParamKey, usize)],
    mut read: impl FnMut(ParamKey) -> compute::Result<Option<Vec<N>>>,
) -> compute::Result<Vec<N>> {
    let n_values: usize = params.iter().map(|(_, n)| n + 1).sum();
    let (mut values, mut arrived) = (Vec::with_capacity(n_values), Vec::new());
    for (key, n) in params {
        let gradient = read(*key)?;
        arrived.push(N::from(u8::from(gradient.is_some())));
        match gradient {
            Some(gradient) => values.extend(gradient),
            None => values.resize(values.len() + n, N::from(0)),
        }
    }
    values.extend(arrived);
    Ok(values)
}

/// Puts the sums of a bucket in the place of its gradients; one that arrived here counts, and so does one that arrived
/// anywhere.
fn write(
    params: &[(ParamKey, usize)],
    sums: &[f32],
    gradients: &mut Gradients,
) -> compute::Result<()> {
    let (mut rest, arrived) = sums.split_at(sums.len() - params.len());
    for ((key, n), arrived) in params.iter().zip(arrived) {
        let (sum, others) = rest.split_at(*n);
        rest = others;
        if *arrived > 0.0 {
            gradients.write(*key, sum)?;
        }
    }
    Ok(())
}
