//! Elementwise ops on whole tensors: add, scale, convert, and the residual connection with a gate.

mod cpu;
pub(super) mod cuda;
pub(super) mod gpu;
#[cfg(test)]
mod tests;

use crate::backward::GradientSlot;
use crate::device::Backend;
use crate::op::OpContext;
use crate::tape::Tape;
use crate::var::{Chunk, Var};
use crate::{Dtype, Result, Tensor};

impl Tape<'_> {
    /// x + y
    pub fn add(&self, x: &Var, y: &Var) -> Result<Var> {
        let op = self.begin_op("add");
        let dtype = op.expect_real("x", x.tensor())?;
        op.expect_dtype("y", y.tensor(), dtype)?;
        op.expect_shape("y", y.tensor(), x.shape())?;
        let mut sum = op.alloc(x.shape(), dtype)?;
        op.count(x.shape().elements(), &[x.tensor(), y.tensor(), &sum]);
        match op.backend() {
            Backend::Meta => {}
            Backend::Cpu(backend) => cpu::add(backend, x.tensor(), y.tensor(), &mut sum),
            Backend::Cuda(backend) => cuda::add(backend, x.tensor(), y.tensor(), &mut sum),
            Backend::Gpu(backend) => gpu::add(backend, x.tensor(), y.tensor(), &mut sum),
        }
        let result = op.result(sum);
        if !self.requires_grad(&[x, y]) {
            return Ok(result);
        }
        let sources = [x.grad_target(), y.grad_target()];
        Ok(self.record(result, move |back, gradient| {
            back.pass(sources[0], gradient.clone())?;
            back.pass(sources[1], gradient)
        }))
    }

    /// factor · x
    pub fn scale(&self, x: &Var, factor: f32) -> Result<Var> {
        let op = self.begin_op("scale");
        let dtype = op.expect_real("x", x.tensor())?;
        let mut y = op.alloc(x.shape(), dtype)?;
        scale(op.cx, x.tensor(), factor, &mut y);
        let result = op.result(y);
        if !self.requires_grad(&[x]) {
            return Ok(result);
        }
        let source = x.grad_target();
        Ok(self.record(result, move |back, gradient| {
            let mut scaled = back.cx.alloc(gradient.shape(), gradient.dtype())?;
            scale(back.cx, &gradient, factor, &mut scaled);
            back.pass(source, scaled)
        }))
    }

    /// x in another real dtype.
    pub fn convert(&self, x: &Var, dtype: Dtype) -> Result<Var> {
        let op = self.begin_op("convert");
        let from = op.expect_real("x", x.tensor())?;
        if from == dtype {
            return Ok(x.clone());
        }
        let mut y = op.alloc(x.shape(), dtype)?;
        op.expect_real("the result", &y)?;
        convert(op.cx, x.tensor(), &mut y);
        let result = op.result(y);
        if !self.requires_grad(&[x]) {
            return Ok(result);
        }
        let source = x.grad_target();
        Ok(self.record(result, move |back, gradient| {
            let mut converted = back.cx.alloc(gradient.shape(), from)?;
            convert(back.cx, &gradient, &mut converted);
            back.pass(source, converted)
        }))
    }

    /// x + gate · y for x and y [samples, tokens, width], with one gate vector per sample.
    pub fn gated_add(&self, x: &Var, gate: Chunk<'_>, y: &Var) -> Result<Var> {
        let op = self.begin_op("gated_add");
        let dtype = op.expect_real("x", x.tensor())?;
        let [samples, _, width] = op.expect_rank("x", x.tensor())?;
        op.expect_dtype("y", y.tensor(), dtype)?;
        op.expect_shape("y", y.tensor(), x.shape())?;
        op.expect_chunk("gate", gate, samples, width, dtype)?;
        let mut sum = op.alloc(x.shape(), dtype)?;
        op.count(2 * x.shape().elements(), &[x.tensor(), y.tensor(), &sum]);
        match op.backend() {
            Backend::Meta => {}
            Backend::Cpu(backend) => {
                cpu::gated_add(
                    backend,
                    x.tensor(),
                    gate.of.tensor(),
                    gate.index,
                    y.tensor(),
                    &mut sum,
                );
            }
            Backend::Cuda(backend) => {
                cuda::gated_add(
                    backend,
                    x.tensor(),
                    gate.of.tensor(),
                    gate.index,
                    y.tensor(),
                    &mut sum,
                );
            }
            Backend::Gpu(backend) => {
                gpu::gated_add(
                    backend,
                    x.tensor(),
                    gate.of.tensor(),
                    gate.index,
                    y.tensor(),
                    &mut sum,
                );
            }
        }
        let result = op.result(sum);
        if !self.requires_grad(&[x, gate.of, y]) {
            return Ok(result);
        }
        let (x_source, y_source, gate_source) =
            (x.grad_target(), y.grad_target(), gate.of.grad_target());
        let kept_y = gate_source.map(|_| self.save_for_backward(y));
        let (gate_index, gate) = (gate.index, self.save_for_backward(gate.of));
        Ok(self.record(result, move |back, gradient| {
            let gate = gate.get(back.cx)?;
            let elements = gradient.shape().elements();
            if let (Some(source), Some(kept)) = (gate_source, kept_y) {
                let y = kept.get(back.cx)?;
                let mut slot = back.slot(source, gate.shape(), gate.dtype())?;
                slot.clear_unless_adding();
                back.cx.count("gate backward", 2 * elements, &[&gradient, &y]);
                match back.cx.backend() {
                    Backend::Meta => {}
                    Backend::Cpu(backend) => {
                        cpu::gate_gradient(backend, &gradient, &y, gate_index, &mut slot.tensor);
                    }
                    Backend::Cuda(backend) => {
                        cuda::gate_gradient(backend, &gradient, &y, gate_index, &mut slot.tensor);
                    }
                    Backend::Gpu(backend) => {
                        gpu::gate_gradient(backend, &gradient, &y, gate_index, &mut slot.tensor);
                    }
                }
                back.put(slot);
            }
            if let Some(mut slot) = back.slot_of(y_source, gradient.shape(), gradient.dtype())? {
                let both = [&gradient, &slot.tensor];
                back.cx.count("gated_add backward", 2 * elements, &both);
                match back.cx.backend() {
                    Backend::Meta => {}
                    Backend::Cpu(backend) => {
                        let add = slot.add;
                        cpu::gated(backend, &gate, gate_index, &gradient, &mut slot.tensor, add);
                    }
                    Backend::Cuda(backend) => {
                        let add = slot.add;
                        cuda::gated(backend, &gate, gate_index, &gradient, &mut slot.tensor, add);
                    }
                    Backend::Gpu(backend) => {
                        let add = slot.add;
                        gpu::gated(backend, &gate, gate_index, &gradient, &mut slot.tensor, add);
                    }
                }
                back.put(slot);
            }
            back.pass(x_source, gradient)
        }))
    }
}

