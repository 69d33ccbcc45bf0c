//! The fused backward pass of a full fine-tune: the optimizer updates each parameter as soon as backward has completed
//! its gradient, and the gradient is freed. So a few gradients are in memory at a time instead of all.
//!
//! Clipping is by the norm of each gradient, as in kohya's sd-scripts: the norm of all of them is known only when all
//! were applied. A gradient that is not finite leaves its parameter and the optimizer's state of it unchanged. The norm
//! of the step is then not finite either, so the step counts as skipped, although other parameters have changed: what
//! came of a finite gradient is as good as in any other step. A step that fails after its first update cannot be
//! repeated, and must not be saved.

use compute::ops::{GradClip, global_norm_into};
use compute::{Device, Dtype, ParamKey, Params, Result, Tag, Tensor};

use crate::optim::{Optimizer, OptimizerStep};

/// What is known of a step's gradients after they were freed.
pub struct FusedBackward {
    /// The norm of each parameter's gradient. The memory is taken once, so that it does not fragment the arena.
    norms: Vec<Tensor>,
    /// Whether the parameter was updated in this step.
    is_updated: Vec<bool>,
}

impl FusedBackward {
    /// Before the first step.
    pub fn new(device: &Device, params: &Params) -> Result<Self> {
        let n_params = params.values().len();
        let norm = |_| device.with_tag(Tag::Gradients, || device.zeros([], Dtype::F32));
        let norms = (0..n_params).map(norm).collect::<Result<_>>()?;
        Ok(Self { norms, is_updated: vec![false; n_params] })
    }

    /// Updates a parameter by its gradient, clipped to `max_norm`.
    pub fn update(
        &mut self,
        optimizer: &mut Optimizer,
        key: ParamKey,
        param: &mut Tensor,
        gradient: &Tensor,
        how: OptimizerStep,
        max_norm: f32,
    ) -> Result<()> {
        let index = key.index();
        let norm = &mut self.norms[index];
        global_norm_into(&[Some(gradient)], norm)?;
        let clip = GradClip { norm: norm.clone(), max_norm };
        optimizer.step_one(index, param, gradient, how, &clip)?;
        self.is_updated[index] = true;
        Ok(())
    }

    /// The norm of a parameter's gradient, if one arrived in this step.
    pub fn norm(&self, key: ParamKey) -> Option<&Tensor> {
        self.is_updated[key.index()].then(|| &self.norms[key.index()])
    }

    /// Those of all parameters.
    pub fn norms(&self) -> Vec<Option<&Tensor>> {
        let all = self.norms.iter().zip(&self.is_updated);
        all.map(|(norm, is_updated)| is_updated.then_some(norm)).collect()
    }

    /// Whether a parameter was updated since the last step ended.
    pub fn has_updated(&self) -> bool {
        self.is_updated.contains(&true)
    }

    /// Ends a step.
    pub fn end_step(&mut self) {
        self.is_updated.fill(false);
    }
}

#[cfg(test)]
mod tests {
    use compute::ops::{AdamW, global_norm};

    use super::*;
    use crate::config::RawConfig;
    use crate::config::optimizer::OptimizerKind;
    use crate::model::adapter::Adapters;

    const MAX_NORM: f64 = 0.5;

    /// `AdamW` of PyTorch on one tensor, whose gradients are clipped by their own norm.
    struct Reference {
        params: Vec<f64>,
        first: Vec<f64>,
        second: Vec<f64>,
    }

    impl Reference {
        fn step(&mut self, gradient: &[f32], how: AdamW) {
            let gradient: Vec<f64> =
                gradient.iter().map(|g| f64::from(*g) * f64::from(how.scale)).collect();
            let norm = gradient.iter().map(|g| g * g).sum::<f64>().sqrt();
            let clip = (MAX_NORM / (norm + 1e-6)).min(1.0);
            let (rate, decay) = (f64::from(how.learning_rate), f64::from(how.weight_decay));
            let (b1, b2) = how.betas;
            let steps = how.step as f64;
            for (at, g) in gradient.iter().map(|g| g * clip).enumerate() {
                self.first[at] = b1 * self.first[at] + (1.0 - b1) * g;
                self.second[at] = b2 * self.second[at] + (1.0 - b2) * g * g;
                let mean = self.first[at] / (1.0 - b1.powf(steps));
                let square = self.second[at] / (1.0 - b2.powf(steps));
                self.params[at] -= rate * decay * self.params[at];
                self.params[at] -= rate * mean / (square.sqrt() + f64::from(how.epsilon));
            }
        }
    }

