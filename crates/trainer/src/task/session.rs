//! What is trained and all it needs between steps, on one device. The same functions run on a device
//! without data, which is how a run knows beforehand what it takes. What the model is, and what its
//! loss, is the task's to say.

use std::collections::BTreeMap;
use std::path::Path;

use compute::ops::{AdamW, GradClip, global_norm};
use compute::{Device, Gradients, ParamKey, Tape, Tensor, Var};
use weights::BytesDoneFn;

use super::seed::{Purpose, seed};
use super::traits::{Task, TrainableModel};
use crate::config::adapter::{AdapterConfig, AdapterKind};
use crate::config::{RunConfig, Switch};
use crate::error::Result;
use crate::export::adapter_checkpoint::{self, LayerTensors};
use crate::model::adapter::{AdaptedLayer, Adapters, LoraWeights};
use crate::model::build::Precision;
use crate::model::host::to_vec;
use crate::model::recompute::Recompute;
use crate::optim::{Ema, Optimizer};

/// How a checkpoint calls parameters and their EMA; an index follows.
pub(crate) const PARAMETER_PREFIX: &str = "parameter.";
pub(crate) const EMA_PREFIX: &str = "average.";

/// The parts of a step, as recordings of memory name them.
const FORWARD: &str = "forward";
const BACKWARD: &str = "backward";
const UPDATE: &str = "update";

/// A model in training.
pub struct Session<'a, L: Task> {
    device: Device,
    task: &'a L,
    config: &'a RunConfig,
    model: L::Model,
    adapters: Adapters,
    /// In the order of the parameters.
    pub(crate) gradients: Gradients,
    optimizer: Optimizer,
    ema: Option<Ema>,
}

/// Where a micro-batch stands in a run: the number of the batch it is of, and which of its samples the
/// first is. They decide what dropout leaves out.
pub type BatchPosition = (u64, usize);

/// The norm of all gradients of a step, before they are clipped.
pub struct GradientNorm {
    /// Of the gradients as they lie there.
    tensor: Tensor,
    /// How many times what they should be they are.
    scale: f64,
    /// Of the gradients as they should be.
    pub value: f64,
}

impl GradientNorm {
    /// Whether all gradients are finite, so that they can be applied.
    pub fn is_finite(&self) -> bool {
        self.value.is_finite()
    }
}

/// What came of a training.
pub enum TrainedWeights {
    /// Matrices beside layers, by the layers' names.
    Adapter(BTreeMap<String, LoraWeights>),
    /// The model's own tensors, by name.
    Full(BTreeMap<String, Vec<f32>>),
}

impl TrainedWeights {
    /// Everything by name, an adapter's matrices as PEFT calls them.
    pub fn tensors(&self) -> Box<dyn Iterator<Item = (String, &[f32])> + '_> {
        match self {
            Self::Adapter(layers) => Box::new(layers.iter().flat_map(|(module, given)| {
                let magnitude = given.magnitude.as_deref().map(|m| ("lora_magnitude_vector", m));
                let all = [("lora_A", &given.down[..]), ("lora_B", &given.up[..])];
                let named = move |(name, values)| (format!("{module}.{name}"), values);
                all.into_iter().chain(magnitude).map(named)
            })),
            Self::Full(own) => {
                Box::new(own.iter().map(|(name, values)| (name.clone(), &values[..])))
            }
        }
    }
}

impl<'a, L: Task> Session<'a, L> {
    /// Loads the model and takes all memory that lives as long as the run.
    pub fn new(
        device: &Device,
        task: &'a L,
        config: &'a RunConfig,
        tick: BytesDoneFn<'_>,
    ) -> Result<Self> {
        let mut adapters = match config.adapter.kind {
            AdapterKind::Full => Adapters::full(),
            AdapterKind::Lora | AdapterKind::Dora => {
                let from = seed(config.train.seed, Purpose::Adapters);
                let AdapterConfig { targets, exclude, .. } = &config.adapter;
                Adapters::random_init(targets.clone(), exclude.clone(), from)
            }
        };
        let model = task.load(device, precision(config), &mut adapters, tick)?;
        adapters.check_all_used(task.path())?;
        let params = &adapters.params;
        Ok(Self {
            gradients: Gradients::reserved(device, params)?,
            optimizer: Optimizer::new(&config.optimizer, &adapters, config.base.dtype)?,
            ema: match config.train.ema {
                Switch::On(decay) => Some(Ema::new(decay, params)?),
                Switch::Off => None,
            },
            device: device.clone(),
            task: task,
            config,
            model,
            adapters,
        })
    }

