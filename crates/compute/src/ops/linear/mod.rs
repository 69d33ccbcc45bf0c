//! The linear layer with all that usually follows it:
//!
//! y = onto + f(x·Wᵀ + bias + scale·(x·Aᵀ)·Bᵀ)
//!
//! for x [.., in], W [out, in], bias `[out]`, and an optional low-rank term with A [rank, in] and
//! B [out, rank]. The term and the activation f are part of the same pass over the result, so an
//! adapter costs no extra pass over the activations; and so is the residual that a layer without an activation
//! is added to. With dropout, A sees x in training with some elements set to zero and the others scaled up to
//! keep the mean. W may be quantised: then it is frozen, and is read as it is, forward and backward.
//!
//! Saved for backward: x only if W or A is trained, the rank-wide x·Aᵀ, and the input of f. Readers save
//! how to recompute f's result, not the result, and with `is_remat` that of the matmul too.

mod backward;
mod cpu;
mod cuda;
mod fp8_check;
mod gpu;
mod parts;
#[cfg(test)]
mod tests;

use std::rc::Rc;

pub(super) use self::backward::SavedWeight;
pub(super) use self::backward::column_sums;
use self::backward::{InputGradient, LayerBackward, LinearBackward, LoraBackward};
pub use self::fp8_check::Fp8Check;
pub(crate) use self::fp8_check::Fp8Checks;
use super::matmul::{FusedMatmul, Matmul, Operand};
use super::{Activation, activation, inputs};
use crate::device::{Backend, DeviceKind};
use crate::op::{Op, OpContext};
use crate::quantised::fp8_rows::{Fp8Rows, is_multiplied};
use crate::random::RandomSequence;
use crate::tape::Tape;
use crate::var::{Activated, Remat, SavedTensor, Var};
use crate::{Dtype, Quantised, Result, Shape, Tensor};

/// What a linear layer consists of.
#[derive(Clone, Copy)]
pub struct Linear<'a> {
    /// [out, in]
    pub weight: Weight<'a>,
    /// `[out]`, f32.
    pub bias: Option<&'a Var>,
    /// Applied to the result.
    pub activation: Activation,
    /// A low-rank term beside the weight.
    pub lora: Option<Lora<'a>>,
    /// What the result is added to, where no activation is.
    pub onto: Option<&'a Var>,
    /// Whether readers recompute the result instead of saving it. With an activation, only that is recomputed
    /// in any case; not where it is added to something.
    pub is_remat: bool,
}

/// The matrix of a linear layer.
#[derive(Clone, Copy)]
pub enum Weight<'a> {
    /// Of a real dtype; perhaps trained.
    Dense(&'a Var),
    /// Frozen and quantised.
    Quantised(&'a Quantised),
}

impl<'a> From<&'a Var> for Weight<'a> {
    fn from(var: &'a Var) -> Self {
        Self::Dense(var)
    }
}

impl<'a> From<&'a Quantised> for Weight<'a> {
    fn from(quantised: &'a Quantised) -> Self {
        Self::Quantised(quantised)
    }
}

