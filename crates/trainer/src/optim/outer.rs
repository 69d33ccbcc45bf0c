//! The outer optimizer of local steps: Nesterov's momentum on the difference between the weights before a round of steps
//! and their average over ranks after it (Douillard et al., "`DiLoCo`: Distributed Low-Communication Training of Language
//! Models", arXiv 2311.08105, algorithm 1).

use compute::ops::ema;
use compute::{Dtype, Params, Result, Tag, Tensor};

use crate::config::cluster::ClusterConfig;

/// Where the last round began, and the momentum of rounds.
pub struct OuterOptimizer {
    learning_rate: f32,
    momentum: f32,
    anchors: Vec<Tensor>,
    means: Vec<Tensor>,
}

impl OuterOptimizer {
    /// Before the first round, which begins with these parameters.
    pub fn new(settings: &ClusterConfig, params: &Params) -> Result<Self> {
        let zeros = |value: &Tensor| {
            let device = value.device();
            device.with_tag(Tag::Optimizer, || device.zeros(value.shape(), Dtype::F32))
        };
        let values = params.values();
        let all = || values.iter().map(zeros).collect::<Result<Vec<_>>>();
        let (mut anchors, means) = (all()?, all()?);
        // Nothing is kept of the zeros.
        anchors.iter_mut().zip(values.iter()).try_for_each(|(to, from)| ema(to, from, 0.0))?;
        let (learning_rate, momentum) =
            (settings.outer_learning_rate as f32, settings.outer_momentum as f32);
        Ok(Self { learning_rate, momentum, anchors, means })
    }

    /// A parameter as the last round began with it.
    pub fn anchor(&self, index: usize) -> &Tensor {
        &self.anchors[index]
    }

    /// Changes a parameter, which began the round `moved` above the average over ranks.
    pub fn step(&mut self, index: usize, param: &mut Tensor, moved: &[f32]) -> Result<()> {
        let (anchor, mean) = (&mut self.anchors[index], &mut self.means[index]);
        let (mut values, mut means) = (anchor.read::<f32>()?, mean.read::<f32>()?);
        for ((value, mean), moved) in values.iter_mut().zip(&mut means).zip(moved) {
            *mean = self.momentum * *mean + moved;
            *value -= self.learning_rate * (self.momentum * *mean + moved);
        }
        anchor.write(&values);
        mean.write(&means);
        param.write(&values);
        Ok(())
    }

    /// Its state, by parameter and in a stable order.
    pub fn tensors(&mut self) -> impl Iterator<Item = (String, &mut Tensor)> {
        let pairs = self.anchors.iter_mut().zip(&mut self.means).enumerate();
        pairs.flat_map(|(index, (anchor, mean))| {
            [(format!("{index}.anchor"), anchor), (format!("{index}.mean"), mean)]
        })
    }
}

#[cfg(test)]
mod tests {
    use compute::Device;

    use super::*;
    use crate::config::Switch;
    use crate::config::cluster::WireFormat;

    #[test]
    fn rounds_are_those_of_nesterov() {
        let device = Device::cpu(1, 1 << 16).unwrap();
        let mut params = Params::default();
        let key = params.add(device.upload([1], &[1.0f32]).unwrap());
        let settings = ClusterConfig {
            sync_every: Switch::On(2),
            outer_learning_rate: 0.5,
            outer_momentum: 0.5,
            wire: WireFormat::F32,
            nccl: true,
            shard_optimizer: false,
        };
        let mut outer = OuterOptimizer::new(&settings, &params).unwrap();
        assert_eq!(outer.anchor(0).read::<f32>().unwrap(), [1.0]);
        // By hand: v = 0.4, then 0.5 * 0.4 + 0.2; x -= 0.5 * (0.5 * v + moved).
        for (moved, expected) in [(0.4f32, 0.7), (0.2, 0.5)] {
            outer.step(0, &mut params.values_mut().unwrap()[0], &[moved]).unwrap();
            for tensor in [&*params.get(key), outer.anchor(0)] {
                assert!((tensor.read::<f32>().unwrap()[0] - expected).abs() < 1e-6);
            }
        }
    }
}
