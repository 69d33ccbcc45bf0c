//! Adapters (LoRA, DoRA): small trained matrices beside frozen ones; or a full fine-tune of all weights.
//! Which layers get one is decided by name while the model is built; a model's own code knows nothing
//! of them.

pub mod names;
pub mod read;

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use compute::ops::row_norms;
use compute::{Device, Dtype, ParamKey, Params, RandomSequence, Tag, Tape, Tensor, Var};
use weights::Catalog;

use self::read::Component;
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
    /// Trainable parameters that get no gradient: nothing depends on them.
    pub unused: Vec<String>,
    /// Layers that a target names but `exclude` removes.
    excluded: Vec<String>,
    /// All other layers that could have one, in the order of the model.
    modules: Vec<String>,
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
    Loaded(HashMap<String, LoraWeights>),
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
    /// Whether magnitudes are trained apart from directions (`DoRA`).
    pub is_dora: bool,
}

/// A trained adapter.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraWeights {
    /// LoRA rank.
    pub rank: usize,
    /// LoRA alpha; the scale is alpha / rank.
    pub alpha: f32,
    /// [rank, in]
    pub down: Vec<f32>,
    /// [out, rank]
    pub up: Vec<f32>,
    /// `[out]`, if it is a `DoRA`.
    pub magnitude: Option<Vec<f32>>,
}

impl LoraWeights {
    /// [out, in]
    pub fn sizes(&self) -> [usize; 2] {
        [self.up.len() / self.rank, self.down.len() / self.rank]
    }

    /// LoRA scale.
    pub fn scale(&self) -> f32 {
        self.alpha / self.rank as f32
    }

    /// Whether it adds nothing to the layer.
    pub fn is_zero(&self) -> bool {
        self.up.iter().all(|value| *value == 0.0)
    }

    /// Whether all of its values are finite.
    pub fn is_finite(&self) -> bool {
        let all = [&self.down, &self.up].into_iter().chain(&self.magnitude).flatten();
        self.alpha.is_finite() && all.copied().all(f32::is_finite)
    }

