//! What is trained. Parameters live in one place, models hold their keys, and gradients have the
//! same keys: so an optimizer sees lists, whatever the model looks like.

use crate::{ComputeError, Device, Dtype, Result, Tag, Tensor};

/// Names one parameter of a [`Params`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParamKey(usize);

impl ParamKey {
    /// Its place among the parameters.
    pub fn index(self) -> usize {
        self.0
    }
}

/// The trained tensors, in the order they were added.
#[derive(Debug, Default)]
pub struct Params {
    values: Vec<Tensor>,
}

impl Params {
    /// Adds a tensor and names it.
    pub fn add(&mut self, value: Tensor) -> ParamKey {
        self.values.push(value);
        ParamKey(self.values.len() - 1)
    }

    /// The value of one.
    pub fn get(&self, key: ParamKey) -> &Tensor {
        &self.values[key.0]
    }

    /// All values, in order.
    pub fn values(&self) -> &[Tensor] {
        &self.values
    }

    /// All values to be changed. Fails if something, such as a living tape, still reads one.
    pub fn values_mut(&mut self) -> Result<&mut [Tensor]> {
        for (index, value) in self.values.iter().enumerate() {
            if value.sharers() > 1 {
                return Err(ComputeError::InUse { index, readers: value.sharers() - 1 });
            }
        }
        Ok(&mut self.values)
    }
}

/// One f32 gradient per parameter that had a part in a loss. Memory is taken when the first
/// gradient arrives and kept from then on.
#[derive(Debug, Default)]
pub struct Gradients {
    slots: Vec<Slot>,
}

#[derive(Debug, Default)]
struct Slot {
    gradient: Option<Tensor>,
    /// Whether it holds something to add to, rather than what is left of the step before.
    filled: bool,
}

impl Gradients {
    /// With memory for all of them from the start, so that what a step takes does not depend on
    /// which step was the first.
    pub fn reserved(device: &Device, params: &Params) -> Result<Self> {
        let mut gradients = Self::default();
        gradients.reserve(device, params)?;
        Ok(gradients)
    }

    /// Takes memory for those that have none. A backward that failed in the middle of an op has lost
    /// the memory that the op wrote to.
    pub fn reserve(&mut self, device: &Device, params: &Params) -> Result<()> {
        self.slots.resize_with(params.values.len(), Slot::default);
        let empty = self.slots.iter_mut().zip(&params.values);
        let mut empty = empty.filter(|(slot, _)| slot.gradient.is_none());
        device.tagged(Tag::Gradients, || {
            empty.try_for_each(|(slot, value)| {
                let gradient = Some(device.alloc(value.shape(), Dtype::F32)?);
                *slot = Slot { gradient, filled: false };
                Ok(())
            })
        })
    }

    /// The gradient of one parameter, if the last backward passes reached it.
    pub fn get(&self, key: ParamKey) -> Option<&Tensor> {
        let slot = self.slots.get(key.0).filter(|slot| slot.filled)?;
        slot.gradient.as_ref()
    }

    /// All gradients in the order of the parameters; none where none arrived.
    pub fn all(&self, n_params: usize) -> Vec<Option<&Tensor>> {
        (0..n_params).map(|index| self.get(ParamKey(index))).collect()
    }

    /// Forgets the numbers and keeps the memory: the next backward writes instead of adding.
    pub fn reset(&mut self) {
        self.slots.iter_mut().for_each(|slot| slot.filled = false);
    }

    /// Takes the gradient out to be written, and says whether to add to it.
    pub(crate) fn take(
        &mut self,
        index: usize,
        device: &Device,
        params: &Params,
    ) -> Result<(Tensor, bool)> {
        if self.slots.len() <= index {
            self.slots.resize_with(index + 1, Slot::default);
        }
        let slot = &mut self.slots[index];
        let gradient = match slot.gradient.take() {
            Some(gradient) => gradient,
            None => device.tagged(Tag::Gradients, || {
                device.alloc(params.values[index].shape(), Dtype::F32)
            })?,
        };
        Ok((gradient, slot.filled))
    }

    pub(crate) fn put(&mut self, index: usize, gradient: Tensor) {
        self.slots[index] = Slot { gradient: Some(gradient), filled: true };
    }
}
