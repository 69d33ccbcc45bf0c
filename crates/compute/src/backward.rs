//! The backward pass: gradients that are being computed, and how ops write to them.

use std::collections::HashMap;

use crate::op::OpContext;
use crate::ops::accumulate;
use crate::var::{GradTarget, Var};
use crate::{
    CompletionHook, Dtype, GradientHook, Gradients, ParamKey, Params, Result, Shape, Tensor,
};

/// The gradients during a backward pass through a tape.
pub(crate) struct BackwardPass<'a> {
    pub cx: OpContext<'a>,
    pub params: &'a Params,
    pub sink: GradientSink<'a>,
    /// Parameters whose gradients are complete after the record at work: no record before it uses them.
    pub completing: Vec<usize>,
    pub nodes: Vec<Option<Tensor>>,
    /// Gradients of an activation's input, by the node of its result: from readers of the result that passed
    /// the gradient through the activation themselves.
    pub through_activation: HashMap<usize, Tensor>,
}

/// Where the gradients of parameters go.
pub(crate) struct GradientSink<'a> {
    pub gradients: &'a mut Gradients,
    pub hook: Option<SinkHook<'a>>,
}

/// Called with each gradient when it is complete.
pub(crate) enum SinkHook<'a> {
    /// The gradient is freed after that.
    Fused(&'a mut GradientHook<'a>),
    /// The gradient stays.
    Completed(&'a mut CompletionHook<'a>),
}

impl GradientSink<'_> {
    /// The same for a part of the backward pass.
    pub fn reborrow(&mut self) -> GradientSink<'_> {
        let hook = self.hook.as_mut().map(|hook| match hook {
            SinkHook::Fused(hook) => SinkHook::Fused(&mut **hook as &mut GradientHook<'_>),
            SinkHook::Completed(hook) => {
                SinkHook::Completed(&mut **hook as &mut CompletionHook<'_>)
            }
        });
        GradientSink { gradients: self.gradients, hook }
    }
}

/// Where a tape uses each parameter first, which is where backward uses it last: how many records came before.
#[derive(Default)]
pub(crate) struct FirstUses {
    /// Parameter and number of records, in the order of the uses.
    uses: Vec<(usize, usize)>,
    is_used: Vec<bool>,
}

impl FirstUses {
    /// Notes parameters that are used after so many records.
    pub fn add(&mut self, params: impl IntoIterator<Item = usize>, n_records: usize) {
        for index in params {
            let end = self.is_used.len().max(index + 1);
            self.is_used.resize(end, false);
            if !std::mem::replace(&mut self.is_used[index], true) {
                self.uses.push((index, n_records));
            }
        }
    }

    /// Whether a parameter is used.
    pub fn contains(&self, param: usize) -> bool {
        self.is_used.get(param).copied().unwrap_or(false)
    }

    /// All parameters.
    pub fn params(&self) -> Vec<usize> {
        self.uses.iter().map(|(index, _)| *index).collect()
    }

    /// Takes out the parameters that are not used by the first `n_records`. Of a block within another tape,
    /// only those that are in `outer` are returned, and taken out of it.
    pub fn take_unused_by(
        &mut self,
        n_records: usize,
        outer: Option<&mut Vec<usize>>,
    ) -> Vec<usize> {
        let start = self.uses.partition_point(|(_, before)| *before < n_records);
        let mut found: Vec<usize> = self.uses.drain(start..).map(|(index, _)| index).collect();
        if let Some(outer) = outer {
            found.retain(|index| outer.contains(index));
            outer.retain(|index| !found.contains(index));
        }
        found
    }
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
            GradTarget::Param(index) => {
                self.sink.gradients.take(index, self.cx.device, self.params)?
            }
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
                self.sink.gradients.put(index, slot.tensor.into_shape(shape));
            }
            Some(GradTarget::Node(node)) => self.nodes[node] = Some(slot.tensor),
            None => {}
        }
    }

    /// Hands parameters whose gradients are complete to the hook, if there is one.
    pub fn complete(&mut self) -> Result<()> {
        let GradientSink { gradients, hook: Some(hook) } = &mut self.sink else { return Ok(()) };
        for index in std::mem::take(&mut self.completing) {
            let key = ParamKey::new(index);
            match hook {
                SinkHook::Completed(hook) => hook(key, gradients)?,
                SinkHook::Fused(hook) => {
                    if let Some(gradient) = gradients.remove(index) {
                        self.params.with_mut(index, |param| hook(key, param, &gradient))?;
                    }
                }
            }
        }
        Ok(())
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
