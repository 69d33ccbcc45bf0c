//! `[train]`: how long, in what micro-batches, and by which rule.

use compute::Dtype;

use super::error::ConfigError;
use super::objective::{self, LossWeightingKind, TimestepBiasKind};
use super::optimizer::OptimizerKind;
use super::section::{ResolvedKeys, section};
use super::source::{RawValue, ValueOrigin};
use super::value::{ConfigValue, Switch, quoted, words};
use crate::model::diffusion::family::DiffusionFamily;
use crate::model::diffusion::guidance::Guidance;
use crate::model::recompute::Recompute;
use crate::objective::bias::TimestepBias;
use crate::objective::flow::{TimestepRange, TimestepShift, WeightingScheme};
use crate::objective::velocity_loss::{HuberSchedule, LossKind, VelocityLoss};
use crate::objective::weighting::LossWeighting;

/// How long is trained, in what micro-batches, and by which rule.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainConfig {
    /// When it ends.
    pub length: TrainLength,
    /// Images computed at once.
    pub batch_size: usize,
    /// Batches that make a step.
    pub gradient_accumulation: usize,
    /// The most images of a batch that go through the model at once; nothing if all of them may.
    pub micro_batch: Option<usize>,
    /// What all random numbers follow from.
    pub seed: u64,
    /// What is recomputed to save memory.
    pub recompute: Recompute,
    /// What the weights of a full fine-tune are held in.
    pub weight_dtype: WeightDtype,
    /// Whether parameters are updated within backward, which needs no memory for all gradients.
    pub fused_backward_pass: bool,
    /// How timesteps are sampled and weighted.
    pub weighting_scheme: WeightingScheme,
    /// How far they are shifted towards noise.
    pub timestep_shift: TimestepShift,
    /// Which of them are trained.
    pub timestep_range: TimestepRange,
    /// Which of them are drawn more often.
    pub timestep_bias: TimestepBias,
    /// What an error of the prediction costs.
    pub loss: VelocityLoss,
    /// The weight of each timestep, beside that of the scheme.
    pub loss_weighting: LossWeighting,
    /// The guidance scale that the model gets as an input, if it gets one.
    pub guidance_scale: Option<f32>,
    /// The largest norm of a step's gradient.
    pub max_grad_norm: Switch<f64>,
    /// The share that the EMA of the adapter keeps in a step.
    pub ema: Switch<f64>,
    /// Steps between two measurements on held-out images.
    pub validate_every: u64,
    /// Measurements without progress after which training ends.
    pub stop_after_plateau: Switch<u64>,
}

impl TrainConfig {
    /// Samples of a step, in all of its batches.
    pub fn samples_per_step(&self) -> usize {
        self.batch_size * self.gradient_accumulation
    }

    /// Steps that a run takes, if an epoch has so many batches.
    pub fn n_steps(&self, batches_per_epoch: u64) -> u64 {
        match self.length {
            TrainLength::Steps(steps) => steps,
            TrainLength::Epochs(epochs) => {
                (epochs * batches_per_epoch).div_ceil(self.gradient_accumulation as u64).max(1)
            }
        }
    }
}

/// When training ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrainLength {
    /// After so many steps of the optimizer.
    Steps(u64),
    /// When every image was seen so often, times its repeats.
    Epochs(u64),
}

