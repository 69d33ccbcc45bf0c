//! The model in training with all state that lives between steps: parameters, gradients, optimizer, EMA. The
//! same functions run on the meta device, which is how a plan knows what a run takes. The model and its loss
//! come from the task.

use std::collections::BTreeMap;
use std::path::Path;

use cluster::World;
use compute::ops::{AdamW, Fp8Check, GradClip, global_norm};
use compute::{
    ComputeError, Device, Gradients, ParamKey, Params, Tape, Tensor, Var, check_fp8_matmuls,
};
use weights::{BytesDoneFn, Catalog, TensorInfo};

use super::exact_sums::ExactSums;
use super::fused_backward::FusedBackward;
use super::gpu_sums::GpuSums;
use super::gradient_sums::{GradientSums, OwnGradients};
use super::seed::{Purpose, seed};
use super::traits::{Task, TrainableModel};
use crate::config::adapter::{AdapterConfig, AdapterKind};
use crate::config::base::ComputeType;
use crate::config::{RunConfig, Switch};
use crate::error::{Result, TrainerError};
use crate::event::{PolicyMetrics, TenthLoss};
use crate::export::adapter_checkpoint::{self, LayerTensors};
use crate::model::adapter::Adapters;
use crate::model::build::Precision;
use crate::model::host::to_vec;
use crate::model::recompute::Recompute;
use crate::optim::{Ema, Optimizer, OptimizerShard, OptimizerStep, OuterOptimizer, ParamGroups};

/// How a checkpoint calls parameters, their EMA and the optimizer's state; an index follows.
pub(crate) const PARAMETER_PREFIX: &str = "parameter.";
pub(crate) const EMA_PREFIX: &str = "ema.";
pub(crate) const OPTIMIZER_PREFIX: &str = "optimizer.";
/// The same in checkpoints of the first version.
const EMA_PREFIX_BEFORE: &str = "average.";

/// A tensor of a checkpoint by its name of today.
pub(crate) fn find_saved<'a>(catalog: &'a Catalog, name: &str) -> Result<&'a TensorInfo> {
    let before = name.strip_prefix(EMA_PREFIX).map(|rest| format!("{EMA_PREFIX_BEFORE}{rest}"));
    let before = before.and_then(|before| catalog.find(&before).ok());
    Ok(before.map_or_else(|| catalog.find(name), Ok)?)
}

/// The parts of a step, as recordings of memory name them.
const FORWARD: &str = "forward";
const BACKWARD: &str = "backward";
const UPDATE: &str = "update";

/// A model in training.
pub struct Session<'a, T: Task> {
    pub(super) device: Device,
    task: &'a T,
    pub(super) config: &'a RunConfig,
    model: T::Model,
    pub(super) adapters: Adapters,
    /// In the order of the parameters; none of them with a fused backward pass.
    pub(crate) gradients: Gradients,
    /// Where they are summed in an order that does not matter.
    pub(super) exact: Option<ExactSums>,
    /// Their sums over all ranks, where there are others and they sum gradients.
    pub(super) sums: Option<GradientSums<'a>>,
    /// The same, where NCCL sums.
    pub(super) gpu_sums: Option<GpuSums<'a>>,
    fused: Option<FusedBackward>,
    pub(super) optimizer: Optimizer,
    /// Which parameters' state this rank holds, where it does not hold that of all.
    pub(super) shard: Option<OptimizerShard>,
    ema: Option<Ema>,
    /// Of local steps.
    pub(super) outer: Option<OuterOptimizer>,
    /// The other ranks, while they wait to send their state.
    pub(super) collected_from: Option<&'a World>,
    /// Whether the state of other ranks is here too, to be saved.
    pub(super) is_state_whole: bool,
}

/// Where a micro-batch stands in a run. It decides the dropout mask.
#[derive(Clone, Copy, Debug, Default)]
pub struct BatchPosition {
    /// The batch, counted over the whole run.
    pub batch: u64,
    /// Index in the batch of the micro-batch's first sample.
    pub first_sample: usize,
}

