//! The linear layer with all that usually follows it:
//!
//! y = onto + f(x·Wᵀ + bias + scale·(x·Aᵀ)·Bᵀ)
//!
//! for x [.., in], W [out, in], bias `[out]`, and an optional low-rank term with A [rank, in] and
//! B [out, rank]. The term and the activation f are part of the same pass over the result, so an
//! adapter costs no extra pass over the activations; and so is the stream that a layer without an activation
//! is added to. With dropout, A sees x in training with some numbers set to zero and the others scaled up to
//! keep the mean. W may be quantised: then it is frozen, and is read as it is, forward and backward.
//!
//! Kept for backward: x only if W or A is trained, the rank-wide x·Aᵀ, and what f was applied to. Others
//! keep the way to f's result, not the result, and if it is asked for the way to the product too.

mod cpu;
mod cuda;
mod gpu;
mod record;
#[cfg(test)]
mod tests;

use std::rc::Rc;

pub(super) use self::record::column_sums;
use self::record::{Held, LayerRecord, LoraRecord, Record};
use super::matmul::{MatMul, Matrix, Product};
use super::{Activation, activation, inputs};
use crate::device::{Engine, Kind};
use crate::op::{Op, Place};
use crate::random::Stream;
use crate::tape::Tape;
use crate::var::{Activated, Remake, Var};
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
    /// Whether the product is computed again for whoever would keep the result, instead of kept. With
    /// an activation, only that is computed again in any case; not where it is added to something.
    pub is_remade: bool,
}

/// The matrix of a linear layer.
#[derive(Clone, Copy)]
pub enum Weight<'a> {
    /// Of a real format; perhaps trained.
    Dense(&'a Var),
    /// Frozen, in few bits.
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
    fn var(self) -> Option<&'a Var> {
        match self {
            Self::Dense(var) => Some(var),
            Self::Quantised(_) => None,
        }
    }

    /// As a factor of x.
    pub(super) fn matrix(self, x: Dtype) -> Matrix<'a> {
        match self {
            Self::Dense(var) => Matrix::beside(var.tensor(), x),
            Self::Quantised(quantised) => Matrix::quantised(quantised, x),
        }
    }

    /// [out, in]
    pub(super) fn shape(self) -> Shape {
        match self {
            Self::Dense(var) => var.shape(),
            Self::Quantised(quantised) => quantised.shape(),
        }
    }

    /// Checks its format, and that it is as wide as what it meets; returns how many rows it has.
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
        Self { weight, bias, activation: Activation::None, lora, onto, is_remade: false }
    }
}

impl Tape<'_> {
    /// A linear layer; see the module's comment.
    pub fn linear(&self, x: &Var, layer: Linear<'_>) -> Result<Var> {
        let op = self.begin("linear");
        let outputs = check(&op, x, layer)?;
        let Linear { weight, bias, activation, lora, onto, is_remade } = layer;
        let all = [Some(x), weight.var(), bias, lora.map(|l| l.down), lora.map(|l| l.up), onto];
        let is_tracked = self.tracks(&inputs(all));

        let share = lora.map_or(0.0, |lora| lora.dropout);
        let is_dropped = share > 0.0 && self.is_training();
        let dropout = is_dropped.then(|| Dropout { share, random: self.random(x.shape()) });
        let wanted = Wanted {
            before: is_tracked && activation != Activation::None,
            result: self.wants_result(&op),
        };
        let made = forward(op.place, x, (layer, outputs), dropout, wanted)?;
        let Made { y, before, inner, ready } = made;

        let result = op.result(y);
        if !is_tracked {
            return Ok(result);
        }
        if inner.is_some() || before.is_some() {
            self.keep_own(&op);
        }
        let rounded = ready.as_ref().and_then(|ready| ready.bias.clone());
        let record = Record {
            layer: self.layer_record(x, layer, (inner.zip(ready), dropout)),
            onto: onto.and_then(Var::source),
        };
        let result = match before {
            None if is_remade && onto.is_none() => self.with_remake(result, || {
                let bias = rounded.or(bias.map(|bias| bias.tensor().clone()));
                again(&op, (x, outputs), &record.layer, bias)
            }),
            None => result,
            Some(before) => self.activated(result, Activated { activation, before }),
        };
        Ok(self.record(result, move |back, gradient| record.backward(back, gradient)))
    }

    /// What the way back needs of a layer, whose adapter is there as it was multiplied.
    fn layer_record(
        &self,
        x: &Var,
        Linear { weight, bias, lora, .. }: Linear<'_>,
        (adapter, dropout): (Option<(Tensor, Ready)>, Option<Dropout>),
    ) -> LayerRecord {
        let weight = match weight {
            Weight::Dense(weight) => Held::Dense(self.keep(weight), weight.source()),
            Weight::Quantised(weight) => Held::Quantised(weight.clone()),
        };
        let trains_down = lora.is_some_and(|lora| lora.down.source().is_some());
        LayerRecord {
            kept_x: (weight.is_trained() || trains_down).then(|| self.keep(x)),
            x: (x.source(), x.shape()),
            activated: x.activated.clone(),
            weight,
            bias: bias.and_then(Var::source),
            lora: lora.zip(adapter).map(|(lora, (inner, ready))| LoraRecord {
                inner,
                down: (ready.down, lora.down.source()),
                up: (ready.up, lora.up.source()),
                scale: lora.scale,
                dropout,
            }),
        }
    }

    /// The result of an activation, which whoever would keep it makes again.
    fn activated(&self, result: Var, of: Activated) -> Var {
        let of = Rc::new(of);
        let result = Var { activated: Some(Rc::clone(&of)), ..result };
        let needs = result.held().1;
        self.with_remake(result, || {
            Remake::new(needs, move |place| activation::again(place, &of.before, of.activation))
        })
    }
}

