//! What is trained and all it needs between steps, on one device. The same functions run on a device
//! without data, which is how a run knows beforehand what it takes.
//!
//! Shapes: S samples, C channels, H and W of a latent.

use std::collections::BTreeMap;

use compute::ops::{AdamW, Clip, PatchOrder, global_norm};
use compute::{Device, Dtype, Gradients, ParamKey, Params, Shape, Tape, Tensor, Var};
use weights::Tick;

use super::draws::{Purpose, seed};
use super::noisy::Noisy;
use crate::config::adapter::AdapterKind;
use crate::config::{RunConfig, Switch};
use crate::error::Result;
use crate::model::adapter::{Adapted, Adapters, Given};
use crate::model::build::Precision;
use crate::model::host::numbers;
use crate::model::recompute::Recompute;
use crate::model::sd3::pipeline::Pipeline;
use crate::model::sd3::prompts::Prompt;
use crate::model::sd3::{Input, Sd3};
use crate::optim::{Average, Optimizer};

/// The parts of a step, as recordings of memory name them.
const FORWARD: &str = "forward";
const BACKWARD: &str = "backward";
const UPDATE: &str = "update";

/// A model in training.
pub struct Session<'a> {
    device: Device,
    pipeline: &'a Pipeline,
    config: &'a RunConfig,
    model: Sd3,
    adapters: Adapters,
    gradients: Gradients,
    optimizer: Optimizer,
    average: Option<Average>,
}

/// Pictures of one size with their prompts.
pub struct Batch<'a> {
    /// Each with its prompt.
    pub samples: Vec<(Noisy, &'a Prompt)>,
    /// Channels, height and width of a latent.
    pub sizes: [usize; 3],
    /// The number of the batch they are of, and which of its pictures the first is: they decide what
    /// dropout leaves out.
    pub place: (u64, usize),
}

/// What an update found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Updated {
    /// Of all gradients, before they were clipped.
    pub norm: f64,
    /// Whether anything was changed.
    pub is_applied: bool,
}

/// What came of a training.
pub enum Trained {
    /// Matrices beside layers, by the layers' names.
    Adapter(BTreeMap<String, Given>),
    /// The model's own tensors, by name.
    Own(BTreeMap<String, Vec<f32>>),
}

impl<'a> Session<'a> {
    /// Loads the model and takes all memory that lives as long as the run.
    pub fn new(
        device: &Device,
        pipeline: &'a Pipeline,
        config: &'a RunConfig,
        tick: Tick<'_>,
    ) -> Result<Self> {
        let precision = Precision { dtype: config.base.dtype, base: config.base.quantise };
        let mut adapters = match config.adapter.kind {
            AdapterKind::None => Adapters::own(),
            AdapterKind::Lora | AdapterKind::Dora => {
                let from = seed(config.train.seed, Purpose::Adapters);
                Adapters::fresh(config.adapter.targets.clone(), from)
            }
        };
        let model = pipeline.load_transformer(device, precision, &mut adapters, tick)?;
        adapters.check_all_used(&pipeline.path)?;
        let params = &adapters.params;
        Ok(Self {
            gradients: Gradients::reserved(device, params)?,
            optimizer: Optimizer::new(config.optimizer.kind, params)?,
            average: match config.train.ema {
                Switch::On(decay) => Some(Average::new(decay, params)?),
                Switch::Off => None,
            },
            device: device.clone(),
            pipeline,
            config,
            model,
            adapters,
        })
    }

    /// Forward and backward: adds to the gradients `share` of what the batch asks for. Returns its
    /// loss. `recompute` decides what is computed twice. After an error the gradients are half a
    /// sum, to be forgotten.
    pub fn accumulate(
        &mut self,
        batch: &Batch<'_>,
        share: f64,
        recompute: Recompute,
    ) -> Result<f64> {
        let mut gradients = std::mem::take(&mut self.gradients);
        let loss = self.go_back(batch, share, recompute, &mut gradients);
        if loss.is_err() {
            // The hole that was left. If it is beyond a limit, the next backward asks for it again.
            _ = gradients.reserve(&self.device, &self.adapters.params);
        }
        self.gradients = gradients;
        loss
    }