section! {
    /// How long is trained, in what micro-batches, and by which rule.
    pub(super) RawTrain => TrainKeys {
        /// Optimizer steps (kohya: `max_train_steps`)
        steps: u64 = Default(1000), AtLeast(1.0);
        /// Epochs, instead of `steps` (kohya: `max_train_epochs`)
        epochs: Option<u64> = Default(None), AtLeast(1.0);
        /// Samples per batch
        batch_size: usize = Default(1), Within(1.0, 1024.0);
        /// Batches per optimizer step (kohya: `gradient_accumulation_steps`)
        gradient_accumulation: usize = Default(1), Within(1.0, 65536.0);
        /// Most samples that go through the model at once: less memory, the same batch. Not set: the plan chooses
        micro_batch: Option<usize> = Default(None), Within(1.0, 1024.0);
        /// Seed of all random numbers of the run
        seed: u64 = Default(42), AtLeast(0.0);
        /// Gradient checkpointing (recomputation): none, attention queries only, every second block, every block but for its attention, every block. Not set: the plan chooses
        recompute: Recompute = Default(Recompute::None), Any;
        /// What the weights of a full fine-tune are held in. `bf16` takes 2 bytes per parameter instead of 4: updates are computed in f32 and rounded at random (stochastic rounding), which is exact on average but noisier (kohya: `full_bf16`). Norms and biases stay in f32
        weight_dtype: WeightDtype = Default(WeightDtype::F32), Any;
        /// Fused backward pass of a full fine-tune (kohya's name): each weight is updated as soon as its gradient is known, so that only a few gradients are in memory. `max_grad_norm` then clips the gradient of each tensor. Needs `gradient_accumulation = 1` and the whole batch in one micro-batch. Not set: the plan chooses it where nothing else fits
        fused_backward_pass: bool = Default(false), Any;
        /// Timestep sampling and loss weighting scheme (diffusers' names). Shown: for SD3, other families have their own
        weighting_scheme: WeightingSchemeKind = Default(WeightingSchemeKind::LogitNormal), Any;
        /// Mean of the normal distribution of `weighting_scheme = "logit_normal"`
        logit_mean: f64 = Default(0.0), Within(-10.0, 10.0);
        /// Standard deviation of the normal distribution of `weighting_scheme = "logit_normal"`
        logit_std: f64 = Default(1.0), Above(0.0);
        /// Scale of `weighting_scheme = "mode"`: larger values sample middle timesteps more often
        mode_scale: f64 = Default(1.29), Within(-1.0, MODE_SCALE_MAX);
        /// Shift of timesteps towards noise: `scheduler`: as the model's scheduler config says; `resolution`: by the size of the image (kohya: `flux_shift`); or a factor, 1 is none (kohya: `discrete_flow_shift`)
        timestep_shift: TimestepShift = Default(TimestepShift::Scheduler), Within(0.01, 100.0);
        /// Least timestep that is trained, of 1000; those of another timestep are drawn again. Low ones are details (kohya: `min_timestep`)
        timestep_min: f64 = Default(0.0), Within(0.0, 1000.0);
        /// Largest timestep that is trained, of 1000. High ones are composition (kohya: `max_timestep`)
        timestep_max: f64 = Default(1000.0), Within(0.0, 1000.0);
        /// Timesteps that are drawn more often: `content`: much noise, composition; `style`: little noise, details (ai-toolkit: `content_or_style`); `earlier`: the lowest ones; `later`: the highest ones; `range`: those of a range (diffusers: `timestep_bias_strategy`)
        timestep_bias: TimestepBiasKind = Default(TimestepBiasKind::None), Any;
        /// How many times as often `timestep_bias = "earlier"`, `"later"` or `"range"` draws its timesteps; below 1: less often
        timestep_bias_multiplier: f64 = Default(2.0), Within(0.01, 100.0);
        /// Share of timesteps that `timestep_bias = "earlier"` or `"later"` is about
        timestep_bias_share: f64 = Default(0.25), Within(0.001, 1.0);
        /// First timestep of `timestep_bias = "range"`, of 1000
        timestep_bias_begin: f64 = Default(0.0), Within(0.0, 1000.0);
        /// Timestep below which `timestep_bias = "range"` ends, of 1000
        timestep_bias_end: f64 = Default(1000.0), Within(0.0, 1000.0);
        /// Loss function. `huber`, `smooth_l1`: PyTorch's, by which a few bad images pull less; `pseudo_huber`, `pseudo_smooth_l1`: the same with a smooth bend (kohya and SimpleTuner: `huber`, `smooth_l1`)
        loss: LossKind = Default(LossKind::Mse), Any;
        /// Error from which on `loss = "huber"` and its like grow linearly instead of by the square (PyTorch: `delta`, `beta`)
        huber_c: f64 = Default(0.1), Within(0.0001, 1000.0);
        /// How `huber_c` depends on the timestep (kohya's names): `exponential`, `snr`: from 1 without noise to `huber_c` at full noise
        huber_schedule: HuberSchedule = Default(HuberSchedule::Constant), Any;
        /// Loss weights by timestep, beside those of `weighting_scheme`. `sigma`: the share of noise σ (OneTrainer); `sigma_squared`: σ², as kohya trains SD3; `min_snr`: Min-SNR; `bell`, `half_bell`: ai-toolkit's `linear_timesteps`, `linear_timesteps2`
        loss_weighting: LossWeightingKind = Default(LossWeightingKind::None), Any;
        /// γ of `loss_weighting = "min_snr"`
        min_snr_gamma: f64 = Default(5.0), Above(0.0);
        /// Guidance scale that models with a guidance embedding (FLUX.1 dev) get in training; `off`: leaves the embedding out
        guidance_scale: Switch<f64> = Default(Switch::On(1.0)), Within(0.0, 100.0);
        /// Max gradient norm (clipping): of all gradients; with `fused_backward_pass`, of each tensor's gradient
        max_grad_norm: Switch<f64> = Default(Switch::On(1.0)), Above(0.0);
        /// EMA decay of the trained weights, such as 0.999; samples and results use the average
        ema: Switch<f64> = Default(Switch::Off), Under(0.0, 1.0);
        /// Steps between validations
        validate_every: u64 = Default(50), AtLeast(1.0);
        /// Early stopping: validations in a row without a lower loss after which the run ends
        stop_after_plateau: Switch<u64> = Default(Switch::Off), AtLeast(1.0);
    }
}

