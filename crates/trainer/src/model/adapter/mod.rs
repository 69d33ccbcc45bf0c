//! Adapters (LoRA, DoRA, LoHa, LoKr): small trained matrices beside frozen ones, perhaps with vectors beside the weights
//! of norms; or a full fine-tune of all weights.
//! Which layers get one is decided by name while the model is built; a model's own code knows nothing
//! of them.

pub mod factors;
pub mod names;
pub mod read;
pub mod training;

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use compute::ops::row_norms;
use compute::{Device, Dtype, ParamKey, Params, RandomSequence, Tag, Tape, Tensor, Var};
use weights::Catalog;

use self::factors::{AdapterMatrix, Factors, LokrFactor, LokrShape};
use self::read::Component;
use self::training::{TrainingAdapter, TrainingLora};
use super::build::WeightTensor;
use super::files::CheckpointLayout;
use super::layer::{DoraMagnitude, LayerAdapter};
use crate::error::{Result, TrainerError};
use crate::suggest::nearest;

/// Pattern for `exclude`: layers that nothing depends on, which the model marks as unused.
pub const UNUSED: &str = "unused";

/// LoRA targets that a word stands for, in the models of one family.
#[derive(Clone, Copy, Debug)]
pub struct TargetPreset {
    /// One of [`PRESET_NAMES`].
    pub name: &'static str,
    /// Lists of patterns, as in [`AdapterTarget`]; each names a layer of every model of the family.
    pub patterns: &'static [&'static [&'static str]],
}

/// The words that stand for targets, in any family.
pub const PRESET_NAMES: [&str; 4] = ["attention", "all", "kohya", "ai-toolkit"];

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

/// New adapters for the layers that a pattern names.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterTarget {
    /// The end of a layer's name, from a dot on (`to_q`, `attn.to_out.0`), or the whole name with
    /// `*` for anything.
    pub pattern: String,
    /// LoRA rank.
    pub rank: usize,
    /// LoRA alpha; the scale is alpha / rank.
    pub alpha: f32,
    /// LoRA dropout: the share of a layer's input that the adapter does not see in training.
    pub dropout: f32,
    /// Of what matrices it is made.
    pub form: AdapterForm,
    /// What its learning rate is multiplied by, and for B in addition (`LoRA`+).
    pub rate_factors: [f32; 2],
}

/// Forms of new adapters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdapterForm {
    /// Two low-rank matrices.
    Lora,
    /// The same with magnitudes trained apart from directions (Liu et al., arXiv 2402.09353).
    Dora,
    /// The elementwise product of two low-rank matrices.
    Loha,
    /// A Kronecker product.
    Lokr(LokrShape),
}

/// A trained adapter of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerWeights {
    /// LoRA rank.
    pub rank: usize,
    /// LoRA alpha; the scale is alpha / rank.
    pub alpha: f32,
    /// Its matrices.
    pub factors: Factors<AdapterMatrix>,
    /// `[out]`, if it is a `DoRA`.
    pub magnitude: Option<Vec<f32>>,
}

impl LayerWeights {
    /// A `LoRA` of A [rank, in] and B [out, rank].
    pub fn lora(rank: usize, alpha: f32, down: Vec<f32>, up: Vec<f32>) -> Self {
        let (inputs, outputs) = (down.len() / rank, up.len() / rank);
        let (down, up) =
            (AdapterMatrix::new([rank, inputs], down), AdapterMatrix::new([outputs, rank], up));
        Self { rank, alpha, factors: Factors::Lora { down, up }, magnitude: None }
    }

    /// The same with magnitudes.
    #[must_use]
    pub fn with_magnitude(self, magnitude: Option<Vec<f32>>) -> Self {
        Self { magnitude, ..self }
    }

    /// [out, in]
    pub fn sizes(&self) -> [usize; 2] {
        self.factors.sizes()
    }

    /// LoRA scale.
    pub fn scale(&self) -> f32 {
        self.alpha / self.rank as f32
    }

    /// The same with its scale in the values, if it is a `LoKr` of whole matrices.
    pub fn with_baked_scale(&self) -> Option<Self> {
        let Factors::Lokr { w1: LokrFactor::Full(w1), w2: w2 @ LokrFactor::Full(_) } =
            &self.factors
        else {
            return None;
        };
        let values = w1.values.iter().map(|value| value * self.scale()).collect();
        let w1 = LokrFactor::Full(AdapterMatrix::new(w1.sizes(), values));
        let factors = Factors::Lokr { w1, w2: w2.clone() };
        Some(Self { alpha: self.rank as f32, factors, ..self.clone() })
    }

