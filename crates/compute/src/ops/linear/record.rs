//! The way back through a linear layer: gradients of its bias, weight and adapter, and of x. Where x is what an
//! activation gave, the gradient goes through that in the same pass.

use std::rc::Rc;

use super::{Dropout, cpu, cuda, gpu};
use crate::backward::{Backward, Slot};
use crate::device::Engine;
use crate::op::Place;
use crate::ops::accumulate;
use crate::ops::matmul::{MatMul, Matrix, Product};
use crate::var::{Activated, Kept, Source};
use crate::{Dtype, Quantised, Result, Shape, Tensor};

/// What backward needs.
pub(super) struct Record {
    pub layer: LayerRecord,
    pub onto: Option<Source>,
}

/// The same, of the products alone.
pub(super) struct LayerRecord {
    pub x: (Option<Source>, Shape),
    /// If x is an activation's result: of what.
    pub activated: Option<Rc<Activated>>,
    pub kept_x: Option<Kept>,
    pub weight: Held<Kept>,
    pub bias: Option<Source>,
    pub lora: Option<LoraRecord>,
}

/// The weight between forward and backward: kept, and then at hand.
#[derive(Clone)]
pub(super) enum Held<T> {
    Dense(T, Option<Source>),
    Quantised(Quantised),
}

impl Held<Kept> {
    pub fn is_trained(&self) -> bool {
        matches!(self, Self::Dense(_, Some(_)))
    }

    pub fn get(self, place: Place<'_>) -> Result<Held<Tensor>> {
        Ok(match self {
            Self::Dense(kept, source) => Held::Dense(kept.get(place)?, source),
            Self::Quantised(quantised) => Held::Quantised(quantised),
        })
    }
}

impl Held<Tensor> {
    /// As a factor of gradients.
    pub fn matrix(&self, gradient: Dtype) -> Matrix<'_> {
        match self {
            Self::Dense(tensor, _) => Matrix::beside(tensor, gradient),
            Self::Quantised(quantised) => Matrix::quantised(quantised, gradient),
        }
    }
}

pub(super) struct LoraRecord {
    /// scale·x·Aᵀ
    pub inner: Tensor,
    pub down: (Tensor, Option<Source>),
    pub up: (Tensor, Option<Source>),
    pub scale: f32,
    pub dropout: Option<Dropout>,
}

impl Record {
    pub fn backward(self, back: &mut Backward<'_>, gradient: Tensor) -> Result<()> {
        self.layer.backward(back, &gradient)?;
        back.pass(self.onto, gradient)
    }
}

impl LayerRecord {
    fn backward(self, back: &mut Backward<'_>, gradient: &Tensor) -> Result<()> {
        let place = back.place;
        let outputs = gradient.shape().width();
        if let Some(slot) = back.slot_of(self.bias, [outputs].into(), Dtype::F32)? {
            column_sums(back, gradient, slot);
        }
        let x = self.kept_x.map(|kept| kept.get(place)).transpose()?;
        let weight = self.weight.get(place)?;
        if let Held::Dense(weight, source) = &weight
            && let Some(mut slot) = back.slot_of(*source, weight.shape(), weight.dtype())?
        {
            let x = x.as_ref().expect("kept because the weight is trained");
            let product = Product::new(Matrix::from(gradient).t(), x.into());
            MatMul { add: slot.add, ..MatMul::new(&[product], &mut slot.tensor) }.run(place)?;
            back.put(slot);
        }
        let inner_gradient = match &self.lora {
            Some(lora) => Some(lora.backward(back, gradient, x.as_ref())?),
            None => None,
        };
        drop(x);
        let ((source, shape), dtype) = (self.x, gradient.dtype());
        let Some(source) = source else { return Ok(()) };
        let mut products = vec![Product::new(gradient, weight.matrix(dtype))];
        let lora = self.lora.as_ref().zip(inner_gradient.as_ref());
        let is_dropped = self.lora.as_ref().is_some_and(|lora| lora.dropout.is_some());
        if let Some((LoraRecord { down: (down, _), .. }, inner)) = lora.filter(|_| !is_dropped) {
            let [inner, down] = [inner, down].map(|f| Matrix::beside(f, dtype));
            products.push(Product::new(inner, down));
        }
        if let (Some(activated), Source::Node(node), false) = (&self.activated, source, is_dropped)
        {
            let mut before = place.alloc(shape, dtype)?;
            let slope = Some(&**activated);
            MatMul { slope, ..MatMul::new(&products, &mut before) }.run(place)?;
            return back.pass_through(node, before);
        }
        let mut slot = back.slot(source, shape, dtype)?;
        MatMul { add: slot.add, ..MatMul::new(&products, &mut slot.tensor) }.run(place)?;
        if let Some((LoraRecord { dropout: Some(dropout), down: (down, _), .. }, inner)) = lora {
            let mut seen = place.workspace(shape, gradient.dtype())?;
            MatMul::new(&[Product::new(inner, down.into())], &mut seen).run(place)?;
            slot.add = true;
            accumulate(place, &mut slot, &dropout.apply(place, &seen)?);
        }
        back.put(slot);
        Ok(())
    }
}

/// The gradient of a bias: the sum of each column.
pub(in crate::ops) fn column_sums(back: &mut Backward<'_>, gradient: &Tensor, mut slot: Slot) {
    back.place.count("column_sums", gradient.shape().elements(), &[gradient]);
    match back.place.engine() {
        Engine::Meta => {}
        Engine::Cpu(engine) => cpu::column_sums(engine, gradient, &mut slot.tensor, slot.add),
        Engine::Cuda(engine) => cuda::column_sums(engine, gradient, &mut slot.tensor, slot.add),
        Engine::Gpu(engine) => gpu::column_sums(engine, gradient, &mut slot.tensor, slot.add),
    }
    back.put(slot);
}

impl LoraRecord {
    /// Gradients of A and B; returns scale·gradient·B.
    fn backward(
        &self,
        back: &mut Backward<'_>,
        gradient: &Tensor,
        x: Option<&Tensor>,
    ) -> Result<Tensor> {
        let (place, (down, up)) = (back.place, (&self.down.0, &self.up.0));
        let mut inner_gradient = place.workspace(self.inner.shape(), self.inner.dtype())?;
        let product = Product { scale: self.scale, ..Product::new(gradient, up.into()) };
        MatMul::new(&[product], &mut inner_gradient).run(place)?;
        if let Some(mut slot) = back.slot_of(self.up.1, up.shape(), Dtype::F32)? {
            let product = Product::new(Matrix::from(gradient).t(), (&self.inner).into());
            MatMul { add: slot.add, ..MatMul::new(&[product], &mut slot.tensor) }.run(place)?;
            back.put(slot);
        }
        if let Some(mut slot) = back.slot_of(self.down.1, down.shape(), Dtype::F32)? {
            let x = x.expect("kept because A is trained");
            let dropped = self.dropout.map(|dropout| dropout.apply(place, x)).transpose()?;
            let seen = dropped.as_ref().unwrap_or(x);
            let product = Product::new(Matrix::from(&inner_gradient).t(), seen.into());
            MatMul { add: slot.add, ..MatMul::new(&[product], &mut slot.tensor) }.run(place)?;
            back.put(slot);
        }
        Ok(inner_gradient)
    }
}