/// Taken: 2 / (π - 2), beyond which levels would not rise with the number they are drawn by (Esser et
/// al., arXiv 2403.03206, section 3.1), cut to two digits.
const MODE_SCALE_MAX: f64 = 1.75;

/// A [`WeightingScheme`] without its numbers, as it is typed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightingSchemeKind {
    /// [`WeightingScheme::Uniform`]
    Uniform,
    /// [`WeightingScheme::LogitNormal`]
    LogitNormal,
    /// [`WeightingScheme::Mode`]
    Mode,
    /// [`WeightingScheme::SigmaSqrt`]
    SigmaSqrt,
    /// [`WeightingScheme::Cosmap`]
    Cosmap,
}

words!(WeightingSchemeKind {
    "uniform" => Self::Uniform,
    "logit_normal" => Self::LogitNormal,
    "mode" => Self::Mode,
    "sigma_sqrt" => Self::SigmaSqrt,
    "cosmap" => Self::Cosmap,
});

impl ConfigValue for TimestepShift {
    fn accepted() -> String {
        "scheduler, resolution or a number".into()
    }

    fn read(typed: &RawValue<'_>) -> Result<Self, ConfigError> {
        match typed.word() {
            Some("scheduler") => Ok(Self::Scheduler),
            Some("resolution") => Ok(Self::Resolution),
            _ => f64::read(typed).map(Self::Fixed).map_err(|_| typed.refuse(Self::accepted())),
        }
    }

    fn write(&self) -> Option<String> {
        match self {
            Self::Scheduler => Some(quoted("scheduler")),
            Self::Resolution => Some(quoted("resolution")),
            Self::Fixed(shift) => shift.write(),
        }
    }

    fn measures(&self) -> Vec<f64> {
        match self {
            Self::Fixed(shift) => vec![*shift],
            Self::Scheduler | Self::Resolution => Vec::new(),
        }
    }
}

/// What trained weights are held in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightDtype {
    /// As precise as updates are.
    F32,
    /// With stochastic rounding.
    Bf16,
}

impl WeightDtype {
    /// The dtype of tensors.
    pub fn dtype(self) -> Dtype {
        match self {
            Self::F32 => Dtype::F32,
            Self::Bf16 => Dtype::Bf16,
        }
    }
}

words!(WeightDtype {
    "f32" => Self::F32,
    "bf16" => Self::Bf16,
});

words!(Recompute {
    "none" => Self::None,
    "queries" => Self::Queries,
    "alternate" => Self::Alternate,
    "keep_attention" => Self::KeepAttention,
    "block" => Self::Block,
});