    /// The same with its scale in B, if it is a `LoRA`.
    pub fn with_scale_in_b(&self) -> Option<Self> {
        let Factors::Lora { down, up } = &self.factors else { return None };
        let values = up.values.iter().map(|value| value * self.scale()).collect();
        let up = AdapterMatrix::new(up.sizes(), values);
        let factors = Factors::Lora { down: down.clone(), up };
        Some(Self { alpha: self.rank as f32, factors, ..self.clone() })
    }

    /// Whether it adds nothing to the layer.
    pub fn is_zero(&self) -> bool {
        let is_zero = |matrix: &AdapterMatrix| matrix.values.iter().all(|value| *value == 0.0);
        match &self.factors {
            // The others are zero where one of their matrices is.
            Factors::Norm { .. } => self.factors.all().all(is_zero),
            factors => factors.all().any(is_zero),
        }
    }

    /// Whether all of its values are finite.
    pub fn is_finite(&self) -> bool {
        let all = self.factors.all().map(|matrix| &matrix.values).chain(&self.magnitude).flatten();
        self.alpha.is_finite() && all.copied().all(f32::is_finite)
    }

    /// What it adds to the layer for one fixed input, the cosines of 1, 2, …: to compare two adapters.
    pub fn probe(&self) -> Vec<f32> {
        let [_, inputs] = self.sizes();
        let x: Vec<f64> = (1..=inputs).map(|index| (index as f64).cos()).collect();
        let scale = f64::from(self.alpha) / self.rank as f64;
        self.factors.apply(&x).into_iter().map(|value| (scale * value) as f32).collect()
    }
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

/// Layer names that an error lists. Chosen: all of one block of every known model.
const SHOWN: usize = 24;

/// The error for a pattern that matches none of some layers, with the nearest name.
fn no_layer(
    pattern: &str,
    key: &'static str,
    none: &'static str,
    modules: &[&String],
) -> TrainerError {
    let mut endings: Vec<&str> = Vec::new();
    for module in modules {
        let ending = ending(module);
        if !endings.contains(&ending) {
            endings.push(ending);
        }
    }
    let words: Vec<&str> = endings.iter().filter_map(|ending| last_word(ending)).collect();
    let known = endings.iter().chain(&words).chain(&PRESET_NAMES).copied();
    let near = nearest(pattern, known).map(str::to_owned);
    let more = endings.len().saturating_sub(SHOWN);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let known = endings.iter().take(SHOWN).copied().collect::<Vec<_>>().join(", ") + &more;
    TrainerError::NoTarget { key, target: pattern.into(), none, near, known }
}

/// A layer's name within its block, without the block's index.
fn ending(module: &str) -> &str {
    let mut rest = module;
    while let Some((before, after)) = rest.split_once('.') {
        rest = after;
        if before.parse::<u32>().is_ok() {
            return rest;
        }
    }
    module
}

/// What people call a layer: the last component of its name that is no number.
fn last_word(ending: &str) -> Option<&str> {
    ending.rsplit('.').find(|word| word.parse::<u32>().is_err())
}

impl AdapterTarget {
    /// Whether it names a layer.
    fn matches_module(&self, module: &str) -> bool {
        name_matches(&self.pattern, module)
    }
}

/// Whether a pattern names a layer.
pub(crate) fn name_matches(pattern: &str, module: &str) -> bool {
    if pattern.contains('*') {
        return glob_matches(pattern, module);
    }
    module.strip_suffix(pattern).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

/// Whether a pattern with `*` wildcards matches a whole text.
fn glob_matches(pattern: &str, text: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == text,
        Some((start, rest)) => text.strip_prefix(start).is_some_and(|text| {
            (0..=text.len()).any(|at| text.is_char_boundary(at) && glob_matches(rest, &text[at..]))
        }),
    }
}

/// An adapter's tensors before they are parameters.
struct AdapterTensors {
    rank: usize,
    alpha: f32,
    dropout: f32,
    factors: Factors<Tensor>,
    /// With the row norms of the frozen matrix.
    magnitude: Option<(Tensor, Tensor)>,
    rate_factors: [f32; 2],
}

impl AdapterTensors {
    /// An adapter that changes nothing yet; magnitudes are the row norms.
    fn random_init(
        device: &Device,
        target: &AdapterTarget,
        weight: &WeightTensor,
        sizes: [usize; 2],
        sequence: InitSequence,
    ) -> Result<Self> {
        let AdapterTarget { rank, mut alpha, dropout, form, rate_factors, .. } = *target;
        let norms =
            || Ok::<_, TrainerError>((row_norms(weight.into())?, row_norms(weight.into())?));
        let magnitude = (form == AdapterForm::Dora).then(norms);
        let (shapes, stds) = initial(form, rank, sizes);
        let mut stds = stds.into_iter().enumerate();
        let factors = shapes.try_map(|[rows, columns]| {
            let (index, std) = stds.next().unwrap_or((0, InitStd::Zero));
            let std = match std {
                InitStd::Zero => return device.zeros([*rows, *columns], Dtype::F32),
                InitStd::Normal(std) => std,
                InitStd::Uniform => 1.0 / (3.0 * *columns as f32).sqrt(),
            };
            device.normal([*rows, *columns], Dtype::F32, std, sequence.of(index))
        })?;
        // Whole factors have no rank to be scaled by.
        if let Factors::Lokr { w1: LokrFactor::Full(_), w2: LokrFactor::Full(_) } = factors {
            alpha = rank as f32;
        }
        Ok(Self { rank, alpha, dropout, factors, magnitude: magnitude.transpose()?, rate_factors })
    }

