//! The linear layer of every model: a frozen or trained weight, a bias, perhaps an adapter; and the vectors of norms.

mod grouped;

use compute::ops::{Activation, Linear, Lora, SharedAxis, Weight};
use compute::{ParamKey, Result, Tape, Tensor, Var};

use super::adapter::factors::{Factors, LokrFactor};
use super::adapter::training::TrainingLora;
use super::build::WeightTensor;

pub use grouped::GroupedLayers;

/// A linear layer.
pub struct LinearLayer {
    pub(super) weight: LayerWeight,
    pub(super) bias: Option<ModelTensor>,
    pub(super) adapter: Option<LayerAdapter>,
    /// A frozen LoRA that acts in training alone.
    pub(super) training: Option<TrainingLora>,
}

/// The matrix of a layer.
pub(super) enum LayerWeight {
    Frozen(WeightTensor),
    Trained(ParamKey),
}

/// A tensor of a model other than a layer's weight.
pub enum ModelTensor {
    /// Frozen.
    Frozen(Var),
    /// Trainable.
    Trained(ParamKey),
}

impl ModelTensor {
    /// The variable on a tape.
    pub fn var(&self, tape: &Tape<'_>) -> Var {
        match self {
            Self::Frozen(var) => var.clone(),
            Self::Trained(key) => tape.param(*key),
        }
    }
}

/// The weight or the bias of a norm, perhaps with a trained vector added to it.
pub struct NormTensor {
    pub(super) tensor: ModelTensor,
    pub(super) added: Option<ParamKey>,
}

impl NormTensor {
    /// The sum on a tape.
    pub fn var(&self, tape: &Tape<'_>) -> Result<Var> {
        let own = self.tensor.var(tape);
        match self.added.filter(|_| tape.has_adapters()) {
            Some(key) => tape.add(&own, &tape.param(key)),
            None => Ok(own),
        }
    }
}

/// A layer's adapter.
pub(super) struct LayerAdapter {
    pub factors: Factors<ParamKey>,
    pub scale: f32,
    pub dropout: f32,
    pub magnitude: Option<DoraMagnitude>,
}

/// `DoRA`: the norm of each row of the weight is trained apart from its direction.
pub(super) struct DoraMagnitude {
    /// `[out]`
    pub trained: ParamKey,
    /// The norm of each row of the frozen weight, `[out]`.
    pub norms: Tensor,
}

/// What is fused into a layer's output.
#[derive(Clone, Copy, Default)]
struct LayerEpilogue<'a> {
    activation: Activation,
    onto: Option<&'a Var>,
    is_recomputed: bool,
}

impl LinearLayer {
    /// x·Wᵀ + bias, with the adapter's output added.
    pub fn forward(&self, tape: &Tape<'_>, x: &Var) -> Result<Var> {
        self.compute(tape, x, LayerEpilogue::default())
    }

    /// The same with an activation.
    pub fn forward_activated(
        &self,
        tape: &Tape<'_>,
        x: &Var,
        activation: Activation,
    ) -> Result<Var> {
        self.compute(tape, x, LayerEpilogue { activation, ..LayerEpilogue::default() })
    }

    /// The same as [`Self::forward`], added to `onto`.
    pub fn forward_add(&self, tape: &Tape<'_>, x: &Var, onto: &Var) -> Result<Var> {
        self.compute(tape, x, LayerEpilogue { onto: Some(onto), ..LayerEpilogue::default() })
    }

    /// The same as [`Self::forward`]; the output is recomputed in backward instead of kept, if
    /// `is_recomputed`. With `DoRA` and `LoKr` it is kept.
    pub fn forward_recomputed(&self, tape: &Tape<'_>, x: &Var, is_recomputed: bool) -> Result<Var> {
        self.compute(tape, x, LayerEpilogue { is_recomputed, ..LayerEpilogue::default() })
    }

    /// The same as [`Self::forward`] of the features of both inputs, first those of `first`. Its width divides the
    /// other's. They are copied side by side only for a layer that is quantised or trained.
    pub fn forward_concat(&self, tape: &Tape<'_>, first: Var, second: Var) -> Result<Var> {
        let adapter = self.adapter.as_ref().filter(|_| tape.has_adapters());
        let is_plain = adapter.is_none() && self.training.is_none();
        if let (LayerWeight::Frozen(WeightTensor::Dense(weight)), true) = (&self.weight, is_plain)
            && let None | Some(ModelTensor::Frozen(_)) = self.bias
        {
            let bias = self.bias.as_ref().map(|bias| bias.var(tape));
            return tape.linear_of_parts(&[&first, &second], weight, bias.as_ref());
        }
        let both = concat_features(tape, &first, &second)?;
        drop((first, second));
        self.forward(tape, &both)
    }

