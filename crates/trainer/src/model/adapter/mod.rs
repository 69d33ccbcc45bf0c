//! Adapters (LoRA, DoRA, LoHa, LoKr): small trained matrices beside frozen ones, perhaps with vectors beside the weights
//! of norms; or a full fine-tune of all weights.
//! Which layers get one is decided by name while the model is built; a model's own code knows nothing
//! of them.

pub mod factors;
mod init;
mod layer_weights;
pub mod names;
pub mod read;
mod target;
pub mod training;

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use compute::{Device, Dtype, ParamKey, Params, Tag, Tape, Var};
use weights::Catalog;

use self::factors::Factors;
use self::init::{AdapterTensors, InitSequence};
pub use self::layer_weights::LayerWeights;
use self::read::Component;
pub(crate) use self::target::name_matches;
use self::target::no_layer;
pub use self::target::{AdapterForm, AdapterTarget, PRESET_NAMES, TargetPreset, UNUSED};
use self::training::{TrainingAdapter, TrainingLora};
use super::build::WeightTensor;
use super::files::CheckpointLayout;
use super::layer::{DoraMagnitude, LayerAdapter};
use crate::error::{Result, TrainerError};

/// The adapters of a model: how to make them, then, as the model is built, the adapters themselves.
pub struct Adapters {
    init: AdapterInit,
    /// Their parameters.
    pub params: Params,
    /// The layers that have one, in the order of the model.
    pub layers: Vec<AdaptedLayer>,
    /// The tensors that a full fine-tune trains, by name.
    pub full_params: Vec<(String, ParamKey)>,
    /// What the learning rate of each parameter is multiplied by, in their order; those beyond the last by one.
    pub rate_factors: Vec<f32>,
    /// Trainable parameters that get no gradient: nothing depends on them.
    pub unused: Vec<String>,
    /// Layers that a target names but `exclude` removes.
    excluded: Vec<String>,
    /// Whether norms are trained beside the layers.
    trains_norms: bool,
    /// Norms among `layers`.
    n_norms: usize,
    /// Norms that `exclude` removes.
    excluded_norms: Vec<String>,
    /// All other layers that could have one, in the order of the model.
    modules: Vec<String>,
    /// A frozen one, which acts in training alone.
    training: Option<TrainingAdapter>,
}

enum AdapterInit {
    /// Full fine-tune.
    Full {
        /// The dtype of parameters that are loaded in it; f32 for all others.
        dtype: Dtype,
    },
    RandomInit {
        targets: Vec<AdapterTarget>,
        /// Patterns of layers that get none, or [`UNUSED`].
        exclude: Vec<String>,
        seed: u64,
    },
    Loaded(HashMap<String, LayerWeights>),
}

/// The program that a saved adapter is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdapterFormat {
    /// diffusers.
    Diffusers,
    /// PEFT; for one model only, so not for text encoders.
    Peft,
    /// kohya's sd-scripts, and all programs that read its files.
    Kohya,
    /// ComfyUI.
    Comfyui,
}

/// An adapter by the parts of a model it is for, layers in the order of their names.
pub type AdapterWeights = Vec<(Component, BTreeMap<String, LayerWeights>)>;

/// A part of a model on disk, and the adapter beside it.
pub struct AdaptedComponent<'a> {
    /// Which part.
    pub component: Component,
    /// What its files hold.
    pub catalog: &'a Catalog,
    /// How they call its tensors.
    pub layout: CheckpointLayout<'a>,
    /// The adapter by layer name; empty where there is none.
    pub layers: &'a HashMap<String, LayerWeights>,
}

/// A layer with its adapter.
#[derive(Clone, Debug)]
pub struct AdaptedLayer {
    /// The text encoder it is in, of a model that is trained with its text encoders; otherwise it is in the model itself.
    pub encoder: Option<Component>,
    /// The layer's name.
    pub module: String,
    /// LoRA rank.
    pub rank: usize,
    /// LoRA alpha; the scale is alpha / rank.
    pub alpha: f32,
    /// Its matrices.
    pub factors: Factors<ParamKey>,
    /// `[out]`
    pub magnitude: Option<ParamKey>,
}

impl AdaptedLayer {
    /// The layer's name among those of all that is trained.
    pub fn name(&self) -> String {
        match self.encoder {
            Some(encoder) => format!("{}.{}", encoder.folder(), self.module),
            None => self.module.clone(),
        }
    }