/// A micro-batch of a step, and how it is computed.
#[derive(Clone, Copy)]
pub struct MicroBatchStep<'s, T: Task> {
    /// Its samples.
    pub micro_batch: &'s T::MicroBatch,
    /// Where it stands in the run.
    pub position: BatchPosition,
    /// What its loss is multiplied by before backward.
    pub share: f64,
    /// What is recomputed.
    pub recompute: Recompute,
}

/// What the optimizer needs to know of a step.
#[derive(Clone, Copy, Debug)]
pub struct UpdateSettings {
    /// Learning rate.
    pub learning_rate: f64,
    /// Optimizer steps before this one.
    pub applied: u64,
    /// Gradients are so many times the true ones.
    pub scale: f64,
}

impl UpdateSettings {
    /// The first step of a dry run.
    pub const DRY_RUN: Self = Self { learning_rate: 0.0, applied: 0, scale: 1.0 };
}

/// The norm of all gradients of a step, before they are clipped.
pub struct GradientNorm {
    /// Of the gradients as accumulated.
    tensor: Tensor,
    /// Factor on the accumulated gradients.
    scale: f64,
    /// Of the true gradients, without that factor.
    pub value: f64,
}

impl GradientNorm {
    /// Whether all gradients are finite, so that they can be applied.
    pub fn is_finite(&self) -> bool {
        self.value.is_finite()
    }
}

impl<'a, T: Task> Session<'a, T> {
    /// Loads the model and takes all memory that lives as long as the run.
    pub fn new(
        device: &Device,
        task: &'a T,
        config: &'a RunConfig,
        tick: BytesDoneFn<'_>,
    ) -> Result<Self> {
        if config.base.compute == ComputeType::Fp8 {
            check_fp8_matmuls(device)?;
        }
        let mut adapters = match config.adapter.kind {
            AdapterKind::Full => Adapters::full_in(config.train.weight_dtype.dtype()),
            AdapterKind::Lora | AdapterKind::Dora | AdapterKind::Loha | AdapterKind::Lokr => {
                let from = seed(config.train.seed, Purpose::Adapters);
                let AdapterConfig { targets, exclude, trains_norms, .. } = &config.adapter;
                Adapters::random_init(targets.clone(), exclude.clone(), from)
                    .with_norms(*trains_norms)
            }
        };
        let model = task.load(device, precision(config), &mut adapters, tick)?;
        adapters.check_all_used(task.path())?;
        let params = &adapters.params;
        let shard = (config.cluster.shard_optimizer && config.part.size > 1).then(|| {
            let n_values: Vec<_> = params.values().iter().map(|it| it.shape().elements()).collect();
            OptimizerShard::new(&n_values, config.part)
        });
        let is_fused = config.train.fused_backward_pass;
        Ok(Self {
            gradients: if is_fused {
                Gradients::default()
            } else {
                Gradients::reserved(device, params)?
            },
            exact: None,
            sums: None,
            gpu_sums: None,
            fused: is_fused.then(|| FusedBackward::new(device, params)).transpose()?,
            optimizer: Optimizer::new(
                &config.optimizer,
                &adapters,
                config.base.dtype,
                shard.as_ref(),
            )?,
            shard,
            ema: match config.train.ema {
                Switch::On(decay) => Some(Ema::new(decay, params)?),
                Switch::Off => None,
            },
            outer: match config.cluster.sync_every {
                Switch::On(_) => Some(OuterOptimizer::new(&config.cluster, params)?),
                Switch::Off => None,
            },
            collected_from: None,
            is_state_whole: false,
            device: device.clone(),
            task,
            config,
            model,
            adapters,
        })
    }

    /// Forward and backward of a micro-batch: adds `share` times its gradients to the accumulated ones, and
    /// returns its loss. After an error the gradients are incomplete and must be zeroed.
    pub fn accumulate(&mut self, step: MicroBatchStep<'_, T>) -> Result<f64> {
        let mut gradients = std::mem::take(&mut self.gradients);
        let loss = self.forward_backward(step, |tape, loss, seed_gradient| {
            tape.backward_from(loss, seed_gradient, &mut gradients).map(drop)
        });
        self.end_backward(gradients, loss)
    }