impl<'a> Weight<'a> {
    pub(super) fn var(self) -> Option<&'a Var> {
        match self {
            Self::Dense(var) => Some(var),
            Self::Quantised(_) => None,
        }
    }

    /// What backward needs of it.
    pub(super) fn saved(self, tape: &Tape<'_>) -> SavedWeight<SavedTensor> {
        match self {
            Self::Dense(weight) => {
                SavedWeight::Dense(tape.save_for_backward(weight), weight.grad_target())
            }
            Self::Quantised(weight) => SavedWeight::Quantised(weight.clone()),
        }
    }

    /// As an operand for x.
    pub(super) fn matrix(self, x: Dtype) -> Operand<'a> {
        match self {
            Self::Dense(var) => Operand::beside(var.tensor(), x),
            Self::Quantised(quantised) => Operand::quantised(quantised, x),
        }
    }

    /// x in fp8, if it is multiplied so.
    fn fp8_rows(self, cx: OpContext<'_>, x: &Var) -> Result<Option<Fp8Rows>> {
        let is_cuda = matches!(cx.device.kind(), DeviceKind::Cuda { .. });
        match self {
            Self::Quantised(weight) if is_cuda && is_multiplied(weight, x.dtype()) => {
                x.fp8_rows(cx).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// [out, in]
    pub(super) fn shape(self) -> Shape {
        match self {
            Self::Dense(var) => var.shape(),
            Self::Quantised(quantised) => quantised.shape(),
        }
    }

    /// Checks its dtype, and that it is as wide as what it meets; returns how many rows it has.
    pub(super) fn check(self, op: &Op<'_>, inputs: usize) -> Result<usize> {
        let outputs = self.shape().rows();
        match self {
            Self::Dense(weight) => {
                op.expect_real("weight", weight.tensor())?;
                let [_, _] = op.expect_rank("weight", weight.tensor())?;
            }
            Self::Quantised(weight) => op.expect_device("weight", weight.codes())?,
        }
        op.expect_sizes("weight", self.shape(), [outputs, inputs])?;
        Ok(outputs)
    }
}

/// scale·(x·Aᵀ)·Bᵀ
#[derive(Clone, Copy)]
pub struct Lora<'a> {
    /// A, [rank, in], f32.
    pub down: &'a Var,
    /// B, [out, rank], f32.
    pub up: &'a Var,
    /// Usually alpha / rank.
    pub scale: f32,
    /// The share of x that A does not see.
    pub dropout: f32,
}

impl<'a> Linear<'a> {
    /// x·Wᵀ alone.
    pub fn new(weight: impl Into<Weight<'a>>) -> Self {
        let weight = weight.into();
        let (bias, lora, onto) = (None, None, None);
        Self { weight, bias, activation: Activation::None, lora, onto, is_remat: false }
    }
}

impl Tape<'_> {
    /// A linear layer; see the module's comment.
    pub fn linear(&self, x: &Var, layer: Linear<'_>) -> Result<Var> {
        let op = self.begin_op("linear");
        let outputs = check(&op, x, layer)?;
        let Linear { weight, bias, activation, lora, onto, is_remat } = layer;
        let all = [Some(x), weight.var(), bias, lora.map(|l| l.down), lora.map(|l| l.up), onto];
        let is_tracked = self.requires_grad(&inputs(all));

        let share = lora.map_or(0.0, |lora| lora.dropout);
        let is_dropped = share > 0.0 && self.is_training();
        let dropout =
            is_dropped.then(|| Dropout { share, sequence: self.random_sequence(x.shape()) });
        let wanted = LinearWanted {
            pre_activation: is_tracked && activation != Activation::None,
            result: self.wants_result(&op),
        };
        if let (Weight::Quantised(weight), Some(checks)) = (weight, &self.fp8_checks) {
            checks.look(op.cx, x.tensor(), weight)?;
        }
        let made = forward(op.cx, x, layer, outputs, dropout, wanted)?;
        let LinearOutput { y, pre_activation, inner, lora: ready } = made;

        let result = op.result(y);
        if !is_tracked {
            return Ok(result);
        }
        if inner.is_some() || pre_activation.is_some() {
            self.save_extra(&op);
        }
        let rounded = ready.as_ref().and_then(|ready| ready.bias.clone());
        let record = LinearBackward {
            layer: self.layer_backward(x, layer, inner.zip(ready), dropout),
            onto: onto.and_then(Var::grad_target),
        };
        let result = match pre_activation {
            None if is_remat && onto.is_none() => self.with_remat(result, || {
                let bias = rounded.or(bias.map(|bias| bias.tensor().clone()));
                remat(&op, x, outputs, &record.layer, bias)
            }),
            None => result,
            Some(pre_activation) => {
                self.activated(result, Activated { activation, input: pre_activation })
            }
        };
        Ok(self.record(result, move |back, gradient| record.backward(back, gradient)))
    }

    /// What backward needs of a layer, with its LoRA operands as they were multiplied.
    fn layer_backward(
        &self,
        x: &Var,
        Linear { weight, bias, lora, .. }: Linear<'_>,
        adapter: Option<(Tensor, LoraOperands)>,
        dropout: Option<Dropout>,
    ) -> LayerBackward {
        let weight = weight.saved(self);
        let trains_down = lora.is_some_and(|lora| lora.down.grad_target().is_some());
        LayerBackward {
            saved_x: (weight.is_trained() || trains_down).then(|| self.save_for_backward(x)),
            x: InputGradient::of(x),
            weight,
            bias: bias.and_then(Var::grad_target),
            lora: lora.zip(adapter).map(|(lora, (inner, ready))| LoraBackward {
                inner,
                down: (ready.down, lora.down.grad_target()),
                up: (ready.up, lora.up.grad_target()),
                scale: lora.scale,
                dropout,
            }),
        }
    }

    /// The result of an activation, which readers recompute instead of saving it.
    fn activated(&self, result: Var, of: Activated) -> Var {
        let of = Rc::new(of);
        let result = Var { activated: Some(Rc::clone(&of)), ..result };
        let needs = result.to_saved().1;
        self.with_remat(result, || {
            Remat::new(needs, move |cx| activation::remat(cx, &of.input, of.activation))
        })
    }
}

