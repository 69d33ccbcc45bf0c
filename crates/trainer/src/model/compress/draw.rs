//! Which positions the trunk sees: the logits of the policy, and a draw from them.
//!
//! Shapes: S sequences of N tokens, D narrow width.

use compute::ops::{Activation, Linear, top_k};
use compute::{Dtype, Tape, Tensor, Var};

use super::forward::{Compressor, CompressorInputs};
use super::selection::CausalRule;
use super::{CompressorTraining, Estimator, Selector};
use crate::error::Result;
use crate::model::build::ModelBuilder;
use crate::model::layer::{LinearLayer, ModelTensor, NormTensor};

/// Temperature of the softmax that keys are compared in. Chosen: the order is the same at any; at this one the smallest
/// key is far from zero.
const KEY_TEMPERATURE: f32 = 8.0;

/// One logit for each position, from the encoder's states.
pub(super) struct Policy {
    norm: NormTensor,
    hidden: LinearLayer,
    /// [1, D]
    out: ModelTensor,
}

/// What a policy drew, or a rule chose.
pub(super) struct Drawn {
    /// Of each mask. In training in the order they were drawn.
    pub kept: Vec<Vec<u32>>,
    /// The policy's logits, [S, N], if it is trained by them.
    pub logits: Option<Anchored>,
    /// The same on the host, also where they are not trained.
    pub logit_values: Vec<f32>,
    /// Soft choices that gradients pass through, [S, N].
    pub soft: Option<Anchored>,
}

/// Numbers that gradients pass through, and their values, which none does. Straight-through estimators are made of the
/// difference: it is zero, and has a gradient.
pub(super) struct Anchored {
    pub var: Var,
    pub values: Tensor,
}

impl Anchored {
    pub fn new(var: Var) -> Self {
        Self { values: var.tensor().clone(), var }
    }

    /// Zeros with the gradient of the numbers.
    pub fn difference(&self, tape: &Tape<'_>) -> Result<Var> {
        let minus = tape.scale(&Var::from(self.values.clone()), -1.0)?;
        Ok(tape.add(&self.var, &minus)?)
    }
}

impl Policy {
    pub fn new(d: usize, mut b: ModelBuilder<'_>) -> Result<Self> {
        Ok(Self {
            norm: b.norm("norm", d)?,
            hidden: b.linear_unquantised("hidden", d, d)?,
            out: b.embedding("out", [1, d])?,
        })
    }

    /// [S, N, D] to [S, N, 1], f32.
    pub fn logits(&self, tape: &Tape<'_>, states: &Var) -> Result<Var> {
        let x = tape.rms_norm(states, Some(&self.norm.var(tape)?), 1e-5)?;
        let x = self.hidden.forward_activated(tape, &x, Activation::Silu)?;
        let x = tape.convert(&x, Dtype::F32)?;
        Ok(tape.linear(&x, Linear::new(&self.out.var(tape)))?)
    }
}

impl Compressor {
    /// Which positions are kept.
    pub(super) fn draw(
        &self,
        tape: &Tape<'_>,
        states: &Var,
        CompressorInputs { sizes: [s, n], ids, .. }: CompressorInputs<'_>,
        training: &CompressorTraining,
    ) -> Result<Drawn> {
        let (one_in, k) = (self.config.keep_one_in, self.config.n_kept(n));
        let mut drawn =
            Drawn { kept: Vec::new(), logits: None, logit_values: Vec::new(), soft: None };
        let Some(policy) = &self.policy else {
            let selector = self.config.select;
            let k = if selector == Selector::All { n } else { k };
            drawn.kept = ids.chunks(n).map(|ids| selector.select(ids, one_in, k)).collect();
            return Ok(drawn);
        };
        let logits = policy.logits(tape, states)?.reshape([s, n]);
        if tape.device().is_meta() {
            drawn.logit_values = vec![0.0; s * n];
        } else {
            drawn.logit_values = logits.tensor().read::<f32>()?;
        }
        if !tape.is_recording() {
            let rows = drawn.logit_values.chunks(n);
            drawn.kept = rows.map(|keys| CausalRule::select(keys, one_in, k)).collect();
            return Ok(drawn);
        }
        let masks = match training.estimator {
            Estimator::Reinforce => {
                let detached = Var::from(logits.tensor().clone());
                vec![tape.gumbel_softmax(detached, KEY_TEMPERATURE, false)?]
            }
            Estimator::Grpo => {
                let pair = tape.gumbel_softmax_pair(logits.tensor(), KEY_TEMPERATURE)?;
                pair.map(Var::from).into()
            }
            Estimator::Gumbel => {
                vec![tape.gumbel_softmax(logits.clone(), training.temperature as f32, false)?]
            }
            Estimator::Ratio => vec![logits.clone()],
        };
        let picks = masks.iter().map(|keys| picks(keys.tensor(), k)).collect::<Result<Vec<_>>>()?;
        // The masks of a sequence lie beside each other.
        drawn.kept = (0..s).flat_map(|at| picks.iter().map(move |of| of[at].clone())).collect();
        match training.estimator {
            Estimator::Gumbel => drawn.soft = masks.into_iter().next().map(Anchored::new),
            _ => drawn.logits = Some(Anchored::new(logits)),
        }
        Ok(drawn)
    }
}

/// Positions of the `k` largest keys of each row, in their order.
fn picks(keys: &Tensor, k: usize) -> Result<Vec<Vec<u32>>> {
    let found = top_k(keys, k)?;
    if keys.device().is_meta() {
        return Ok(vec![(0..k as u32).collect(); keys.shape().rows()]);
    }
    Ok(found.read::<u32>()?.chunks(k).map(<[u32]>::to_vec).collect())
}
