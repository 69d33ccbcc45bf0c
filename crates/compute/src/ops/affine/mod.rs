//! Every channel scaled and shifted, with all that usually follows:
//!
//! y = f(x·scale + bias)
//!
//! for x [.., width] and vectors `[width]`, number by number.
//!
//! Kept for backward: scale and bias, and x where scale is trained or f has slopes. What f was
//! applied to is made again from them.

mod cpu;
mod cuda;
mod gpu;
#[cfg(test)]
mod tests;

use super::linear::column_sums;
use super::{Activation, activation, inputs};
use crate::backward::Backward;
use crate::cpu::sums::n_row_blocks;
use crate::device::{Engine, Kind};
use crate::op::Place;
use crate::tape::Tape;
use crate::var::{Kept, Remake, Source, Var};
use crate::{Dtype, Result, Tensor};

/// Operations per number, for the tally, besides the activation's.
const FLOPS: usize = 2;

impl Tape<'_> {
    /// `activation` of x·scale + bias, with vectors of width `x`, f32.
    pub fn affine(
        &self,
        x: &Var,
        scale: &Var,
        bias: Option<&Var>,
        activation: Activation,
    ) -> Result<Var> {
        let op = self.begin("affine");
        op.expect_real("x", x.tensor())?;
        op.expect_vector("scale", scale.tensor(), x.shape().width())?;
        if let Some(bias) = bias {
            op.expect_vector("bias", bias.tensor(), x.shape().width())?;
        }
        let vectors = (scale.tensor(), bias.map(Var::tensor));
        let result = op.result(forward(op.place, x.tensor(), vectors, activation)?);
        if !self.tracks(&inputs([Some(x), Some(scale), bias])) {
            return Ok(result);
        }
        let keeps_x = scale.source().is_some() || activation != Activation::None;
        let record = Record {
            kept_x: keeps_x.then(|| self.keep(x)),
            x: x.source(),
            scale: (self.keep(scale), scale.source()),
            bias: bias.map(|bias| (self.keep(bias), bias.source())),
            activation,
        };
        // Where x is not kept anyway, keeping it instead of the result would gain nothing.
        let result = if keeps_x {
            self.with_remake(result, || again(x, scale, bias, activation))
        } else {
            result
        };
        Ok(self.record(result, move |back, gradient| record.backward(back, gradient)))
    }
}

fn again(x: &Var, scale: &Var, bias: Option<&Var>, activation: Activation) -> Remake {
    let ((x, mut needs), (scale, more)) = (x.held(), scale.held());
    needs.extend(more);
    let bias = bias.map(|bias| {
        let (bias, more) = bias.held();
        needs.extend(more);
        bias
    });
    Remake::new(needs, move |place| {
        let bias = bias.as_ref().map(|bias| bias.get(place)).transpose()?;
        forward(place, &x.get(place)?, (&scale.get(place)?, bias.as_ref()), activation)
    })
}

fn forward(
    place: Place<'_>,
    x: &Tensor,
    (scale, bias): (&Tensor, Option<&Tensor>),
    activation: Activation,
) -> Result<Tensor> {
    let mut y = place.alloc(x.shape(), x.dtype())?;
    let of_activation = if activation == Activation::None { 0 } else { activation::FLOPS };
    let work = (FLOPS + of_activation) * x.shape().elements();
    place.count("affine", work, &[x, &y]);
    match place.engine() {
        Engine::Meta => {}
        Engine::Cpu(engine) => cpu::forward(engine, x, (scale, bias), activation, &mut y),
        Engine::Cuda(engine) => cuda::forward(engine, x, (scale, bias), activation, &mut y),
        Engine::Gpu(engine) => gpu::forward(engine, x, (scale, bias), activation, &mut y),
    }
    Ok(y)
}

struct Record {
    kept_x: Option<Kept>,
    x: Option<Source>,
    scale: (Kept, Option<Source>),
    bias: Option<(Kept, Option<Source>)>,
    activation: Activation,
}

impl Record {
    fn backward(self, back: &mut Backward<'_>, mut gradient: Tensor) -> Result<()> {
        let place = back.place;
        let x = self.kept_x.map(|kept| kept.get(place)).transpose()?;
        let scale = self.scale.0.get(place)?;
        let (bias, bias_source) = self.bias.unzip();
        if self.activation != Activation::None {
            let x = x.as_ref().expect("kept because the activation has slopes");
            let bias = bias.map(|bias| bias.get(place)).transpose()?;
            let before = forward(place, x, (&scale, bias.as_ref()), Activation::None)?;
            gradient = gradient.unshared()?;
            activation::backward(place, self.activation, &before, &mut gradient);
        }
        if let Some(slot) = back.slot_of(bias_source.flatten(), scale.shape(), Dtype::F32)? {
            column_sums(back, &gradient, slot);
        }
        if let Some(source) = self.scale.1 {
            let x = x.expect("kept because the scale is trained");
            scale_gradient(back, source, &x, &gradient)?;
        }
        let Some(source) = self.x else { return Ok(()) };
        // The gradient of x takes the memory of the result's.
        let mut gradient = gradient.unshared()?;
        let work = gradient.shape().elements();
        place.count("affine backward", work, &[&gradient, &gradient]);
        match place.engine() {
            Engine::Meta => {}
            Engine::Cpu(engine) => cpu::multiply(engine, &mut gradient, &scale),
            Engine::Cuda(engine) => cuda::multiply(engine, &mut gradient, &scale),
            Engine::Gpu(engine) => gpu::multiply(engine, &mut gradient, &scale),
        }
        back.pass(Some(source), gradient)
    }
}

/// Σ gradient·x over all rows.
fn scale_gradient(
    back: &mut Backward<'_>,
    source: Source,
    x: &Tensor,
    gradient: &Tensor,
) -> Result<()> {
    let place = back.place;
    let (rows, width) = (x.shape().rows(), x.shape().width());
    let mut slot = back.slot(source, [width].into(), Dtype::F32)?;
    let n_partial = match place.device.kind() {
        Kind::Cpu { .. } => n_row_blocks(rows),
        Kind::Cuda { .. } | Kind::Gpu { .. } => 0,
    };
    let mut partial = place.workspace([n_partial, width], Dtype::F32)?;
    let work = FLOPS * x.shape().elements();
    place.count("affine scale backward", work, &[x, gradient]);
    match place.engine() {
        Engine::Meta => {}
        Engine::Cpu(engine) => cpu::scale_gradient(engine, x, gradient, &mut partial, &mut slot),
        Engine::Cuda(engine) => cuda::scale_gradient(engine, x, gradient, &mut slot),
        Engine::Gpu(engine) => gpu::scale_gradient(engine, x, gradient, &mut slot),
    }
    back.put(slot);
    Ok(())
}