    /// The same for the last micro-batch of a step that is computed here: gradients are sent to other ranks as soon as backward
    /// has completed them.
    pub fn accumulate_last(&mut self, step: MicroBatchStep<'_, T>) -> Result<f64> {
        let Some(mut sums) = self.sums.take() else { return self.accumulate(step) };
        let (mut gradients, mut exact) = (std::mem::take(&mut self.gradients), self.exact.take());
        let loss = self.forward_backward(step, |tape, loss, seed_gradient| {
            let send = &mut |key: ParamKey, gradients: &mut Gradients| {
                sums.complete(key, &mut OwnGradients { gradients, exact: &mut exact })
            };
            tape.backward_from_with(loss, seed_gradient, &mut gradients, send).map(drop)
        });
        (self.sums, self.exact) = (Some(sums), exact);
        self.end_backward(gradients, loss)
    }

    /// Takes back the gradients of a backward pass that has ended, or failed.
    fn end_backward(&mut self, mut gradients: Gradients, loss: Result<f64>) -> Result<f64> {
        if loss.is_err() {
            // Takes their memory again. If that fails, the next backward pass asks for it.
            _ = gradients.reserve(&self.device, &self.adapters.params);
        }
        self.gradients = gradients;
        if loss.is_ok() {
            self.add_exactly()?;
        }
        loss
    }

    /// Forward and fused backward pass of a step's only micro-batch: parameters are updated on the way. Returns its
    /// loss. After an error the step can be repeated only if [`Self::is_half_updated`] says no.
    pub fn fused_backward(
        &mut self,
        step: MicroBatchStep<'_, T>,
        update: UpdateSettings,
    ) -> Result<f64> {
        let how = optimizer_step(self.config, update);
        let max_norm = max_norm(self.config);
        let Self { device, task, config, model, adapters, optimizer, fused, .. } = self;
        let fused = fused.as_mut().expect("a session with a fused backward pass");
        let forward =
            ForwardContext { device, task: *task, config, model, params: &adapters.params };
        forward.forward_backward(step, |tape, loss, seed_gradient| {
            let hook = &mut |key: ParamKey, param: &mut Tensor, gradient: &Tensor| {
                // A half-updated step cannot be abandoned.
                device.ignore_cancel();
                fused.update(optimizer, key, param, gradient, how, max_norm)
            };
            tape.fused_backward_from(loss, seed_gradient, hook).map(drop)
        })
    }

    /// Forward and backward as the job says, for a dry run.
    pub fn dry_run_step(&mut self, step: MicroBatchStep<'_, T>) -> Result<f64> {
        match self.fused {
            Some(_) => self.fused_backward(step, UpdateSettings::DRY_RUN),
            None => self.accumulate(step),
        }
    }

    /// Whether a fused backward pass has updated parameters of a step that has not ended.
    pub fn is_half_updated(&self) -> bool {
        self.fused.as_ref().is_some_and(FusedBackward::has_updated)
    }

    /// Drops the accumulated gradients; not what the other ranks have of them.
    pub fn zero_grad(&mut self) -> Result<()> {
        self.task.reset_metrics();
        self.sums.iter_mut().try_for_each(|sums| sums.begin(&self.gradients))?;
        self.gradients.reset();
        self.exact.iter_mut().for_each(ExactSums::reset);
        Ok(())
    }