    /// Forgets the gradients of a step that is not taken.
    pub fn forget(&mut self) {
        self.gradients.reset();
    }

    fn go_back(
        &self,
        batch: &Batch<'_>,
        share: f64,
        recompute: Recompute,
        gradients: &mut Gradients,
    ) -> Result<f64> {
        let (number, first) = batch.place;
        let dropout = seed(self.config.train.seed, Purpose::Dropout).wrapping_add(number);
        let params = &self.adapters.params;
        self.device.mark(FORWARD);
        let tape = Tape::training(&self.device, params, dropout).from_sample(first);
        let loss = self.loss(&tape, batch, recompute)?;
        let number = loss.tensor().clone();
        self.device.mark(BACKWARD);
        let start = self.device.upload(loss.shape(), &[share as f32])?;
        tape.backward_from(loss, start, gradients)?;
        // Read last, so that a card has work while the host asks for more.
        value(&number)
    }

    /// The loss alone.
    pub fn measure(&self, batch: &Batch<'_>) -> Result<f64> {
        let tape = Tape::inference(&self.device, &self.adapters.params, 0);
        value(self.loss(&tape, batch, Recompute::None)?.tensor())
    }

    fn loss<'m>(&'m self, tape: &Tape<'m>, batch: &Batch<'_>, recompute: Recompute) -> Result<Var> {
        let Batch { samples, sizes: [channels, height, width], .. } = batch;
        let n = samples.len();
        let dtype = self.config.base.dtype;
        let upload = |sizes: &[usize], parts: &[&[f32]], dtype| {
            self.device.upload_parts(Shape::new(sizes), parts, dtype)
        };
        let tokens: Vec<&[f32]> = samples.iter().map(|(_, prompt)| &prompt.tokens[..]).collect();
        let pooled: Vec<&[f32]> = samples.iter().map(|(_, prompt)| &prompt.pooled[..]).collect();
        let latents: Vec<&[f32]> = samples.iter().map(|(noisy, _)| &noisy.latents[..]).collect();
        let target: Vec<&[f32]> = samples.iter().map(|(noisy, _)| &noisy.target[..]).collect();
        let joint = self.pipeline.transformer.config.joint_attention_dim;
        let latent = [n, *channels, *height, *width];
        let input = Input {
            latents: &upload(&latent, &latents, dtype)?,
            timesteps: &samples.iter().map(|(noisy, _)| noisy.level.timestep).collect::<Vec<_>>(),
            context: &upload(&[n, tokens[0].len() / joint, joint], &tokens, dtype)?,
            pooled: &upload(&[n, pooled[0].len()], &pooled, dtype)?,
        };
        let found = self.model.forward(tape, input, recompute)?;
        let target = upload(&latent, &target, Dtype::F32)?;
        let patch = self.model.patch_size();
        let target = tape.patchify(&target.into(), patch, PatchOrder::ChannelsLast)?;
        let weights: Vec<f32> = samples.iter().map(|(noisy, _)| noisy.weight).collect();
        let weights = self.device.upload([n], &weights)?;
        Ok(tape.mse(&found, target.tensor(), Some(&weights), None)?)
    }

    /// Makes a step of the gradients, which are `scale` times what they should be, and forgets them.
    /// All or nothing: the norm is the last that takes memory, and it comes before any change.
    pub fn update(&mut self, rate: f64, applied: u64, scale: f64) -> Result<Updated> {
        let clip = match self.config.train.clip {
            Switch::On(norm) => norm as f32,
            Switch::Off => f32::INFINITY,
        };
        self.device.mark(UPDATE);
        let n_params = self.adapters.params.values().len();
        let norm = global_norm(&self.gradients.all(n_params), &self.device)?;
        let norm_value = value(&norm)? / scale;
        let settings = &self.config.optimizer;
        let how = AdamW {
            learning_rate: rate as f32,
            betas: (settings.betas[0] as f32, settings.betas[1] as f32),
            epsilon: settings.epsilon as f32,
            weight_decay: settings.weight_decay as f32,
            step: applied + 1,
            scale: (1.0 / scale) as f32,
        };
        let clip = Clip { norm, max: clip };
        self.optimizer.step(&mut self.adapters.params, &self.gradients, how, &clip)?;
        self.gradients.reset();
        let is_applied = norm_value.is_finite();
        if let Some(average) = self.average.as_mut().filter(|_| is_applied) {
            average.add(&self.adapters.params, applied + 1)?;
        }
        Ok(Updated { norm: norm_value, is_applied })
    }

    /// Lets `work` see the running means, if there are any, in the parameters' place.
    pub fn averaged<T>(&mut self, work: impl FnOnce(&Self) -> Result<T>) -> Result<T> {
        let Some(mut average) = self.average.take() else { return work(self) };
        average.swap(&mut self.adapters.params)?;
        let done = work(self);
        average.swap(&mut self.adapters.params)?;
        self.average = Some(average);
        done
    }

    /// The model and what is trained of it.
    pub fn model(&self) -> (&Sd3, &Params) {
        (&self.model, &self.adapters.params)
    }

    /// Layers that have an adapter, or tensors of the model's own that are trained.
    pub fn n_layers(&self) -> usize {
        self.adapters.layers.len() + self.adapters.own.len()
    }

    /// What is trained, as numbers.
    pub fn trained(&self) -> Result<Trained> {
        let of = |key: ParamKey| numbers(self.adapters.params.get(key));
        if self.config.adapter.kind == AdapterKind::None {
            let own = self.adapters.own.iter().map(|(name, key)| Ok((name.clone(), of(*key)?)));
            return Ok(Trained::Own(own.collect::<Result<_>>()?));
        }
        let given = |layer: &Adapted| -> Result<(String, Given)> {
            let given = Given {
                rank: layer.rank,
                alpha: layer.alpha,
                down: of(layer.down)?,
                up: of(layer.up)?,
                magnitude: layer.magnitude.map(of).transpose()?,
            };
            Ok((layer.module.clone(), given))
        };
        Ok(Trained::Adapter(self.adapters.layers.iter().map(given).collect::<Result<_>>()?))
    }

    /// Numbers that are trained.
    pub fn n_parameters(&self) -> usize {
        self.adapters.params.values().iter().map(|value| value.shape().elements()).sum()
    }

    /// The layers that learn nothing from the gradients that are there: none came, or zeros.
    pub fn still_layers(&self) -> Result<Vec<String>> {
        let learns = |key: ParamKey| -> Result<bool> {
            let gradient = self.gradients.get(key);
            Ok(gradient.is_some() && value(&global_norm(&[gradient], &self.device)?)? != 0.0)
        };
        let mut still = Vec::new();
        for layer in &self.adapters.layers {
            // The first step's gradient of `down` is zero: `up` begins with zeros.
            if !learns(layer.up)? && !learns(layer.down)? {
                still.push(layer.module.clone());
            }
        }
        for (name, key) in &self.adapters.own {
            if !learns(*key)? {
                still.push(name.clone());
            }
        }
        Ok(still)
    }

    /// Everything that a checkpoint holds, by name and in an order that stays.
    pub fn tensors(&mut self) -> Result<Vec<(String, &mut Tensor)>> {
        let mut all = Vec::new();
        let values = self.adapters.params.values_mut()?.iter_mut().enumerate();
        all.extend(values.map(|(index, value)| (format!("parameter.{index}"), value)));
        for (name, tensor) in self.optimizer.tensors() {
            all.push((format!("optimizer.{name}"), tensor));
        }
        let means = self.average.iter_mut().flat_map(Average::tensors).enumerate();
        all.extend(means.map(|(index, mean)| (format!("average.{index}"), mean)));
        Ok(all)
    }
}

/// A tensor of one number; 0 on a device without data. Here a card that failed says so.
fn value(tensor: &Tensor) -> Result<f64> {
    tensor.device().synchronise()?;
    Ok(numbers(tensor)?.first().copied().unwrap_or(0.0).into())
}