    /// Forward and backward: adds to the gradients `share` of what the micro-batch asks for. Returns its
    /// loss. `recompute` decides what is recomputed. After an error the gradients are half a
    /// sum, to be forgotten.
    pub fn accumulate(
        &mut self,
        micro_batch: &L::MicroBatch,
        place: BatchPosition,
        share: f64,
        recompute: Recompute,
    ) -> Result<f64> {
        let mut gradients = std::mem::take(&mut self.gradients);
        let loss = self.forward_backward((micro_batch, place), share, recompute, &mut gradients);
        if loss.is_err() {
            // The hole that was left. If it is beyond a limit, the next backward asks for it again.
            _ = gradients.reserve(&self.device, &self.adapters.params);
        }
        self.gradients = gradients;
        loss
    }

    /// Forgets the gradients of a step that is not taken.
    pub fn zero_grad(&mut self) {
        self.gradients.reset();
    }

    fn forward_backward(
        &self,
        (micro_batch, (number, first)): (&L::MicroBatch, BatchPosition),
        share: f64,
        recompute: Recompute,
        gradients: &mut Gradients,
    ) -> Result<f64> {
        let dropout = seed(self.config.train.seed, Purpose::Dropout).wrapping_add(number);
        let params = &self.adapters.params;
        self.device.mark(FORWARD);
        let tape = Tape::training(&self.device, params, dropout).from_sample(first);
        let loss = self.loss(&tape, micro_batch, recompute)?;
        let number = loss.tensor().clone();
        self.device.mark(BACKWARD);
        let start = self.device.upload(loss.shape(), &[share as f32])?;
        tape.backward_from(loss, start, gradients)?;
        // Read last, so that a GPU has work while the host asks for more.
        scalar(&number)
    }

    /// The loss alone.
    pub fn eval_loss(&self, micro_batch: &L::MicroBatch) -> Result<f64> {
        let tape = Tape::inference(&self.device, &self.adapters.params, 0);
        scalar(self.loss(&tape, micro_batch, Recompute::None)?.tensor())
    }