/// Which outputs of forward are needed.
#[derive(Clone, Copy)]
struct LinearWanted {
    /// Whether what the activation is applied to is kept.
    pre_activation: bool,
    /// Whether anybody reads the result.
    result: bool,
}

/// The outputs of forward.
struct LinearOutput {
    y: Tensor,
    pre_activation: Option<Tensor>,
    inner: Option<Tensor>,
    lora: Option<LoraOperands>,
}

fn forward(
    cx: OpContext<'_>,
    x: &Var,
    layer: Linear<'_>,
    outputs: usize,
    dropout: Option<Dropout>,
    wanted: LinearWanted,
) -> Result<LinearOutput> {
    let Linear { weight, bias, activation, lora, onto, .. } = layer;
    let (shape, dtype) = (x.shape().with_width(outputs), x.dtype());
    let only_pre_activation = wanted.pre_activation && !wanted.result;
    let is_run = cx.is_run && !only_pre_activation;
    // What is saved is allocated first, so that temporary memory lies above it.
    let ready = lora.map(|lora| LoraOperands::new(cx, lora, bias, dtype)).transpose()?;
    let inner = match (lora, &ready) {
        (Some(lora), Some(ready)) => Some(ready.inner(cx, x, lora.scale, dropout)?),
        _ => None,
    };
    let mut pre_activation =
        if wanted.pre_activation { Some(cx.alloc(shape, dtype)?) } else { None };
    let mut y = OpContext { is_run, ..cx }.alloc(shape, dtype)?;
    let low_rank = inner.as_ref().zip(ready.as_ref()).map(|(inner, ready)| [inner, &ready.up]);
    let fp8_rows = weight.fp8_rows(cx, x)?;
    let x = Operand::with_fp8_rows(x.tensor(), fp8_rows.as_ref());
    let matmuls = matmuls(x, dtype, weight.matrix(dtype), low_rank);
    let rounded = ready.as_ref().and_then(|ready| ready.bias.as_ref());
    let bias = rounded.or(bias.map(Var::tensor));
    match &mut pre_activation {
        Some(before) if only_pre_activation => {
            FusedMatmul { bias, ..FusedMatmul::new(&matmuls, before) }.run(cx)?;
        }
        before => {
            let (pre_activation, onto) = (before.as_mut(), onto.map(Var::tensor));
            let plain = FusedMatmul::new(&matmuls, &mut y);
            FusedMatmul { bias, activation, pre_activation, onto, ..plain }.run(cx)?;
        }
    }
    Ok(LinearOutput { y, pre_activation, inner, lora: ready })
}

/// x·Wᵀ, and beside it inner·Bᵀ, as exact as x is in its dtype.
fn matmuls<'a>(
    x: Operand<'a>,
    dtype: Dtype,
    weight: Operand<'a>,
    low_rank: Option<[&'a Tensor; 2]>,
) -> Vec<Matmul<'a>> {
    let mut matmuls = vec![Matmul::new(x, weight.t())];
    if let Some(operands) = low_rank {
        let [inner, up] = operands.map(|operand| Operand::beside(operand, dtype));
        matmuls.push(Matmul::new(inner, up.t()));
    }
    matmuls
}

/// How to recompute the result of a layer without an activation, from x and what is saved.
fn remat(op: &Op<'_>, x: &Var, outputs: usize, of: &LayerBackward, bias: Option<Tensor>) -> Remat {
    let (x, mut needs) = x.to_saved();
    let weight = of.weight.clone();
    let low_rank = of.lora.as_ref().map(|lora| [lora.inner.clone(), lora.up.0.clone()]);
    needs.extend(low_rank.is_some().then_some(op.index));
    Remat::new(needs, move |cx| {
        let (x, weight) = (x.get(cx)?, weight.clone().get(cx)?);
        let mut y = cx.alloc(x.shape().with_width(outputs), x.dtype())?;
        let low_rank = low_rank.as_ref().map(|[inner, up]| [inner, up]);
        let (x, dtype) = (Operand::from(&x), x.dtype());
        let matmuls = matmuls(x, dtype, weight.matrix(dtype), low_rank);
        FusedMatmul { bias: bias.as_ref(), ..FusedMatmul::new(&matmuls, &mut y) }.run(cx)?;
        Ok(y)
    })
}

/// Checks all shapes and dtypes; returns how many outputs there are.
fn check(op: &Op<'_>, x: &Var, layer: Linear<'_>) -> Result<usize> {
    op.expect_real("x", x.tensor())?;
    let inputs = x.shape().width();
    let outputs = layer.weight.check(op, inputs)?;
    if let Some(bias) = layer.bias {
        op.expect_vector("bias", bias.tensor(), outputs)?;
    }
    if let Some(onto) = layer.onto {
        op.expect_dtype("onto", onto.tensor(), x.dtype())?;
        op.expect_shape("onto", onto.tensor(), x.shape().with_width(outputs))?;
    }
    if let Some(lora) = layer.lora {
        lora.check(op, [outputs, inputs])?;
    }
    Ok(outputs)
}