    fn loaded(
        device: &Device,
        given: &LayerWeights,
        weight: &WeightTensor,
        [outputs, _]: [usize; 2],
    ) -> Result<Self> {
        let LayerWeights { rank, alpha, factors, magnitude } = given;
        let upload = |magnitude: &Vec<f32>| {
            Ok::<_, TrainerError>((device.upload([outputs], magnitude)?, row_norms(weight.into())?))
        };
        Ok(Self {
            rank: *rank,
            alpha: *alpha,
            dropout: 0.0,
            factors: factors.try_map(|matrix| device.upload(matrix.sizes(), &matrix.values))?,
            magnitude: magnitude.as_ref().map(upload).transpose()?,
            rate_factors: [1.0; 2],
        })
    }
}

/// The random numbers of a layer.
#[derive(Clone, Copy)]
struct InitSequence {
    seed: u64,
    layer: u64,
}

impl InitSequence {
    /// Those of its matrix at an index.
    fn of(self, index: usize) -> RandomSequence {
        RandomSequence::new(self.seed.wrapping_add(index as u64), self.layer)
    }
}

/// How a matrix is initialised.
#[derive(Clone, Copy)]
enum InitStd {
    Zero,
    /// Normal with this standard deviation.
    Normal(f32),
    /// Normal with that of PyTorch's `kaiming_uniform_` with a = √5: 1 / √(3·columns).
    Uniform,
}

/// The shapes of new matrices, and how each is initialised: `LoRA` as the reference scripts have it, the others as
/// `LyCORIS` has them.
fn initial(
    form: AdapterForm,
    rank: usize,
    [outputs, inputs]: [usize; 2],
) -> (Factors<[usize; 2]>, Vec<InitStd>) {
    let pair = [[outputs, rank], [rank, inputs]];
    match form {
        AdapterForm::Lora | AdapterForm::Dora => (
            Factors::Lora { down: pair[1], up: pair[0] },
            vec![InitStd::Normal(1.0 / rank as f32), InitStd::Zero],
        ),
        AdapterForm::Loha => {
            let stds = [InitStd::Normal(0.1), InitStd::Normal(1.0), InitStd::Zero];
            (Factors::Loha { w1: pair, w2: pair }, [&stds[..], &stds[1..2]].concat())
        }
        AdapterForm::Lokr(shape) => {
            let factors = shape.factors(rank, [outputs, inputs]);
            // The last matrix of all is zeros.
            let mut stds = vec![InitStd::Uniform; factors.all().count()];
            if let Some(last) = stds.last_mut() {
                *last = InitStd::Zero;
            }
            (factors, stds)
        }
    }
}
