//! The backward pass: gradients that are being computed, and how ops write to them.

use std::collections::HashMap;

use crate::op::OpContext;
use crate::ops::accumulate;
use crate::var::{GradTarget, Var};
use crate::{Dtype, Gradients, Params, Result, Shape, Tensor};

/// The gradients during a backward pass through a tape.
pub(crate) struct BackwardPass<'a> {
    pub cx: OpContext<'a>,
    pub params: &'a Params,
    pub gradients: &'a mut Gradients,
    pub nodes: Vec<Option<Tensor>>,
    /// Gradients of an activation's input, by the node of its result: from readers of the result that passed
    /// the gradient through the activation themselves.
    pub through_activation: HashMap<usize, Tensor>,
}

/// A gradient taken out to be written by an op, and put back with [`BackwardPass::put`].
pub(crate) struct GradientSlot {
    pub tensor: Tensor,
    /// Whether to add to what is there. If not, the memory is uninitialised.
    pub add: bool,
    target: Option<GradTarget>,
}

impl BackwardPass<'_> {
    /// The gradient of `source`, to be written or added to.
    pub fn slot(&mut self, source: GradTarget, shape: Shape, dtype: Dtype) -> Result<GradientSlot> {
        let (tensor, add) = match source {
            GradTarget::Param(index) => self.gradients.take(index, self.cx.device, self.params)?,
            GradTarget::Node(node) => match self.nodes[node].take() {
                Some(gradient) => (gradient.into_unique()?, true),
                None => (self.cx.alloc(shape, dtype)?, false),
            },
        };
        // A tensor that was reshaped has one gradient, seen by each of its readers as it was read.
        Ok(GradientSlot { tensor: tensor.into_shape(shape), add, target: Some(source) })
    }

    /// The slot of an input, if a gradient is wanted for it.
    pub fn slot_of(
        &mut self,
        source: Option<GradTarget>,
        shape: Shape,
        dtype: Dtype,
    ) -> Result<Option<GradientSlot>> {
        source.map(|source| self.slot(source, shape, dtype)).transpose()
    }

    /// A buffer for a gradient that nobody needs, from a kernel that computes several at once.
    pub fn scratch_slot(&mut self, shape: Shape, dtype: Dtype) -> Result<GradientSlot> {
        Ok(GradientSlot { tensor: self.cx.workspace(shape, dtype)?, add: false, target: None })
    }

    pub fn put(&mut self, slot: GradientSlot) {
        match slot.target {
            Some(GradTarget::Param(index)) => {
                let shape = self.params.values()[index].shape();
                self.gradients.put(index, slot.tensor.into_shape(shape));
            }
            Some(GradTarget::Node(node)) => self.nodes[node] = Some(slot.tensor),
            None => {}
        }
    }

    /// Passes on the gradient of an activation's input, where the activation's result has this node.
    pub fn pass_through(&mut self, node: usize, gradient: Tensor) -> Result<()> {
        let sum = match self.through_activation.remove(&node) {
            None => gradient,
            Some(sum) => self.sum(sum, &gradient)?,
        };
        self.through_activation.insert(node, sum);
        Ok(())
    }

    /// The first with the other one added.
    pub fn sum(&mut self, sum: Tensor, other: &Tensor) -> Result<Tensor> {
        let mut slot = GradientSlot { tensor: sum.into_unique()?, add: true, target: None };
        accumulate(self.cx, &mut slot, other);
        Ok(slot.tensor)
    }

    /// Passes a whole gradient on, if it is needed.
    pub fn pass(&mut self, source: Option<GradTarget>, gradient: Tensor) -> Result<()> {
        let Some(source) = source else { return Ok(()) };
        if let GradTarget::Node(node) = source
            && self.nodes[node].is_none()
        {
            self.nodes[node] = Some(gradient);
            return Ok(());
        }
        let mut slot = self.slot(source, gradient.shape(), gradient.dtype())?;
        accumulate(self.cx, &mut slot, &gradient);
        self.put(slot);
        Ok(())
    }
}

/// The gradients of leaf tensors.
pub struct LeafGradients(pub(crate) Vec<Option<Tensor>>);

impl LeafGradients {
    /// The gradient of a leaf, if any reached it.
    pub fn take(&mut self, leaf: &Var) -> Option<Tensor> {
        match leaf.grad_target? {
            GradTarget::Node(node) => self.0[node].take(),
            GradTarget::Param(_) => None,
        }
    }
}