    /// Its parameters.
    pub fn keys(&self) -> impl Iterator<Item = ParamKey> {
        self.factors.all().copied().chain(self.magnitude)
    }
}

impl Adapters {
    /// Whether some are initialised from the weights (`DoRA`).
    pub(super) fn reads_weights(&self) -> bool {
        match &self.init {
            AdapterInit::Full { .. } => false,
            AdapterInit::RandomInit { targets, .. } => {
                targets.iter().any(|target| target.form == AdapterForm::Dora)
            }
            AdapterInit::Loaded(layers) => layers.values().any(|layer| layer.magnitude.is_some()),
        }
    }

    /// No layer gets one.
    pub fn none() -> Self {
        Self::with(AdapterInit::Loaded(HashMap::new()))
    }

    /// New ones, which change nothing yet. Where several targets name a layer the first counts.
    /// Layers that `exclude` names get none.
    pub fn random_init(targets: Vec<AdapterTarget>, exclude: Vec<String>, seed: u64) -> Self {
        Self::with(AdapterInit::RandomInit { targets, exclude, seed })
    }

    /// These, by the names of their layers.
    pub fn loaded(given: HashMap<String, LayerWeights>) -> Self {
        Self::with(AdapterInit::Loaded(given))
    }

    /// Full fine-tune: no layer gets one, the weights themselves are trained.
    pub fn full() -> Self {
        Self::full_in(Dtype::F32)
    }

    /// The same, with the weights that are loaded in `dtype` trained in it.
    pub fn full_in(dtype: Dtype) -> Self {
        Self::with(AdapterInit::Full { dtype })
    }

    fn with(plan: AdapterInit) -> Self {
        let (layers, own, modules) = (Vec::new(), Vec::new(), Vec::new());
        let (unused, left_out) = (Vec::new(), Vec::new());
        Self {
            init: plan,
            params: Params::default(),
            layers,
            full_params: own,
            rate_factors: Vec::new(),
            unused,
            excluded: left_out,
            trains_norms: false,
            n_norms: 0,
            excluded_norms: Vec::new(),
            modules,
            training: None,
        }
    }

    /// The same with norms trained beside the layers, if they are.
    #[must_use]
    pub fn with_norms(self, trains_norms: bool) -> Self {
        Self { trains_norms, ..self }
    }

    /// Adds a frozen adapter that acts in training alone.
    pub fn set_training(&mut self, training: TrainingAdapter) {
        self.training = Some(training);
    }

    /// The part of that adapter for a layer [out, in].
    pub(super) fn attach_training(
        &self,
        device: &Device,
        module: &str,
        sizes: [usize; 2],
        dtype: Dtype,
    ) -> Result<Option<TrainingLora>> {
        let Some(training) = &self.training else { return Ok(None) };
        training.attach(device, module, sizes, dtype)
    }

    /// Whether this is a full fine-tune.
    pub(super) fn is_full(&self) -> bool {
        matches!(self.init, AdapterInit::Full { .. })
    }

    /// Makes one of the model's tensors a parameter, in f32 unless another dtype was asked for.
    pub(super) fn train(&mut self, name: String, tensor: Var) -> Result<ParamKey> {
        let device = tensor.tensor().device().clone();
        let nothing = Params::default();
        let dtype = match self.init {
            AdapterInit::Full { dtype } if dtype == tensor.dtype() => dtype,
            _ => Dtype::F32,
        };
        let own = Tape::inference(&device, &nothing, 0).convert(&tensor, dtype)?;
        drop(tensor);
        // It may share memory with the loaded weight.
        own.tensor().set_tag(Tag::Parameters);
        let key = self.params.add(own.into_tensor());
        self.full_params.push((name, key));
        Ok(key)
    }

    /// Whether a layer gets no adapter although a target names it.
    pub(super) fn excludes(&mut self, module: &str, is_unused: bool) -> bool {
        let AdapterInit::RandomInit { targets, exclude, .. } = &self.init else { return false };
        let Some(target) = targets.iter().find(|target| target.matches_module(module)) else {
            return false;
        };
        let is_known = is_unused && exclude.iter().any(|pattern| pattern == UNUSED);
        // Programs that keep q, k and v in one matrix want the magnitudes of all three, or of none.
        let is_left_out = is_known && target.form != AdapterForm::Dora;
        if is_left_out || exclude.iter().any(|pattern| name_matches(pattern, module)) {
            self.excluded.push(module.into());
            return true;
        }
        if is_known {
            self.unused.push(module.into());
        }
        false
    }

