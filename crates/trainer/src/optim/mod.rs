//! How gradients become steps: the rule and its state, how far a step goes, a running mean of what
//! is trained. The arithmetic is `compute`'s; here is what a run remembers between steps.

mod average;
mod muon;
mod plateau;
pub mod schedule;

use compute::ops::{AdamW, Clip, Codes, Moments, Moments8, adamw, adamw_8bit};
use compute::{Dtype, Gradients, Params, Result, Tensor};

pub use average::Average;
pub use plateau::Plateau;

use crate::config::optimizer::{self, OptimizerKind};
use crate::model::adapter::Adapters;
use muon::MatricesApart;

/// A rule with what it remembers of each parameter.
pub enum Optimizer {
    /// Moments as they are.
    AdamW(Vec<Moments>),
    /// Moments in 8 bits.
    AdamW8bit(Vec<Moments8>),
    /// A rule of their own for matrices within blocks.
    Muon(MatricesApart),
}

impl Optimizer {
    /// Before the first step of a model that computes in `dtype`.
    pub fn new(settings: &optimizer::Optimizer, adapters: &Adapters, dtype: Dtype) -> Result<Self> {
        let values = adapters.params.values().iter();
        Ok(match settings.kind {
            OptimizerKind::AdamW => Self::AdamW(values.map(Moments::new).collect::<Result<_>>()?),
            OptimizerKind::AdamW8bit => {
                Self::AdamW8bit(values.map(Moments8::new).collect::<Result<_>>()?)
            }
            OptimizerKind::Muon => {
                let momentum = settings.momentum as f32;
                Self::Muon(MatricesApart::new(adapters, momentum, dtype)?)
            }
        })
    }

    /// Changes the parameters; nothing at all if the norm in `clip` is not finite.
    pub fn step(
        &mut self,
        params: &mut Params,
        gradients: &Gradients,
        how: AdamW,
        clip: &Clip,
    ) -> Result<()> {
        let gradients = gradients.all(params.values().len());
        let params = params.values_mut()?;
        match self {
            Self::AdamW(state) => adamw(params, &gradients, state, how, Some(clip)),
            Self::AdamW8bit(state) => adamw_8bit(params, &gradients, state, how, Some(clip)),
            Self::Muon(state) => state.step(params, &gradients, how, clip),
        }
    }

    /// All it remembers, by parameter and in an order that stays.
    pub fn tensors(&mut self) -> Vec<(String, &mut Tensor)> {
        let mut all = Vec::new();
        match self {
            Self::AdamW(state) => {
                for (index, Moments { first, second }) in state.iter_mut().enumerate() {
                    all.push((format!("{index}.first"), first));
                    all.push((format!("{index}.second"), second));
                }
            }
            Self::AdamW8bit(state) => {
                for (index, Moments8 { first, second }) in state.iter_mut().enumerate() {
                    for (name, Codes { codes, scales }) in [("first", first), ("second", second)] {
                        all.push((format!("{index}.{name}.codes"), codes));
                        all.push((format!("{index}.{name}.scales"), scales));
                    }
                }
            }
            Self::Muon(state) => all = state.tensors(),
        }
        all
    }
}
