//! What a session exchanges with the other ranks of a job: the gradients of a step (`gradient_sums.rs`), or the weights after
//! local steps. Copies to the host and sums over ranks overlap, in buckets.

use std::collections::VecDeque;

use cluster::{Pending, World};
use compute::ParamKey;

use super::exact_sums::ExactSums;
use super::gpu_sums::GpuSums;
use super::gradient_sums::{GradientSums, OwnGradients};
use super::session::Session;
use super::traits::Task;
use crate::config::cluster::{ClusterConfig, WireFormat};
use crate::error::Result;
use crate::model::host::to_vec;

/// Weights that are exchanged together. Chosen: 16 MB, so that many small ones take few calls.
const BUCKET_VALUES: usize = 4 << 20;
/// Buckets that are on their way while the next is copied.
const BUCKETS_AT_ONCE: usize = 2;

impl<'a, T: Task> Session<'a, T> {
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

    /// Adds the gradients of a micro-batch to the exact sums, if there are any. Those whose sums over all ranks are there
    /// already have nothing to add.
    pub(super) fn add_exactly(&mut self) -> Result<()> {
        let Self { adapters, exact: Some(exact), gradients, sums, .. } = self else {
            return Ok(());
        };
        let is_open = |key: &ParamKey| !sums.as_ref().is_some_and(|sums| sums.has_arrived(*key));
        Ok(adapters.params.keys().filter(is_open).try_for_each(|key| exact.add(key, gradients))?)
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

    /// From now on [`Self::take_sums`] has the sums of gradients over all ranks: by NCCL between GPUs, or by MPI, to which
    /// [`Self::accumulate_last`] sends them. Says which, where there was a choice.
    pub fn sum_over(&mut self, world: &'a World) -> Result<Option<String>> {
        let ClusterConfig { wire, nccl, .. } = self.config.cluster;
        let is_wanted = nccl && wire == WireFormat::F32 && self.exact.is_none();
        let (gpu_sums, said) = GpuSums::join(world, &self.device, is_wanted)?;
        if gpu_sums.is_none() {
            self.sums = Some(GradientSums::new(world, wire, &self.adapters.params));
        }
        self.gpu_sums = gpu_sums;
        Ok(said)
    }

    /// This rank's part of a step is done, or given up: sends the gradients that were not sent yet, or zeros.
    pub fn send_gradients(&mut self, is_done: bool) -> Result<()> {
        let Self { sums: Some(sums), gradients, exact, .. } = self else { return Ok(()) };
        let own = &mut OwnGradients { gradients, exact };
        if is_done { sums.send_rest(own) } else { sums.give_up(own) }
    }

    /// Buckets that were kept when a part of a step was computed again.
    #[cfg(test)]
    pub fn n_sums_kept(&self) -> usize {
        self.sums.as_ref().map_or(0, |sums| sums.n_kept)
    }

    /// Waits until gradients are the sums over all ranks.
    pub fn take_sums(&mut self) -> Result<()> {
        let Self { device, adapters, sums, gpu_sums, gradients, exact, .. } = self;
        if let Some(gpu_sums) = gpu_sums {
            return gpu_sums.sum(device, &adapters.params, gradients);
        }
        sums.as_mut().map_or(Ok(()), |sums| sums.take(&mut OwnGradients { gradients, exact }))
    }

    /// Forgets what was sent of a step that some rank has given up.
    pub fn forget_sums(&mut self) {
        self.sums.iter_mut().for_each(GradientSums::forget);
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