impl TrainConfig {
    /// As meant.
    pub(super) fn new(
        mut keys: TrainKeys,
        family: Option<&DiffusionFamily>,
        rows: &mut ResolvedKeys,
    ) -> Result<Self, ConfigError> {
        if let Some(family) = family {
            keys.apply_family(family, rows);
            if family.guidance != Guidance::Embedded {
                rows.leave_out("train.guidance_scale", &family.as_base())?;
            }
        }
        let loss = objective::loss(&keys, rows)?;
        let loss_weighting = objective::weighting(&keys, rows)?;
        let timestep_bias = objective::bias(&keys, rows)?;
        let TrainKeys {
            steps,
            epochs,
            batch_size,
            gradient_accumulation,
            micro_batch,
            seed,
            recompute,
            weight_dtype,
            fused_backward_pass,
            weighting_scheme,
            logit_mean: mean,
            logit_std: deviation,
            mode_scale: scale,
            timestep_shift,
            timestep_min: min,
            timestep_max: max,
            guidance_scale,
            max_grad_norm,
            ema,
            validate_every,
            stop_after_plateau,
            ..
        } = keys;
        refuse_empty_range(min, max, rows)?;
        let length = length(steps, epochs, rows)?;
        refuse_idle_keys(weighting_scheme, rows)?;
        let weighting_scheme = match weighting_scheme {
            WeightingSchemeKind::Uniform => WeightingScheme::Uniform,
            WeightingSchemeKind::LogitNormal => WeightingScheme::LogitNormal { mean, deviation },
            WeightingSchemeKind::Mode => WeightingScheme::Mode { scale },
            WeightingSchemeKind::SigmaSqrt => WeightingScheme::SigmaSqrt,
            WeightingSchemeKind::Cosmap => WeightingScheme::Cosmap,
        };
        Ok(Self {
            length,
            batch_size,
            gradient_accumulation,
            micro_batch,
            seed,
            recompute,
            weight_dtype,
            fused_backward_pass,
            weighting_scheme,
            timestep_shift,
            timestep_bias,
            loss,
            loss_weighting,
            timestep_range: TimestepRange { sigmas: [min, max].map(|t| (t / 1000.0) as f32) },
            guidance_scale: match guidance_scale {
                Switch::Off => None,
                Switch::On(scale) => Some(scale as f32),
            },
            max_grad_norm,
            ema,
            validate_every,
            stop_after_plateau,
        })
    }
}

impl TrainKeys {
    /// How models of a family sample timesteps unless the job says otherwise.
    fn apply_family(&mut self, family: &DiffusionFamily, rows: &mut ResolvedKeys) {
        let kind = match family.scheme {
            WeightingScheme::Uniform => WeightingSchemeKind::Uniform,
            WeightingScheme::LogitNormal { mean, deviation } => {
                rows.of_family(family, "train.logit_mean", &mut self.logit_mean, mean);
                let own = &mut self.logit_std;
                rows.of_family(family, "train.logit_std", own, deviation);
                WeightingSchemeKind::LogitNormal
            }
            WeightingScheme::Mode { scale } => {
                rows.of_family(family, "train.mode_scale", &mut self.mode_scale, scale);
                WeightingSchemeKind::Mode
            }
            WeightingScheme::SigmaSqrt => WeightingSchemeKind::SigmaSqrt,
            WeightingScheme::Cosmap => WeightingSchemeKind::Cosmap,
        };
        rows.of_family(family, "train.weighting_scheme", &mut self.weighting_scheme, kind);
    }
}

/// A range of timesteps has some.
fn refuse_empty_range(min: f64, max: f64, rows: &ResolvedKeys) -> Result<(), ConfigError> {
    if min < max {
        return Ok(());
    }
    // Whichever was typed; 0 is below every other default.
    let origin = |key| rows.origin(key).cloned().unwrap_or(ValueOrigin::Default);
    let typed = [origin("train.timestep_min"), origin("train.timestep_max")];
    let typed = typed.into_iter().find(|origin| !origin.is_default());
    Err(ConfigError::Excluded {
        key: "train.timestep_min",
        typed: min.write().unwrap_or_default(),
        other: "train.timestep_max",
        value: max.write().unwrap_or_default(),
        needed: 1000.0.write().unwrap_or_default(),
        origin: typed.unwrap_or(ValueOrigin::Default),
    })
}