    fn forward_backward(
        &self,
        step: MicroBatchStep<'_, T>,
        backward: impl FnOnce(Tape<'_>, Var, Tensor) -> compute::Result<()>,
    ) -> Result<f64> {
        self.forward().forward_backward(step, backward)
    }

    /// Forward only.
    pub fn eval_loss(&self, micro_batch: &T::MicroBatch) -> Result<f64> {
        let forward = self.forward();
        let tape = Tape::inference(&self.device, &self.adapters.params, 0);
        scalar(forward.loss(&tape, micro_batch, Recompute::None)?.tensor())
    }

    /// How precise the layers are that are multiplied in fp8, by a forward pass over these samples; those that lose
    /// more than is allowed are multiplied in the dtype of activations from now on.
    pub fn check_fp8(&self, micro_batch: &T::MicroBatch, allowed: f64) -> Result<Vec<Fp8Check>> {
        let forward = self.forward();
        let tape = Tape::inference(&self.device, &self.adapters.params, 0).checking_fp8(allowed);
        forward.loss(&tape, micro_batch, Recompute::None)?;
        Ok(tape.into_fp8_checks())
    }

    /// What the model's policy did in the step that was just taken, if it has one.
    pub fn policy_metrics(&self, step: u64) -> Option<PolicyMetrics> {
        self.task.policy_metrics(&self.model, step)
    }

    /// What preferences or rewards came to since that was last asked or reset, if the task has any.
    pub fn reward_metrics(&self) -> Option<BTreeMap<String, f64>> {
        self.task.reward_metrics()
    }

    /// Whether the task learns by a policy gradient.
    pub fn is_policy_gradient(&self) -> bool {
        self.task.is_policy_gradient()
    }

    /// Losses by timestep since that was last reset, if the task has timesteps.
    pub fn timestep_losses(&self) -> Vec<TenthLoss> {
        self.task.timestep_losses()
    }

    /// Drops what the task has noted for those.
    pub fn reset_metrics(&self) {
        self.task.reset_metrics();
    }

    fn forward(&self) -> ForwardContext<'_, T> {
        let Self { device, task, config, model, adapters, .. } = self;
        ForwardContext { device, task: *task, config, model, params: &adapters.params }
    }

    /// The norm of the gradients, which are `scale` times the true ones.
    pub fn grad_norm(&self, scale: f64) -> Result<GradientNorm> {
        self.device.mark(UPDATE);
        let gradients = match &self.fused {
            // Their norms have the same norm as they have.
            Some(fused) => fused.norms(),
            None => self.gradients.all(self.adapters.params.values().len()),
        };
        let tensor = global_norm(&gradients, &self.device)?;
        let value = scalar(&tensor)? / scale;
        Ok(GradientNorm { tensor, scale, value })
    }

    /// Takes an optimizer step, after `applied` earlier ones, and zeroes the gradients. Changes nothing if they
    /// are not finite. All or nothing: memory is taken before any change. After a fused backward pass only the EMA
    /// is left to update.
    pub fn apply(&mut self, norm: &GradientNorm, rate: f64, applied: u64) -> Result<()> {
        if let Some(fused) = &mut self.fused {
            fused.end_step();
        } else {
            let update = UpdateSettings { learning_rate: rate, applied, scale: norm.scale };
            let how = optimizer_step(self.config, update);
            let clip = GradClip { norm: norm.tensor.clone(), max_norm: max_norm(self.config) };
            let Adapters { params, rate_factors, .. } = &mut self.adapters;
            let groups = ParamGroups { rate_factors, shard: self.shard.as_ref() };
            self.optimizer.step(params, &self.gradients, how, &clip, groups)?;
            self.gradients.reset();
        }
        if let Some(ema) = self.ema.as_mut().filter(|_| norm.is_finite()) {
            ema.update(&self.adapters.params, applied + 1)?;
        }
        Ok(())
    }

    /// [`Self::grad_norm`] and [`Self::apply`] in one.
    pub fn update(&mut self, rate: f64, applied: u64, scale: f64) -> Result<()> {
        let norm = self.grad_norm(scale)?;
        self.apply(&norm, rate, applied)
    }

    /// Runs `work` with averaged parameters in place of those in training: their EMA, or the average of a schedule-free
    /// optimizer. Without either, with the same.
    pub fn with_averaged<R>(&mut self, work: impl FnOnce(&Self) -> Result<R>) -> Result<R> {
        self.swap_averaged()?;
        let done = work(self);
        self.swap_averaged()?;
        done
    }

    /// The same for a look at what is exported; at the parameters in training where there is no memory for an average.
    pub fn with_exported<R>(&mut self, work: impl Fn(&Self) -> Result<R>) -> Result<R> {
        match self.with_averaged(&work) {
            Err(TrainerError::Compute(ComputeError::OutOfMemory { .. })) => work(self),
            done => done,
        }
    }

    /// Swaps averaged parameters, if there are any, and those in training; a second call swaps them again.
    pub fn swap_averaged(&mut self) -> Result<()> {
        let Self { ema, optimizer, adapters, .. } = self;
        match ema {
            Some(ema) => ema.swap(&mut adapters.params)?,
            None => optimizer.swap_averaged(&mut adapters.params)?,
        }
        Ok(())
    }