    /// Gives a layer [out, in] its adapter, if it is to have one.
    pub(super) fn attach(
        &mut self,
        device: &Device,
        module: &str,
        weight: &WeightTensor,
        sizes: [usize; 2],
    ) -> Result<Option<LayerAdapter>> {
        self.modules.push(module.to_owned());
        let made = device.with_tag(Tag::Parameters, || match &self.init {
            AdapterInit::RandomInit { targets, seed, .. } => {
                let target = targets.iter().find(|target| target.matches_module(module));
                // Counts excluded layers too, so that the others are initialised the same without them; and no norms.
                let index = (self.layers.len() + self.excluded.len() - self.n_norms) as u64;
                let sequence = InitSequence { seed: *seed, layer: index };
                target
                    .map(|target| {
                        AdapterTensors::random_init(device, target, weight, sizes, sequence)
                    })
                    .transpose()
            }
            AdapterInit::Loaded(given) => given
                .get(module)
                .filter(|given| !given.factors.is_norm())
                .map(|given| AdapterTensors::loaded(device, given, weight, sizes))
                .transpose(),
            AdapterInit::Full { .. } => Ok(None),
        })?;
        let Some(AdapterTensors { rank, alpha, dropout, factors, magnitude, rate_factors }) = made
        else {
            return Ok(None);
        };
        let factors = factors.map(|matrix| self.params.add(matrix.clone()));
        let magnitude = magnitude
            .map(|(trained, norms)| DoraMagnitude { trained: self.params.add(trained), norms });
        // Norms of frozen weights are frozen too.
        if let Some(DoraMagnitude { norms, .. }) = &magnitude {
            norms.set_tag(Tag::Weights);
        }
        let trained = magnitude.as_ref().map(|magnitude| magnitude.trained);
        let layer = AdaptedLayer {
            encoder: None,
            module: module.to_owned(),
            rank,
            alpha,
            factors: factors.clone(),
            magnitude: trained,
        };
        self.set_rates(&layer, rate_factors);
        self.layers.push(layer);
        Ok(Some(LayerAdapter { factors, scale: alpha / rank as f32, dropout, magnitude }))
    }

    /// Gives a norm of this width what is added to its weight, and to its bias if it has one, if that is trained or
    /// loaded.
    pub(super) fn attach_norm(
        &mut self,
        device: &Device,
        module: &str,
        width: usize,
        part: NormPart,
    ) -> Result<Option<NormKeys>> {
        let zeros = || Ok::<_, TrainerError>(device.zeros([width], Dtype::F32)?);
        let made = device.with_tag(Tag::Parameters, || match &self.init {
            AdapterInit::RandomInit { exclude, .. } if self.trains_norms => {
                let names = |name: &str| exclude.iter().any(|pattern| name_matches(pattern, name));
                if names(module) || part.is_unused && exclude.iter().any(|name| name == UNUSED) {
                    return Ok(None);
                }
                let bias = part.has_bias.then(zeros).transpose()?;
                Ok(Some(Factors::Norm { weight: zeros()?, bias }))
            }
            AdapterInit::Loaded(given) => given
                .get(module)
                .filter(|given| given.factors.is_norm())
                .map(|given| given.factors.try_map(|it| device.upload([width], &it.values)))
                .transpose()
                .map_err(TrainerError::from),
            AdapterInit::RandomInit { .. } | AdapterInit::Full { .. } => Ok(None),
        })?;
        let Some(factors) = made else {
            self.excluded_norms.extend(self.trains_norms.then(|| module.to_owned()));
            return Ok(None);
        };
        self.n_norms += 1;
        if part.is_unused {
            self.unused.push(module.into());
        }
        let factors = factors.map(|vector| self.params.add(vector.clone()));
        let Factors::Norm { weight, bias } = factors else { unreachable!("a norm's own form") };
        let module = module.to_owned();
        let (encoder, magnitude) = (None, None);
        self.layers.push(AdaptedLayer { encoder, module, rank: 1, alpha: 1.0, factors, magnitude });
        Ok(Some(NormKeys { weight, bias }))
    }

    fn set_rates(&mut self, layer: &AdaptedLayer, [all, of_up]: [f32; 2]) {
        self.rate_factors.resize(self.params.values().len(), 1.0);
        for key in layer.keys() {
            self.rate_factors[key.index()] = all;
        }
        if let Factors::Lora { up, .. } = &layer.factors {
            self.rate_factors[up.index()] = all * of_up;
        }
    }

