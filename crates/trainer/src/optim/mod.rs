//! Optimizers with their state, learning rate schedules, and the EMA of the trained parameters. The kernels
//! are `compute`'s; here is the state between steps.

mod ema;
mod muon;
mod plateau;
pub mod schedule;

use std::ops::Range;
use std::slice;

use compute::ops::{AdamW, BlockCodes, GradClip, Moments, Moments8bit, adamw, adamw_8bit};
use compute::{Dtype, Gradients, Params, Result, Tensor};

pub use ema::Ema;
pub use plateau::Plateau;

use crate::config::optimizer::{self, OptimizerKind};
use crate::model::adapter::Adapters;
use muon::MuonAdamW;

/// An optimizer with its state.
pub enum Optimizer {
    /// `AdamW`.
    AdamW(Vec<Moments>),
    /// `AdamW` with moments in 8 bits.
    AdamW8bit(Vec<Moments8bit>),
    /// `Muon` for matrices within blocks, `AdamW` for the rest.
    Muon(MuonAdamW),
}

impl Optimizer {
    /// Before the first step of a model that computes in `dtype`.
    pub fn new(
        settings: &optimizer::OptimizerConfig,
        adapters: &Adapters,
        dtype: Dtype,
    ) -> Result<Self> {
        let values = adapters.params.values();
        let values = values.iter();
        Ok(match settings.kind {
            OptimizerKind::AdamW => Self::AdamW(values.map(Moments::new).collect::<Result<_>>()?),
            OptimizerKind::AdamW8bit => {
                Self::AdamW8bit(values.map(Moments8bit::new).collect::<Result<_>>()?)
            }
            OptimizerKind::Muon => {
                let momentum = settings.momentum as f32;
                Self::Muon(MuonAdamW::new(adapters, momentum, dtype)?)
            }
        })
    }

    /// Changes the parameters; nothing at all if the norm in `clip` is not finite.
    pub fn step(
        &mut self,
        params: &mut Params,
        gradients: &Gradients,
        how: AdamW,
        clip: &GradClip,
    ) -> Result<()> {
        let gradients = gradients.all(params.values().len());
        let params = params.values_mut()?;
        self.step_range(0..params.len(), params, &gradients, how, clip)
    }

    /// Changes the parameter at `index` alone.
    pub fn step_one(
        &mut self,
        index: usize,
        param: &mut Tensor,
        gradient: &Tensor,
        how: AdamW,
        clip: &GradClip,
    ) -> Result<()> {
        let (param, range) = (slice::from_mut(param), index..index + 1);
        self.step_range(range, param, &[Some(gradient)], how, clip)
    }

    /// Changes the parameters of a range.
    fn step_range(
        &mut self,
        range: Range<usize>,
        params: &mut [Tensor],
        gradients: &[Option<&Tensor>],
        how: AdamW,
        clip: &GradClip,
    ) -> Result<()> {
        match self {
            Self::AdamW(state) => adamw(params, gradients, &mut state[range], how, Some(clip)),
            Self::AdamW8bit(state) => {
                adamw_8bit(params, gradients, &mut state[range], how, Some(clip))
            }
            Self::Muon(state) => state.step(range, params, gradients, how, clip),
        }
    }

    /// Its state, by parameter and in a stable order.
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
                for (index, Moments8bit { first, second }) in state.iter_mut().enumerate() {
                    for (name, BlockCodes { codes, scales }) in
                        [("first", first), ("second", second)]
                    {
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
