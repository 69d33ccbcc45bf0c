//! The backward pass of a linear layer: gradients of its bias, weight and LoRA, and of x. Where x is the result of an
//! activation, the gradient goes through that in the same pass.

use std::rc::Rc;

use super::{Dropout, cpu, cuda, gpu};
use crate::backward::{BackwardPass, GradientSlot};
use crate::device::Backend;
use crate::op::OpContext;
use crate::ops::accumulate;
use crate::ops::matmul::{FusedMatmul, Matmul, Operand};
use crate::var::{Activated, GradTarget, SavedTensor, Var};
use crate::{Dtype, Quantised, Result, Shape, Tensor};

/// What backward needs.
pub(super) struct LinearBackward {
    pub layer: LayerBackward,
    pub onto: Option<GradTarget>,
}

/// The same, of the matmuls alone.
pub(super) struct LayerBackward {
    pub x: InputGradient,
    pub saved_x: Option<SavedTensor>,
    pub weight: SavedWeight<SavedTensor>,
    pub bias: Option<GradTarget>,
    pub lora: Option<LoraBackward>,
}

/// Where the gradient of an input goes.
pub(super) struct InputGradient {
    pub target: Option<GradTarget>,
    pub shape: Shape,
    /// If the input is an activation's result: of what.
    pub activated: Option<Rc<Activated>>,
}

impl InputGradient {
    /// Of one of the op's inputs.
    pub fn of(x: &Var) -> Self {
        Self { target: x.grad_target(), shape: x.shape(), activated: x.activated.clone() }
    }

    /// Passes on a gradient that is a sum of matmuls, through the activation before the layer if there is one.
    pub fn pass(
        &self,
        back: &mut BackwardPass<'_>,
        matmuls: &[Matmul<'_>],
        dtype: Dtype,
    ) -> Result<()> {
        let (Some(target), cx) = (self.target, back.cx) else { return Ok(()) };
        if let (Some(activated), GradTarget::Node(node)) = (&self.activated, target) {
            let mut before = cx.alloc(self.shape, dtype)?;
            let slope = Some(&**activated);
            FusedMatmul { derivative_at: slope, ..FusedMatmul::new(matmuls, &mut before) }
                .run(cx)?;
            return back.pass_through(node, before);
        }
        let mut slot = back.slot(target, self.shape, dtype)?;
        FusedMatmul { add: slot.add, ..FusedMatmul::new(matmuls, &mut slot.tensor) }.run(cx)?;
        back.put(slot);
        Ok(())
    }
}

/// The weight as saved for backward.
#[derive(Clone)]
pub(in crate::ops) enum SavedWeight<T> {
    Dense(T, Option<GradTarget>),
    Quantised(Quantised),
}

impl SavedWeight<SavedTensor> {
    pub fn is_trained(&self) -> bool {
        matches!(self, Self::Dense(_, Some(_)))
    }

    pub fn get(self, cx: OpContext<'_>) -> Result<SavedWeight<Tensor>> {
        Ok(match self {
            Self::Dense(kept, source) => SavedWeight::Dense(kept.get(cx)?, source),
            Self::Quantised(quantised) => SavedWeight::Quantised(quantised),
        })
    }
}

impl SavedWeight<Tensor> {
    /// As an operand for gradients.
    pub fn matrix(&self, gradient: Dtype) -> Operand<'_> {
        match self {
            Self::Dense(tensor, _) => Operand::beside(tensor, gradient),
            Self::Quantised(quantised) => Operand::quantised(quantised, gradient),
        }
    }
}

pub(super) struct LoraBackward {
    /// scale·x·Aᵀ
    pub inner: Tensor,
    pub down: (Tensor, Option<GradTarget>),
    pub up: (Tensor, Option<GradTarget>),
    pub scale: f32,
    pub dropout: Option<Dropout>,
}

impl LinearBackward {
    pub fn backward(self, back: &mut BackwardPass<'_>, gradient: Tensor) -> Result<()> {
        self.layer.backward(back, &gradient)?;
        back.pass(self.onto, gradient)
    }
}