/// One of the two. The command line may choose the other than the file did.
fn length(
    steps: u64,
    epochs: Option<u64>,
    rows: &mut ResolvedKeys,
) -> Result<TrainLength, ConfigError> {
    const KEYS: [&str; 2] = ["train.steps", "train.epochs"];
    let origin = |key| rows.origin(key).cloned().unwrap_or(ValueOrigin::Default);
    let origins = KEYS.map(origin);
    let Some(epochs) = epochs else { return Ok(TrainLength::Steps(steps)) };
    if origins[1].beats(&origins[0]) {
        rows.remove(KEYS[0]);
        Ok(TrainLength::Epochs(epochs))
    } else if origins[0].beats(&origins[1]) {
        rows.remove(KEYS[1]);
        Ok(TrainLength::Steps(steps))
    } else {
        Err(ConfigError::Conflict { keys: KEYS, origins: Box::new(origins) })
    }
}

/// What a fused backward pass cannot do: gradients are gone before others could be added to them, before it is known
/// whether the loss scale of f16 was too large for one of them, and before an optimizer could sum over all. Returns the
/// first key in its way, with the value that it needs.
pub(super) fn fused_obstacle(
    train: &TrainConfig,
    dtype: Dtype,
    optimizer: OptimizerKind,
) -> Option<(&'static str, String)> {
    let TrainConfig { batch_size, gradient_accumulation, micro_batch, .. } = train;
    if *gradient_accumulation > 1 {
        Some(("train.gradient_accumulation", "1".into()))
    } else if micro_batch.is_some_and(|micro| micro < *batch_size) {
        Some(("train.micro_batch", batch_size.to_string()))
    } else if dtype == Dtype::F16 {
        Some(("base.dtype", quoted("bf16")))
    } else if optimizer.needs_all_gradients() {
        Some(("optimizer.kind", quoted("adamw")))
    } else {
        None
    }
}

/// Refuses a fused backward pass beside a key that excludes it.
pub(super) fn refuse_fused(
    train: &TrainConfig,
    dtype: Dtype,
    optimizer: OptimizerKind,
    rows: &ResolvedKeys,
) -> Result<(), ConfigError> {
    let obstacle = fused_obstacle(train, dtype, optimizer).filter(|_| train.fused_backward_pass);
    obstacle
        .map_or(Ok(()), |(other, needed)| exclude("train.fused_backward_pass", other, needed, rows))
}

/// Refuses weights in bf16 beside a key that excludes them: they are those that the model computes with; Muon and
/// Prodigy do not update them one by one; and an EMA in f32 would take twice their memory.
pub(super) fn refuse_bf16(
    train: &TrainConfig,
    dtype: Dtype,
    optimizer: OptimizerKind,
    rows: &ResolvedKeys,
) -> Result<(), ConfigError> {
    let (other, needed) = if train.weight_dtype == WeightDtype::F32 {
        return Ok(());
    } else if dtype != Dtype::Bf16 {
        ("base.dtype", quoted("bf16"))
    } else if !optimizer.updates_one_by_one() {
        ("optimizer.kind", quoted("adamw_8bit"))
    } else if train.ema != Switch::Off {
        ("train.ema", quoted("off"))
    } else {
        return Ok(());
    };
    exclude("train.weight_dtype", other, needed, rows)
}

pub(super) fn exclude(
    key: &'static str,
    other: &'static str,
    needed: String,
    rows: &ResolvedKeys,
) -> Result<(), ConfigError> {
    let origin = rows.origin(key).cloned().unwrap_or(ValueOrigin::Default);
    let [typed, value] = [key, other].map(|key| rows.value(key).to_owned());
    Err(ConfigError::Excluded { key, typed, other, value, needed, origin })
}

/// A number that belongs to another scheme would be ignored, so it is refused.
fn refuse_idle_keys(
    scheme: WeightingSchemeKind,
    rows: &mut ResolvedKeys,
) -> Result<(), ConfigError> {
    let with = format!("train.weighting_scheme = {}", rows.value("train.weighting_scheme"));
    for (key, owner) in [
        ("train.logit_mean", WeightingSchemeKind::LogitNormal),
        ("train.logit_std", WeightingSchemeKind::LogitNormal),
        ("train.mode_scale", WeightingSchemeKind::Mode),
    ] {
        if scheme != owner {
            rows.leave_out(key, &with)?;
        }
    }
    Ok(())
}