/// What is asked of forward besides the arithmetic.
#[derive(Clone, Copy)]
struct Wanted {
    /// Whether what the activation is applied to is kept.
    before: bool,
    /// Whether anybody reads the result.
    result: bool,
}

/// What forward makes.
struct Made {
    y: Tensor,
    before: Option<Tensor>,
    inner: Option<Tensor>,
    ready: Option<Ready>,
}

fn forward(
    place: Place<'_>,
    x: &Var,
    (layer, outputs): (Linear<'_>, usize),
    dropout: Option<Dropout>,
    wanted: Wanted,
) -> Result<Made> {
    let Linear { weight, bias, activation, lora, onto, .. } = layer;
    let (shape, dtype) = (x.shape().with_width(outputs), x.dtype());
    let is_before_enough = wanted.before && !wanted.result;
    let is_run = place.is_run && !is_before_enough;
    // What is kept comes first, so that what passes leaves its memory at the top of it.
    let ready = lora.map(|lora| Ready::new(place, lora, bias, dtype)).transpose()?;
    let inner = match (lora, &ready) {
        (Some(lora), Some(ready)) => Some(ready.inner(place, x, lora.scale, dropout)?),
        _ => None,
    };
    let mut before = if wanted.before { Some(place.alloc(shape, dtype)?) } else { None };
    let mut y = Place { is_run, ..place }.alloc(shape, dtype)?;
    let low_rank = inner.as_ref().zip(ready.as_ref()).map(|(inner, ready)| [inner, &ready.up]);
    let products = products(x.tensor(), weight.matrix(dtype), low_rank);
    let rounded = ready.as_ref().and_then(|ready| ready.bias.as_ref());
    let bias = rounded.or(bias.map(Var::tensor));
    match &mut before {
        Some(before) if is_before_enough => {
            MatMul { bias, ..MatMul::new(&products, before) }.run(place)?;
        }
        before => {
            let (before_activation, onto) = (before.as_mut(), onto.map(Var::tensor));
            let products = MatMul::new(&products, &mut y);
            MatMul { bias, activation, before_activation, onto, ..products }.run(place)?;
        }
    }
    Ok(Made { y, before, inner, ready })
}

/// x·Wᵀ, and beside it inner·Bᵀ.
fn products<'a>(
    x: &'a Tensor,
    weight: Matrix<'a>,
    low_rank: Option<[&'a Tensor; 2]>,
) -> Vec<Product<'a>> {
    let mut products = vec![Product::new(x, weight.t())];
    if let Some(factors) = low_rank {
        let [inner, up] = factors.map(|factor| Matrix::beside(factor, x.dtype()));
        products.push(Product::new(inner, up.t()));
    }
    products
}

