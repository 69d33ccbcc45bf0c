//! What a session exchanges with the other ranks of a job: the gradients of a step, or the weights after local steps.
//! Copies to the host and sums over ranks overlap, in buckets.

use std::collections::VecDeque;

use cluster::{Pending, World, bf16};
use compute::ParamKey;

use super::exact_sums::ExactSums;
use super::session::Session;
use super::traits::Task;
use crate::config::cluster::WireFormat;
use crate::error::Result;
use crate::model::host::to_vec;

/// Gradients that are summed together. Chosen: 16 MB, so that many small ones take few calls.
const BUCKET_VALUES: usize = 4 << 20;
/// Buckets that are summed while the next is copied.
const BUCKETS_AT_ONCE: usize = 2;

impl<T: Task> Session<'_, T> {
    /// From now on gradients are summed in an order that does not matter. Takes 8 bytes of main memory for every trained
    /// parameter.
    pub fn sum_exactly(&mut self) {
        let n_params = self.adapters.params.values().len();
        self.exact = Some(ExactSums::new(self.config.base.dtype, n_params));
    }

    /// A number that is summed beside the gradients, rounded if sums shall not depend on their order.
    pub fn rounded(&self, value: f64) -> f64 {
        self.exact.as_ref().map_or(value, |exact| exact.round(value))
    }

    /// Adds the gradients of a micro-batch to the exact sums, if there are any.
    pub(super) fn add_exactly(&mut self) -> Result<()> {
        let Some(exact) = &mut self.exact else { return Ok(()) };
        Ok(exact.add(self.adapters.params.keys(), &mut self.gradients)?)
    }

    /// Takes the exact sums, if there are any, as the gradients of the step.
    pub fn take_exact_sums(&mut self) -> Result<()> {
        let Some(exact) = &self.exact else { return Ok(()) };
        for key in self.adapters.params.keys() {
            if let Some(sums) = exact.get(key) {
                self.gradients.write(key, &to_f32(sums))?;
            }
        }
        Ok(())
    }

    /// Replaces gradients by their sums over all ranks; some are summed while others are copied. One that did not arrive
    /// here counts as zeros if it arrived anywhere.
    pub fn exchange_gradients(&mut self, world: &World) -> Result<()> {
        let keys = self.arrived_anywhere(world)?;
        if self.exact.is_some() {
            let read = |session: &Self, key| Ok(session.exact_sums(key));
            return self.in_buckets(
                &keys,
                read,
                |sums| world.start_sum(sums),
                |session, key, sums| Ok(session.gradients.write(key, &to_f32(sums))?),
            );
        }
        match self.config.cluster.wire {
            WireFormat::F32 => {
                let start = |values| world.start_sum(values);
                self.in_buckets(&keys, Self::gradient, start, |session, key, sums| {
                    Ok(session.gradients.write(key, sums)?)
                })
            }
            WireFormat::Bf16 => {
                let read = |session: &Self, key| -> Result<Vec<u16>> {
                    Ok(session.gradient(key)?.into_iter().map(bf16::from_f32).collect())
                };
                let start = |values| world.start_sum_bf16(values);
                self.in_buckets(&keys, read, start, |session, key, sums| {
                    let sums: Vec<f32> = sums.iter().map(|sum| bf16::to_f32(*sum)).collect();
                    Ok(session.gradients.write(key, &sums)?)
                })
            }
        }
    }

    /// Ends a round of local steps: weights are averaged over ranks, of which this one counts `weight` of 1 in all, and the
    /// outer optimizer takes its step. Nothing changes before all has arrived. All ranks are then equal.
    pub fn outer_step(&mut self, world: Option<&World>, weight: f64) -> Result<()> {
        let keys: Vec<ParamKey> = self.adapters.params.keys().collect();
        let mut moved = Vec::with_capacity(keys.len());
        let read = |session: &Self, key: ParamKey| session.moved(key, weight as f32);
        match world {
            Some(world) => {
                let start = |values| world.start_sum(values);
                self.in_buckets(&keys, read, start, |_, _, sums: &[f32]| {
                    moved.push(sums.to_vec());
                    Ok(())
                })?;
            }
            None => moved = keys.iter().map(|key| read(self, *key)).collect::<Result<_>>()?,
        }
        let outer = self.outer.as_mut().expect("a session with local steps");
        for (param, (index, moved)) in
            self.adapters.params.values_mut()?.iter_mut().zip(moved.iter().enumerate())
        {
            outer.step(index, param, moved)?;
        }
        Ok(())
    }

    /// Whether any weight is another one than after the last outer step.
    pub fn has_moved(&self) -> Result<bool> {
        for key in self.adapters.params.keys() {
            if self.moved(key, 1.0)?.iter().any(|moved| *moved != 0.0) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// How far a parameter is from where the last outer step left it, against the direction of its steps, times `weight`.
    fn moved(&self, key: ParamKey, weight: f32) -> Result<Vec<f32>> {
        let outer = self.outer.as_ref().expect("a session with local steps");
        let mut moved = to_vec(outer.anchor(key.index()))?;
        for (moved, now) in moved.iter_mut().zip(to_vec(&self.adapters.params.get(key))?) {
            *moved = weight * (*moved - now);
        }
        Ok(moved)
    }

    /// A number that differs where any trained weight does.
    pub fn checksum(&self) -> Result<i64> {
        let mut hasher = blake3::Hasher::new();
        for key in self.adapters.params.keys() {
            to_vec(&self.adapters.params.get(key))?.iter().for_each(|value| {
                hasher.update(&value.to_le_bytes());
            });
        }
        let hash = hasher.finalize();
        Ok(i64::from_le_bytes(*hash.as_bytes().first_chunk().expect("it has 32 bytes")) >> 1)
    }

    /// Parameters whose gradients arrived at any rank, in an order that all ranks have.
    fn arrived_anywhere(&self, world: &World) -> Result<Vec<ParamKey>> {
        let keys: Vec<ParamKey> = self.adapters.params.keys().collect();
        let is_here = |key: ParamKey| match &self.exact {
            Some(exact) => exact.get(key).is_some(),
            None => self.gradients.get(key).is_some(),
        };
        let n_arrived = world.sum(keys.iter().map(|key| i64::from(is_here(*key))).collect())?;
        Ok(keys.into_iter().zip(n_arrived).filter(|(_, n)| *n > 0).map(|(key, _)| key).collect())
    }

    fn gradient(&self, key: ParamKey) -> Result<Vec<f32>> {
        let n = self.n_values(key);
        Ok(self.gradients.read(key)?.unwrap_or_else(|| vec![0.0; n]))
    }

    fn exact_sums(&self, key: ParamKey) -> Vec<f64> {
        let sums = self.exact.as_ref().and_then(|exact| exact.get(key));
        sums.map_or_else(|| vec![0.0; self.n_values(key)], <[f64]>::to_vec)
    }

    fn n_values(&self, key: ParamKey) -> usize {
        self.adapters.params.get(key).shape().elements()
    }

    /// Sums what `read` gives over all ranks by `start`, and hands the sums to `write`, parameter by parameter in order.
    pub(super) fn in_buckets<N: Copy>(
        &mut self,
        keys: &[ParamKey],
        read: impl Fn(&Self, ParamKey) -> Result<Vec<N>>,
        start: impl Fn(Vec<N>) -> Pending<Vec<N>>,
        mut write: impl FnMut(&mut Self, ParamKey, &[N]) -> Result<()>,
    ) -> Result<()> {
        let mut pending = VecDeque::new();
        let mut end =
            |session: &mut Self, lengths: Vec<(ParamKey, usize)>, sums: Pending<Vec<N>>| {
                let sums = sums.wait()?;
                let mut rest = &sums[..];
                for (key, n) in lengths {
                    let (values, others) = rest.split_at(n);
                    write(session, key, values)?;
                    rest = others;
                }
                Ok(())
            };
        for bucket in self.buckets(keys) {
            let (mut values, mut lengths) = (Vec::new(), Vec::new());
            for key in bucket {
                let read = read(self, key)?;
                lengths.push((key, read.len()));
                values.extend(read);
            }
            pending.push_back((lengths, start(values)));
            if pending.len() > BUCKETS_AT_ONCE
                && let Some((lengths, sums)) = pending.pop_front()
            {
                end(self, lengths, sums)?;
            }
        }
        pending.into_iter().try_for_each(|(lengths, sums)| end(self, lengths, sums))
    }

    /// Parameters that are summed together.
    fn buckets(&self, keys: &[ParamKey]) -> Vec<Vec<ParamKey>> {
        let mut buckets = vec![Vec::new()];
        let mut n_values = 0;
        for key in keys {
            if n_values >= BUCKET_VALUES {
                buckets.push(Vec::new());
                n_values = 0;
            }
            n_values += self.n_values(*key);
            buckets.last_mut().expect("there is one from the start").push(*key);
        }
        buckets
    }
}

fn to_f32(sums: &[f64]) -> Vec<f32> {
    sums.iter().map(|sum| *sum as f32).collect()
}