    fn optimizer(adapters: &Adapters) -> Optimizer {
        let mut raw = RawConfig::empty();
        for setting in ["base.path=base", "data.images=images"] {
            raw.set(setting).unwrap();
        }
        let config = raw.resolve().unwrap().optimizer;
        assert_eq!(config.kind, OptimizerKind::AdamW);
        Optimizer::new(&config, adapters, Dtype::F32, None).unwrap()
    }

    /// Gradients of one tensor beyond the largest norm, of the other below it, and back.
    const GRADIENTS: [[[f32; 3]; 2]; 3] = [
        [[3.0, -4.0, 1.0], [0.01, 0.02, -0.03]],
        [[0.1, 0.2, -0.1], [5.0, -6.0, 7.0]],
        [[-9.0, 2.0, 0.5], [0.3, 0.2, 0.1]],
    ];

    #[test]
    fn each_gradient_is_clipped_by_its_own_norm() {
        let device = Device::cpu(1, 1 << 20).unwrap();
        let start = [[1.0f32, -2.0, 0.5], [0.1, 0.2, -0.3]];
        let mut adapters = Adapters::full();
        let keys = start.map(|values| adapters.params.add(device.upload([3], &values).unwrap()));
        let mut expected = start.map(|values| Reference {
            params: values.map(f64::from).to_vec(),
            first: vec![0.0; 3],
            second: vec![0.0; 3],
        });
        let mut optimizer = optimizer(&adapters);
        let mut fused = FusedBackward::new(&device, &adapters.params).unwrap();
        let mut how = AdamW { learning_rate: 0.1, scale: 0.5, ..AdamW::default() };
        for (gradients, step) in GRADIENTS.iter().zip(1..) {
            how.step = step;
            let params = adapters.params.values_mut().unwrap();
            for (index, numbers) in gradients.iter().enumerate() {
                let gradient = device.upload([3], numbers).unwrap();
                let param = &mut params[index];
                let step = OptimizerStep { adamw: how, rounding_seed: 0 };
                fused
                    .update(&mut optimizer, keys[index], param, &gradient, step, MAX_NORM as f32)
                    .unwrap();
                expected[index].step(numbers, how);
            }
            let norm = global_norm(&fused.norms(), &device).unwrap().to_vec::<f32>()[0];
            let squares = gradients.iter().flatten().map(|g| f64::from(*g).powi(2));
            assert!((f64::from(norm) / squares.sum::<f64>().sqrt() - 1.0).abs() < 1e-6, "{norm}");
            fused.end_step();
        }
        for (param, expected) in adapters.params.values().iter().zip(&expected) {
            for (found, expected) in param.to_vec::<f32>().iter().zip(&expected.params) {
                assert!((f64::from(*found) - expected).abs() < 1e-6, "{found} {expected}");
            }
        }
    }

    #[test]
    fn a_gradient_that_is_not_finite_spares_its_parameter_and_shows_in_the_norm() {
        let device = Device::cpu(1, 1 << 20).unwrap();
        let mut adapters = Adapters::full();
        let keys =
            [1.0f32, 2.0].map(|value| adapters.params.add(device.upload([1], &[value]).unwrap()));
        let mut optimizer = optimizer(&adapters);
        let mut fused = FusedBackward::new(&device, &adapters.params).unwrap();
        assert!(!fused.has_updated());
        let params = adapters.params.values_mut().unwrap();
        for (index, gradient) in [f32::NAN, 1.0].into_iter().enumerate() {
            let gradient = device.upload([1], &[gradient]).unwrap();
            let (key, param) = (keys[index], &mut params[index]);
            let how = OptimizerStep { adamw: AdamW::default(), rounding_seed: 0 };
            fused.update(&mut optimizer, key, param, &gradient, how, 1.0).unwrap();
        }
        assert_eq!(params[0].to_vec::<f32>(), [1.0]);
        assert!(params[1].to_vec::<f32>()[0] < 2.0);
        let state: Vec<f32> =
            optimizer.tensors().iter().flat_map(|(_, tensor)| tensor.to_vec::<f32>()).collect();
        assert!(state[..2] == [0.0; 2] && state[2..].iter().all(|moment| *moment > 0.0));
        assert!(global_norm(&fused.norms(), &device).unwrap().to_vec::<f32>()[0].is_nan());
        assert!(fused.has_updated());
        fused.end_step();
        assert!(!fused.has_updated());
    }
}
