//! Prodigy's state: that of every parameter, and the one d of all.

use compute::ops::{AdamW, GradClip, Prodigy, ProdigyState, prodigy, prodigy_distance};
use compute::{Result, Tensor};

use super::{named, of_each};
use crate::config::optimizer::OptimizerConfig;
use crate::model::host::to_vec;

/// Prodigy between steps.
pub struct ProdigyOptimizer {
    state: Vec<ProdigyState>,
    /// d and what it is found from; none without parameters.
    distance: Option<Tensor>,
    /// With the settings of `AdamW` left as they are by default: a step brings its own.
    settings: Prodigy,
}

impl ProdigyOptimizer {
    /// Before the first step of parameters with these values.
    pub fn new(settings: &OptimizerConfig, values: &[Tensor]) -> Result<Self> {
        let d0 = settings.d0 as f32;
        let distance = values.first().map(|value| prodigy_distance(value.device(), d0));
        let settings = Prodigy {
            adamw: AdamW::default(),
            d0,
            d_coef: settings.d_coef as f32,
            use_bias_correction: settings.use_bias_correction,
            safeguard_warmup: settings.safeguard_warmup,
        };
        let state = of_each(values, ProdigyState::new)?;
        Ok(Self { state, distance: distance.transpose()?, settings })
    }

    /// Updates all parameters.
    pub fn step(
        &mut self,
        params: &mut [Tensor],
        gradients: &[Option<&Tensor>],
        adamw: AdamW,
        clip: &GradClip,
    ) -> Result<()> {
        let Some(distance) = &mut self.distance else { return Ok(()) };
        let how = Prodigy { adamw, ..self.settings };
        prodigy(params, gradients, &mut self.state, distance, how, Some(clip))
    }

    /// d, which multiplies the learning rate.
    pub fn distance(&self) -> Result<f64> {
        let values = self.distance.as_ref().map(to_vec).transpose()?;
        Ok(values.and_then(|values| values.first().copied()).map_or(1.0, f64::from))
    }

    /// The state, by parameter and in a stable order.
    pub fn tensors(&mut self) -> Vec<(String, &mut Tensor)> {
        let mut all = named(&mut self.state, |ProdigyState { first, second, start, sum }| {
            vec![("first", first), ("second", second), ("start", start), ("sum", sum)]
        });
        all.extend(self.distance.as_mut().map(|distance| ("distance".to_owned(), distance)));
        all
    }
}