    fn loss<'m>(
        &'m self,
        tape: &Tape<'m>,
        of: &L::MicroBatch,
        recompute: Recompute,
    ) -> Result<Var> {
        self.task.loss(&self.model, tape, of, (self.config.base.dtype, recompute))
    }

    /// The norm of the gradients, which are `scale` times what they should be.
    pub fn gradient_norm(&self, scale: f64) -> Result<GradientNorm> {
        self.device.mark(UPDATE);
        let n_params = self.adapters.params.values().len();
        let tensor = global_norm(&self.gradients.all(n_params), &self.device)?;
        let value = scalar(&tensor)? / scale;
        Ok(GradientNorm { tensor, scale, value })
    }

    /// Makes a step of the gradients, after so many that were applied, and forgets them; without changing
    /// anything if they are not finite. All or nothing: memory is taken before any change.
    pub fn apply(&mut self, norm: &GradientNorm, rate: f64, applied: u64) -> Result<()> {
        let max = match self.config.train.max_grad_norm {
            Switch::On(norm) => norm as f32,
            Switch::Off => f32::INFINITY,
        };
        let settings = &self.config.optimizer;
        let how = AdamW {
            learning_rate: rate as f32,
            betas: (settings.betas[0] as f32, settings.betas[1] as f32),
            epsilon: settings.epsilon as f32,
            weight_decay: settings.weight_decay as f32,
            step: applied + 1,
            scale: (1.0 / norm.scale) as f32,
        };
        let clip = GradClip { norm: norm.tensor.clone(), max_norm: max };
        self.optimizer.step(&mut self.adapters.params, &self.gradients, how, &clip)?;
        self.gradients.reset();
        if let Some(average) = self.ema.as_mut().filter(|_| norm.is_finite()) {
            average.update(&self.adapters.params, applied + 1)?;
        }
        Ok(())
    }

    /// Both, where nobody else has a part in the step.
    pub fn update(&mut self, rate: f64, applied: u64, scale: f64) -> Result<()> {
        let norm = self.gradient_norm(scale)?;
        self.apply(&norm, rate, applied)
    }

    /// Lets `work` see the EMA, if there are any, in the parameters' place.
    pub fn with_ema<T>(&mut self, work: impl FnOnce(&Self) -> Result<T>) -> Result<T> {
        let Some(mut average) = self.ema.take() else { return work(self) };
        average.swap(&mut self.adapters.params)?;
        let done = work(self);
        average.swap(&mut self.adapters.params)?;
        self.ema = Some(average);
        done
    }

    /// The model as it can be shown.
    pub fn trainable_model(&self) -> TrainableModel<'_, L::Model> {
        let precision = precision(self.config);
        TrainableModel { model: &self.model, params: &self.adapters.params, precision }
    }

    /// Layers that have an adapter, or tensors of the model's own that are trained.
    pub fn n_layers(&self) -> usize {
        self.adapters.layers.len() + self.adapters.full_params.len()
    }

    /// What is trained, as numbers.
    pub fn trained_weights(&self) -> Result<TrainedWeights> {
        let of = |key: ParamKey| to_vec(self.adapters.params.get(key));
        if self.config.adapter.kind == AdapterKind::Full {
            let own =
                self.adapters.full_params.iter().map(|(name, key)| Ok((name.clone(), of(*key)?)));
            return Ok(TrainedWeights::Full(own.collect::<Result<_>>()?));
        }
        let given = |layer: &AdaptedLayer| -> Result<(String, LoraWeights)> {
            let given = LoraWeights {
                rank: layer.rank,
                alpha: layer.alpha,
                down: of(layer.down)?,
                up: of(layer.up)?,
                magnitude: layer.magnitude.map(of).transpose()?,
            };
            Ok((layer.module.clone(), given))
        };
        Ok(TrainedWeights::Adapter(self.adapters.layers.iter().map(given).collect::<Result<_>>()?))
    }

    /// Numbers that are trained.
    pub fn n_parameters(&self) -> usize {
        self.adapters.params.values().iter().map(|value| value.shape().elements()).sum()
    }

    /// The layers that learn nothing from the gradients that are there: none came, or zeros. Those of
    /// which that was known are not among them.
    pub fn layers_without_gradient(&self) -> Result<Vec<String>> {
        let learns = |key: ParamKey| -> Result<bool> {
            let gradient = self.gradients.get(key);
            Ok(gradient.is_some() && scalar(&global_norm(&[gradient], &self.device)?)? != 0.0)
        };
        let mut still = Vec::new();
        for layer in &self.adapters.layers {
            // The first step's gradient of `down` is zero: `up` begins with zeros.
            if !learns(layer.up)? && !learns(layer.down)? {
                still.push(layer.module.clone());
            }
        }
        for (name, key) in &self.adapters.full_params {
            if !learns(*key)? {
                still.push(name.clone());
            }
        }
        still.retain(|name| !self.adapters.unused.contains(name));
        Ok(still)
    }

    /// Writes the adapter, or its EMA if there is one, into a checkpoint's folder. Of a full
    /// fine-tune there is none: its weights are among the tensors.
    pub fn write_adapter(&mut self, folder: &Path) -> Result<()> {
        if self.config.adapter.kind == AdapterKind::Full {
            return Ok(());
        }
        self.with_ema(|session| {
            let of = |key: ParamKey| session.adapters.params.get(key);
            let layers = session.adapters.layers.iter().map(|layer| LayerTensors {
                module: &layer.module,
                rank: layer.rank,
                alpha: layer.alpha,
                down: of(layer.down),
                up: of(layer.up),
                magnitude: layer.magnitude.map(of),
            });
            let (layers, task) = (layers.collect::<Vec<_>>(), session.task);
            adapter_checkpoint::write(folder, task.component(), &layers, &task.tensors()?)
        })
    }

    /// What the model calls each parameter, by its name in a checkpoint.
    pub fn parameter_names(&self) -> BTreeMap<String, String> {
        let mut names = BTreeMap::new();
        let mut add = |key: ParamKey, name: String| {
            names.insert(parameter_key(key.index()), name);
        };
        for layer in &self.adapters.layers {
            add(layer.down, format!("{}.lora_A.weight", layer.module));
            add(layer.up, format!("{}.lora_B.weight", layer.module));
            if let Some(magnitude) = layer.magnitude {
                add(magnitude, format!("{}.lora_magnitude_vector", layer.module));
            }
        }
        for (name, key) in &self.adapters.full_params {
            add(*key, name.clone());
        }
        names
    }

    /// Everything that a checkpoint holds, by name and in an order that stays.
    pub fn state_dict(&mut self) -> Result<Vec<(String, &mut Tensor)>> {
        let mut all = Vec::new();
        let values = self.adapters.params.values_mut()?.iter_mut().enumerate();
        all.extend(values.map(|(index, value)| (parameter_key(index), value)));
        for (name, tensor) in self.optimizer.tensors() {
            all.push((format!("optimizer.{name}"), tensor));
        }
        let means = self.ema.iter_mut().flat_map(Ema::tensors).enumerate();
        all.extend(means.map(|(index, mean)| (format!("{EMA_PREFIX}{index}"), mean)));
        Ok(all)
    }
}

/// A parameter as a checkpoint calls it.
fn parameter_key(index: usize) -> String {
    format!("{PARAMETER_PREFIX}{index}")
}

fn precision(config: &RunConfig) -> Precision {
    let (dtype, base) = (config.base.dtype, config.base.quantise);
    Precision { dtype, base, offload: config.machine.offload }
}

/// A tensor of one number; 0 on a device without data. Here a GPU that failed says so.
fn scalar(tensor: &Tensor) -> Result<f64> {
    tensor.device().synchronise()?;
    Ok(to_vec(tensor)?.first().copied().unwrap_or(0.0).into())
}