    /// Has `build` make a text encoder whose layers get new adapters by targets of their own. Their parameters follow those
    /// that are there.
    pub fn of_encoder<T>(
        &mut self,
        encoder: Component,
        targets: Vec<AdapterTarget>,
        seed: u64,
        build: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<T> {
        let params = std::mem::take(&mut self.params);
        let rate_factors = std::mem::take(&mut self.rate_factors);
        let mut own = Self { params, rate_factors, ..Self::random_init(targets, Vec::new(), seed) };
        let built = build(&mut own)?;
        if let AdapterInit::RandomInit { targets, .. } = &own.init {
            own.check_targets(targets, "adapter.text_encoder_targets")?;
        }
        (self.params, self.rate_factors) = (own.params, own.rate_factors);
        let layers = own.layers.into_iter();
        self.layers.extend(layers.map(|layer| AdaptedLayer { encoder: Some(encoder), ..layer }));
        Ok(built)
    }

    /// Checks that every target found a layer.
    fn check_targets(&self, targets: &[AdapterTarget], key: &'static str) -> Result<()> {
        let Some(target) = targets.iter().find(|target| !self.is_used(&target.pattern)) else {
            return Ok(());
        };
        let of_model: Vec<&String> = self.modules.iter().chain(&self.excluded).collect();
        Err(no_layer(&target.pattern, key, "no layer of the model", &of_model))
    }

    /// Layers that a target names.
    fn targeted(&self) -> impl Iterator<Item = &String> {
        let is_targeted =
            |layer: &&AdaptedLayer| layer.encoder.is_none() && !layer.factors.is_norm();
        let own = self.layers.iter().filter(is_targeted);
        own.map(|layer| &layer.module).chain(&self.excluded)
    }

    /// Norms that have weights.
    fn norms(&self) -> impl Iterator<Item = &String> {
        let own = self.layers.iter().filter(|layer| layer.factors.is_norm());
        own.map(|layer| &layer.module).chain(&self.excluded_norms)
    }

    /// Checks that there are norms, if they are to be trained.
    fn check_has_norms(&self) -> Result<()> {
        if !self.trains_norms || self.norms().next().is_some() {
            return Ok(());
        }
        Err(TrainerError::Request {
            problem: "adapter.train_norm is true, and no norm of this model has weights".into(),
            hint: "leave it out: Stable Diffusion 3 medium has such norms nowhere, 3.5 and others do",
        })
    }

    fn is_used(&self, pattern: &str) -> bool {
        self.targeted().any(|layer| name_matches(pattern, layer))
    }

    /// Checks that every target and every loaded adapter found its layer: one that is attached to nothing
    /// would train nothing.
    pub fn check_all_used(&self, path: &Path) -> Result<()> {
        let has = |module: &str| self.layers.iter().any(|layer| layer.module == module);
        let unused: Vec<&str> = match &self.init {
            AdapterInit::RandomInit { targets, exclude, .. } => {
                self.check_targets(targets, "adapter.targets")?;
                self.check_has_norms()?;
                let all: Vec<&String> = self.targeted().chain(self.norms()).collect();
                let is_used = |pattern: &str| all.iter().any(|layer| name_matches(pattern, layer));
                let mut exclude = exclude.iter().filter(|pattern| *pattern != UNUSED);
                let Some(pattern) = exclude.find(|pattern| !is_used(pattern)) else {
                    return Ok(());
                };
                let none = "no layer that a target names";
                return Err(no_layer(pattern, "adapter.exclude", none, &all));
            }
            AdapterInit::Loaded(given) => {
                given.keys().map(String::as_str).filter(|m| !has(m)).collect()
            }
            AdapterInit::Full { .. } => Vec::new(),
        };
        match unused.first() {
            None => Ok(()),
            Some(first) => Err(TrainerError::Adapter {
                problem: format!("{} of its layers, such as {first}, are not in it", unused.len()),
                path: path.into(),
            }),
        }
    }
}

/// What a norm is.
#[derive(Clone, Copy)]
pub(super) struct NormPart {
    /// Whether it has a bias too.
    pub has_bias: bool,
    /// Whether nothing depends on it.
    pub is_unused: bool,
}

/// What is added to a norm's weight and bias.
#[derive(Clone, Copy)]
pub(super) struct NormKeys {
    pub weight: ParamKey,
    pub bias: Option<ParamKey>,
}
