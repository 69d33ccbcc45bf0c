//! `Muon` for matrices within blocks, `AdamW` for all else. One learning rate serves both, since updates of
//! either have about the same size.

use std::ops::Range;
use std::slice;

use compute::ops::{AdamW, GradClip, Moments, Muon, adamw, momentum, muon};
use compute::{Dtype, Result, Tensor};

use crate::model::adapter::Adapters;

/// The state of both optimizers.
pub struct MuonAdamW {
    /// The momentum of each matrix within a block.
    means: Vec<Option<Tensor>>,
    /// Of every other parameter, the moments.
    moments: Vec<Option<Moments>>,
    momentum: f32,
    dtype: Dtype,
}

impl MuonAdamW {
    /// Before the first step; matmuls are computed in `dtype`.
    pub fn new(adapters: &Adapters, share: f32, dtype: Dtype) -> Result<Self> {
        let (mut means, mut moments) = (Vec::new(), Vec::new());
        for (param, is_inner) in adapters.params.values().iter().zip(is_hidden_matrix(adapters)) {
            means.push(is_inner.then(|| momentum(param)).transpose()?);
            moments.push((!is_inner).then(|| Moments::new(param)).transpose()?);
        }
        Ok(Self { means, moments, momentum: share, dtype })
    }

    /// Updates the parameters of a range. `Muon` comes first, since it allocates memory: where it fails, nothing has
    /// changed.
    pub fn step(
        &mut self,
        range: Range<usize>,
        params: &mut [Tensor],
        gradients: &[Option<&Tensor>],
        how: AdamW,
        clip: &GradClip,
    ) -> Result<()> {
        let AdamW { learning_rate, weight_decay, scale, .. } = how;
        let (momentum, dtype) = (self.momentum, self.dtype);
        let turned = Muon { learning_rate, momentum, weight_decay, scale, dtype };
        muon(params, gradients, &mut self.means[range.clone()], turned, Some(clip))?;
        let others = params.iter_mut().zip(gradients).zip(&mut self.moments[range]);
        for ((param, gradient), moments) in others {
            if let Some(moments) = moments {
                let (param, state) = (slice::from_mut(param), slice::from_mut(moments));
                adamw(param, &[*gradient], state, how, Some(clip))?;
            }
        }
        Ok(())
    }

    /// The state, by parameter and in a stable order.
    pub fn tensors(&mut self) -> Vec<(String, &mut Tensor)> {
        let mut all = Vec::new();
        for (index, (mean, moments)) in self.means.iter_mut().zip(&mut self.moments).enumerate() {
            all.extend(mean.as_mut().map(|mean| (format!("{index}.mean"), mean)));
            if let Some(Moments { first, second }) = moments {
                all.push((format!("{index}.first"), first));
                all.push((format!("{index}.second"), second));
            }
        }
        all
    }
}

/// Which parameters are hidden matrices: those of adapters but norms, and in a full fine-tune those of a numbered
/// block. Embeddings and output layers are not: each of their rows stands for one token.
fn is_hidden_matrix(adapters: &Adapters) -> Vec<bool> {
    let values = adapters.params.values();
    let mut found = vec![false; values.len()];
    for layer in adapters.layers.iter().filter(|layer| !layer.factors.is_norm()) {
        for key in layer.factors.all() {
            found[key.index()] = true;
        }
    }
    for (name, key) in &adapters.full_params {
        let is_matrix = values[key.index()].shape().sizes().len() == 2;
        let is_number = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
        found[key.index()] = is_matrix && name.split('.').any(is_number);
    }
    found
}

#[cfg(test)]
mod tests {
    use compute::ops::global_norm;
    use compute::{Device, ParamKey};

    use super::*;
    use crate::model::adapter::AdaptedLayer;
    use crate::model::adapter::factors::Factors;

    fn adapters(device: &Device, own: &[(&str, &[usize])]) -> Adapters {
        let mut adapters = Adapters::full();
        for (name, sizes) in own {
            let value = device.zeros(compute::Shape::new(sizes), Dtype::F32).unwrap();
            let key = adapters.params.add(value);
            adapters.full_params.push(((*name).into(), key));
        }
        adapters
    }

    #[test]
    fn matrices_of_blocks_are_told_from_the_rest() {
        let device = Device::meta(compute::DeviceKind::cpu(1), 1 << 20);
        let own: &[(&str, &[usize])] = &[
            ("model.embed_tokens.weight", &[9, 4]),
            ("model.layers.0.self_attn.q_proj.weight", &[4, 4]),
            ("model.layers.0.self_attn.q_proj.bias", &[4]),
            ("model.layers.12.input_layernorm.weight", &[4]),
            ("lm_head.weight", &[9, 4]),
            ("transformer_blocks.3.ff.net.0.proj.weight", &[8, 4]),
        ];
        let mut adapters = adapters(&device, own);
        assert_eq!(is_hidden_matrix(&adapters), [false, true, false, false, false, true]);
        let mut key = |sizes: &[usize]| -> ParamKey {
            adapters.params.add(device.zeros(compute::Shape::new(sizes), Dtype::F32).unwrap())
        };
        let (down, up, magnitude) = (key(&[2, 4]), key(&[4, 2]), Some(key(&[4])));
        let module = "lm_head".into();
        let factors = Factors::Lora { down, up };
        adapters.layers.push(AdaptedLayer {
            encoder: None,
            module,
            rank: 2,
            alpha: 2.0,
            factors,
            magnitude,
        });
        assert_eq!(is_hidden_matrix(&adapters)[6..], [true, true, false]);
    }

    /// Each parameter is updated as by its optimizer alone.
    #[test]
    fn optimizers_do_not_mix() {
        let device = Device::cpu(1, 1 << 20).unwrap();
        let mut ours = adapters(&device, &[("a.0.weight", &[2, 3]), ("a.weight", &[2, 3])]);
        let mut state = MuonAdamW::new(&ours, 0.9, Dtype::F32).unwrap();
        let names: Vec<String> = state.tensors().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["0.mean", "1.first", "1.second"]);
        let gradient = device.upload([2, 3], &[1.0f32, -2.0, 0.5, 0.25, 3.0, -1.0]).unwrap();
        let gradients = [Some(&gradient); 2];
        let clip = || GradClip { norm: global_norm(&gradients, &device).unwrap(), max_norm: 1.0 };
        let how = AdamW { learning_rate: 0.1, ..AdamW::default() };
        let params = ours.params.values_mut().unwrap();
        state.step(0..2, params, &gradients, how, &clip()).unwrap();
        let mut alone = [(); 2].map(|()| device.zeros([2, 3], Dtype::F32).unwrap());
        let [by_muon, by_adamw] = &mut alone;
        let turned = Muon {
            learning_rate: 0.1,
            momentum: 0.9,
            weight_decay: how.weight_decay,
            scale: 1.0,
            dtype: Dtype::F32,
        };
        let mut mean = [momentum(by_muon).ok()];
        muon(slice::from_mut(by_muon), &gradients[..1], &mut mean, turned, Some(&clip())).unwrap();
        let mut moments = [Moments::new(by_adamw).unwrap()];
        adamw(slice::from_mut(by_adamw), &gradients[..1], &mut moments, how, Some(&clip()))
            .unwrap();
        for (ours, alone) in params.iter().zip(&alone) {
            assert_eq!(ours.to_vec::<f32>(), alone.to_vec::<f32>());
        }
        assert_ne!(params[0].to_vec::<f32>(), params[1].to_vec::<f32>());
    }
}