impl GradientSlot {
    /// Zeros, for ops that write only some of a gradient's numbers.
    pub(crate) fn clear_unless_adding(&mut self) {
        if !self.add {
            self.tensor.fill_zeros();
            self.add = true;
        }
    }
}

/// y = x in another dtype.
pub(super) fn convert(cx: OpContext<'_>, x: &Tensor, y: &mut Tensor) {
    cx.count("convert", 0, &[x, y]);
    match cx.backend() {
        Backend::Meta => {}
        Backend::Cpu(backend) => cpu::accumulate(backend, x, y, false),
        Backend::Cuda(backend) => cuda::accumulate(backend, x, y, false),
        Backend::Gpu(backend) => gpu::accumulate(backend, x, y, false),
    }
}

/// y = factor · x, both of one dtype.
pub(super) fn scale(cx: OpContext<'_>, x: &Tensor, factor: f32, y: &mut Tensor) {
    cx.count("scale", x.shape().elements(), &[x, y]);
    match cx.backend() {
        Backend::Meta => {}
        Backend::Cpu(backend) => cpu::scale(backend, x, factor, y),
        Backend::Cuda(backend) => cuda::scale(backend, x, factor, y),
        Backend::Gpu(backend) => gpu::scale(backend, x, factor, y),
    }
}

/// Adds a gradient to what a slot holds, or copies it where there is nothing yet.
pub(crate) fn accumulate(cx: OpContext<'_>, slot: &mut GradientSlot, gradient: &Tensor) {
    let work = gradient.shape().elements();
    cx.count("accumulate", work, &[gradient, &slot.tensor, &slot.tensor]);
    match cx.backend() {
        Backend::Meta => {}
        Backend::Cpu(backend) => cpu::accumulate(backend, gradient, &mut slot.tensor, slot.add),
        Backend::Cuda(backend) => cuda::accumulate(backend, gradient, &mut slot.tensor, slot.add),
        Backend::Gpu(backend) => gpu::accumulate(backend, gradient, &mut slot.tensor, slot.add),
    }
}