    /// The learning rate that the optimizer makes of a given one.
    pub fn effective_rate(&self, rate: f64) -> Result<f64> {
        Ok(rate * self.optimizer.rate_factor()?)
    }

    /// The model for sampling.
    pub fn trainable_model(&self) -> TrainableModel<'_, T::Model> {
        let precision = precision(self.config);
        TrainableModel { model: &self.model, params: &self.adapters.params, precision }
    }

    /// Layers that have an adapter, or tensors that a full fine-tune trains.
    pub fn n_layers(&self) -> usize {
        self.adapters.layers.len() + self.adapters.full_params.len()
    }

    /// The trained weights by the names that a checkpoint's header has.
    pub fn trained_weights(&self) -> Vec<(String, Tensor)> {
        let names = self.parameter_names();
        let named = |(index, value): (usize, &Tensor)| {
            (names[&parameter_key(index)].clone(), value.clone())
        };
        self.adapters.params.values().iter().enumerate().map(named).collect()
    }

    /// Number of trainable parameters.
    pub fn n_parameters(&self) -> usize {
        self.adapters.params.values().iter().map(|value| value.shape().elements()).sum()
    }

    /// Layers whose gradients are missing or all zero, but for those known to be unused.
    pub fn layers_without_gradient(&self) -> Result<Vec<String>> {
        let has_gradient = |key: ParamKey| -> Result<bool> {
            let gradient = match &self.fused {
                Some(fused) => fused.norm(key),
                None => self.gradients.get(key),
            };
            Ok(gradient.is_some() && scalar(&global_norm(&[gradient], &self.device)?)? != 0.0)
        };
        let mut without = Vec::new();
        for layer in &self.adapters.layers {
            // In the first step those of some matrices are zero: what they are multiplied by begins with zeros.
            let mut keys = layer.factors.all().copied();
            if !keys
                .try_fold(false, |found, key| Ok::<_, TrainerError>(found || has_gradient(key)?))?
            {
                without.push(layer.name());
            }
        }
        for (name, key) in &self.adapters.full_params {
            if !has_gradient(*key)? {
                without.push(name.clone());
            }
        }
        without.retain(|name| !self.adapters.unused.contains(name));
        Ok(without)
    }

    /// Writes the adapter, averaged if it is so, into a checkpoint's folder. A full fine-tune has no
    /// adapter: its weights are in the state dict.
    pub fn write_adapter(&mut self, folder: &Path) -> Result<()> {
        if self.config.adapter.kind == AdapterKind::Full {
            return Ok(());
        }
        self.with_averaged(|session| {
            let values = session.adapters.params.values();
            let of = |key: ParamKey| &values[key.index()];
            let (task, of_model) = (session.task, session.task.component());
            let layers = session.adapters.layers.iter().map(|layer| LayerTensors {
                component: layer.encoder.unwrap_or(of_model),
                module: &layer.module,
                rank: layer.rank,
                alpha: layer.alpha,
                factors: layer.factors.map(|key| of(*key)),
                magnitude: layer.magnitude.map(of),
            });
            adapter_checkpoint::write(folder, &layers.collect::<Vec<_>>(), &task.tensors()?)
        })
    }

    /// The model's names of parameters, by their names in a checkpoint.
    pub fn parameter_names(&self) -> BTreeMap<String, String> {
        let mut names = BTreeMap::new();
        let mut add = |key: ParamKey, name: String| {
            names.insert(parameter_key(key.index()), name);
        };
        for layer in &self.adapters.layers {
            for (name, key) in layer.factors.named(["lora_A.weight", "lora_B.weight"]) {
                add(*key, format!("{}.{name}", layer.name()));
            }
            if let Some(magnitude) = layer.magnitude {
                add(magnitude, format!("{}.lora_magnitude_vector", layer.name()));
            }
        }
        for (name, key) in &self.adapters.full_params {
            add(*key, name.clone());
        }
        names
    }

    /// All tensors of a checkpoint that this rank holds by name, in a fixed order.
    pub fn state_dict(&mut self) -> Result<Vec<(String, &mut Tensor)>> {
        let mut all = Vec::new();
        let values = self.adapters.params.values_mut()?.iter_mut().enumerate();
        all.extend(values.map(|(index, value)| (parameter_key(index), value)));
        let shard = self.shard.as_ref().filter(|_| !self.is_state_whole);
        let is_held = |name: &str| {
            let index = name.split('.').next().and_then(|index| index.parse().ok());
            shard.zip(index).is_none_or(|(shard, index)| shard.is_own(index))
        };
        for (name, tensor) in self.optimizer.tensors() {
            if is_held(&name) {
                all.push((format!("{OPTIMIZER_PREFIX}{name}"), tensor));
            }
        }
        let averaged = self.ema.iter_mut().flat_map(Ema::tensors).enumerate();
        all.extend(averaged.map(|(index, tensor)| (format!("{EMA_PREFIX}{index}"), tensor)));
        let outer = self.outer.iter_mut().flat_map(OuterOptimizer::tensors);
        all.extend(outer.map(|(name, tensor)| (format!("outer.{name}"), tensor)));
        Ok(all)
    }
}

