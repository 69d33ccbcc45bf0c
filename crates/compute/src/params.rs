//! Trainable parameters. They are held in one list, models hold their keys, and gradients have the same keys:
//! so an optimizer sees lists, whatever the model looks like.

use std::cell::{Ref, RefCell};

use crate::{ComputeError, Device, Dtype, Result, Tag, Tensor};

/// Names one parameter of a [`Params`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParamKey(usize);

impl ParamKey {
    pub(crate) fn new(index: usize) -> Self {
        Self(index)
    }

    /// Its place among the parameters.
    pub fn index(self) -> usize {
        self.0
    }
}

/// The trained tensors, in the order they were added. A fused backward pass changes them while a tape reads
/// them, one at a time and each after its last reader.
#[derive(Debug, Default)]
pub struct Params {
    values: RefCell<Vec<Tensor>>,
}

impl Params {
    /// Adds a tensor and names it.
    pub fn add(&mut self, value: Tensor) -> ParamKey {
        let values = self.values.get_mut();
        values.push(value);
        ParamKey(values.len() - 1)
    }

    /// The value of one.
    pub fn get(&self, key: ParamKey) -> Ref<'_, Tensor> {
        Ref::map(self.values.borrow(), |values| &values[key.0])
    }

    /// All names, in order: that of a checkpoint's tensors and of every machine's gradients.
    pub fn keys(&self) -> impl Iterator<Item = ParamKey> + use<> {
        (0..self.values.borrow().len()).map(ParamKey)
    }

    /// All values, in order.
    pub fn values(&self) -> Ref<'_, [Tensor]> {
        Ref::map(self.values.borrow(), Vec::as_slice)
    }

    /// All values to be changed. Fails if something, such as a living tape, still reads one.
    pub fn values_mut(&mut self) -> Result<&mut [Tensor]> {
        let values = self.values.get_mut();
        for (index, value) in values.iter().enumerate() {
            if value.ref_count() > 1 {
                return Err(ComputeError::InUse { index, readers: value.ref_count() - 1 });
            }
        }
        Ok(values)
    }

    /// Lets `work` change one while others are read.
    pub(crate) fn with_mut<R>(&self, index: usize, work: impl FnOnce(&mut Tensor) -> R) -> R {
        work(&mut self.values.borrow_mut()[index])
    }
}

/// What is done with a parameter and its gradient as soon as a backward pass has completed the gradient.
pub type GradientHook<'a> = dyn FnMut(ParamKey, &mut Tensor, &Tensor) -> Result<()> + 'a;

/// What is done as soon as a backward pass has completed a gradient, which stays among the others.
pub type CompletionHook<'a> = dyn FnMut(ParamKey, &mut Gradients) -> Result<()> + 'a;

/// One gradient per parameter that the loss depends on: a flat buffer of f32, whatever the parameter's
/// dtype, in the order of the parameters. Memory is taken when the first gradient arrives and kept from
/// then on.
///
/// A buffer each, and not one for all: backward writes to one while others are read, a full fine-tune's
/// gradients are more than one buffer of a GPU may hold, and an optimizer sees tensors of the parameters'
/// shapes. What is summed over machines goes in pieces anyway.
#[derive(Debug, Default)]
pub struct Gradients {
    slots: Vec<ParamGradient>,
}