/// How to make the result of a layer without an activation again, from x and what its record keeps.
fn again(
    op: &Op<'_>,
    (x, outputs): (&Var, usize),
    of: &LayerRecord,
    bias: Option<Tensor>,
) -> Remake {
    let (x, mut needs) = x.held();
    let weight = of.weight.clone();
    let low_rank = of.lora.as_ref().map(|lora| [lora.inner.clone(), lora.up.0.clone()]);
    needs.extend(low_rank.is_some().then_some(op.index));
    Remake::new(needs, move |place| {
        let (x, weight) = (x.get(place)?, weight.clone().get(place)?);
        let mut y = place.alloc(x.shape().with_width(outputs), x.dtype())?;
        let low_rank = low_rank.as_ref().map(|[inner, up]| [inner, up]);
        let products = products(&x, weight.matrix(x.dtype()), low_rank);
        MatMul { bias: bias.as_ref(), ..MatMul::new(&products, &mut y) }.run(place)?;
        Ok(y)
    })
}

/// Checks all shapes and formats; returns how many outputs there are.
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

/// Which numbers of x the low-rank term does not see.
#[derive(Clone, Copy)]
struct Dropout {
    share: f32,
    random: Stream,
}

impl Dropout {
    fn apply(self, place: Place<'_>, x: &Tensor) -> Result<Tensor> {
        let mut seen = place.workspace(x.shape(), x.dtype())?;
        place.count("dropout", x.shape().elements(), &[x, &seen]);
        match place.engine() {
            Engine::Meta => {}
            Engine::Cpu(engine) => cpu::drop_out(engine, self, x, &mut seen),
            Engine::Cuda(engine) => cuda::drop_out(engine, self, x, &mut seen),
            Engine::Gpu(engine) => gpu::drop_out(engine, self, x, &mut seen),
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

/// An adapter as it is multiplied. A card's matrix units want both factors of a product in one format: there
/// all of it is rounded to that of x by one kernel, once for both ways.
struct Ready {
    down: Tensor,
    up: Tensor,
    /// The layer's bias, if it was rounded too.
    bias: Option<Tensor>,
}

impl Ready {
    fn new(place: Place<'_>, lora: Lora<'_>, bias: Option<&Var>, x: Dtype) -> Result<Self> {
        let (down, up) = (lora.down.tensor(), lora.up.tensor());
        if between(place, x) == Dtype::F32 {
            return Ok(Self { down: down.clone(), up: up.clone(), bias: None });
        }
        let all: Vec<&Tensor> = [down, up].into_iter().chain(bias.map(Var::tensor)).collect();
        let mut starts = vec![0];
        for tensor in &all {
            let end = starts[starts.len() - 1] + tensor.shape().elements();
            starts.push(end.next_multiple_of(cuda::PIECE));
        }
        let mut rounded = place.alloc([starts[all.len()]], x)?;
        place.count("convert", 0, &[down, up, &rounded]);
        if let Engine::Cuda(engine) = place.engine() {
            cuda::round(engine, &all, &starts, &mut rounded);
        }
        let mut parts = all.iter().zip(&starts).map(|(tensor, start)| {
            let shape = tensor.shape();
            rounded.part(*start..start + shape.elements()).into_shape(shape)
        });
        let mut next = || parts.next();
        let (down, up) = next().zip(next()).expect("both are among them");
        Ok(Self { down, up, bias: next() })
    }

    /// scale·x·Aᵀ
    fn inner(
        &self,
        place: Place<'_>,
        x: &Var,
        scale: f32,
        dropout: Option<Dropout>,
    ) -> Result<Tensor> {
        let (x, rank) = (x.tensor(), self.down.shape().sizes()[0]);
        let mut inner = place.alloc([x.shape().rows(), rank], between(place, x.dtype()))?;
        let dropped = dropout.map(|dropout| dropout.apply(place, x)).transpose()?;
        let seen = dropped.as_ref().unwrap_or(x);
        let product = Product::new(seen, Matrix::from(&self.down).t());
        MatMul::new(&[Product { scale, ..product }], &mut inner).run(place)?;
        Ok(inner)
    }
}

/// The format of what lies between A and B: a card would round it for its next product anyway.
fn between(place: Place<'_>, x: Dtype) -> Dtype {
    match place.device.kind() {
        Kind::Cpu { .. } | Kind::Gpu { .. } => Dtype::F32,
        Kind::Cuda { .. } => x,
    }
}