/// What forward and backward read. Not the optimizer, which a fused backward pass changes meanwhile.
struct ForwardContext<'s, T: Task> {
    device: &'s Device,
    task: &'s T,
    config: &'s RunConfig,
    model: &'s T::Model,
    params: &'s Params,
}

impl<T: Task> ForwardContext<'_, T> {
    /// Forward, then `backward` from the loss with its gradient; returns the loss.
    fn forward_backward(
        &self,
        MicroBatchStep { micro_batch, position, share, recompute }: MicroBatchStep<'_, T>,
        backward: impl FnOnce(Tape<'_>, Var, Tensor) -> compute::Result<()>,
    ) -> Result<f64> {
        let BatchPosition { batch, first_sample } = position;
        let dropout = seed(self.config.train.seed, Purpose::Dropout).wrapping_add(batch);
        self.device.mark(FORWARD);
        let tape = Tape::training(self.device, self.params, dropout)
            .from_sample(first_sample)
            .keeping_attention(recompute.keeps_attention());
        let loss = self.loss(&tape, micro_batch, recompute)?;
        let loss_value = loss.tensor().clone();
        self.device.mark(BACKWARD);
        let seed_gradient = self.device.upload(loss.shape(), &[share as f32])?;
        backward(tape, loss, seed_gradient)?;
        // Read last: it waits for the GPU.
        scalar(&loss_value)
    }

    fn loss<'m>(
        &'m self,
        tape: &Tape<'m>,
        micro_batch: &T::MicroBatch,
        recompute: Recompute,
    ) -> Result<Var> {
        self.task.loss(self.model, tape, micro_batch, self.config.base.dtype, recompute)
    }
}

/// The optimizer's settings for a step.
fn optimizer_step(config: &RunConfig, update: UpdateSettings) -> OptimizerStep {
    let (settings, UpdateSettings { learning_rate, applied, scale }) = (&config.optimizer, update);
    let adamw = AdamW {
        learning_rate: learning_rate as f32,
        betas: (settings.betas[0], settings.betas[1]),
        epsilon: settings.epsilon as f32,
        weight_decay: settings.weight_decay as f32,
        step: applied + 1,
        scale: (1.0 / scale) as f32,
    };
    let rounding_seed = seed(config.train.seed, Purpose::Rounding).wrapping_add(applied);
    OptimizerStep { adamw, rounding_seed }
}

/// What gradients are clipped to.
fn max_norm(config: &RunConfig) -> f32 {
    match config.train.max_grad_norm {
        Switch::On(norm) => norm as f32,
        Switch::Off => f32::INFINITY,
    }
}

/// A parameter as a checkpoint calls it.
fn parameter_key(index: usize) -> String {
    format!("{PARAMETER_PREFIX}{index}")
}

fn precision(config: &RunConfig) -> Precision {
    Precision { offload: config.machine.offload, ..config.base.precision() }
}

/// A tensor of one element as a number; 0 on the meta device. Waits for the GPU, and returns its errors.
pub(crate) fn scalar(tensor: &Tensor) -> Result<f64> {
    tensor.device().synchronise()?;
    Ok(to_vec(tensor)?.first().copied().unwrap_or(0.0).into())
}
