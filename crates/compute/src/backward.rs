//! Going back: the gradients under way, and how ops write to them.

use std::collections::HashMap;

use crate::op::Place;
use crate::ops::accumulate;
use crate::var::{Source, Var};
use crate::{Dtype, Gradients, Params, Result, Shape, Tensor};

/// The gradients under way while a tape is gone back through.
pub(crate) struct Backward<'a> {
    pub place: Place<'a>,
    pub params: &'a Params,
    pub gradients: &'a mut Gradients,
    pub nodes: Vec<Option<Tensor>>,
    /// Gradients of what an activation was applied to, by the node of its result: from readers of the result
    /// that went through the activation on their way.
    pub through: HashMap<usize, Tensor>,
}

/// A gradient taken out to be written by an op, and put back with [`Backward::put`].
pub(crate) struct Slot {
    pub tensor: Tensor,
    /// Whether to add to what is there. If not, the memory holds anything.
    pub add: bool,
    source: Option<Source>,
}

impl Backward<'_> {
    /// The gradient of `source`, to be written or added to.
    pub fn slot(&mut self, source: Source, shape: Shape, dtype: Dtype) -> Result<Slot> {
        let (tensor, add) = match source {
            Source::Param(index) => self.gradients.take(index, self.place.device, self.params)?,
            Source::Node(node) => match self.nodes[node].take() {
                Some(gradient) => (gradient.unshared()?, true),
                None => (self.place.alloc(shape, dtype)?, false),
            },
        };
        // A tensor that was reshaped has one gradient, seen by each of its readers as it was read.
        Ok(Slot { tensor: tensor.into_shape(shape), add, source: Some(source) })
    }

    /// The slot of an input, if a gradient is wanted for it.
    pub fn slot_of(
        &mut self,
        source: Option<Source>,
        shape: Shape,
        dtype: Dtype,
    ) -> Result<Option<Slot>> {
        source.map(|source| self.slot(source, shape, dtype)).transpose()
    }

    /// Room for a gradient that nobody wants, from a kernel that finds several at once.
    pub fn unwanted(&mut self, shape: Shape, dtype: Dtype) -> Result<Slot> {
        Ok(Slot { tensor: self.place.workspace(shape, dtype)?, add: false, source: None })
    }

    pub fn put(&mut self, slot: Slot) {
        match slot.source {
            Some(Source::Param(index)) => {
                let shape = self.params.values()[index].shape();
                self.gradients.put(index, slot.tensor.into_shape(shape));
            }
            Some(Source::Node(node)) => self.nodes[node] = Some(slot.tensor),
            None => {}
        }
    }

    /// Hands on a whole gradient of what an activation was applied to, whose result has this node.
    pub fn pass_through(&mut self, node: usize, gradient: Tensor) -> Result<()> {
        let sum = match self.through.remove(&node) {
            None => gradient,
            Some(sum) => self.sum(sum, &gradient)?,
        };
        self.through.insert(node, sum);
        Ok(())
    }

    /// The first with the other one added.
    pub fn sum(&mut self, sum: Tensor, other: &Tensor) -> Result<Tensor> {
        let mut slot = Slot { tensor: sum.unshared()?, add: true, source: None };
        accumulate(self.place, &mut slot, other);
        Ok(slot.tensor)
    }

    /// Hands a whole gradient on, if it is wanted.
    pub fn pass(&mut self, source: Option<Source>, gradient: Tensor) -> Result<()> {
        let Some(source) = source else { return Ok(()) };
        if let Source::Node(node) = source
            && self.nodes[node].is_none()
        {
            self.nodes[node] = Some(gradient);
            return Ok(());
        }
        let mut slot = self.slot(source, gradient.shape(), gradient.dtype())?;
        accumulate(self.place, &mut slot, &gradient);
        self.put(slot);
        Ok(())
    }
}

/// The gradients that reached tensors from outside.
pub struct Leaves(pub(crate) Vec<Option<Tensor>>);

impl Leaves {
    /// The gradient of a leaf, if any reached it.
    pub fn take(&mut self, leaf: &Var) -> Option<Tensor> {
        match leaf.source? {
            Source::Node(node) => self.0[node].take(),
            Source::Param(_) => None,
        }
    }
}