    fn compute(&self, tape: &Tape<'_>, x: &Var, epilogue: LayerEpilogue<'_>) -> Result<Var> {
        let added = self.training.as_ref().map(|lora| lora.forward(tape, x)).transpose()?;
        let Some(added) = added.flatten() else { return self.compute_own(tape, x, epilogue) };
        // Added before the activation, which comes by itself then. The output is kept.
        let LayerEpilogue { activation, onto, .. } = epilogue;
        let own = LayerEpilogue { onto: Some(&added), ..LayerEpilogue::default() };
        let sum = tape.activate(&self.compute_own(tape, x, own)?, activation)?;
        match onto {
            Some(onto) => tape.add(onto, &sum),
            None => Ok(sum),
        }
    }

    /// Without the adapter of training.
    fn compute_own(&self, tape: &Tape<'_>, x: &Var, epilogue: LayerEpilogue<'_>) -> Result<Var> {
        let LayerEpilogue { activation, onto, is_recomputed } = epilogue;
        let bias = self.bias.as_ref().map(|bias| bias.var(tape));
        let bias = bias.as_ref();
        let trained;
        let weight: Weight<'_> = match &self.weight {
            LayerWeight::Frozen(held) => held.into(),
            LayerWeight::Trained(key) => {
                trained = tape.param(*key);
                (&trained).into()
            }
        };
        let plain =
            Linear { bias, activation, onto, is_remat: is_recomputed, ..Linear::new(weight) };
        let adapter = self.adapter.as_ref().filter(|_| tape.has_adapters());
        let Some(adapter) = adapter else { return tape.linear(x, plain) };
        let LayerAdapter { scale, dropout, .. } = *adapter;
        let (down, up) = match adapter.factors.map(|key| tape.param(*key)) {
            Factors::Lora { down, up } => (down, up),
            Factors::Loha { w1: [a, b], w2: [c, d] } => (
                tape.khatri_rao(&b, &d, SharedAxis::Columns)?,
                tape.khatri_rao(&a, &c, SharedAxis::Rows)?,
            ),
            Factors::Lokr { w1, w2 } => return with_kronecker(tape, x, plain, scale, &w1, &w2),
            Factors::Norm { .. } => unreachable!("a linear layer is no norm"),
        };
        let lora = Lora { down: &down, up: &up, scale, dropout };
        let Some(magnitude) = &adapter.magnitude else {
            return tape.linear(x, Linear { lora: Some(lora), ..plain });
        };
        let trained = tape.param(magnitude.trained);
        let scale = tape.dora_scale(weight, &magnitude.norms, lora, &trained)?;
        let sum = tape.linear(x, Linear { lora: Some(lora), ..Linear::new(weight) })?;
        let sum = tape.affine(&sum, &scale, bias, activation)?;
        match onto {
            Some(onto) => tape.add(onto, &sum),
            None => Ok(sum),
        }
    }
}

/// Concatenates features: [S, N, D] and [S, N, E] to [S, N, D + E], where E is a multiple of D.
fn concat_features(tape: &Tape<'_>, first: &Var, second: &Var) -> Result<Var> {
    let shape = first.shape();
    let &[samples, tokens, d] = shape.sizes() else { unreachable!("tokens of samples") };
    let n = second.shape().width() / d;
    let (first, second) =
        (first.reshape([samples * tokens, 1, d]), second.reshape([samples * tokens, n, d]));
    let both = tape.concat_tokens(&[&first, &second])?;
    Ok(both.reshape([samples, tokens, (1 + n) * d]))
}

/// A layer with scale·x·(w1 ⊗ w2)ᵀ added.
fn with_kronecker(
    tape: &Tape<'_>,
    x: &Var,
    layer: Linear<'_>,
    scale: f32,
    w1: &LokrFactor<Var>,
    w2: &LokrFactor<Var>,
) -> Result<Var> {
    let plain = Linear { activation: Activation::None, is_remat: false, ..layer };
    let y = tape.linear(x, plain)?;
    let [outputs, inputs] = w2.sizes(|w| [w.shape().rows(), w.shape().width()]);
    let [to, from] = w1.sizes(|w| [w.shape().rows(), w.shape().width()]);
    // Narrower groups are mixed sooner; what would be saved of more groups than there are outputs is made again.
    let (groups, w2) = match w2 {
        LokrFactor::Full(w2) => (x.clone(), w2),
        LokrFactor::LowRank([a, b]) => {
            let inner = Linear { is_remat: to < from, ..Linear::new(b) };
            (tape.linear(&x.in_rows(inputs), inner)?, a)
        }
    };
    let width = w2.shape().width();
    let mixed = match w1 {
        LokrFactor::Full(w1) => tape.mix_groups(&groups, w1, width, scale)?,
        LokrFactor::LowRank([a, b]) => {
            tape.mix_groups(&tape.mix_groups(&groups, b, width, scale)?, a, width, 1.0)?
        }
    };
    let onto = y.reshape([mixed.shape().rows(), outputs]);
    let sum = tape.linear(&mixed, Linear { onto: Some(&onto), ..Linear::new(w2) })?;
    let sum = sum.reshape(y.shape());
    match layer.activation {
        Activation::None => Ok(sum),
        activation => tape.activate(&sum, activation),
    }
}

#[cfg(test)]
mod tests;