/// Dropout of x for the low-rank term.
#[derive(Clone, Copy)]
struct Dropout {
    share: f32,
    sequence: RandomSequence,
}

impl Dropout {
    fn apply(self, cx: OpContext<'_>, x: &Tensor) -> Result<Tensor> {
        let mut seen = cx.workspace(x.shape(), x.dtype())?;
        cx.count("dropout", x.shape().elements(), &[x, &seen]);
        match cx.backend() {
            Backend::Meta => {}
            Backend::Cpu(backend) => cpu::dropout(backend, self, x, &mut seen),
            Backend::Cuda(backend) => cuda::dropout(backend, self, x, &mut seen),
            Backend::Gpu(backend) => gpu::dropout(backend, self, x, &mut seen),
        }
        Ok(seen)
    }
}

impl Lora<'_> {
    /// Checks that it fits beside a weight of this shape.
    pub(super) fn check(&self, op: &Op<'_>, [outputs, inputs]: [usize; 2]) -> Result<()> {
        let Self { down, up, dropout, .. } = self;
        let [rank, _] = op.expect_rank("lora down", down.tensor())?;
        for (what, var, shape) in
            [("lora down", down, [rank, inputs]), ("lora up", up, [outputs, rank])]
        {
            op.expect_dtype(what, var.tensor(), Dtype::F32)?;
            op.expect_shape(what, var.tensor(), shape)?;
        }
        let is_fit = (0.0..1.0).contains(dropout);
        op.expect_range("lora dropout", dropout, is_fit, "0 or more and below 1")
    }
}

/// A LoRA as it is multiplied. Tensor cores need both operands of a matmul in one dtype: with CUDA all of it is
/// rounded to that of x by one kernel, once for forward and backward.
struct LoraOperands {
    down: Tensor,
    up: Tensor,
    /// The layer's bias, if it was rounded too.
    bias: Option<Tensor>,
}

impl LoraOperands {
    fn new(cx: OpContext<'_>, lora: Lora<'_>, bias: Option<&Var>, x: Dtype) -> Result<Self> {
        let (down, up) = (lora.down.tensor(), lora.up.tensor());
        if inner_dtype(cx, x) == Dtype::F32 {
            return Ok(Self { down: down.clone(), up: up.clone(), bias: None });
        }
        let all: Vec<&Tensor> = [down, up].into_iter().chain(bias.map(Var::tensor)).collect();
        let mut starts = vec![0];
        for tensor in &all {
            let end = starts[starts.len() - 1] + tensor.shape().elements();
            starts.push(end.next_multiple_of(cuda::PIECE));
        }
        let mut rounded = cx.alloc([starts[all.len()]], x)?;
        cx.count("convert", 0, &[down, up, &rounded]);
        if let Backend::Cuda(backend) = cx.backend() {
            cuda::round(backend, &all, &starts, &mut rounded);
        }
        let mut parts = all.iter().zip(&starts).map(|(tensor, start)| {
            let shape = tensor.shape();
            rounded.narrow(*start..start + shape.elements()).into_shape(shape)
        });
        let mut next = || parts.next();
        let (down, up) = next().zip(next()).expect("both are among them");
        Ok(Self { down, up, bias: next() })
    }

    /// scale·x·Aᵀ
    fn inner(
        &self,
        cx: OpContext<'_>,
        x: &Var,
        scale: f32,
        dropout: Option<Dropout>,
    ) -> Result<Tensor> {
        let (x, rank) = (x.tensor(), self.down.shape().sizes()[0]);
        let mut inner = cx.alloc([x.shape().rows(), rank], inner_dtype(cx, x.dtype()))?;
        let dropped = dropout.map(|dropout| dropout.apply(cx, x)).transpose()?;
        let seen = dropped.as_ref().unwrap_or(x);
        let matmul = Matmul::new(seen, Operand::from(&self.down).t());
        FusedMatmul::new(&[Matmul { scale, ..matmul }], &mut inner).run(cx)?;
        Ok(inner)
    }
}

/// The dtype of what lies between A and B: a GPU would round it for its next matmul anyway.
fn inner_dtype(cx: OpContext<'_>, x: Dtype) -> Dtype {
    match cx.device.kind() {
        DeviceKind::Cpu { .. } | DeviceKind::Gpu { .. } => Dtype::F32,
        DeviceKind::Cuda { .. } => x,
    }
}