    /// What it adds to the layer for one fixed input, the cosines of 1, 2, …: to compare two adapters.
    pub fn probe(&self) -> Vec<f32> {
        let [_, inputs] = self.sizes();
        let x: Vec<f64> = (1..=inputs).map(|index| (index as f64).cos()).collect();
        let dot = |row: &[f32], x: &[f64]| -> f64 {
            row.iter().zip(x).map(|(a, x)| f64::from(*a) * x).sum()
        };
        let narrow: Vec<f64> = self.down.chunks(inputs).map(|row| dot(row, &x)).collect();
        let scale = f64::from(self.alpha) / self.rank as f64;
        self.up.chunks(self.rank).map(|row| (scale * dot(row, &narrow)) as f32).collect()
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
pub type AdapterWeights = Vec<(Component, BTreeMap<String, LoraWeights>)>;

/// A part of a model on disk, and the adapter beside it.
pub struct AdaptedComponent<'a> {
    /// Which part.
    pub component: Component,
    /// What its files hold.
    pub catalog: &'a Catalog,
    /// How they call its tensors.
    pub layout: CheckpointLayout<'a>,
    /// The adapter by layer name; empty where there is none.
    pub layers: &'a HashMap<String, LoraWeights>,
}

/// A layer with its adapter.
#[derive(Clone, Debug)]
pub struct AdaptedLayer {
    /// The layer's name.
    pub module: String,
    /// LoRA rank.
    pub rank: usize,
    /// LoRA alpha; the scale is alpha / rank.
    pub alpha: f32,
    /// [rank, in]
    pub down: ParamKey,
    /// [out, rank]
    pub up: ParamKey,
    /// `[out]`
    pub magnitude: Option<ParamKey>,
}

impl Adapters {
    /// Whether some are initialised from the weights (`DoRA`).
    pub(super) fn reads_weights(&self) -> bool {
        match &self.init {
            AdapterInit::Full { .. } => false,
            AdapterInit::RandomInit { targets, .. } => targets.iter().any(|target| target.is_dora),
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
    pub fn loaded(given: HashMap<String, LoraWeights>) -> Self {
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
            unused,
            excluded: left_out,
            modules,
        }
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
        let is_left_out = is_known && !target.is_dora;
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
                // Counts excluded layers too, so that the others are initialised the same without them.
                let index = (self.layers.len() + self.excluded.len()) as u64;
                let sequence = RandomSequence::new(*seed, index);
                target
                    .map(|target| {
                        AdapterTensors::random_init(device, target, weight, sizes, sequence)
                    })
                    .transpose()
            }
            AdapterInit::Loaded(given) => given
                .get(module)
                .map(|given| AdapterTensors::loaded(device, given, weight, sizes))
                .transpose(),
            AdapterInit::Full { .. } => Ok(None),
        })?;
        let Some(AdapterTensors { rank, alpha, dropout, down, up, magnitude }) = made else {
            return Ok(None);
        };
        let (down, up) = (self.params.add(down), self.params.add(up));
        let magnitude = magnitude
            .map(|(trained, norms)| DoraMagnitude { trained: self.params.add(trained), norms });
        // Norms of frozen weights are frozen too.
        if let Some(DoraMagnitude { norms, .. }) = &magnitude {
            norms.set_tag(Tag::Weights);
        }
        let trained = magnitude.as_ref().map(|magnitude| magnitude.trained);
        let module = module.to_owned();
        self.layers.push(AdaptedLayer { module, rank, alpha, down, up, magnitude: trained });
        Ok(Some(LayerAdapter { down, up, scale: alpha / rank as f32, dropout, magnitude }))
    }

    /// Checks that every target and every loaded adapter found its layer: one that is attached to nothing
    /// would train nothing.
    pub fn check_all_used(&self, path: &Path) -> Result<()> {
        let has = |module: &str| self.layers.iter().any(|layer| layer.module == module);
        let unused: Vec<&str> = match &self.init {
            AdapterInit::RandomInit { targets, exclude, .. } => {
                let layers = self.layers.iter().map(|layer| &layer.module).chain(&self.excluded);
                let layers: Vec<&String> = layers.collect();
                let is_used =
                    |pattern: &str| layers.iter().any(|layer| name_matches(pattern, layer));
                let of_model: Vec<&String> = self.modules.iter().chain(&self.excluded).collect();
                if let Some(target) = targets.iter().find(|target| !is_used(&target.pattern)) {
                    let none = "no layer of the model";
                    return Err(no_layer(&target.pattern, "adapter.targets", none, &of_model));
                }
                let mut exclude = exclude.iter().filter(|pattern| *pattern != UNUSED);
                let Some(pattern) = exclude.find(|pattern| !is_used(pattern)) else {
                    return Ok(());
                };
                let none = "no layer that a target names";
                return Err(no_layer(pattern, "adapter.exclude", none, &layers));
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
    down: Tensor,
    up: Tensor,
    /// With the row norms of the frozen matrix.
    magnitude: Option<(Tensor, Tensor)>,
}

impl AdapterTensors {
    /// As the reference scripts initialise: `down` normal with std 1 / rank, `up` zeros, magnitudes the
    /// row norms.
    fn random_init(
        device: &Device,
        target: &AdapterTarget,
        weight: &WeightTensor,
        [outputs, inputs]: [usize; 2],
        sequence: RandomSequence,
    ) -> Result<Self> {
        let AdapterTarget { rank, alpha, dropout, .. } = *target;
        let std = 1.0 / rank as f32;
        let norms =
            || Ok::<_, TrainerError>((row_norms(weight.into())?, row_norms(weight.into())?));
        let magnitude = target.is_dora.then(norms);
        Ok(Self {
            rank,
            alpha,
            dropout,
            down: device.normal([rank, inputs], Dtype::F32, std, sequence)?,
            up: device.zeros([outputs, rank], Dtype::F32)?,
            magnitude: magnitude.transpose()?,
        })
    }

    fn loaded(
        device: &Device,
        given: &LoraWeights,
        weight: &WeightTensor,
        [outputs, inputs]: [usize; 2],
    ) -> Result<Self> {
        let LoraWeights { rank, alpha, down, up, magnitude } = given;
        let upload = |magnitude: &Vec<f32>| {
            Ok::<_, TrainerError>((device.upload([outputs], magnitude)?, row_norms(weight.into())?))
        };
        Ok(Self {
            rank: *rank,
            alpha: *alpha,
            dropout: 0.0,
            down: device.upload([*rank, inputs], down)?,
            up: device.upload([outputs, *rank], up)?,
            magnitude: magnitude.as_ref().map(upload).transpose()?,
        })
    }
}