#[derive(Debug, Default)]
struct ParamGradient {
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
        let values = params.values();
        self.slots.resize_with(values.len(), ParamGradient::default);
        let empty = self.slots.iter_mut().zip(&*values);
        let mut empty = empty.filter(|(slot, _)| slot.gradient.is_none());
        device.with_tag(Tag::Gradients, || {
            empty.try_for_each(|(slot, value)| {
                let gradient = Some(device.alloc(value.shape(), Dtype::F32)?);
                *slot = ParamGradient { gradient, filled: false };
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

    /// Copies the numbers of one to the host; none if no gradient arrived, which counts as zeros.
    ///
    /// # Panics
    /// On a meta device.
    pub fn read(&self, key: ParamKey) -> Result<Option<Vec<f32>>> {
        self.get(key).map(Tensor::read).transpose()
    }

    /// Puts numbers in place of a gradient, or where none arrived.
    ///
    /// # Panics
    /// If no memory was reserved for it.
    pub fn write(&mut self, key: ParamKey, values: &[f32]) -> Result<()> {
        let ParamGradient { gradient, filled } = &mut self.slots[key.0];
        let gradient = gradient.as_mut().expect("memory is reserved before numbers are written");
        let (shape, got) = (gradient.shape(), values.len());
        if shape.elements() != got {
            return Err(ComputeError::Length { shape, got });
        }
        gradient.write(values);
        *filled = true;
        Ok(())
    }

    /// Where the numbers of one lie on an NVIDIA GPU, for a library that writes there; none if no gradient arrived.
    ///
    /// # Panics
    /// On any other device.
    pub fn cuda_address(&mut self, key: ParamKey) -> Option<u64> {
        let slot = self.slots.get_mut(key.0).filter(|slot| slot.filled)?;
        slot.gradient.as_mut().map(Tensor::address_mut)
    }

    /// Forgets the numbers and keeps the memory: the next backward writes instead of adding.
    pub fn reset(&mut self) {
        self.slots.iter_mut().for_each(|slot| slot.filled = false);
    }

    /// The same for one of them.
    pub fn reset_one(&mut self, key: ParamKey) {
        self.slots[key.0].filled = false;
    }

    /// Takes the gradient out to be written, and says whether to add to it.
    pub(crate) fn take(
        &mut self,
        index: usize,
        device: &Device,
        params: &Params,
    ) -> Result<(Tensor, bool)> {
        if self.slots.len() <= index {
            self.slots.resize_with(index + 1, ParamGradient::default);
        }
        let slot = &mut self.slots[index];
        let gradient = match slot.gradient.take() {
            Some(gradient) => gradient,
            None => device.with_tag(Tag::Gradients, || {
                device.alloc(params.values()[index].shape(), Dtype::F32)
            })?,
        };
        Ok((gradient, slot.filled))
    }

    pub(crate) fn put(&mut self, index: usize, gradient: Tensor) {
        self.slots[index] = ParamGradient { gradient: Some(gradient), filled: true };
    }

    /// Takes a gradient out for good, with its memory; none if none arrived.
    pub(crate) fn remove(&mut self, index: usize) -> Option<Tensor> {
        let slot = self.slots.get_mut(index).filter(|slot| slot.filled)?;
        std::mem::take(slot).gradient
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{AdamW, GradClip, Moments, adamw, global_norm};
    use crate::testing::device;
    use crate::{Shape, Tape};

    /// Three parameters, of which the last is not reached.
    fn gradients(device: &Device) -> (Params, Gradients) {
        let mut params = Params::default();
        for sizes in [&[2, 3][..], &[4], &[3]] {
            let shape = Shape::new(sizes);
            let numbers: Vec<f32> = (0..shape.elements()).map(|at| at as f32 - 1.0).collect();
            params.add(device.upload(shape, &numbers).unwrap());
        }
        let mut gradients = Gradients::reserved(device, &params).unwrap();
        for key in params.keys().take(2) {
            let tape = Tape::training(device, &params, 0);
            let result = tape.scale(&tape.param(key), 2.0).unwrap();
            let numbers: Vec<f32> = (0..result.shape().elements()).map(|at| at as f32).collect();
            let gradient = device.upload(result.shape(), &numbers).unwrap();
            tape.backward_from(result, gradient, &mut gradients).unwrap();
        }
        (params, gradients)
    }

    fn read(params: &Params, gradients: &Gradients) -> Vec<Option<Vec<f32>>> {
        params.keys().map(|key| gradients.read(key).unwrap()).collect()
    }

    #[test]
    fn gradients_are_read_and_written_in_the_order_of_the_parameters() {
        let device = device();
        let (params, mut gradients) = gradients(&device);
        let doubled = |n: usize| Some((0..n).map(|at| 2.0 * at as f32).collect::<Vec<_>>());
        assert_eq!(read(&params, &gradients), [doubled(6), doubled(4), None]);
        let in_use = device.usage().in_use;
        let summed: Vec<Vec<f32>> = vec![vec![3.0; 6], vec![4.0; 4], vec![0.0; 3]];
        for (key, numbers) in params.keys().zip(&summed) {
            gradients.write(key, numbers).unwrap();
        }
        let expected: Vec<_> = summed.into_iter().map(Some).collect();
        assert_eq!(read(&params, &gradients), expected);
        assert_eq!(device.usage().in_use, in_use, "they are written where they lie");
        let norm = global_norm(&gradients.all(3), &device).unwrap().to_vec::<f32>();
        assert!((norm[0] - (6.0f32 * 9.0 + 4.0 * 16.0).sqrt()).abs() < 1e-5, "{norm:?}");
        gradients.reset();
        assert_eq!(read(&params, &gradients), [None, None, None]);
    }

    /// As one machine of several would: what it reads, another writes.
    #[test]
    fn a_step_of_gradients_that_were_written_is_that_of_their_own() {
        let device = device();
        let step = |written: bool| {
            let (mut params, mut gradients) = gradients(&device);
            if written {
                let read = read(&params, &gradients);
                gradients = Gradients::reserved(&device, &params).unwrap();
                for (key, numbers) in params.keys().zip(&read) {
                    if let Some(numbers) = numbers {
                        gradients.write(key, numbers).unwrap();
                    }
                }
            }
            let mut state: Vec<_> =
                params.values().iter().map(|value| Moments::new(value).unwrap()).collect();
            let all = gradients.all(3);
            let clip = GradClip { norm: global_norm(&all, &device).unwrap(), max_norm: 1.0 };
            let values = params.values_mut().unwrap();
            adamw(values, &all, &mut state, AdamW::default(), Some(&clip)).unwrap();
            values.iter().map(Tensor::to_vec::<f32>).collect::<Vec<_>>()
        };
        assert_eq!(step(false), step(true));
    }

    #[test]
    fn other_lengths_are_refused() {
        let device = device();
        let (params, mut gradients) = gradients(&device);
        let key = params.keys().nth(1).unwrap();
        let error = gradients.write(key, &[0.0; 3]).unwrap_err().to_string();
        assert_eq!(error, "3 values do not fill a tensor of shape [4], which has 4");
        assert_eq!(gradients.read(key).unwrap().unwrap(), [0.0, 2.0, 4.0, 6.0]);
    }
}