impl LayerBackward {
    fn backward(self, back: &mut BackwardPass<'_>, gradient: &Tensor) -> Result<()> {
        let cx = back.cx;
        let outputs = gradient.shape().width();
        if let Some(slot) = back.slot_of(self.bias, [outputs].into(), Dtype::F32)? {
            column_sums(back, gradient, slot);
        }
        let x = self.saved_x.map(|kept| kept.get(cx)).transpose()?;
        let weight = self.weight.get(cx)?;
        if let SavedWeight::Dense(weight, source) = &weight
            && let Some(mut slot) = back.slot_of(*source, weight.shape(), weight.dtype())?
        {
            let x = x.as_ref().expect("saved because the weight is trained");
            let matmul = Matmul::new(Operand::from(gradient).t(), x.into());
            FusedMatmul { add: slot.add, ..FusedMatmul::new(&[matmul], &mut slot.tensor) }
                .run(cx)?;
            back.put(slot);
        }
        let inner_gradient = match &self.lora {
            Some(lora) => Some(lora.backward(back, gradient, x.as_ref())?),
            None => None,
        };
        drop(x);
        let Some(target) = self.x.target else { return Ok(()) };
        let (shape, dtype) = (self.x.shape, gradient.dtype());
        let of_weight = Matmul::new(gradient, weight.matrix(dtype));
        let Some((lora, inner)) = self.lora.as_ref().zip(inner_gradient.as_ref()) else {
            return self.x.pass(back, &[of_weight], dtype);
        };
        let down = &lora.down.0;
        let Some(dropout) = lora.dropout else {
            let [inner, down] = [inner, down].map(|f| Operand::beside(f, dtype));
            return self.x.pass(back, &[of_weight, Matmul::new(inner, down)], dtype);
        };
        let mut slot = back.slot(target, shape, dtype)?;
        FusedMatmul { add: slot.add, ..FusedMatmul::new(&[of_weight], &mut slot.tensor) }
            .run(cx)?;
        let mut seen = cx.workspace(shape, dtype)?;
        FusedMatmul::new(&[Matmul::new(inner, down.into())], &mut seen).run(cx)?;
        slot.add = true;
        accumulate(cx, &mut slot, &dropout.apply(cx, &seen)?);
        back.put(slot);
        Ok(())
    }
}

/// The gradient of a bias: the sum of each column.
pub(in crate::ops) fn column_sums(
    back: &mut BackwardPass<'_>,
    gradient: &Tensor,
    mut slot: GradientSlot,
) {
    back.cx.count("column_sums", gradient.shape().elements(), &[gradient]);
    match back.cx.backend() {
        Backend::Meta => {}
        Backend::Cpu(backend) => cpu::column_sums(backend, gradient, &mut slot.tensor, slot.add),
        Backend::Cuda(backend) => cuda::column_sums(backend, gradient, &mut slot.tensor, slot.add),
        Backend::Gpu(backend) => gpu::column_sums(backend, gradient, &mut slot.tensor, slot.add),
    }
    back.put(slot);
}

impl LoraBackward {
    /// Gradients of A and B; returns scale·gradient·B.
    fn backward(
        &self,
        back: &mut BackwardPass<'_>,
        gradient: &Tensor,
        x: Option<&Tensor>,
    ) -> Result<Tensor> {
        let (cx, (down, up)) = (back.cx, (&self.down.0, &self.up.0));
        let mut inner_gradient = cx.workspace(self.inner.shape(), self.inner.dtype())?;
        let matmul = Matmul { scale: self.scale, ..Matmul::new(gradient, up.into()) };
        FusedMatmul::new(&[matmul], &mut inner_gradient).run(cx)?;
        if let Some(mut slot) = back.slot_of(self.up.1, up.shape(), Dtype::F32)? {
            let matmul = Matmul::new(Operand::from(gradient).t(), (&self.inner).into());
            FusedMatmul { add: slot.add, ..FusedMatmul::new(&[matmul], &mut slot.tensor) }
                .run(cx)?;
            back.put(slot);
        }
        if let Some(mut slot) = back.slot_of(self.down.1, down.shape(), Dtype::F32)? {
            let x = x.expect("saved because A is trained");
            let dropped = self.dropout.map(|dropout| dropout.apply(cx, x)).transpose()?;
            let seen = dropped.as_ref().unwrap_or(x);
            let matmul = Matmul::new(Operand::from(&inner_gradient).t(), seen.into());
            FusedMatmul { add: slot.add, ..FusedMatmul::new(&[matmul], &mut slot.tensor) }
                .run(cx)?;
            back.put(slot);
        }
        Ok(inner_gradient)
    }
}
